"""What people read: a plan, a schedule, a comparison, as rich tables and lines.

In: nouns. Out: rich renderables; cli.py prints them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.compare import Comparison, Pair
from planner.contract.actions import Action, Backward, Forward, Lane
from planner.contract.hardware import budget_bytes
from planner.contract.profile import Profile
from planner.contract.schedule import (
    BackwardPack,
    Configuration,
    ForwardPack,
    Samples,
    Schedule,
    parse_program,
    replica_samples,
)
from planner.contract.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from planner.baselines import Baseline
    from planner.calibrate import Calibration
    from planner.commands.what_if import ServerAnswer
    from planner.explain import Answer
    from planner.frontier import Point
    from planner.search import Result

NUM_RUNS = 8
"""How many runs of a lane `show` prints from its start, and from its end."""


def gap(seconds: float, lower_bound_seconds: float) -> float:
    """What a faster plan could save at most, as a share of the iteration."""
    return 1 - lower_bound_seconds / seconds


def plan_result(result: Result) -> RenderableType:
    """The outcome of a search."""
    assert result.schedule is not None
    parts: list[RenderableType] = [
        _summary(result.schedule, [("limited by", result.limits)]),
        _devices(result.schedule),
    ]
    if result.others:
        parts.append(_others(result.schedule, result.others))
    seconds = format_seconds(result.search_seconds)
    parts.append(Text(f"{counted(result.num_candidates, 'configuration')} simulated in {seconds}"))
    return _spaced(*parts)


def explanation(result: Result, answers: Sequence[Answer]) -> RenderableType:
    """Where an iteration's time goes, and what one change would do."""
    assert result.schedule is not None
    total = result.schedule.predicted.iteration_seconds
    path = Table(title="critical path of one iteration", title_justify="left", box=None)
    for name in ("cause", "seconds", "share"):
        path.add_column(name, justify="left" if name == "cause" else "right")
    for cause, seconds in result.critical_path.items():
        if seconds > 1e-6 * total:
            path.add_row(cause, format_seconds(seconds), f"{seconds / total:.1%}")
    rate = result.schedule.configuration.samples / total
    table = Table(title="with one change", title_justify="left", box=None)
    for name in ("change", "iteration", "samples/s", "faster"):
        table.add_column(name, justify="left" if name == "change" else "right")
    for answer in answers:
        if answer.seconds is None or answer.samples_per_second is None:
            table.add_row(answer.change, "does not fit", "", "")
        else:
            faster = f"{answer.samples_per_second / rate:.2f}x"
            table.add_row(
                answer.change, format_seconds(answer.seconds), f"{answer.samples_per_second:.4g}", faster
            )
    return _spaced(path, table)


def baselines(schedule: Schedule, compared: Sequence[Baseline]) -> RenderableType:
    """The plan beside training under virtualised memory."""
    ours = schedule.predicted
    moved = sum(d.swap_in_bytes + d.swap_out_bytes for d in ours.devices)
    note = " (which does not clip)" if schedule.configuration.agree else ""
    table = Table(title=f"beside virtualised memory{note}", title_justify="left", box=None)
    for name in ("", "iteration", "this plan is faster by", "swapped", "times this plan's"):
        table.add_column(name, justify="right" if name else "left")
    for baseline in compared:
        swapped = baseline.swap_in_bytes + baseline.swap_out_bytes
        table.add_row(
            baseline.name,
            format_seconds(baseline.seconds),
            f"{baseline.seconds / ours.iteration_seconds:.2f}x",
            format_bytes(swapped),
            f"{swapped / moved:.2f}x" if moved else "-",
        )
    return _spaced(table)


