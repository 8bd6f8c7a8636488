"""Records of two ranks, written by hand, and the trace that they make."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from executor.options import RunOptions
from executor.record import merge, plain_trace
from executor.recorder import MEMORY_SAMPLES, RankRecord, Recorder
from executor.reference import PlainResult
from planner.contract import store
from planner.contract.actions import Value, parse_lane
from planner.contract.hardware import DeviceSpec, Hardware, Host, HostLink
from planner.contract.precedence import Graph
from planner.contract.profile import (
    BackwardCost,
    Device,
    Edge,
    ForwardCost,
    Layer,
    Model,
    Profile,
    model_hash,
)
from planner.contract.rules import Rules
from planner.contract.schedule import (
    BackwardPack,
    Configuration,
    DevicePrediction,
    ForwardPack,
    Microbatches,
    PlannedFor,
    Predicted,
    Programs,
    Schedule,
    print_program,
)

LANES = tuple(
    parse_lane(0 if stream in ("compute", "h2d", "send") else 1, stream.removesuffix("1"), texts)
    for stream, texts in {
        "compute": ["F0.0", "free:I0.0", "free:WF0"],
        "h2d": ["in:WF0", "in:I0.0"],
        "compute1": ["B0.0"],
        "host1": ["update:0"],
    }.items()
)
NODES = {
    text: node
    for node, text in enumerate(["F0.0", "free:I0.0", "free:WF0", "in:WF0", "in:I0.0", "B0.0", "update:0"])
}


def make_profile() -> Profile:
    layer = Layer("a", 1024, 1024, (ForwardCost(4, 1.0, 2048),), (BackwardCost(4, 1.0, 2048),))
    return Profile(
        Model("tiny"),
        Device("virtual"),
        "float32",
        "adamw",
        (layer, msgspec.structs.replace(layer, name="b")),
        (Edge(-1, 0, bytes_per_sample=16), Edge(0, 1, bytes_per_sample=8)),
    )


def make_schedule() -> tuple[Schedule, Graph]:
    profile = make_profile()
    samples = ((0, 4),)
    packs = (BackwardPack(0, 0, 1), BackwardPack(1, 1, 1))
    configuration = Configuration("pp", 2, 4, Microbatches(samples, samples), (ForwardPack(0, 0, 0),), packs)
    schedule = Schedule(
        PlannedFor(profile.model, model_hash(profile), "float32", "adamw"),
        Hardware(
            tuple(DeviceSpec(f"v{i}", 1 << 20) for i in range(2)),
            (HostLink(1e9, 1e9),),
            Host(1 << 30, 1 << 30),
        ),
        configuration,
        Predicted(1.0, 1.0, 1, (DevicePrediction(1, 1, 1),) * 2),
        Programs(print_program(LANES)),
    )
    return schedule, Graph(LANES, Rules(profile, configuration))


def make_records(steps: int = 3) -> list[RankRecord]:
    """Iteration k of rank 0 ends at 100 + 10 k + 4, that of rank 1 at 100 + 10 k + 4 + k."""
    first = RankRecord(
        0, peak_bytes=500, swapped_in_bytes=3000, swapped_out_bytes=600, sent_bytes=30, reserved_bytes=700
    )
    second = RankRecord(1, peak_bytes=400, swapped_in_bytes=300)
    for k in range(steps):
        start = 100.0 + 10 * k
        first.ends[k], second.ends[k] = start + 4, start + 4 + k
        first.spans += [
            (NODES["in:WF0"], k, start, start + 1, False),
            (NODES["F0.0"], k, start + 1, start + 4, k == 2),
        ]
        second.spans.append((NODES["update:0"], k, start + 4, start + 4 + k, False))
    first.memory.extend([(99.0, 1), (100.0, 64), (101.5, 128)])
    first.overruns = {0: 5, 2: 1}
    second.overruns = {1: 2}
    return [first, second]


OPTIONS = RunOptions("tiny", steps=3, seed=7)
LOSSES = [3.0, 2.0, 1.5]


def test_iterations_last_from_end_to_end_over_all_ranks_without_the_warm_up() -> None:
    trace = merge(make_records(), *make_schedule(), OPTIONS, LOSSES)
    assert trace.iteration_seconds == (11.0, 11.0)
    assert trace.losses == (3.0, 2.0, 1.5)
    assert trace.samples_per_iteration == 4


def test_one_iteration_is_all_warm_up() -> None:
    trace = merge(make_records(1), *make_schedule(), replace(OPTIONS, steps=1), LOSSES[:1])
    assert trace.iteration_seconds == ()


def test_spans_start_at_zero_in_order_of_time_with_their_bytes() -> None:
    schedule, graph = make_schedule()
    trace = merge(make_records(), schedule, graph, OPTIONS, LOSSES)
    assert [(s.action, s.device, s.stream, s.iteration) for s in trace.spans[:4]] == [
        ("in:WF0", 0, "h2d", 0),
        ("F0.0", 0, "compute", 0),
        ("update:0", 1, "host", 0),
        ("in:WF0", 0, "h2d", 1),
    ]
    assert trace.spans[0].start_seconds == 0
    assert trace.spans[0].nbytes == graph.rules.nbytes(Value("WF", 0)) == 1024
    assert [s.action for s in trace.spans if s.overrun] == ["F0.0"]


def test_devices_have_their_peaks_and_the_bytes_of_one_iteration() -> None:
    first, second = merge(make_records(), *make_schedule(), OPTIONS, LOSSES).devices
    assert (first.peak_bytes, first.swap_in_bytes, first.swap_out_bytes, first.peer_bytes) == (
        500,
        1000,
        200,
        10,
    )
    assert first.reserved_bytes == 700
    assert (second.peak_bytes, second.swap_in_bytes) == (400, 100)


def test_memory_is_kept_from_the_first_span_on_and_not_without_end() -> None:
    trace = merge(make_records(), *make_schedule(), OPTIONS, LOSSES)
    assert [(m.seconds, m.allocated_bytes) for m in trace.memory] == [(0.0, 64), (1.5, 128)]
    records = make_records()
    records[0].memory.extend((100.0 + i * 1e-4, i) for i in range(MEMORY_SAMPLES + 10))
    assert len(merge(records, *make_schedule(), OPTIONS, LOSSES).memory) == MEMORY_SAMPLES


def test_notes_say_how_to_run_the_same_again_and_what_overran() -> None:
    notes = merge(make_records(), *make_schedule(), OPTIONS, LOSSES).notes
    assert (notes["seed"], notes["steps"], notes["paced"], notes["plain"]) == (7, 3, "true", "false")
    assert (notes["first_loss"], notes["last_loss"]) == (3.0, 1.5)
    assert (notes["overruns"], notes["overruns_per_iteration"], notes["overruns_of_warm_up"]) == (3, 1.5, 5)


def test_trace_is_written_and_read_back(tmp_path: Path) -> None:
    schedule, graph = make_schedule()
    trace = merge(make_records(), schedule, graph, OPTIONS, LOSSES)
    path = tmp_path / "trace.json"
    store.save(trace, path)
    again = store.load_trace(path)
    assert again.schedule_hash == store.schedule_hash(schedule)
    assert again.model_hash == schedule.profile.model_hash
    assert (again.notes, again.devices, again.losses) == (trace.notes, trace.devices, trace.losses)
    assert [s.action for s in again.spans] == [s.action for s in trace.spans]


def test_recorder_keeps_spans_of_the_last_iterations_only() -> None:
    recorder = Recorder(0, range(6, 10))
    for k in range(10):
        with recorder.span(0, k) as span:
            pass
        recorder.keep(span)
    assert sorted({k for _, k, _, _, _ in recorder.record.spans}) == [6, 7, 8, 9]
    assert sorted(recorder.record.ends) == list(range(10))


def test_plain_trace_has_one_device_and_no_swaps() -> None:
    result = PlainResult((2.0, 1.0), (0.5, 0.25), {}, 1234)
    trace = plain_trace(result, "tiny", "abc", 8, OPTIONS)
    assert trace.iteration_seconds == (0.25,)
    assert [(d.peak_bytes, d.swap_in_bytes) for d in trace.devices] == [(1234, 0)]
    assert trace.notes["plain"] == "true"
