"""From counts to a profile: each kernel takes as long as the slower of computing and moving its bytes.

    seconds of a kernel = launch + max(flops / (rate x efficiency), bytes / (memory rate x efficiency))

after Williams, Waterman and Patterson, Roofline, CACM 2009. Efficiencies, launches and the host's rate are assumptions, the same
for every GPU; `calibration` sets one factor per device from any measured profile. They were compared with measured layers on one
GPU only, a GTX 1080 Ti in float32 (`make bench-estimate`).
"""

from __future__ import annotations

import msgspec

from planner.contract.counts import Counts, Operation, Pass
from planner.contract.errors import FormatError
from planner.contract.gpus import Gpu
from planner.contract.profile import BackwardCost, Device, ForwardCost, Profile, UpdateCost

MATMUL_EFFICIENCY = 0.7
MEMORY_EFFICIENCY = 0.8
LAUNCH_SECONDS = 5e-6
HOST_BYTES_PER_SECOND = 20e9
"""What a step of the optimizer reads and writes on the host, all its cores together."""
HOW_SURE = (
    "by published figures and assumed efficiencies, not measured; these were compared with measured layers on one GPU "
    "only, a GTX 1080 Ti in float32"
)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def estimate(counts: Counts, name: str, gpu: Gpu, *, factor: float = 1.0) -> Profile:
    """A profile of what was counted on a GPU. factor: of `calibration`. Raises FormatError for a type it does not have."""
    skeleton = counts.profile
    types = [kind for kind in skeleton.dtype.split("+") if kind in gpu.flops]
    if not types:
        raise FormatError(
            f"{name} has no rate for {skeleton.dtype}; it computes in {', '.join(gpu.flops)}: choose another type"
        )
    rate = min(gpu.flops[kind] for kind in types)
    kinds = [
        (_costs(kind.forward, gpu, rate, factor), _costs(kind.backward, gpu, rate, factor))
        for kind in counts.kinds
    ]
    layers = []
    for layer, kind, step in zip(skeleton.layers, counts.kind_of, counts.steps, strict=True):
        forward, backward = kinds[kind]
        saved = counts.kinds[kind].backward.saved_bytes
        on_device = factor * step.nbytes / (gpu.memory_bytes_per_second * MEMORY_EFFICIENCY)
        layers.append(
            msgspec.structs.replace(
                layer,
                forward=tuple(ForwardCost(size, seconds, nbytes) for size, seconds, nbytes in forward),
                backward=tuple(
                    BackwardCost(size, seconds, nbytes, _whole(saved.at(size)))
                    for size, seconds, nbytes in backward
                ),
                update=UpdateCost(
                    step.nbytes / HOST_BYTES_PER_SECOND,
                    on_device if step.is_fused else None,
                    step.gradient_bytes / HOST_BYTES_PER_SECOND,
                ),
            )
        )
    return msgspec.structs.replace(
        skeleton,
        layers=tuple(layers),
        model=msgspec.structs.replace(skeleton.model, source=f"estimated for {name} {HOW_SURE}"),
        device=Device(f"{name} (estimated)", gpu.memory_bytes),
    )


def _costs(work: Pass, gpu: Gpu, rate: float, factor: float) -> list[tuple[int, float, int]]:
    """(size, seconds, peak bytes) by size."""
    found = []
    for size in SIZES:
        seconds = factor * sum(o.times * _seconds(o, size, gpu, rate) for o in work.operations)
        found.append((size, max(seconds, LAUNCH_SECONDS), _whole(work.peak_bytes.at(size))))
    return found


def _seconds(operation: Operation, size: int, gpu: Gpu, rate: float) -> float:
    peak = rate if operation.is_matmul else gpu.flops["float32"]
    computing = operation.flops.at(size) / (peak * MATMUL_EFFICIENCY)
    moving = operation.nbytes.at(size) / (gpu.memory_bytes_per_second * MEMORY_EFFICIENCY)
    return LAUNCH_SECONDS + max(computing, moving)


def _whole(nbytes: float) -> int:
    return max(0, round(nbytes))


def calibration(measured: Profile, estimated: Profile) -> float:
    """The factor that brings estimated seconds to measured ones: the median over layers, weighted by their time, so that
    neither many small layers nor one odd one decides. Raises FormatError where the layers are others."""
    if len(measured.layers) != len(estimated.layers):
        raise FormatError(
            f"{len(measured.layers)} layers were measured, {len(estimated.layers)} are estimated; it is another model"
        )
    ratios: list[tuple[float, float]] = []
    for ours, theirs in zip(estimated.layers, measured.layers, strict=True):
        for guesses, times in ((ours.forward, theirs.forward), (ours.backward, theirs.backward)):
            known = {cost.microbatch_size: cost.seconds for cost in guesses}
            both = [
                (cost.seconds, known[cost.microbatch_size]) for cost in times if cost.microbatch_size in known
            ]
            ratios += [(seconds / guess, seconds) for seconds, guess in both]
    if not ratios:
        raise FormatError("no microbatch size was both measured and estimated")
    return _weighted_median(ratios)


def _weighted_median(ratios: list[tuple[float, float]]) -> float:
    total, passed = sum(weight for _, weight in ratios), 0.0
    for ratio, weight in sorted(ratios):
        passed += weight
        if passed >= total / 2:
            return ratio
    raise AssertionError("half of the weight lies somewhere")
