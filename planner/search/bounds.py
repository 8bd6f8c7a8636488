"""Lower bounds on the iteration time of any plan with given replicas and microbatch sizes.

Why an iteration's compute has a window of its own: where every layer depends on layer 0, forward and backward,
layer 0 is first in every forward and last in every backward. Where it is trained, iteration k+1 cannot start
before its gradients were summed, applied and its weights are back (`tail`), and by then all compute of iteration k
is over. So windows of successive iterations do not overlap, and period - tail is at least each of

    work        all compute over the speed of all devices, plus what devices must idle at its ends: the j-th device of
                a pipeline to start waits for one microbatch to pass j layers, and after the last layer that the j-th
                device runs backward, j layers are still to go (each device starts and ends with layers of its own)
    path        one microbatch through the DAG forward and backward, and some one layer for the other microbatches

and the period is at least what must cross the links over their rate, and, where no update can be on a device, all
updates over the host's workers.

Compute of a layer: forward once, backward, and a recompute in between, which is spared in the fused pack (at most the
largest that fits a device) and where activations stay. On a device all forwards of an iteration come before all
backwards, so what is kept is there all at once: together no more than the memory of all devices. What is offloaded
crosses both links within the period. Both are spent on the layers that spare most seconds a byte (a fractional
knapsack); as offloading grows with the period, the bound is a fixed point. Weights that the host updates come in once
an iteration at least, and a second time unless they stay from forward to backward, which takes memory, too.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import networkx as nx
import numpy as np

from planner.contract.cuts import nbytes
from planner.contract.profile import BATCH
from planner.graph import layer_graph, longest_path
from planner.search.pack_models import Floats
from planner.search.problem import Problem, Shape

NUM_STARTS = 10
"""Ranges of first layers of the fused pack that are told apart."""


class Bounds:
    """Bounds for one problem, by shape and microbatch sizes."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._costs = problem.costs
        self._graph: nx.DiGraph[int] = layer_graph(problem.profile)
        devices = problem.hardware.devices[: problem.num_devices]
        self._scales = [device.compute_scale for device in devices]
        self._memory = sum(problem.limits)
        self._h2d, self._d2h = self._total_rate("h2d"), self._total_rate("d2h")
        self._fastest_h2d = max(self._device_rate(d, "h2d") for d in range(problem.num_devices))
        self._fastest_d2h = max(self._device_rate(d, "d2h") for d in range(problem.num_devices))
        links = [problem.hardware.host_links[device.host_link] for device in devices]
        self._is_shared_fairly = len(devices) > 1 and any(link.sharing == "fair" for link in links)
        self._can_stay = self._costs.device_update_seconds(0, self._costs.num_layers - 1) is not None
        self._depend_on_first = self._all_depend_on_first()
        self.fused_start = lru_cache(maxsize=None)(self._fused_start)
        self._layer_savings = lru_cache(maxsize=None)(self._find_layer_savings)
        self._largest_layer = lru_cache(maxsize=None)(self._find_largest_layer)
        self._longest = lru_cache(maxsize=None)(self._longest_path)
        self._savings = lru_cache(maxsize=None)(self._find_savings)

    def seconds(self, shape: Shape, forward_size: int, backward_size: int) -> float:
        """No plan with these replicas and microbatch sizes is faster."""
        largest, end = self.fused_start(backward_size), self._costs.num_layers
        if largest >= end:
            return float("inf")
        if forward_size != backward_size:
            return self._with_fused(shape, forward_size, backward_size, largest, 0.0)
        # a large fused pack spares its recompute, a small one leaves memory to keep others' activations: for every
        # range of first layers the compute of the largest and the memory of the smallest
        starts = sorted({round(largest + (end - largest) * k / NUM_STARTS) for k in range(NUM_STARTS + 1)})
        return min(
            self._with_fused(
                shape, forward_size, backward_size, first, self._fused_bytes(last - 1, backward_size)
            )
            for first, last in pairwise(starts)
        )

    def _fused_bytes(self, start: int, size: int) -> int:
        """What a fused pack takes of its device while it runs."""
        costs, last = self._costs, self._costs.num_layers - 1
        held = costs.weight_bytes(start, last) + costs.gradient_bytes(start, last)
        return held + nbytes(costs.entering(start, last), size) + costs.backward_workspace(start, last, size)

    def _with_fused(
        self, shape: Shape, forward_size: int, backward_size: int, start: int, taken: float
    ) -> float:
        """The bound of plans whose fused pack spares what the one from `start` spares and takes so many bytes."""
        tail = self.tail_seconds(shape)
        path = self._path(shape, forward_size, backward_size, start)
        work = self._work(shape, forward_size, backward_size, start)
        up, down = self._least_in(shape, start), self._least_out()
        least = max(path + tail, up / self._h2d, down / self._d2h, self._host_seconds(shape))
        if forward_size != backward_size:
            return max(least, work + tail)
        available = self._memory - shape.num_replicas * taken
        low, high = least, max(least, work + tail)
        for _ in range(30):
            middle = (low + high) / 2
            spared = self._spared_within(shape, backward_size, start, middle, tail, available)
            if work + tail - spared / sum(self._scales) <= middle:
                high = middle
            else:
                low = middle
        return low

    def _spared_within(
        self, shape: Shape, size: int, start: int, period: float, tail: float, available: float
    ) -> float:
        """The most seconds of recompute that an iteration of `period` seconds can spare.

        Of what is spared, some is on the devices when their last forward is over; the rest left before that, which
        is before their backward. The more is spared the sooner backward is over: the largest fixed point counts.
        """
        costs, last = self._costs, self._costs.num_layers - 1
        if self._is_shared_fairly:
            moved = max(0.0, self._d2h * period - self._least_out())
            return self._spared(shape, start, size, available + moved)
        backward = 0.0
        for u, n in self._counts(shape, size):
            backward += n * (costs.backward_seconds(0, last, u) + costs.forward_seconds(0, last, u))
        spared = self._spared(shape, start, size, float("inf"))
        for _ in range(20):
            before = spared
            forward = len(self._scales) * (period - tail) - (backward - spared) / max(self._scales)
            moved = self._fastest_d2h * max(0.0, forward)
            spared = min(before, self._spared(shape, start, size, available + moved))
            if before - spared <= 1e-6 * before:
                break
        return spared

    def tail_seconds(self, shape: Shape) -> float:
        """Between the last backward of layer 0 and its next forward; 0 where layer 0 is not trained or not the first."""
        costs = self._costs
        gradients = costs.gradient_bytes(0, 0)
        if not gradients or not self._depend_on_first:
            return 0.0
        reduced = 0.0
        if shape.num_replicas > 1:
            peers = self._problem.hardware.peer_bytes_per_second
            rates = [peers] if isinstance(peers, float | int) else [r for row in peers or () for r in row]
            reduced = gradients / max(rates) if rates else 0.0
        through_host = gradients / self._fastest_d2h + costs.host_update_seconds(0, 0)
        through_host += costs.weight_bytes(0, 0) / self._fastest_h2d
        if self._problem.agree:
            # by then the gradients of all layers have arrived, and their norm is known before any of them is applied
            return reduced + through_host + costs.norm_seconds()
        on_device = costs.device_update_seconds(0, 0)
        if on_device is not None:
            return reduced + min(through_host, on_device / max(self._scales))
        return reduced + through_host

    # ---- compute

    def _work(self, shape: Shape, forward_size: int, backward_size: int, start: int) -> float:
        """All compute and the idling at both ends, everything recomputed, over the speed of all devices."""
        costs, last = self._costs, self._costs.num_layers - 1
        work = 0.0
        for u, n in self._counts(shape, backward_size):
            work += n * (costs.forward_seconds(0, last, u) + costs.backward_seconds(0, last, u))
        if start > 0:
            counts = self._counts(shape, forward_size)
            work += sum(n * costs.forward_seconds(0, start - 1, u) for u, n in counts)
        if not self._costs.is_chain:
            return work / sum(self._scales)
        idle = 0.0
        for share in shape.shares:
            forward, backward = self._smallest(share, forward_size), self._smallest(share, backward_size)
            for j in range(1, min(shape.num_stages, costs.num_layers)):
                if j - 1 < start:
                    idle += costs.forward_seconds(0, j - 1, forward)
                idle += costs.backward_seconds(0, j - 1, backward)
        return (work + idle * min(self._scales) / max(self._scales)) / sum(self._scales)

    @staticmethod
    def _counts(shape: Shape, size: int) -> list[tuple[int, int]]:
        """(microbatch size, how many) over all replicas."""
        found: list[tuple[int, int]] = []
        for share in shape.shares:
            full, rest = divmod(share, size)
            found += [(size, full)] if full else []
            found += [(rest, 1)] if rest else []
        return found

    @staticmethod
    def _smallest(share: int, size: int) -> int:
        """The samples of a replica's smallest microbatch."""
        return share % size or min(size, share)

    def _path(self, shape: Shape, forward_size: int, backward_size: int, start: int) -> float:
        """One microbatch's way through the layers, and in a chain one layer's backward for all others of its replica."""
        costs = self._costs
        found = 0.0
        for share in set(shape.shares):
            f, b = self._smallest(share, forward_size), self._smallest(share, backward_size)
            path = self._longest(True, f, start) + self._longest(False, b, start)
            others = -(-share // backward_size) - 1
            repeated = self._largest_layer(b, forward_size != backward_size)
            if costs.is_chain:
                path += others * repeated
            found = max(found, path, (others + 1) * repeated)
        return found / max(self._scales)

    def _find_largest_layer(self, size: int, recomputes: bool) -> float:
        """The most seconds that one layer's backward takes, with its recompute or without."""
        costs = self._costs
        return max(
            costs.backward_seconds(i, i, size) + (costs.forward_seconds(i, i, size) if recomputes else 0.0)
            for i in range(costs.num_layers)
        )

    def _longest_path(self, is_forward: bool, size: int, start: int) -> float:
        costs, last = self._costs, self._costs.num_layers - 1
        if costs.is_chain:
            if not is_forward:
                return costs.backward_seconds(0, last, size)
            return costs.forward_seconds(0, start - 1, size) if start else 0.0
        layers = range(costs.num_layers)
        if not is_forward:
            return longest_path(self._graph, [costs.backward_seconds(i, i, size) for i in layers])
        seconds = [costs.forward_seconds(i, i, size) if i < start else 0.0 for i in layers]
        return longest_path(self._graph, seconds)

    def _spared(self, shape: Shape, start: int, size: int, available: float) -> float:
        """The most seconds of recompute that so many bytes of activations spare: a fractional knapsack."""
        num_bytes, seconds = self._savings(shape, start, size)
        return float(np.interp(available, num_bytes, seconds))

    def _find_savings(self, shape: Shape, start: int, size: int) -> tuple[Floats, Floats]:
        """Running bytes and seconds of the layers below the fused pack, over the whole minibatch, the best a byte first."""
        all_seconds, all_bytes = self._layer_savings(shape, size)
        seconds, num_bytes = all_seconds[:start], all_bytes[:start]
        # a layer that needs no bytes of its own makes room for others
        is_free = num_bytes <= 0
        order = np.argsort(-seconds[~is_free] / num_bytes[~is_free], kind="stable")
        return (
            num_bytes[is_free].sum() + np.concatenate([[0.0], np.cumsum(num_bytes[~is_free][order])]),
            seconds[is_free].sum() + np.concatenate([[0.0], np.cumsum(seconds[~is_free][order])]),
        )

    def _find_layer_savings(self, shape: Shape, size: int) -> tuple[Floats, Floats]:
        """Of each layer, over the whole minibatch: seconds of recompute, and the bytes that spare them."""
        costs = self._costs
        counts = self._counts(shape, size)
        seconds, num_bytes = [], []
        for layer in range(costs.num_layers):
            entering = [t for t in costs.entering(layer, layer) if t.src != BATCH]
            seconds.append(sum(n * costs.forward_seconds(layer, layer, u) for u, n in counts))
            num_bytes.append(
                sum(n * (costs.kept_bytes(layer, layer, u) - nbytes(entering, u)) for u, n in counts)
            )
        return np.array(seconds), np.array(num_bytes, dtype=float)

    # ---- links

    def _least_in(self, shape: Shape, start: int) -> float:
        """Bytes that must come in: the batch, weights once, and a second time where they cannot stay in between."""
        costs, last = self._costs, self._costs.num_layers - 1
        batch = nbytes((t for t in costs.tensors if t.src == BATCH), self._problem.minibatch)
        weights = shape.num_replicas * costs.weight_bytes(0, last)
        again = shape.num_replicas * costs.weight_bytes(0, start - 1) if start else 0
        if self._can_stay:
            return batch + max(0, weights + again - 2 * self._memory)
        return batch + self._trained_share() * weights + max(0, again - self._memory)

    def _least_out(self) -> float:
        trained = self._costs.gradient_bytes(0, self._costs.num_layers - 1)
        return max(0, trained - self._memory) if self._can_stay else trained

    def _host_seconds(self, shape: Shape) -> float:
        """Of the host's workers at least, at most one of them a device: updates, where all of them are there."""
        problem, last = self._problem, self._costs.num_layers - 1
        if self._can_stay and not problem.agree and shape.num_replicas == 1:
            return 0.0
        workers = min(problem.hardware.host.update_workers, problem.num_devices)
        return self._costs.host_update_seconds(0, last) / workers

    def _trained_share(self) -> float:
        """Of the weights, those that change every iteration: frozen ones may stay."""
        costs = self._costs
        total = costs.weight_bytes(0, costs.num_layers - 1)
        trained = sum(costs.weight_bytes(i, i) for i in range(costs.num_layers) if costs.gradient_bytes(i, i))
        return trained / total if total else 0.0

    def _total_rate(self, direction: str) -> float:
        problem = self._problem
        devices = problem.hardware.devices[: problem.num_devices]
        total = 0.0
        for index in {device.host_link for device in devices}:
            link = problem.hardware.host_links[index]
            users = sum(device.host_link == index for device in devices)
            rate = link.h2d_bytes_per_second if direction == "h2d" else link.d2h_bytes_per_second
            total += rate * (users if link.sharing == "none" else 1)
        return total

    def _device_rate(self, device: int, direction: str) -> float:
        devices = self._problem.hardware.devices[: self._problem.num_devices]
        link = self._problem.hardware.host_links[devices[device].host_link]
        users = sum(other.host_link == devices[device].host_link for other in devices)
        rate = link.h2d_bytes_per_second if direction == "h2d" else link.d2h_bytes_per_second
        # a fair link gives its whole rate to the only one that is busy
        return rate / users if link.sharing == "static" else rate

    # ---- structure

    def _fused_start(self, size: int) -> int:
        """First layer of the largest last pack that fits some device; num_layers where none does."""
        limit, start = max(self._problem.limits), self._costs.num_layers
        for first in range(start - 1, -1, -1):
            if self._costs.weight_bytes(first, self._costs.num_layers - 1) > limit:
                break
            if self._fused_bytes(first, size) <= limit:
                start = first
        return start

    def _all_depend_on_first(self) -> bool:
        """Whether every other layer takes, over differentiable tensors, something from layer 0."""
        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_nodes_from(range(self._costs.num_layers))
        for tensor in self._costs.tensors:
            if tensor.src != BATCH and tensor.differentiable:
                graph.add_edges_from((tensor.src, consumer) for consumer in tensor.consumers)
        return len(nx.descendants(graph, 0)) == self._costs.num_layers - 1
