"""`harmony-planner`: plan, verify, simulate, show, compare, calibrate.

Results for people on stdout, progress on stderr. Exit status 0; 1 where a check that was asked for does not
hold; 2 for bad input or an infeasible problem, with one line on stderr.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as ProgressBar

from planner import render
from planner.compare import Comparison, compare
from planner.contract import store
from planner.contract.errors import FormatError, InfeasibleError, VerifyError
from planner.contract.hardware import Hardware, budget_bytes
from planner.contract.output import STANDARD, check_outputs, write_whole
from planner.contract.profile import Profile
from planner.contract.schedule import Schedule
from planner.contract.trace import Trace
from planner.contract.units import format_bytes, format_seconds, parse_bytes
from planner.contract.verify import verify

if TYPE_CHECKING:
    from planner.baselines import Baseline
    from planner.explain import Answer
    from planner.search import Result

MODES = ("any", "pp", "dp", "hybrid")

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""What typer raises for options that do not exist or do not parse; it has no public name of its own."""

app = typer.Typer(
    name="harmony-planner",
    help="Plan how to train a network that is larger than GPU memory; files in, files out, no GPU needed.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ProfileFile = Annotated[
    str, typer.Argument(metavar="PROFILE", help="What each layer costs; - reads standard input.")
]
HardwareFile = Annotated[
    str, typer.Argument(metavar="HARDWARE", help="Devices, links and host; - reads standard input.")
]
ScheduleFile = Annotated[str, typer.Argument(metavar="SCHEDULE", help="A schedule; - reads standard input.")]
Memory = Annotated[
    str | None, typer.Option("--memory", metavar="SIZE", help="Use this memory for every device, e.g. 16GiB.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Output = Annotated[
    str | None, typer.Option("-o", "--output", metavar="PATH", help="Where to write; - is standard output.")
]


@app.command("plan")
def plan_command(
    profile_file: ProfileFile,
    hardware_file: HardwareFile,
    minibatch: Annotated[
        int, typer.Option("--minibatch", min=1, metavar="SAMPLES", help="Samples of one iteration.")
    ],
    mode: Annotated[str, typer.Option("--mode", help=f"One of {', '.join(MODES)}.")] = "any",
    activations: Annotated[
        str,
        typer.Option(
            "--activations", help="recompute: always; any: also keep them on the device or offload them."
        ),
    ] = "any",
    updates: Annotated[
        str,
        typer.Option(
            "--updates", help="host: always there; any: also on the device, of weights that stay there."
        ),
    ] = "any",
    clip: Annotated[
        bool, typer.Option("--clip", help="For clipping by global norm: updates wait for all gradients.")
    ] = False,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, metavar="N", help="Use the first N devices.")
    ] = None,
    memory: Memory = None,
    fixed: Annotated[
        str | None,
        typer.Option(
            "--fixed", metavar="CONFIG", help="Do not search: this plan, a harmony-fixed file or a schedule."
        ),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", min=1, metavar="K", help="The K best plans of different kinds.")
    ] = 1,
    explain: Annotated[
        bool, typer.Option("--explain", help="Where the time goes, and what another server would change.")
    ] = False,
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Compare with virtualised memory: dp-swap and pp-swap.")
    ] = False,
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", min=0.0, metavar="SECONDS", help="Search no longer than this."),
    ] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Find the fastest schedule, with the time and memory it needs and a proven lower bound."""
    if mode not in MODES:
        raise FormatError(f"--mode {mode}: use one of {', '.join(MODES)}")
    _check_output(output, as_json)
    _check_one_standard_input(profile_file, hardware_file)
    profile = store.load_profile(profile_file)
    hardware = _with_memory(store.load_hardware(hardware_file), memory)
    # numpy and the solver load with the search: the other commands start without them
    from planner.explain import what_if
    from planner.search import plan, plan_fixed

    answers: list[Answer] = []
    with _progress() as report:
        if fixed is not None:
            given = store.load_fixed(fixed)
            try:
                result = plan_fixed(
                    profile, hardware, given, minibatch=minibatch, clip=clip, num_devices=devices
                )
            except FormatError as error:
                raise FormatError(f"{fixed}: {error}") from None
        else:
            result = plan(
                profile,
                hardware,
                minibatch=minibatch,
                mode=mode,
                activations=activations,
                updates=updates,
                clip=clip,
                num_devices=devices,
                top=top,
                time_limit_seconds=time_limit,
                progress=report,
            )
        if result.schedule is None:
            raise InfeasibleError(result.reason)
        if explain:
            answers = what_if(
                profile, hardware, minibatch, devices or len(hardware.devices), time_limit, clip
            )
    if output is not None:
        store.save(result.schedule, output)
    compared = _baselines(profile, hardware, minibatch, devices) if baselines else []
    if as_json:
        _print_json(_plan_json(result, answers, compared))
        return
    parts = [render.plan_result(result)]
    if explain:
        parts.append(render.explanation(result, answers))
    if compared:
        parts.append(render.baselines(result.schedule, compared))
    for part in parts:
        _show(part, to_stderr=output == STANDARD)


@app.command("frontier")
def frontier_command(
    profile_file: ProfileFile,
    hardware_file: HardwareFile,
    minibatch: Annotated[
        str, typer.Option("--minibatch", metavar="SAMPLES,..", help="Minibatches, separated by commas.")
    ],
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE,..", help="Memory of each device, e.g. 8GiB,16GiB.")
    ] = "",
    devices: Annotated[
        str, typer.Option("--devices", metavar="N,..", help="How many of the devices, e.g. 1,2,4.")
    ] = "",
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit", min=0.0, metavar="SECONDS", help="Search each point no longer than this."
        ),
    ] = None,
    picture: Annotated[str | None, typer.Option("--picture", metavar="PNG", help="Draw the curves.")] = None,
    as_json: Json = False,
) -> None:
    """Iteration time over memory, devices and minibatches: what another server would do."""
    check_outputs(picture)
    minibatches = _numbers("--minibatch", minibatch)
    _check_one_standard_input(profile_file, hardware_file)
    profile, hardware = store.load_profile(profile_file), store.load_hardware(hardware_file)
    memories = [parse_bytes(text) for text in _parts(memory)] if memory else []
    for size in memories:
        _with_memory(hardware, f"{size}B")
    from planner.frontier import frontier

    with _progress() as report:
        points = frontier(
            profile,
            hardware,
            memories=memories,
            devices=_numbers("--devices", devices) if devices else [],
            minibatches=minibatches,
            time_limit_seconds=time_limit,
            progress=report,
        )
    if picture is not None:
        from planner.picture import frontier_png

        write_whole(picture, frontier_png(points))
    if as_json:
        _print_json([asdict(point) for point in points])
    else:
        _show(render.frontier_table(points))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _numbers(option: str, text: str) -> list[int]:
    """`1,2,4`. Raises FormatError."""
    parts = _parts(text)
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise FormatError(f"{option} {text!r}: no list of numbers; write 1,2,4")
    return [int(part) for part in parts]


def _baselines(profile: Profile, hardware: Hardware, minibatch: int, devices: int | None) -> list[Baseline]:
    from planner.baselines import dp_swap, pp_swap
    from planner.search.problem import Problem

    problem = Problem(profile, hardware, minibatch, devices or len(hardware.devices))
    return [baseline for baseline in (dp_swap(problem), pp_swap(problem)) if baseline is not None]


@app.command("verify")
def verify_command(
    schedule_file: ScheduleFile,
    profile_file: ProfileFile,
    hardware_file: HardwareFile,
    memory: Memory = None,
    as_json: Json = False,
) -> None:
    """Check a schedule against its profile and a hardware; exit status 1 where it breaks a rule or does not fit."""
    _check_one_standard_input(schedule_file, profile_file, hardware_file)
    schedule, profile = store.load_schedule(schedule_file), store.load_profile(profile_file)
    hardware = _with_memory(store.load_hardware(hardware_file), memory)
    try:
        peaks = verify(schedule, profile, hardware)
    except (VerifyError, InfeasibleError) as fault:
        if as_json:
            _print_json({"holds": False, "fault": str(fault)})
        _complain(f"does not hold: {fault}")
        raise typer.Exit(1) from None
    if as_json:
        _print_json({"holds": True, "peaks": [{"bytes": peak.nbytes, "where": peak.where} for peak in peaks]})
        return
    for i, peak in enumerate(peaks):
        limit = budget_bytes(hardware.devices[i])
        typer.echo(f"gpu{i}: at most {format_bytes(peak.nbytes)} of {format_bytes(limit)}, at {peak.where}")
    typer.echo("holds: every rule, and the memory of each device and of the host whatever the timing")


@app.command("simulate")
def simulate_command(
    schedule_file: ScheduleFile,
    profile_file: ProfileFile,
    hardware_file: HardwareFile,
    memory: Memory = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Replay a schedule in simulated time; the trace opens in Perfetto."""
    _check_output(output, as_json)
    _check_one_standard_input(schedule_file, profile_file, hardware_file)
    schedule, profile = store.load_schedule(schedule_file), store.load_profile(profile_file)
    hardware = _with_memory(store.load_hardware(hardware_file), memory)
    # a schedule that breaks a rule has no time: say what it breaks instead
    verify(schedule, profile, hardware)
    from planner.simulate import simulate

    trace = simulate(schedule, profile, hardware)
    if output is not None:
        store.save(trace, output)
    if as_json:
        _print_json(
            {
                "iteration_seconds": trace.iteration_seconds[0],
                "samples_per_second": trace.samples_per_iteration / trace.iteration_seconds[0],
                "devices": [msgspec.to_builtins(device) for device in trace.devices],
            }
        )
        return
    seconds = trace.iteration_seconds[0]
    line = f"{format_seconds(seconds)} an iteration, {trace.samples_per_iteration / seconds:.4g} samples/s"
    typer.echo(line, err=output == STANDARD)


