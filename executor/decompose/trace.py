"""One microbatch's loss as a flat graph of operations, by torch.export."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from executor.decompose.layers import DecomposeError
from executor.models import Workload

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
    """A graph whose placeholders are parameters, buffers and batch tensors, by node name."""

    graph: fx.Graph
    output: fx.Node
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, Tensor]
    batch: dict[str, str]
    symbol: Any


def trace(workload: Workload, batch: dict[str, Tensor]) -> Traced:
    """Export the loss with a dynamic number of samples. Raises DecomposeError with the first line of the cause."""
    names = tuple(batch)
    shapes = tuple({0: Dim.DYNAMIC} for _ in names)
    try:
        program = torch.export.export(
            _Loss(workload, names), tuple(batch.values()), dynamic_shapes=(shapes,), strict=False
        )
    except Exception as error:  # export raises whatever the model's own code raises
        cause = str(error).strip().splitlines() or [type(error).__name__]
        raise DecomposeError(
            f"torch.export cannot trace the model: {cause[0]} ({type(error).__name__}); "
            f"models with data-dependent control flow cannot be cut yet"
        ) from error
    return _read(program, names)


def _read(program: ExportedProgram, names: tuple[str, ...]) -> Traced:
    signature, graph = program.graph_signature, program.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and "_assert" in str(node.target) and not node.users:
            graph.erase_node(node)
    _erase_unused(graph)
    inputs = dict(zip(signature.user_inputs, names, strict=True))
    first = next(node for node in graph.nodes if node.name in inputs)
    symbol = first.meta["val"].shape[0].node.expr
    if getattr(symbol, "is_symbol", False) is not True:
        raise DecomposeError(f"the model fixes the number of samples to {symbol}; it must work for any")
    (output,) = (node for node in graph.nodes if node.op == "output")
    return Traced(
        graph=graph,
        output=output.args[0][-1],
        parameters={node: name.removeprefix(WRAPPED) for node, name in signature.inputs_to_parameters.items()},
        buffers={node: name.removeprefix(WRAPPED) for node, name in signature.inputs_to_buffers.items()},
        constants={
            node: program.constants[name] for node, name in signature.inputs_to_lifted_tensor_constants.items()
        },
        batch={str(node): name for node, name in inputs.items()},
        symbol=symbol,
    )


def _erase_unused(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not changes_something(node):
            graph.erase_node(node)


def changes_something(node: fx.Node) -> bool:
    """Whether an operation writes to its inputs or draws random numbers."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable) or draws_random_numbers(node)


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether an operation uses the generator, in training, with a probability above 0."""
    target = node.target
    tags = getattr(target, "tags", ())
    name = str(target)
    if "scaled_dot_product_attention" in name:
        dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(dropout)
    if "dropout" in name:
        probability, training = node.args[1], node.args[2] if len(node.args) > 2 else True
        return bool(probability) and bool(training)
    return torch.Tag.nondeterministic_seeded in tags


def is_batch_norm_in_training(node: fx.Node) -> bool:
    """Whether an operation's result depends on all samples of its microbatch."""
    return "batch_norm" in str(node.target) and any(arg is True for arg in node.args[5:6])
