"""The one-pass simulator against an event-driven one of the tests' own, and by hand."""

from __future__ import annotations

from random import Random

import pytest

from planner.contract.actions import Receive, Send, SwapIn, Value
from planner.contract.precedence import Graph
from planner.contract.rules import Rules
from planner.contract.schedule import parse_program
from planner.search import plan
from planner.simulate import Timing, simulate
from tests.planner.chains import random_chain, server

ITERATIONS = 6


def event_driven_period(graph: Graph, timing: Timing) -> float:
    """Each stream starts its next action as soon as all it waits for is over; time jumps from end to end.

    A recv runs with its send, which waits for what both wait for.
    """
    over: dict[tuple[int, int], float] = {}
    position = [0] * len(graph.lanes)
    lengths = [len(lane.entries) for lane in graph.lanes]
    running: list[tuple[float, int, int]] = []
    now, ends = 0.0, [0.0] * ITERATIONS
    while True:
        progress = True
        while progress:
            progress = False
            for lane in range(len(graph.lanes)):
                iteration, place = divmod(position[lane], lengths[lane])
                node = graph.first_of[lane] + place
                if iteration >= ITERATIONS or any(n == node and k == iteration for _, n, k in running):
                    continue
                if any(iteration >= ago and (n, iteration - ago) not in over for n, ago in graph.waits[node]):
                    continue
                if isinstance(graph.actions[node], Receive):
                    duration = 0.0
                else:
                    duration = timing.seconds(graph.actions[node])
                running.append((now + duration, node, iteration))
                progress = True
            for end, node, iteration in [item for item in running if item[0] <= now]:
                running.remove((end, node, iteration))
                over[node, iteration] = end
                ends[iteration] = max(ends[iteration], end)
                position[graph.lane_of[node]] += 1
                progress = True
        if not running:
            break
        now = min(running)[0]
    return ends[-1] - ends[-2]


@pytest.mark.parametrize("skips", [0, 2])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_period_equals_an_event_driven_simulation(devices: int, skips: int) -> None:
    for seed in range(3):
        profile, hardware = random_chain(Random(seed), 6, skips), server(devices)
        schedule = plan(profile, hardware, minibatch=6).schedule
        assert schedule is not None
        rules = Rules(profile, schedule.configuration)
        graph = Graph(parse_program(schedule.programs.train), rules)
        expected = event_driven_period(graph, Timing(rules, hardware))
        assert schedule.predicted.iteration_seconds == pytest.approx(expected, rel=1e-6)


def test_actions_take_bytes_over_the_rate_and_seconds_over_the_scale() -> None:
    profile, hardware = random_chain(Random(0), 4), server(2, rate=2e9, peer=4e9)
    schedule = plan(profile, hardware, minibatch=4, mode="pp").schedule
    assert schedule is not None
    rules = Rules(profile, schedule.configuration)
    timing = Timing(rules, hardware)
    weights = Value("WB", 0)
    # the link of 2 GB/s is shared by two devices, statically
    assert timing.seconds(SwapIn(weights)) == pytest.approx(1e-5 + rules.nbytes(weights) / 1e9)
    graph = Graph(parse_program(schedule.programs.train), rules)
    send = next(action for action in graph.actions if isinstance(action, Send))
    assert timing.seconds(send) == pytest.approx(rules.nbytes(send.value) / 4e9)


def test_trace_starts_at_zero_and_streams_never_overlap_themselves() -> None:
    profile, hardware = random_chain(Random(5), 6), server(2)
    schedule = plan(profile, hardware, minibatch=6).schedule
    assert schedule is not None
    trace = simulate(schedule, profile, hardware)
    assert min(span.start_seconds for span in trace.spans) == pytest.approx(0.0, abs=1e-12)
    ends: dict[tuple[int, str], float] = {}
    for span in trace.spans:
        key = span.device, span.stream
        assert span.start_seconds >= ends.get(key, 0.0) - 1e-12
        ends[key] = span.end_seconds
    for device, summary in enumerate(trace.devices):
        samples = [sample.allocated_bytes for sample in trace.memory if sample.device == device]
        assert max(samples) <= summary.peak_bytes
        assert samples[-1] == 0
