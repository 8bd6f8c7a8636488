"""What one change of the server or of the request would do.

In: a request. Out: the iteration times of neighbouring requests, each planned anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from planner.contract.hardware import Hardware
from planner.contract.profile import Profile
from planner.search.search import plan

GIB = 1 << 30


@dataclass(frozen=True)
class Change:
    """One change of the request: its name, the hardware, minibatch and devices that it asks for."""

    name: str
    hardware: Hardware
    minibatch: int
    num_devices: int
    clip: bool = False


def changes(hardware: Hardware, minibatch: int, num_devices: int, clip: bool = False) -> list[Change]:
    """One more GiB a device, a link (and network) twice as fast, one more device like the last, a minibatch twice as
    large, and no clipping where gradients are clipped."""
    base = Change("", hardware, minibatch, num_devices, clip)
    devices = hardware.devices[:num_devices]
    more = tuple(msgspec.structs.replace(d, memory_bytes=d.memory_bytes + GIB) for d in devices)
    links = tuple(
        msgspec.structs.replace(
            link,
            h2d_bytes_per_second=2 * link.h2d_bytes_per_second,
            d2h_bytes_per_second=2 * link.d2h_bytes_per_second,
        )
        for link in hardware.host_links
    )
    found = [
        replace(
            base, name="1 GiB more on each device", hardware=msgspec.structs.replace(hardware, devices=more)
        ),
        replace(
            base,
            name="host links twice as fast",
            hardware=msgspec.structs.replace(hardware, host_links=links),
        ),
    ]
    network = hardware.network_bytes_per_second
    if network is not None:
        faster = msgspec.structs.replace(hardware, network_bytes_per_second=2 * network)
        found.append(replace(base, name="a network twice as fast", hardware=faster))
    if num_devices < len(hardware.devices):
        found.append(replace(base, name="one more device", num_devices=num_devices + 1))
    elif not isinstance(hardware.peer_bytes_per_second, tuple):
        last = hardware.devices[num_devices - 1]
        another = msgspec.structs.replace(last, name=f"gpu{num_devices}")
        wider = msgspec.structs.replace(hardware, devices=(*hardware.devices, another))
        found.append(replace(base, name="one more device", hardware=wider, num_devices=num_devices + 1))
    found.append(replace(base, name="a minibatch twice as large", minibatch=2 * minibatch))
    if clip:
        found.append(replace(base, name="no clipping by global norm", clip=False))
    return found


@dataclass(frozen=True)
class Answer:
    """What a change would do: iteration time and samples per second; None where the model would not fit."""

    change: str
    seconds: float | None
    samples_per_second: float | None


def what_if(
    profile: Profile,
    hardware: Hardware,
    minibatch: int,
    num_devices: int,
    time_limit_seconds: float | None,
    clip: bool = False,
    num_servers: int = 1,
) -> list[Answer]:
    """Plan every change of the request anew."""
    found = []
    if num_servers == 1:
        hardware = msgspec.structs.replace(hardware, network_bytes_per_second=None)
    for change in changes(hardware, minibatch, num_devices, clip):
        result = plan(
            profile,
            change.hardware,
            minibatch=change.minibatch,
            clip=change.clip,
            num_devices=change.num_devices,
            num_servers=num_servers,
            time_limit_seconds=time_limit_seconds,
        )
        if result.schedule is None:
            found.append(Answer(change.name, None, None))
        else:
            found.append(Answer(change.name, result.seconds, change.minibatch / result.seconds))
    return found
