"""The question and the answer of a search, and the choices that span its space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

from planner.contract.costs import Costs
from planner.contract.errors import HarmonyError
from planner.contract.hardware import Hardware, budget_bytes
from planner.contract.profile import Profile, largest_microbatch
from planner.contract.schedule import Samples, Schedule, mode_of

MAX_MICROBATCHES = 10_000
"""Of the largest profiled size; a program has several actions for each of them and each pack."""


@dataclass(frozen=True)
class Progress:
    """How far a search is: configurations looked at, of how many, and the best seconds so far."""

    done: int
    total: int
    best_seconds: float | None


@dataclass(frozen=True)
class Result:
    """What a search found.

    status: `found` (a schedule), or `infeasible` (reason says what does not fit and what would help).
    seconds: simulated iteration time; lower_bound_seconds: no plan in the space is faster.
    """

    status: str
    schedule: Schedule | None
    seconds: float
    lower_bound_seconds: float
    reason: str
    search_seconds: float
    num_candidates: int
    limits: str = ""
    others: tuple[Schedule, ...] = ()
    """The next best of other kinds, where they were asked for."""
    critical_path: dict[str, float] = field(default_factory=dict)
    """Seconds of an iteration by cause."""


@dataclass(frozen=True)
class Problem:
    """A profile, a hardware cut to the devices in use, and a minibatch of samples.

    agree: updates wait until the norm over all gradients is known, for clipping or loss scaling.
    num_servers: how many train together; minibatch is what each has, and the profile's updates wait for the network.
    """

    profile: Profile
    hardware: Hardware
    minibatch: int
    num_devices: int
    agree: bool = False
    report: Callable[[Progress], None] = field(default=lambda _: None)
    num_servers: int = 1

    def __post_init__(self) -> None:
        size = min(largest_microbatch(self.profile))
        if self.minibatch > MAX_MICROBATCHES * size:
            raise HarmonyError(
                f"--minibatch {self.minibatch}: more than {MAX_MICROBATCHES} microbatches of {size} samples, the largest "
                f"that was profiled; use at most {MAX_MICROBATCHES * size} samples, or profile larger microbatches"
            )

    @cached_property
    def costs(self) -> Costs:
        return Costs(self.profile)

    @cached_property
    def limits(self) -> list[int]:
        """Usable bytes of each device."""
        return [budget_bytes(device) for device in self.hardware.devices[: self.num_devices]]

    @cached_property
    def scale(self) -> float:
        """Speed of the slowest device: packs are sized for it."""
        return min(device.compute_scale for device in self.hardware.devices[: self.num_devices])

    @cached_property
    def is_coupled(self) -> bool:
        """Whether forward and backward must see the same microbatches."""
        return any(layer.stochastic or layer.batch_coupled for layer in self.profile.layers)

    def shapes(self, mode: str = "any") -> list[Shape]:
        """The ways to split the devices into replicas of a pipeline, one pipeline first."""
        counts = [r for r in range(1, self.num_devices + 1) if self.num_devices % r == 0]
        found = [self.shape(r) for r in counts if r <= self.minibatch]
        return [shape for shape in found if mode in ("any", shape.mode)]

    def shape(self, num_replicas: int) -> Shape:
        """`num_replicas` pipelines of equally many devices, each with samples by the speed of its devices."""
        stages = self.num_devices // num_replicas
        scales = [device.compute_scale for device in self.hardware.devices[: self.num_devices]]
        speeds = [sum(scales[r * stages : (r + 1) * stages]) for r in range(num_replicas)]
        wanted = [self.minibatch * speed / sum(speeds) for speed in speeds]
        shares = [max(1, int(share)) for share in wanted]
        by_need = sorted(range(num_replicas), key=lambda r: (shares[r] - wanted[r], r))
        for k in range(self.minibatch - sum(shares)):
            shares[by_need[k % num_replicas]] += 1
        while sum(shares) > self.minibatch:
            shares[max(range(num_replicas), key=lambda r: shares[r])] -= 1
        return Shape(num_replicas, stages, tuple(shares))

    def sizes(self, samples: int | None = None) -> list[int]:
        """Microbatch sizes worth looking at for this many samples (default: the minibatch): its divisors, all even
        splits where those are few."""
        samples = samples or self.minibatch
        largest = min(*largest_microbatch(self.profile), samples)
        divisors = [u for u in range(1, largest + 1) if samples % u == 0]
        splits = {-(-samples // m) for m in range(1, samples + 1)}
        sizes = divisors if len(divisors) >= 4 else sorted(u for u in splits if u <= largest)
        if not sizes:
            raise HarmonyError(f"minibatch of {self.minibatch} samples: it must be at least 1")
        return sizes

    def size_pairs(self, samples: int | None = None) -> list[tuple[int, int]]:
        """(forward, backward) microbatch sizes."""
        sizes = self.sizes(samples)
        return [(f, b) for f in sizes for b in sizes if f == b or not self.is_coupled]


@dataclass(frozen=True)
class Shape:
    """num_replicas pipelines of num_stages devices; shares: the samples of each replica."""

    num_replicas: int
    num_stages: int
    shares: tuple[int, ...]

    @property
    def samples(self) -> int:
        """The most that one replica has."""
        return max(self.shares)

    @property
    def mode(self) -> Literal["pp", "dp", "hybrid"]:
        return mode_of(self.num_replicas, self.num_stages)

    @property
    def replicas(self) -> tuple[Samples, ...]:
        """Each replica's sample range; empty where there is one, as in a Configuration."""
        ends = list(accumulate(self.shares, initial=0))
        return tuple(pairwise(ends)) if self.num_replicas > 1 else ()

    def microbatches(self, size: int) -> tuple[Samples, ...]:
        """Ranges of `size` samples over all replicas; each replica's last one may be smaller."""
        starts = accumulate(self.shares, initial=0)
        return tuple(
            (start + first, start + end)
            for start, share in zip(starts, self.shares, strict=False)
            for first, end in ranges(share, size)
        )


def ranges(samples: int, size: int) -> tuple[Samples, ...]:
    """Microbatches of `size` samples; the last one may be smaller."""
    return tuple((first, min(samples, first + size)) for first in range(0, samples, size))
