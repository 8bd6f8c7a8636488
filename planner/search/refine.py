"""Local search on a draft: first how many packs, evened out, then single cuts, while the sketch gets faster.

Deterministic: moves are tried in a fixed order, the first that is faster is taken, and what limits it is a number
of sketched steps, not a clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from planner.search.draft import Cuts, Draft, why_not_resident
from planner.search.sketch import INFEASIBLE, Sketcher

MARGIN = 1e-6


class Refinement:
    """A draft on its way to a better one; `steps` are left."""

    def __init__(self, sketcher: Sketcher, draft: Draft, seconds: float | None = None) -> None:
        self.sketcher = sketcher
        self.draft = draft
        self.seconds = sketcher.seconds(draft) if seconds is None else seconds
        self.seen = {draft}

    def count_packs(self, max_steps: int) -> None:
        """Try other numbers of packs, evened out; then only the round at each end evened out anew."""
        limit = self.sketcher.steps + max_steps
        improved = True
        while improved and self.sketcher.steps < limit:
            improved = False
            for changed in self._recounts():
                if self.sketcher.steps >= limit:
                    return
                if self._accept(changed):
                    improved = True
                    break

    def move_cuts(self, max_steps: int) -> None:
        """Shift, drop and add single cuts, by steps that halve."""
        limit = self.sketcher.steps + max_steps
        step = max(1, _median_pack(self.draft.backward_cuts) // 4)
        while True:
            improved = False
            for move in list(_moves(self.draft, step)):
                if self.sketcher.steps >= limit:
                    return
                # a cut that is gone since the move was listed stays gone
                changed = _apply(self.draft, move)
                if changed is not None and self._accept(changed):
                    improved = True
            if not improved:
                if step == 1:
                    return
                step = max(1, step // 2)

    def move_choices(self, max_steps: int) -> None:
        """One activation more or less kept or offloaded, weights resident or not, pack by pack."""
        if not self.draft.reflected:
            return
        self.draft = self.sketcher.filled(self.draft)
        limit = self.sketcher.steps + max_steps
        improved = True
        while improved:
            improved = False
            for pack in range(self.draft.num_backward if self.draft.resident else 0):
                if self.sketcher.steps >= limit:
                    return
                changed = self._move_in(pack)
                improved |= changed is not None and self._accept(changed)
            for pack in range(self.draft.num_forward):
                for more_kept, more_offloaded in ((1, 0), (0, 1), (1, -1), (-1, 1), (-1, 0), (0, -1)):
                    if self.sketcher.steps >= limit:
                        return
                    changed = self._choose(pack, more_kept, more_offloaded)
                    improved |= changed is not None and self._accept(changed)

    def _move_in(self, pack: int) -> Draft | None:
        """A pack's weights resident, or no longer."""
        draft, shape = self.draft, self.draft.shape
        layers = draft.backward_cuts[pack], draft.backward_cuts[pack + 1]
        resident = list(draft.resident)
        resident[pack] = not resident[pack]
        if resident[pack] and why_not_resident(self.sketcher.problem, shape.num_replicas, *layers):
            return None
        return replace(draft, resident=tuple(resident))

    def _choose(self, pack: int, more_kept: int, more_offloaded: int) -> Draft | None:
        draft = self.draft
        kept, offloaded = list(draft.kept), list(draft.offloaded or (0,) * draft.num_backward)
        kept[pack] += more_kept
        offloaded[pack] += more_offloaded
        count = len(self.sketcher.maker.lengths(draft.backward_size))
        if min(kept[pack], offloaded[pack]) < 0 or kept[pack] + offloaded[pack] > count:
            return None
        return replace(draft, kept=tuple(kept), offloaded=tuple(offloaded) if any(offloaded) else ())

    def _accept(self, draft: Draft) -> bool:
        if draft in self.seen:
            return False
        self.seen.add(draft)
        if self.sketcher.is_slower(draft, self.seconds):
            return False
        found = self.sketcher.seconds(draft)
        if found >= self.seconds * (1 - MARGIN):
            return False
        self.seconds, self.draft = found, draft
        return True

    def _recounts(self) -> Iterator[Draft]:
        """Evened out drafts: another first layer of the fused pack, more or fewer packs of either phase or both."""
        draft, costs = self.draft, self.sketcher.problem.costs
        end, stages = costs.num_layers, draft.shape.num_stages
        nf, nb, start = draft.num_forward, draft.num_backward, draft.backward_cuts[-2]
        deltas = sorted({1, 2, stages, 2 * stages, max(1, nb // 4)})
        options = [(0, 0, 0)]
        for delta in deltas:
            options += [(0, -delta, 0), (0, delta, 0), (-delta, 0, 0), (delta, 0, 0), (delta, delta, 0)]
            options += [(-delta, -delta, 0), (0, 0, -delta), (0, 0, delta)]
        for more_forward, more_backward, shift in options:
            count, first = nb + more_backward, start + shift
            if not 0 < first < end or not 1 <= count - 1 <= first:
                continue
            found = split(draft, self.sketcher, first, max(1, nf + more_forward), count)
            if found is not None:
                yield found


def split(draft: Draft, sketcher: Sketcher, start: int, num_forward: int, num_backward: int) -> Draft:
    """The draft with its fused pack from layer `start` on and so many packs below it, evened out by their seconds."""
    end = sketcher.problem.costs.num_layers
    cuts = (*_evened(sketcher, draft.backward_size, False, start, num_backward - 1), end)
    if draft.reflected:
        return replace(draft, forward_cuts=cuts[:-1], backward_cuts=cuts)
    forward = _evened(sketcher, draft.forward_size, True, start, min(num_forward, start))
    return replace(draft, forward_cuts=forward, backward_cuts=cuts)


def _evened(sketcher: Sketcher, size: int, is_forward: bool, end: int, count: int) -> Cuts:
    key = size, is_forward, end, count
    found = sketcher.evened.get(key)
    if found is None:
        at = sketcher.problem.costs.at(size)
        prefix = at.forward_seconds
        if not is_forward:
            prefix = [f + b for f, b in zip(at.forward_seconds, at.backward_seconds, strict=True)]
        found = sketcher.evened[key] = evened(prefix, 0, end, count)
    return found


def evened(prefix: list[float], start: int, end: int, count: int) -> Cuts:
    """`count` packs over layers [start, end) with the largest as small as possible; prefix: running seconds."""
    low, high = (prefix[end] - prefix[start]) / count, prefix[end] - prefix[start]
    best: Cuts = ()
    for _ in range(12):
        cap = (low + high) / 2 if best else high / count * 1.0000001
        cuts = [start]
        while cuts[-1] < end and len(cuts) <= count:
            # as far as the cap reaches, and leave a layer for each pack that is still to come
            reach = bisect_right(prefix, prefix[cuts[-1]] + cap * (1 + 1e-12)) - 1
            cuts.append(max(cuts[-1] + 1, min(reach, end - (count - len(cuts)))))
        if cuts[-1] >= end:
            best, high = tuple(cuts), cap
        else:
            low = cap
            if not best:
                best = (*range(start, start + count), end)
                high = prefix[end] - prefix[start]
    return best


Move = tuple[bool, int, int]
"""Forward or backward cuts, which one, by how many layers; 0 drops the cut."""


def _median_pack(cuts: Cuts) -> int:
    sizes = sorted(b - a for a, b in pairwise(cuts))
    return sizes[len(sizes) // 2]


def _moves(draft: Draft, step: int) -> Iterator[Move]:
    """From the ends towards the middle: fill and drain are where a cut matters most."""
    for is_forward in (False, True):
        cuts = draft.forward_cuts if is_forward else draft.backward_cuts
        for k in range(1, len(cuts) - 1):
            for delta in (step, -step):
                yield is_forward, cuts[k], delta
            yield is_forward, cuts[k], 0


def _apply(draft: Draft, move: Move) -> Draft | None:
    """The draft with one cut moved; where the fused pack starts the forward packs end."""
    is_forward, layer, delta = move
    if is_forward:
        forward = _shift(draft.forward_cuts, layer, delta)
        return replace(draft, forward_cuts=forward) if forward and not draft.reflected else None
    backward = _shift(draft.backward_cuts, layer, delta)
    if backward is None:
        return None
    if draft.reflected:
        return replace(draft, forward_cuts=backward[:-1], backward_cuts=backward)
    start = backward[-2]
    forward = tuple(cut for cut in draft.forward_cuts if cut < start)
    return replace(draft, forward_cuts=(*forward, start) if start else (0,), backward_cuts=backward)


def _shift(cuts: Cuts, layer: int, delta: int) -> Cuts | None:
    if layer not in cuts[1:-1]:
        return None
    k = cuts.index(layer)
    if delta == 0:
        return cuts[:k] + cuts[k + 1 :]
    moved = layer + delta
    return (*cuts[:k], moved, *cuts[k + 1 :]) if cuts[k - 1] < moved < cuts[k + 1] else None


__all__ = ["INFEASIBLE", "Refinement", "evened"]
