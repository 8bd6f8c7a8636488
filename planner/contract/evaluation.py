"""An iteration of evaluation: what of a training program the loss needs, and nothing else.

    F0.0 .. F3.1    as in training, but nothing is saved for a backward
    B4.0, B4.1      the fused pack's forward, to the loss
    in, send, recv  of what these read; free of what was made for them
    all others      nothing; they keep their place in the order

So evaluation needs no program of its own: it runs in the memory that training was planned for, between two iterations
of it, and what the streams have fetched ahead for the next iteration is what the evaluation begins with.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.contract.actions import Backward, Free, Value
from planner.contract.precedence import Graph


@dataclass(frozen=True)
class Needed:
    """nodes: the actions of an iteration of evaluation, of those of a training program. values: what they make."""

    nodes: frozenset[int]
    values: frozenset[Value]


def needed_to_evaluate(graph: Graph) -> Needed:
    """Backwards from the loss through what actions read on devices; graph: of a verified program."""
    nodes: set[int] = set()
    values: set[Value] = set()
    fused = graph.rules.fused
    to_do = [
        n for n, action in enumerate(graph.actions) if isinstance(action, Backward) and action.pack == fused
    ]
    while to_do:
        node = to_do.pop()
        if node in nodes:
            continue
        nodes.add(node)
        for cell in graph.effects[node].reads:
            if cell[0] not in ("gpu", "link"):
                continue
            makers = graph.writers.get(cell, ()) if cell[0] == "link" else graph.makers.get(cell[1], ())
            to_do += makers
            if cell[0] == "gpu" and makers:
                values.add(cell[1])
    frees = (graph.node_of.get(Free(value)) for value in values)
    return Needed(frozenset(nodes.union(n for n in frees if n is not None)), frozenset(values))
