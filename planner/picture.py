"""A picture of one planned iteration above one measured one: streams over time, memory against its limit.

In: two traces, each device's limit; the points of a frontier; or servers that are compared. Out: the bytes of a PNG; cli.py writes them.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from planner.contract.trace import Span, Trace
from planner.frontier import Point
from planner.timeline import COLOURS, DARK, kind_of, one_iteration, used_streams, zero_of

LABELLED_SHARE = 0.02
"""An action at least so wide, of the whole picture, carries its name."""

LABEL_LENGTH = 110
"""Characters of what is said of a server."""


class Bar(NamedTuple):
    """A server: its plan's samples per second, and what its bound allows; 0 where it cannot, and remark says why."""

    name: str
    rate: float
    bound: float
    remark: str


def timeline_png(planned: Trace, measured: Trace, limit_bytes: Sequence[int]) -> bytes:
    """The picture. limit_bytes: what a plan may use of each device; none where it is not known."""
    num_devices = len(planned.devices)
    ours, theirs = one_iteration(planned), one_iteration(measured)
    start = min(0.0, *(span.start_seconds for span in ours + theirs))
    end = max(span.end_seconds for span in ours + theirs)
    has_memory = bool(planned.memory or measured.memory)
    heights = [len(used_streams(ours, d)) + len(used_streams(theirs, d)) + 1.0 for d in range(num_devices)]
    rows = [h for height in heights for h in ([height, 3.5] if has_memory else [height])]
    figure = Figure(figsize=(14, 1.2 + 0.3 * sum(rows)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    per_device = 2 if has_memory else 1
    for device in range(num_devices):
        _draw_streams(axes[per_device * device], device, ours, theirs, end - start)
        if has_memory:
            limit = limit_bytes[device] if device < len(limit_bytes) else None
            _draw_memory(axes[per_device * device + 1], device, planned, measured, limit)
    axes[-1].set_xlim(start, end)
    axes[-1].set_xlabel("seconds from the start of the first forward")
    used = {kind_of(span.action) for span in ours + theirs}
    patches = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in used]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    figure.suptitle(
        f"{planned.model}: planned {median(planned.iteration_seconds):.4g} s, "
        f"measured {median(measured.iteration_seconds):.4g} s an iteration"
    )
    return _png(figure)


def servers_png(title: str, bars: Sequence[Bar]) -> bytes:
    """Samples per second of each server, a tick where the bound lies, and what limits it."""
    figure = Figure(figsize=(10, 1.3 + 0.55 * len(bars)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = range(len(bars))
    axes.barh(rows, [bar.rate for bar in bars], color=COLOURS["forward"], height=0.6)
    for row, bar in zip(rows, bars, strict=True):
        if bar.rate:
            axes.plot([bar.bound] * 2, [row - 0.3, row + 0.3], color="black", linewidth=1.5)
        text = f"{bar.rate:.4g}   {bar.remark}" if bar.rate else f"cannot: {bar.remark}"
        text = text if len(text) <= LABEL_LENGTH else f"{text[: LABEL_LENGTH - 3]}..."
        axes.annotate(text, (bar.bound, row), (6, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(rows, [bar.name for bar in bars])
    axes.invert_yaxis()
    # room for what is said of the longest
    axes.set_xlim(0, 1.6 * max([bar.bound for bar in bars if bar.rate], default=1.0))
    axes.set_xlabel("samples per second; the tick is what no plan can beat")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return _png(figure)


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    # no date and no version inside: the same input gives the same bytes
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _draw_streams(
    axes: Axes, device: int, ours: Sequence[Span], theirs: Sequence[Span], width: float
) -> None:
    """One row a stream, planned rows above measured ones."""
    labels: list[str] = []
    for spans, origin in ((ours, "planned"), (theirs, "measured")):
        for stream in used_streams(spans, device):
            row = len(labels)
            labels.append(f"{stream} {origin}")
            by_kind: dict[str, list[tuple[float, float]]] = {}
            for span in spans:
                if span.device != device or span.stream != stream:
                    continue
                seconds = span.end_seconds - span.start_seconds
                by_kind.setdefault(kind_of(span.action), []).append((span.start_seconds, seconds))
                if seconds >= LABELLED_SHARE * width:
                    _label(axes, span, row)
            for kind, bars in by_kind.items():
                # compute is dense and needs its seams; a short copy needs an edge of its colour to be seen
                edge = "white" if stream == "compute" else COLOURS[kind]
                axes.broken_barh(
                    bars, (row - 0.4, 0.8), facecolor=COLOURS[kind], edgecolor=edge, linewidth=0.4
                )
        if origin == "planned":
            axes.axhline(len(labels) - 0.5, color="black", linewidth=0.8)
    axes.set_yticks(range(len(labels)), labels, size=8)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_title(f"gpu{device}", loc="left", size=10, weight="bold")
    axes.grid(axis="x", linewidth=0.3)


def _label(axes: Axes, span: Span, row: int) -> None:
    verb, colon, value = span.action.partition(":")
    colour = "white" if kind_of(span.action) in DARK else "black"
    middle = (span.start_seconds + span.end_seconds) / 2
    axes.text(middle, row, value if colon else verb, ha="center", va="center", size=7, color=colour)


def _draw_memory(axes: Axes, device: int, planned: Trace, measured: Trace, limit: int | None) -> None:
    """Bytes over time; the peak that the plan promises for any timing, and the limit, as lines across."""
    scale = 2**20
    for trace, colour, style in ((planned, "#0072B2", "--"), (measured, "#D55E00", "-")):
        zero = zero_of(trace)
        samples = [s for s in trace.memory if s.device == device]
        if samples:
            seconds = [s.seconds - zero for s in samples]
            axes.step(
                seconds,
                [s.allocated_bytes / scale for s in samples],
                where="post",
                color=colour,
                linestyle=style,
                linewidth=1.0,
                label="planned" if trace is planned else "measured",
            )
    axes.axhline(
        planned.devices[device].peak_bytes / scale,
        color="#0072B2",
        linewidth=0.8,
        linestyle=":",
        label="planned peak",
    )
    if limit is not None:
        axes.axhline(limit / scale, color="black", linewidth=1.0, label="limit")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("MiB", size=8)
    axes.tick_params(labelsize=8)
    axes.grid(axis="x", linewidth=0.3)
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4, fontsize=7, frameon=False, borderpad=0.0
    )


def frontier_png(points: Sequence[Point]) -> bytes:
    """Samples per second over memory, a line for each minibatch and number of devices; dots where only one memory."""
    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    curves: dict[tuple[int, int], list[Point]] = {}
    for point in points:
        curves.setdefault((point.minibatch, point.num_devices), []).append(point)
    colours = list(COLOURS.values())
    for k, ((minibatch, devices), curve) in enumerate(sorted(curves.items())):
        fitting = sorted((p for p in curve if p.seconds is not None), key=lambda p: p.memory_bytes)
        if not fitting:
            continue
        memories = [point.memory_bytes / 2**30 for point in fitting]
        label = f"{minibatch} samples on {devices} device{'' if devices == 1 else 's'}"
        rates = [point.samples_per_second or 0.0 for point in fitting]
        axes.plot(memories, rates, marker="o", color=colours[k % len(colours)], label=label)
    axes.set_xlabel("memory of each device, GiB")
    axes.set_ylabel("samples per second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    return _png(figure)
