"""A configuration, lowered and simulated: what the search compares, and the file that it becomes."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from planner.contract.actions import Backward, Forward, Lanes
from planner.contract.memory import peaks
from planner.contract.precedence import Graph
from planner.contract.profile import model_hash
from planner.contract.rules import Rules
from planner.contract.schedule import (
    Configuration,
    DevicePrediction,
    PlannedFor,
    Predicted,
    Programs,
    Schedule,
    print_program,
)
from planner.contract.verify import check_memory
from planner.lower import lower
from planner.search.problem import Problem
from planner.simulate import Run, Timing, run, summarize


@dataclass(frozen=True)
class Outcome:
    """A configuration that was lowered and simulated."""

    rules: Rules
    lanes: Lanes
    graph: Graph
    timing: Timing
    run: Run

    @property
    def seconds(self) -> float:
        return self.run.period_seconds


def evaluate(problem: Problem, configuration: Configuration) -> Outcome:
    """Lower and simulate a configuration. Raises InfeasibleError or VerifyError (a deadlock)."""
    rules = Rules(problem.profile, configuration, problem.costs)
    lanes = lower(rules, problem.limits)
    graph = Graph(lanes, rules)
    timing = Timing(rules, problem.hardware)
    return Outcome(rules, lanes, graph, timing, run(graph, timing))


def check_fits(problem: Problem, outcome: Outcome) -> None:
    """Raise InfeasibleError where a device or the host has too little memory, whatever the timing."""
    check_memory(peaks(outcome.graph, problem.num_devices), outcome.rules, problem.hardware)


def make_schedule(
    problem: Problem,
    outcome: Outcome,
    lower_bound: float,
    options: dict[str, str | int | float | bool | None] | None = None,
) -> Schedule:
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
            rules.configuration,
            forward_packs=forward,
            backward_packs=backward,
            agree_seconds=rules.costs.norm_seconds() if rules.configuration.agree else 0.0,
        ),
        predicted=Predicted(seconds, min(lower_bound, seconds), rules.host_bytes(), devices),
        programs=Programs(print_program(outcome.lanes)),
        options=options or {},
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
