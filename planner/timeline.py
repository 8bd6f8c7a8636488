"""One iteration of a trace as it is drawn: which spans, in which rows, of which kind and colour.

In: a trace. Out: spans with times from the start of the iteration's first compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from planner.contract.actions import STREAMS
from planner.contract.trace import Span, Trace

# Okabe and Ito's palette: told apart with any colour vision
COLOURS = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "weights in": "#E69F00",
    "batch, stash in": "#F0E442",
    "gradients out": "#D55E00",
    "stash out": "#CC79A7",
    "to a peer": "#009E73",
    "update": "#000000",
}
DARK = ("backward", "update", "gradients out", "to a peer")


def kind_of(action: str) -> str:
    """The legend's word for an action's text; nothing for what takes no time (a free)."""
    verb, colon, value = action.partition(":")
    if not colon:
        return {"F": "forward", "B": "backward"}.get(action[0], "update")
    weights = value[0] in "WGK"
    match verb:
        case "in":
            return "weights in" if weights else "batch, stash in"
        case "out":
            return "gradients out" if weights else "stash out"
        case "send" | "recv" | "reduce":
            return "to a peer"
        case "update":
            return "update"
    return ""


def _iteration(trace: Trace) -> int:
    """The recorded iteration whose compute takes most nearly the median time of all."""
    extent: dict[int, tuple[float, float]] = {}
    for span in trace.spans:
        if span.stream == "compute":
            first, last = extent.get(span.iteration, (span.start_seconds, span.end_seconds))
            extent[span.iteration] = min(first, span.start_seconds), max(last, span.end_seconds)
    typical = median(trace.iteration_seconds)
    return min(extent, key=lambda k: (abs(extent[k][1] - extent[k][0] - typical), k), default=0)


def zero_of(trace: Trace) -> float:
    """When the iteration that is drawn starts its first compute."""
    chosen = _iteration(trace)
    starts = [s.start_seconds for s in trace.spans if s.iteration == chosen and s.action[0] in "FB"]
    return min(starts, default=0.0)


def one_iteration(trace: Trace) -> list[Span]:
    """The spans of one iteration, times from the start of its first compute (a prefetch is before 0)."""
    chosen, zero = _iteration(trace), zero_of(trace)
    return [
        Span(s.action, s.device, s.stream, s.start_seconds - zero, s.end_seconds - zero, s.nbytes)
        for s in trace.spans
        if s.iteration == chosen and kind_of(s.action)
    ]


def used_streams(spans: Sequence[Span], device: int) -> list[str]:
    """The streams of a device that have spans, in the contract's order."""
    used = {span.stream for span in spans if span.device == device}
    return [stream for stream in STREAMS if stream in used]
