"""Virtualised memory: no swaps where all fits, the known volume where nothing does, more time with less memory."""

from __future__ import annotations

from random import Random

import pytest

from planner.baselines import dp_swap, pp_swap
from planner.search import plan
from planner.search.problem import Problem
from tests.planner.chains import MB, random_chain, reference_case, server


def test_nothing_is_swapped_where_everything_fits() -> None:
    problem = Problem(random_chain(Random(0), 6), server(2, 500 * MB), 8, 2)
    for baseline in (dp_swap(problem), pp_swap(problem)):
        assert baseline is not None
        assert (baseline.swap_in_bytes, baseline.swap_out_bytes) == (0, 0)


def test_less_memory_swaps_more_and_takes_longer() -> None:
    profile = random_chain(Random(0), 6)
    for run in (dp_swap, pp_swap):
        found = [run(Problem(profile, server(2, memory * MB), 8, 2)) for memory in (25, 60, 500)]
        assert all(baseline is not None for baseline in found)
        moved = [baseline.swap_in_bytes for baseline in found if baseline is not None]
        seconds = [baseline.seconds for baseline in found if baseline is not None]
        assert moved[0] > moved[1] >= moved[2] == 0
        assert seconds[0] > seconds[1] >= seconds[2]


def test_one_device_and_one_microbatch_cycles_every_weight_through_a_small_memory() -> None:
    """Least recently used over a cycle longer than memory misses every time: weights come for the forward, the
    backward and the update."""
    profile = random_chain(Random(0), 12)
    problem = Problem(profile, server(1, 22 * MB), 1, 1)
    baseline = dp_swap(problem)
    assert baseline is not None
    weights = problem.costs.weight_bytes(0, 11)
    states = problem.costs.state_bytes(0, 11)
    assert 2 * weights < baseline.swap_in_bytes <= 4 * weights + states + 12 * MB


def test_where_not_one_operation_fits_there_is_none() -> None:
    assert dp_swap(Problem(random_chain(Random(0), 4), server(1, 2 * MB), 4, 1)) is None


def test_a_plan_is_faster_than_both_on_a_measured_model() -> None:
    profile, hardware = reference_case("bert_96_seqlen512", "8x1080ti-9gb")
    ours = plan(profile, hardware, minibatch=16).seconds
    problem = Problem(profile, hardware, 16, 8)
    dp, pp = dp_swap(problem), pp_swap(problem)
    assert dp is not None
    assert pp is not None
    assert dp.seconds / ours > 7.6
    assert pp.seconds / ours > 1.5
    assert dp.swap_in_bytes > 0


@pytest.mark.parametrize("devices", [1, 3])
def test_pp_swap_covers_every_layer_once(devices: int) -> None:
    problem = Problem(random_chain(Random(1), 7), server(devices, 500 * MB), 6, devices)
    baseline = pp_swap(problem)
    assert baseline is not None
    costs, size = problem.costs, baseline.microbatch_size
    work = 6 / size * (costs.forward_seconds(0, 6, size) + costs.backward_seconds(0, 6, size))
    assert baseline.seconds >= work / devices
