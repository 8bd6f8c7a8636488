"""Trace (`harmony-trace/1`): what ran when, simulated or measured, as Chrome trace-event JSON (opens in Perfetto).

Times inside the file's `traceEvents` are microseconds, as that format wants; everything else is seconds.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from planner.contract.actions import STREAMS
from planner.contract.errors import FormatError
from planner.contract.profile import MAX_SECONDS, MIN_SECONDS, Noun

SCHEMA = "harmony-trace/1"
_STREAM_OF = dict(enumerate(STREAMS))


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


class Evaluation(Noun):
    """The mean loss over so many minibatches in evaluation mode, after so many iterations of training, and what that took."""

    iterations: int
    loss: float
    minibatches: int
    seconds: float


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
    evaluations: tuple[Evaluation, ...] = ()
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
    events: list[dict[str, Any]] = []
    for device in range(len(trace.devices)):
        events.append(
            {
                "ph": "M",
                "name": "process_name",
                "pid": device,
                "args": {"name": f"gpu{device} {trace.origin}"},
            }
        )
        for tid, stream in enumerate(STREAMS):
            events.append(
                {"ph": "M", "name": "thread_name", "pid": device, "tid": tid, "args": {"name": stream}}
            )
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
        events.append(
            {"ph": "C", "name": "allocated", "pid": sample.device, "ts": sample.seconds * 1e6, "args": args}
        )
    return TraceFile(events, msgspec.structs.replace(trace, spans=(), memory=()))


def from_chrome(file: TraceFile) -> Trace:
    """The inverse of to_chrome, to the rounding of microseconds.

    Raises FormatError, with the place, at an event that is none of ours.
    """
    spans, memory = [], []
    for i, event in enumerate(file.traceEvents):
        try:
            if event["ph"] == "X":
                spans.append(_span(event))
            elif event["ph"] == "C":
                memory.append(MemorySample(event["pid"], event["ts"] / 1e6, event["args"]["bytes"]))
            elif event["ph"] != "M":
                raise FormatError(f"no event of a {SCHEMA} has the phase {event['ph']!r}")
            _check_event(event, len(file.harmony.devices))
        except (KeyError, IndexError, TypeError, FormatError) as error:
            text = str(error) if isinstance(error, FormatError) else repr(error)
            raise FormatError(f"$.traceEvents[{i}]: not an event of a {SCHEMA} ({text})") from None
    for i, seconds in enumerate(file.harmony.iteration_seconds):
        if not MIN_SECONDS <= seconds <= MAX_SECONDS:
            raise FormatError(
                f"$.harmony.iteration_seconds[{i}]: {seconds}; a time is from {MIN_SECONDS:g} to {MAX_SECONDS:g}, run again"
            )
    return msgspec.structs.replace(file.harmony, spans=tuple(spans), memory=tuple(memory))


def _span(event: dict[str, Any]) -> Span:
    args, seconds = event["args"], event["ts"] / 1e6
    end = seconds + event["dur"] / 1e6
    return Span(
        event["name"],
        event["pid"],
        _STREAM_OF[event["tid"]],
        seconds,
        end,
        args["bytes"],
        args["iteration"],
        args["overrun"],
    )


def _check_event(event: dict[str, Any], num_devices: int) -> None:
    if not isinstance(event["name"], str):
        raise FormatError(f"its name is {event['name']!r}")
    if event["pid"] not in range(num_devices):
        raise FormatError(f"device {event['pid']} of {num_devices}")
    if not 0 <= event.get("dur", 0) <= 1e6 * MAX_SECONDS:
        raise FormatError(f"it lasts {event['dur']} us")
    if not abs(event.get("ts", 0)) <= 1e6 * MAX_SECONDS:
        raise FormatError(f"it starts at {event['ts']} us")
