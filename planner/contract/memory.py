"""The peak bytes of each device, whatever the timing.

In: a graph of one iteration. Out: per device the most bytes that can be live at once.

At any moment the compute stream of a device runs some action c, or has finished it and not yet started the next.
What can be live then: every value that is not certainly freed before c starts and not certainly allocated after
that moment; c's workspace only while it runs. The largest such sum over all c is the peak; what excludes each
other because compute lies between (the weights before and after a task) is never added up.

An allocation that waits for a free takes the place of what is freed: where neither the one nor the other is certain, the
larger of the two counts, not both (`_Exchange`: what returns from the host where what left last had been).

"Certainly" is happens-before: stream order and the waits of precedence.py. Vector clocks hold it:
clock[lane] of an action is how many actions of that lane are over before it can start. Iterations are
unrolled, so what the next one prefetches counts in this one.
"""

from __future__ import annotations

from itertools import accumulate

import msgspec

from planner.contract.precedence import Graph
from planner.contract.rules import Rules

UNROLLED = 3


class Peak(msgspec.Struct, frozen=True):
    """The most bytes on a device, and the action at which they are reached."""

    nbytes: int
    where: str


class _LaneBytes:
    """Per lane: bytes allocated, freed (running sums) and of workspace, by position."""

    def __init__(self, graph: Graph, lane: int) -> None:
        rules = graph.rules
        first, self.length = graph.first_of[lane], len(graph.lanes[lane].entries)
        nodes = range(first, first + self.length)
        self.made = list(
            accumulate((sum(map(rules.nbytes, graph.effects[n].makes)) for n in nodes), initial=0)
        )
        self.freed = list(
            accumulate((sum(map(rules.nbytes, graph.effects[n].frees)) for n in nodes), initial=0)
        )
        self.workspace = [rules.workspace(graph.actions[n]) for n in nodes]

    def made_before(self, index: int) -> int:
        rounds, position = divmod(index, self.length)
        return rounds * self.made[-1] + self.made[position]

    def freed_before(self, index: int) -> int:
        rounds, position = divmod(index, self.length)
        return rounds * self.freed[-1] + self.freed[position]


class _Exchange(msgspec.Struct, frozen=True):
    """An allocation (a lane and unrolled index) that waits for a free in another lane; the bytes that never add up."""

    maker: tuple[int, int]
    free: tuple[int, int]
    nbytes: int


def _exchanges(graph: Graph, device: int, compute: int) -> list[_Exchange]:
    """The exchanges of a device beside its compute stream, each free used once."""
    found, used = [], set()
    for lane, own in enumerate(graph.lanes):
        if own.device != device or lane == compute:
            continue
        for position, entry in enumerate(own.entries):
            node = graph.first_of[lane] + position
            made = sum(map(graph.rules.nbytes, graph.effects[node].makes))
            for wait in entry.after if made else ():
                freed = graph.node_of[wait.free]
                other = graph.lane_of[freed]
                if other in (lane, compute) or (freed, wait.ago) in used:
                    continue
                used.add((freed, wait.ago))
                size = min(made, graph.rules.nbytes(wait.free.value))
                length, other_length = len(own.entries), len(graph.lanes[other].entries)
                for k in range(wait.ago, UNROLLED):
                    place = (k - wait.ago) * other_length + graph.position_of[freed]
                    found.append(_Exchange((lane, k * length + position), (other, place), size))
                break
    return found


def peaks(graph: Graph, num_devices: int) -> list[Peak]:
    """The peak of each device of a graph's program."""
    clocks = _clocks(graph)
    tables = [_LaneBytes(graph, lane) for lane in range(len(graph.lanes))]
    return [_device_peak(graph, clocks, tables, device) for device in range(num_devices)]


def _clocks(graph: Graph) -> list[list[list[int]]]:
    """clocks[lane][unrolled index]: what is over before that action starts, per lane."""
    num_lanes = len(graph.lanes)
    lengths = [len(lane.entries) for lane in graph.lanes]
    nothing = [0] * num_lanes
    clocks: list[list[list[int]]] = [[nothing] * (length * UNROLLED) for length in lengths]
    lane_of, position_of = graph.lane_of, graph.position_of
    for k in range(UNROLLED):
        for node in graph.order:
            lane = lane_of[node]
            index = k * lengths[lane] + position_of[node]
            clock = clocks[lane][index - 1] if index else nothing
            for other, ago in graph.waits[node]:
                if ago <= k:
                    other_lane = lane_of[other]
                    other_index = (k - ago) * lengths[other_lane] + position_of[other]
                    clock = list(map(max, clock, clocks[other_lane][other_index]))
                    if clock[other_lane] <= other_index:
                        clock[other_lane] = other_index + 1
            clock = list(clock)
            clock[lane] = index
            clocks[lane][index] = clock
    return clocks


def _device_peak(graph: Graph, clocks: list[list[list[int]]], tables: list[_LaneBytes], device: int) -> Peak:
    rules: Rules = graph.rules
    resident = sum(rules.nbytes(v) for v in rules.residents() if rules.device_of(v) == device)
    best = Peak(resident, f"gpu{device} resident weights and states")
    lanes = [i for i, lane in enumerate(graph.lanes) if lane.device == device and lane.entries]
    compute = next((i for i in lanes if graph.lanes[i].stream == "compute"), None)
    if compute is None:
        return best
    own = tables[compute]
    others = [lane for lane in lanes if lane != compute]
    # first action of each other lane that certainly waits for the end of this compute action, or of the next one;
    # they only ever move on
    exchanges = _exchanges(graph, device, compute)
    after_this, after_next = dict.fromkeys(others, 0), dict.fromkeys(others, 0)
    for index, clock in enumerate(clocks[compute]):
        position = index % own.length
        staying = resident + own.made_before(index + 1) - own.freed_before(index)
        staying -= sum(tables[lane].freed_before(clock[lane]) for lane in others)
        # once it is over, what it freed is gone
        freed_now = own.freed_before(index + 1) - own.freed_before(index)
        running, over = staying + own.workspace[position], staying - freed_now
        for lane in others:
            after_this[lane] = _first_after(clocks[lane], after_this[lane], compute, index)
            after_next[lane] = _first_after(clocks[lane], after_next[lane], compute, index + 1)
            running += tables[lane].made_before(after_this[lane])
            over += tables[lane].made_before(after_next[lane])
        for exchange in exchanges:
            # counted twice: made before the lane's first action that certainly comes later, and not certainly freed
            (lane, made), (other, freed) = exchange.maker, exchange.free
            if freed >= clock[other]:
                running -= exchange.nbytes if made < after_this[lane] else 0
                over -= exchange.nbytes if made < after_next[lane] else 0
        if max(running, over) > best.nbytes:
            best = Peak(max(running, over), graph.where(graph.first_of[compute] + position))
    return best


def _first_after(clocks: list[list[int]], start: int, lane: int, count: int) -> int:
    """The first action from `start` on that certainly waits until more than `count` actions of a lane are over."""
    while start < len(clocks) and clocks[start][lane] <= count:
        start += 1
    return start
