"""A model of three layers and programs for it, written by hand: what the tests of the contract share.

batch -> 0 -> 1 -> 2 <- targets

layer      W    dW     K    output a sample    saved a sample
0        100   100   200                 10                30
1        200   200   400                 20                50
2         50    50   100                  -                 8
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from planner.contract.actions import Lanes, parse_lane
from planner.contract.hardware import DeviceSpec, Hardware, Host, HostLink
from planner.contract.memory import peaks
from planner.contract.precedence import Graph
from planner.contract.profile import (
    BackwardCost,
    Device,
    Edge,
    ForwardCost,
    Layer,
    Model,
    Profile,
    UpdateCost,
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
from planner.contract.trace import Trace

Program = Mapping[str, Sequence[str]]
"""Action texts by `gpu0/compute`."""


def layer(name: str, weight_bytes: int, input_bytes: int, output_bytes: int, saved_bytes: int) -> Layer:
    """A layer measured with 1, 2 and 4 samples; bytes are per sample, 5 of workspace in forward, 7 in backward."""
    sizes = (1, 2, 4)
    return Layer(
        name,
        weight_bytes,
        weight_bytes,
        tuple(ForwardCost(n, 0.001 * n, weight_bytes + n * (input_bytes + output_bytes + 5)) for n in sizes),
        tuple(
            BackwardCost(
                n,
                0.002 * n,
                2 * weight_bytes + n * (2 * input_bytes + output_bytes + saved_bytes + 7),
                n * saved_bytes,
            )
            for n in sizes
        ),
        optimizer_state_bytes=2 * weight_bytes,
        update=UpdateCost(0.003, 0.001),
    )


PROFILE = Profile(
    Model("tiny", structure_hash="0123"),
    Device("cpu"),
    "float32",
    "adamw",
    (layer("a", 100, 6, 10, 30), layer("b", 200, 10, 20, 50), layer("c", 50, 20, 0, 8)),
    (Edge(-1, 0, 6, differentiable=False), Edge(0, 1, 10), Edge(1, 2, 20)),
    target_bytes_per_sample=4,
)

MICROBATCHES = Microbatches(((0, 2), (2, 4)), ((0, 2), (2, 4)))

ONE = Configuration(
    "pp", 1, 4, MICROBATCHES, (ForwardPack(0, 0, 0),), (BackwardPack(0, 0, 0), BackwardPack(1, 2, 0))
)
"""One device: forward of layer 0, then layers 1 and 2 fused, then layer 0 again backward."""

ONE_PROGRAM: Program = {
    "gpu0/compute": (
        "F0.0",
        "free:I0.0",
        "F0.1",
        "free:WF0",
        "free:I0.1",
        "B1.0",
        "free:X1.0",
        "free:Y0.0",
        "B1.1",
        "free:WB1",
        "free:X1.1",
        "free:Y0.1",
        "B0.0",
        "free:X0.0",
        "free:D1.0",
        "B0.1",
        "free:WB0",
        "free:X0.1",
        "free:D1.1",
    ),
    "gpu0/h2d": (
        "in:WF0",
        "in:I0.0",
        "in:I0.1",
        "in:WB1 after free:WF0",
        "in:X1.0",
        "in:X1.1",
        "in:WB0 after free:WB1",
        "in:X0.0",
        "in:X0.1",
    ),
    "gpu0/d2h": ("out:G1", "free:G1", "out:G0", "free:G0"),
    "gpu0/host": ("update:1", "update:0"),
}

TWO = Configuration(
    "pp",
    2,
    4,
    MICROBATCHES,
    (ForwardPack(0, 0, 0), ForwardPack(1, 1, 1)),
    (BackwardPack(0, 1, 1), BackwardPack(2, 2, 0)),
)
"""Two devices: layer 0 on gpu0, layer 1 on gpu1, layer 2 fused on gpu0, layers 0 and 1 backward on gpu1."""

TWO_PROGRAM: Program = {
    "gpu0/compute": (
        "F0.0",
        "free:I0.0",
        "F0.1",
        "free:WF0",
        "free:I0.1",
        "B1.0",
        "free:X1.0",
        "free:Y1.0>0",
        "B1.1",
        "free:WB1",
        "free:X1.1",
        "free:Y1.1>0",
    ),
    "gpu0/h2d": ("in:WF0", "in:I0.0", "in:I0.1", "in:WB1 after free:WF0", "in:X1.0", "in:X1.1"),
    "gpu0/d2h": ("out:G1", "free:G1"),
    "gpu0/send": (
        "send:Y0.0>1",
        "free:Y0.0",
        "send:Y0.1>1",
        "free:Y0.1",
        "send:D1.0>1",
        "free:D1.0",
        "send:D1.1>1",
        "free:D1.1",
    ),
    "gpu0/recv": ("recv:Y1.0>0", "recv:Y1.1>0"),
    "gpu0/host": ("update:1",),
    "gpu1/compute": (
        "F1.0",
        "free:Y0.0>1",
        "F1.1",
        "free:WF1",
        "free:Y0.1>1",
        "B0.0",
        "free:X0.0",
        "free:D1.0>1",
        "B0.1",
        "free:WB0",
        "free:X0.1",
        "free:D1.1>1",
    ),
    "gpu1/h2d": ("in:WF1", "in:WB0 after free:WF1", "in:X0.0", "in:X0.1"),
    "gpu1/d2h": ("out:G0", "free:G0"),
    "gpu1/send": ("send:Y1.0>0", "free:Y1.0", "send:Y1.1>0", "free:Y1.1"),
    "gpu1/recv": ("recv:Y0.0>1", "recv:Y0.1>1", "recv:D1.0>1", "recv:D1.1>1"),
    "gpu1/host": ("update:0",),
}

THREE = Configuration(
    "pp",
    1,
    4,
    MICROBATCHES,
    (ForwardPack(0, 1, 0),),
    (BackwardPack(0, 0, 0), BackwardPack(1, 1, 0), BackwardPack(2, 2, 0)),
)
"""One device and a stash: backward pack 1 recomputes from layer 0's output, that forward pack 0 made inside."""

