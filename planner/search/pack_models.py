"""What a pack costs in each phase: seconds and whether it fits, for all ranges of layers at once.

In: a problem and a shape. Out: for every microbatch size and phase a PackModel over the points where packs may be
cut: all layers, or, in models of many hundred layers, an even selection of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from planner.contract.cuts import nbytes
from planner.contract.hardware import peer_rate
from planner.search.problem import Problem, Shape

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Indices: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

MAX_POINTS = 200
"""Cut points that the packing looks at; the refinement moves cuts by single layers anyway."""


LOOK_AHEAD = 3
"""How many cut points beyond one that does not fit are looked at."""


@dataclass(frozen=True)
class PackModel:
    """Packs [first, end) of one phase at one microbatch size, by point.

    seconds: [first, end] over a replica's samples, growing along a row. fit_end[first]: the furthest end that fits.
    cuttable[point]: the last point up to there whose crossing tensors fit a device, microbatch by microbatch.
    """

    seconds: Floats
    fit_end: Indices
    cuttable: Indices
    num_microbatches: float


@dataclass(frozen=True)
class Rates:
    """What each device has of its links, in bytes per second; peer is None on one device."""

    h2d: float
    d2h: float
    peer: float | None


class Points:
    """Where packs may be cut, and the bytes of the ranges between; the same for all shapes of a problem."""

    def __init__(self, problem: Problem) -> None:
        costs = problem.costs
        self.layers = cut_points(problem)
        self.count = len(self.layers) - 1
        self.weights = self.differences([costs.weight_bytes(0, i) for i in range(costs.num_layers)])
        self.gradients = self.differences([costs.gradient_bytes(0, i) for i in range(costs.num_layers)])
        # bytes per sample that enter and that leave each range
        self.given = np.zeros((self.count, self.count + 1))
        self.handed = np.zeros((self.count, self.count + 1))
        for tensor in costs.tensors:
            low = self._from(tensor.src + 1)
            for consumer in tensor.consumers:
                high = self._from(consumer + 1)
                self.given[low:high, high:] += tensor.bytes_per_sample
                low = high
            if tensor.src >= 0:
                made, used = self._from(tensor.src + 1), self._from(tensor.consumers[-1] + 1)
                self.handed[:made, made:used] += tensor.bytes_per_sample

    def _from(self, layer: int) -> int:
        """The first point at or behind a layer."""
        return int(np.searchsorted(self.layers, layer))

    def differences(self, sums: Sequence[float]) -> Floats:
        """[first, end]: what lies between two points, from the running sums behind each layer."""
        prefix = np.concatenate([[0.0], np.asarray(sums, dtype=float)])[self.layers]
        found: Floats = prefix[None, :] - prefix[:-1, None]
        return found.clip(min=0.0)


def cut_points(problem: Problem) -> Indices:
    """All layers, or MAX_POINTS of them so that about the same time and weights lie between neighbours."""
    costs = problem.costs
    count = costs.num_layers
    if count <= MAX_POINTS:
        return np.arange(count + 1)
    last, size = count - 1, min(problem.sizes())
    seconds = costs.forward_seconds(0, last, size) + costs.backward_seconds(0, last, size)
    weights = max(costs.weight_bytes(0, last), 1)
    shares = [0.0]
    for i in range(count):
        own = costs.forward_seconds(i, i, size) + costs.backward_seconds(i, i, size)
        shares.append(shares[-1] + own / seconds + costs.weight_bytes(i, i) / weights + 1 / count)
    wanted = np.linspace(0.0, shares[-1], MAX_POINTS + 1)
    return np.unique(np.concatenate([[0], np.searchsorted(shares, wanted[1:-1]), [count]]))


class PackModels:
    """The pack models of one shape: each phase and size on demand."""

    def __init__(self, problem: Problem, shape: Shape, points: Points) -> None:
        self.problem = problem
        self.shape = shape
        self.points = points
        self.rates = rates_of(problem, shape)
        self._bytes: dict[tuple[bool, int, int, int], float] = {}

    def bytes_needed(self, is_forward: bool, first: int, end: int, size: int) -> float:
        """What a pack needs beside its weights and gradients: inputs, working set, and two outputs on their way."""
        handed = self.handed_bytes(is_forward, first, end, size) if self.shape.num_stages > 1 else 0
        return self.working_bytes(is_forward, first, end, size) + 2 * handed

    def handed_bytes(self, is_forward: bool, first: int, end: int, size: int) -> int:
        """What one microbatch of a pack hands to the next pack."""
        costs = self.problem.costs
        if is_forward:
            return nbytes(costs.leaving(first, end - 1), size)
        return nbytes((t for t in costs.entering(first, end - 1) if t.differentiable), size)

    def working_bytes(self, is_forward: bool, first: int, end: int, size: int) -> float:
        """Inputs from the host and from other packs, and the working set; on one device also what waits there."""
        key = is_forward, first, end, size
        found = self._bytes.get(key)
        if found is None:
            measure = self._forward_bytes if is_forward else self._backward_bytes
            found = self._bytes[key] = measure(first, end - 1, size)
        return found

    def _forward_bytes(self, first: int, last: int, size: int) -> float:
        costs = self.problem.costs
        given = nbytes(costs.entering(first, last), size)
        if self.shape.num_stages > 1:
            waiting: float = 2 * given
        else:
            waiting = (self.shape.samples / size + 1) * max(given, nbytes(costs.leaving(first, last), size))
        return waiting + costs.forward_workspace(first, last, size)

    def _backward_bytes(self, first: int, last: int, size: int) -> float:
        costs = self.problem.costs
        given = nbytes(costs.entering(first, last), size)
        gradients = nbytes((t for t in costs.leaving(first, last) if t.differentiable), size)
        if self.shape.num_stages > 1:
            waiting: float = 2 * given + 2 * gradients
        else:
            waiting = 2 * given + (self.shape.samples / size + 1) * max(given, gradients)
        return waiting + costs.backward_workspace(first, last, size)

    def forward(self, size: int, slack: int) -> PackModel:
        """Forward packs; slack: how many packs' weights must fit at a time."""
        costs, rates, points, samples = self.problem.costs, self.rates, self.points, self.shape.samples
        count = samples / size
        seconds = count / self.problem.scale * points.differences(costs.at(size).forward_seconds[1:])
        moved = [points.weights / rates.h2d, samples * points.handed / rates.d2h]
        if self.shape.num_stages > 1 and rates.peer is not None:
            moved.append(samples * points.given / rates.peer)

        def needed(first: int, end: int) -> float:
            return costs.weight_bytes(first, end - 1) * slack + self.bytes_needed(True, first, end, size)

        return PackModel(np.maximum.reduce([seconds, *moved]), *self._fit(needed, size), count)

    def backward(self, size: int, slack: int) -> PackModel:
        """Backward packs, each recomputing first; slack: how many packs' weights and gradients fit at a time."""
        costs, rates, points, samples = self.problem.costs, self.rates, self.points, self.shape.samples
        count, at = samples / size, costs.at(size)
        both = [f + b for f, b in zip(at.forward_seconds, at.backward_seconds, strict=True)]
        seconds = count / self.problem.scale * points.differences(both[1:])
        up = points.weights + samples * points.given
        moved = [up / rates.h2d, points.gradients / rates.d2h / self.shape.num_replicas]
        if rates.peer is not None and self.shape.num_stages > 1:
            moved.append(samples * points.given / rates.peer)
        if rates.peer is not None and self.shape.num_replicas > 1:
            moved.append(points.gradients / rates.peer)

        def needed(first: int, end: int) -> float:
            held = (costs.weight_bytes(first, end - 1) + costs.gradient_bytes(first, end - 1)) * slack
            return held + self.bytes_needed(False, first, end, size)

        return PackModel(np.maximum.reduce([seconds, *moved]), *self._fit(needed, size), count)

    def _fit(self, needed: Callable[[int, int], float], size: int) -> tuple[Indices, Indices]:
        limit, layers, count = min(self.problem.limits), self.points.layers, self.points.count
        waiting = 4.0 if self.shape.num_stages > 1 else self.shape.samples / size + 1
        crossing = np.append(self.points.handed[0, 1:], 0.0) * size * waiting
        points = np.arange(count + 1)
        cuttable = np.maximum.accumulate(np.where(np.insert(crossing[:-1], 0, 0.0) <= limit, points, 0))
        allowed = np.unique(cuttable)
        ends = np.arange(count)
        reached = 0
        for k, first in enumerate(allowed[:-1]):
            reached = max(reached, k)
            # a cut with large tensors may fit where a wider pack fits that has it inside
            ahead = reached
            while ahead + 1 < len(allowed) and ahead - reached < LOOK_AHEAD:
                ahead += 1
                if needed(int(layers[first]), int(layers[allowed[ahead]])) <= limit:
                    reached = ahead
            ends[first] = allowed[reached]
        return ends, cuttable


def rates_of(problem: Problem, shape: Shape) -> Rates:
    """The slowest device's share of the host links, and the slowest hop that the shape needs."""
    count = problem.num_devices
    devices = problem.hardware.devices[:count]
    h2d, d2h = [], []
    for device in devices:
        link = problem.hardware.host_links[device.host_link]
        users = 1 if link.sharing == "none" else sum(d.host_link == device.host_link for d in devices)
        h2d.append(link.h2d_bytes_per_second / users)
        d2h.append(link.d2h_bytes_per_second / users)
    if count == 1:
        return Rates(h2d[0], d2h[0], None)
    stages = shape.num_stages
    hops = [
        (r * stages + s, r * stages + (s + 1) % stages)
        for r in range(shape.num_replicas)
        for s in range(stages if stages > 1 else 0)
    ]
    hops += [
        (a, b)
        for a in range(count)
        for b in range(count)
        if a != b and shape.num_replicas > 1 and (b - a) % stages == 0
    ]
    through_host = 1 / (1 / min(h2d) + 1 / min(d2h))
    rates = [peer_rate(problem.hardware, a, b) for a, b in hops]
    return Rates(min(h2d), min(d2h), min(through_host if rate is None else rate for rate in rates))
