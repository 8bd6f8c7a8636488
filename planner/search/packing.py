"""Partition layers into packs by dynamic programming over rounds.

Wrap-around placement runs N packs at a time, one a device: a round. With m microbatches a round takes m times its
largest pack, so what a partition minimises is the sum over rounds of each round's largest pack, not the largest
pack of all (planning-notes.md, "Rounds"). The last device lags behind the first by N - 1 times the largest pack of
any round, for the whole iteration, so the DP is solved under several caps on the pack:

    seconds[l] = min over l' < l, c <= cap of  seconds[l'] + c      where N packs of at most c seconds cover [l', l)
    iteration  = forward seconds + backward seconds + (N - 1) cap / m

The round that begins at layer 0 is the last one run backward: it also pays for its first pack's way out, update
and way in, so small packs come out there by themselves (a ramp).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from planner.search.draft import Cuts
from planner.search.pack_models import Floats, Indices, PackModel


class Packing:
    """Best rounds for every prefix [0, l) of the layers.

    ramp: extra seconds of the round that begins at layer 0, by the end of its first pack.
    """

    def __init__(self, model: PackModel, num_devices: int, ramp: Callable[[int], float]) -> None:
        self.model = model
        self.num_layers = len(model.fit_end)
        self._ramp = ramp
        self.caps = self._candidate_caps()
        self.reach = [self._reach(cap) for cap in self.caps]
        # by [cap, first]: the end of a whole round, and of a round that a fused pack shares
        self.round_reach = np.array([self._jump(reach, num_devices) for reach in self.reach])
        self.partial_reach = np.array([self._jump(reach, num_devices - 1) for reach in self.reach])

    def _candidate_caps(self) -> Floats:
        """Largest-pack seconds worth trying: what k layers anywhere take, and a grid where layers differ."""
        seconds, fit_end = self.model.seconds, self.model.fit_end
        layers = np.arange(self.num_layers)
        found: set[float] = set()
        for k in range(1, min(self.num_layers, 64) + 1):
            starts = layers[: self.num_layers - k + 1]
            fitting = starts[fit_end[starts] >= starts + k]
            if not len(fitting):
                break
            found.add(float(seconds[fitting, fitting + k].max()))
        if not found:
            return np.empty(0)
        low, high = min(found), float(seconds[layers, fit_end].max())
        grid = np.geomspace(low, high, 32) if high > low > 0 else ()
        return np.array(sorted(found | {float(cap) for cap in grid}))

    def _reach(self, cap: float) -> Indices:
        """reach[l]: the furthest end of one pack from l with at most `cap` seconds; l where not one layer fits."""
        within = (self.model.seconds <= cap * (1 + 1e-12)).sum(axis=1) - 1
        return np.append(self.model.cuttable[np.minimum(within, self.model.fit_end)], self.num_layers)

    @staticmethod
    def _jump(reach: Indices, times: int) -> Indices:
        layers = np.arange(len(reach))
        for _ in range(times):
            layers = reach[layers]
        return layers

    def cap_choices(self, count: int) -> list[int]:
        """About `count` of the caps, spread over their whole range, under which all layers can be covered."""
        starts = np.unique(self.model.cuttable)[:-1]
        usable = [k for k in range(len(self.caps)) if (self.reach[k][starts] > starts).all()]
        picks = np.linspace(0, len(usable) - 1, min(count, len(usable)))
        return [usable[round(pick)] for pick in picks] if usable else []

    def prefixes(self, cap: int) -> Prefixes:
        """seconds[l] and how to get there, for all l, with packs of at most caps[cap] seconds."""
        seconds = np.full(self.num_layers + 1, np.inf)
        seconds[0] = 0.0
        came_from = np.full(self.num_layers + 1, -1)
        for start in np.unique(self.model.cuttable)[:-1]:
            ends = self.round_reach[: cap + 1, start]
            if not np.isfinite(seconds[start]) or ends[-1] <= start:
                continue
            targets = np.arange(start + 1, ends[-1] + 1)
            smallest = np.searchsorted(ends, targets)
            total = seconds[start] + self.caps[smallest]
            if start == 0:
                total = total + np.array(
                    [
                        self._ramp(int(min(self.reach[k][0], end)))
                        for k, end in zip(smallest, targets, strict=True)
                    ]
                )
            better = (total < seconds[targets]) & (self.model.cuttable[targets] == targets)
            seconds[targets] = np.where(better, total, seconds[targets])
            came_from[targets] = np.where(better, start, came_from[targets])
        return Prefixes(self, cap, seconds, came_from)

    def round_cuts(self, start: int, end: int, reaches: Indices) -> Cuts:
        """The cuts of one round over [start, end): filled in turn under the smallest cap that covers it, evened out."""
        cap = int(np.searchsorted(reaches[:, start], end))
        cuts = [start]
        while cuts[-1] < end:
            cuts.append(min(int(self.reach[cap][cuts[-1]]), end))
        return balanced(self.model, tuple(cuts))


@dataclass(frozen=True)
class Prefixes:
    """Seconds of the best rounds for each prefix under one cap, and the way there."""

    packing: Packing
    cap: int
    seconds: Floats
    came_from: Indices

    @property
    def cap_seconds(self) -> float:
        return float(self.packing.caps[self.cap])

    def cuts(self, end: int) -> Cuts:
        """The cuts of the packs that cover [0, end)."""
        rounds: list[Cuts] = []
        while end > 0:
            start = int(self.came_from[end])
            rounds.append(self.packing.round_cuts(start, end, self.packing.round_reach))
            end = start
        return (0, *(cut for part in reversed(rounds) for cut in part[1:]))


class Fused:
    """The round that begins with a fused pack [start, end), joined to the rounds below it, for every start.

    seconds[start]: the whole backward phase; inf where the fused pack does not fit or exceeds the cap.
    """

    def __init__(self, prefixes: Prefixes) -> None:
        self.prefixes = prefixes
        packing, cap = prefixes.packing, prefixes.cap
        num_layers = packing.num_layers
        self.seconds = np.full(num_layers, np.inf)
        self._below = np.zeros(num_layers, dtype=int)
        caps = packing.caps[: cap + 1]
        for start in range(num_layers - 1, -1, -1):
            fused = packing.model.seconds[start, num_layers]
            if fused > prefixes.cap_seconds:
                break
            if packing.model.fit_end[start] < num_layers or packing.model.cuttable[start] != start:
                continue
            # lowest layer from which N - 1 packs reach the fused one, for each cap
            below = np.array(
                [reach[: start + 1].searchsorted(start) for reach in packing.partial_reach[: cap + 1]]
            )
            totals = np.maximum(caps, fused) + prefixes.seconds[below]
            best = int(np.argmin(totals))
            self.seconds[start], self._below[start] = totals[best], below[best]

    def cuts(self, start: int) -> Cuts:
        """The cuts of all backward packs where the fused one begins at `start`."""
        packing, below = self.prefixes.packing, int(self._below[start])
        shared = packing.round_cuts(below, start, packing.partial_reach) if below < start else (start,)
        return (*self.prefixes.cuts(below)[:-1], *shared, packing.num_layers)


def balanced(model: PackModel, cuts: Cuts) -> Cuts:
    """The same number of packs over the same layers, evened out: move single layers while the largest shrinks."""
    current = list(cuts)
    for _ in range(4 * len(current)):
        sizes = [model.seconds[a, b] for a, b in pairwise(current)]
        worst = max(range(len(sizes)), key=sizes.__getitem__)
        best: tuple[list[float], list[int]] | None = None
        for shifted in _shifts(current, worst):
            if not all(b <= model.fit_end[a] and b == model.cuttable[b] for a, b in pairwise(shifted)):
                continue
            key = sorted((float(model.seconds[a, b]) for a, b in pairwise(shifted)), reverse=True)
            if key < sorted(sizes, reverse=True) and (best is None or key < best[0]):
                best = (key, shifted)
        if best is None:
            break
        current = best[1]
    return tuple(current)


def _shifts(cuts: list[int], pack: int) -> list[list[int]]:
    """Cuts with one layer of a pack handed to a neighbour, the layers between passed on where needed."""
    found = []
    for target in range(len(cuts) - 1):
        if target == pack:
            continue
        shifted = list(cuts)
        moved = range(pack, target, -1) if target < pack else range(pack + 1, target + 1)
        for k in moved:
            shifted[k] += 1 if target < pack else -1
        if all(a < b for a, b in pairwise(shifted)):
            found.append(shifted)
    return found
