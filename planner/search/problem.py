"""The question and the answer of a search, and the choices that span its space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from planner.contract.costs import Costs
from planner.contract.errors import HarmonyError
from planner.contract.hardware import Hardware, budget_bytes
from planner.contract.profile import Profile, largest_microbatch
from planner.contract.schedule import Samples, Schedule


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


@dataclass(frozen=True)
class Problem:
    """A profile, a hardware cut to the devices in use, and a minibatch of samples."""

    profile: Profile
    hardware: Hardware
    minibatch: int
    num_devices: int
    report: Callable[[Progress], None] = field(default=lambda _: None)

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

    def sizes(self) -> list[int]:
        """Microbatch sizes worth looking at: the divisors of the minibatch, all even splits where those are few."""
        largest = min(*largest_microbatch(self.profile), self.minibatch)
        divisors = [u for u in range(1, largest + 1) if self.minibatch % u == 0]
        splits = {-(-self.minibatch // m) for m in range(1, self.minibatch + 1)}
        sizes = divisors if len(divisors) >= 4 else sorted(u for u in splits if u <= largest)
        if not sizes:
            raise HarmonyError(f"minibatch of {self.minibatch} samples: it must be at least 1")
        return sizes

    def size_pairs(self) -> list[tuple[int, int]]:
        """(forward, backward) microbatch sizes."""
        sizes = self.sizes()
        return [(f, b) for f in sizes for b in sizes if f == b or not self.is_coupled]


def ranges(minibatch: int, size: int) -> tuple[Samples, ...]:
    """Microbatches of `size` samples; the last one may be smaller."""
    return tuple((first, min(minibatch, first + size)) for first in range(0, minibatch, size))
