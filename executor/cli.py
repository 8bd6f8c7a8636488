"""`harmony-executor`: profile a model, describe a machine, run a schedule.

Results for people on stdout, progress on stderr. Exit status 0; 1 where a run fails (out of memory in one line,
anything else with its traceback); 2 for bad input, with one line on stderr.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import msgspec
import typer

from executor import render, terminal
from planner.contract import hardware as hardwares
from planner.contract import store
from planner.contract.errors import FormatError, HarmonyError
from planner.contract.hardware import Hardware
from planner.contract.output import STANDARD, check_outputs
from planner.contract.schedule import Samples, Schedule
from planner.contract.units import format_seconds, parse_bytes, parse_rate

if TYPE_CHECKING:
    from executor.hardware import Sharing

DEVICES = ("virtual", "cuda")
SHARINGS = ("none", "fair", "static")
DEFAULT_OPTIMIZER = "adamw"

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""What typer raises for options that do not exist or do not parse; it has no public name of its own."""

# torch takes seconds to load: each command imports what it needs, so that --help and bad input answer at once
app = typer.Typer(
    name="harmony-executor",
    help="Measure a model and a machine, and train by a schedule; files in, files out.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    no_args_is_help=True,
)

DeviceOption = Annotated[
    str, typer.Option("--device", metavar="KIND", help="virtual (the CPU as an accelerator) or cuda.")
]
Optimizer = Annotated[
    str | None,
    typer.Option("--optimizer", metavar="NAME", help="One of torch.optim's, e.g. adamw, adam, sgd."),
]
LearningRate = Annotated[float, typer.Option("--lr", metavar="RATE", help="The optimizer's learning rate.")]
WeightDecay = Annotated[
    float | None,
    typer.Option("--weight-decay", metavar="X", help="The optimizer's; torch's default where not given."),
]
Momentum = Annotated[
    float | None, typer.Option("--momentum", metavar="X", help="SGD's; the same when profiling and running.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of weights, batches and dropout.")]
Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="PATH", help="A text file, or a folder of them, for hf: models."),
]
LayerPatterns = Annotated[
    list[str] | None,
    typer.Option(
        "--layers", metavar="PATTERN", help="Modules that are layers, e.g. transformer.h.*; repeat for more."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Output = Annotated[
    str | None, typer.Option("-o", "--output", metavar="PATH", help="Where to write; - is standard output.")
]
Size = str | None


@app.command("profile")
def profile_command(
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="SPEC", help="hf:NAME?key=value, path/to/file.py:function or module:function."
        ),
    ],
    microbatches: Annotated[
        str, typer.Option("--microbatches", metavar="N,N,...", help="Microbatch sizes to measure.")
    ] = "1,2,4,8",
    device: DeviceOption = "virtual",
    optimizer: Optimizer = DEFAULT_OPTIMIZER,
    lr: LearningRate = 1e-3,
    weight_decay: WeightDecay = None,
    momentum: Momentum = None,
    layers: LayerPatterns = None,
    repeats: Annotated[int, typer.Option("--repeats", min=2, help="Runs of which the median counts.")] = 5,
    seed: Seed = 0,
    data: Data = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure what each layer of a model costs: seconds and bytes, forward, backward and update."""
    sizes = _parse_sizes(microbatches)
    _check_device(device)
    _check_output(output, as_json)
    from executor.models import load_workload
    from executor.profile import measure_profile

    workload = load_workload(model, seed=seed, data=data)
    with terminal.progress("measuring layers") as advance:
        profile = measure_profile(
            workload,
            model,
            sizes,
            optimizer=optimizer or DEFAULT_OPTIMIZER,
            settings=_settings(lr, weight_decay, momentum),
            patterns=tuple(layers or ()),
            repeats=repeats,
            device="cuda" if device == "cuda" else "cpu",
            device_name=_device_name(device),
            progress=lambda done, total: advance(done, total, ""),
        )
    if output is not None:
        store.save(profile, output)
    if as_json:
        terminal.print_json(render.profile_json(profile))
    else:
        terminal.show(render.profile_table(profile), to_stderr=output == STANDARD)


@app.command("hardware")
def hardware_command(
    device: DeviceOption = "virtual",
    devices: Annotated[
        int | None,
        typer.Option("--devices", min=1, metavar="N", help="How many; all GPUs, or 1 virtual device."),
    ] = None,
    memory: Annotated[
        Size,
        typer.Option(
            "--memory", metavar="SIZE", help="Of each device, e.g. 200MiB; for cuda a limit below its own."
        ),
    ] = None,
    reserved: Annotated[
        Size, typer.Option("--reserved", metavar="SIZE", help="Of that, not for the plan; for cuda measured.")
    ] = None,
    h2d: Annotated[
        Size, typer.Option("--h2d", metavar="RATE", help="Host to device, e.g. 500MB/s; for cuda measured.")
    ] = None,
    d2h: Annotated[Size, typer.Option("--d2h", metavar="RATE", help="Device to host.")] = None,
    latency: Annotated[
        float, typer.Option("--latency", min=0.0, metavar="SECONDS", help="Of each copy.")
    ] = 0.0,
    sharing: Annotated[
        str, typer.Option("--sharing", help="How devices share the host link: none, fair or static.")
    ] = "none",
    peer: Annotated[
        Size,
        typer.Option("--peer", metavar="RATE", help="Device to device; through the host where not given."),
    ] = None,
    compute_scale: Annotated[
        str,
        typer.Option(
            "--compute-scale",
            metavar="X,X,...",
            help="Speed relative to the profile's device, one or one each.",
        ),
    ] = "1",
    host_memory: Annotated[
        Size, typer.Option("--host-memory", metavar="SIZE", help="This machine's where not given.")
    ] = None,
    pinnable: Annotated[
        Size, typer.Option("--pinnable", metavar="SIZE", help="Of that, what can be pinned.")
    ] = None,
    update_workers: Annotated[
        int | None,
        typer.Option(
            "--update-workers", min=1, metavar="N", help="Host updates that run at once at full speed."
        ),
    ] = None,
    name: Annotated[str, typer.Option("--name", help="What to call it.")] = "",
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Describe a machine: a virtual one as asked for (its links are checked by copying), or the GPUs as they measure."""
    _check_device(device)
    _check_output(output, as_json)
    if device == "cuda":
        from executor.hardware import cuda_hardware

        found = _limited(cuda_hardware(devices, name), memory)
    else:
        if sharing not in SHARINGS:
            raise FormatError(f"--sharing {sharing}: use one of {', '.join(SHARINGS)}")
        asked = {"--memory": memory, "--h2d": h2d, "--d2h": d2h}
        missing = [option for option, text in asked.items() if text is None]
        if missing:
            raise FormatError(
                f"--device virtual: {', '.join(missing)} missing; say e.g. --memory 200MiB --h2d 500MB/s --d2h 500MB/s"
            )
        from executor.hardware import virtual_hardware

        found = virtual_hardware(
            devices or 1,
            parse_bytes(memory or ""),
            h2d_bytes_per_second=parse_rate(h2d or ""),
            d2h_bytes_per_second=parse_rate(d2h or ""),
            latency_seconds=latency,
            sharing=cast("Sharing", sharing),
            peer_bytes_per_second=None if peer is None else parse_rate(peer),
            compute_scales=_parse_scales(compute_scale),
            reserved_bytes=0 if reserved is None else parse_bytes(reserved),
            host_memory_bytes=None if host_memory is None else parse_bytes(host_memory),
            pinnable_bytes=None if pinnable is None else parse_bytes(pinnable),
            update_workers=update_workers,
            name=name or "virtual",
        )
        _warn_of_slow_links(found)
    if output is not None:
        store.save(found, output)
    if as_json:
        terminal.print_json(msgspec.to_builtins(found))
    else:
        terminal.show(render.hardware_table(found), to_stderr=output == STANDARD)


@app.command("run")
def run_command(
    schedule_file: Annotated[
        str | None,
        typer.Argument(
            metavar="SCHEDULE", help="What to run; - reads standard input. May be left out with --plain."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="SPEC", help="The planned one where not given.")
    ] = None,
    device: DeviceOption = "virtual",
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Iterations; the first one is a warm-up.")
    ] = 10,
    optimizer: Optimizer = None,
    lr: LearningRate = 1e-3,
    weight_decay: WeightDecay = None,
    momentum: Momentum = None,
    seed: Seed = 0,
    data: Data = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Train without the schedule, all of it on one device.")
    ] = False,
    budget: Annotated[
        Size, typer.Option("--budget", metavar="SIZE", help="With --plain: the device's memory.")
    ] = None,
    minibatch: Annotated[
        int | None,
        typer.Option(
            "--minibatch", min=1, metavar="SAMPLES", help="With --plain: the schedule's where not given."
        ),
    ] = None,
    microbatch: Annotated[
        int | None,
        typer.Option(
            "--microbatch", min=1, metavar="SAMPLES", help="With --plain: the schedule's where not given."
        ),
    ] = None,
    unpaced: Annotated[
        bool, typer.Option("--unpaced", help="Virtual devices run as fast as they can.")
    ] = False,
    weights_out: Annotated[
        Path | None,
        typer.Option("--weights-out", metavar="PATH", help="Write the trained weights (safetensors)."),
    ] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Train by a schedule and record what ran when."""
    _check_device(device)
    _check_output(output, as_json)
    check_outputs(weights_out)
    settings = _settings(lr, weight_decay, momentum)
    if not plain:
        for option, given in (("--budget", budget), ("--minibatch", minibatch), ("--microbatch", microbatch)):
            if given is not None:
                raise FormatError(f"{option} {given}: only with --plain; a schedule says it itself")
        if schedule_file is None:
            raise FormatError("no SCHEDULE; plan one, or train with --plain --model SPEC --minibatch SAMPLES")
    schedule = None if schedule_file is None else store.load_schedule(schedule_file)
    spec = model or (schedule.profile.model.spec if schedule is not None else "")
    if not spec:
        raise FormatError(
            "--model is missing" + ("" if schedule is None else "; the schedule's profile names none")
        )
    limit = None if budget is None else parse_bytes(budget)
    samples = _plain_samples(schedule, minibatch, microbatch) if plain else ()
    from executor.launch import run_schedule
    from executor.options import RunOptions
    from executor.plain import run_plain
    from executor.replay import Aborted

    options = RunOptions(
        model=spec,
        device=cast(Literal["virtual", "cuda"], device),
        steps=steps,
        optimizer=optimizer or (schedule.profile.optimizer if schedule is not None else DEFAULT_OPTIMIZER),
        settings=settings,
        seed=seed,
        data=data,
        paced=not unpaced,
    )
    num_samples = samples[-1][1] if plain or schedule is None else schedule.configuration.minibatch
    with terminal.iterations(steps, num_samples) as note:
        if plain:
            trace = run_plain(
                schedule,
                options,
                samples,
                budget_bytes=limit,
                trace_path=output,
                weights_out=weights_out,
                progress=note,
            )
        else:
            assert schedule is not None
            try:
                trace = run_schedule(
                    schedule, options, trace_path=output, weights_out=weights_out, progress=note
                )
            except Aborted:
                # under torchrun: the rank that failed says why
                raise typer.Exit(1) from None
    if not _is_first_rank():
        return
    if as_json:
        terminal.print_json(render.trace_json(trace))
    else:
        for line in render.trace_lines(trace, None if plain else schedule, limit):
            typer.echo(line, err=output == STANDARD)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    status = _run(arguments)
    if "RANK" in os.environ and status:
        # a failed rank of torchrun's: threads may hang in a transfer with another one
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _run(arguments: Sequence[str] | None) -> int:
    try:
        status = app(args=arguments, standalone_mode=False)
    except UsageError as error:
        # it names the option; without a command the message is the whole help
        message = str(cast(Any, error).format_message())
        return _refuse(message if "\n" not in message else "no command; --help lists them")
    except BrokenPipeError:
        # the reader of our output has gone; nothing of it may be flushed at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except HarmonyError as error:
        return _refuse(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _refuse("interrupted")
    except RuntimeError as error:
        return _fail(error)
    return status if isinstance(status, int) else 0


def _fail(error: RuntimeError) -> int:
    """A run that failed: out of memory in one line, a rank's bug with its traceback, any other as Python shows it."""
    import torch

    from executor.launch import RunError

    if isinstance(error, torch.OutOfMemoryError):
        terminal.complain(f"out of memory: {error}")
    elif isinstance(error, RunError):
        typer.echo(f"harmony-executor: {error}", err=True)
    else:
        raise error
    return 1


