"""Costs of packs from prefix sums equal what a reader would add up by hand, on chains and on DAGs."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.contract.costs import Costs, RangeMax
from planner.contract.cuts import TARGETS, Tensor, entering, leaving, nbytes, tensors_of
from planner.contract.errors import FormatError
from planner.contract.profile import BackwardCost, Edge, ForwardCost, Layer, Profile, UpdateCost, bracket
from tests.planner.tiny import PROFILE, layer

replace = msgspec.structs.replace

small = st.integers(0, 50)


@st.composite
def layers(draw: st.DrawFn, name: str, saved_is_known: bool) -> Layer:
    """A layer whose peaks hold at least its weights, gradients and saved bytes; measured with 1, 2 and 4 samples."""
    weight, buffers = draw(small), draw(small)
    gradient = draw(st.sampled_from([0, weight]))
    held = weight + buffers
    forward = [draw(small) for _ in range(3)]
    saved = sorted(draw(small) for _ in range(3))
    rest = [draw(small) for _ in range(3)]
    seconds = st.floats(1e-6, 1.0)
    return Layer(
        name,
        weight,
        gradient,
        tuple(
            ForwardCost(n, draw(seconds), held + bytes_) for n, bytes_ in zip((1, 2, 4), forward, strict=True)
        ),
        tuple(
            BackwardCost(n, draw(seconds), held + gradient + s + r, s if saved_is_known else None)
            for n, s, r in zip((1, 2, 4), saved, rest, strict=True)
        ),
        buffer_bytes=buffers,
        optimizer_state_bytes=draw(small),
        batch_coupled=draw(st.booleans()),
        update=UpdateCost(draw(st.floats(0.0, 1.0)), draw(st.none() | st.floats(0.0, 1.0))),
    )


@st.composite
def profiles(draw: st.DrawFn, skips: bool) -> Profile:
    num_layers = draw(st.integers(1, 6))
    known = draw(st.booleans())
    edges = [
        Edge(-1, 0, draw(small)),
        *(Edge(i, i + 1, draw(small), draw(small)) for i in range(num_layers - 1)),
    ]
    if skips and num_layers > 1:
        for number in range(draw(st.integers(1, 4))):
            src = draw(st.integers(-1, num_layers - 2))
            dst = draw(st.integers(src + 1, num_layers - 1))
            edges.append(Edge(src, dst, draw(small), draw(small), draw(st.booleans()), f"skip{number}"))
    return replace(
        PROFILE,
        layers=tuple(draw(layers(f"l{i}", known)) for i in range(num_layers)),
        edges=tuple(edges),
        target_bytes_per_sample=draw(small),
    )


def packs(num_layers: int) -> list[tuple[int, int]]:
    return [(first, last) for first in range(num_layers) for last in range(first, num_layers)]


def names(tensors: Iterable[Tensor]) -> set[tuple[int, str]]:
    return {(tensor.src, tensor.name) for tensor in tensors}


# ---- cuts


def test_one_tensor_however_many_consumers() -> None:
    edges = (*PROFILE.edges, Edge(0, 2, 10))
    tensors = tensors_of(replace(PROFILE, edges=edges))
    assert [(t.src, t.consumers) for t in tensors] == [(-1, (0,)), (-1, (2,)), (0, (1, 2)), (1, (2,))]


def test_two_outputs_of_a_layer_are_two_tensors() -> None:
    edges = (*PROFILE.edges, Edge(0, 2, 7, tensor="mask", differentiable=False))
    found = [
        (t.src, t.name, t.bytes_per_sample, t.differentiable)
        for t in tensors_of(replace(PROFILE, edges=edges))
    ]
    assert (0, "", 10, True) in found
    assert (0, "mask", 7, False) in found


def test_labels_go_from_the_batch_to_the_last_layer() -> None:
    [labels] = [t for t in tensors_of(PROFILE) if t.name == TARGETS]
    assert labels == Tensor(-1, TARGETS, 4, 0, False, (2,))


def test_nothing_from_the_batch_is_differentiable() -> None:
    edges = (Edge(-1, 0, 6, differentiable=True), *PROFILE.edges[1:])
    assert not any(t.differentiable for t in tensors_of(replace(PROFILE, edges=edges)) if t.src == -1)


def test_a_skip_connection_crosses_every_cut_between_its_ends() -> None:
    """0 -> 1 -> 2 and 0 -> 2: the tensor of layer 0 leaves [0, 1] and enters [2, 2] and [1, 2] alike."""
    skip = Tensor(0, "", 10, 3, True, (1, 2))
    tensors = [Tensor(-1, "", 6, 0, False, (0,)), skip, Tensor(1, "", 20, 0, True, (2,))]
    assert leaving(tensors, 0, 0) == (skip,)
    assert leaving(tensors, 0, 1) == (skip, tensors[2])
    assert entering(tensors, 2, 2) == (skip, tensors[2])
    assert entering(tensors, 1, 2) == (skip,)
    assert leaving(tensors, 0, 2) == ()
    assert nbytes([skip], 4) == 43


@given(profiles(skips=True))
def test_what_enters_and_leaves_a_pack_follows_from_the_edges(profile: Profile) -> None:
    tensors, costs = tensors_of(profile), Costs(profile)
    for first, last in packs(len(profile.layers)):
        inside = range(first, last + 1)
        into = {(e.src, e.tensor) for e in profile.edges if e.src < first and e.dst in inside}
        if profile.target_bytes_per_sample and last == len(profile.layers) - 1:
            into.add((-1, TARGETS))
        out = {(e.src, e.tensor) for e in profile.edges if e.src in inside and e.dst > last}
        assert names(entering(tensors, first, last)) == names(costs.entering(first, last)) == into
        assert names(leaving(tensors, first, last)) == names(costs.leaving(first, last)) == out


# ---- costs


@given(st.lists(st.integers(-100, 100), min_size=1, max_size=40))
def test_range_max_is_max(values: list[int]) -> None:
    largest = RangeMax(values)
    for first, last in packs(len(values)):
        assert largest(first, last) == max(values[first : last + 1])


@pytest.mark.parametrize(("size", "seconds"), [(1, 1.0), (2, 2.0), (3, 4.0), (4, 6.0)])
def test_seconds_between_two_measured_sizes_are_interpolated(size: int, seconds: float) -> None:
    costs = tuple(ForwardCost(n, s, 0) for n, s in ((1, 1.0), (2, 2.0), (4, 6.0)))
    profile = replace(PROFILE, layers=(replace(PROFILE.layers[0], forward=costs), *PROFILE.layers[1:]))
    assert Costs(profile).forward_seconds(0, 0, size) == pytest.approx(seconds)


def test_below_the_smallest_measured_size_the_smallest_holds() -> None:
    costs = [ForwardCost(4, 1.0, 0), ForwardCost(8, 2.0, 0)]
    assert bracket(costs, 1, "") == bracket(costs, 4, "") == (0, 0, 0.0)
    assert bracket(costs, 6, "") == (0, 1, 0.5)


def test_beyond_the_largest_measured_size_there_is_nothing() -> None:
    with pytest.raises(
        FormatError,
        match=r"^\$\.layers\[0\]\.forward: microbatch of 5 samples, but the largest one profiled has 4",
    ):
        Costs(PROFILE).forward_seconds(0, 2, 5)


def test_bytes_between_two_sizes_are_rounded_up() -> None:
    costs = (ForwardCost(1, 1.0, 100), ForwardCost(4, 1.0, 101))
    profile = replace(PROFILE, layers=(replace(PROFILE.layers[0], weight_bytes=0, forward=costs),), edges=())
    assert Costs(profile).at(2).forward_rest == [101]


@given(profiles(skips=True), st.integers(1, 4))
def test_sums_over_a_pack_equal_naive_sums(profile: Profile, size: int) -> None:
    costs = Costs(profile)
    for first, last in packs(len(profile.layers)):
        inside = profile.layers[first : last + 1]
        assert costs.weight_bytes(first, last) == sum(x.weight_bytes + x.buffer_bytes for x in inside)
        assert costs.gradient_bytes(first, last) == sum(x.gradient_bytes for x in inside)
        assert costs.state_bytes(first, last) == sum(x.optimizer_state_bytes for x in inside)
        assert costs.mutated_buffer_bytes(first, last) == sum(
            x.buffer_bytes for x in inside if x.batch_coupled
        )
        assert costs.host_update_seconds(first, last) == pytest.approx(
            sum(x.update.host_seconds for x in inside)
        )
        device = [x.update.device_seconds for x in inside]
        known = [seconds for seconds in device if seconds is not None]
        found = costs.device_update_seconds(first, last)
        assert found is None if len(known) < len(device) else found == pytest.approx(sum(known))
        forward = sum(_at(x.forward, size) for x in inside)
        backward = sum(_at(x.backward, size) for x in inside)
        assert costs.forward_seconds(first, last, size) == pytest.approx(forward)
        assert costs.backward_seconds(first, last, size) == pytest.approx(backward)


def _at(measured: tuple[ForwardCost, ...] | tuple[BackwardCost, ...], size: int) -> float:
    one, two, four = (cost.seconds for cost in measured)
    return {1: one, 2: two, 3: (two + four) / 2, 4: four}[size]


@given(profiles(skips=False), st.sampled_from([1, 2, 4]))
def test_the_fast_path_of_a_chain_equals_the_general_path(profile: Profile, size: int) -> None:
    fast, general = Costs(profile), Costs(profile)
    assert fast.is_chain
    general.is_chain = False
    for pack in packs(len(profile.layers)):
        assert fast.entering(*pack) == general.entering(*pack)
        assert fast.leaving(*pack) == general.leaving(*pack)
        assert fast.forward_workspace(*pack, size) == general.forward_workspace(*pack, size)
        assert fast.backward_workspace(*pack, size) == general.backward_workspace(*pack, size)


@given(profiles(skips=True), st.sampled_from([1, 2, 4]))
def test_the_memory_of_a_pack_follows_from_the_layers_peaks(profile: Profile, size: int) -> None:
    """design.md's formulas, added up again: weights, what is exchanged and the workspace cover each layer's own peak."""
    costs, tensors = Costs(profile), tensors_of(profile)
    at = {1: 0, 2: 1, 4: 2}[size]
    for first, last in packs(len(profile.layers)):
        exchanged = nbytes(entering(tensors, first, last), size) + nbytes(leaving(tensors, first, last), size)
        forward = costs.weight_bytes(first, last) + exchanged + costs.forward_workspace(first, last, size)
        for i in range(first, last + 1):
            others = costs.weight_bytes(first, last) - costs.weight_bytes(i, i)
            assert forward >= others + profile.layers[i].forward[at].peak_bytes
        assert costs.forward_workspace(first, last, size) >= 0
        assert costs.backward_workspace(first, last, size) >= 0


def test_backward_of_a_chain_is_saved_bytes_and_the_largest_rest() -> None:
    """Layers a and b together: what both save, and b's rest without what the pack exchanges."""
    costs = Costs(PROFILE)
    # 2 samples; rest = peak - W - dW - saved: a: 2 * (2 * 6 + 10 + 7) = 58, b: 2 * (2 * 10 + 20 + 7) = 94
    # a exchanges the batch's 6 a sample (no gradient), b its output's gradient of 20 a sample
    assert costs.at(2).backward_rest == [58, 94, 2 * (40 + 0 + 7)]
    assert costs.backward_workspace(0, 1, 2) == 2 * (30 + 50) + max(58 - 12, 94 - 40)


