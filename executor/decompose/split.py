"""Cut a traced graph into consecutive layers.

Each operation belongs to the layer module it lies in, or else to the layer before; those ahead of the first
layer are one of their own. Sizes that depend on the number of samples do not cross a cut: each layer works
them out from its own microbatch.
"""

from __future__ import annotations

import hashlib
import operator
from typing import Any

import torch
from torch import Tensor, fx

from executor.decompose.autocast import Entered, state_of
from executor.decompose.effects import (
    depends_on,
    draws_random_numbers,
    ignores_gradients,
    inner_graph,
    mixes_samples,
    operations,
    written,
)
from executor.decompose.layers import BATCH, Boundary, Decomposition, Layer, TensorName
from executor.decompose.naming import LayerNames
from executor.decompose.trace import WRAPPED, Traced
from executor.workload import Workload

INPUTS = "inputs"


def split(workload: Workload, traced: Traced, names: LayerNames, cut_by: str) -> Decomposition:
    """The layers of a traced graph; cut_by: how it was traced."""
    assigned, titles = _assign(traced, names)
    assigned, titles, notices = _merge(traced, assigned, titles)
    return _Splitter(workload, traced, assigned, titles, cut_by).split(notices)


def count_calls(traced: Traced) -> dict[str, int]:
    """How often each module is called."""
    found: dict[str, set[str]] = {}
    for node in traced.graph.nodes:
        for path, call in _modules(node):
            found.setdefault(path, set()).add(call)
    return {path: len(numbers) for path, numbers in found.items()}


def _assign(traced: Traced, names: LayerNames) -> tuple[dict[fx.Node, int], list[tuple[str, str]]]:
    """Each operation's layer, and each layer's (name, path of the module whose call begins it)."""
    assigned: dict[fx.Node, int] = {}
    titles: list[tuple[str, str]] = []
    current: tuple[str, str] | None = None
    repeats: dict[str, int] = {}
    for node in traced.graph.nodes:
        if node.op != "call_function" or _is_size(node):
            continue
        if node.target is operator.getitem and node.args[0] in assigned:
            assigned[node] = assigned[node.args[0]]
            continue
        modules = _modules(node)
        path = names.layer_path(modules[-1][0] if modules else "", any(module for _, module in titles))
        if path is not None and (path, _call(modules, path)) != current:
            repeats[path] = repeats.get(path, 0) + 1
            name = path if repeats[path] == 1 else f"{path}@{repeats[path]}"
            titles.append((name, _entered(modules, path)))
            current = path, _call(modules, path)
        elif not titles:
            titles.append((INPUTS, ""))
        assigned[node] = len(titles) - 1
    return assigned, titles


def _modules(node: fx.Node) -> list[tuple[str, str]]:
    """The modules that an operation lies in, outermost first: (path without the wrapper's prefix, which call)."""
    found = []
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        plain = ".".join(part.split("@")[0] for part in path.split("."))
        found.append((plain.removeprefix(WRAPPED), key.partition("@")[2]))
    return found


def _call(modules: list[tuple[str, str]], path: str) -> str:
    """Which of the calls of a module this is; a module called again is another layer."""
    return next((call for module, call in modules if module == path), "")


def _entered(modules: list[tuple[str, str]], path: str) -> str:
    """The module whose call begins a layer: the layer's own, or inside a container, which nobody calls, its first."""
    return next((module for module, _ in modules if f"{module}.".startswith(f"{path}.")), path)


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


