"""Drafts worth a sketch: for a shape and every pair of microbatch sizes, packs from the packing DP under several caps.

In: pack models of a shape. Out: candidates with an estimate, each of which can make its draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from planner.search.draft import Cuts, Draft, Residency, why_not_resident
from planner.search.pack_models import PackModels
from planner.search.packing import Fused, Packing, Prefixes
from planner.search.problem import Shape
from planner.search.refine import split
from planner.search.sketch import Sketcher

NUM_CAPS = 8
"""How many caps on the pack are tried per size and phase."""


MAX_SEED_PACKS = 120


@dataclass(frozen=True)
class Candidate:
    """A pair of microbatch sizes, and where to read its packs: from prefixes, up to where the fused pack begins."""

    shape: Shape
    forward_size: int
    backward_size: int
    forward: Prefixes | None
    backward: Fused
    start: int
    estimate_seconds: float
    layers: tuple[int, ...]
    """The layer of each cut point."""

    def draft(self) -> Draft:
        forward: Cuts = (0,)
        if self.forward is not None and self.start > 0:
            forward = self.forward.cuts(self.start)
        backward = self.backward.cuts(self.start)
        return Draft(
            self.shape,
            self.forward_size,
            self.backward_size,
            tuple(self.layers[k] for k in forward),
            tuple(self.layers[k] for k in backward),
        )


class Freedom(NamedTuple):
    """What a search may use: activations kept or offloaded, weights that are resident and updated on their device."""

    may_keep: bool = True
    may_reside: bool = True


def candidates(models: PackModels, pairs: list[tuple[int, int]]) -> list[Candidate]:
    """For each pair of sizes the best joint of forward and backward packs, by caps."""
    found: list[Candidate] = []
    layers = tuple(int(layer) for layer in models.points.layers)
    missing = pairs
    # room for the weights of two packs, or, where nothing fits that way, of one
    for slack in (2, 1):
        forward = {u: _prefixes(models, u, slack, True) for u in sorted({f for f, _ in missing})}
        backward = {
            u: [Fused(prefixes) for prefixes in _prefixes(models, u, slack, False)]
            for u in sorted({b for _, b in missing})
        }
        joined = {(f, b): list(_joined(models, f, b, forward[f], backward[b], layers)) for f, b in missing}
        found += [candidate for of_pair in joined.values() for candidate in of_pair]
        missing = [pair for pair, of_pair in joined.items() if not of_pair]
    return found


def seeds(sketcher: Sketcher, forward_size: int, backward_size: int, freedom: Freedom) -> Iterator[Draft]:
    """Evened out packs, few to many, below a fused pack like the others or as large as fits.

    Where both phases have the same microbatches also reflected ones, whose backward runs where the forward ran so
    that activations can stay, with and without offloading.
    """
    costs, shape = sketcher.problem.costs, sketcher.shape
    end = costs.num_layers
    counts = {min(end, max(2, round(shape.num_stages * 1.6**k))) for k in range(10)}
    counts = {count for count in counts if count <= MAX_SEED_PACKS and count > 1}
    largest = sketcher.maker.fused_start(backward_size)
    if largest >= end:
        return
    plain = Draft(shape, forward_size, backward_size, (0, largest), (0, largest, end))
    kinds = [plain]
    residencies = _residencies(sketcher, shape) if freedom.may_reside else ()
    if freedom.may_keep and forward_size == backward_size:
        reflected = replace(plain, reflected=True)
        kinds += [reflected, replace(reflected, may_offload=True)]
        kinds += [replace(reflected, may_reside=policy) for policy in residencies]
        if largest == 0 and shape.num_stages == 1:
            # all layers in the fused pack: no forward packs, nothing is recomputed
            whole = replace(reflected, forward_cuts=(0,), backward_cuts=(0, end))
            yield from (replace(whole, may_reside=policy) for policy in residencies)
    for count in sorted(counts):
        usual = max(largest, end - max(1, round(end / count)))
        for start in sorted({largest, usual}):
            if count - 1 > start or start < 1:
                continue
            for kind in kinds:
                yield split(kind, sketcher, start, max(1, count // 2 if kind is plain else count), count)


def _residencies(sketcher: Sketcher, shape: Shape) -> tuple[Residency, ...]:
    """Whether some or all weights may be resident: where updates on the device were measured, or nothing is updated."""
    problem = sketcher.problem
    layers = range(problem.costs.num_layers)
    if all(why_not_resident(problem, shape.num_replicas, i, i + 1) for i in layers):
        return ()
    last = problem.costs.num_layers - 1
    needed = problem.costs.weight_bytes(0, last) + problem.costs.state_bytes(0, last)
    fits = needed <= sum(problem.limits) // shape.num_replicas
    return ("first", "some", "all") if fits else ("first", "some")


def _prefixes(models: PackModels, size: int, slack: int, is_forward: bool) -> list[Prefixes]:
    model = models.forward(size, slack) if is_forward else models.backward(size, slack)

    def tail(end: int) -> float:
        return 0.0 if is_forward else _tail(models, end)

    packing = Packing(model, models.shape.num_stages, tail)
    return [packing.prefixes(cap) for cap in packing.cap_choices(NUM_CAPS)]


def _tail(models: PackModels, point: int) -> float:
    """Gradients out, update and weights in of the last-run pack, up to a point, between two iterations."""
    costs, rates, end = models.problem.costs, models.rates, int(models.points.layers[point])
    gradients = costs.gradient_bytes(0, end - 1)
    moved = gradients / rates.d2h + costs.weight_bytes(0, end - 1) / rates.h2d
    if models.shape.num_replicas > 1 and rates.peer is not None:
        moved += gradients / rates.peer
    return moved + costs.host_update_seconds(0, end - 1)


def _joined(
    models: PackModels,
    f: int,
    b: int,
    forward: list[Prefixes],
    backward: list[Fused],
    layers: tuple[int, ...],
) -> Iterator[Candidate]:
    """Forward rounds below a fused pack, the round that begins with it, backward rounds down to layer 0."""
    stages, samples = models.shape.num_stages, models.shape.samples
    forward_stretch = max(1.0, stages * f / samples)
    backward_stretch = max(1.0, stages * b / samples)
    nothing = np.full(models.points.count + 1, np.inf)
    nothing[0] = 0.0
    for fused in backward:
        for up in forward or (None,):
            before = nothing if up is None else up.seconds
            cap = max(up.cap_seconds * f if up else 0.0, fused.prefixes.cap_seconds * b)
            lag = cap * (stages - 1) / samples
            totals = before[:-1] * forward_stretch + fused.seconds * backward_stretch + lag
            start = int(np.argmin(totals))
            if np.isfinite(totals[start]):
                yield Candidate(models.shape, f, b, up, fused, start, float(totals[start]), layers)
