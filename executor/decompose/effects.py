"""What operations do beside computing their result: write to their inputs, draw random numbers, mix samples.

A node may run a graph of its own (a `with torch.no_grad()` block is one): what that does, the node does.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from executor.decompose.calls import ModuleCall


def inner_graph(node: fx.Node) -> fx.GraphModule | None:
    """The module that a get_attr node stands for, where it is a graph."""
    root = node.graph.owning_module
    if node.op != "get_attr" or root is None:
        return None
    found = operator.attrgetter(str(node.target))(root)
    return found if isinstance(found, fx.GraphModule) else None


def operations(node: fx.Node) -> Iterator[fx.Node]:
    """The node itself, then those of the graphs that it runs."""
    yield node
    for given in node.all_input_nodes:
        inner = inner_graph(given)
        if inner is not None and node.op == "call_function":
            for inside in inner.graph.nodes:
                yield from operations(inside)


def changes_something(node: fx.Node) -> bool:
    """Whether an operation writes to its inputs or draws random numbers."""
    if isinstance(node.target, ModuleCall):
        return True
    schemas = (getattr(inside.target, "_schema", None) for inside in operations(node))
    return any(schema is not None and schema.is_mutable for schema in schemas) or draws_random_numbers(node)


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether an operation uses the generator, in training, with a probability above 0."""
    return any(_draws(inside) for inside in operations(node))


def _draws(node: fx.Node) -> bool:
    if isinstance(node.target, ModuleCall):
        return node.target.observed.is_stochastic
    name = str(node.target)
    if node.op != "call_function":
        return False
    if "scaled_dot_product_attention" in name:
        dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(dropout)
    if "dropout" in name:
        probability, training = node.args[1], node.args[2] if len(node.args) > 2 else True
        return bool(probability) and bool(training)
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def mixes_samples(node: fx.Node) -> bool:
    """Whether an operation's result depends on all samples of its microbatch, as BatchNorm's in training. Of a module
    that stays whole nothing is known, so it may."""
    return isinstance(node.target, ModuleCall) or any(
        _is_batch_norm_in_training(inside) for inside in operations(node)
    )


def _is_batch_norm_in_training(node: fx.Node) -> bool:
    return "batch_norm" in str(node.target) and any(arg is True for arg in node.args[5:6])


def ignores_gradients(node: fx.Node) -> bool:
    """Whether no gradient flows through an operation: detach, zeros_like, or a block without gradients."""
    if isinstance(node.target, ModuleCall):
        return False
    if node.target is operator.getitem:
        arguments: Any = node.args
        source, position = arguments
        if isinstance(source.target, ModuleCall):
            return not source.target.observed.results[position].requires_grad
    name = str(node.target)
    operation = name.removeprefix("aten.").partition(".")[0]
    makes_new = operation.endswith("_like") or operation.startswith("new_")
    return makes_new or "detach" in operation or ("set_grad_enabled" in name and node.args[:1] == (False,))


def depends_on(nodes: Iterable[fx.Node], given: fx.Node, results: Iterable[fx.Node]) -> bool:
    """Whether results of operations, run in order, depend on the value of a tensor that they are given. What is written
    to another tensor in place is taken as not read again through that one's earlier views."""
    reached = {given}
    for node in nodes:
        read = node.all_input_nodes
        if _is_batch_norm_in_training(node):
            # it normalizes with the batch's own statistics
            read = [
                value for i, value in enumerate(node.args) if isinstance(value, fx.Node) and i not in (3, 4)
            ]
        if reached.intersection(read):
            reached.add(node)
            reached.update(value for value, is_write in _aliased(node) if is_write)
    return not reached.isdisjoint(results)


def written(nodes: Iterable[fx.Node], given: Iterable[fx.Node]) -> set[fx.Node]:
    """Those of the given tensors that the operations, run in order, change in place, through views as well."""
    base = {node: node for node in given}
    found: set[fx.Node] = set()
    for node in nodes:
        for value, is_write in _aliased(node):
            if value in base:
                if is_write:
                    found.add(base[value])
                base[node] = base[value]
    return found


def _aliased(node: fx.Node) -> Iterator[tuple[fx.Node, bool]]:
    """Arguments that an operation's result may share memory with or that it writes to: (argument, writes)."""
    if isinstance(call := node.target, ModuleCall):
        arguments: Any = node.args
        tensors, _, _, _, buffers = arguments
        yield from ((tensors[i], True) for i in call.observed.inputs)
        own = zip(call.buffers, buffers, strict=True)
        yield from ((buffer, True) for name, buffer in own if name in call.observed.buffers)
        return
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        yield node.args[0], False
    if _is_batch_norm_in_training(node):  # its schema does not say that it writes the running statistics
        yield from ((value, True) for value in node.args[3:5] if isinstance(value, fx.Node))
    schema = getattr(node.target, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None:
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            yield from ((item, argument.alias_info.is_write) for item in _nodes_of(value))
    for position, value in enumerate(node.args):
        inner = inner_graph(value) if isinstance(value, fx.Node) else None
        if inner is not None and node.op == "call_function":
            placeholders = [inside for inside in inner.graph.nodes if inside.op == "placeholder"]
            changed = written(inner.graph.nodes, placeholders)
            for placeholder, outer in zip(placeholders, node.args[position + 1 :], strict=False):
                if placeholder in changed and isinstance(outer, fx.Node):
                    yield outer, True


def _nodes_of(value: Any) -> list[fx.Node]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in values if isinstance(item, fx.Node)]
