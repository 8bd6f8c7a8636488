"""Was the plan right? A planned schedule or trace against a measured trace.

In: what was planned and what was measured. Out: a Comparison: every figure twice, and whether the plan holds.
A schedule has totals only; a simulated trace has every action too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import median, quantiles

import msgspec

from planner.contract.actions import STREAMS, Agree, Backward, Forward, SwapIn, SwapOut, Update, parse_action
from planner.contract.errors import FormatError
from planner.contract.schedule import Schedule
from planner.contract.store import schedule_hash
from planner.contract.trace import Span, Trace

NUM_LARGEST = 10
"""How many of the actions that differ most are listed."""

NOT_SAVED = 0.1
"""Of the planned bytes, what need not be swapped where activations are offloaded: a profile counts a layer's output as
saved, and the graph of a pack that ends with the layer may not hold it (a sixteenth of what a transformer block saves)."""

PHASES = ("forward", "fused", "backward", "update")


class Pair(msgspec.Struct, frozen=True):
    """The same figure planned and measured."""

    name: str
    planned: float
    measured: float

    @property
    def relative(self) -> float:
        """How much larger the measured one is, as a share of the planned one."""
        if self.planned:
            return self.measured / self.planned - 1
        return 0.0 if not self.measured else float("inf")


class DeviceComparison(msgspec.Struct, frozen=True):
    """One device: bytes, and the busy seconds of its streams (empty where only totals were planned).

    reserved_bytes: what the measured device's allocator held; 0 where that is not known.
    """

    device: int
    peak_bytes: Pair
    swap_in_bytes: Pair
    swap_out_bytes: Pair
    reserved_bytes: int
    busy_seconds: tuple[Pair, ...] = ()


class Comparison(msgspec.Struct, frozen=True):
    """iteration_seconds: planned, and the measured median; quartile_seconds: the measured quartiles.

    phases: compute seconds of forward, fused, backward, and update, over all devices. largest: the actions
    whose durations differ most. overrun_actions: those that took longer than they were paced to. has_offloads:
    whether saved activations were swapped.
    """

    model: str
    iteration_seconds: Pair
    quartile_seconds: tuple[float, float]
    num_iterations: int
    devices: tuple[DeviceComparison, ...]
    phases: tuple[Pair, ...] = ()
    largest: tuple[Pair, ...] = ()
    overrun_actions: tuple[str, ...] = ()
    has_offloads: bool = False

    def faults(self, tolerance: float) -> list[str]:
        """Why the plan does not hold, one line each; none where it holds."""
        found = []
        seconds = self.iteration_seconds
        if not abs(seconds.relative) <= tolerance:
            found.append(
                f"iteration: {seconds.measured:.6g} s measured, {seconds.planned:.6g} s planned: "
                f"{seconds.relative:+.1%}, tolerance {tolerance:.1%}"
            )
        for device in self.devices:
            peak = device.peak_bytes
            if peak.measured > peak.planned:
                found.append(
                    f"gpu{device.device}: peak of {peak.measured:.0f} bytes measured, {peak.planned:.0f} planned"
                )
            found += [
                f"gpu{device.device}: {pair.name} of {pair.measured:.0f} bytes measured, {pair.planned:.0f} planned"
                for pair in (device.swap_in_bytes, device.swap_out_bytes)
                if not self._is_as_planned(pair)
            ]
        return found

    def holds(self, tolerance: float) -> bool:
        """Time within the tolerance, no peak above its plan, the planned bytes swapped."""
        return not self.faults(tolerance)

    @property
    def swap_rule(self) -> str:
        """What is asked of the swapped bytes, in words."""
        if self.has_offloads:
            return f"at most the planned bytes swapped, at least {1 - NOT_SAVED:.0%} of them"
        return "exactly the planned bytes swapped"

    def _is_as_planned(self, swapped: Pair) -> bool:
        """Exactly, or where activations are offloaded up to NOT_SAVED fewer; never more."""
        least = swapped.planned * (1 - NOT_SAVED) if self.has_offloads else swapped.planned
        return least <= swapped.measured <= swapped.planned


def compare(planned: Schedule | Trace, measured: Trace) -> Comparison:
    """Compare what was planned with what was measured.

    Raises FormatError where the two are not of the same model and schedule, or nothing was measured.
    """
    check_same(planned, measured)
    if measured.origin != "measured":
        raise FormatError(f"the trace to compare with is {measured.origin}; give the trace of a run")
    if not measured.iteration_seconds:
        raise FormatError("the measured trace has no complete iteration; run at least 2 steps")
    if isinstance(planned, Schedule):
        name, seconds = planned.profile.model.name, planned.predicted.iteration_seconds
        figures = [(d.peak_bytes, d.swap_in_bytes, d.swap_out_bytes) for d in planned.predicted.devices]
        planned_spans: tuple[Span, ...] = ()
    else:
        if planned.origin == "measured":
            raise FormatError(
                "the plan to compare with is a measured trace; give a schedule, or its simulated trace"
            )
        if not planned.iteration_seconds:
            raise FormatError("the planned trace has no complete iteration; simulate the schedule again")
        name, seconds = planned.model, median(planned.iteration_seconds)
        figures = [(d.peak_bytes, d.swap_in_bytes, d.swap_out_bytes) for d in planned.devices]
        planned_spans = planned.spans
    if len(figures) != len(measured.devices):
        raise FormatError(
            f"{len(figures)} devices planned, {len(measured.devices)} measured; compare runs of one plan"
        )
    busy = _pairs_by_device(planned_spans, measured.spans)
    devices = tuple(
        DeviceComparison(
            device,
            Pair("peak", peak, found.peak_bytes),
            Pair("swap in", swap_in, found.swap_in_bytes),
            Pair("swap out", swap_out, found.swap_out_bytes),
            found.reserved_bytes,
            tuple(busy.get(device, ())),
        )
        for device, ((peak, swap_in, swap_out), found) in enumerate(
            zip(figures, measured.devices, strict=True)
        )
    )
    times = measured.iteration_seconds
    low, _, high = quantiles(times, n=4, method="inclusive") if len(times) > 1 else (times[0],) * 3
    return Comparison(
        model=name,
        iteration_seconds=Pair("iteration", seconds, median(times)),
        quartile_seconds=(low, high),
        num_iterations=len(times),
        devices=devices,
        phases=_phases(planned_spans, measured.spans),
        largest=_largest(planned_spans, measured.spans),
        overrun_actions=tuple(dict.fromkeys(span.action for span in measured.spans if span.overrun)),
        has_offloads=_has_offloads(measured.spans),
    )


def check_same(planned: Schedule | Trace, measured: Trace) -> None:
    """Raise FormatError where the two do not belong together."""
    if isinstance(planned, Schedule):
        model, program = planned.profile.model_hash, schedule_hash(planned)
    else:
        model, program = planned.model_hash, planned.schedule_hash
    for what, ours, theirs in (
        ("model", model, measured.model_hash),
        ("schedule", program, measured.schedule_hash),
    ):
        if ours != theirs:
            raise FormatError(
                f"planned for {what} {ours}, measured on {what} {theirs}; compare a plan with a run of that same plan"
            )


def _seconds_by(spans: Iterable[Span], key: Callable[[Span], str]) -> dict[str, float]:
    """Seconds of spans summed by key within an iteration, median over iterations. No key ("") leaves a span out."""
    sums: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        name = key(span)
        if name:
            sums[name][span.iteration] += span.end_seconds - span.start_seconds
    return {name: median(by_iteration.values()) for name, by_iteration in sums.items()}


def _paired(
    planned: Iterable[Span], measured: Iterable[Span], key: Callable[[Span], str]
) -> tuple[Pair, ...]:
    ours, theirs = _seconds_by(planned, key), _seconds_by(measured, key)
    return tuple(Pair(name, seconds, theirs.get(name, 0.0)) for name, seconds in ours.items())


def _pairs_by_device(planned: Iterable[Span], measured: tuple[Span, ...]) -> dict[int, list[Pair]]:
    found: dict[int, list[Pair]] = defaultdict(list)
    for pair in _paired(planned, measured, lambda span: f"{span.device}/{span.stream}"):
        device, _, stream = pair.name.partition("/")
        found[int(device)].append(msgspec.structs.replace(pair, name=stream))
    for pairs in found.values():
        pairs.sort(key=lambda pair: STREAMS.index(pair.name))
    return found


def _phases(planned: tuple[Span, ...], measured: tuple[Span, ...]) -> tuple[Pair, ...]:
    actions = {span.action: parse_action(span.action) for span in planned}
    # the last backward pack runs its own forward
    fused = max((action.pack for action in actions.values() if isinstance(action, Backward)), default=-1)

    def phase(span: Span) -> str:
        match actions.get(span.action):
            case Forward():
                return "forward"
            case Backward(pack):
                return "fused" if pack == fused else "backward"
            case Update() | Agree():
                return "update"
            case _:
                return ""

    pairs = {pair.name: pair for pair in _paired(planned, measured, phase)}
    return tuple(pairs[name] for name in PHASES if name in pairs)


def _has_offloads(spans: tuple[Span, ...]) -> bool:
    actions = (parse_action(text) for text in {span.action for span in spans})
    return any(
        isinstance(action, SwapIn | SwapOut) and action.value.kind in ("AF", "AB") for action in actions
    )


def _largest(planned: Iterable[Span], measured: Iterable[Span]) -> tuple[Pair, ...]:
    # a recv lasts as long as its send and the wait before it: it says nothing of its own
    pairs = _paired(
        planned, measured, lambda span: "" if span.action.startswith(("free:", "recv:")) else span.action
    )
    pairs = tuple(pair for pair in pairs if pair.measured != pair.planned)
    return tuple(sorted(pairs, key=lambda pair: -abs(pair.measured - pair.planned))[:NUM_LARGEST])