THREE_PROGRAM: Program = {
    "gpu0/compute": (
        *("F0.0", "free:I0.0", "F0.1", "free:WF0", "free:I0.1"),
        *("B2.0", "free:X2.0", "free:Y0.0", "B2.1", "free:WB2", "free:X2.1", "free:Y0.1"),
        *("B1.0", "free:X1.0", "free:D2.0", "B1.1", "free:WB1", "free:X1.1", "free:D2.1"),
        *("B0.0", "free:X0.0", "free:D1.0", "B0.1", "free:WB0", "free:X0.1", "free:D1.1"),
    ),
    "gpu0/h2d": (
        *("in:WF0", "in:I0.0", "in:I0.1"),
        *("in:WB2 after free:WF0", "in:X2.0", "in:X2.1"),
        *("in:WB1 after free:WB2", "in:X1.0", "in:X1.1"),
        *("in:WB0 after free:WB1", "in:X0.0", "in:X0.1"),
    ),
    "gpu0/d2h": (
        *("out:S0.0", "free:S0.0", "out:S0.1", "free:S0.1"),
        *("out:G2", "free:G2", "out:G1", "free:G1", "out:G0", "free:G0"),
    ),
    "gpu0/host": ("update:2", "update:1", "update:0"),
}


def hardware(num_devices: int = 1, memory_bytes: int = 10**6) -> Hardware:
    """Devices of one link, 1 MB/s each way."""
    devices = tuple(DeviceSpec(f"gpu{d}", memory_bytes) for d in range(num_devices))
    return Hardware(devices, (HostLink(1e6, 1e6),), Host(10**9, 10**9, 2), peer_bytes_per_second=2e6)


def lanes_of(program: Program) -> Lanes:
    """The lanes of a program's texts."""
    found = []
    for place, texts in program.items():
        device, _, stream = place.removeprefix("gpu").partition("/")
        found.append(parse_lane(int(device), stream, texts))
    return tuple(found)


def graph_of(program: Program, configuration: Configuration, profile: Profile = PROFILE) -> Graph:
    """The order of a program's actions."""
    return Graph(lanes_of(program), Rules(profile, configuration))


def schedule_of(
    program: Program,
    configuration: Configuration,
    *,
    profile: Profile = PROFILE,
    peak_bytes: int = 10**6,
    on: Hardware | None = None,
) -> Schedule:
    """A schedule file of a program, promising some peak."""
    num_devices = configuration.num_devices
    return Schedule(
        PlannedFor(profile.model, model_hash(profile), profile.dtype, profile.optimizer),
        on or hardware(num_devices),
        configuration,
        Predicted(1.0, 0.5, 10_000, tuple(DevicePrediction(peak_bytes, 0, 0) for _ in range(num_devices))),
        Programs(print_program(lanes_of(program))),
    )


def peak_bytes(program: Program, configuration: Configuration) -> list[int]:
    """What memory.py says of a program."""
    graph = graph_of(program, configuration)
    return [peak.nbytes for peak in peaks(graph, configuration.num_devices)]


def mutated(program: Program, place: str, old: Sequence[str], new: Sequence[str]) -> Program:
    """The program with one run of lines of one stream replaced by others; the old ones must be there."""
    texts = list(program[place])
    at = next(i for i in range(len(texts)) if texts[i : i + len(old)] == list(old))
    return {**program, place: (*texts[:at], *new, *texts[at + len(old) :])}


def measured(trace: Trace, *, slower: float = 1.0, iterations: int = 3) -> Trace:
    """A run that follows a simulated trace, all of it slower by a factor."""
    period = trace.iteration_seconds[0] * slower
    spans = tuple(
        msgspec.structs.replace(
            span,
            start_seconds=k * period + span.start_seconds * slower,
            end_seconds=k * period + span.end_seconds * slower,
            iteration=k + 4,
        )
        for k in range(iterations)
        for span in trace.spans
    )
    memory = tuple(
        msgspec.structs.replace(sample, seconds=k * period + sample.seconds * slower)
        for k in range(iterations)
        for sample in trace.memory
    )
    return msgspec.structs.replace(
        trace, origin="measured", spans=spans, memory=memory, iteration_seconds=(period,) * iterations
    )
