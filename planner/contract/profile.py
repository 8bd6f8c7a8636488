"""Profile (`harmony-profile/1`): what each layer of a model costs on one device.

Sizes are bytes (int), times are seconds (float). Figures between two measured microbatch sizes are
interpolated linearly; below the smallest the smallest holds; beyond the largest there are none.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol, dataclass_transform

import msgspec

from planner.contract.errors import FormatError

SCHEMA = "harmony-profile/1"

MAX_BYTES = 1 << 60
MIN_SECONDS, MAX_SECONDS = 1e-12, 1e6
DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Figures beyond these were not measured; sums of them would not be exact, or not finite."""

BATCH = -1
"""The `src` of an edge that comes from the batch and not from a layer."""


@dataclass_transform(frozen_default=True)  # for type checkers: what derives from it is frozen too
class Noun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of every part of a file: immutable, unknown fields refused, defaults left out."""


class ForwardCost(Noun):
    """One layer's forward pass of one microbatch, without gradients.

    peak_bytes: everything live while this layer alone runs: input, output, weights, temporaries.
    spread_seconds: half the distance between the quartiles of the repeats.
    """

    microbatch_size: int
    seconds: float
    peak_bytes: int
    spread_seconds: float = 0.0


class BackwardCost(Noun):
    """One layer's backward pass of one microbatch, without the recompute that precedes it.

    peak_bytes: everything live during forward with gradients and backward, while accumulating.
    saved_bytes: what forward keeps for backward beyond weights and input, the output included; None: unknown.
    """

    microbatch_size: int
    seconds: float
    peak_bytes: int
    saved_bytes: int | None = None
    spread_seconds: float = 0.0


class UpdateCost(Noun):
    """The optimizer step of one layer, on the host and on the device, and the norm of its gradients on the host
    (None: not measured)."""

    host_seconds: float = 0.0
    device_seconds: float | None = None
    norm_seconds: float | None = None


class Layer(Noun):
    """One layer. gradient_bytes is 0 where every parameter is frozen."""

    name: str
    weight_bytes: int
    gradient_bytes: int
    forward: tuple[ForwardCost, ...]
    backward: tuple[BackwardCost, ...]
    buffer_bytes: int = 0
    optimizer_state_bytes: int = 0
    stochastic: bool = False
    batch_coupled: bool = False
    update: UpdateCost = UpdateCost()


class Edge(Noun):
    """A tensor from layer src (-1: the batch) to layer dst.

    The same src and tensor is one tensor, however many edges carry it; an empty name is src's only output.
    """

    src: int
    dst: int
    bytes_per_sample: int = 0
    bytes_fixed: int = 0
    differentiable: bool = True
    tensor: str = ""


class Tie(Noun):
    """A parameter that several layers share. weight_bytes: its size in each of them."""

    layers: tuple[int, ...]
    weight_bytes: int
    name: str = ""


class Model(Noun):
    """Where the profile comes from; all but `name` may be empty for figures made by other means."""

    name: str
    source: str = ""
    spec: str = ""
    patterns: tuple[str, ...] = ()
    cut_by: str = ""
    inputs: dict[str, str] = {}
    structure_hash: str = ""


class Device(Noun):
    """The device that the figures were measured on."""

    name: str
    memory_bytes: int = 0
    threads: int = 0


class Profile(Noun):
    """A model's layers in execution order, and the tensors between them.

    target_bytes_per_sample: what the last layer needs beside its edges (labels), per sample.
    """

    model: Model
    device: Device
    dtype: str
    optimizer: str
    layers: tuple[Layer, ...]
    edges: tuple[Edge, ...]
    target_bytes_per_sample: int = 0
    ties: tuple[Tie, ...] = ()
    schema: str = SCHEMA


def is_scaled(profile: Profile) -> bool:
    """Whether the loss is scaled up, since float16 gradients would vanish, and updates wait whether any overflowed."""
    return "float16" in profile.dtype.split("+")


def largest_microbatch(profile: Profile) -> tuple[int, int]:
    """The largest microbatch size that every layer was measured with: (forward, backward)."""
    forward = min(layer.forward[-1].microbatch_size for layer in profile.layers)
    backward = min(layer.backward[-1].microbatch_size for layer in profile.layers)
    return forward, backward


class _Sized(Protocol):
    @property
    def microbatch_size(self) -> int: ...


def bracket(costs: Sequence[_Sized], microbatch_size: int, where: str) -> tuple[int, int, float]:
    """Positions lo, hi and the weight of hi with which `costs` are interpolated at a size.

    Raises FormatError beyond the largest measured size.
    """
    sizes = [cost.microbatch_size for cost in costs]
    if microbatch_size > sizes[-1]:
        raise FormatError(
            f"{where}: microbatch of {microbatch_size} samples, but the largest one profiled has {sizes[-1]}; "
            f"profile larger microbatches or plan with smaller ones"
        )
    hi = bisect_left(sizes, microbatch_size)
    if hi == 0 or sizes[hi] == microbatch_size:
        return hi, hi, 0.0
    lo = hi - 1
    return lo, hi, (microbatch_size - sizes[lo]) / (sizes[hi] - sizes[lo])


def model_hash(profile: Profile) -> str:
    """What a schedule remembers of its profile: structure, sizes and edges, none of the times."""
    structure = [
        [
            layer.name,
            layer.weight_bytes,
            layer.gradient_bytes,
            layer.buffer_bytes,
            layer.optimizer_state_bytes,
            layer.stochastic,
            layer.batch_coupled,
        ]
        for layer in profile.layers
    ]
    parts = [profile.model.name, profile.model.structure_hash, profile.dtype, profile.optimizer, structure]
    text = msgspec.json.encode([*parts, profile.edges, profile.ties, profile.target_bytes_per_sample])
    return hashlib.sha256(text).hexdigest()[:16]


def check(profile: Profile) -> None:
    """Raise FormatError, with the place, where the figures cannot be true."""
    if not profile.layers:
        raise FormatError("$.layers: a profile needs at least one layer, this one has 0")
    if not set(profile.dtype.split("+")) <= set(DTYPES):
        raise FormatError(f"$.dtype: {profile.dtype!r}; use {', '.join(DTYPES)}, or several joined by +")
    for i, layer in enumerate(profile.layers):
        _check_costs(layer.forward, f"$.layers[{i}].forward")
        _check_costs(layer.backward, f"$.layers[{i}].backward")
        for name in ("weight_bytes", "gradient_bytes", "buffer_bytes", "optimizer_state_bytes"):
            _check_bytes(getattr(layer, name), f"$.layers[{i}].{name}")
        for name in ("host_seconds", "device_seconds", "norm_seconds"):
            seconds = getattr(layer.update, name)
            if seconds is not None and not 0 <= seconds <= MAX_SECONDS:
                raise FormatError(f"$.layers[{i}].update.{name}: {seconds} s; measure it again")
    for i, edge in enumerate(profile.edges):
        if not BATCH <= edge.src < edge.dst < len(profile.layers):
            raise FormatError(
                f"$.edges[{i}]: from {edge.src} to {edge.dst}; an edge goes from -1 (the batch) or a layer "
                f"to a later one of the {len(profile.layers)} layers"
            )
        _check_bytes(edge.bytes_per_sample, f"$.edges[{i}].bytes_per_sample")
        _check_bytes(edge.bytes_fixed, f"$.edges[{i}].bytes_fixed")
    _check_bytes(profile.target_bytes_per_sample, "$.target_bytes_per_sample")
    for i, tie in enumerate(profile.ties):
        _check_bytes(tie.weight_bytes, f"$.ties[{i}].weight_bytes")
        if len(tie.layers) < 2 or not all(0 <= layer < len(profile.layers) for layer in tie.layers):
            raise FormatError(
                f"$.ties[{i}].layers: {list(tie.layers)}; a tie names two or more layers of the profile"
            )


def _check_costs(costs: Sequence[ForwardCost | BackwardCost], where: str) -> None:
    if not costs:
        raise FormatError(f"{where}: no microbatch size was measured; at least one is needed")
    last = 0
    for i, cost in enumerate(costs):
        if cost.microbatch_size <= last:
            raise FormatError(
                f"{where}[{i}].microbatch_size: {cost.microbatch_size} after {last}; sizes must grow"
            )
        if not MIN_SECONDS <= cost.seconds <= MAX_SECONDS:
            raise FormatError(
                f"{where}[{i}].seconds: {cost.seconds}; a time is from {MIN_SECONDS:g} to {MAX_SECONDS:g}, measure it again"
            )
        if not 0 <= cost.spread_seconds <= MAX_SECONDS:
            raise FormatError(f"{where}[{i}].spread_seconds: {cost.spread_seconds}; a spread is 0 or more")
        _check_bytes(cost.peak_bytes, f"{where}[{i}].peak_bytes")
        if isinstance(cost, BackwardCost) and cost.saved_bytes is not None:
            _check_bytes(cost.saved_bytes, f"{where}[{i}].saved_bytes")
        last = cost.microbatch_size


def _check_bytes(nbytes: int, where: str) -> None:
    if not 0 <= nbytes <= MAX_BYTES:
        raise FormatError(f"{where}: {nbytes} bytes; sizes are never negative, and at most {MAX_BYTES}")
