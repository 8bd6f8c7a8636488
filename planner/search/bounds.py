"""Lower bounds on the iteration time of any streamed wrap-around plan with given microbatch sizes.

Why an iteration's compute has a window of its own: layer 0 is first in every forward and last in every
backward. Where it is trained, iteration k+1 cannot start before its gradients went out, were applied and its
weights came in again (`tail`), and by then all compute of iteration k is over. So windows of successive
iterations do not overlap, and period - tail >= the length of a window, which is at least each of

    work        all compute over the number of devices, plus what devices must idle at its ends: the j-th
                device to start waits for one microbatch to pass j layers, and after the last layer that the j-th
                device runs backward, j layers are still to go (each device starts and ends with a layer of its own)
    path        one microbatch through the DAG forward and backward, and some one layer for the other microbatches
    link        bytes that must cross the host links

Compute per layer: forward once for layers below the fused pack, forward and backward for all. The fused pack
is at most the largest that fits a device.
"""

from __future__ import annotations

from functools import lru_cache

import networkx as nx

from planner.contract.cuts import nbytes
from planner.contract.profile import BATCH
from planner.graph import layer_graph, longest_path
from planner.search.problem import Problem


class Bounds:
    """Bounds for one problem, by microbatch sizes."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._costs = problem.costs
        self._graph: nx.DiGraph[int] = layer_graph(problem.profile)
        # the fastest device, so that the bound holds whatever runs where
        devices = problem.hardware.devices[: problem.num_devices]
        self._scales = [device.compute_scale for device in devices]
        links = {device.host_link for device in devices}
        self._h2d, self._d2h = 0.0, 0.0
        for index in links:
            link = problem.hardware.host_links[index]
            users = sum(device.host_link == index for device in devices)
            copies = users if link.sharing == "none" else 1
            self._h2d += link.h2d_bytes_per_second * copies
            self._d2h += link.d2h_bytes_per_second * copies
        self._fastest_h2d = max(self._device_rate(d, "h2d") for d in range(problem.num_devices))
        self._fastest_d2h = max(self._device_rate(d, "d2h") for d in range(problem.num_devices))
        self.fused_start = lru_cache(maxsize=None)(self._fused_start)

    def _device_rate(self, device: int, direction: str) -> float:
        spec = self._problem.hardware.devices[device]
        link = self._problem.hardware.host_links[spec.host_link]
        users = sum(
            d.host_link == spec.host_link for d in self._problem.hardware.devices[: self._problem.num_devices]
        )
        rate = link.h2d_bytes_per_second if direction == "h2d" else link.d2h_bytes_per_second
        # a fair link gives its whole rate to the only one that is busy
        return rate / users if link.sharing == "static" else rate

    def _fused_start(self, size: int) -> int:
        """First layer of the largest last pack that fits some device; num_layers where none does."""
        limit, last = max(self._problem.limits), self._costs.num_layers - 1
        start = last + 1
        while start > 0:
            first = start - 1
            needed = self._costs.weight_bytes(first, last) + self._costs.gradient_bytes(first, last)
            given = nbytes((t for t in self._costs.entering(first, last)), size)
            if needed + given + self._costs.backward_workspace(first, last, size) > limit:
                break
            start = first
        return start

    def tail_seconds(self) -> float:
        """Between the last backward of layer 0 and its next forward; 0 where layer 0 is not trained."""
        costs = self._costs
        if not costs.gradient_bytes(0, 0):
            return 0.0
        down = costs.gradient_bytes(0, 0) / self._fastest_d2h
        up = costs.weight_bytes(0, 0) / self._fastest_h2d
        return down + costs.host_update_seconds(0, 0) + up

    def seconds(self, forward_size: int, backward_size: int) -> float:
        """No streamed wrap-around plan with these microbatch sizes is faster."""
        start = self.fused_start(backward_size)
        if start > self._costs.num_layers - 1:
            return float("inf")
        window = max(
            self._work(forward_size, backward_size, start), self._path(forward_size, backward_size, start)
        )
        return max(window + self.tail_seconds(), self._link(start))

    def _work(self, forward_size: int, backward_size: int, start: int) -> float:
        costs, devices, last = self._costs, len(self._scales), self._costs.num_layers - 1
        forward, backward = self._counts(forward_size), self._counts(backward_size)
        work = sum(
            n * (costs.forward_seconds(0, last, u) + costs.backward_seconds(0, last, u)) for u, n in backward
        )
        if start > 0:
            work += sum(n * costs.forward_seconds(0, start - 1, u) for u, n in forward)
        idle = 0.0
        if costs.is_chain:
            for j in range(1, min(devices, costs.num_layers)):
                if j - 1 < start:
                    idle += costs.forward_seconds(0, j - 1, forward_size)
                idle += min(costs.backward_seconds(0, j - 1, u) for u, _ in backward)
        return (
            (work + idle / max(self._scales)) / sum(self._scales) if devices > 1 else work / self._scales[0]
        )

    def _counts(self, size: int) -> list[tuple[int, int]]:
        """(microbatch size, how many) of the minibatch."""
        full, rest = divmod(self._problem.minibatch, size)
        return [(size, full)] + ([(rest, 1)] if rest else [])

    def _path(self, forward_size: int, backward_size: int, start: int) -> float:
        """One microbatch's way through the layers, and in a chain one layer's backward for all the others."""
        costs = self._costs
        sizes = [u for u, _ in self._counts(forward_size)]
        layers = range(costs.num_layers)
        forward = [min(costs.forward_seconds(i, i, u) for u in sizes) if i < start else 0.0 for i in layers]
        backward = [costs.backward_seconds(i, i, backward_size) for i in layers]
        repeated = max(backward[i] + costs.forward_seconds(i, i, backward_size) for i in layers)
        others = self._problem.minibatch // backward_size - 1
        path = longest_path(self._graph, forward) + longest_path(self._graph, backward)
        if costs.is_chain:
            return (path + others * repeated) / max(self._scales)
        return max(path, (others + 1) * repeated) / max(self._scales)

    def _link(self, start: int) -> float:
        costs, last = self._costs, self._costs.num_layers - 1
        trained = costs.gradient_bytes(0, last)
        batch = nbytes((t for t in costs.tensors if t.src == BATCH), self._problem.minibatch)
        up = costs.weight_bytes(0, last) + batch
        if start > 0:
            up += costs.weight_bytes(0, start - 1)
        return max(up / self._h2d, trained / self._d2h)
