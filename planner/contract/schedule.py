"""Schedule (`harmony-schedule/1`): a configuration, what it is predicted to cost, and its program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from planner.contract.actions import STREAMS, Lanes, parse_lane
from planner.contract.errors import FormatError
from planner.contract.hardware import Hardware
from planner.contract.profile import MAX_SECONDS, MIN_SECONDS, Model, Noun

SCHEMA = "harmony-schedule/1"

MAX_SERVERS = 10_000
ROUNDING = 1e-9

Samples = tuple[int, int]
"""A range of the minibatch's samples, [first, end)."""


class Microbatches(Noun):
    """The sample range of every forward and every backward microbatch, in order over the whole minibatch."""

    forward: tuple[Samples, ...]
    backward: tuple[Samples, ...]


class ForwardPack(Noun):
    """Layers first..last (both included) that run forward as one.

    device: its device, in replica 0; replica r is that many pipelines of devices further on.
    weights: `stream` comes in for its forward and goes; `hold` stays for the backward on that device;
    `resident` never leaves (the backward packs hold it).
    seconds: what one forward of each microbatch is planned to take.
    """

    first: int
    last: int
    device: int
    weights: Literal["stream", "hold", "resident"] = "stream"
    seconds: tuple[float, ...] = ()


class BackwardPack(Noun):
    """Layers that run backward as one; the last backward pack runs its own forward too (fused).

    activations: per backward microbatch: recompute from the stash, keep on the device, or offload.
    seconds: what each microbatch's backward takes, recompute included. update_seconds: its optimizer step.
    """

    first: int
    last: int
    device: int
    weights: Literal["stream", "hold", "resident"] = "stream"
    update: Literal["host", "device"] = "host"
    activations: tuple[Literal["recompute", "keep", "offload"], ...] = ()
    seconds: tuple[float, ...] = ()
    update_seconds: float = 0.0


class Configuration(Noun):
    """What the planner decided for one server. replicas: each replica's samples; empty means one replica with all.

    agree: updates wait for one action over all gradients (clipping by norm, overflow of fp16), which is planned to take
    agree_seconds.
    num_servers: servers that run this at the same time, each with a minibatch of its own; an update waits for the sum
    of its gradients over all of them.
    """

    mode: Literal["pp", "dp", "hybrid"]
    num_devices: int
    minibatch: int
    microbatches: Microbatches
    forward_packs: tuple[ForwardPack, ...]
    backward_packs: tuple[BackwardPack, ...]
    replicas: tuple[Samples, ...] = ()
    agree: bool = False
    agree_seconds: float = 0.0
    num_servers: int = 1

    @property
    def samples(self) -> int:
        """Of an iteration, over all servers."""
        return self.num_servers * self.minibatch


class PlannedFor(Noun):
    """The profile that the schedule was planned for: its model part, the hash over its sizes, its types."""

    model: Model
    model_hash: str
    dtype: str
    optimizer: str


class DevicePrediction(Noun):
    """Per device and iteration; peak_bytes holds whatever the timing."""

    peak_bytes: int
    swap_in_bytes: int
    swap_out_bytes: int
    peer_bytes: int = 0


class Predicted(Noun):
    """What the simulator says of one steady-state iteration, and the proven lower bound."""

    iteration_seconds: float
    lower_bound_seconds: float
    host_bytes: int
    devices: tuple[DevicePrediction, ...]


class Stream(Noun):
    """The action texts of one stream of one device, in order."""

    device: int
    stream: str
    actions: tuple[str, ...]


class Programs(Noun):
    """What every stream does in an iteration of training; one of evaluation follows from it (evaluation.py)."""

    train: tuple[Stream, ...]


class Schedule(Noun):
    """A plan: what it was made for, what was decided, what it is predicted to cost, and its programs."""

    profile: PlannedFor
    hardware: Hardware
    configuration: Configuration
    predicted: Predicted
    programs: Programs
    options: dict[str, str | int | float | bool | None] = {}
    schema: str = SCHEMA


