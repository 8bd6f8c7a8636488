"""Why an iteration takes as long as it does: the critical path by cause.

In: an outcome (a plan, simulated). Out: seconds of one period by cause, which add up to the iteration time.

The critical path of the steady state is a cycle: from any action back to what it waited for last, until an action comes
up again; the durations on it add up to the period times the iterations that it spans. Compute on it counts as fill
before the busiest device begins its iteration, and as drain after it ended it.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.contract.actions import (
    Action,
    Agree,
    Backward,
    Forward,
    Receive,
    Reduce,
    Send,
    SwapIn,
    SwapOut,
    Update,
)
from planner.contract.precedence import Graph
from planner.search.outcome import Outcome

CAUSES = ("compute", "recompute", "fill", "drain", "swap in", "swap out", "peer", "update", "waiting")


def critical_path(outcome: Outcome) -> dict[str, float]:
    """Seconds of one iteration by cause; they add up to the iteration time."""
    graph, period = outcome.graph, outcome.seconds
    cycle, iterations = _cycle(graph, outcome.run.ends, _durations(outcome), period)
    begins, over = _busiest_window(outcome)
    found = dict.fromkeys(CAUSES, 0.0)
    for node in cycle:
        action = graph.actions[node]
        seconds = outcome.timing.seconds(action)
        cause = _cause(action)
        if cause == "compute" and outcome.run.ends[node] <= begins:
            cause = "fill"
        elif cause == "compute" and outcome.run.starts[node] >= over:
            cause = "drain"
        again = min(seconds, _recompute_seconds(outcome, action)) if cause == "compute" else 0.0
        found[cause] += (seconds - again) / iterations
        found["recompute"] += again / iterations
    found["waiting"] = max(0.0, period - sum(found.values()))
    return found


def _durations(outcome: Outcome) -> list[float]:
    return [outcome.timing.seconds(action) for action in outcome.graph.actions]


def _cycle(graph: Graph, ends: list[float], durations: list[float], period: float) -> tuple[list[int], int]:
    """The nodes of the critical cycle, and how many iterations it spans."""
    node, ago = max(range(len(ends)), key=ends.__getitem__), 0
    seen: dict[int, tuple[int, int]] = {}
    path: list[int] = []
    while node not in seen:
        seen[node] = len(path), ago
        path.append(node)
        before = [*graph.waits[node], *_before_in_lane(graph, node)]
        node, step = max(before, key=lambda wait: (ends[wait[0]] - wait[1] * period, -wait[0]))
        ago += step
    start, began = seen[node]
    return path[start:], max(1, ago - began)


def _before_in_lane(graph: Graph, node: int) -> Iterator[tuple[int, int]]:
    if graph.is_first(node):
        yield node + len(graph.lanes[graph.lane_of[node]].entries) - 1, 1
    else:
        yield node - 1, 0


def _busiest_window(outcome: Outcome) -> tuple[float, float]:
    """When the device that computes most begins and ends its compute of an iteration."""
    busy: dict[int, float] = {}
    window: dict[int, tuple[float, float]] = {}
    for node, action in enumerate(outcome.graph.actions):
        if isinstance(action, Forward | Backward):
            device = outcome.graph.lanes[outcome.graph.lane_of[node]].device
            start, end = outcome.run.starts[node], outcome.run.ends[node]
            busy[device] = busy.get(device, 0.0) + end - start
            low, high = window.get(device, (start, end))
            window[device] = min(low, start), max(high, end)
    return window[max(busy, key=lambda device: busy[device])]


def _cause(action: Action) -> str:
    match action:
        case SwapIn():
            return "swap in"
        case SwapOut():
            return "swap out"
        case Send() | Receive() | Reduce():
            return "peer"
        case Update() | Agree():
            return "update"
        case _:
            return "compute"


def _recompute_seconds(outcome: Outcome, action: Action) -> float:
    """What of a backward is its forward run again; the fused pack's runs for the first time."""
    rules = outcome.rules
    if not isinstance(action, Backward) or action.pack == rules.fused:
        return 0.0
    if rules.activations(action.pack, action.microbatch) != "recompute":
        return 0.0
    first, end = rules.backward_samples[action.microbatch]
    pack = rules.backward_packs[action.pack]
    device, _ = rules.place(action)
    return rules.costs.forward_seconds(pack.first, pack.last, end - first) / outcome.timing.scales[device]
