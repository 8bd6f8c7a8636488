"""Cut a traced graph into consecutive layers.

Each operation belongs to the layer module it lies in, or else to the layer before; those ahead of the first
layer are one of their own. Sizes that depend on the number of samples do not cross a cut: each layer works
them out from its own microbatch.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from executor.decompose.layers import BATCH, Boundary, DecomposeError, Decomposition, Layer, TensorName
from executor.decompose.naming import LayerNames, layer_names
from executor.decompose.trace import WRAPPED, Traced, draws_random_numbers, is_batch_norm_in_training, trace
from executor.models import Workload

INPUTS = "inputs"


def decompose(
    workload: Workload, batch: dict[str, Tensor], *, patterns: Sequence[str] = (), check: bool = True
) -> Decomposition:
    """A workload's layers, from one example batch of two or more samples.

    patterns: module paths that are layers; without them repeated modules are found. check: run one microbatch
    whole and cut and compare. Raises DecomposeError.
    """
    names = layer_names(workload.model, patterns)
    traced = trace(workload, batch)
    assigned, titles = _assign(traced, names)
    assigned, titles, notices = _merge(traced, assigned, titles)
    decomposition = _Splitter(workload, traced, assigned, titles, tuple(batch)).split(notices)
    if check:
        from executor.decompose.check import check_cut

        return check_cut(workload, decomposition, batch)
    return decomposition


def _assign(traced: Traced, names: LayerNames) -> tuple[dict[fx.Node, int], list[tuple[str, str]]]:
    """Each operation's layer, and each layer's (name, module path)."""
    assigned: dict[fx.Node, int] = {}
    titles: list[tuple[str, str]] = []
    current: str | None = None
    for node in traced.graph.nodes:
        if node.op != "call_function" or _is_size(node):
            continue
        if node.target is operator.getitem and node.args[0] in assigned:
            assigned[node] = assigned[node.args[0]]
            continue
        path = names.layer_path(_module_path(node), any(module for _, module in titles))
        if path is not None and path != current:
            repeats = sum(module == path for _, module in titles)
            titles.append((f"{path}@{repeats + 1}" if repeats else path, path))
            current = path
        elif not titles:
            titles.append((INPUTS, ""))
        assigned[node] = len(titles) - 1
    return assigned, titles


def _module_path(node: fx.Node) -> str:
    """The path of the module that an operation lies in, without the wrapper's prefix."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    parts = [part.split("@")[0] for part in path.split(".")]
    return ".".join(parts).removeprefix(WRAPPED)


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def _crossing(traced: Traced, assigned: dict[fx.Node, int]) -> dict[fx.Node, tuple[int, ...]]:
    """Operations whose result later layers use, and those layers."""
    crossing = {}
    for node, layer in assigned.items():
        users = sorted({assigned[user] for user in node.users if user in assigned} - {layer})
        if users:
            crossing[node] = tuple(users)
    return crossing


def _batch_rows(value: Any, symbol: Any) -> int | None:
    """Rows a sample of a tensor with samples first; 0 for one without samples; None for any other."""
    dims = [getattr(getattr(dim, "node", None), "expr", dim) for dim in value.shape]
    dynamic = [symbol in getattr(dim, "free_symbols", ()) for dim in dims]
    if not any(dynamic):
        return 0
    rows = dims[0] / symbol if dynamic[0] and not any(dynamic[1:]) else None
    return int(rows) if rows is not None and getattr(rows, "is_Integer", False) else None


def _merge(
    traced: Traced, assigned: dict[fx.Node, int], titles: list[tuple[str, str]]
) -> tuple[dict[fx.Node, int], list[tuple[str, str]], list[str]]:
    """Join layers where what crosses between them is no tensor with samples first."""
    notices: list[str] = []
    while True:
        for node, users in _crossing(traced, assigned).items():
            value = node.meta["val"]
            if isinstance(value, Tensor) and _batch_rows(value, traced.symbol) is not None:
                continue
            first, last = assigned[node], users[-1]
            names = f"{titles[first][0]} to {titles[last][0]}"
            notices.append(f"layers {names} are one: {node.name} between them has no samples in its first dimension")
            merged = {i: i if i <= first else max(first, i - (last - first)) for i in range(len(titles))}
            assigned = {n: merged[layer] for n, layer in assigned.items()}
            titles = titles[: first + 1] + titles[last + 1 :]
            break
        else:
            return assigned, titles, notices