def parse_program(streams: tuple[Stream, ...]) -> Lanes:
    """The lanes that the texts stand for. Raises FormatError with the place."""
    seen: set[tuple[int, str]] = set()
    for i, stream in enumerate(streams):
        if stream.stream not in STREAMS or stream.device < 0:
            raise FormatError(
                f"$.programs.train[{i}]: no stream gpu{stream.device}/{stream.stream}; use {', '.join(STREAMS)}"
            )
        if (stream.device, stream.stream) in seen:
            raise FormatError(
                f"$.programs.train[{i}]: gpu{stream.device}/{stream.stream} occurs twice; a stream is one list"
            )
        seen.add((stream.device, stream.stream))
    return tuple(parse_lane(stream.device, stream.stream, stream.actions) for stream in streams)


def print_program(lanes: Lanes) -> tuple[Stream, ...]:
    """The texts of lanes; the inverse of parse_program."""
    return tuple(
        Stream(lane.device, lane.stream, tuple(map(str, lane.entries))) for lane in lanes if lane.entries
    )


def replica_samples(configuration: Configuration) -> tuple[Samples, ...]:
    """Each replica's sample range."""
    return configuration.replicas or ((0, configuration.minibatch),)


def check(schedule: Schedule) -> None:
    """Raise FormatError where the configuration contradicts itself."""
    layers = (
        schedule.configuration.backward_packs[-1].last + 1 if schedule.configuration.backward_packs else 0
    )
    check_configuration(schedule.configuration, layers, len(schedule.hardware.devices))
    if len(schedule.predicted.devices) != schedule.configuration.num_devices:
        raise FormatError(
            f"$.predicted.devices: {len(schedule.predicted.devices)} devices, "
            f"the configuration has {schedule.configuration.num_devices}"
        )
    seconds, bound = schedule.predicted.iteration_seconds, schedule.predicted.lower_bound_seconds
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise FormatError(
            f"$.predicted.iteration_seconds: {seconds}; a time is from {MIN_SECONDS:g} to {MAX_SECONDS:g}, plan again"
        )
    if not 0 <= bound <= seconds * (1 + ROUNDING):
        raise FormatError(
            f"$.predicted.lower_bound_seconds: {bound}; a bound is from 0 to the iteration's {seconds}, plan again"
        )
    if schedule.configuration.num_servers > 1 and schedule.hardware.network_bytes_per_second is None:
        raise FormatError(
            f"$.hardware.network_bytes_per_second: null, but {schedule.configuration.num_servers} servers train together; "
            f"plan again with --network RATE"
        )


