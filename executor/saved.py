"""What a forward saves for a backward that does not recompute: its autograd graph, and the tensors in it.

    F1.0     layers with gradients; instead of each tensor that it saves the graph holds a Place:
               weights   an offset in the pack's weights: their slot is filled again, they come back to another
               batch     an offset in the microbatch's batch tensors: likewise
               piece     an offset in memory of its own, which stays (keep) or leaves and returns (offload)
    out:AF1.0, in:AB1.0   move the pieces
    B1.0     the graph asks for its tensors: each is made over where its bytes are by then

A graph that held tensors over slots would compute with whatever lies there at the backward: no error, wrong
gradients. The slots of a pack's weights and batch are laid out alike in both phases, since both have the same
layers and samples, so an offset names the same bytes in either.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from executor.decompose.layers import TensorName
from executor.host import over_storage

Shared = Literal["weights", "batch"]
"""A slot that the backward has again, though not at the same address."""


@dataclass(eq=False)
class Piece:
    """Bytes that saved tensors lie in. data: those bytes while on the device; start: their place on the host."""

    nbytes: int
    data: Tensor | None
    start: int = 0

    def take(self) -> Tensor:
        """The bytes, which are nobody's from now on but the caller's."""
        assert self.data is not None
        data, self.data = self.data, None
        return data


@dataclass(frozen=True, eq=False)
class Place:
    """A saved tensor: where its bytes are, and how they are looked at. offset: in bytes."""

    source: Piece | Shared
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class SavedTensors:
    """The saved tensors of one pack and microbatch.

    slots: address of a slot -> what it is. given: tensors in other slots, which will be gone by the backward.
    owns: whether a tensor lies in a slot.
    """

    def __init__(
        self, slots: Mapping[int, Shared], given: list[Tensor], owns: Callable[[Tensor], bool]
    ) -> None:
        self._slots = slots
        self._given = given
        self._owns = owns
        # weak: who holds a piece is the graph, which lets go of each as the backward proceeds. An address means the
        # same memory as long as its piece lives
        self._pieces: weakref.WeakValueDictionary[int, Piece] = weakref.WeakValueDictionary()
        self._shared: Mapping[Shared, torch.UntypedStorage] = {}
        # on their way out, on the host, on their way back
        self._moved: list[Piece] = []

    def hooks(self) -> AbstractContextManager[None]:
        """Graphs made inside save their tensors here."""
        context: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(
            self._pack, self._unpack
        )
        return context

    def forward_is_over(self) -> None:
        """What the slots held may be gone from now on."""
        self._slots, self._given = {}, []

    # ---- pieces that move

    def leave(self, device: torch.device) -> list[tuple[int, Tensor]]:
        """All pieces on the device go to the host, one behind the other: the place there and the bytes of each."""
        found = [
            p for p in self._pieces.values() if p.nbytes and p.data is not None and p.data.device == device
        ]
        end = 0
        for piece in found:
            piece.start = end
            end += piece.nbytes
        self._moved = found
        return [(piece.start, piece.take()) for piece in found]

    def come_back(self, allocate: Callable[[int], Tensor]) -> list[tuple[int, Tensor]]:
        """The same pieces return, each to memory of its own, which the backward lets go of as it proceeds."""
        found = []
        for piece in self._moved:
            piece.data = allocate(piece.nbytes)
            found.append((piece.start, piece.data))
        self._moved = []
        return found

    def resolve(self, shared: Mapping[Shared, torch.UntypedStorage]) -> None:
        """Where the shared slots are for the backward."""
        self._shared = shared

    # ---- hooks

    def _pack(self, tensor: Tensor) -> Place:
        # a tensor made over a storage knows nothing of a lazy conjugate
        tensor = tensor.resolve_conj().resolve_neg()
        storage = tensor.untyped_storage()
        offset = int(tensor.storage_offset()) * tensor.element_size()
        source: Piece | Shared | None = self._slots.get(storage.data_ptr())
        if source is None and self._owns(tensor):
            given = next(t for t in self._given if 0 <= tensor.data_ptr() - t.data_ptr() < t.nbytes)
            offset = tensor.data_ptr() - given.data_ptr()
            source = self._piece(given.data_ptr(), lambda: given.detach().clone())
        if source is None:
            source = self._piece(
                storage.data_ptr(), lambda: over_storage(storage, 0, (storage.nbytes(),), torch.uint8)
            )
        return Place(source, offset, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def _piece(self, address: int, data: Callable[[], Tensor]) -> Piece:
        piece = self._pieces.get(address)
        if piece is None:
            found = data().reshape(-1).view(torch.uint8)
            piece = Piece(found.nbytes, found)
            self._pieces[address] = piece
        return piece

    def _unpack(self, place: Place) -> Tensor:
        source = place.source
        if isinstance(source, Piece):
            assert source.data is not None, "asked for while on the host"
            storage = source.data.untyped_storage()
        else:
            storage = self._shared[source]
        return over_storage(storage, place.offset, place.shape, place.dtype, place.strides)


@dataclass(eq=False)
class SavedGraph:
    """A forward that its backward will go through.

    leaves: the pack's inputs, without their bytes; ends: where gradients enter. parameters: per layer by name, the
    ones that the graph accumulates into. Nothing that `saved` refers to refers back: a cycle through autograd's
    nodes would never be collected.
    """

    saved: SavedTensors
    leaves: dict[TensorName, Tensor]
    parameters: dict[int, dict[str, Tensor]]
    ends: dict[TensorName, GradientEdge] = field(default_factory=dict)

    def close(self, outputs: Mapping[TensorName, Tensor], nothing: Tensor) -> None:
        """The forward is over: keep where gradients enter and leave, and of the tensors there only the shape.

        nothing: memory for one element of any type.
        """
        self.ends = {
            key: torch.autograd.graph.get_gradient_edge(tensor)
            for key, tensor in outputs.items()
            if tensor.requires_grad
        }
        for leaf in self.leaves.values():
            leaf.data = over_storage(
                nothing.untyped_storage(), 0, tuple(leaf.shape), leaf.dtype, (0,) * leaf.dim()
            )
        self.saved.forward_is_over()
