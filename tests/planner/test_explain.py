"""The critical path adds up, names what limits, and a change of what limits helps."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from planner.explain import changes, what_if
from planner.frontier import frontier
from planner.search import plan
from tests.planner.chains import MB, random_chain, server


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_the_critical_path_adds_up_to_the_iteration(devices: int) -> None:
    for seed in range(4):
        result = plan(random_chain(Random(seed), 6), server(devices), minibatch=6)
        assert sum(result.critical_path.values()) == pytest.approx(result.seconds, rel=1e-6)
        assert all(seconds >= 0 for seconds in result.critical_path.values())
        assert result.critical_path["compute"] > 0


def test_a_slow_link_shows_as_swaps_and_a_faster_one_helps_most() -> None:
    profile, hardware = random_chain(Random(2), 6), server(1, 20 * MB, rate=1e8)
    result = plan(profile, hardware, minibatch=4)
    path = result.critical_path
    assert path["swap in"] + path["swap out"] > path["compute"] + path["recompute"]
    answers = {answer.change: answer for answer in what_if(profile, hardware, 4, 1, None)}
    rates = {name: answer.samples_per_second or 0.0 for name, answer in answers.items()}
    assert rates["host links twice as fast"] > 1.3 * 4 / result.seconds
    assert all(rate >= 4 / result.seconds * (1 - 1e-6) for rate in rates.values())


def test_changes_are_what_they_say() -> None:
    hardware = server(2)
    by_name = {change.name: change for change in changes(hardware, 8, 2)}
    assert by_name["1 GiB more on each device"].hardware.devices[0].memory_bytes == 60 * MB + 2**30
    assert by_name["host links twice as fast"].hardware.host_links[0].d2h_bytes_per_second == 4e9
    assert by_name["one more device"].num_devices == 3 == len(by_name["one more device"].hardware.devices)
    assert by_name["a minibatch twice as large"].minibatch == 16
    # with devices to spare the next one of the hardware is used
    assert next(c for c in changes(hardware, 8, 1) if c.name == "one more device").hardware == hardware


def test_frontier_plans_every_combination_and_says_where_nothing_fits() -> None:
    profile, hardware = random_chain(Random(1), 5), server(2)
    points = frontier(profile, hardware, memories=[2 * MB, 60 * MB], devices=[1, 2], minibatches=[4])
    assert [(p.memory_bytes, p.num_devices) for p in points] == [
        (2 * MB, 1),
        (60 * MB, 1),
        (2 * MB, 2),
        (60 * MB, 2),
    ]
    assert points[0].seconds is None
    assert "limit of 2000000 bytes" in points[0].reason
    same = plan(profile, hardware, minibatch=4)
    assert points[3].seconds == same.seconds
    assert msgspec.json.encode(points)
