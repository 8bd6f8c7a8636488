"""The picture shows both timelines of every device; the same traces give the same bytes."""

from __future__ import annotations

import struct

import msgspec
import pytest

from planner.contract.actions import STREAMS
from planner.picture import timeline_png
from planner.simulate import simulate
from planner.timeline import COLOURS, kind_of
from tests.planner.tiny import ONE, ONE_PROGRAM, PROFILE, TWO, TWO_PROGRAM, hardware, measured, schedule_of

PLANNED = simulate(schedule_of(TWO_PROGRAM, TWO), PROFILE, hardware(2))
SINGLE = simulate(schedule_of(ONE_PROGRAM, ONE), PROFILE, hardware())


def size_of(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_the_picture_is_a_png_that_grows_with_the_devices() -> None:
    two = size_of(timeline_png(PLANNED, measured(PLANNED, slower=1.1), [10**6, 10**6]))
    one = size_of(timeline_png(SINGLE, measured(SINGLE), [10**6]))
    assert two[0] == one[0] > 1000
    assert two[1] > one[1] > 300


def test_the_same_traces_give_the_same_bytes() -> None:
    run = measured(SINGLE, slower=1.1)
    assert timeline_png(SINGLE, run, ()) == timeline_png(SINGLE, run, ())


def test_memory_needs_samples_and_limits_need_nothing() -> None:
    bare = msgspec.structs.replace(SINGLE, memory=())
    without = size_of(timeline_png(bare, measured(bare), ()))
    assert without[1] < size_of(timeline_png(SINGLE, measured(SINGLE), ()))[1]


def test_a_run_without_spans_is_drawn_as_empty_rows() -> None:
    silent = msgspec.structs.replace(measured(SINGLE), spans=(), memory=())
    assert size_of(timeline_png(SINGLE, silent, ()))[1] > 100


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        ("F0.0", "forward"),
        ("B0.0", "backward"),
        ("in:WF0", "weights in"),
        ("in:WB0/1", "weights in"),
        ("in:K0", "weights in"),
        ("in:X0.0", "batch, stash in"),
        ("in:AB0.0", "batch, stash in"),
        ("out:G0", "gradients out"),
        ("out:S0.0", "stash out"),
        ("send:Y0.0>1", "to a peer"),
        ("recv:D0.0>1", "to a peer"),
        ("reduce:G0/1", "to a peer"),
        ("update:0", "update"),
        ("agree", "update"),
        ("free:WF0", ""),
    ],
)
def test_every_action_has_its_kind_in_the_legend(action: str, kind: str) -> None:
    assert kind_of(action) == kind
    assert not kind or kind in COLOURS


def test_every_stream_of_a_trace_is_one_that_the_picture_orders() -> None:
    assert {span.stream for span in PLANNED.spans} <= set(STREAMS)
