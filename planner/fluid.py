"""Event-driven simulation where actions share what they run on: a fair link, or too few host update workers.

In: a graph and its timing. Out: the same Run as the one-pass simulation gives where nothing is shared. Time jumps from
event to event; a shared resource serves all that use it at the moment at the same speed (processor sharing), kept as
a virtual clock that runs slower the more there are, so joining and leaving cost a heap operation each.

        link    A ████████████░░░░░░      two transfers at half the rate while both are under way,
                B       ░░░░░░████████    each at the full rate while alone
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from planner.contract.actions import Receive, Send
from planner.contract.precedence import Graph
from planner.simulate import Run, Timing

NUM_ITERATIONS = 8
NUM_AVERAGED = 3


class _Shared:
    """A resource of which `capacity` users have the full speed; more share it."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.clock = self.updated = 0.0
        self.users: list[tuple[float, int]] = []  # (virtual time at which it is over, instance)
        self.version = 0

    def advance(self, now: float) -> None:
        self.clock += (now - self.updated) * self._speed()
        self.updated = now

    def _speed(self) -> float:
        return min(1.0, self.capacity / len(self.users)) if self.users else 0.0

    def join(self, now: float, work: float, instance: int) -> None:
        self.advance(now)
        heappush(self.users, (self.clock + work, instance))

    def leave(self, now: float) -> int:
        self.advance(now)
        self.clock = self.users[0][0]
        return heappop(self.users)[1]

    def next_end(self) -> float:
        return self.updated + max(0.0, self.users[0][0] - self.clock) / self._speed()


def run_shared(graph: Graph, timing: Timing) -> Run:
    """Repeat a program for some iterations; the period is the mean of the last ones."""
    return _Events(graph, timing).run()


class _Events:
    def __init__(self, graph: Graph, timing: Timing) -> None:
        self.graph = graph
        self.count = count = len(graph.actions)
        self.work = [timing.work(action) for action in graph.actions]
        self.shared = {key: _Shared(capacity) for key, capacity in timing.shared.items()}
        self.dependents: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        self.missing = [[0] * count for _ in range(NUM_ITERATIONS)]
        for node in range(count):
            waits = list(graph.waits[node])
            if graph.is_first(node):
                waits.append((node + len(graph.lanes[graph.lane_of[node]].entries) - 1, 1))
            else:
                waits.append((node - 1, 0))
            for other, ago in waits:
                self.dependents[other].append((node, ago))
                for iteration in range(ago, NUM_ITERATIONS):
                    self.missing[iteration][node] += 1
        self.starts = [[0.0] * count for _ in range(NUM_ITERATIONS)]
        self.ends = [[0.0] * count for _ in range(NUM_ITERATIONS)]
        self.events: list[tuple[float, int, int, str]] = []  # (time, instance or version, kind, resource)
        self.ready: deque[int] = deque()

    def run(self) -> Run:
        for iteration, missing in enumerate(self.missing):
            self.ready.extend(
                iteration * self.count + node for node in range(self.count) if not missing[node]
            )
        now = 0.0
        while True:
            while self.ready:
                self._start(self.ready.popleft(), now)
            if not self.events:
                break
            now, number, kind, resource = heappop(self.events)
            if kind == 0:
                self._finish(number, now)
            elif kind == 1:
                self.shared[resource].join(now, self.work[number % self.count].shared_seconds, number)
                self._expect(resource)
            elif number == self.shared[resource].version:
                self._finish(self.shared[resource].leave(now), now)
                self._expect(resource)
        return self._result()

    def _start(self, instance: int, now: float) -> None:
        iteration, node = divmod(instance, self.count)
        self.starts[iteration][node] = now
        work = self.work[node]
        if work.resource is None:
            if work.own_seconds:
                heappush(self.events, (now + work.own_seconds, instance, 0, ""))
            else:
                self._finish(instance, now)
        else:
            heappush(self.events, (now + work.own_seconds, instance, 1, work.resource))

    def _expect(self, resource: str) -> None:
        """The next end on a resource, as things are; an older expectation is void."""
        shared = self.shared[resource]
        shared.version += 1
        if shared.users:
            heappush(self.events, (shared.next_end(), shared.version, 2, resource))

    def _finish(self, instance: int, now: float) -> None:
        iteration, node = divmod(instance, self.count)
        self.ends[iteration][node] = now
        for other, ago in self.dependents[node]:
            later = iteration + ago
            if later < NUM_ITERATIONS:
                self.missing[later][other] -= 1
                if not self.missing[later][other]:
                    self.ready.append(later * self.count + other)

    def _result(self) -> Run:
        over = [max(ends) for ends in self.ends]
        period = (over[-1] - over[-1 - NUM_AVERAGED]) / NUM_AVERAGED
        # the last iteration but one: the last has none behind it to share with
        starts, ends = self.starts[-2], self.ends[-2]
        for node, action in enumerate(self.graph.actions):
            if isinstance(action, Receive):
                starts[node] = starts[self.graph.node_of[Send(action.value)]]
        return Run(period, starts, ends, over[-3])
