"""Pictures of a report as SVG without scripts: streams over time, and memory over time, of each device.

In: traces. Out: SVG text. Colours are classes of the page's style sheet. However long a program, a picture has at most
MAX_BARS bars that can be pointed at; what is thinner than a pixel is one shape for each row and kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from planner.contract.trace import Span, Trace
from planner.contract.units import format_bytes, format_seconds
from planner.timeline import COLOURS, DARK, kind_of, one_iteration, used_streams, zero_of

WIDTH = 1000
LEFT = 118
ROW = 18
MEMORY_HEIGHT = 90
MAX_BARS = 6000
"""Over all rows of a picture."""
SEAM = 0.3
"""Pixels between a bar and the next."""
THINNEST = 0.7
"""Pixels of an action, however short: less could not be seen."""
LABELLED_WIDTH = 34
"""Pixels of an action that carries its name."""
NUM_TICKS = 8
CLASSES = {kind: f"k{i}" for i, kind in enumerate(COLOURS)}


@dataclass(frozen=True)
class Scale:
    """From seconds to pixels."""

    start: float
    end: float

    def x(self, seconds: float) -> float:
        """Pixels from the left; what is outside is at the edge."""
        share = (seconds - self.start) / (self.end - self.start)
        return LEFT + min(max(share, 0.0), 1.0) * (WIDTH - LEFT)


@dataclass(frozen=True)
class Chart:
    """A device's picture, and what it shows in words."""

    title: str
    svg: str


def legend(traces: Sequence[Trace]) -> list[tuple[str, str]]:
    """(class, kind) of what is drawn."""
    used = {kind_of(span.action) for trace in traces for span in one_iteration(trace)}
    return [(CLASSES[kind], kind) for kind in COLOURS if kind in used]


def device_charts(traces: Sequence[Trace], limits: Sequence[int]) -> list[Chart]:
    """One iteration of each trace, device by device. traces: the planned one, the measured one, or both, of one schedule.
    limits: bytes that a plan may use of each device."""
    drawn = [one_iteration(trace) for trace in traces]
    spans = [span for part in drawn for span in part]
    if not spans:
        return []
    scale = Scale(min(s.start_seconds for s in spans), max(s.end_seconds for s in spans))
    thinnest = _thinnest(spans, scale)
    found = []
    for device in range(len(traces[0].devices)):
        rows = [
            (trace, part, s)
            for trace, part in zip(traces, drawn, strict=True)
            for s in used_streams(part, device)
        ]
        body, y = [], 4.0
        for trace, part, stream in rows:
            body.append(f'<text class="label" x="{LEFT - 6}" y="{y + 13:g}">{_name(trace)} {stream}</text>')
            of_row = [s for s in part if s.device == device and s.stream == stream]
            body += _bars(of_row, scale, y, thinnest)
            y += ROW
        bottom = y + 4
        if any(sample.device == device for trace in traces for sample in trace.memory):
            body += _memory(traces, device, limits[device], scale, bottom + 16)
            bottom += 16 + MEMORY_HEIGHT
        title = f"gpu{device}: streams and memory of one iteration"
        svg = [
            f'<svg viewBox="0 0 {WIDTH} {bottom + 24:g}" role="img" aria-label="{title}">',
            *_grid(scale, bottom),
            *body,
            "</svg>",
        ]
        found.append(Chart(f"gpu{device}", "\n".join(svg)))
    return found


def _name(trace: Trace) -> str:
    return "planned" if trace.origin == "simulated" else "measured"


def _thinnest(spans: Sequence[Span], scale: Scale) -> float:
    """Pixels from which on an action is a bar of its own."""
    widths = sorted((_width(span, scale) for span in spans), reverse=True)
    return max(THINNEST, widths[MAX_BARS] if len(widths) > MAX_BARS else 0.0)


def _width(span: Span, scale: Scale) -> float:
    return scale.x(span.end_seconds) - scale.x(span.start_seconds)