def test_where_saved_bytes_are_unknown_the_peaks_are_added_up_without_inner_inputs() -> None:
    unknown = tuple(
        replace(item, backward=tuple(replace(cost, saved_bytes=None) for cost in item.backward))
        for item in PROFILE.layers
    )
    costs = Costs(replace(PROFILE, layers=unknown))
    assert not costs.saved_is_known
    # a: 58 + saved 60, b: 94 + saved 100; the inner input of b is 10 a sample; exchanged as above
    assert costs.backward_workspace(0, 1, 2) == 118 + 194 - 20 - (12 + 40)


def test_a_tensor_that_skips_inside_a_pack_is_there_while_the_layers_between_run() -> None:
    """0 -> 1 -> 2 -> 3 and 0 -> 3: while 1 and 2 run, layer 0's output waits, 10 bytes a sample."""
    stack = tuple(layer(f"l{i}", 0, 10 if i else 0, 10, 0) for i in range(4))
    chain = (Edge(0, 1, 10), Edge(1, 2, 10), Edge(2, 3, 10))
    without = Costs(replace(PROFILE, layers=stack, edges=chain, target_bytes_per_sample=0))
    skipping = Costs(
        replace(PROFILE, layers=stack, edges=(*chain, Edge(0, 3, 10)), target_bytes_per_sample=0)
    )
    assert without.is_chain
    assert not skipping.is_chain
    # layer 2 alone: its input and output of 10 and 5 of workspace a sample
    assert without.forward_workspace(0, 3, 2) == 2 * 25
    assert skipping.forward_workspace(0, 3, 2) == 2 * (25 + 10)
