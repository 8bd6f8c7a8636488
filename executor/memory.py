"""What lies on a device: for each value of the program its tensors, in slots that are used again.

A slot is flat memory from a pool: who frees a value gives its slot back, who makes one takes a slot that is
large enough, so in the steady state nothing is allocated. Tensors are made over a slot's storage with
`set_`: views would share a version counter, and autograd would refuse a graph whose slot is filled again.
That is safe because a slot is refilled behind the last work that used it, and a graph that outlives its action
saves nothing over slots (saved.py).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from executor.decompose.layers import TensorName
from executor.host import over_storage
from executor.saved import SavedGraph
from executor.streams import Device, Event
from planner.contract.actions import Value

SLOT_ALIGNMENT = 64

Shapes = dict[TensorName, tuple[tuple[int, ...], torch.dtype]]
"""The shape and type of each tensor of a value, in the order in which they lie in a slot."""


@dataclass
class Held:
    """A value on the device. flat: its bytes where it lies in a slot; tensors: by name of the boundary.

    parameters, buffers, gradients: per layer by name, for weights and gradients. pieces: saved activations on
    their way to the host.
    """

    nbytes: int = 0
    slot: Tensor | None = None
    flat: Tensor | None = None
    tensors: dict[TensorName, Tensor] = field(default_factory=dict)
    parameters: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    buffers: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    pieces: list[Tensor] = field(default_factory=list)


class SlotPool:
    """Slots not in use, by size; the smallest that is large enough is taken.

    A slot remembers the event behind the work that used it last. Who takes it waits for that event on its own
    stream: the program orders a refill behind *its* free, but the slot may come from another one.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: list[tuple[Tensor, Event]] = []
        self._addresses: set[int] = set()
        self._lock = threading.Lock()
        self.reserved_bytes = 0

    def take(self, nbytes: int, stream: str) -> Tensor:
        """A slot of at least `nbytes` for work on a stream, of a little less waste than twice that."""
        with self._lock:
            fitting = [
                i for i, (slot, _) in enumerate(self._free) if nbytes <= slot.nbytes <= 2 * nbytes + 4096
            ]
            if not fitting:
                self.reserved_bytes += nbytes
                slot = self._device.slot(nbytes)
                # slots are kept until the end of the run, so an address stays one of a slot
                self._addresses.add(slot.data_ptr())
                return slot
            slot, last_use = self._free.pop(min(fitting, key=lambda i: self._free[i][0].nbytes))
        self._device.wait(stream, last_use)
        return slot

    def give(self, slot: Tensor, last_use: Event) -> None:
        with self._lock:
            self._free.append((slot, last_use))

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in a slot, and so will be overwritten."""
        return tensor.untyped_storage().data_ptr() in self._addresses


class DeviceMemory:
    """The values on one device. Accounting follows the plan: bytes count from make to free."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.pool = SlotPool(device)
        self.graphs: dict[Value, SavedGraph] = {}
        """Forwards whose backward is to come, by the value of what they saved; it may be on the host meanwhile."""
        self.nothing = device.slot(16)
        """Room for one element of any type: what tensors without bytes of their own are made over."""
        self._held: dict[Value, Held] = {}
        self._lock = threading.Lock()

    def make(self, value: Value, nbytes: int, stream: str, slot_nbytes: int = 0) -> Held:
        """A value in a slot of its own, filled on a stream, counted from now on.

        slot_nbytes: what the slot needs with alignment.
        """
        self.device.account(nbytes, str(value))
        slot = self.pool.take(max(nbytes, slot_nbytes, 1), stream)
        held = Held(nbytes, slot, over_storage(slot.untyped_storage(), 0, (nbytes,), slot.dtype))
        self._keep(value, held)
        return held

    def keep(self, value: Value, tensors: dict[TensorName, Tensor]) -> None:
        """Tensors that compute made; the meter counts their storages as long as they live."""
        self._keep(value, Held(tensors=tensors))

    def keep_graph(self, value: Value, graph: SavedGraph) -> None:
        """What a forward saved; the meter counts its pieces as it does tensors that compute made."""
        self.graphs[value] = graph
        self._keep(value, Held())

    def come_back(self, value: Value) -> None:
        """Saved activations have returned; their bytes are the graph's."""
        self._keep(value, Held())

    def _keep(self, value: Value, held: Held) -> None:
        with self._lock:
            assert value not in self._held, f"{value} is there already"
            self._held[value] = held

    def __getitem__(self, value: Value) -> Held:
        with self._lock:
            return self._held[value]

    def free(self, value: Value, stream: str) -> None:
        """The value is gone once `stream` gets here: its slot may be used again, its tensors are let go."""
        with self._lock:
            held = self._held.pop(value)
        if held.slot is not None:
            self.device.release(held.nbytes)
            # the free has waited for every reader on this stream, so a mark on it is behind all of them
            self.pool.give(held.slot, self.device.mark(stream))


def tensors_in(slot: Tensor, shapes: Shapes) -> dict[TensorName, Tensor]:
    """Tensors one after the other in a slot, each aligned."""
    found, offset = {}, 0
    for name, (shape, dtype) in shapes.items():
        tensor = over_storage(slot.untyped_storage(), offset, shape, dtype)
        found[name] = tensor
        offset += -(-tensor.nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    return found


def slot_bytes(shapes: Shapes) -> int:
    """The size of a slot for `tensors_in`."""
    total = 0
    for shape, dtype in shapes.values():
        count = 1
        for size in shape:
            count *= size
        total += -(-count * dtype.itemsize // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    return total
