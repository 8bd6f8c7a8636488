"""`harmony-planner report`: a schedule as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from planner.commands.compare import parse_share
from planner.commands.options import ScheduleFile, check_one_standard_input, progress, with_memory
from planner.contract import store
from planner.contract.errors import FormatError
from planner.contract.output import check_outputs, write_whole
from planner.contract.profile import Profile
from planner.contract.schedule import Schedule
from planner.contract.units import parse_bytes

if TYPE_CHECKING:
    from planner.frontier import Point


def report_command(
    schedule_file: ScheduleFile,
    output: Annotated[
        str,
        typer.Option("-o", "--output", metavar="HTML", help="Where to write the page; - is standard output."),
    ],
    profile_file: Annotated[
        str | None,
        typer.Option(
            "--profile", metavar="PROFILE", help="The schedule's; adds planned times and what limits them."
        ),
    ] = None,
    measured_file: Annotated[
        str | None,
        typer.Option("--measured", metavar="TRACE", help="Of a run of the schedule; adds what it took."),
    ] = None,
    frontier: Annotated[
        str,
        typer.Option(
            "--frontier",
            metavar="SIZE,..",
            help="Plan for these memories of each device too; needs --profile.",
        ),
    ] = "",
    tolerance: Annotated[
        str, typer.Option("--tolerance", metavar="SHARE", help="Largest difference of the iteration time.")
    ] = "5%",
) -> None:
    """Write a schedule as one HTML page: how fast, what limits it, what happens when; no network and no scripts."""
    check_outputs(output, inputs=(schedule_file, profile_file, measured_file))
    share = parse_share(tolerance)
    check_one_standard_input(
        *(name for name in (schedule_file, profile_file, measured_file) if name is not None)
    )
    if frontier and profile_file is None:
        raise FormatError(f"--frontier {frontier}: plans anew, which needs the schedule's --profile PROFILE")
    memories = [parse_bytes(text, "--frontier") for text in frontier.split(",")] if frontier else []
    schedule = store.load_schedule(schedule_file)
    for size in memories:
        with_memory(schedule.hardware, f"{size}B", "--frontier")
    profile = None if profile_file is None else store.load_profile(profile_file)
    measured = None if measured_file is None else store.load_trace(measured_file)
    from planner.report import make_report

    points = [] if profile is None or not memories else _points(schedule, profile, memories)
    write_whole(output, make_report(schedule, profile, measured, share, points).encode())


def _points(schedule: Schedule, profile: Profile, memories: list[int]) -> list[Point]:
    from planner.frontier import frontier

    with progress() as report:
        return frontier(
            profile,
            schedule.hardware,
            memories=memories,
            devices=[schedule.configuration.num_devices],
            minibatches=[schedule.configuration.samples],
            num_servers=schedule.configuration.num_servers,
            progress=report,
        )
