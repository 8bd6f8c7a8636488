"""What a model's layers compute and move, without weights, data or a GPU: the counts that an estimate starts from.

    trace     as for a run, of a model without memory (hollow)
    run       each unique layer on tensors that have shapes only, forward, and forward with backward, for two sizes of
              microbatch; every operation is one entry
    line      flops, bytes and peaks through both sizes: a part for each sample and a fixed one

An operation moves what it reads and writes once: eager PyTorch fuses nothing. A peak is the largest of sums that each grow
linearly, so between the sizes the line is never below it; for a single sample it is an extrapolation, and may be.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from executor.decompose import Decomposition, Layer, decompose
from executor.decompose.effects import draws_random_numbers
from executor.hollow import give_memory, hollow
from executor.meter import Meter
from executor.models import load_workload
from executor.optimizer import has_master, recipe, state_layout
from executor.structure import held_bytes, structure
from planner.contract.counts import Counts, LayerCounts, Line, Operation, Pass, Step
from planner.contract.errors import HarmonyError

SIZES = (2, 128)
"""Microbatches that layers are run on; BatchNorm wants more than one sample."""
READS_ROWS = ("embedding", "index", "index_select", "gather")
"""Operations that read as many rows as they give, not all of their first input."""


def count(
    spec: str,
    *,
    optimizer: str,
    settings: Mapping[str, Any],
    patterns: tuple[str, ...] = (),
    dtype: str = "",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Counts:
    """The counts of the model that a spec names. Raises HarmonyError, with the layer where it depends on data."""
    with hollow():
        workload = load_workload(spec, seed=0, dtype=dtype)
    give_memory(workload.model)
    example = workload.draw(torch.Generator().manual_seed(0), 2)
    decomposition = decompose(workload, example, patterns=patterns, check=False)
    chosen = recipe(optimizer, settings)
    skeleton = structure(decomposition, spec, chosen, patterns)
    num_kinds = len({layer.signature for layer in decomposition.layers})
    unique: dict[str, int] = {}
    kinds: list[LayerCounts] = []
    for layer in decomposition.layers:
        if layer.signature not in unique:
            unique[layer.signature] = len(kinds)
            kinds.append(_count_layer(decomposition, layer))
            progress(len(kinds), num_kinds)
    owners = {name: uses[0] for name, uses in decomposition.ties.items()}
    steps = []
    for i, layer in enumerate(decomposition.layers):
        tensors = {n: decomposition.parameters[n] for n in layer.parameters if owners.get(n, i) == i}
        steps.append(_count_step({n: t for n, t in tensors.items() if t.requires_grad}, chosen))
    return Counts(
        profile=skeleton,
        kinds=tuple(kinds),
        kind_of=tuple(unique[layer.signature] for layer in decomposition.layers),
        steps=tuple(steps),
    )


def _count_step(tensors: Mapping[str, Tensor], chosen: Any) -> Step:
    """What an optimizer reads and writes: weights, gradients, states; masters, where there are some, instead of weights."""
    nbytes = 0
    for name, tensor in tensors.items():
        states = sum(
            torch.Size(shape).numel() * kind.itemsize for _, shape, kind in state_layout(chosen, name, tensor)
        )
        nbytes += 2 * (tensor.nbytes + states) + tensor.nbytes
    is_fused = chosen.is_fused and not any(has_master(tensor) for tensor in tensors.values())
    return Step(nbytes, sum(tensor.nbytes for tensor in tensors.values()), is_fused)


def _count_layer(decomposition: Decomposition, layer: Layer) -> LayerCounts:
    runs, layer = [], _as_on_gpu(layer)
    for size in SIZES:
        with _shapes_only(layer):
            runs.append((_forward(decomposition, layer, size), _backward(decomposition, layer, size)))
    (small, large) = runs
    return LayerCounts(_line_of(small[0], large[0], layer), _line_of(small[1], large[1], layer))


def _as_on_gpu(layer: Layer) -> Layer:
    """Dropout is one kernel on a GPU, and saves a mask of bytes; on a CPU it is several, and saves numbers."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(layer.code.graph, {}))
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.dropout.default and draws_random_numbers(node):
            with graph.inserting_before(node):
                both = graph.call_function(torch.ops.aten.native_dropout.default, (*node.args[:2], True))
                kept = graph.call_function(operator.getitem, (both, 0))
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
    return replace(layer, code=fx.GraphModule(layer.code, graph))


@contextmanager
def _shapes_only(layer: Layer) -> Iterator[None]:
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise HarmonyError(
            f"layer {layer.name}: {error.func} depends on the data, which an estimate does not have; "
            f"profile the model on a device"
        ) from None