def _batch_rows(value: Any, traced: Traced) -> int | None:
    """Rows a sample of a tensor with samples first; 0 for one without samples; None for any other."""
    symbol = traced.symbol
    dims = [traced.expression(dim) for dim in value.shape]
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
            if isinstance(value, Tensor) and _batch_rows(value, traced) is not None:
                continue
            first, last = assigned[node], users[-1]
            names = f"{titles[first][0]} to {titles[last][0]}"
            notices.append(
                f"layers {names} are one: {node.name} between them has no samples in its first dimension"
            )
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
        cut_by: str,
    ) -> None:
        self.model = workload.model
        self.traced = traced
        self.assigned = assigned
        self.titles = titles
        self.cut_by = cut_by
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
        idle = self._idle(members)
        if idle:
            notices.append(f"layer {self.titles[-1][0]} also holds what no layer uses: {', '.join(idle)}")
        last = len(members) - 1
        layers = tuple(self._layer(i, nodes, idle if i == last else []) for i, nodes in enumerate(members))
        return Decomposition(
            layers=layers,
            boundaries=self._boundaries(layers),
            parameters=self.parameters,
            buffers={name: self.buffers[name] for layer in layers for name in layer.buffers},
            aliases={name: names for name, names in self.aliases.items() if len(names) > 1},
            notices=tuple(notices),
            cut_by=self.cut_by,
        )

    def _idle(self, members: list[list[fx.Node]]) -> list[str]:
        """Parameters that no operation uses: they never have a gradient, so no optimizer steps them."""
        given = {n.name for nodes in members for node in nodes for n in node.all_input_nodes}
        used = {self.first_name[name] for node, name in self.traced.parameters.items() if node in given}
        return [name for name in self.parameters if name not in used]

    def _layer(self, index: int, nodes: list[fx.Node], idle: list[str]) -> Layer:
        own = set(nodes)
        needed = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in own))
        sizes = [n for n in needed if _is_size(n)]
        placeholders = [n for n in needed if n.op == "placeholder"]
        traced = self.traced
        used = [traced.parameters[n.name] for n in placeholders if n.name in traced.parameters]
        parameters = dict.fromkeys([*(self.first_name[name] for name in used), *idle])
        trainable = [name for name in parameters if self.parameters[name].requires_grad]
        ordered = [*trainable, *(name for name in parameters if name not in set(trainable))]
        buffer_of = traced.buffers | {node: node for node in traced.constants}
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
        root = torch.nn.Module()
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
        for n in needed:
            inner = inner_graph(n)
            if inner is not None:
                root.add_module(n.name, inner)
                made[n] = graph.get_attr(n.name)
        # a layer that works in place on what it is given would spoil the stash that its recompute starts from
        given = [n for n in needed if n in self.assigned or n.name in traced.batch]
        changed = written(nodes, given)
        for n in given:
            if n in changed:
                made[n] = graph.call_function(torch.ops.aten.clone.default, (made[n],))
        entered = Entered(graph)
        for node in nodes:
            entered.become(state_of(node))
            made[node] = graph.node_copy(node, lambda n: made[n])
        entered.become(None)
        graph.output(tuple(made[n] for n in outputs))
        name, path = self.titles[index]
        mutated = {
            buffer_of[n.name] for n in written(nodes, [n for n in placeholders if n.name in buffer_of])
        }
        return Layer(
            name=name,
            path=path,
            code=fx.GraphModule(root, graph),
            parameters=tuple(ordered),
            buffers=tuple(buffers),
            mutated_buffers=tuple(b for b in buffers if b in mutated),
            states=tuple(
                dict.fromkeys(
                    buffer_of[n.name]
                    for n in placeholders
                    if buffer_of.get(n.name) in mutated and depends_on(nodes, n, outputs)
                )
            ),
            inputs=tuple(inputs),
            outputs=tuple(n.name for n in outputs),
            sizes=tuple(traced.expression(n.meta["val"]) for n in sizes),
            size_symbol=traced.symbol,
            stochastic=any(draws_random_numbers(n) for n in nodes),
            # state that a forward changes ties it to its microbatches just as statistics over the batch do
            batch_coupled=bool(mutated) or any(mixes_samples(n) for n in nodes),
            signature=self._signature(nodes, made, graph, ordered, buffers, needed, outputs),
        )

    def _differentiable(self) -> set[fx.Node]:
        """Operations whose result depends on a trainable parameter."""
        found: set[fx.Node] = set()
        for node in self.traced.graph.nodes:
            if node.op == "placeholder" and node.name in self.traced.parameters:
                if self.parameters[self.first_name[self.traced.parameters[node.name]]].requires_grad:
                    found.add(node)
            elif node.op == "call_function" and not ignores_gradients(node):
                value = node.meta.get("val")
                is_floating = not isinstance(value, Tensor) or value.dtype.is_floating_point
                if is_floating and any(n in found for n in node.all_input_nodes):
                    found.add(node)
        return found

    def _signature(
        self,
        nodes: list[fx.Node],
        made: dict[fx.Node, fx.Node],
        graph: fx.Graph,
        parameters: list[str],
        buffers: list[str],
        needed: list[fx.Node],
        outputs: list[fx.Node],
    ) -> str:
        """Equal for layers that do the same: operations by position, shapes of all that goes in, what goes out.

        Whether an input wants a gradient counts: computing it is about half of a linear layer's backward.
        """
        position = {node: i for i, node in enumerate(graph.nodes)}

        def text(value: Any) -> str:
            return f"%{position[made[value]]}" if isinstance(value, fx.Node) else _plain(value)

        lines = [
            f"{tuple(self.parameters[n].shape)} {self.parameters[n].dtype} {self.parameters[n].requires_grad}"
            for n in parameters
        ]
        for buffer in buffers:
            lines.append(f"{tuple(self.buffers[buffer].shape)} {self.buffers[buffer].dtype}")
        for n in needed:
            value = n.meta.get("val")
            lines.append(f"{text(n)} {_shape_text(value, self.traced)} {n in self.differentiable}")
        for node in nodes:
            arguments = torch.utils._pytree.tree_map(
                text, (node.args, node.kwargs), is_leaf=lambda v: isinstance(v, fx.Node)
            )
            state = state_of(node)
            lines.append(
                f"{node.target} {arguments}" if state is None else f"{node.target} {arguments} {state}"
            )
            # by the names export gave: two equal blocks may be measured twice, two unequal ones never as one
            lines += [f"{n.target} {n.args} {n.kwargs}" for n in operations(node) if n is not node]
        lines.append(f"outputs {[text(n) for n in outputs]}")
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
            rows = _batch_rows(value, self.traced)
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


def _shape_text(value: Any, traced: Traced) -> str:
    if not isinstance(value, Tensor):
        return str(traced.expression(value)).replace(str(traced.symbol), "n")
    dims = [str(traced.expression(dim)).replace(str(traced.symbol), "n") for dim in value.shape]
    return f"{dims} {value.dtype}"
