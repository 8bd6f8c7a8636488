"""Several servers: replicas of a whole server, whose gradients are added over the network before updates.

Every server runs the same schedule on a minibatch of its own. As soon as a pack's gradients are in host memory, they
are added to those of the other servers, and then the optimizer steps: both are one update to the plan, so everything that
a plan knows of host updates (their order, what they wait for, that compute goes on meanwhile) holds for them. Where
updates wait for a norm over all gradients, all of them are added before that norm.

A ring moves each byte 2 (S - 1) / S times over each server's network (Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", JPDC 2009).
"""

from __future__ import annotations

import msgspec

from planner.contract.errors import HarmonyError
from planner.contract.hardware import Hardware
from planner.contract.profile import Layer, Profile


def over_servers(
    profile: Profile, hardware: Hardware, num_servers: int, num_devices: int, *, agree: bool
) -> Profile:
    """The profile with updates that take the network's time too; unchanged for one server.

    Devices that update at once have an equal part of the network each. agree: updates wait for the norm over all
    gradients. Raises HarmonyError where the hardware has no network, or a layer keeps statistics of its batches.
    """
    if num_servers == 1:
        return profile
    rate = hardware.network_bytes_per_second
    if rate is None:
        raise HarmonyError(
            f"{num_servers} servers: the hardware says no network_bytes_per_second between them; say --network RATE"
        )
    for i, layer in enumerate(profile.layers):
        if layer.batch_coupled and layer.buffer_bytes:
            raise HarmonyError(
                f"--nodes {num_servers}: layer {i} ({layer.name}) keeps statistics of its batches, and each server sees others; "
                f"plan for one server, or use a normalisation that keeps none"
            )
    at_once = 1 if agree else min(num_devices, hardware.host.update_workers)
    # bfloat16 gradients are added as float32
    widening = 2 if profile.dtype == "bfloat16" else 1
    seconds_per_byte = widening * 2 * (num_servers - 1) / num_servers * at_once / rate

    def with_network(layer: Layer) -> Layer:
        update, exchange = layer.update, layer.gradient_bytes * seconds_per_byte
        if agree:
            norm = update.host_seconds if update.norm_seconds is None else update.norm_seconds
            found = msgspec.structs.replace(update, norm_seconds=norm + exchange, device_seconds=None)
        else:
            found = msgspec.structs.replace(
                update, host_seconds=update.host_seconds + exchange, device_seconds=None
            )
        return msgspec.structs.replace(layer, update=found)

    return msgspec.structs.replace(profile, layers=tuple(map(with_network, profile.layers)))


def samples_of_each(minibatch: int, num_servers: int) -> int:
    """The samples that each server has of a minibatch. Raises HarmonyError where they do not divide."""
    if minibatch % num_servers:
        raise HarmonyError(
            f"--minibatch {minibatch}: does not divide by {num_servers} servers; use a multiple of {num_servers}"
        )
    return minibatch // num_servers
