"""A profile and links corrected by what a run measured, so that the next plan is nearer to the truth.

In: a profile, a schedule planned with it, the measured trace of that schedule. Out: the profile with the seconds of
each pack's layers multiplied by what the pack took of its plan (medians over microbatches and iterations), and the
hardware with links as fast as they were. How a pack's seconds are shared among its layers stays as profiled; a
backward that recomputes is its forward, already corrected, and the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from planner.contract.actions import Action, Agree, Backward, Forward, SwapIn, SwapOut, Update, parse_action
from planner.contract.errors import FormatError
from planner.contract.hardware import Hardware, HostLink
from planner.contract.profile import Layer, Profile
from planner.contract.rules import Rules
from planner.contract.schedule import Schedule
from planner.contract.store import schedule_hash
from planner.contract.trace import Trace
from planner.contract.verify import check_belongs
from planner.simulate import Timing, simulate

LEAST_FACTOR = 0.05
"""What a backward keeps at least, where its recompute seems to have taken all the time."""
SMALL_BYTES = 1 << 16
"""Copies below this say more of their latency than of a rate."""

replace = msgspec.structs.replace


@dataclass(frozen=True)
class Factors:
    """By what a layer's profiled seconds were multiplied."""

    forward: float
    backward: float
    update: float


@dataclass(frozen=True)
class Calibration:
    """The corrected files, the factor of each layer, and the schedule's iteration: planned, measured, planned anew."""

    profile: Profile
    hardware: Hardware
    factors: tuple[Factors, ...]
    planned_seconds: float
    measured_seconds: float
    corrected_seconds: float


def calibrate(profile: Profile, schedule: Schedule, trace: Trace) -> Calibration:
    """Raises FormatError where the three do not belong together, or the trace was not measured or has no actions."""
    check_belongs(schedule, profile, schedule.hardware)
    if schedule.configuration.num_servers > 1:
        raise FormatError(
            f"the schedule is for {schedule.configuration.num_servers} servers, whose updates wait for each other; "
            f"plan without --nodes, run that and calibrate with its trace"
        )
    if trace.origin != "measured":
        raise FormatError("the trace is simulated; calibrate with the trace of a run")
    if trace.schedule_hash != schedule_hash(schedule):
        raise FormatError(
            f"the trace is of schedule {trace.schedule_hash or 'none'}, this one is {schedule_hash(schedule)}; "
            f"use the schedule that was run"
        )
    if not trace.spans or not trace.iteration_seconds:
        raise FormatError("the trace has no actions or no iteration after its warm-up; run more steps")
    timing = Timing(Rules(profile, schedule.configuration), schedule.hardware)
    seconds = _medians(trace)
    factors = _layer_factors(profile, schedule, timing, seconds)
    corrected = _corrected(profile, factors, seconds, timing)
    hardware = replace(schedule.hardware, host_links=_links(schedule, timing, seconds))
    return Calibration(
        corrected,
        hardware,
        tuple(factors),
        simulate(schedule, profile, schedule.hardware).iteration_seconds[0],
        # actions are kept of the last iterations only: their times belong to those
        median(trace.iteration_seconds[-len({span.iteration for span in trace.spans}) :]),
        simulate(schedule, corrected, hardware).iteration_seconds[0],
    )


def _medians(trace: Trace) -> dict[Action, float]:
    """What each action took, the median of its iterations."""
    taken: dict[str, list[float]] = defaultdict(list)
    for span in trace.spans:
        taken[span.action].append(span.end_seconds - span.start_seconds)
    return {parse_action(text): median(values) for text, values in taken.items()}


