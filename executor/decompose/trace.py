"""One microbatch's loss as a flat graph of operations, by torch.export."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from executor.decompose.autocast import take_apart
from executor.decompose.effects import changes_something
from executor.decompose.layers import DecomposeError
from executor.workload import Workload

WRAPPED = "model."
"""The user's model is the submodule `model` of what is exported."""


class _Loss(nn.Module):
    """The loss of one microbatch as a module: what is exported."""

    def __init__(self, workload: Workload, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = workload.model
        self._workload = (workload,)
        self._names = names

    def forward(self, *tensors: Tensor) -> Tensor:
        (workload,) = self._workload
        return workload.loss(self.model, dict(zip(self._names, tensors, strict=True)))


@dataclass(frozen=True)
class Traced:
    """A graph whose placeholders are parameters, buffers and batch tensors, by node name.

    symbol: the number of samples. same_symbols: what export calls it in batch tensors whose sizes never met.
    """

    graph: fx.Graph
    output: fx.Node
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, Tensor]
    batch: dict[str, str]
    symbol: Any
    same_symbols: frozenset[Any]

    def expression(self, size: Any) -> Any:
        """A size as an expression over `symbol`, or the number that it is."""
        found = getattr(getattr(size, "node", None), "expr", size)
        renamed = dict.fromkeys(self.same_symbols, self.symbol)
        return found.xreplace(renamed) if renamed and hasattr(found, "xreplace") else found


class TraceError(DecomposeError):
    """torch.export cannot trace the model."""


def trace(workload: Workload, batch: dict[str, Tensor]) -> Traced:
    """Export the loss with a dynamic number of samples. Raises TraceError with the first line of the cause."""
    _check_example(workload, batch)
    names = tuple(batch)
    shapes = tuple(None if name in workload.fixed else {0: Dim.DYNAMIC} for name in names)
    try:
        with _quiet():
            program = torch.export.export(
                _Loss(workload, names), tuple(batch.values()), dynamic_shapes=(shapes,), strict=False
            )
    except Exception as error:  # export raises whatever the model's own code raises
        if "specialized it to be a constant" in str(error):
            raise TraceError(
                f"the model or its loss fixes the number of samples to {workload.num_samples(batch)}; "
                f"it must work for any (tensor.shape[0], not len(tensor))"
            ) from error
        cause = str(error).strip().splitlines() or [type(error).__name__]
        raise TraceError(
            f"torch.export cannot trace the model: {cause[0]} ({type(error).__name__})"
        ) from error
    return _read(program, names, workload.fixed)


@contextmanager
def _quiet() -> Iterator[None]:
    """Export warns of what the check of the cut would find, and prints all it has traced where it fails."""
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _check_example(workload: Workload, batch: dict[str, Tensor]) -> None:
    counts = {
        name: len(tensor) if tensor.dim() else 0
        for name, tensor in batch.items()
        if name not in workload.fixed
    }
    if len(set(counts.values())) != 1:
        raise DecomposeError(
            f"the example batch needs as many samples in each of its tensors, it has {counts}"
        )
    if min(counts.values()) < 2:  # export would fix the number to 1
        raise DecomposeError(f"the example batch has {min(counts.values())} samples; draw 2 or more")


def _read(program: ExportedProgram, names: tuple[str, ...], fixed: frozenset[str]) -> Traced:
    signature, graph = program.graph_signature, program.graph
    take_apart(graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and "_assert" in str(node.target) and not node.users:
            graph.erase_node(node)
    _erase_unused(graph)
    inputs = dict(zip(signature.user_inputs, names, strict=True))
    symbols = [
        _sample_symbol(node, inputs[node.name])
        for node in graph.nodes
        if node.op == "placeholder" and node.name in inputs and inputs[node.name] not in fixed
    ]
    (end,) = (node for node in graph.nodes if node.op == "output")
    loss: Any = end.args[0]
    output = loss[-1]
    shape = tuple(output.meta["val"].shape)
    if shape:
        raise DecomposeError(f"the loss has shape {shape}; return its mean over the samples, a scalar")
    return Traced(
        graph=graph,
        output=output,
        parameters={
            node: name.removeprefix(WRAPPED) for node, name in signature.inputs_to_parameters.items()
        },
        buffers={node: name.removeprefix(WRAPPED) for node, name in signature.inputs_to_buffers.items()},
        constants={
            node: program.constants[name]
            for node, name in signature.inputs_to_lifted_tensor_constants.items()
        },
        batch={str(node): name for node, name in inputs.items()},
        symbol=symbols[0],
        same_symbols=frozenset(symbols) - {symbols[0]},
    )


def _sample_symbol(node: fx.Node, name: str) -> Any:
    size = node.meta["val"].shape[0]
    symbol = getattr(getattr(size, "node", None), "expr", size)
    if getattr(symbol, "is_symbol", False) is not True:
        raise DecomposeError(
            f"the model fixes the number of samples of {name} to {symbol}; it must work for any"
        )
    return symbol


def _erase_unused(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not changes_something(node):
            graph.erase_node(node)
