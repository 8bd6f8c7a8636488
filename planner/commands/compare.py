"""`harmony-planner compare` and `calibrate`: a plan beside what was measured."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
import typer

from planner import render
from planner.commands.options import (
    Json,
    Output,
    ProfileFile,
    ScheduleFile,
    check_file,
    check_one_standard_input,
    check_output,
    print_json,
    show,
)
from planner.compare import Comparison, check_same, compare
from planner.contract import store
from planner.contract.errors import FormatError
from planner.contract.hardware import budget_bytes
from planner.contract.output import STANDARD, check_outputs, write_whole
from planner.contract.schedule import Schedule
from planner.contract.trace import Trace


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
    check_output(output, as_json)
    check_outputs(output, hardware_output, inputs=(profile_file, schedule_file, trace_file))
    check_file("--hardware-output", hardware_output)
    check_one_standard_input(profile_file, schedule_file, trace_file)
    profile, schedule = store.load_profile(profile_file), store.load_schedule(schedule_file)
    from planner.calibrate import calibrate

    found = calibrate(profile, schedule, store.load_trace(trace_file))
    if output is not None:
        store.save(found.profile, output)
    if hardware_output is not None:
        store.save(found.hardware, hardware_output)
    if as_json:
        print_json(
            {
                "planned_seconds": found.planned_seconds,
                "measured_seconds": found.measured_seconds,
                "corrected_seconds": found.corrected_seconds,
                "factors": [asdict(factors) for factors in found.factors],
            }
        )
    else:
        show(render.calibration(found, profile), to_stderr=output == STANDARD)


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
    check_file("--picture", picture)
    check_outputs(picture, inputs=(planned_file, measured_file, schedule_file))
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
        print_json(_comparison_json(comparison, share))
    else:
        show(render.comparison_result(comparison, share))
    if not comparison.holds(share):
        raise typer.Exit(1)


def parse_share(text: str) -> float:
    """`5%` or `0.05`. Raises FormatError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", text.strip())
    if match is None:
        raise FormatError(f"--tolerance {text!r}: no share; write 5% or 0.05")
    return float(match[1]) / (100 if match[2] else 1)


def _draw(planned: Trace, measured: Trace, schedule_file: str | None, picture: str) -> None:
    limits: tuple[int, ...] = ()
    if schedule_file is not None:
        schedule = store.load_schedule(schedule_file)
        try:
            check_same(schedule, measured)
        except FormatError as error:
            raise FormatError(f"--schedule {schedule_file}: {error}") from None
        limits = tuple(budget_bytes(device) for device in schedule.hardware.devices)
    # matplotlib takes a second to load, and only this needs it
    from planner.picture import timeline_png

    write_whole(picture, timeline_png(planned, measured, limits))


def _comparison_json(comparison: Comparison, tolerance: float) -> dict[str, Any]:
    faults = comparison.faults(tolerance)
    figures: dict[str, Any] = msgspec.to_builtins(comparison)
    return {"holds": not faults, "faults": faults, "tolerance": tolerance} | figures
