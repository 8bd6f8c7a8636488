"""Find the fastest schedule: packs for every pair of microbatch sizes, ranked by estimate, decided by simulation.

    sizes      pairs of forward and backward microbatch sizes, cut off by their bound
    packs      the packing DP per size and phase, joined at the fused pack, for several numbers of rounds
    rank       by estimated seconds
    simulate   lower and simulate in that order until the node budget is spent; the simulator decides

The answer says the smallest bound over all size pairs: no streamed wrap-around plan is faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import msgspec
import numpy as np

from planner.contract.actions import Backward, Forward, Lanes
from planner.contract.errors import HarmonyError, InfeasibleError, VerifyError
from planner.contract.hardware import Hardware, peer_rate
from planner.contract.memory import peaks
from planner.contract.precedence import Graph
from planner.contract.profile import Profile, model_hash
from planner.contract.rules import Rules
from planner.contract.schedule import (
    BackwardPack,
    Configuration,
    DevicePrediction,
    ForwardPack,
    Microbatches,
    PlannedFor,
    Predicted,
    Programs,
    Schedule,
    print_program,
)
from planner.contract.verify import check_memory
from planner.lower import lower
from planner.search.bounds import Bounds
from planner.search.packing import Cuts, Fused, Packing, PackModels, Prefixes, Rates
from planner.search.problem import Problem, Progress, Result, ranges
from planner.simulate import Run, Timing, run, summarize

NODE_BUDGET = 70_000
"""Actions simulated in one search: a few seconds."""
NUM_CAPS = 10
"""How many caps on the pack are tried per size and phase."""


@dataclass(frozen=True)
class Candidate:
    """A pair of microbatch sizes, and where to read its packs: from prefixes, up to where the fused pack begins."""

    forward_size: int
    backward_size: int
    forward: Prefixes | None
    backward: Fused
    start: int
    estimate_seconds: float

    @cached_property
    def forward_cuts(self) -> Cuts:
        return self.forward.cuts(self.start) if self.forward is not None and self.start > 0 else (0,)

    @cached_property
    def backward_cuts(self) -> Cuts:
        return self.backward.cuts(self.start)


@dataclass(frozen=True)
class Outcome:
    """A candidate that was lowered and simulated."""

    rules: Rules
    lanes: Lanes
    graph: Graph
    timing: Timing
    run: Run


def plan(
    profile: Profile,
    hardware: Hardware,
    *,
    minibatch: int,
    mode: str = "any",
    num_devices: int | None = None,
    time_limit_seconds: float | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Result:
    """The fastest schedule for a minibatch.

    num_devices: use this many, None: all of them. Raises HarmonyError for a request that makes no sense; a model
    that does not fit is a Result with status `infeasible`.
    """
    if mode not in ("any", "pp"):
        raise HarmonyError(f"--mode {mode}: this version plans pp; leave --mode out or say pp")
    if minibatch < 1:
        raise HarmonyError(f"--minibatch {minibatch}: at least one sample is needed")
    available = len(hardware.devices)
    if num_devices is not None and not 1 <= num_devices <= available:
        raise HarmonyError(f"--devices {num_devices}: the hardware has {available}")
    problem = Problem(profile, hardware, minibatch, num_devices or available)
    return _Search(problem, time_limit_seconds, progress or (lambda _: None)).solve()


class _Search:
    def __init__(
        self, problem: Problem, time_limit: float | None, report: Callable[[Progress], None]
    ) -> None:
        self.problem = problem
        self.report = report
        self.started = time.monotonic()
        self.time_limit = time_limit
        self.rates = _rates(problem)
        self.models = PackModels(problem, self.rates)
        self.bounds = Bounds(problem)
        self.best: Outcome | None = None
        self.last_fault = ""

    def solve(self) -> Result:
        pairs = self.problem.size_pairs()
        bounds = {pair: self.bounds.seconds(*pair) for pair in pairs}
        lower_bound = min(bounds.values())
        candidates = self._candidates(pairs)
        simulated, nodes = 0, 0
        seen: set[tuple[int, int, Cuts, Cuts]] = set()
        for candidate in candidates:
            if nodes > NODE_BUDGET or self._is_late():
                break
            if (
                self.best is not None
                and bounds[candidate.forward_size, candidate.backward_size] >= self.best.run.period_seconds
            ):
                continue
            key = (
                candidate.forward_size,
                candidate.backward_size,
                candidate.forward_cuts,
                candidate.backward_cuts,
            )
            if key in seen:
                continue
            seen.add(key)
            nodes += self._try(candidate)
            simulated += 1
            best_seconds = self.best.run.period_seconds if self.best else None
            self.report(Progress(simulated, len(candidates), best_seconds))
        elapsed = time.monotonic() - self.started
        if self.best is None:
            return Result(
                "infeasible", None, float("inf"), lower_bound, self._explain_infeasible(), elapsed, simulated
            )
        schedule = make_schedule(self.problem, self.best, lower_bound)
        seconds = schedule.predicted.iteration_seconds
        return Result("found", schedule, seconds, lower_bound, "", elapsed, simulated, what_limits(self.best))

    def _is_late(self) -> bool:
        return self.time_limit is not None and time.monotonic() - self.started > self.time_limit

    # ---- candidates

    def _candidates(self, pairs: list[tuple[int, int]]) -> list[Candidate]:
        """The most promising first."""
        found: list[Candidate] = []
        for slack in (2, 1):
            forward = {u: self._prefixes(u, slack, True) for u in sorted({f for f, _ in pairs})}
            backward = {
                u: [Fused(prefixes) for prefixes in self._prefixes(u, slack, False)]
                for u in sorted({b for _, b in pairs})
            }
            for f, b in pairs:
                found += self._joined(f, b, forward[f], backward[b])
        return sorted(found, key=lambda c: c.estimate_seconds)

    def _prefixes(self, size: int, slack: int, is_forward: bool) -> list[Prefixes]:
        model = self.models.forward(size, slack) if is_forward else self.models.backward(size, slack)
        packing = Packing(model, self.problem.num_devices, (lambda _: 0.0) if is_forward else self._tail)
        return [packing.prefixes(cap) for cap in packing.cap_choices(NUM_CAPS)]

    def _tail(self, end: int) -> float:
        """Gradients out, update and weights in of the last-run pack [0, end), between two iterations."""
        costs, rates = self.problem.costs, self.rates
        moved = costs.gradient_bytes(0, end - 1) / rates.d2h + costs.weight_bytes(0, end - 1) / rates.h2d
        return moved + costs.host_update_seconds(0, end - 1)

    def _joined(self, f: int, b: int, forward: list[Prefixes], backward: list[Fused]) -> Iterator[Candidate]:
        """Forward rounds below a fused pack, the round that begins with it, backward rounds down to layer 0."""
        devices, samples = self.problem.num_devices, self.problem.minibatch
        forward_stretch = max(1.0, devices * f / samples)
        backward_stretch = max(1.0, devices * b / samples)
        nothing = np.full(self.problem.costs.num_layers + 1, np.inf)
        nothing[0] = 0.0
        for fused in backward:
            for up in forward or (None,):
                before = nothing if up is None else up.seconds
                lag = (
                    max(up.cap_seconds * f if up else 0.0, fused.prefixes.cap_seconds * b)
                    * (devices - 1)
                    / samples
                )
                totals = before[:-1] * forward_stretch + fused.seconds * backward_stretch + lag
                start = int(np.argmin(totals))
                if not np.isfinite(totals[start]):
                    continue
                yield Candidate(f, b, up, fused, start, float(totals[start]))

    # ---- simulation

    def _try(self, candidate: Candidate) -> int:
        """Lower and simulate; keep it if it is the best. Returns how many actions that took."""
        configuration = configure(self.problem, candidate)
        try:
            outcome = evaluate(self.problem, configuration)
        except (InfeasibleError, VerifyError) as fault:
            self.last_fault = self.last_fault or str(fault)
            return 2_000
        if self.best is None or outcome.run.period_seconds < self.best.run.period_seconds * (1 - 1e-9):
            try:
                check_memory(
                    peaks(outcome.graph, self.problem.num_devices), outcome.rules, self.problem.hardware
                )
            except InfeasibleError as fault:
                self.last_fault = self.last_fault or str(fault)
                return 2 * len(outcome.graph.actions)
            self.best = outcome
        return len(outcome.graph.actions)

    def _explain_infeasible(self) -> str:
        """The layer that fits no device, or what was over the limit in the last plan that was tried."""
        costs, limit = self.problem.costs, min(self.problem.limits)
        for i, layer in enumerate(self.problem.profile.layers):
            needed = costs.weight_bytes(i, i) + costs.gradient_bytes(i, i) + costs.backward_workspace(i, i, 1)
            if needed > limit:
                return (
                    f"layer {i} ({layer.name}) alone needs {needed} bytes at a microbatch of 1 sample, {needed - limit} over "
                    f"the limit of {limit} bytes; use devices with {needed} usable bytes, or split the layer"
                )
        fault = self.last_fault or f"no packs fit {limit} bytes per device at any microbatch size"
        return f"{fault}; try a smaller minibatch, more memory per device, or more devices"


def configure(problem: Problem, candidate: Candidate) -> Configuration:
    """Wrap-around placement: in the order in which packs run, pack i on device i mod N."""
    devices = problem.num_devices
    forward = tuple(
        ForwardPack(a, b - 1, i % devices) for i, (a, b) in enumerate(_packs(candidate.forward_cuts))
    )
    spans = _packs(candidate.backward_cuts)
    last = len(forward) + len(spans) - 1
    backward = tuple(BackwardPack(a, b - 1, (last - i) % devices) for i, (a, b) in enumerate(spans))
    microbatches = Microbatches(
        ranges(problem.minibatch, candidate.forward_size), ranges(problem.minibatch, candidate.backward_size)
    )
    return Configuration("pp", devices, problem.minibatch, microbatches, forward, backward)


def evaluate(problem: Problem, configuration: Configuration) -> Outcome:
    """Lower and simulate a configuration. Raises InfeasibleError or VerifyError (a deadlock)."""
    rules = Rules(problem.profile, configuration, problem.costs)
    lanes = lower(rules, problem.limits)
    graph = Graph(lanes, rules)
    timing = Timing(rules, problem.hardware)
    return Outcome(rules, lanes, graph, timing, run(graph, timing))


def make_schedule(problem: Problem, outcome: Outcome, lower_bound: float) -> Schedule:
    """The file of an outcome, with what each pack is planned to take."""
    rules, timing = outcome.rules, outcome.timing
    forward = tuple(
        msgspec.structs.replace(
            pack,
            seconds=tuple(timing.compute_seconds(Forward(p, j)) for j in range(len(rules.forward_samples))),
        )
        for p, pack in enumerate(rules.forward_packs)
    )
    backward = tuple(
        msgspec.structs.replace(
            pack,
            seconds=tuple(timing.compute_seconds(Backward(b, i)) for i in range(len(rules.backward_samples))),
            update_seconds=timing.update_seconds(b),
        )
        for b, pack in enumerate(rules.backward_packs)
    )
    devices = tuple(
        DevicePrediction(d.peak_bytes, d.swap_in_bytes, d.swap_out_bytes, d.peer_bytes)
        for d in summarize(outcome.graph, outcome.lanes)
    )
    profile = problem.profile
    seconds = outcome.run.period_seconds
    return Schedule(
        profile=PlannedFor(profile.model, model_hash(profile), profile.dtype, profile.optimizer),
        hardware=problem.hardware,
        configuration=msgspec.structs.replace(
            rules.configuration, forward_packs=forward, backward_packs=backward
        ),
        predicted=Predicted(seconds, min(lower_bound, seconds), rules.host_bytes(), devices),
        programs=Programs(print_program(outcome.lanes)),
    )


def what_limits(outcome: Outcome) -> str:
    """The stream that is busy for the largest share of the iteration."""
    busy: dict[tuple[int, str], float] = {}
    for node, action in enumerate(outcome.graph.actions):
        lane = outcome.graph.lanes[outcome.graph.lane_of[node]]
        key = lane.device, lane.stream
        busy[key] = busy.get(key, 0.0) + outcome.timing.seconds(action)
    (device, stream), seconds = max(busy.items(), key=lambda item: item[1])
    share = seconds / outcome.run.period_seconds
    idle = "" if share > 0.9 else ", the rest is waiting (few microbatches, filling, draining, update)"
    return f"{stream} of gpu{device}, busy {share:.0%} of the iteration{idle}"


def _packs(cuts: Cuts) -> list[tuple[int, int]]:
    return list(pairwise(cuts))


def _rates(problem: Problem) -> Rates:
    """The slowest device's share of the host links, and the slowest hop of the ring."""
    devices = problem.hardware.devices[: problem.num_devices]
    h2d, d2h = [], []
    for device in devices:
        link = problem.hardware.host_links[device.host_link]
        users = 1 if link.sharing == "none" else sum(d.host_link == device.host_link for d in devices)
        h2d.append(link.h2d_bytes_per_second / users)
        d2h.append(link.d2h_bytes_per_second / users)
    if len(devices) == 1:
        return Rates(h2d[0], d2h[0], None)
    hops = [peer_rate(problem.hardware, d, (d + 1) % len(devices)) for d in range(len(devices))]
    through_host = 1 / (1 / min(h2d) + 1 / min(d2h))
    return Rates(min(h2d), min(d2h), min(through_host if hop is None else hop for hop in hops))