def frontier_table(points: Sequence[Point]) -> RenderableType:
    """`frontier`: a line a point."""
    table = Table(box=None)
    for name in ("minibatch", "devices", "memory", "iteration", "samples/s", "lower bound", "mode"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for point in points:
        row = [str(point.minibatch), str(point.num_devices), format_bytes(point.memory_bytes)]
        if point.seconds is None or point.lower_bound_seconds is None:
            table.add_row(*row, "does not fit", "", "", "")
        else:
            rate = point.minibatch / point.seconds
            bound = format_seconds(point.lower_bound_seconds)
            table.add_row(*row, format_seconds(point.seconds), f"{rate:.4g}", bound, point.mode)
    return table


def server_answers(title: str, answers: Sequence[ServerAnswer]) -> RenderableType:
    """`what-if`: a line a server."""
    table = Table(box=None, title=title, title_justify="left", title_style="")
    for name in (
        "server",
        "iteration",
        "samples/s",
        "tokens/s",
        "lower bound",
        "memory",
        "host",
        "limited by",
    ):
        table.add_column(
            name, justify="left" if name in ("server", "limited by") else "right", overflow="fold"
        )
    for answer in answers:
        if answer.schedule is None:
            table.add_row(answer.server, "cannot", "", "", "", "", "", answer.reason)
            continue
        predicted = answer.schedule.predicted
        table.add_row(
            answer.server,
            format_seconds(predicted.iteration_seconds),
            f"{answer.samples_per_second:.4g}",
            "-" if answer.tokens_per_second is None else f"{answer.tokens_per_second:,.0f}",
            format_seconds(predicted.lower_bound_seconds),
            format_bytes(max(device.peak_bytes for device in predicted.devices)),
            format_bytes(predicted.host_bytes),
            answer.limited_by,
        )
    return _spaced(table)


def _others(best: Schedule, others: Sequence[Schedule]) -> Table:
    table = Table(title="next best of other kinds", title_justify="left", box=None)
    for name in ("iteration", "slower", "mode", "forward", "backward", "activations"):
        table.add_column(name, justify="right" if name in ("iteration", "slower") else "left")
    for schedule in others:
        configuration, seconds = schedule.configuration, schedule.predicted.iteration_seconds
        table.add_row(
            format_seconds(seconds),
            f"{seconds / best.predicted.iteration_seconds - 1:.1%}",
            f"{configuration.mode}, {counted(len(replica_samples(configuration)), 'replica')}",
            phase_in_words(configuration.forward_packs, configuration.microbatches.forward),
            phase_in_words(configuration.backward_packs, configuration.microbatches.backward),
            activations_in_words(configuration),
        )
    return table


def activations_in_words(configuration: Configuration) -> str:
    """How many of the backward packs' microbatches recompute, keep or offload."""
    chosen = [
        choice for pack in configuration.backward_packs[:-1] for choice in pack.activations or ("recompute",)
    ]
    counts = {name: chosen.count(name) for name in ("recompute", "keep", "offload")}
    return (
        ", ".join(f"{name} {count / len(chosen):.0%}" for name, count in counts.items() if count) or "fused"
    )


def schedule_summary(schedule: Schedule) -> RenderableType:
    """`show`: configuration, packs, and the program in short."""
    return _spaced(
        _summary(schedule, []), _devices(schedule), *_packs(schedule.configuration), _program(schedule)
    )


def comparison_result(comparison: Comparison, tolerance: float) -> RenderableType:
    """`compare`: every figure twice, and the verdict."""
    parts: list[RenderableType] = [_totals(comparison)]
    if comparison.phases:
        parts.append(_pairs("compute seconds by phase, all devices", comparison.phases))
    for device in comparison.devices:
        if device.busy_seconds:
            parts.append(_pairs(f"busy seconds of gpu{device.device}", device.busy_seconds))
    if comparison.largest:
        parts.append(_pairs("actions that differ most", comparison.largest))
    if comparison.overrun_actions:
        shown = ", ".join(comparison.overrun_actions[:12])
        more = len(comparison.overrun_actions) - 12
        parts.append(Text(f"took longer than their pace: {shown}{f' and {more} more' if more > 0 else ''}"))
    faults = [f"does not hold: {fault}" for fault in comparison.faults(tolerance)]
    holds = f"holds: time within {tolerance:.1%}, no peak above its plan, {comparison.swap_rule}"
    return _spaced(*parts, Text("\n".join(faults or [holds])))


def calibration(found: Calibration, profile: Profile) -> RenderableType:
    """`calibrate`: what was corrected, and what that does to the prediction of the schedule that was run."""
    table = Table(title="seconds of layers, times what was profiled", title_justify="left", box=None)
    for name in ("layers", "forward", "backward", "update"):
        table.add_column(name, justify="left" if name == "layers" else "right")
    for factors, indices in groupby(range(len(found.factors)), key=lambda i: found.factors[i]):
        first, *more = indices
        names = profile.layers[first].name + (f" to {profile.layers[more[-1]].name}" if more else "")
        cells = (factors.forward, factors.backward, factors.update)
        table.add_row(names, *(f"{factor:.2f}" for factor in cells))
    measured = found.measured_seconds
    line = (
        f"an iteration took {format_seconds(measured)}; planned were {format_seconds(found.planned_seconds)} "
        f"({found.planned_seconds / measured - 1:+.1%}), with the corrections {format_seconds(found.corrected_seconds)} "
        f"({found.corrected_seconds / measured - 1:+.1%})"
    )
    return _spaced(table, Text(line))


# ---- parts


def _spaced(*parts: RenderableType) -> Group:
    """The parts with an empty line between two."""
    return Group(*(item for part in parts for item in (part, "")))


def samples_in_words(configuration: Configuration) -> str:
    """The minibatch, and what of it each server has."""
    if configuration.num_servers == 1:
        return counted(configuration.minibatch, "sample")
    return f"{configuration.samples} samples, {configuration.minibatch} on each of {configuration.num_servers} servers"


def _summary(schedule: Schedule, more: Iterable[tuple[str, str]]) -> Table:
    predicted, configuration = schedule.predicted, schedule.configuration
    seconds, bound = predicted.iteration_seconds, predicted.lower_bound_seconds
    replicas = len(replica_samples(configuration))
    rows = [
        ("model", f"{schedule.profile.model.name} ({schedule.profile.dtype}, {schedule.profile.optimizer})"),
        (
            "predicted",
            f"{format_seconds(seconds)} an iteration, {configuration.samples / seconds:.4g} samples/s",
        ),
        ("lower bound", f"{format_seconds(bound)}, gap {gap(seconds, bound):.1%}"),
        (
            "mode",
            f"{configuration.mode}, {counted(configuration.num_devices, 'device')}, {counted(replicas, 'replica')}",
        ),
        ("minibatch", samples_in_words(configuration)),
        ("forward", phase_in_words(configuration.forward_packs, configuration.microbatches.forward)),
        ("backward", phase_in_words(configuration.backward_packs, configuration.microbatches.backward)),
        ("activations", activations_in_words(configuration)),
        *_clipping(configuration),
        ("host memory", format_bytes(predicted.host_bytes)),
        *more,
    ]
    table = Table.grid(padding=(0, 2))
    for name, text in rows:
        table.add_row(name, Text(text))
    return table


def _clipping(configuration: Configuration) -> list[tuple[str, str]]:
    if not configuration.agree:
        return []
    seconds = format_seconds(configuration.agree_seconds)
    return [("all gradients", f"updates wait for the norm over all gradients, which takes {seconds}")]


def phase_in_words(packs: Sequence[ForwardPack | BackwardPack], microbatches: tuple[Samples, ...]) -> str:
    """`12 packs, 4 microbatches of 2`."""
    sizes = sorted({end - first for first, end in microbatches}, reverse=True)
    counts = f"{counted(len(packs), 'pack')}, {counted(len(microbatches), 'microbatch', 'es')}"
    return f"{counts} of {' or '.join(map(str, sizes))}"


def counted(number: int, noun: str, plural: str = "s") -> str:
    """`1 pack`, `2 packs`."""
    return f"{number} {noun}{'' if number == 1 else plural}"


def _devices(schedule: Schedule) -> Table:
    table = _table("device", "peak", "limit", "swap in", "swap out", "to peers")
    for i, device in enumerate(schedule.predicted.devices):
        limit = budget_bytes(schedule.hardware.devices[i])
        moved = (device.swap_in_bytes, device.swap_out_bytes, device.peer_bytes)
        table.add_row(f"gpu{i}", *map(format_bytes, (device.peak_bytes, limit, *moved)))
    return table


def _packs(configuration: Configuration) -> Iterator[Table]:
    table = _table("forward pack", "layers", "device", "weights", "seconds")
    for p, pack in enumerate(configuration.forward_packs):
        table.add_row(f"F{p}", *pack_cells(pack))
    if configuration.forward_packs:
        yield table
    table = _table("backward pack", "layers", "device", "weights", "seconds", "update", "activations")
    for b, backward in enumerate(configuration.backward_packs):
        update: str = backward.update
        if backward.update_seconds:
            update += f" {format_seconds(backward.update_seconds)}"
        activations = " ".join(f"{len(list(run))}x{name}" for name, run in groupby(backward.activations))
        table.add_row(f"B{b}", *pack_cells(backward), update, activations or "recompute")
    yield table


def pack_cells(pack: ForwardPack | BackwardPack) -> tuple[str, str, str, str]:
    """A pack's layers, device, weights, and seconds."""
    seconds = format_seconds(sum(pack.seconds)) if pack.seconds else "-"
    return f"{pack.first}-{pack.last}", f"gpu{pack.device}", pack.weights, seconds


def _program(schedule: Schedule) -> Table:
    table = _table("stream", "actions", "program")
    for lane in parse_program(schedule.programs.train):
        num_actions = sum(not str(entry.action).startswith("free:") for entry in lane.entries)
        table.add_row(f"gpu{lane.device}/{lane.stream}", str(num_actions), Text(lane_in_short(lane)))
    return table


def lane_in_short(lane: Lane) -> str:
    """A lane without its frees, runs over microbatches joined: `F0.0-3 B1.0-1`; the middle of a long one left out."""
    actions = [entry.action for entry in lane.entries if not str(entry.action).startswith("free:")]
    runs = [_run([action for _, action in run]) for _, run in groupby(enumerate(actions), key=_run_key)]
    if len(runs) > 2 * NUM_RUNS:
        runs[NUM_RUNS:-NUM_RUNS] = [f"... {len(runs) - 2 * NUM_RUNS} more ..."]
    return " ".join(runs)


def _run_key(item: tuple[int, Action]) -> tuple[str, int]:
    """Equal for neighbours that continue each other: the same text up to a microbatch that counts up."""
    position, action = item
    head, microbatch, tail = _split(action)
    return (f"{head}.{tail}", microbatch - position) if microbatch >= 0 else (f"{head} {position}", -1)


def _run(actions: list[Action]) -> str:
    if len(actions) == 1:
        return str(actions[0])
    head, first, tail = _split(actions[0])
    return f"{head}.{first}-{_split(actions[-1])[1]}{tail}"


def _split(action: Action) -> tuple[str, int, str]:
    """(text before the microbatch, the microbatch or -1, text behind it)."""
    if isinstance(action, Forward | Backward):
        return str(action).partition(".")[0], action.microbatch, ""
    head, dot, rest = str(action).partition(".")
    if not dot:
        return head, -1, ""
    microbatch, arrow, device = rest.partition(">")
    return head, int(microbatch), arrow + device


def _totals(comparison: Comparison) -> Table:
    table = _table("", "planned", "measured", "difference", "remark")
    low, high = comparison.quartile_seconds
    remark = (
        f"median of {comparison.num_iterations}, quartiles {format_seconds(low)} to {format_seconds(high)}"
    )
    table.add_row(*_cells(comparison.iteration_seconds, format_seconds), remark)
    for device in comparison.devices:
        name = f"gpu{device.device}"
        reserved = (
            f"{format_bytes(device.reserved_bytes)} held by the allocator" if device.reserved_bytes else ""
        )
        for pair, note in (
            (device.peak_bytes, reserved),
            (device.swap_in_bytes, ""),
            (device.swap_out_bytes, ""),
        ):
            cells = _cells(pair, lambda number: format_bytes(int(number)))
            table.add_row(f"{name} {cells[0]}", *cells[1:], note)
    return table


def _pairs(title: str, pairs: Iterable[Pair]) -> Table:
    table = _table(title, "planned", "measured", "difference")
    for pair in pairs:
        table.add_row(*_cells(pair, format_seconds))
    return table


def _cells(pair: Pair, form: Callable[[float], str]) -> tuple[str, str, str, str]:
    return pair.name, form(pair.planned), form(pair.measured), f"{pair.relative:+.2%}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        is_text = i == 0 or column in ("layers", "weights", "update", "activations", "program", "remark")
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    return table
