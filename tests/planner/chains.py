"""Random chains of layers and servers: the instances that search, lowering and simulator are tested on."""

from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec
import pytest

from planner.contract import store
from planner.contract.hardware import DeviceSpec, Hardware, Host, HostLink
from planner.contract.profile import (
    BackwardCost,
    Device,
    Edge,
    ForwardCost,
    Layer,
    Model,
    Profile,
    UpdateCost,
)

REFERENCE = Path(__file__).parents[3] / "shared" / "reference"
"""Measured profiles of four networks, where they are at hand."""

MB = 10**6


def reference_case(profile: str, hardware: str) -> tuple[Profile, Hardware]:
    """A measured profile and its server; skips, with a reason, where the folder is absent."""
    if not REFERENCE.is_dir():
        pytest.skip(f"no reference profiles at {REFERENCE.name}/")
    return (
        store.load_profile(REFERENCE / "profiles" / f"{profile}.json"),
        store.load_hardware(REFERENCE / "hardware" / f"{hardware}.json"),
    )


def random_chain(random: Random, num_layers: int, skips: int = 0) -> Profile:
    """Layers of 1 to 5 MB that take milliseconds, measured with 1, 2 and 4 samples; some tensors skip layers."""
    sizes = (1, 2, 4)
    layers = []
    outputs = [random.randint(1, 3) * MB // 10 for _ in range(num_layers)]
    for i in range(num_layers):
        weights = random.randint(1, 5) * MB
        forward, backward = random.uniform(1e-3, 5e-3), random.uniform(2e-3, 1e-2)
        exchanged = outputs[i] + (outputs[i - 1] if i else 0)
        saved = random.randint(1, 4) * MB // 10 + outputs[i]
        layers.append(
            Layer(
                name=f"layer.{i}",
                weight_bytes=weights,
                gradient_bytes=weights,
                optimizer_state_bytes=2 * weights,
                forward=tuple(ForwardCost(n, forward * n**0.9, weights + n * exchanged) for n in sizes),
                backward=tuple(
                    BackwardCost(n, backward * n**0.9, 2 * weights + n * (2 * exchanged + saved), n * saved)
                    for n in sizes
                ),
                update=UpdateCost(random.uniform(1e-4, 2e-3)),
            )
        )
    edges = [Edge(-1, 0, bytes_per_sample=1000, differentiable=False)]
    edges += [Edge(i, i + 1, bytes_per_sample=outputs[i]) for i in range(num_layers - 1)]
    for _ in range(skips if num_layers > 2 else 0):
        src = random.randrange(num_layers - 2)
        edges.append(Edge(src, random.randrange(src + 2, num_layers), bytes_per_sample=outputs[src]))
    return Profile(
        model=Model("chain"),
        device=Device("test"),
        dtype="float32",
        optimizer="adam",
        layers=tuple(layers),
        edges=tuple(dict.fromkeys(edges)),
        target_bytes_per_sample=8,
    )


def updated_anywhere(profile: Profile) -> Profile:
    """The profile with updates on the device measured, too: ten times as fast as on the host."""
    layers = tuple(
        msgspec.structs.replace(
            layer, update=UpdateCost(layer.update.host_seconds, layer.update.host_seconds / 10)
        )
        for layer in profile.layers
    )
    return msgspec.structs.replace(profile, layers=layers)


def server(
    num_devices: int, memory_bytes: int = 60 * MB, rate: float = 2e9, peer: float | None = 4e9
) -> Hardware:
    """Equal devices behind one link that they share."""
    return Hardware(
        devices=tuple(DeviceSpec(f"gpu{d}", memory_bytes) for d in range(num_devices)),
        host_links=(HostLink(rate, rate, 1e-5, "static"),),
        host=Host(10**10, 10**10, num_devices),
        peer_bytes_per_second=peer,
    )
