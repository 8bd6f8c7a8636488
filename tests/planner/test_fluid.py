"""Shared resources: by hand, against the one-pass simulation where nothing is shared, and against small time steps."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from planner.contract.actions import Receive, SwapIn, SwapOut, Update
from planner.contract.hardware import Hardware
from planner.contract.precedence import Graph
from planner.contract.profile import Profile
from planner.contract.rules import Rules
from planner.contract.schedule import Schedule, parse_program
from planner.fluid import run_shared
from planner.search import plan
from planner.simulate import Timing, run, simulate
from tests.planner.chains import MB, random_chain, server

replace = msgspec.structs.replace


def fair(hardware: Hardware) -> Hardware:
    return replace(hardware, host_links=tuple(replace(link, sharing="fair") for link in hardware.host_links))


def planned(seed: int, devices: int, hardware: Hardware) -> tuple[Profile, Schedule]:
    profile = random_chain(Random(seed), 6)
    schedule = plan(profile, hardware, minibatch=6).schedule
    assert schedule is not None
    return profile, schedule


def graph_of(profile: Profile, schedule: Schedule) -> tuple[Graph, Rules]:
    rules = Rules(profile, schedule.configuration)
    return Graph(parse_program(schedule.programs.train), rules), rules


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_events_equal_the_one_pass_simulation_where_nothing_is_shared(devices: int) -> None:
    for seed in range(3):
        hardware = server(devices)
        profile, schedule = planned(seed, devices, hardware)
        graph, rules = graph_of(profile, schedule)
        timing = Timing(rules, hardware)
        assert not timing.shared
        assert run_shared(graph, timing).period_seconds == pytest.approx(
            run(graph, timing).period_seconds, rel=1e-9
        )


def small_steps(graph: Graph, timing: Timing, iterations: int, step: float) -> float:
    """The period by small steps of time: every running action gets its share of the resource it is on."""
    lengths = [len(lane.entries) for lane in graph.lanes]
    position, over, ends = [0] * len(lengths), {}, [0.0] * iterations
    left: dict[tuple[int, int], list[float]] = {}
    now = 0.0
    while any(position[lane] < iterations * lengths[lane] for lane in range(len(lengths))):
        progress = True
        while progress:
            progress = False
            for lane, length in enumerate(lengths):
                if position[lane] >= iterations * length:
                    continue
                iteration, place = divmod(position[lane], length)
                key = graph.first_of[lane] + place, iteration
                if key not in left:
                    if any(
                        iteration >= ago and (n, iteration - ago) not in over
                        for n, ago in graph.waits[key[0]]
                    ):
                        continue
                    work = timing.work(graph.actions[key[0]])
                    is_receive = isinstance(graph.actions[key[0]], Receive)
                    left[key] = [0.0, 0.0] if is_receive else [work.own_seconds, work.shared_seconds]
                if sum(left[key]) <= 1e-12:
                    over[key] = now
                    ends[iteration] = max(ends[iteration], now)
                    position[lane] += 1
                    progress = True
        users: dict[str, int] = {}
        running = [key for key in left if key not in over]
        for key in running:
            resource = timing.work(graph.actions[key[0]]).resource
            if resource is not None and left[key][0] <= 0:
                users[resource] = users.get(resource, 0) + 1
        for key in running:
            resource = timing.work(graph.actions[key[0]]).resource
            if left[key][0] > 0:
                left[key][0] = max(0.0, left[key][0] - step)
            elif resource is not None:
                left[key][1] = max(
                    0.0, left[key][1] - step * min(1.0, timing.shared[resource] / users[resource])
                )
        now += step
    return (ends[-1] - ends[1]) / (iterations - 2)


def test_fair_links_and_scarce_workers_equal_a_simulation_in_small_steps() -> None:
    for seed in range(2):
        hardware = fair(server(2, 30 * MB, rate=1e9))
        hardware = replace(hardware, host=replace(hardware.host, update_workers=1))
        profile, schedule = planned(seed, 2, hardware)
        graph, rules = graph_of(profile, schedule)
        timing = Timing(rules, hardware)
        assert set(timing.shared) == {"h2d 0", "d2h 0", "update workers"}
        expected = small_steps(graph, timing, iterations=4, step=2e-5)
        assert run_shared(graph, timing).period_seconds == pytest.approx(expected, rel=0.03)


def test_a_fair_link_is_between_a_static_share_and_a_link_of_ones_own() -> None:
    for seed in range(3):
        shared = server(2, 30 * MB, rate=1e9)
        profile, schedule = planned(seed, 2, shared)
        graph, rules = graph_of(profile, schedule)
        alone = replace(shared, host_links=tuple(replace(link, sharing="none") for link in shared.host_links))
        seconds = [run(graph, Timing(rules, h)).period_seconds for h in (alone, fair(shared), shared)]
        assert seconds[0] * (1 - 1e-9) <= seconds[1] <= seconds[2] * (1 + 1e-9)


def test_spans_on_a_fair_link_take_longer_while_it_is_shared() -> None:
    hardware = fair(server(2, 30 * MB, rate=5e8))
    profile, schedule = planned(0, 2, hardware)
    _, rules = graph_of(profile, schedule)
    timing = Timing(rules, hardware)
    trace = simulate(schedule, profile, hardware)
    by_text = {str(a): a for a in graph_of(profile, schedule)[0].actions}
    stretched = 0
    for span in trace.spans:
        action = by_text[span.action]
        if isinstance(action, SwapIn | SwapOut | Update):
            took, alone = span.end_seconds - span.start_seconds, timing.seconds(action)
            assert took >= alone * (1 - 1e-6)
            stretched += took > alone * 1.01
    assert stretched > 0
