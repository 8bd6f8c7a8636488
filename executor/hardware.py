"""Describe a machine: `virtual`, as asked for and checked by copying, or `cuda`, as measured.

In: what is asked for. Out: a Hardware, and for `virtual` what copies really reach of it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from statistics import median
from typing import Literal

import psutil
import torch
from torch import Tensor

from executor.host import available_bytes
from executor.streams import VirtualDevice
from planner.contract import hardware as contract
from planner.contract.errors import HarmonyError
from planner.contract.hardware import DeviceSpec, Hardware, Host, HostLink

Sharing = Literal["fair", "static", "none"]

CHECK_SECONDS = 0.25
"""How long a checked copy takes at the asked rate: long beside a hand-off between threads."""
LARGEST_CHECK = 256 << 20
SMALLEST_CHECK = 1 << 20
TOLERANCE = 0.05

REPEATS = 5
COPY_BYTES = 256 << 20
SMALL_BYTES = 4096
SHARED_BELOW = 0.8
"""Two devices that copy at once share a link where each gets less than this part of what it gets alone."""
SLACK = 0.02
"""Part of a GPU's memory that its allocator may lose to rounding and fragments."""
NCCL_BYTES = 512 << 20
"""What NCCL takes per GPU for its channels once there are peers (0.3 to 1 GiB have been reported)."""


@dataclass(frozen=True)
class LinkCheck:
    """A copy over a host link: what the rate says it takes, and what it took."""

    device: int
    direction: Literal["h2d", "d2h"]
    expected_seconds: float
    measured_seconds: float

    @property
    def error(self) -> float:
        """How much longer than expected, as a share; negative where shorter."""
        return self.measured_seconds / self.expected_seconds - 1


# ---- virtual


def virtual_hardware(
    num_devices: int,
    memory_bytes: int,
    *,
    h2d_bytes_per_second: float,
    d2h_bytes_per_second: float,
    latency_seconds: float = 0.0,
    sharing: Sharing = "none",
    peer_bytes_per_second: float | None = None,
    compute_scales: Sequence[float] = (1.0,),
    reserved_bytes: int = 0,
    host_memory_bytes: int | None = None,
    pinnable_bytes: int | None = None,
    update_workers: int | None = None,
    name: str = "virtual",
) -> Hardware:
    """Virtual devices on one host link, as asked for.

    compute_scales: one for all devices, or one each. Host memory is this machine's where it is not given.
    Raises HarmonyError where a figure cannot be true.
    """
    scales = tuple(compute_scales) * (num_devices if len(compute_scales) == 1 else 1)
    if len(scales) != num_devices:
        raise HarmonyError(
            f"--compute-scale: {len(scales)} figures for {num_devices} devices; give one, or one each"
        )
    host_bytes = psutil.virtual_memory().total if host_memory_bytes is None else host_memory_bytes
    hardware = Hardware(
        tuple(
            DeviceSpec(f"virtual{i}", memory_bytes, reserved_bytes, scale) for i, scale in enumerate(scales)
        ),
        (HostLink(h2d_bytes_per_second, d2h_bytes_per_second, latency_seconds, sharing),),
        Host(
            host_bytes,
            host_bytes if pinnable_bytes is None else pinnable_bytes,
            update_workers or max(1, min(num_devices, os.cpu_count() or 1)),
        ),
        name,
        peer_bytes_per_second,
    )
    contract.check(hardware)
    return hardware


def check_links(hardware: Hardware) -> list[LinkCheck]:
    """Copy over every virtual link in both directions at once, and time it.

    Devices copy at once too, as they do in a run, except where they share a rate: that is divided by the host
    store, which there is none of here.
    """
    count = len(hardware.devices)
    shared = any(link.sharing == "fair" for link in hardware.host_links)
    found: list[LinkCheck] = []
    for devices in [[i] for i in range(count)] if shared else [list(range(count))]:
        _at_once([_copier(hardware, device, way, found) for device in devices for way in (0, 1)])
    return sorted(found, key=lambda check: (check.device, check.direction == "d2h"))


def _copier(hardware: Hardware, index: int, way: int, found: list[LinkCheck]) -> Callable[[], None]:
    link = hardware.host_links[hardware.devices[index].host_link]
    rate = (link.h2d_bytes_per_second, link.d2h_bytes_per_second)[way]
    if link.sharing == "static":
        rate /= sum(d.host_link == hardware.devices[index].host_link for d in hardware.devices)
    nbytes = int(min(max(rate * CHECK_SECONDS, SMALLEST_CHECK), LARGEST_CHECK))
    device = VirtualDevice(index, hardware, len(hardware.devices), None, paced=True)
    # written to once, so that the copy does not pay for pages that are not there yet
    source, target = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    direction: Literal["h2d", "d2h"] = "h2d" if way == 0 else "d2h"

    def copy() -> None:
        started = time.perf_counter()
        device.copy([(target, source)], direction, started)
        seconds = time.perf_counter() - started
        found.append(LinkCheck(index, direction, nbytes / rate + link.latency_seconds, seconds))

    return copy


