"""`harmony-planner plan` and `frontier`: what is fastest, here and on other servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from planner import render
from planner.commands.options import (
    HardwareFile,
    Json,
    Memory,
    Output,
    ProfileFile,
    check_file,
    check_one_standard_input,
    check_output,
    print_json,
    progress,
    show,
    with_memory,
)
from planner.commands.show import schedule_json
from planner.contract import store
from planner.contract.errors import FormatError, InfeasibleError
from planner.contract.hardware import Hardware
from planner.contract.hardware import check as check_hardware
from planner.contract.output import STANDARD, check_outputs, write_whole
from planner.contract.profile import Profile
from planner.contract.schedule import MAX_SERVERS
from planner.contract.units import parse_bytes, parse_rate

if TYPE_CHECKING:
    from planner.baselines import Baseline
    from planner.explain import Answer
    from planner.search import Result

MODES = ("any", "pp", "dp", "hybrid")


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
    nodes: Annotated[
        int,
        typer.Option(
            "--nodes",
            min=1,
            max=MAX_SERVERS,
            metavar="N",
            help="Servers like this one that share the minibatch.",
        ),
    ] = 1,
    network: Annotated[
        str | None,
        typer.Option("--network", metavar="RATE", help="Between the servers, each way, e.g. 1.2GB/s."),
    ] = None,
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
    check_output(output, as_json, profile_file, hardware_file, fixed)
    check_one_standard_input(profile_file, hardware_file)
    profile = store.load_profile(profile_file)
    hardware = _with_network(with_memory(store.load_hardware(hardware_file), memory), nodes, network)
    if baselines and nodes > 1:
        raise FormatError(f"--baselines: of one server; leave out --nodes {nodes}")
    # numpy and the solver load with the search: the other commands start without them
    from planner.explain import what_if
    from planner.search import plan, plan_fixed

    answers: list[Answer] = []
    with progress() as report:
        if fixed is not None:
            given = store.load_fixed(fixed)
            try:
                result = plan_fixed(
                    profile,
                    hardware,
                    given,
                    minibatch=minibatch,
                    clip=clip,
                    num_devices=devices,
                    num_servers=nodes,
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
                num_servers=nodes,
                top=top,
                time_limit_seconds=time_limit,
                progress=report,
            )
        if result.schedule is None:
            raise InfeasibleError(result.reason)
        if explain:
            answers = what_if(
                profile, hardware, minibatch, devices or len(hardware.devices), time_limit, clip, nodes
            )
    if output is not None:
        store.save(result.schedule, output)
    compared = _baselines(profile, hardware, minibatch, devices) if baselines else []
    if as_json:
        print_json(_plan_json(result, answers, compared))
        return
    parts = [render.plan_result(result)]
    if explain:
        parts.append(render.explanation(result, answers))
    if compared:
        parts.append(render.baselines(result.schedule, compared))
    for part in parts:
        show(part, to_stderr=output == STANDARD)


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
    check_file("--picture", picture)
    check_outputs(picture, inputs=(profile_file, hardware_file))
    minibatches = _numbers("--minibatch", minibatch)
    check_one_standard_input(profile_file, hardware_file)
    profile, hardware = store.load_profile(profile_file), store.load_hardware(hardware_file)
    memories = [parse_bytes(text, "--memory") for text in _parts(memory)] if memory else []
    for size in memories:
        with_memory(hardware, f"{size}B")
    from planner.frontier import frontier

    with progress() as report:
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
        print_json([asdict(point) for point in points])
    else:
        show(render.frontier_table(points))
    if all(point.seconds is None for point in points):
        raise InfeasibleError("nothing on this grid fits; say more --memory, or smaller minibatches")


def _with_network(hardware: Hardware, nodes: int, network: str | None) -> Hardware:
    if network is None:
        return hardware
    if nodes == 1:
        raise FormatError(f"--network {network}: one server needs none; say --nodes N for more")
    found = msgspec.structs.replace(hardware, network_bytes_per_second=parse_rate(network, "--network"))
    check_hardware(found)
    return found


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


def _plan_json(result: Result, answers: Sequence[Answer], compared: Sequence[Baseline]) -> dict[str, Any]:
    assert result.schedule is not None
    predicted = result.schedule.predicted
    found = schedule_json(result.schedule) | {
        "gap": render.gap(predicted.iteration_seconds, predicted.lower_bound_seconds),
        "limited_by": result.limits,
        "search_seconds": result.search_seconds,
        "num_candidates": result.num_candidates,
        "critical_path_seconds": result.critical_path,
    }
    if result.others:
        found["others"] = [schedule_json(schedule) for schedule in result.others]
    if answers:
        found["what_if"] = [asdict(answer) for answer in answers]
    if compared:
        found["baselines"] = [asdict(baseline) for baseline in compared]
    return found
