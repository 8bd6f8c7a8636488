"""Trace (`harmony-trace/1`): what ran when, simulated or measured, as Chrome trace-event JSON (opens in Perfetto).

Times inside the file's `traceEvents` are microseconds, as that format wants; everything else is seconds.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from planner.contract.profile import Noun

SCHEMA = "harmony-trace/1"


class Span(Noun):
    """One action of one iteration. iteration counts from 0 over the recorded ones."""

    action: str
    device: int
    stream: str
    start_seconds: float
    end_seconds: float
    nbytes: int = 0
    iteration: int = 0
    overrun: bool = False


class MemorySample(Noun):
    """Bytes allocated on a device at a time."""

    device: int
    seconds: float
    allocated_bytes: int


class DeviceSummary(Noun):
    """A device's peaks and the bytes it moved in one iteration.

    reserved_bytes: what its allocator held; 0 where that is not known.
    """

    peak_bytes: int
    swap_in_bytes: int
    swap_out_bytes: int
    peer_bytes: int = 0
    reserved_bytes: int = 0


class Trace(Noun):
    """iteration_seconds: each iteration's duration (a simulated trace has one, its steady state).

    origin: planned by the simulator or measured by the executor; schedule_hash names the schedule's program.
    """

    origin: Literal["simulated", "measured"]
    model: str
    model_hash: str
    schedule_hash: str
    devices: tuple[DeviceSummary, ...]
    iteration_seconds: tuple[float, ...]
    spans: tuple[Span, ...] = ()
    memory: tuple[MemorySample, ...] = ()
    losses: tuple[float, ...] = ()
    samples_per_iteration: int = 0
    notes: dict[str, str | int | float] = {}
    schema: str = SCHEMA


class TraceFile(msgspec.Struct, forbid_unknown_fields=True):
    """The file: Chrome's `traceEvents` for spans and memory, the rest under `harmony`."""

    traceEvents: list[dict[str, Any]]
    harmony: Trace
    displayTimeUnit: str = "ms"


def to_chrome(trace: Trace) -> TraceFile:
    """Spans become complete events (one process a device, one thread a stream), memory becomes counters."""
    from planner.contract.actions import STREAMS

    events: list[dict[str, Any]] = []
    for device in range(len(trace.devices)):
        events.append({"ph": "M", "name": "process_name", "pid": device, "args": {"name": f"gpu{device} {trace.origin}"}})
        for tid, stream in enumerate(STREAMS):
            events.append({"ph": "M", "name": "thread_name", "pid": device, "tid": tid, "args": {"name": stream}})
    for span in trace.spans:
        events.append(
            {
                "ph": "X",
                "name": span.action,
                "pid": span.device,
                "tid": STREAMS.index(span.stream),
                "ts": span.start_seconds * 1e6,
                "dur": (span.end_seconds - span.start_seconds) * 1e6,
                "args": {"bytes": span.nbytes, "iteration": span.iteration, "overrun": span.overrun},
            }
        )
    for sample in trace.memory:
        args = {"bytes": sample.allocated_bytes}
        events.append({"ph": "C", "name": "allocated", "pid": sample.device, "ts": sample.seconds * 1e6, "args": args})
    return TraceFile(events, msgspec.structs.replace(trace, spans=(), memory=()))


def from_chrome(file: TraceFile) -> Trace:
    """The inverse of to_chrome, to the rounding of microseconds."""
    from planner.contract.actions import STREAMS

    spans, memory = [], []
    for event in file.traceEvents:
        seconds = event.get("ts", 0.0) / 1e6
        if event["ph"] == "X":
            args = event["args"]
            end = seconds + event["dur"] / 1e6
            spans.append(
                Span(
                    event["name"], event["pid"], STREAMS[event["tid"]], seconds, end,
                    args["bytes"], args["iteration"], args["overrun"],
                )
            )  # fmt: skip
        elif event["ph"] == "C":
            memory.append(MemorySample(event["pid"], seconds, event["args"]["bytes"]))
    return msgspec.structs.replace(file.harmony, spans=tuple(spans), memory=tuple(memory))
