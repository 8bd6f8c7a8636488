"""Counts (`harmony-counts/1`): what a model's layers compute and move, whatever the device; roofline.py makes a profile of them."""

from __future__ import annotations

from planner.contract.errors import FormatError
from planner.contract.profile import Noun, Profile

SCHEMA = "harmony-counts/1"


class Line(Noun):
    """A figure that grows with the microbatch."""

    per_sample: float
    fixed: float = 0.0

    def at(self, num_samples: int) -> float:
        """The figure for a microbatch."""
        return self.per_sample * num_samples + self.fixed


class Operation(Noun):
    """flops and bytes of one kernel, which a pass runs so many times. is_matmul: on tensor cores where there are some."""

    flops: Line
    nbytes: Line
    times: int = 1
    is_matmul: bool = False


class Pass(Noun):
    """A layer's forward or its backward: kernels, the most bytes live, and (backward) those that the forward saved."""

    operations: tuple[Operation, ...]
    peak_bytes: Line
    saved_bytes: Line = Line(0.0)


class LayerCounts(Noun):
    """One kind of layer."""

    forward: Pass
    backward: Pass


class Step(Noun):
    """The optimizer step of one layer: bytes that it reads and writes, bytes of the gradients, and whether a device can
    do it beside nothing else."""

    nbytes: int
    gradient_bytes: int
    is_fused: bool = False


class Counts(Noun):
    """profile: the model's structure, its layers without costs. kinds: each kind of layer once; kind_of: of each layer."""

    profile: Profile
    kinds: tuple[LayerCounts, ...]
    kind_of: tuple[int, ...]
    steps: tuple[Step, ...]
    schema: str = SCHEMA


def check(counts: Counts) -> None:
    """Raise FormatError, with the place, where the figures cannot be true."""
    layers = len(counts.profile.layers)
    for name in ("kind_of", "steps"):
        if len(getattr(counts, name)) != layers:
            raise FormatError(f"$.{name}: {len(getattr(counts, name))} of them for {layers} layers; one each")
    for i, kind in enumerate(counts.kind_of):
        if not 0 <= kind < len(counts.kinds):
            raise FormatError(f"$.kind_of[{i}]: {kind}; there are {len(counts.kinds)} kinds")
