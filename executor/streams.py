"""The device kinds `virtual` and `cuda` behind one interface; the only file that tells them apart.

virtual: the CPU as an accelerator. Memory is counted and refused beyond the budget, copies are real and take
bytes / rate, compute does its real work and then waits for its planned seconds.

cuda: each stream of a schedule is a CUDA stream, each finished launch an event. A thread that launches never
waits for the GPU; waiting for an event that is not yet recorded waits for nothing, so replay.py waits for the
launch first and hands the event to `wait` after.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from executor.host import HostStore
from executor.meter import Meter
from planner.contract.errors import HarmonyError
from planner.contract.hardware import Hardware, budget_bytes, peer_rate

CHUNK = 1 << 20
"""Bytes between two looks at who else uses a link."""

Event = Any
"""Behind some work of a stream; None where that work is over already."""

Copies = Sequence[tuple[Tensor, Tensor]]
"""(target, source) pairs that move as one."""


class Device(Protocol):
    """What replay.py needs of a device."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were allocated at a time."""

    def slot(self, nbytes: int) -> Tensor:
        """Flat memory on the device, for the pool of slots; not counted."""

    def empty(self, nbytes: int, what: str, stream: str) -> Tensor:
        """Flat memory on the device for work on a stream, counted until it is gone. Raises torch.OutOfMemoryError."""

    def host_area(self, nbytes: int) -> Tensor:
        """Flat memory of this process on the host, for copies to and from the device."""

    def account(self, nbytes: int, what: str) -> None:
        """Planned bytes begin to live. Raises torch.OutOfMemoryError beyond the budget."""

    def release(self, nbytes: int) -> None:
        """Planned bytes are gone."""

    def on(self, stream: str) -> AbstractContextManager[None]:
        """Work inside runs on that stream."""

    def copy(self, copies: Copies, stream: str, started: float) -> None:
        """Host to device or back, on that stream, at the link's rate; one latency for all.

        started: when the action began, time.perf_counter(); what it did since is part of its time.
        """

    def hop(self, nbytes: int, other: int) -> Iterator[tuple[int, int]]:
        """Byte ranges of a transfer to another device, each when it is due."""

    def pieces(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """The byte ranges that `hop` on the other side yields."""

    def pace(self, started: float, seconds: float) -> bool:
        """Wait until `seconds` have passed; whether it already took longer."""

    def mark(self, stream: str) -> Event:
        """An event behind all that was launched on a stream."""

    def seconds(self, event: Event) -> float:
        """When an event happened, by time.perf_counter(); it must be over."""

    def wait(self, stream: str, event: Event) -> None:
        """What follows on the stream runs after the event; the host stream itself waits."""

    def when_over(self, event: Event, call: Callable[[], None]) -> None:
        """Call back once the event has happened."""

    def used_on(self, tensor: Tensor, stream: str) -> None:
        """A tensor made on one stream is read on another: its memory must outlive that read."""

    def finish(self) -> None:
        """Wait for all streams."""

    def stop(self) -> None:
        """The run has failed: nothing is paced any more."""


class VirtualDevice:
    """The CPU with a budget, throttled links and paced compute."""

    def __init__(
        self,
        index: int,
        hardware: Hardware,
        num_devices: int,
        store: HostStore | None,
        *,
        paced: bool,
        metered: bool = True,
        on_memory: Callable[[int], None] | None = None,
    ) -> None:
        torch.set_num_threads(1)
        self._metered = metered
        self.index = index
        self._hardware = hardware
        self._paced = paced
        self._stopped = threading.Event()
        self._store = store
        self.meter = Meter(budget_bytes(hardware.devices[index]), f"gpu{index}", on_memory)
        link_index = hardware.devices[index].host_link
        self._link = hardware.host_links[link_index]
        self._num_devices = num_devices
        self._sharers = [d for d in range(num_devices) if hardware.devices[d].host_link == link_index]

    @property
    def peak_bytes(self) -> int:
        return self.meter.peak_bytes

    def slot(self, nbytes: int) -> Tensor:
        slot = torch.empty(nbytes, dtype=torch.uint8)
        self.meter.exclude(slot)
        return slot

    def empty(self, nbytes: int, what: str, stream: str) -> Tensor:
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        self.meter.track(tensor, what)
        return tensor

    def host_area(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def account(self, nbytes: int, what: str) -> None:
        self.meter.allocate(nbytes, what)

    def release(self, nbytes: int) -> None:
        self.meter.free(nbytes)

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        if stream != "compute" or not self._metered:
            yield
            return
        with self.meter:
            yield

    def copy(self, copies: Copies, stream: str, started: float) -> None:
        direction = 0 if stream == "h2d" else 1
        due = started + self._link.latency_seconds
        slot = 2 * self.index + direction
        if self._store is not None:
            self._store.busy[slot] = 1
        for pair in copies:
            target, source = (tensor.reshape(-1).view(torch.uint8) for tensor in pair)
            for start, end in self.pieces(len(source)):
                target[start:end].copy_(source[start:end])
                due += (end - start) / self._rate(direction)
                self._sleep_until(due)
        if self._store is not None:
            self._store.busy[slot] = 0

    def _rate(self, direction: int) -> float:
        rate = self._link.h2d_bytes_per_second if direction == 0 else self._link.d2h_bytes_per_second
        if self._link.sharing == "static":
            return rate / len(self._sharers)
        if self._link.sharing == "fair" and self._store is not None:
            return rate / max(1, sum(self._store.busy[2 * d + direction] for d in self._sharers))
        return rate

    def hop(self, nbytes: int, other: int) -> Iterator[tuple[int, int]]:
        rate = peer_rate(self._hardware, self.index, other)
        due = time.perf_counter()
        if rate is None:
            # through the host: out of this device, then into the other
            theirs = self._hardware.host_links[self._hardware.devices[other].host_link]
            due += self._link.latency_seconds + theirs.latency_seconds
            out = self._link.d2h_bytes_per_second / self._users(self.index)
            rate = 1 / (1 / out + self._users(other) / theirs.h2d_bytes_per_second)
        for start, end in self.pieces(nbytes):
            due += (end - start) / rate
            self._sleep_until(due)
            yield start, end

    def _users(self, device: int) -> int:
        """By how many the rate of a device's host link is divided, at most."""
        link = self._hardware.devices[device].host_link
        if self._hardware.host_links[link].sharing == "none":
            return 1
        return sum(d.host_link == link for d in self._hardware.devices[: self._num_devices])

    def pieces(self, nbytes: int) -> Iterator[tuple[int, int]]:
        for start in range(0, nbytes, CHUNK):
            yield start, min(start + CHUNK, nbytes)

    def pace(self, started: float, seconds: float) -> bool:
        if not self._paced:
            return False
        if time.perf_counter() > started + seconds:
            return True
        self._sleep_until(started + seconds)
        return False

    def mark(self, stream: str) -> Event:
        return None

    def seconds(self, event: Event) -> float:
        return time.perf_counter()

    def wait(self, stream: str, event: Event) -> None:
        return

    def when_over(self, event: Event, call: Callable[[], None]) -> None:
        call()

    def used_on(self, tensor: Tensor, stream: str) -> None:
        return

    def finish(self) -> None:
        return

    def stop(self) -> None:
        self._stopped.set()

    def _sleep_until(self, due: float) -> None:
        # an event and not time.sleep: a failure elsewhere ends a long transfer or a long pace at once
        left = due - time.perf_counter()
        if self._paced and left > 0:
            self._stopped.wait(left)


class CudaDevice:
    """One GPU. Host memory is registered once, so that copies run beside compute."""

    STREAMS = ("compute", "h2d", "d2h", "send", "recv", "reduce")

    def __init__(self, index: int, hardware: Hardware, store: HostStore | None) -> None:
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise HarmonyError(
                f"--device cuda: gpu{index} is asked for, torch sees {torch.cuda.device_count()} GPUs here"
            )
        self.index = index
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, hardware.devices[index].memory_bytes / total), self.device
        )
        self.streams = {name: torch.cuda.Stream(self.device) for name in self.STREAMS}  # type: ignore[no-untyped-call]
        if store is not None:
            register(store.memory)
        # one moment on both clocks: events only know the milliseconds between two of them
        self._base = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._base.record(self.streams["compute"])
        self._base.synchronize()
        self._base_seconds = time.perf_counter()

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def slot(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def empty(self, nbytes: int, what: str, stream: str) -> Tensor:
        with self.on(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def host_area(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def account(self, nbytes: int, what: str) -> None:
        return  # the caching allocator counts, and refuses beyond the fraction

    def release(self, nbytes: int) -> None:
        return

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        if stream == "host":
            yield
            return
        with torch.cuda.stream(self.streams[stream]):
            yield

    def copy(self, copies: Copies, stream: str, started: float) -> None:
        with self.on(stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)

    def hop(self, nbytes: int, other: int) -> Iterator[tuple[int, int]]:
        yield 0, nbytes

    def pieces(self, nbytes: int) -> Iterator[tuple[int, int]]:
        yield 0, nbytes

    def pace(self, started: float, seconds: float) -> bool:
        return False

    def mark(self, stream: str) -> Event:
        if stream == "host":
            return None
        # blocking: who synchronizes with it sleeps, the cores are the optimizer's
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(self.streams[stream])
        return event

    def seconds(self, event: Event) -> float:
        if event is None:
            return time.perf_counter()
        milliseconds: float = self._base.elapsed_time(event)
        return self._base_seconds + milliseconds / 1e3

    def wait(self, stream: str, event: Event) -> None:
        if event is None:
            return
        if stream == "host":
            event.synchronize()
        else:
            self.streams[stream].wait_event(event)

    def when_over(self, event: Event, call: Callable[[], None]) -> None:
        if event is not None:
            event.synchronize()
        call()

    def used_on(self, tensor: Tensor, stream: str) -> None:
        # the allocator gives the memory to its own stream again as soon as the last reference is gone,
        # while this stream may still be reading: tell it
        tensor.record_stream(self.streams[stream])

    def finish(self) -> None:
        torch.cuda.synchronize(self.device)

    def stop(self) -> None:
        return


def register(memory: Tensor) -> None:
    """Pin the store in this process. Raises HarmonyError that says what limits it."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    result = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 1)
    if int(result) != 0:
        raise HarmonyError(
            f"host: {memory.nbytes} bytes cannot be pinned (cudaHostRegister: {result}); "
            f"raise the locked-memory limit (ulimit -l) or plan with less host memory"
        )


def make_device(
    kind: str,
    index: int,
    hardware: Hardware,
    num_devices: int,
    store: HostStore | None,
    *,
    paced: bool,
    metered: bool = True,
    on_memory: Callable[[int], None] | None = None,
) -> Device:
    """The device of a rank. Raises HarmonyError where there is none."""
    if kind == "cuda":
        return CudaDevice(index, hardware, store)
    return VirtualDevice(
        index, hardware, num_devices, store, paced=paced, metered=metered, on_memory=on_memory
    )