@dataclass
class _Run:
    """Operations in order: (name, is_matmul, flops, bytes); the most bytes live, and those saved for backward."""

    operations: list[tuple[str, bool, int, int]]
    peak_bytes: int
    saved_bytes: int = 0


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what each operation computes and moves."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, bool, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
        is_view = name == "_unsafe_view" or any(not alias.is_write for alias in aliases)
        made = _bytes(out)
        if is_view or not made:
            return out
        given = made if name in READS_ROWS else _bytes((args, kwargs))
        flops = _flops(func, name, args, kwargs, out)
        self.found.append((name, flops > 0, flops, given + made))
        return out


def _flops(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> int:
    """Of matrix products, convolutions and attention."""
    if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        # products of queries and keys, and of these and values; backward makes the first again and two of each
        query, key = (args[1], args[2]) if "backward" in name else (args[0], args[1])
        one = 2 * query.numel() * key.shape[-2]
        return int(5 * one if "backward" in name else 2 * one)
    counted = flop_registry.get(func._overloadpacket)
    return int(counted(*args, **kwargs, out_val=out)) if counted is not None else 0


def _bytes(values: Any) -> int:
    """Of the tensors in them, each once."""
    tensors = {id(t): t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _tensors(
    decomposition: Decomposition, layer: Layer, size: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Parameters, buffers and inputs, none of which has memory."""
    parameters = []
    for name in layer.parameters:
        real = decomposition.parameters[name]
        parameters.append(torch.empty(real.shape, dtype=real.dtype).requires_grad_(real.requires_grad))
    known = [decomposition.buffers[name] for name in layer.buffers]
    buffers = [torch.empty(real.shape, dtype=real.dtype) for real in known]
    inputs = []
    for key in layer.inputs:
        boundary = decomposition.boundaries[key]
        inputs.append(torch.empty(boundary.shape_of(size), dtype=boundary.dtype))
    return parameters, buffers, inputs


def _forward(decomposition: Decomposition, layer: Layer, size: int) -> _Run:
    parameters, buffers, inputs = _tensors(decomposition, layer, size)
    held = held_bytes((*parameters, *buffers), inputs)
    with torch.no_grad(), Meter(name="estimate") as meter, _Operations() as operations:
        layer(parameters, buffers, inputs, size)
    return _Run(operations.found, held + meter.peak_bytes)


def _backward(decomposition: Decomposition, layer: Layer, size: int) -> _Run:
    """As profile.py measures it: peak of forward with gradients and backward; operations of the backward alone."""
    parameters, buffers, inputs = _tensors(decomposition, layer, size)
    trainable = [p for p in parameters if p.requires_grad]
    for parameter in trainable:
        parameter.grad = torch.zeros_like(parameter)
    given = [
        t.requires_grad_(decomposition.boundaries[key].is_differentiable)
        for key, t in zip(layer.inputs, inputs, strict=True)
    ]
    held = held_bytes((*parameters, *trainable, *buffers), given)
    with Meter(name="estimate") as meter:
        # what has no gradient is handed on, too
        made = layer(parameters, buffers, given, size)
        saved = meter.allocated_bytes
    out = [t for t in made if t.requires_grad]
    del made
    gradients = [torch.ones_like(t) for t in out]
    handed = sum(t.nbytes for t in gradients)
    with meter, _Operations() as operations:
        if out:
            torch.autograd.backward(out, gradients)
    return _Run(operations.found, held + handed + meter.peak_bytes, saved)


def _line_of(small: _Run, large: _Run, layer: Layer) -> Pass:
    if [o[0] for o in small.operations] != [o[0] for o in large.operations]:
        raise HarmonyError(
            f"layer {layer.name}: what it runs depends on the size of the microbatch, so it cannot be estimated; "
            f"profile the model on a device"
        )
    merged: dict[tuple[bool, Line, Line], int] = {}
    for (_, is_matmul, flops, nbytes), other in zip(small.operations, large.operations, strict=True):
        key = is_matmul, _line(flops, other[2]), _line(nbytes, other[3])
        merged[key] = merged.get(key, 0) + 1
    return Pass(
        tuple(Operation(f, b, times, is_matmul) for (is_matmul, f, b), times in merged.items()),
        _line(small.peak_bytes, large.peak_bytes),
        _line(small.saved_bytes, large.saved_bytes),
    )


def _line(small: int, large: int) -> Line:
    """Through a figure at both sizes."""
    per_sample = (large - small) / (SIZES[1] - SIZES[0])
    return Line(per_sample, small - SIZES[0] * per_sample)