def check_configuration(configuration: Configuration, num_layers: int, available: int) -> None:
    """Raise FormatError where a configuration contradicts itself, or covers other layers or devices than there are."""
    where = "$.configuration"
    replicas = replica_samples(configuration)
    if not 1 <= configuration.num_devices <= available:
        raise FormatError(f"{where}.num_devices: {configuration.num_devices}, the hardware has {available}")
    if configuration.num_devices % len(replicas):
        raise FormatError(
            f"{where}.replicas: {len(replicas)} do not divide {configuration.num_devices} devices"
        )
    stages = configuration.num_devices // len(replicas)
    mode = mode_of(len(replicas), stages)
    if configuration.mode != mode:
        raise FormatError(
            f"{where}.mode: {configuration.mode}, but {len(replicas)} replicas of {stages} devices are {mode}"
        )
    _check_ranges(replicas, configuration.minibatch, f"{where}.replicas")
    cuts = {first for first, _ in replicas}
    for name in ("forward", "backward"):
        ranges: tuple[Samples, ...] = getattr(configuration.microbatches, name)
        _check_ranges(ranges, configuration.minibatch, f"{where}.microbatches.{name}")
        if not cuts <= {first for first, _ in ranges}:
            raise FormatError(
                f"{where}.microbatches.{name}: a microbatch spans two replicas; cut it at {sorted(cuts)}"
            )
    if not 0 <= configuration.agree_seconds < float("inf"):
        raise FormatError(
            f"{where}.agree_seconds: {configuration.agree_seconds}; a time is finite and 0 or more"
        )
    if not 1 <= configuration.num_servers <= MAX_SERVERS:
        raise FormatError(f"{where}.num_servers: {configuration.num_servers}; from 1 to {MAX_SERVERS}")
    if not configuration.backward_packs:
        raise FormatError(f"{where}.backward_packs: none; there is at least one")
    covered = configuration.backward_packs[-1].last + 1
    if covered != num_layers:
        raise FormatError(f"{where}.backward_packs: cover {covered} of {num_layers} layers")
    end = configuration.backward_packs[-1].first
    _check_packs(configuration.forward_packs, end, stages, f"{where}.forward_packs")
    _check_packs(configuration.backward_packs, None, stages, f"{where}.backward_packs")
    for b, pack in enumerate(configuration.backward_packs):
        if len(pack.activations) not in (0, len(configuration.microbatches.backward)):
            raise FormatError(
                f"{where}.backward_packs[{b}].activations: {len(pack.activations)} choices for "
                f"{len(configuration.microbatches.backward)} backward microbatches"
            )
        if pack.update == "device" and configuration.num_servers > 1:
            raise FormatError(
                f"{where}.backward_packs[{b}].update: device, but {configuration.num_servers} servers add their gradients "
                f"in host memory; update on the host"
            )
        if not 0 <= pack.update_seconds < float("inf"):
            raise FormatError(
                f"{where}.backward_packs[{b}].update_seconds: {pack.update_seconds}; a time is finite and 0 or more"
            )
    for p, forward in enumerate(configuration.forward_packs):
        _check_seconds(forward.seconds, configuration.microbatches.forward, f"{where}.forward_packs[{p}]")
    for b, pack in enumerate(configuration.backward_packs):
        _check_seconds(pack.seconds, configuration.microbatches.backward, f"{where}.backward_packs[{b}]")


def mode_of(num_replicas: int, num_stages: int) -> Literal["pp", "dp", "hybrid"]:
    """What replicas of a pipeline of stages are called."""
    if num_replicas == 1:
        return "pp"
    return "dp" if num_stages == 1 else "hybrid"


def _check_seconds(seconds: tuple[float, ...], microbatches: tuple[Samples, ...], where: str) -> None:
    if len(seconds) not in (0, len(microbatches)):
        raise FormatError(f"{where}.seconds: {len(seconds)} times for {len(microbatches)} microbatches")
    for i, value in enumerate(seconds):
        if not 0 <= value < float("inf"):
            raise FormatError(f"{where}.seconds[{i}]: {value}; a time is finite and 0 or more")


def _check_ranges(ranges: tuple[Samples, ...], minibatch: int, where: str) -> None:
    expected = 0
    for i, (first, end) in enumerate(ranges):
        if first != expected or end <= first:
            raise FormatError(
                f"{where}[{i}]: samples [{first}, {end}), expected a range that starts at {expected}"
            )
        expected = end
    if expected != minibatch:
        raise FormatError(f"{where}: covers {expected} of {minibatch} samples")


def _check_packs(
    packs: Sequence[ForwardPack | BackwardPack], end: int | None, stages: int, where: str
) -> None:
    expected = 0
    for p, pack in enumerate(packs):
        if pack.first != expected or pack.last < pack.first:
            raise FormatError(
                f"{where}[{p}]: layers {pack.first} to {pack.last}, expected a pack that starts at {expected}"
            )
        if not 0 <= pack.device < stages:
            raise FormatError(f"{where}[{p}].device: {pack.device}, a pipeline has {stages} devices")
        expected = pack.last + 1
    if end is not None and expected != end:
        raise FormatError(
            f"{where}: covers {expected} layers, the forward packs end where the fused pack starts, at {end}"
        )
