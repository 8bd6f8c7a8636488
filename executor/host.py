"""The host store: one shared mapping per server with all that does not fit the devices.

    control      done[action], begun[action] (of sends), losses, failure, batch count, saved layers, busy links,
                 what iterations are (training or evaluation)
    weights      W and buffers of all layers, flat     gradients, states   likewise
    batch x 2    iterations alternate                  stash               one area per stashed tensor
    snapshots x 2    of layers' states, for recomputes

Rank 0 makes it with memfd_create, the others open it through /proc, so nothing is left behind however the
processes end. done[action] is written after the action's bytes, so who reads the count may read the bytes.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from executor.decompose import Boundary, Decomposition
from executor.decompose.layers import BATCH, TensorName
from executor.structure import LayerPlaces, Place, aligned
from planner.contract.errors import InfeasibleError
from planner.contract.rules import Rules

CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Where a container's limit and use are (cgroup v2, v1)."""
PAGE = 4096
WORD = 8
NUM_WORDS = 8
"""Control words that every store has."""


@dataclass(frozen=True)
class StoreLayout:
    """Offsets of every area, from the model's structure and the rules of a schedule."""

    num_nodes: int
    num_devices: int
    num_microbatches: int
    weights: int
    gradients: int
    states: int
    batch: tuple[dict[str, int], dict[str, int]]
    stash: dict[TensorName, int]
    snapshots: tuple[dict[int, int], dict[int, int]]
    total: int


def plan_store(rules: Rules, decomposition: Decomposition, num_nodes: int) -> StoreLayout:
    """Lay out the store."""
    costs, last = rules.costs, rules.costs.num_layers - 1
    devices = rules.configuration.num_devices
    microbatches = len(rules.backward_samples)
    # failed, batches, saved, has_batch, steps[half], is_evaluation[half], busy[device][direction], calls[device],
    # done[node], begun[node]; shares as float64, losses and agreed as float32, touched as bytes
    trained = sum(len(layer.parameters) for layer in decomposition.layers)
    end = _page(
        WORD * (NUM_WORDS + 3 * devices + 2 * num_nodes + 2 * microbatches)
        + 4 * (2 * microbatches + 5)
        + trained
    )
    offsets = []
    for nbytes in (costs.weight_bytes(0, last), costs.gradient_bytes(0, last), costs.state_bytes(0, last)):
        offsets.append(end)
        end = _page(end + nbytes)
    halves: tuple[dict[str, int], dict[str, int]] = ({}, {})
    stash: dict[TensorName, int] = {}
    stashed = {(t.src, t.name) for p in range(len(rules.forward_packs)) for t in rules.stashed_tensors(p)}
    for key, boundary in sorted(decomposition.boundaries.items()):
        nbytes = boundary.bytes_per_sample * rules.configuration.minibatch
        nbytes += boundary.bytes_fixed * len(rules.forward_samples)
        if key[0] == BATCH:
            for half in halves:
                half[key[1]] = end
                end = _page(end + nbytes)
        elif key in stashed:
            stash[key] = end
            end = _page(end + nbytes)
    snapshots: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for areas in snapshots:
        for i, layer in enumerate(decomposition.layers):
            if layer.states:
                areas[i] = end
                end = _page(end + len(rules.forward_samples) * _state_bytes(decomposition, i))
    return StoreLayout(
        num_nodes, devices, microbatches, offsets[0], offsets[1], offsets[2], halves, stash, snapshots, end
    )


def _state_bytes(decomposition: Decomposition, layer: int) -> int:
    return sum(aligned(decomposition.buffers[name].nbytes) for name in decomposition.layers[layer].states)


def _page(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def create_memory(nbytes: int) -> int:
    """A file descriptor of shared memory. Raises InfeasibleError where the host has less free memory."""
    check_free(nbytes, "the run")
    descriptor = os.memfd_create("harmony")
    os.ftruncate(descriptor, nbytes)
    return descriptor


def available_bytes() -> int:
    """Host memory that this process may still take: what is free, and what its container leaves."""
    memory = psutil.virtual_memory()
    free: int = memory.available
    for limit, used in CGROUPS:
        try:
            left = int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):  # there is none, or it says "max"
            continue
        # a limit beyond all memory is none
        if left < memory.total:
            free = min(free, max(left, 0))
    return free


