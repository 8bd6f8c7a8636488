"""Hardware (`harmony-hardware/1`): the devices, links and host of one server."""

from __future__ import annotations

from typing import Literal

from planner.contract.errors import FormatError
from planner.contract.profile import MAX_BYTES, MAX_SECONDS, Noun

SCHEMA = "harmony-hardware/1"

RATES = (1.0, 1e18)
SCALES = (1e-6, 1e6)
"""Figures beyond these are no hardware's; sums of them would not be exact, or not finite."""


class DeviceSpec(Noun):
    """One GPU. reserved_bytes: context and allocator slack, not for the plan.

    compute_scale: speed relative to the profile's device (0.5 takes twice the profiled seconds).
    """

    name: str
    memory_bytes: int
    reserved_bytes: int = 0
    compute_scale: float = 1.0
    host_link: int = 0


class HostLink(Noun):
    """A link between host and devices, each direction with a rate of its own.

    sharing: `fair` the devices busy at the moment share the rate, `static` each has the rate divided by
    the number of its devices that the plan uses, `none` each has the whole rate.
    """

    h2d_bytes_per_second: float
    d2h_bytes_per_second: float
    latency_seconds: float = 0.0
    sharing: Literal["fair", "static", "none"] = "none"


class Host(Noun):
    """Host memory, how much of it can be pinned, and how many updates run at once at the profiled speed."""

    memory_bytes: int
    pinnable_bytes: int
    update_workers: int = 1


class Hardware(Noun):
    """A server. peer_bytes_per_second: one rate, a matrix [from][to], or None: through the host.

    network_bytes_per_second: of its network to others like it, each way; None where it trains alone.
    """

    devices: tuple[DeviceSpec, ...]
    host_links: tuple[HostLink, ...]
    host: Host
    name: str = ""
    peer_bytes_per_second: float | tuple[tuple[float, ...], ...] | None = None
    network_bytes_per_second: float | None = None
    schema: str = SCHEMA


def budget_bytes(device: DeviceSpec) -> int:
    """What a plan may use of a device."""
    return device.memory_bytes - device.reserved_bytes


def peer_rate(hardware: Hardware, src: int, dst: int) -> float | None:
    """Bytes per second from device src to device dst; None where the bytes go through the host."""
    rate = hardware.peer_bytes_per_second
    return rate[src][dst] if isinstance(rate, tuple) else rate


def check(hardware: Hardware) -> None:
    """Raise FormatError, with the place, where a figure cannot be true."""
    if not hardware.devices:
        raise FormatError("$.devices: a server needs at least one device, this one has 0")
    for i, device in enumerate(hardware.devices):
        if not 0 <= device.host_link < len(hardware.host_links):
            raise FormatError(
                f"$.devices[{i}].host_link: {device.host_link}; there are {len(hardware.host_links)} links"
            )
        if device.reserved_bytes < 0:
            raise FormatError(
                f"$.devices[{i}].reserved_bytes: {device.reserved_bytes}; sizes are never negative"
            )
        if budget_bytes(device) <= 0:
            raise FormatError(
                f"$.devices[{i}]: {device.memory_bytes} bytes of which {device.reserved_bytes} reserved leave nothing"
            )
        if device.memory_bytes > MAX_BYTES:
            raise FormatError(f"$.devices[{i}].memory_bytes: {device.memory_bytes}; at most {MAX_BYTES}")
        if not SCALES[0] <= device.compute_scale <= SCALES[1]:
            raise FormatError(
                f"$.devices[{i}].compute_scale: {device.compute_scale}; a speed is from {SCALES[0]:g} to {SCALES[1]:g}"
            )
    for i, link in enumerate(hardware.host_links):
        for rate in (link.h2d_bytes_per_second, link.d2h_bytes_per_second):
            if not RATES[0] <= rate <= RATES[1]:
                raise FormatError(
                    f"$.host_links[{i}]: {rate} bytes per second; a rate is from {RATES[0]:g} to {RATES[1]:g}"
                )
        if not 0 <= link.latency_seconds <= MAX_SECONDS:
            raise FormatError(
                f"$.host_links[{i}].latency_seconds: {link.latency_seconds}; a latency is from 0 to {MAX_SECONDS:g}"
            )
    peers = hardware.peer_bytes_per_second
    count = len(hardware.devices)
    if isinstance(peers, tuple) and (len(peers) != count or any(len(row) != count for row in peers)):
        raise FormatError(f"$.peer_bytes_per_second: the matrix must be {count} x {count}, one row a device")
    rates = (
        [peers]
        if isinstance(peers, float)
        else [r for i, row in enumerate(peers or ()) for j, r in enumerate(row) if i != j]
    )
    for rate in rates:
        if not RATES[0] <= rate <= RATES[1]:
            raise FormatError(
                f"$.peer_bytes_per_second: {rate}; a rate is from {RATES[0]:g} to {RATES[1]:g}, null means through the host"
            )
    network = hardware.network_bytes_per_second
    if network is not None and not RATES[0] <= network <= RATES[1]:
        raise FormatError(
            f"$.network_bytes_per_second: {network}; a rate is from {RATES[0]:g} to {RATES[1]:g}, null means no network"
        )
    for name, least in (("memory_bytes", 1), ("pinnable_bytes", 0), ("update_workers", 1)):
        if not least <= getattr(hardware.host, name) <= MAX_BYTES:
            raise FormatError(f"$.host.{name}: {getattr(hardware.host, name)}; from {least} to {MAX_BYTES}")
