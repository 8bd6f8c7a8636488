"""Hardware (`harmony-hardware/1`): the devices, links and host of one server."""

from __future__ import annotations

from typing import Literal

from planner.contract.errors import FormatError
from planner.contract.profile import Noun

SCHEMA = "harmony-hardware/1"


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
    """A server. peer_bytes_per_second: one rate, a matrix [from][to], or None: through the host."""

    devices: tuple[DeviceSpec, ...]
    host_links: tuple[HostLink, ...]
    host: Host
    name: str = ""
    peer_bytes_per_second: float | tuple[tuple[float, ...], ...] | None = None
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
        if not 0 < device.compute_scale < float("inf"):
            raise FormatError(f"$.devices[{i}].compute_scale: {device.compute_scale}; a speed is above 0")
    for i, link in enumerate(hardware.host_links):
        for rate in (link.h2d_bytes_per_second, link.d2h_bytes_per_second):
            if not 0 < rate < float("inf"):
                raise FormatError(f"$.host_links[{i}]: {rate} bytes per second; a rate is finite and above 0")
        if not 0 <= link.latency_seconds < float("inf"):
            raise FormatError(
                f"$.host_links[{i}].latency_seconds: {link.latency_seconds}; a latency is 0 or more"
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
    if not all(0 < rate < float("inf") for rate in rates):
        raise FormatError(
            "$.peer_bytes_per_second: a rate is finite and above 0; null means through the host"
        )
    if hardware.host.update_workers < 1 or hardware.host.memory_bytes <= 0:
        raise FormatError("$.host: memory_bytes and update_workers must be at least 1")
