"""What a report says in words and numbers.

In: a schedule, and where they are there its profile and the trace of a run. Out: rows of text; the page lays them out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from planner.compare import Comparison, Pair, compare
from planner.contract.hardware import budget_bytes
from planner.contract.precedence import Graph
from planner.contract.profile import Profile
from planner.contract.schedule import Schedule, parse_program, replica_samples
from planner.contract.trace import Trace
from planner.contract.units import format_bytes, format_rate, format_seconds
from planner.contract.verify import verify
from planner.frontier import Point
from planner.render import (
    activations_in_words,
    counted,
    gap,
    pack_cells,
    phase_in_words,
    samples_in_words,
)
from planner.search.critical import critical_path
from planner.search.outcome import Outcome, what_limits
from planner.simulate import Timing, run, simulate, timed_rules

PACK_COLUMNS = ("pack", "layers", "device", "weights", "seconds")
PACK_TEXTS = frozenset(PACK_COLUMNS) - {"seconds"}


@dataclass(frozen=True)
class Share:
    """A part of a whole: its name, what it amounts to, and that as a share in [0, 1]."""

    name: str
    amount: str
    share: float
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Text in columns; the first is text, of the others those that `texts` names."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Simulated:
    """What a profile adds to a schedule: its times, why it takes so long, what limits it."""

    trace: Trace
    critical_path: dict[str, float]
    limits: str


def simulated(schedule: Schedule, profile: Profile) -> Simulated:
    """Raises FormatError where the schedule is for another profile, VerifyError and InfeasibleError where it breaks a rule
    or does not fit its hardware."""
    verify(schedule, profile, schedule.hardware)
    rules = timed_rules(schedule, profile, schedule.hardware)
    lanes = parse_program(schedule.programs.train)
    graph, timing = Graph(lanes, rules), Timing(rules, schedule.hardware)
    outcome = Outcome(rules, lanes, graph, timing, run(graph, timing))
    return Simulated(
        simulate(schedule, profile, schedule.hardware), critical_path(outcome), what_limits(outcome)
    )


# ---- the answer


def headline(schedule: Schedule) -> list[tuple[str, str]]:
    """The answer in a few figures: (what, how much)."""
    predicted = schedule.predicted
    rate = schedule.configuration.samples / predicted.iteration_seconds
    rows = [
        ("an iteration", format_seconds(predicted.iteration_seconds)),
        ("samples a second", f"{rate:.4g}"),
    ]
    length = re.search(r"[?&]seq=(\d+)", schedule.profile.model.spec)
    if length is not None:
        rows.append(("tokens a second", f"{rate * int(length[1]):,.0f}"))
    share = gap(predicted.iteration_seconds, predicted.lower_bound_seconds)
    rows.append(("a better plan saves at most", f"{share:.1%}"))
    return rows


def choices(schedule: Schedule) -> Table:
    """What was decided."""
    configuration, predicted = schedule.configuration, schedule.predicted
    micro = configuration.microbatches
    rows = [
        ("minibatch", samples_in_words(configuration)),
        (
            "mode",
            f"{configuration.mode}, {counted(configuration.num_devices, 'device')}, "
            f"{counted(len(replica_samples(configuration)), 'replica')}",
        ),
        ("forward", phase_in_words(configuration.forward_packs, micro.forward)),
        ("backward", phase_in_words(configuration.backward_packs, micro.backward)),
        ("activations", activations_in_words(configuration)),
        ("updates", ", ".join(_updates(schedule))),
        ("lower bound", format_seconds(predicted.lower_bound_seconds)),
    ]
    if configuration.agree:
        wait = format_seconds(configuration.agree_seconds)
        rows.append(("all gradients", f"updates wait for the norm over all gradients, which takes {wait}"))
    return Table("What was decided", ("", "choice"), tuple(rows), frozenset({"choice"}))


def _updates(schedule: Schedule) -> list[str]:
    packs = schedule.configuration.backward_packs
    counts = {place: sum(pack.update == place for pack in packs) for place in ("host", "device")}
    return [f"{counted(n, 'pack')} on the {place}" for place, n in counts.items() if n]


# ---- memory


def memories(schedule: Schedule) -> list[Share]:
    """Each device's planned peak and the host's memory, as shares of what there is."""
    found = []
    for i, device in enumerate(schedule.predicted.devices):
        spec = schedule.hardware.devices[i]
        limit = budget_bytes(spec)
        amount = f"{format_bytes(device.peak_bytes)} of {format_bytes(limit)}"
        name = f"gpu{i}" + (f" ({spec.name})" if spec.name != f"gpu{i}" else "")
        found.append(Share(name, amount, device.peak_bytes / limit))
    host, needed = schedule.hardware.host, schedule.predicted.host_bytes
    amount = f"{format_bytes(needed)} of {format_bytes(host.memory_bytes)}"
    return [*found, Share("host", amount, needed / host.memory_bytes)]


def traffic(schedule: Schedule) -> Table:
    """What each device moves in an iteration, and how fast its link is."""
    rows = []
    for i, device in enumerate(schedule.predicted.devices):
        link = schedule.hardware.host_links[schedule.hardware.devices[i].host_link]
        rates = f"{format_rate(link.h2d_bytes_per_second)} in, {format_rate(link.d2h_bytes_per_second)} out"
        moved = (device.swap_in_bytes, device.swap_out_bytes, device.peer_bytes)
        rows.append((f"gpu{i}", *map(format_bytes, moved), rates))
    columns = ("device", "swapped in", "swapped out", "to peers", "host link")
    return Table("Bytes moved in an iteration", columns, tuple(rows), frozenset({"host link"}))


# ---- time


def causes(found: Simulated) -> list[Share]:
    """The critical path by cause; causes that take no time are left out."""
    total = sum(found.critical_path.values())
    return [
        Share(cause, format_seconds(seconds), seconds / total, f"{seconds / total:.1%}")
        for cause, seconds in found.critical_path.items()
        if seconds > 0
    ]


def frontier(points: Sequence[Point]) -> Table:
    """What other memories would do."""
    rows = []
    for point in points:
        if point.seconds is None or point.samples_per_second is None:
            rows.append((format_bytes(point.memory_bytes), "does not fit", "", point.reason))
        else:
            seconds, rate = format_seconds(point.seconds), f"{point.samples_per_second:.4g}"
            rows.append((format_bytes(point.memory_bytes), seconds, rate, point.mode))
    columns = ("memory of each device", "iteration", "samples/s", "plan")
    return Table("With other memory", columns, tuple(rows), frozenset({"plan"}))


# ---- packs


def packs(schedule: Schedule) -> list[Table]:
    """Every pack: its layers, where it runs, what happens to its weights and activations."""
    configuration, found = schedule.configuration, []
    if configuration.forward_packs:
        rows = tuple((f"F{p}", *pack_cells(pack)) for p, pack in enumerate(configuration.forward_packs))
        found.append(Table(counted(len(rows), "forward pack"), PACK_COLUMNS, rows, PACK_TEXTS))
    backward = tuple(
        (f"B{b}", *pack_cells(pack), pack.update, _runs(pack.activations) or "recompute")
        for b, pack in enumerate(configuration.backward_packs)
    )
    columns = (*PACK_COLUMNS, "update", "activations")
    texts = PACK_TEXTS | {"update", "activations"}
    found.append(Table(counted(len(backward), "backward pack"), columns, backward, texts))
    return found


def _runs(activations: Iterable[str]) -> str:
    return ", ".join(f"{len(list(run))} x {name}" for name, run in groupby(activations))


# ---- planned and measured


@dataclass(frozen=True)
class Verdict:
    """Whether a plan holds, why not, and every figure twice."""

    faults: tuple[str, ...]
    rule: str
    tables: tuple[Table, ...]


def verdict(schedule: Schedule, found: Simulated | None, measured: Trace, tolerance: float) -> Verdict:
    """Raises FormatError where the trace is of another schedule, or measured nothing."""
    comparison = compare(schedule if found is None else found.trace, measured)
    totals = [_row(comparison.iteration_seconds, "iteration", format_seconds)]
    for device in comparison.devices:
        for pair in (device.peak_bytes, device.swap_in_bytes, device.swap_out_bytes):
            totals.append(_row(pair, f"gpu{device.device} {pair.name}", format_bytes))
    tables = [_figures("Planned and measured", totals)]
    if comparison.phases:
        rows = [_row(pair, pair.name, format_seconds) for pair in comparison.phases]
        tables.append(_figures("Compute seconds by phase, all devices", rows))
    if comparison.largest:
        rows = [_row(pair, pair.name, format_seconds) for pair in comparison.largest]
        tables.append(_figures("Actions that differ most", rows))
    return Verdict(tuple(comparison.faults(tolerance)), _rule(comparison, tolerance), tuple(tables))


def _rule(comparison: Comparison, tolerance: float) -> str:
    return f"time within {tolerance:.1%}, no peak above its plan, {comparison.swap_rule}"


def _row(pair: Pair, name: str, form: Callable[[float], str]) -> tuple[str, ...]:
    return name, form(pair.planned), form(pair.measured), f"{pair.relative:+.2%}"


def _figures(title: str, rows: list[tuple[str, ...]]) -> Table:
    return Table(title, ("", "planned", "measured", "difference"), tuple(rows))
