"""Where every tensor of a model lies in the flat host store, and the profile's sizes that follow from it.

One layer after the other, each tensor from a 512-byte boundary on, so that any pack is one range and one copy:
weights (trainable first, then frozen, then buffers), gradients of the trainable ones at the same offsets, and
optimizer states. A parameter that several layers use has a place in each of them, and one state, in the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executor.decompose import Boundary, Decomposition
from executor.optimizer import Recipe, state_layout
from planner.contract.profile import Device, Edge, Layer, Model, Profile, Tie

ALIGNMENT = 512


def aligned(num_bytes: int) -> int:
    """Rounded up to the alignment of the store."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Place:
    """A tensor at an offset of its layer's range, in bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class LayerPlaces:
    """One layer's tensors by name, and the bytes of its ranges. states: by (parameter, key)."""

    weights: dict[str, Place]
    buffers: dict[str, Place]
    gradients: dict[str, Place]
    states: dict[tuple[str, str], Place]
    weight_bytes: int
    buffer_bytes: int
    gradient_bytes: int
    state_bytes: int


def layer_places(decomposition: Decomposition, recipe: Recipe) -> list[LayerPlaces]:
    """The places of every layer's tensors."""
    owners = {name: layers[0] for name, layers in decomposition.ties.items()}
    found = []
    for i, layer in enumerate(decomposition.layers):
        tensors = decomposition.parameters
        trainable = [name for name in layer.parameters if tensors[name].requires_grad]
        weights, weight_bytes = _place(
            {n: (tuple(tensors[n].shape), tensors[n].dtype) for n in layer.parameters}, 0
        )
        gradients = {name: weights[name] for name in trainable}
        gradient_bytes = max((p.offset + aligned(p.nbytes) for p in gradients.values()), default=0)
        buffers = decomposition.buffers
        places, end = _place(
            {n: (tuple(buffers[n].shape), buffers[n].dtype) for n in layer.buffers}, weight_bytes
        )
        owned = [name for name in trainable if owners.get(name, i) == i]
        entries = {
            (name, key): (shape, dtype)
            for name in owned
            for key, shape, dtype in state_layout(recipe, name, tensors[name])
        }
        states, state_bytes = _place(entries, 0)
        found.append(
            LayerPlaces(
                weights,
                places,
                gradients,
                states,
                weight_bytes,
                end - weight_bytes,
                gradient_bytes,
                state_bytes,
            )
        )
    return found


def _place(
    entries: Mapping[Any, tuple[tuple[int, ...], torch.dtype]], start: int
) -> tuple[dict[Any, Place], int]:
    places, offset = {}, start
    for key, (shape, dtype) in entries.items():
        places[key] = Place(offset, shape, dtype)
        offset += aligned(places[key].nbytes)
    return places, offset


def held_bytes(owned: Iterable[Tensor], given: Iterable[Tensor]) -> int:
    """What is there while a layer runs alone: what it owns, as it lies in slots, and what it is given."""
    return sum(aligned(t.nbytes) for t in owned) + sum(t.nbytes for t in given)


def structure(
    decomposition: Decomposition,
    spec: str,
    recipe: Recipe,
    patterns: tuple[str, ...] = (),
) -> Profile:
    """A profile with everything but the costs: what a schedule's model hash is compared with."""
    places = layer_places(decomposition, recipe)
    layers = tuple(
        Layer(
            name=layer.name,
            weight_bytes=place.weight_bytes,
            gradient_bytes=place.gradient_bytes,
            buffer_bytes=place.buffer_bytes,
            optimizer_state_bytes=place.state_bytes,
            stochastic=layer.stochastic,
            batch_coupled=layer.batch_coupled,
            forward=(),
            backward=(),
        )
        for layer, place in zip(decomposition.layers, places, strict=True)
    )
    edges = tuple(
        _edge(boundary, consumer)
        for _, boundary in sorted(decomposition.boundaries.items())
        for consumer in boundary.consumers
    )
    ties = tuple(
        Tie(uses, decomposition.parameters[name].nbytes, name)
        for name, uses in decomposition.ties.items()
        if decomposition.parameters[name].requires_grad
    )
    dtypes = {str(p.dtype).removeprefix("torch.") for p in decomposition.parameters.values()}
    return Profile(
        model=Model(
            name=spec.partition("?")[0],
            spec=spec,
            patterns=patterns,
            cut_by=decomposition.cut_by,
            inputs={
                b.name: f"{list(b.shape)} {b.dtype}"
                for key, b in decomposition.boundaries.items()
                if key[0] < 0
            },
            structure_hash=decomposition.structure_hash,
        ),
        device=Device(name=""),
        dtype="+".join(sorted(dtypes)),
        optimizer=recipe.name,
        layers=layers,
        edges=edges,
        ties=ties,
    )


def _edge(boundary: Boundary, consumer: int) -> Edge:
    return Edge(
        src=boundary.source,
        dst=consumer,
        bytes_per_sample=boundary.bytes_per_sample,
        bytes_fixed=boundary.bytes_fixed,
        differentiable=boundary.is_differentiable,
        tensor=boundary.name,
    )
