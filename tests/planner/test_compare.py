"""A measured run against its plan: every figure twice, and what makes a plan hold."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from planner.compare import Comparison, compare
from planner.contract.errors import FormatError
from planner.contract.schedule import DevicePrediction, Schedule
from planner.contract.store import schedule_hash
from planner.contract.trace import DeviceSummary, Span, Trace
from planner.simulate import simulate
from tests.planner.tiny import ONE, ONE_PROGRAM, PROFILE, TWO, TWO_PROGRAM, hardware, measured, schedule_of

replace = msgspec.structs.replace

SCHEDULE = schedule_of(TWO_PROGRAM, TWO)
PLANNED = simulate(SCHEDULE, PROFILE, hardware(2))
MEASURED = measured(PLANNED)


def predicted(schedule: Schedule, trace: Trace) -> Schedule:
    """The schedule that predicts what a simulated trace says."""
    devices = tuple(DevicePrediction(d.peak_bytes, d.swap_in_bytes, d.swap_out_bytes) for d in trace.devices)
    prediction = replace(schedule.predicted, iteration_seconds=trace.iteration_seconds[0], devices=devices)
    return replace(schedule, predicted=prediction)


def with_device(trace: Trace, **changed: int) -> Trace:
    return replace(trace, devices=(trace.devices[0], replace(trace.devices[1], **changed)))


def test_a_run_as_planned_holds_without_any_tolerance() -> None:
    comparison = compare(PLANNED, replace(MEASURED, iteration_seconds=PLANNED.iteration_seconds))
    assert comparison.holds(0.0)
    assert comparison.faults(0.0) == []
    assert comparison.largest == () or max(abs(pair.relative) for pair in comparison.largest) < 1e-9


def test_the_measured_time_is_the_median_with_its_quartiles() -> None:
    times = (1.0, 2.0, 3.0, 4.0, 100.0)
    comparison = compare(PLANNED, replace(MEASURED, iteration_seconds=times))
    assert comparison.iteration_seconds.measured == 3.0
    assert comparison.quartile_seconds == (2.0, 4.0)
    assert comparison.num_iterations == 5


def test_one_iteration_is_its_own_median_and_quartiles() -> None:
    comparison = compare(PLANNED, replace(MEASURED, iteration_seconds=(2.0,)))
    assert comparison.quartile_seconds == (2.0, 2.0)


@pytest.mark.parametrize(("slower", "holds"), [(1.04, True), (0.96, True), (1.06, False), (0.94, False)])
def test_time_must_be_within_the_tolerance_above_and_below(slower: float, holds: bool) -> None:
    comparison = compare(PLANNED, measured(PLANNED, slower=slower))
    assert comparison.holds(0.05) is holds
    if not holds:
        [fault] = comparison.faults(0.05)
        assert f"{slower - 1:+.1%}, tolerance 5.0%" in fault


def test_a_peak_above_its_plan_by_one_byte_does_not_hold() -> None:
    peak = PLANNED.devices[1].peak_bytes
    assert compare(PLANNED, with_device(MEASURED, peak_bytes=peak - 1)).holds(0.05)
    [fault] = compare(PLANNED, with_device(MEASURED, peak_bytes=peak + 1)).faults(0.05)
    assert fault == f"gpu1: peak of {peak + 1} bytes measured, {peak} planned"


@pytest.mark.parametrize("name", ["swap_in_bytes", "swap_out_bytes"])
@pytest.mark.parametrize("difference", [-1, 1])
def test_swapped_bytes_must_be_equal(name: str, difference: int) -> None:
    planned = getattr(PLANNED.devices[1], name)
    [fault] = compare(PLANNED, with_device(MEASURED, **{name: planned + difference})).faults(0.05)
    assert (
        fault
        == f"gpu1: {name[:-6].replace('_', ' ')} of {planned + difference} bytes measured, {planned} planned"
    )


@pytest.mark.parametrize(("difference", "holds"), [(1, False), (0, True), (-1, True), (-0.2, False)])
def test_offloads_may_be_smaller_than_planned_but_no_larger(difference: float, holds: bool) -> None:
    planned = PLANNED.devices[1].swap_in_bytes
    swapped = round(planned * (1 + difference) if abs(difference) < 1 else planned + difference)
    spans = (*MEASURED.spans, replace(MEASURED.spans[0], action="out:AF0.0"))
    offloading = replace(with_device(MEASURED, swap_in_bytes=swapped), spans=spans)
    assert compare(PLANNED, offloading).holds(0.05) is holds


def test_every_fault_is_named() -> None:
    broken = with_device(measured(PLANNED, slower=2.0), peak_bytes=10**9, swap_in_bytes=0, swap_out_bytes=0)
    assert len(compare(PLANNED, broken).faults(0.05)) == 4


def test_busy_seconds_are_per_stream_and_iteration() -> None:
    """Two forwards of 2 samples at 1 ms a sample and layer, two fused backwards at 3 ms, on gpu0."""
    comparison = compare(PLANNED, measured(PLANNED, slower=1.5))
    busy = {pair.name: pair for pair in comparison.devices[0].busy_seconds}
    assert busy["compute"].planned == pytest.approx(2 * 0.002 + 2 * 0.006)
    assert busy["compute"].measured == pytest.approx(1.5 * busy["compute"].planned)
    assert list(busy) == ["compute", "h2d", "d2h", "send", "recv", "host"]


def test_phases_add_up_over_devices() -> None:
    """Layers 0 and 1 forward; layer 2 fused: forward and backward; layers 0 and 1 recomputed and backward."""
    phases = {pair.name: pair.planned for pair in compare(PLANNED, MEASURED).phases}
    assert phases == {
        "forward": pytest.approx(2 * 2 * 0.002),
        "fused": pytest.approx(2 * (0.002 + 0.004)),
        "backward": pytest.approx(2 * 2 * (0.002 + 0.004)),
        "update": pytest.approx(3 * 0.003),
    }


def test_the_actions_that_differ_most_come_first() -> None:
    def slowed(span: Span) -> Span:
        more = {"F1.0": 0.5, "in:WB0": 0.7, "recv:Y0.0>1": 9.0, "free:WB0": 9.0}.get(span.action, 0.0)
        return replace(span, end_seconds=span.end_seconds + more)

    comparison = compare(PLANNED, replace(MEASURED, spans=tuple(map(slowed, MEASURED.spans))))
    assert [pair.name for pair in comparison.largest[:2]] == ["in:WB0", "F1.0"]
    assert comparison.largest[1].measured - comparison.largest[1].planned == pytest.approx(0.5)
    assert not any(pair.name.startswith(("recv:", "free:")) for pair in comparison.largest)


def test_overrun_actions_are_listed_once() -> None:
    spans = tuple(replace(span, overrun=span.action in ("B0.1", "F0.0")) for span in MEASURED.spans)
    assert compare(PLANNED, replace(MEASURED, spans=spans)).overrun_actions == ("F0.0", "B0.1")


def test_what_the_allocator_held_is_reported_beside_the_peak() -> None:
    comparison = compare(PLANNED, with_device(MEASURED, reserved_bytes=4096))
    assert [device.reserved_bytes for device in comparison.devices] == [0, 4096]


def test_a_schedule_is_compared_by_its_totals() -> None:
    comparison = compare(predicted(SCHEDULE, PLANNED), MEASURED)
    assert comparison.holds(1e-9)
    assert comparison.phases == comparison.largest == comparison.devices[0].busy_seconds == ()
    assert comparison.devices[1].peak_bytes.planned == PLANNED.devices[1].peak_bytes


def test_a_schedule_and_its_trace_give_the_same_verdict() -> None:
    for slower in (1.0, 1.2):
        run = measured(PLANNED, slower=slower)
        assert compare(predicted(SCHEDULE, PLANNED), run).faults(0.05) == compare(PLANNED, run).faults(0.05)


OTHER = simulate(schedule_of(ONE_PROGRAM, ONE), PROFILE, hardware())
REFUSED: dict[str, tuple[Callable[[], Comparison], str]] = {
    "another schedule": (
        lambda: compare(PLANNED, measured(OTHER)),
        f"planned for schedule {PLANNED.schedule_hash}, measured on schedule {OTHER.schedule_hash}",
    ),
    "another schedule than the file": (
        lambda: compare(SCHEDULE, measured(OTHER)),
        f"planned for schedule {schedule_hash(SCHEDULE)}, measured on schedule {OTHER.schedule_hash}",
    ),
    "another model": (
        lambda: compare(PLANNED, replace(MEASURED, model_hash="feed")),
        f"planned for model {PLANNED.model_hash}, measured on model feed",
    ),
    "a simulated trace as measured": (
        lambda: compare(PLANNED, PLANNED),
        "the trace to compare with is simulated",
    ),
    "no iteration": (
        lambda: compare(PLANNED, replace(MEASURED, iteration_seconds=())),
        "no complete iteration",
    ),
    "no planned iteration": (
        lambda: compare(replace(PLANNED, iteration_seconds=()), MEASURED),
        "no complete iteration",
    ),
    "fewer devices": (
        lambda: compare(PLANNED, replace(MEASURED, devices=(DeviceSummary(1, 1, 1),))),
        "2 devices planned, 1 measured",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_belong_together_is_refused(case: str) -> None:
    made, message = REFUSED[case]
    with pytest.raises(FormatError, match=message):
        made()
