"""`harmony-planner verify`, `simulate` and `show`: a schedule that is there."""

from __future__ import annotations

from typing import Any

import msgspec
import typer

from planner import render
from planner.commands.options import (
    HardwareFile,
    Json,
    Memory,
    Output,
    ProfileFile,
    ScheduleFile,
    check_one_standard_input,
    check_output,
    complain,
    print_json,
    show,
    with_memory,
)
from planner.contract import store
from planner.contract.errors import InfeasibleError, VerifyError
from planner.contract.hardware import budget_bytes
from planner.contract.output import STANDARD
from planner.contract.schedule import Schedule
from planner.contract.units import format_bytes, format_seconds
from planner.contract.verify import verify


def verify_command(
    schedule_file: ScheduleFile,
    profile_file: ProfileFile,
    hardware_file: HardwareFile,
    memory: Memory = None,
    as_json: Json = False,
) -> None:
    """Check a schedule against its profile and a hardware; exit status 1 where it breaks a rule or does not fit."""
    check_one_standard_input(schedule_file, profile_file, hardware_file)
    schedule, profile = store.load_schedule(schedule_file), store.load_profile(profile_file)
    hardware = with_memory(store.load_hardware(hardware_file), memory)
    try:
        peaks = verify(schedule, profile, hardware)
    except (VerifyError, InfeasibleError) as fault:
        if as_json:
            print_json({"holds": False, "fault": str(fault)})
        complain(f"does not hold: {fault}")
        raise typer.Exit(1) from None
    if as_json:
        print_json({"holds": True, "peaks": [{"bytes": peak.nbytes, "where": peak.where} for peak in peaks]})
        return
    for i, peak in enumerate(peaks):
        limit = budget_bytes(hardware.devices[i])
        typer.echo(f"gpu{i}: at most {format_bytes(peak.nbytes)} of {format_bytes(limit)}, at {peak.where}")
    typer.echo("holds: every rule, and the memory of each device and of the host whatever the timing")


def simulate_command(
    schedule_file: ScheduleFile,
    profile_file: ProfileFile,
    hardware_file: HardwareFile,
    memory: Memory = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Replay a schedule in simulated time; the trace opens in Perfetto."""
    check_output(output, as_json, schedule_file, profile_file, hardware_file)
    check_one_standard_input(schedule_file, profile_file, hardware_file)
    schedule, profile = store.load_schedule(schedule_file), store.load_profile(profile_file)
    hardware = with_memory(store.load_hardware(hardware_file), memory)
    # a schedule that breaks a rule has no time: say what it breaks instead
    verify(schedule, profile, hardware)
    from planner.simulate import simulate

    trace = simulate(schedule, profile, hardware)
    if output is not None:
        store.save(trace, output)
    if as_json:
        print_json(
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


def show_command(schedule_file: ScheduleFile, as_json: Json = False) -> None:
    """Print a schedule: configuration, packs, and its program in short."""
    schedule = store.load_schedule(schedule_file)
    if as_json:
        print_json(schedule_json(schedule))
    else:
        show(render.schedule_summary(schedule))


def schedule_json(schedule: Schedule) -> dict[str, Any]:
    """A schedule in short, for machines."""
    return {
        "model": schedule.profile.model.name,
        "configuration": msgspec.to_builtins(schedule.configuration),
        "predicted": msgspec.to_builtins(schedule.predicted),
        "limit_bytes": [budget_bytes(device) for device in schedule.hardware.devices],
        "schedule_hash": store.schedule_hash(schedule),
    }