@app.command("show")
def show_command(schedule_file: ScheduleFile, as_json: Json = False) -> None:
    """Print a schedule: configuration, packs, and its program in short."""
    schedule = store.load_schedule(schedule_file)
    if as_json:
        _print_json(_schedule_json(schedule))
    else:
        _show(render.schedule_summary(schedule))


@app.command("calibrate")
def calibrate_command(
    profile_file: ProfileFile,
    schedule_file: ScheduleFile,
    trace_file: Annotated[
        str, typer.Argument(metavar="TRACE", help="Of a run of the schedule; - reads standard input.")
    ],
    output: Output = None,
    hardware_output: Annotated[
        str | None,
        typer.Option("--hardware-output", metavar="PATH", help="Where to write the links as measured."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Correct a profile and links by a run's trace, so that the next plan is nearer to the truth."""
    _check_output(output, as_json)
    check_outputs(output, hardware_output)
    _check_one_standard_input(profile_file, schedule_file, trace_file)
    profile, schedule = store.load_profile(profile_file), store.load_schedule(schedule_file)
    from planner.calibrate import calibrate

    found = calibrate(profile, schedule, store.load_trace(trace_file))
    if output is not None:
        store.save(found.profile, output)
    if hardware_output is not None:
        store.save(found.hardware, hardware_output)
    if as_json:
        _print_json(
            {
                "planned_seconds": found.planned_seconds,
                "measured_seconds": found.measured_seconds,
                "corrected_seconds": found.corrected_seconds,
                "factors": [asdict(factors) for factors in found.factors],
            }
        )
    else:
        _show(render.calibration(found, profile), to_stderr=output == STANDARD)


@app.command("compare")
def compare_command(
    planned_file: Annotated[
        str, typer.Argument(metavar="PLANNED", help="A schedule, or its simulated trace.")
    ],
    measured_file: Annotated[
        str, typer.Argument(metavar="MEASURED", help="The trace of a run; - reads standard input.")
    ],
    tolerance: Annotated[
        str, typer.Option("--tolerance", metavar="SHARE", help="Largest difference of the iteration time.")
    ] = "5%",
    picture: Annotated[
        str | None,
        typer.Option("--picture", metavar="PNG", help="Draw both timelines; needs a trace as PLANNED."),
    ] = None,
    schedule_file: Annotated[
        str | None,
        typer.Option("--schedule", metavar="SCHEDULE", help="Draw the memory limits of this schedule too."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare what was planned with what was measured; exit status 1 where the plan does not hold."""
    share = parse_share(tolerance)
    check_outputs(picture)
    if schedule_file is not None and picture is None:
        raise FormatError(f"--schedule {schedule_file}: only with --picture, which draws its memory limits")
    planned = store.load_schedule_or_trace(planned_file)
    measured = store.load_trace(measured_file)
    comparison = compare(planned, measured)
    if picture is not None:
        if isinstance(planned, Schedule):
            raise FormatError(
                f"--picture {picture}: a schedule has no times; simulate it and compare its trace"
            )
        _draw(planned, measured, schedule_file, picture)
    if as_json:
        _print_json(_comparison_json(comparison, share))
    else:
        _show(render.comparison_result(comparison, share))
    if not comparison.holds(share):
        raise typer.Exit(1)


def parse_share(text: str) -> float:
    """`5%` or `0.05`. Raises FormatError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", text.strip())
    if match is None:
        raise FormatError(f"--tolerance {text!r}: no share; write 5% or 0.05")
    return float(match[1]) / (100 if match[2] else 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    try:
        status = app(args=arguments, standalone_mode=False)
    except UsageError as error:
        message: str = getattr(error, "format_message", lambda: "")()
        return _refuse(message or "no command given")
    except BrokenPipeError:
        # the reader of our output has gone; nothing of it may be flushed at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except ValueError as error:
        return _refuse(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _refuse("interrupted")
    return status if isinstance(status, int) else 0


# ---- input


def _check_one_standard_input(*files: str) -> None:
    if files.count(STANDARD) > 1:
        raise FormatError("-: standard input holds one file; name the others")


def _check_output(output: str | None, as_json: bool) -> None:
    check_outputs(output)
    if output == STANDARD and as_json:
        raise FormatError("-o - and --json both write to standard output; choose one")


def _with_memory(hardware: Hardware, memory: str | None) -> Hardware:
    """The hardware with other devices' memory; what is reserved on them stays reserved."""
    if memory is None:
        return hardware
    size = parse_bytes(memory)
    for device in hardware.devices:
        if size <= device.reserved_bytes:
            raise FormatError(
                f"--memory {memory}: {size} bytes of which {device.reserved_bytes} are reserved on {device.name} leave nothing"
            )
    devices = tuple(msgspec.structs.replace(device, memory_bytes=size) for device in hardware.devices)
    return msgspec.structs.replace(hardware, devices=devices)


# ---- output


@contextmanager
def _progress() -> Iterator[Callable[[Any], None] | None]:
    """A bar on stderr where that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("searching"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[best]}"))
    with ProgressBar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("searching", total=None, best="")

        def report(progress: Any) -> None:
            best = "" if progress.best_seconds is None else f"best {format_seconds(progress.best_seconds)}"
            bar.update(task, completed=progress.done, total=progress.total, best=best)

        yield report


def _show(renderable: RenderableType, to_stderr: bool = False) -> None:
    console = Console(stderr=to_stderr, highlight=False)
    if not console.is_terminal:
        # no terminal, no width: a file or a pipe gets whole lines
        console = Console(stderr=to_stderr, highlight=False, width=200)
    console.print(renderable)


def _print_json(result: object) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(result), indent=1).decode())


def _complain(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    typer.echo(f"harmony-planner: {' '.join(message.split())}", err=True)


def _refuse(message: str) -> int:
    _complain(message)
    return 2


def _draw(planned: Trace, measured: Trace, schedule_file: str | None, picture: str) -> None:
    limits: tuple[int, ...] = ()
    if schedule_file is not None:
        limits = tuple(budget_bytes(device) for device in store.load_schedule(schedule_file).hardware.devices)
    # matplotlib takes a second to load, and only this needs it
    from planner.picture import timeline_png

    write_whole(picture, timeline_png(planned, measured, limits))


def _schedule_json(schedule: Schedule) -> dict[str, Any]:
    return {
        "model": schedule.profile.model.name,
        "configuration": msgspec.to_builtins(schedule.configuration),
        "predicted": msgspec.to_builtins(schedule.predicted),
        "limit_bytes": [budget_bytes(device) for device in schedule.hardware.devices],
        "schedule_hash": store.schedule_hash(schedule),
    }


def _plan_json(result: Result, answers: Sequence[Answer], compared: Sequence[Baseline]) -> dict[str, Any]:
    assert result.schedule is not None
    predicted = result.schedule.predicted
    found = _schedule_json(result.schedule) | {
        "gap": render.gap(predicted.iteration_seconds, predicted.lower_bound_seconds),
        "limited_by": result.limits,
        "search_seconds": result.search_seconds,
        "num_candidates": result.num_candidates,
        "critical_path_seconds": result.critical_path,
    }
    if result.others:
        found["others"] = [_schedule_json(schedule) for schedule in result.others]
    if answers:
        found["what_if"] = [asdict(answer) for answer in answers]
    if compared:
        found["baselines"] = [asdict(baseline) for baseline in compared]
    return found


def _comparison_json(comparison: Comparison, tolerance: float) -> dict[str, Any]:
    faults = comparison.faults(tolerance)
    figures: dict[str, Any] = msgspec.to_builtins(comparison)
    return {"holds": not faults, "faults": faults, "tolerance": tolerance} | figures