class _Splitter:
    def __init__(
        self,
        workload: Workload,
        traced: Traced,
        assigned: dict[fx.Node, int],
        titles: list[tuple[str, str]],
        batch_names: tuple[str, ...],
    ) -> None:
        self.model = workload.model
        self.traced = traced
        self.assigned = assigned
        self.titles = titles
        self.batch_names = batch_names
        self.crossing = _crossing(traced, assigned)
        # one name for each parameter, however many the model has for it
        self.parameters: dict[str, Tensor] = {}
        self.aliases: dict[str, tuple[str, ...]] = {}
        self.first_name: dict[str, str] = {}
        by_identity: dict[int, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            first = by_identity.setdefault(id(parameter), name)
            self.first_name[name] = first
            self.parameters.setdefault(first, parameter)
            self.aliases[first] = (*self.aliases.get(first, ()), name)
        self.differentiable = self._differentiable()
        self.buffers = dict(self.model.named_buffers(remove_duplicate=False)) | traced.constants

    def split(self, notices: list[str]) -> Decomposition:
        members: list[list[fx.Node]] = [[] for _ in self.titles]
        for node, layer in self.assigned.items():
            members[layer].append(node)
        layers = tuple(self._layer(i, nodes) for i, nodes in enumerate(members))
        used = {name for layer in layers for name in layer.parameters}
        unused = [name for name in self.parameters if name not in used]
        if unused:
            raise DecomposeError(f"parameter {unused[0]} is used by no layer; freeze or remove it ({len(unused)} in all)")
        return Decomposition(
            layers=layers,
            boundaries=self._boundaries(layers),
            parameters=self.parameters,
            buffers={name: self.buffers[name] for layer in layers for name in layer.buffers},
            aliases={name: names for name, names in self.aliases.items() if len(names) > 1},
            notices=tuple(notices),
        )

    def _layer(self, index: int, nodes: list[fx.Node]) -> Layer:
        own = set(nodes)
        needed = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in own))
        sizes = [n for n in needed if _is_size(n)]
        placeholders = [n for n in needed if n.op == "placeholder"]
        traced = self.traced
        parameters = dict.fromkeys(self.first_name[traced.parameters[n.name]] for n in placeholders if n.name in traced.parameters)
        trainable = [name for name in parameters if self.parameters[name].requires_grad]
        ordered = [*trainable, *(name for name in parameters if name not in set(trainable))]
        buffer_of = traced.buffers | {node: node_name for node, node_name in zip(traced.constants, traced.constants, strict=True)}
        buffers = list(dict.fromkeys(buffer_of[n.name] for n in placeholders if n.name in buffer_of))
        inputs: dict[TensorName, None] = {}
        for n in needed:
            if n.name in traced.batch:
                inputs[BATCH, traced.batch[n.name]] = None
            elif n in self.assigned:
                inputs[self.assigned[n], n.name] = None
        outputs = [n for n in nodes if n in self.crossing]
        is_last = index == len(self.titles) - 1
        if is_last:
            outputs = [traced.output]
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        by_parameter = {name: graph.placeholder(f"parameter_{i}") for i, name in enumerate(ordered)}
        by_buffer = {name: graph.placeholder(f"buffer_{i}") for i, name in enumerate(buffers)}
        by_input = {key: graph.placeholder(f"input_{i}") for i, key in enumerate(inputs)}
        for n in placeholders:
            if n.name in traced.parameters:
                made[n] = by_parameter[self.first_name[traced.parameters[n.name]]]
            elif n.name in buffer_of:
                made[n] = by_buffer[buffer_of[n.name]]
            elif n.name in traced.batch:
                made[n] = by_input[BATCH, traced.batch[n.name]]
        for n in needed:
            if n in self.assigned:
                made[n] = by_input[self.assigned[n], n.name]
        for i, n in enumerate(sizes):
            made[n] = graph.placeholder(f"size_{i}")
        for node in nodes:
            made[node] = graph.node_copy(node, lambda n: made[n])
        graph.output(tuple(made[n] for n in outputs))
        name, path = self.titles[index]
        mutated = self._mutated(nodes, buffer_of)
        return Layer(
            name=name,
            path=path,
            code=fx.GraphModule(torch.nn.Module(), graph),
            parameters=tuple(ordered),
            buffers=tuple(buffers),
            mutated_buffers=tuple(b for b in buffers if b in mutated),
            inputs=tuple(inputs),
            outputs=tuple(n.name for n in outputs),
            sizes=tuple(getattr(getattr(n.meta["val"], "node", None), "expr", n.meta["val"]) for n in sizes),
            size_symbol=traced.symbol,
            stochastic=any(draws_random_numbers(n) for n in nodes),
            batch_coupled=any(is_batch_norm_in_training(n) for n in nodes),
            signature=self._signature(nodes, made, graph, ordered, buffers, needed),
        )

    def _differentiable(self) -> set[fx.Node]:
        """Operations whose result depends on a trainable parameter."""
        found: set[fx.Node] = set()
        for node in self.traced.graph.nodes:
            if node.op == "placeholder" and node.name in self.traced.parameters:
                if self.parameters[self.first_name[self.traced.parameters[node.name]]].requires_grad:
                    found.add(node)
            elif node.op == "call_function" and "detach" not in str(node.target):
                value = node.meta.get("val")
                is_floating = not isinstance(value, Tensor) or value.dtype.is_floating_point
                if is_floating and any(n in found for n in node.all_input_nodes):
                    found.add(node)
        return found

    def _mutated(self, nodes: list[fx.Node], buffer_of: dict[str, str]) -> set[str]:
        found = set()
        for node in nodes:
            if is_batch_norm_in_training(node):
                found |= {buffer_of[n.name] for n in node.args[3:5] if isinstance(n, fx.Node) and n.name in buffer_of}
            schema = getattr(node.target, "_schema", None)
            for argument, value in zip(schema.arguments if schema else (), node.args, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and isinstance(value, fx.Node) and value.name in buffer_of:
                    found.add(buffer_of[value.name])
        return found

    def _signature(
        self,
        nodes: list[fx.Node],
        made: dict[fx.Node, fx.Node],
        graph: fx.Graph,
        parameters: list[str],
        buffers: list[str],
        needed: list[fx.Node],
    ) -> str:
        """Equal for layers that do the same: operations by position, shapes of all that goes in."""
        position = {node: i for i, node in enumerate(graph.nodes)}

        def text(value: Any) -> str:
            return f"%{position[made[value]]}" if isinstance(value, fx.Node) else _plain(value)

        lines = [f"{tuple(self.parameters[n].shape)} {self.parameters[n].dtype} {self.parameters[n].requires_grad}" for n in parameters]
        for buffer in buffers:
            lines.append(f"{tuple(self.buffers[buffer].shape)} {self.buffers[buffer].dtype}")
        for n in needed:
            value = n.meta.get("val")
            lines.append(f"{text(n)} {_shape_text(value, self.traced.symbol)}")
        for node in nodes:
            arguments = torch.utils._pytree.tree_map(text, (node.args, node.kwargs), is_leaf=lambda v: isinstance(v, fx.Node))
            lines.append(f"{node.target} {arguments}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def _boundaries(self, layers: tuple[Layer, ...]) -> dict[TensorName, Boundary]:
        consumers: dict[TensorName, list[int]] = {}
        for i, layer in enumerate(layers):
            for key in layer.inputs:
                consumers.setdefault(key, []).append(i)
        by_name = {n.name: n for n in self.crossing}
        batch_nodes = {name: node for node, name in self.traced.batch.items()}
        placeholders = {n.name: n for n in self.traced.graph.nodes if n.op == "placeholder"}
        found = {}
        for (source, name), users in consumers.items():
            node = placeholders[batch_nodes[name]] if source == BATCH else by_name[name]
            value = node.meta["val"]
            rows = _batch_rows(value, self.traced.symbol)
            shape = tuple(int(d) for d in value.shape[1:]) if rows else tuple(int(d) for d in value.shape)
            found[source, name] = Boundary(
                source=source,
                name=name,
                dtype=value.dtype,
                shape=(rows, *shape) if rows else shape,
                is_batched=bool(rows),
                is_differentiable=source != BATCH and node in self.differentiable,
                consumers=tuple(users),
            )
        return found


def _plain(value: Any) -> str:
    return str(value)


def _shape_text(value: Any, symbol: Any) -> str:
    if not isinstance(value, Tensor):
        return str(getattr(getattr(value, "node", None), "expr", value)).replace(str(symbol), "n")
    dims = [str(getattr(getattr(d, "node", None), "expr", d)).replace(str(symbol), "n") for d in value.shape]
    return f"{dims} {value.dtype}"
