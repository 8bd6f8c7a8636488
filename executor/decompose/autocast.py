"""Blocks under torch.autocast: taken apart, so that they can be cut, each operation knowing the state it ran in.

Export makes one operation of such a block, with a graph of its own. Layers enter and leave the state around the
operations that had it, in a forward and in its recompute alike.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

State = tuple[Any, ...]
"""(device type, dtype, enabled, cache enabled)."""
KEY = "autocast"


def state_of(node: fx.Node) -> State | None:
    """The state that an operation ran in; None outside of all blocks."""
    found: State | None = node.meta.get(KEY)
    return found


def take_apart(graph: fx.Graph) -> None:
    """Put the operations of all autocast blocks into the graph itself; an inner block's state is the one that counts."""
    while True:
        blocks = [node for node in graph.nodes if str(node.target) == "wrap_with_autocast"]
        if not blocks:
            return
        for block in blocks:
            _inline(graph, block)


def _inline(graph: fx.Graph, block: fx.Node) -> None:
    # (device type, dtype, enabled, cache enabled, graph, what goes in ...)
    arguments: Any = block.args
    state, inner = arguments[:4], arguments[4]
    root = graph.owning_module
    assert root is not None
    body = getattr(root, str(inner.target))
    given = iter(arguments[5:])
    made: dict[fx.Node, Any] = {}
    results: Any = ()
    with graph.inserting_before(block):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                made[node] = next(given)
            elif node.op == "get_attr":
                name = f"{inner.target}_{node.target}"
                root.add_module(name, getattr(body, str(node.target)))
                made[node] = graph.get_attr(name)
                made[node].meta = dict(node.meta)
            elif node.op == "output":
                results = node.args[0]
            else:
                made[node] = graph.node_copy(node, lambda n: made[n])
                made[node].meta.setdefault(KEY, state)
    for user in list(block.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(made[results[user.args[1]]])
        graph.erase_node(user)
    graph.erase_node(block)
    graph.erase_node(inner)


class Entered:
    """The state in which a graph is, while operations are added to it one after the other."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._state: State | None = None
        self._context: fx.Node | None = None

    def become(self, state: State | None) -> None:
        """Leave the state that there is and enter another; at the end none."""
        if state == self._state:
            return
        if self._context is not None:
            self._graph.call_function(_exit_autocast, (self._context,))
        self._context = None if state is None else self._graph.call_function(_enter_autocast, state)
        self._state = state


def is_entering(node: fx.Node) -> bool:
    """Whether a node enters a state; its first argument is the device type."""
    return node.target is _enter_autocast