# ---- input


def _parse_sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise FormatError(f"--microbatches {text!r}: sizes look like 1,2,4,8")
    return [int(part) for part in parts]


def _parse_scales(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise FormatError(f"--compute-scale {text!r}: speeds look like 1 or 1,0.5") from None


def _check_device(device: str) -> None:
    if device not in DEVICES:
        raise FormatError(f"--device {device}: use one of {', '.join(DEVICES)}")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise HarmonyError("--device cuda: torch sees no GPU here; use --device virtual")


def _check_output(output: str | None, as_json: bool) -> None:
    check_outputs(output)
    if output == STANDARD and as_json:
        raise FormatError("-o - and --json both write to standard output; choose one")


def _settings(lr: float, weight_decay: float | None, momentum: float | None) -> dict[str, Any]:
    """The optimizer's arguments by torch.optim's names; what is not given is torch's to choose."""
    given = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
    for key, value in given.items():
        if value is not None and not 0 <= value < math.inf:
            raise FormatError(f"--{key.replace('_', '-')} {value}: must be finite and 0 or more")
    return {key: value for key, value in given.items() if value is not None}


def _plain_samples(
    schedule: Schedule | None, minibatch: int | None, microbatch: int | None
) -> tuple[Samples, ...]:
    """The microbatches of plain training: the schedule's backward ones, or as asked for."""
    if schedule is not None and minibatch is None and microbatch is None:
        return schedule.configuration.microbatches.backward
    if minibatch is None and schedule is None:
        raise FormatError("--plain: --minibatch is missing; it is how many samples an iteration has")
    total = minibatch or (schedule.configuration.minibatch if schedule is not None else 0)
    from executor.reference import even_microbatches

    return even_microbatches(total, microbatch or total)


def _limited(hardware: Hardware, memory: str | None) -> Hardware:
    """GPUs of which only a part is used."""
    if memory is None:
        return hardware
    size = parse_bytes(memory)
    for device in hardware.devices:
        if size > device.memory_bytes:
            raise FormatError(
                f"--memory {memory}: {device.name} has {device.memory_bytes} bytes; a limit is below that"
            )
    devices = tuple(msgspec.structs.replace(device, memory_bytes=size) for device in hardware.devices)
    limited = msgspec.structs.replace(hardware, devices=devices)
    hardwares.check(limited)
    return limited


def _device_name(device: str) -> str:
    if device == "virtual":
        return device
    import torch

    return torch.cuda.get_device_name(0)


def _warn_of_slow_links(hardware: Hardware) -> None:
    from executor.hardware import TOLERANCE, check_links

    for check in check_links(hardware):
        if abs(check.error) > TOLERANCE:
            terminal.complain(
                f"warning: {check.direction} of device {check.device} takes {format_seconds(check.measured_seconds)} where "
                f"its rate says {format_seconds(check.expected_seconds)} ({check.error:+.0%}); ask for slower links"
            )


# ---- output


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _refuse(message: str) -> int:
    terminal.complain(message)
    return 2
