"""What decomposing a model gives: layers that are plain functions, and the tensors between them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from planner.contract.errors import HarmonyError

BATCH = -1
"""The source of a tensor that comes from the batch."""

TensorName = tuple[int, str]
"""(source layer or BATCH, name)."""


class DecomposeError(HarmonyError):
    """A model cannot be cut into layers; the message says where it stopped."""


@dataclass(frozen=True)
class Boundary:
    """A tensor between layers.

    shape: with the rows of one sample first where it is batched (rows_per_sample rows a sample), as it is where not.
    """

    source: int
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_batched: bool
    is_differentiable: bool
    consumers: tuple[int, ...]

    @property
    def bytes_per_sample(self) -> int:
        """What one sample adds; 0 where there is no batch dimension."""
        return self._nbytes if self.is_batched else 0

    @property
    def bytes_fixed(self) -> int:
        """Its size where it has no batch dimension, else 0."""
        return 0 if self.is_batched else self._nbytes

    @property
    def _nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def shape_of(self, num_samples: int) -> tuple[int, ...]:
        """Its shape in a microbatch."""
        return (self.shape[0] * num_samples, *self.shape[1:]) if self.is_batched else self.shape


@dataclass(frozen=True, eq=False)
class Layer:
    """Consecutive operations of a model, as a function of parameters, buffers and inputs.

    parameters: original names, trainable ones first. sizes: sympy expressions over the number of samples, handed
    to the code behind the tensors. mutated_buffers change in place when the layer runs; states are those whose values its
    results depend on (a power iteration's vector, not BatchNorm's statistics): a recompute begins with what its forward had.
    """

    name: str
    path: str
    code: fx.GraphModule
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    mutated_buffers: tuple[str, ...]
    states: tuple[str, ...]
    inputs: tuple[TensorName, ...]
    outputs: tuple[str, ...]
    sizes: tuple[object, ...]
    size_symbol: object
    stochastic: bool
    batch_coupled: bool
    signature: str

    def __call__(
        self,
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
        inputs: Sequence[Tensor],
        num_samples: int,
    ) -> tuple[Tensor, ...]:
        """Run it on one microbatch; outputs in the order of `outputs` (the last layer's is the loss)."""
        sizes = [_evaluate(size, self.size_symbol, num_samples) for size in self.sizes]
        out: tuple[Tensor, ...] = self.code(*parameters, *buffers, *inputs, *sizes)
        return out


def _evaluate(size: Any, symbol: object, num_samples: int) -> int | float | bool:
    """A size in a microbatch, of the type that the model's code worked with."""
    value = size.subs(symbol, num_samples) if hasattr(size, "subs") else size
    if getattr(value, "is_Boolean", False):
        return bool(value)
    if getattr(value, "is_Float", False):
        return float(value)
    return int(value) if hasattr(value, "is_Integer") else value


@dataclass(frozen=True, eq=False)
class Decomposition:
    """A model's layers in order. parameters and buffers: the model's own tensors by name.

    aliases: names that stand for the same parameter as another, first name -> all names. cut_by: `export`,
    or `tape` where modules stay whole.
    """

    layers: tuple[Layer, ...]
    boundaries: dict[TensorName, Boundary]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    cut_by: str = "export"

    @property
    def ties(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several layers use, and the layers."""
        users: dict[str, list[int]] = {}
        for i, layer in enumerate(self.layers):
            for name in layer.parameters:
                users.setdefault(name, []).append(i)
        return {name: tuple(layers) for name, layers in users.items() if len(layers) > 1}

    @property
    def entries(self) -> tuple[tuple[str, int], ...]:
        """Where the plain model enters each layer: (module path, layer), the model itself first."""
        return (("", 0), *((layer.path, i) for i, layer in enumerate(self.layers) if layer.path))

    @property
    def structure_hash(self) -> str:
        """Over layers, parameters, shapes and edges; the same in every process, on every machine."""
        digest = hashlib.sha256()
        for layer in self.layers:
            digest.update(f"{layer.name} {layer.signature} {layer.inputs} {layer.outputs}\n".encode())
            for name in layer.parameters:
                parameter = self.parameters[name]
                digest.update(
                    f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}\n".encode()
                )
        for key in sorted(self.boundaries):
            digest.update(f"{self.boundaries[key]}\n".encode())
        return digest.hexdigest()[:16]
