"""A plan given by the user: layer counts and microbatch sizes, lowered and simulated like any other.

In: what a `harmony-fixed/1` file says. Out: a configuration.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from planner.contract.errors import FormatError
from planner.contract.fixed import Fixed
from planner.contract.schedule import Configuration
from planner.search.draft import Cuts, Draft, configure, why_not_resident
from planner.search.problem import Problem


def fixed_configuration(problem: Problem, fixed: Fixed) -> Configuration:
    """The configuration that it stands for. Raises FormatError where the numbers do not fit the problem."""
    devices, layers = problem.num_devices, problem.costs.num_layers
    if fixed.replicas < 1 or devices % fixed.replicas:
        raise FormatError(f"$.replicas: {fixed.replicas} do not divide {devices} devices")
    if fixed.replicas > problem.minibatch:
        raise FormatError(f"$.replicas: {fixed.replicas} for a minibatch of {problem.minibatch} samples")
    for name in ("forward", "backward"):
        size, counts = getattr(fixed, f"{name}_microbatch"), getattr(fixed, f"{name}_packs")
        if not 1 <= size <= problem.minibatch:
            raise FormatError(f"$.{name}_microbatch: {size} samples of a minibatch of {problem.minibatch}")
        if any(count < 1 for count in counts):
            raise FormatError(f"$.{name}_packs: {list(counts)}; every pack has at least one layer")
    if sum(fixed.backward_packs) != layers:
        raise FormatError(f"$.backward_packs: cover {sum(fixed.backward_packs)} of {layers} layers")
    expected = layers - fixed.backward_packs[-1]
    if sum(fixed.forward_packs) != expected:
        raise FormatError(
            f"$.forward_packs: cover {sum(fixed.forward_packs)} layers; the last backward pack runs its own forward, "
            f"so {expected} are left"
        )
    if fixed.reflected and fixed.forward_packs != fixed.backward_packs[:-1]:
        raise FormatError("$.reflected: needs the same packs forward and backward")
    if fixed.resident:
        _check_resident(problem, fixed)
    for name in ("kept", "offloaded"):
        chosen = getattr(fixed, name)
        if chosen and (len(chosen) != len(fixed.backward_packs) or not fixed.reflected):
            raise FormatError(f"$.{name}: needs reflected packs and one number for each backward pack")
    draft = Draft(
        problem.shape(fixed.replicas),
        fixed.forward_microbatch,
        fixed.backward_microbatch,
        _cuts(fixed.forward_packs),
        _cuts(fixed.backward_packs),
        fixed.reflected,
        fixed.kept or ((0,) * len(fixed.backward_packs) if fixed.reflected else ()),
        fixed.offloaded,
        resident=fixed.resident,
    )
    return configure(problem, draft)


def _check_resident(problem: Problem, fixed: Fixed) -> None:
    if len(fixed.resident) != len(fixed.backward_packs):
        raise FormatError(
            f"$.resident: {len(fixed.resident)} choices for {len(fixed.backward_packs)} backward packs"
        )
    if any(fixed.resident[:-1]) and not fixed.reflected:
        raise FormatError("$.resident: needs reflected packs, but for the last one")
    cuts = _cuts(fixed.backward_packs)
    for b, (first, end) in enumerate(pairwise(cuts)):
        if fixed.resident[b]:
            fault = why_not_resident(problem, fixed.replicas, first, end)
            if fault:
                raise FormatError(f"$.resident[{b}]: {fault}")


def _cuts(counts: tuple[int, ...]) -> Cuts:
    return tuple(accumulate(counts, initial=0))