def _bars(spans: Iterable[Span], scale: Scale, y: float, thinnest: float) -> list[str]:
    found: list[str] = []
    thin: dict[str, list[tuple[float, float]]] = {}
    for span in spans:
        kind, x, width = kind_of(span.action), scale.x(span.start_seconds), _width(span, scale)
        if width <= thinnest:
            thin.setdefault(kind, []).append((x, x + width))
            continue
        seconds = format_seconds(span.end_seconds - span.start_seconds)
        moved = f", {format_bytes(span.nbytes)}" if span.nbytes else ""
        tip = f"{span.action}: {kind}, {seconds}{moved}, from {span.start_seconds:.4g} s"
        found.append(
            f'<rect class="{CLASSES[kind]}" x="{x:.1f}" y="{y + 1:g}" width="{width - SEAM:.1f}" height="{ROW - 3}">'
            f"<title>{escape(tip)}</title></rect>"
        )
        if width >= LABELLED_WIDTH:
            word = span.action.partition(":")[2] or span.action
            shade = "light" if kind in DARK else "dark"
            found.append(
                f'<text class="on {shade} on-{CLASSES[kind]}" x="{x + width / 2:.1f}" y="{y + 12.5:g}">{escape(word)}</text>'
            )
    for kind, intervals in thin.items():
        shape = "".join(
            f"M{a:.1f} {y + 1:g}h{max(b - a, THINNEST):.1f}v{ROW - 3}h-{max(b - a, THINNEST):.1f}z"
            for a, b in _joined(intervals)
        )
        found.append(f'<path class="{CLASSES[kind]}" d="{shape}"/>')
    return found


def _joined(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Intervals of pixels, those that a picture cannot tell apart as one."""
    found: list[tuple[float, float]] = []
    for first, last in sorted(intervals):
        if found and first - found[-1][1] < 0.3:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def _grid(scale: Scale, bottom: float) -> list[str]:
    found = []
    for tick in ticks(scale.start, scale.end):
        x = scale.x(tick)
        anchor = "end" if x > WIDTH - 30 else "middle"
        found.append(f'<path class="grid" d="M{x:.1f} 0V{bottom:g}"/>')
        found.append(
            f'<text class="tick" text-anchor="{anchor}" x="{x:.1f}" y="{bottom + 14:g}">{tick:.6g} s</text>'
        )
    return found


def ticks(start: float, end: float) -> list[float]:
    """Round numbers in [start, end], NUM_TICKS of them or fewer, 0 among them where it is inside."""
    rough = (end - start) / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(start / step - 1e-9), math.floor(end / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def _memory(traces: Sequence[Trace], device: int, limit: int, scale: Scale, top: float) -> list[str]:
    peak = max(trace.devices[device].peak_bytes for trace in traces)
    highest = 1.08 * max(limit, peak)

    def y(nbytes: float) -> float:
        return top + MEMORY_HEIGHT * (1 - nbytes / highest)

    found = [f'<text class="label" x="{LEFT - 6}" y="{top + MEMORY_HEIGHT:g}">memory</text>']
    lines = [("limit", f"limit {format_bytes(limit)}", limit)]
    lines += [
        (
            f"peak {_name(t)}",
            f"peak {_name(t)} {format_bytes(t.devices[device].peak_bytes)}",
            t.devices[device].peak_bytes,
        )
        for t in traces
    ]
    for style, text, nbytes in lines:
        found.append(
            f'<path class="line {style}" d="M{LEFT} {y(nbytes):.1f}H{WIDTH}"><title>{escape(text)}</title></path>'
        )
    found.append(
        f'<text class="tick" text-anchor="start" x="{LEFT + 4}" y="{y(limit) - 3:.1f}">limit {format_bytes(limit)}</text>'
    )
    for trace in traces:
        zero = zero_of(trace)
        samples = [(s.seconds - zero, s.allocated_bytes) for s in trace.memory if s.device == device]
        shape = steps(
            [
                (scale.x(seconds), y(nbytes))
                for seconds, nbytes in samples
                if scale.start <= seconds <= scale.end
            ]
        )
        if shape:
            found.append(f'<path class="memory {_name(trace)}" d="{shape}"/>')
    return found


def steps(points: Sequence[tuple[float, float]]) -> str:
    """A line of steps through points in pixels; of those in one column the first, both extremes and the last."""
    columns: dict[int, list[float]] = {}
    for x, y in points:
        columns.setdefault(math.floor(x), []).append(y)
    shape, last = "", None
    for x, values in columns.items():
        for value in (*dict.fromkeys((values[0], min(values), max(values))), values[-1]):
            if last is None:
                shape = f"M{x} {value:.1f}"
            elif f"{value:.1f}" != f"{last:.1f}":
                shape += f"H{x}V{value:.1f}"
            last = value
    return shape and f"{shape}H{max(columns)}"
