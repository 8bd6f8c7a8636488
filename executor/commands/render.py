"""What people and machines read of a profile, a machine and a run: tables, lines, JSON. cli.py prints them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import msgspec
from rich.table import Table

from planner.contract.hardware import Hardware, budget_bytes
from planner.contract.profile import Profile, model_hash
from planner.contract.schedule import Schedule
from planner.contract.trace import Trace
from planner.contract.units import format_bytes, format_rate, format_seconds


def profile_table(profile: Profile) -> Table:
    """Every layer's costs at the largest microbatch."""
    size = profile.layers[0].backward[-1].microbatch_size
    title = f"{profile.model.name}: {len(profile.layers)} layers, {profile.dtype}, {profile.optimizer}; costs at microbatch {size}"
    table = Table(title=title, title_justify="left", box=None)
    for name in ("layer", "weights", "state", "forward", "backward", "update", "peak", "saved"):
        table.add_column(name, justify="left" if name == "layer" else "right")
    for layer in profile.layers:
        forward, backward = layer.forward[-1], layer.backward[-1]
        table.add_row(
            layer.name,
            format_bytes(layer.weight_bytes),
            format_bytes(layer.optimizer_state_bytes),
            format_seconds(forward.seconds),
            format_seconds(backward.seconds),
            format_seconds(layer.update.host_seconds),
            format_bytes(max(forward.peak_bytes, backward.peak_bytes)),
            "" if backward.saved_bytes is None else format_bytes(backward.saved_bytes),
        )
    return table


def profile_json(profile: Profile) -> dict[str, Any]:
    """A profile in a few figures."""
    layers = profile.layers
    return {
        "model": profile.model.name,
        "model_hash": model_hash(profile),
        "cut_by": profile.model.cut_by,
        "num_layers": len(layers),
        "weight_bytes": sum(layer.weight_bytes for layer in layers),
        "optimizer_state_bytes": sum(layer.optimizer_state_bytes for layer in layers),
        "microbatch_sizes": [cost.microbatch_size for cost in layers[0].forward],
    }


def hardware_table(hardware: Hardware) -> Table:
    """Every device and its link."""
    host = hardware.host
    title = f"{hardware.name}: host {format_bytes(host.memory_bytes)}, {host.update_workers} updates at once"
    table = Table(title=title, title_justify="left", box=None)
    for name in ("device", "memory", "reserved", "speed", "h2d", "d2h", "latency", "sharing"):
        table.add_column(name, justify="left" if name == "device" else "right")
    for i, device in enumerate(hardware.devices):
        link = hardware.host_links[device.host_link]
        table.add_row(
            f"gpu{i} {device.name}",
            format_bytes(device.memory_bytes),
            format_bytes(device.reserved_bytes),
            f"{device.compute_scale:g}",
            format_rate(link.h2d_bytes_per_second),
            format_rate(link.d2h_bytes_per_second),
            format_seconds(link.latency_seconds),
            link.sharing,
        )
    return table


def trace_lines(trace: Trace, schedule: Schedule | None, budget: int | None) -> Iterator[str]:
    """A run in a few lines."""
    seconds = _typical(trace.iteration_seconds)
    if seconds is None:
        yield f"loss {trace.losses[-1]:.6g}; one iteration is all warm-up, so there is no time to tell"
    else:
        line = (
            f"{format_seconds(seconds)} an iteration, {trace.samples_per_iteration / seconds:.4g} samples/s"
        )
        if schedule is not None:
            planned = schedule.predicted.iteration_seconds
            line += f" (planned {format_seconds(planned)}, {seconds / planned - 1:+.1%})"
        yield f"{line}; loss {trace.losses[0]:.6g} to {trace.losses[-1]:.6g}"
    if trace.evaluations:
        best = min(trace.evaluations, key=lambda evaluation: evaluation.loss)
        yield (
            f"in evaluation mode: loss {trace.evaluations[-1].loss:.6g} after {trace.evaluations[-1].iterations} iterations, "
            f"least {best.loss:.6g} after {best.iterations}"
        )
    for i, device in enumerate(trace.devices):
        limit = budget if schedule is None else budget_bytes(schedule.hardware.devices[i])
        swapped = f"; {format_bytes(device.swap_in_bytes)} in and {format_bytes(device.swap_out_bytes)} out an iteration"
        yield (
            f"gpu{i}: peak {format_bytes(device.peak_bytes)}"
            + (f" of {format_bytes(limit)}" if limit is not None else "")
            + (swapped if schedule is not None else "")
        )
    if trace.notes.get("overruns"):
        yield (
            f"{trace.notes['overruns_per_iteration']:.4g} actions an iteration took longer than their profiled time: "
            f"this machine is busy or slower than when it was profiled"
        )


def trace_json(trace: Trace) -> dict[str, Any]:
    """A run in a few figures, and its losses."""
    seconds = _typical(trace.iteration_seconds)
    return {
        "model": trace.model,
        "iteration_seconds": trace.iteration_seconds,
        "median_iteration_seconds": seconds,
        "samples_per_second": None if seconds is None else trace.samples_per_iteration / seconds,
        "losses": trace.losses,
        "evaluations": [msgspec.to_builtins(evaluation) for evaluation in trace.evaluations],
        "devices": [msgspec.to_builtins(device) for device in trace.devices],
        "notes": trace.notes,
    }


def _typical(iteration_seconds: Sequence[float]) -> float | None:
    """The median: one slow iteration says nothing of the plan."""
    return median(iteration_seconds) if iteration_seconds else None