def check_free(nbytes: int, what: str) -> None:
    """Raise InfeasibleError where the host has less free memory."""
    available = available_bytes()
    if nbytes > available:
        raise InfeasibleError(
            f"host: {what} needs {nbytes} bytes of memory, {available} are free; "
            f"end other programs, or plan with a smaller minibatch"
        )


class HostStore:
    """Views of the mapping. Tensors of different calls share memory but no autograd version counter."""

    def __init__(
        self,
        descriptor: int,
        layout: StoreLayout,
        rules: Rules,
        decomposition: Decomposition,
        places: Sequence[LayerPlaces],
    ) -> None:
        self.layout = layout
        self._map = mmap.mmap(descriptor, layout.total)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._storage = self.memory.untyped_storage()
        self._rules = rules
        self._decomposition = decomposition
        self._places = places
        calls = NUM_WORDS + 2 * layout.num_devices
        nodes = calls + layout.num_devices
        shares = WORD * (nodes + 2 * layout.num_nodes)
        losses = shares + WORD * 2 * layout.num_microbatches
        words = memoryview(self._map)[:shares].cast("q")
        self._words = words
        self.steps = words[4:6]
        """Steps of training before an iteration; iterations alternate."""
        self.evaluations = words[6:8]
        """Whether an iteration is one of evaluation; iterations alternate."""
        self.busy = words[NUM_WORDS:calls]
        self.calls = words[calls:nodes]
        self.done = words[nodes : nodes + layout.num_nodes]
        self.begun = words[nodes + layout.num_nodes :]
        self.shares = self._tensor(shares, (2, layout.num_microbatches), torch.float64)
        """What part of the minibatch's loss each microbatch's is; iterations alternate, as with losses."""
        self.losses = self._tensor(losses, (2, layout.num_microbatches), torch.float32)
        self.agreed = self._tensor(losses + self.losses.nbytes, (2,), torch.float32)
        """The norm over all gradients, and what they are multiplied by."""
        self.scaling = self._tensor(losses + self.losses.nbytes + self.agreed.nbytes, (3,), torch.float32)
        """The loss scale, as scaling.py has it."""
        touched = losses + self.losses.nbytes + self.agreed.nbytes + self.scaling.nbytes
        self.touched: list[dict[str, Tensor]] = []
        """By layer and parameter whether some microbatch's loss depended on it; cleared by its update."""
        for place in places:
            self.touched.append(
                {n: self._tensor(touched + i, (), torch.bool) for i, n in enumerate(place.gradients)}
            )
            touched += len(place.gradients)
        costs = rules.costs
        self._weight_starts = [
            costs.weight_bytes(0, i) - costs.weight_bytes(i, i) for i in range(costs.num_layers)
        ]
        self._gradient_starts = [
            costs.gradient_bytes(0, i) - costs.gradient_bytes(i, i) for i in range(costs.num_layers)
        ]
        self._state_starts = [
            costs.state_bytes(0, i) - costs.state_bytes(i, i) for i in range(costs.num_layers)
        ]

    # ---- control words

    @property
    def failed(self) -> int:
        """1 + the first rank that failed, 0 while none has."""
        return self._words[0]

    @failed.setter
    def failed(self, value: int) -> None:
        self._words[0] = value

    @property
    def num_batches(self) -> int:
        """How many iterations' batches have been written."""
        return self._words[1]

    @num_batches.setter
    def num_batches(self, value: int) -> None:
        self._words[1] = value

    @property
    def has_batch(self) -> bool:
        """Whether another batch follows, in a loop over batches that rank 0 has."""
        return self._words[3] != 0

    @has_batch.setter
    def has_batch(self, value: bool) -> None:
        self._words[3] = int(value)

    @property
    def num_saved(self) -> int:
        """How far checkpoints are: of all that this run could make, one after each iteration, the layers that are past."""
        return self._words[2]

    @num_saved.setter
    def num_saved(self, value: int) -> None:
        self._words[2] = value

    # ---- areas

    def weight_range(self, first: int, last: int) -> Tensor:
        """Weights and buffers of layers first..last, flat bytes."""
        start = self.layout.weights + self._weight_starts[first]
        return self._bytes(start, self._rules.costs.weight_bytes(first, last))

    def gradient_range(self, first: int, last: int) -> Tensor:
        """Gradients of layers first..last, flat bytes."""
        start = self.layout.gradients + self._gradient_starts[first]
        return self._bytes(start, self._rules.costs.gradient_bytes(first, last))

    def state_range(self, first: int, last: int) -> Tensor:
        """Optimizer states of layers first..last, flat bytes."""
        start = self.layout.states + self._state_starts[first]
        return self._bytes(start, self._rules.costs.state_bytes(first, last))

    def weights(self, layer: int) -> dict[str, Tensor]:
        """A layer's parameters by name."""
        return self._views(self._places[layer].weights, self.layout.weights + self._weight_starts[layer])

    def buffers(self, layer: int) -> dict[str, Tensor]:
        return self._views(self._places[layer].buffers, self.layout.weights + self._weight_starts[layer])

    def gradients(self, layer: int) -> dict[str, Tensor]:
        return self._views(
            self._places[layer].gradients, self.layout.gradients + self._gradient_starts[layer]
        )

    def states(self) -> dict[str, dict[str, Tensor]]:
        """Optimizer state tensors by parameter and key."""
        found: dict[str, dict[str, Tensor]] = {}
        for layer, places in enumerate(self._places):
            start = self.layout.states + self._state_starts[layer]
            for name in places.gradients:
                # an optimizer without state (plain SGD) has an empty one
                found.setdefault(name, {})
            for (name, key), place in places.states.items():
                found.setdefault(name, {})[key] = self._tensor(start + place.offset, place.shape, place.dtype)
        return found

    def batch(self, iteration: int, name: str, first: int, end: int) -> Tensor:
        """Samples [first, end) of a batch tensor of an iteration."""
        start = self.layout.batch[iteration % 2][name]
        return self._rows(start, self._decomposition.boundaries[BATCH, name], first, end)

    def stash(self, key: TensorName, first: int, end: int, microbatch: int) -> Tensor:
        """Samples [first, end) of a stashed tensor; one without samples lies there per forward microbatch."""
        boundary = self._decomposition.boundaries[key]
        if boundary.is_batched:
            return self._rows(self.layout.stash[key], boundary, first, end)
        start = self.layout.stash[key] + microbatch * boundary.bytes_fixed
        return self._tensor(start, boundary.shape, boundary.dtype)

    def snapshots(self, layer: int, iteration: int, microbatch: int) -> dict[str, Tensor]:
        """A layer's states as the forward of a microbatch found them."""
        decomposition = self._decomposition
        start = self.layout.snapshots[iteration % 2][layer] + microbatch * _state_bytes(decomposition, layer)
        found = {}
        for name in decomposition.layers[layer].states:
            buffer = decomposition.buffers[name]
            found[name] = self._tensor(start, tuple(buffer.shape), buffer.dtype)
            start += aligned(buffer.nbytes)
        return found

    def _rows(self, start: int, boundary: Boundary, first: int, end: int) -> Tensor:
        return self._tensor(
            start + first * boundary.bytes_per_sample, boundary.shape_of(end - first), boundary.dtype
        )

    def _views(self, places: dict[str, Place], start: int) -> dict[str, Tensor]:
        return {name: self._tensor(start + p.offset, p.shape, p.dtype) for name, p in places.items()}

    def _bytes(self, start: int, nbytes: int) -> Tensor:
        return self._tensor(start, (nbytes,), torch.uint8)

    def _tensor(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return over_storage(self._storage, start, shape, dtype)


def over_storage(
    storage: torch.UntypedStorage,
    start: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    """A tensor of its own over part of a storage: no view, so no version counter is shared.

    Contiguous unless strides are given.
    """
    if strides is None:
        steps, step = [], 1
        for size in reversed(shape):
            steps.append(step)
            step *= size
        strides = tuple(reversed(steps))
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, start // dtype.itemsize, shape, strides)
