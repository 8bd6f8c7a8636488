"""Iteration time over memory, devices and minibatch: what a bigger or a smaller server would do.

In: a profile, a hardware, and the values to try. Out: a point for each combination; render and picture show them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import msgspec

from planner.contract.hardware import Hardware
from planner.contract.profile import Profile
from planner.search.problem import Progress
from planner.search.search import plan


@dataclass(frozen=True)
class Point:
    """One combination; seconds and bound are None where nothing fits, reason says why."""

    memory_bytes: int
    num_devices: int
    minibatch: int
    seconds: float | None
    lower_bound_seconds: float | None
    mode: str
    reason: str = ""

    @property
    def samples_per_second(self) -> float | None:
        return None if self.seconds is None else self.minibatch / self.seconds


def frontier(
    profile: Profile,
    hardware: Hardware,
    *,
    memories: Sequence[int],
    devices: Sequence[int],
    minibatches: Sequence[int],
    num_servers: int = 1,
    time_limit_seconds: float | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[Point]:
    """Plan every combination, in the order given. memories: bytes of each device; empty: as the hardware has."""
    memories = memories or [max(device.memory_bytes for device in hardware.devices)]
    found: list[Point] = []
    combinations = list(product(minibatches, devices or [len(hardware.devices)], memories))
    for done, (minibatch, count, memory) in enumerate(combinations):
        if progress is not None:
            progress(Progress(done, len(combinations), None))
        resized = tuple(msgspec.structs.replace(device, memory_bytes=memory) for device in hardware.devices)
        result = plan(
            profile,
            msgspec.structs.replace(hardware, devices=resized),
            minibatch=minibatch,
            num_devices=count,
            num_servers=num_servers,
            time_limit_seconds=time_limit_seconds,
        )
        if result.schedule is None:
            found.append(Point(memory, count, minibatch, None, None, "", result.reason))
        else:
            mode = result.schedule.configuration.mode
            found.append(Point(memory, count, minibatch, result.seconds, result.lower_bound_seconds, mode))
    return found