def _at_once(work: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=item) for item in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ---- cuda


def cuda_hardware(num_devices: int | None = None, name: str = "") -> Hardware:
    """The GPUs of this machine: memory, rates and speeds as they measure now. Raises HarmonyError without a GPU."""
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = present if num_devices is None else num_devices
    if not 1 <= count <= present:
        raise HarmonyError(f"--device cuda: {max(count, 1)} GPUs are asked for, torch sees {present} here")
    devices = [torch.device("cuda", i) for i in range(count)]
    alone = [(_rate(d, "h2d"), _rate(d, "d2h")) for d in devices]
    links = _link_of_each(devices, [h2d for h2d, _ in alone])
    speeds = [_matmul_speed(d) for d in devices]
    memory = psutil.virtual_memory()
    hardware = Hardware(
        tuple(
            DeviceSpec(
                torch.cuda.get_device_name(d),
                torch.cuda.get_device_properties(d).total_memory,
                _reserved_bytes(d, count),
                # the profile is of the first GPU
                1.0
                if torch.cuda.get_device_name(d) == torch.cuda.get_device_name(0)
                else speeds[i] / speeds[0],
                links[i],
            )
            for i, d in enumerate(devices)
        ),
        tuple(
            HostLink(
                *alone[links.index(link)],
                _latency(devices[links.index(link)]),
                "fair" if links.count(link) > 1 else "none",
            )
            for link in sorted(set(links))
        ),
        # pinned pages cannot be swapped out: no more than is free now
        Host(memory.total, available_bytes(), max(1, min(count, psutil.cpu_count(logical=False) or 1))),
        name or f"{count} x {torch.cuda.get_device_name(0)}",
        _peer_rates(devices),
    )
    contract.check(hardware)
    return hardware


def _reserved_bytes(device: torch.device, count: int) -> int:
    """What the CUDA context takes (measured), what NCCL will take, and what the allocator may lose."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    taken = total - free - torch.cuda.memory_reserved(device)
    return taken + int(SLACK * total) + (NCCL_BYTES if count > 1 else 0)


def _pair(device: torch.device, direction: str, nbytes: int) -> tuple[Tensor, Tensor]:
    """(target, source) of a copy between pinned memory and a device."""
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    gpu = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    return (gpu, host) if direction == "h2d" else (host, gpu)


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Median by the device's clock, after a warm-up."""
    times: list[float] = []
    with torch.cuda.device(device):
        for _ in range(REPEATS + 1):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
    return median(times[1:])


def _copy_seconds(device: torch.device, target: Tensor, source: Tensor) -> float:
    return _seconds(device, lambda: target.copy_(source, non_blocking=True))


def _rate(device: torch.device, direction: str) -> float:
    """Bytes per second of a large copy, its latency taken out."""
    large = _copy_seconds(device, *_pair(device, direction, COPY_BYTES))
    return COPY_BYTES / max(large - _latency(device), 1e-9)


def _latency(device: torch.device) -> float:
    return _copy_seconds(device, *_pair(device, "h2d", SMALL_BYTES))


def _link_of_each(devices: Sequence[torch.device], alone: Sequence[float]) -> list[int]:
    """The number of each device's host link: two that slow each other down are on the same."""
    links = list(range(len(devices)))
    for a, b in combinations(range(len(devices)), 2):
        if links[a] != links[b]:
            together = _rates_together(devices[a], devices[b])
            if max(together[0] / alone[a], together[1] / alone[b]) < SHARED_BELOW:
                links = [links[a] if link == links[b] else link for link in links]
    numbers = {link: i for i, link in enumerate(dict.fromkeys(links))}
    return [numbers[link] for link in links]


def _rates_together(a: torch.device, b: torch.device) -> tuple[float, float]:
    """Bytes per second into two devices that copy at once."""
    rates: dict[torch.device, float] = {}

    def measure(device: torch.device, target: Tensor, source: Tensor) -> None:
        rates[device] = COPY_BYTES / _copy_seconds(device, target, source)

    _at_once([partial(measure, device, *_pair(device, "h2d", COPY_BYTES)) for device in (a, b)])
    return rates[a], rates[b]


def _matmul_speed(device: torch.device) -> float:
    """Products per second, to compare GPUs of different kinds."""
    matrix = torch.ones(4096, 4096, dtype=torch.float16, device=device)
    return 1 / _seconds(device, lambda: matrix @ matrix)


def _peer_rates(devices: Sequence[torch.device]) -> tuple[tuple[float, ...], ...] | None:
    """Bytes per second from device to device; None where none reaches another but through the host."""
    if not any(torch.cuda.can_device_access_peer(a, b) for a in devices for b in devices if a != b):
        return None
    return tuple(tuple(0.0 if a == b else _peer_rate(a, b) for b in devices) for a in devices)


def _peer_rate(source: torch.device, target: torch.device) -> float:
    sent = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=source)
    received = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=target)
    return COPY_BYTES / _copy_seconds(source, received, sent)
