"""The order that follows from what actions read, make and free: a graph over the actions of one iteration.

In: lanes and rules. Out: for each action the actions it waits for, in this iteration or the one before.
Derived, for every cell, from rules.effects:

    written, then read      a reader waits for the writers; the next iteration's writer for the readers
    persistent cells        a reader waits for the writers of the iteration before; a writer for the readers
    a device value          its maker waits for its free of the iteration before, other writers for the maker,
                            its free for writers and readers
    send and recv           one rendezvous: the send also waits for all that its recv waits for
    after free:V            as written

Streams run in order, so of several actions in one stream only the last is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from planner.contract.actions import Action, Free, Lanes, Receive, Send, Value
from planner.contract.errors import VerifyError
from planner.contract.rules import Cell, Effects, Rules


class Graph:
    """actions[n] with lane_of[n], position_of[n]; waits[n]: (node, iterations ago) pairs; order: a topological one.

    Nodes are numbered lane by lane, so `n - 1` is the action before `n` in the same lane.
    """

    def __init__(self, lanes: Lanes, rules: Rules) -> None:
        self.lanes = lanes
        self.rules = rules
        self.actions: list[Action] = []
        self.lane_of: list[int] = []
        self.position_of: list[int] = []
        self.first_of: list[int] = []
        self.node_of: dict[Action, int] = {}
        for index, lane in enumerate(lanes):
            self.first_of.append(len(self.actions))
            for position, entry in enumerate(lane.entries):
                node = len(self.actions)
                self.actions.append(entry.action)
                self.lane_of.append(index)
                self.position_of.append(position)
                if entry.action in self.node_of:
                    raise VerifyError(
                        f"{self.where(node)}: occurs twice, before at {self.where(self.node_of[entry.action])}"
                    )
                self.node_of[entry.action] = node
        self.effects = [self._effects(node) for node in range(len(self.actions))]
        self.writers: dict[Cell, list[int]] = {}
        self.readers: dict[Cell, list[int]] = {}
        self.makers: dict[Value, list[int]] = {}
        for node, effects in enumerate(self.effects):
            for cell in effects.writes:
                self.writers.setdefault(cell, []).append(node)
            for cell in effects.reads:
                self.readers.setdefault(cell, []).append(node)
            for value in effects.makes:
                self.makers.setdefault(value, []).append(node)
        self.waits = [self._waits(node) for node in range(len(self.actions))]
        self._meet()
        self.order = self._topological_order()

    def where(self, node: int) -> str:
        """`gpu1/h2d[7] in:WF3`, the place of an action."""
        lane = self.lanes[self.lane_of[node]]
        return f"gpu{lane.device}/{lane.stream}[{self.position_of[node]}] {self.actions[node]}"

    def is_first(self, node: int) -> bool:
        return self.position_of[node] == 0

    def _effects(self, node: int) -> Effects:
        try:
            return self.rules.effects(self.actions[node])
        except (LookupError, ValueError):
            raise VerifyError(
                f"{self.where(node)}: no such pack, microbatch or replica in the configuration"
            ) from None

    def _waits(self, node: int) -> list[tuple[int, int]]:
        effects = self.effects[node]
        now: list[int] = []
        before: list[int] = []
        for cell in effects.reads:
            (before if self.rules.is_persistent(cell) else now).extend(self.writers.get(cell, ()))
        for cell in effects.writes:
            if cell[0] == "gpu" and not self.rules.is_persistent(cell):
                now.extend(self.makers.get(cell[1], ()))
                continue
            (now if self.rules.is_persistent(cell) else before).extend(self.readers.get(cell, ()))
        for value in effects.makes:
            freed = self.node_of.get(Free(value))
            if freed is not None:
                before.append(freed)
        for value in effects.frees:
            now.extend(self.writers.get(("gpu", value), ()))
            now.extend(self.readers.get(("gpu", value), ()))
        lane = self.lanes[self.lane_of[node]]
        for wait in lane.entries[self.position_of[node]].after:
            freed = self.node_of.get(wait.free)
            if freed is None:
                raise VerifyError(f"{self.where(node)}: waits for {wait}, which is in no stream")
            (before if wait.ago else now).append(freed)
        return self._last_per_lane(node, now, before)

    def _last_per_lane(self, node: int, now: Iterable[int], before: Iterable[int]) -> list[tuple[int, int]]:
        own = self.lane_of[node]
        last: dict[tuple[int, int], int] = {}
        for ago, nodes in ((0, now), (1, before)):
            for other in nodes:
                key = (self.lane_of[other], ago)
                if other != node and other > last.get(key, -1):
                    last[key] = other
        return [
            (other, ago)
            for (lane, ago), other in last.items()
            if not (lane == own and (ago or other < node)) and not (ago and last.get((lane, 0), -1) >= 0)
        ]

    def _meet(self) -> None:
        """Send and recv start together: all that either waits for, the send waits for."""
        for node, action in enumerate(self.actions):
            if isinstance(action, Send) and Receive(action.value) not in self.node_of:
                raise VerifyError(f"{self.where(node)}: nothing receives {action.value}")
            if isinstance(action, Receive):
                send = self.node_of.get(Send(action.value))
                if send is None:
                    raise VerifyError(f"{self.where(node)}: nothing sends {action.value}")
                ready = [wait for wait in self.waits[node] if wait[0] != send]
                if not self.is_first(node):
                    ready.append((node - 1, 0))
                else:
                    lane = self.lanes[self.lane_of[node]]
                    ready.append((node + len(lane.entries) - 1, 1))
                now = [other for other, ago in [*self.waits[send], *ready] if not ago]
                before = [other for other, ago in [*self.waits[send], *ready] if ago]
                self.waits[send] = self._last_per_lane(send, now, before)

    def _topological_order(self) -> list[int]:
        """Kahn's algorithm, smallest position first. Raises VerifyError that shows a cycle."""
        count = len(self.actions)
        after: list[list[int]] = [[] for _ in range(count)]
        missing = [0] * count
        for node in range(count):
            needed = [other for other, ago in self.waits[node] if not ago]
            if not self.is_first(node):
                needed.append(node - 1)
            missing[node] = len(needed)
            for other in needed:
                after[other].append(node)
        ready = [(self.position_of[n], n) for n in range(count) if not missing[n]]
        heapify(ready)
        order = []
        while ready:
            _, node = heappop(ready)
            order.append(node)
            for other in after[node]:
                missing[other] -= 1
                if not missing[other]:
                    heappush(ready, (self.position_of[other], other))
        if len(order) < count:
            raise VerifyError(self._describe_cycle(missing))
        return order

    def _describe_cycle(self, missing: list[int]) -> str:
        node = next(n for n, count in enumerate(missing) if count)
        path: list[int] = []
        while node not in path:
            path.append(node)
            needed = [other for other, ago in self.waits[node] if not ago and missing[other]]
            if not self.is_first(node) and missing[node - 1]:
                needed.append(node - 1)
            node = needed[0]
        cycle = path[path.index(node) :]
        return "deadlock: " + " waits for ".join(self.where(n) for n in [*cycle[:6], cycle[0]])