def _layer_factors(
    profile: Profile, schedule: Schedule, timing: Timing, seconds: Mapping[Action, float]
) -> list[Factors]:
    rules, costs = timing.rules, timing.rules.costs
    count = len(profile.layers)
    forward, backward, update = [1.0] * count, [1.0] * count, [1.0] * count

    def measured(action: Action) -> float | None:
        """On the profile's device; None where the trace has it not."""
        device, _ = rules.place(action)
        return seconds[action] * timing.scales[device] if action in seconds else None

    def ratio(actions: Sequence[Action], share: Callable[[Action, float], float]) -> float:
        found = [share(action, took) for action in actions if (took := measured(action)) is not None]
        return median(found) if found else 1.0

    def size(action: Action) -> int:
        samples = rules.forward_samples if isinstance(action, Forward) else rules.backward_samples
        assert isinstance(action, Forward | Backward)
        first, end = samples[action.microbatch]
        return end - first

    for p, ahead in enumerate(schedule.configuration.forward_packs):
        first, last = ahead.first, ahead.last
        factor = ratio(
            [Forward(p, j) for j in range(len(rules.forward_samples))],
            lambda a, took, first=first, last=last: took / costs.forward_seconds(first, last, size(a)),  # type: ignore[misc]
        )
        forward[first : last + 1] = [factor] * (last + 1 - first)
    for b in range(len(schedule.configuration.backward_packs) - 1, -1, -1):
        pack = schedule.configuration.backward_packs[b]
        first, last = pack.first, pack.last

        def share(action: Action, took: float, b: int = b, first: int = first, last: int = last) -> float:
            assert isinstance(action, Backward)
            behind = costs.backward_seconds(first, last, size(action))
            ahead = costs.forward_seconds(first, last, size(action))
            if b == rules.fused:
                return took / (behind + ahead)
            if rules.activations(b, action.microbatch) == "recompute":
                took -= sum(
                    forward[layer] * costs.forward_seconds(layer, layer, size(action))
                    for layer in range(first, last + 1)
                )
            return max(took / behind, LEAST_FACTOR)

        factor = ratio([Backward(b, i) for i in range(len(rules.backward_samples))], share)
        backward[first : last + 1] = [factor] * (last + 1 - first)
        if b == rules.fused:
            forward[first : last + 1] = [factor] * (last + 1 - first)
        planned = timing.update_seconds(b)
        if pack.update == "host" and planned > 0 and Update(b) in seconds:
            update[first : last + 1] = [seconds[Update(b)] / planned] * (last + 1 - first)
    return [Factors(*each) for each in zip(forward, backward, update, strict=True)]


def _corrected(
    profile: Profile, factors: Sequence[Factors], seconds: Mapping[Action, float], timing: Timing
) -> Profile:
    planned_norm = timing.rules.costs.norm_seconds()
    norm = seconds[Agree()] / planned_norm if Agree() in seconds and planned_norm > 0 else 1.0

    def corrected(layer: Layer, factor: Factors) -> Layer:
        update = layer.update
        return replace(
            layer,
            forward=tuple(
                replace(
                    c, seconds=c.seconds * factor.forward, spread_seconds=c.spread_seconds * factor.forward
                )
                for c in layer.forward
            ),
            backward=tuple(
                replace(
                    c, seconds=c.seconds * factor.backward, spread_seconds=c.spread_seconds * factor.backward
                )
                for c in layer.backward
            ),
            update=replace(
                update,
                host_seconds=update.host_seconds * factor.update,
                norm_seconds=None if update.norm_seconds is None else update.norm_seconds * norm,
            ),
        )

    layers = tuple(corrected(*each) for each in zip(profile.layers, factors, strict=True))
    return replace(profile, layers=layers)


def _links(schedule: Schedule, timing: Timing, seconds: Mapping[Action, float]) -> tuple[HostLink, ...]:
    """Links with the median rate of their copies. Where devices share one fairly, a copy does not tell its rate."""
    ratios: dict[tuple[int, str], list[float]] = defaultdict(list)
    for action, took in seconds.items():
        if not isinstance(action, SwapIn | SwapOut):
            continue
        device = timing.rules.device_of(action.value)
        nbytes = timing.rules.moved_bytes(action)
        own = took - timing.latencies[device]
        if nbytes >= SMALL_BYTES and own > 0:
            rates = timing.h2d_rates if isinstance(action, SwapIn) else timing.d2h_rates
            way = "h2d" if isinstance(action, SwapIn) else "d2h"
            ratios[schedule.hardware.devices[device].host_link, way].append(nbytes / own / rates[device])
    found = []
    for i, link in enumerate(schedule.hardware.host_links):
        if link.sharing != "fair":
            up, down = (median(ratios[i, way]) if ratios[i, way] else 1.0 for way in ("h2d", "d2h"))
            link = replace(
                link,
                h2d_bytes_per_second=link.h2d_bytes_per_second * up,
                d2h_bytes_per_second=link.d2h_bytes_per_second * down,
            )
        found.append(link)
    return tuple(found)
