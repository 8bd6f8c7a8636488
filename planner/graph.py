"""The layers of a profile as a networkx DAG.

Nodes are layer numbers; an edge carries the bytes of its tensors. One microbatch's critical path through
the DAG is what no number of devices can shorten.
"""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from planner.contract.cuts import tensors_of
from planner.contract.profile import BATCH, Profile


def layer_graph(profile: Profile) -> nx.DiGraph[int]:
    """Layers and the tensors between them; `bytes_per_sample` on each edge."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(len(profile.layers)))
    for tensor in tensors_of(profile):
        if tensor.src == BATCH:
            continue
        for consumer in tensor.consumers:
            known = graph.get_edge_data(tensor.src, consumer, {"bytes_per_sample": 0})
            graph.add_edge(
                tensor.src, consumer, bytes_per_sample=known["bytes_per_sample"] + tensor.bytes_per_sample
            )
    return graph


def longest_path(graph: nx.DiGraph[int], seconds: Sequence[float]) -> float:
    """The largest sum of layer seconds along any path of the DAG."""
    ends: dict[int, float] = {}
    for layer in nx.topological_sort(graph):
        ends[layer] = seconds[layer] + max(
            (ends[before] for before in graph.predecessors(layer)), default=0.0
        )
    return max(ends.values())
