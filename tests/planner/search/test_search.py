"""The search: what it promises on measured profiles, and against all plans of tiny instances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from random import Random
from typing import Any

import msgspec
import pytest

from planner.contract import store
from planner.contract.errors import HarmonyError, InfeasibleError, VerifyError
from planner.contract.verify import check_program, verify
from planner.search import plan
from planner.search.bounds import Bounds
from planner.search.draft import Draft, configure
from planner.search.outcome import check_fits, evaluate
from planner.search.problem import Problem
from planner.simulate import simulate
from tests.planner.chains import MB, random_chain, reference_case, server, updated_anywhere


@pytest.mark.parametrize(
    ("profile", "hardware", "minibatch", "seconds"),
    [
        ("bert_96_seqlen512", "4x1080ti-9gb", 64, 16.8),
        ("bert_large_seqlen512", "1x1080ti-10gib", 16, 4.0),
    ],
)
def test_measured_profile_is_planned_as_fast_as_promised(
    profile: str, hardware: str, minibatch: int, seconds: float
) -> None:
    costs, machine = reference_case(profile, hardware)
    result = plan(costs, machine, minibatch=minibatch)
    assert result.schedule is not None
    assert result.lower_bound_seconds <= result.seconds <= seconds
    verify(result.schedule, costs, machine)
    assert simulate(result.schedule, costs, machine).iteration_seconds == (result.seconds,)


def every_plan(problem: Problem) -> Iterator[Draft]:
    """All drafts: every shape, pair of sizes and partition forward and backward; the same packs in both phases also
    reflected, with every number of activations kept, or offloaded."""
    layers = problem.costs.num_layers
    partitions = [(0, *cuts, layers) for n in range(layers) for cuts in combinations(range(1, layers), n)]
    for shape in problem.shapes():
        for f, b in problem.size_pairs(shape.samples):
            for backward in partitions:
                start = backward[-2]
                if start == 0:
                    yield Draft(shape, f, b, (0,), backward)
                    continue
                for forward in {c[: c.index(start) + 1] for c in partitions if start in c}:
                    yield Draft(shape, f, b, forward, backward)
                if f == b:
                    count = -(-shape.samples // b)
                    choices = [
                        (k, o) for k in range(count + 1) for o in range(count + 1 - k) if k == 0 or o == 0
                    ]
                    for chosen in product(choices, repeat=len(backward) - 2):
                        kept, offloaded = tuple(k for k, _ in chosen), tuple(o for _, o in chosen)
                        yield Draft(shape, f, b, backward[:-1], backward, True, (*kept, 0), (*offloaded, 0))


@pytest.mark.parametrize(
    ("seed", "devices", "clip"),
    [*((seed, devices, False) for seed in range(3) for devices in (1, 2)), (0, 2, True), (1, 1, True)],
)
def test_no_plan_is_below_the_bound_and_the_search_finds_the_best(
    seed: int, devices: int, clip: bool
) -> None:
    problem = Problem(random_chain(Random(seed), 4), server(devices, 25 * MB), 4, devices, clip)
    bounds = Bounds(problem)
    best = float("inf")
    kinds: Counter[str] = Counter()
    for draft in every_plan(problem):
        try:
            outcome = evaluate(problem, configure(problem, draft))
            check_fits(problem, outcome)
        except (InfeasibleError, VerifyError):
            continue
        kinds[draft.shape.mode] += 1
        kinds["keep"] += any(draft.kept)
        kinds["offload"] += any(draft.offloaded)
        bound = bounds.seconds(draft.shape, draft.forward_size, draft.backward_size)
        assert outcome.seconds >= bound * (1 - 1e-9), draft
        best = min(best, outcome.seconds)
    assert kinds["pp"] > 50
    assert kinds["keep"] > 5
    assert devices == 1 or kinds["dp"] > 50
    result = plan(problem.profile, problem.hardware, minibatch=4, clip=clip)
    assert best * (1 - 1e-9) <= result.seconds <= best * (1 + 1e-9)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_clipping_makes_updates_wait_for_all_gradients(devices: int) -> None:
    profile = updated_anywhere(random_chain(Random(devices), 8))
    machine = server(devices, 60 * MB)
    free, clipped = (plan(profile, machine, minibatch=8, clip=clip) for clip in (False, True))
    assert clipped.schedule is not None
    assert clipped.lower_bound_seconds <= clipped.seconds
    norm = sum(layer.update.host_seconds for layer in profile.layers)
    assert clipped.seconds > free.seconds + 0.5 * norm
    configuration = clipped.schedule.configuration
    assert configuration.agree
    assert configuration.agree_seconds == pytest.approx(norm)
    assert {pack.update for pack in configuration.backward_packs} == {"host"}
    host = {s.device: s.actions for s in clipped.schedule.programs.train if s.stream == "host"}
    assert host[0][0] == "agree"
    for actions in host.values():
        packs = [int(action.split(":")[1]) for action in actions if action.startswith("update")]
        assert packs == sorted(packs), "the next iteration needs the first layers first"
    verify(clipped.schedule, profile, machine)
    trace = simulate(clipped.schedule, profile, machine)
    (agreed,) = (span for span in trace.spans if span.action == "agree")
    gradients = [span for span in trace.spans if span.action.startswith("out:G")]
    updates = [span for span in trace.spans if span.action.startswith("update")]
    assert max(span.end_seconds for span in gradients) <= agreed.start_seconds + 1e-12
    assert agreed.end_seconds <= min(span.start_seconds for span in updates) + 1e-12


def with_residents(problem: Problem) -> Iterator[Draft]:
    """Reflected drafts of one pipeline with everything kept or recomputed, and any packs resident."""
    for draft in every_plan(problem):
        count = -(-draft.shape.samples // draft.backward_size)
        if draft.reflected and draft.shape.num_replicas == 1 and set(draft.kept[:-1]) <= {0, count}:
            for resident in product((False, True), repeat=draft.num_backward):
                yield replace(draft, resident=resident)


@pytest.mark.parametrize(("devices", "memory"), [(1, 35), (1, 90), (2, 30)])
def test_the_search_finds_the_best_of_plans_with_resident_weights(devices: int, memory: int) -> None:
    profile = updated_anywhere(random_chain(Random(memory), 3))
    problem = Problem(profile, server(devices, memory * MB), 4, devices)
    bounds = Bounds(problem)
    best, num_resident = float("inf"), 0
    for draft in with_residents(problem):
        try:
            outcome = evaluate(problem, configure(problem, draft))
            check_fits(problem, outcome)
            check_program(outcome.graph)
        except InfeasibleError:
            continue
        num_resident += any(draft.resident)
        bound = bounds.seconds(draft.shape, draft.forward_size, draft.backward_size)
        assert outcome.seconds >= bound * (1 - 1e-9), draft
        best = min(best, outcome.seconds)
    assert num_resident > 20
    result = plan(profile, problem.hardware, minibatch=4)
    assert result.schedule is not None
    assert result.seconds <= best * (1 + 1e-9)
    verify(result.schedule, profile, problem.hardware)


def test_what_fits_stays_and_nothing_is_swapped_but_the_batch() -> None:
    profile = updated_anywhere(random_chain(Random(5), 6))
    result = plan(profile, server(2, 10_000 * MB, rate=1e7), minibatch=8, mode="pp")
    assert result.schedule is not None
    configuration = result.schedule.configuration
    assert {pack.weights for pack in configuration.backward_packs} == {"resident"}
    assert {pack.update for pack in configuration.backward_packs} == {"device"}
    assert all(set(pack.activations) <= {"keep"} for pack in configuration.backward_packs)
    assert sum(device.swap_out_bytes for device in result.schedule.predicted.devices) == 0
    # the batch of 1008 bytes a sample
    assert sum(device.swap_in_bytes for device in result.schedule.predicted.devices) <= 8 * 1008 * 2
    host = plan(profile, server(2, 10_000 * MB, rate=1e7), minibatch=8, mode="pp", updates="host")
    assert host.schedule is not None
    assert {pack.update for pack in host.schedule.configuration.backward_packs} == {"host"}
    assert result.seconds < host.seconds


@pytest.mark.parametrize("skips", [0, 3])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_plans_of_random_models_verify(devices: int, skips: int) -> None:
    for seed in range(4):
        profile, hardware = random_chain(Random(seed), 7, skips), server(devices)
        result = plan(profile, hardware, minibatch=8)
        assert result.schedule is not None, result.reason
        found = verify(result.schedule, profile, hardware)
        assert [p.nbytes for p in found] == [d.peak_bytes for d in result.schedule.predicted.devices]
        assert result.lower_bound_seconds <= result.seconds


def test_same_inputs_give_the_same_bytes() -> None:
    profile, hardware = random_chain(Random(1), 6), server(2)
    first, second = (plan(profile, hardware, minibatch=6).schedule for _ in range(2))
    assert first is not None
    assert second is not None
    assert store.encode(first) == store.encode(second)


def test_stochastic_layers_get_equal_microbatches() -> None:
    """Case 3 and 1: recompute must see what forward saw."""
    profile = random_chain(Random(2), 5)
    first = msgspec.structs.replace(profile.layers[0], stochastic=True)
    profile = msgspec.structs.replace(profile, layers=(first, *profile.layers[1:]))
    schedule = plan(profile, server(2), minibatch=8).schedule
    assert schedule is not None
    assert schedule.configuration.microbatches.forward == schedule.configuration.microbatches.backward


def test_layer_that_fits_no_device_is_named_with_both_numbers() -> None:
    """Case 11."""
    profile = random_chain(Random(3), 4)
    result = plan(profile, server(2, 3 * MB), minibatch=4)
    assert result.status == "infeasible"
    assert result.schedule is None
    assert "layer " in result.reason
    assert f"the limit of {3 * MB} bytes" in result.reason


def test_host_that_is_too_small_is_infeasible_and_says_so() -> None:
    """Case 25."""
    hardware = server(1)
    hardware = msgspec.structs.replace(
        hardware, host=msgspec.structs.replace(hardware.host, memory_bytes=1000)
    )
    result = plan(random_chain(Random(3), 4), hardware, minibatch=4)
    assert result.status == "infeasible"
    assert "host" in result.reason
    assert "memory_bytes of 1000" in result.reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"minibatch": 0}, "at least one sample"),
        ({"minibatch": 4, "mode": "tp"}, "there is no such mode"),
        ({"minibatch": 4, "mode": "hybrid"}, "cannot be split"),
        ({"minibatch": 4, "activations": "drop"}, "use one of any, recompute"),
        ({"minibatch": 4, "num_devices": 3}, "the hardware has 2"),
    ],
)
def test_request_that_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(HarmonyError, match=message):
        plan(random_chain(Random(0), 3), server(2), **arguments)


@pytest.mark.parametrize("sharing", ["fair", "static", "none"])
@pytest.mark.parametrize("peer", [None, 4e9])
def test_unequal_devices_are_planned_for(sharing: str, peer: float | None) -> None:
    """Case 28: capacity and speed per device; the fast one gets more samples, and no plan exceeds the small one."""
    profile = random_chain(Random(1), 8, skips=1)
    hardware = server(3, 40 * MB, peer=peer)
    first, second, third = hardware.devices
    fast = msgspec.structs.replace(first, compute_scale=4.0, memory_bytes=80 * MB)
    small = msgspec.structs.replace(second, memory_bytes=30 * MB)
    links = tuple(msgspec.structs.replace(link, sharing=sharing) for link in hardware.host_links)
    hardware = msgspec.structs.replace(hardware, devices=(fast, small, third), host_links=links)
    for mode in ("any", "pp", "dp"):
        result = plan(profile, hardware, minibatch=12, mode=mode)
        assert result.schedule is not None
        verify(result.schedule, profile, hardware)
        assert result.lower_bound_seconds <= result.seconds
        if mode == "dp":
            samples = [end - start for start, end in result.schedule.configuration.replicas]
            assert samples[0] == 2 * sum(samples[1:]) == 8


def test_uneven_minibatches_have_a_smaller_last_microbatch() -> None:
    profile, hardware = random_chain(Random(2), 6), server(2)
    for minibatch in (5, 7):
        schedule = plan(profile, hardware, minibatch=minibatch).schedule
        assert schedule is not None
        verify(schedule, profile, hardware)
        for ranges in (
            schedule.configuration.microbatches.forward,
            schedule.configuration.microbatches.backward,
        ):
            assert sum(end - first for first, end in ranges) == minibatch
