"""What a rank records: spans of actions, samples of memory."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

MEMORY_SAMPLES = 20_000
"""At most so many per device, the last ones."""
SPAN_ITERATIONS = 4
"""Spans are kept for the last so many iterations of training; ends of iterations for all."""


@dataclass
class RankRecord:
    """One rank's part of a trace; picklable. Seconds are of time.perf_counter, the same on the whole server.

    spans: (node, iteration, start, end, overrun). memory: (seconds, allocated bytes). moved: node -> bytes, of swaps
    whose size only the run knows (saved activations).
    """

    rank: int
    spans: list[tuple[int, int, float, float, bool]] = field(default_factory=list)
    memory: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MEMORY_SAMPLES))
    ends: dict[int, float] = field(default_factory=dict)
    overruns: dict[int, int] = field(default_factory=dict)
    moved: dict[int, int] = field(default_factory=dict)
    peak_bytes: int = 0
    reserved_bytes: int = 0
    swapped_in_bytes: int = 0
    swapped_out_bytes: int = 0
    sent_bytes: int = 0


class Recorder:
    """Collects a rank's record; every stream's thread appends to it."""

    def __init__(self, rank: int, kept: Container[int]) -> None:
        """kept: the iterations whose spans are."""
        self.record = RankRecord(rank)
        self._kept = kept
        self._lock = threading.Lock()

    @contextmanager
    def span(self, node: int, iteration: int) -> Iterator[Span]:
        """Time an action; set `overrun` inside where it took longer than planned; `keep` it when over."""
        span = Span(node, iteration, time.perf_counter())
        yield span
        span.ended = time.perf_counter()

    def keep(self, span: Span) -> None:
        """An action is over, on its stream too."""
        record, iteration = self.record, span.iteration
        with self._lock:
            record.ends[iteration] = max(record.ends.get(iteration, 0.0), span.ended)
            if span.overrun:
                record.overruns[iteration] = record.overruns.get(iteration, 0) + 1
        if iteration in self._kept:
            record.spans.append((span.node, iteration, span.started, span.ended, span.overrun))

    def moved(self, node: int, nbytes: int) -> None:
        """What a swap moved whose size the schedule does not say."""
        self.record.moved[node] = nbytes

    def memory(self, allocated_bytes: int) -> None:
        """The bytes allocated changed."""
        self.record.memory.append((time.perf_counter(), allocated_bytes))

    def forget_memory(self) -> None:
        """Keep memory samples from here on only."""
        self.record.memory.clear()


@dataclass
class Span:
    """An action of an iteration. On a GPU the stream's times take the place of the launch's."""

    node: int
    iteration: int
    started: float
    ended: float = 0.0
    overrun: bool = False
