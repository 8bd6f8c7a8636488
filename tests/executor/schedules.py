"""Schedules of small models for tests: packs of one layer, lowered with made-up costs."""

from __future__ import annotations

import msgspec
import torch

from executor.decompose import decompose
from executor.options import RunOptions
from executor.structure import structure
from planner.contract.hardware import DeviceSpec, Hardware, Host, HostLink
from planner.contract.profile import BackwardCost, ForwardCost, model_hash
from planner.contract.rules import Rules
from planner.contract.schedule import (
    BackwardPack,
    Configuration,
    DevicePrediction,
    ForwardPack,
    Microbatches,
    PlannedFor,
    Predicted,
    Programs,
    Schedule,
    print_program,
)
from planner.lower import lower

MiB = 1 << 20
FOUR = ((0, 2), (2, 4), (4, 6), (6, 8))


def make_schedule(options: RunOptions, num_devices: int = 2) -> Schedule:
    workload = options.load()
    decomposition = decompose(workload, workload.draw(torch.Generator().manual_seed(0), 2), check=False)
    profile = structure(decomposition, options.model, options.recipe)
    count = len(profile.layers)
    configuration = Configuration(
        "pp",
        num_devices,
        8,
        Microbatches(FOUR, FOUR),
        tuple(ForwardPack(i, i, i % num_devices) for i in range(count - 1)),
        tuple(BackwardPack(i, i, i % num_devices) for i in range(count)),
    )
    costs = {"forward": (ForwardCost(8, 1e-4, MiB),), "backward": (BackwardCost(8, 1e-4, MiB, 1000),)}
    layers = tuple(msgspec.structs.replace(layer, **costs) for layer in profile.layers)
    rules = Rules(msgspec.structs.replace(profile, layers=layers), configuration)
    return Schedule(
        PlannedFor(profile.model, model_hash(profile), profile.dtype, profile.optimizer),
        make_hardware(MiB, num_devices),
        configuration,
        Predicted(1.0, 1.0, 1, (DevicePrediction(1, 1, 1),) * num_devices),
        Programs(print_program(lower(rules, [64 * MiB] * num_devices))),
    )


def make_hardware(memory_bytes: int, count: int) -> Hardware:
    devices = tuple(DeviceSpec(f"v{i}", memory_bytes) for i in range(count))
    return Hardware(devices, (HostLink(1e9, 1e9),), Host(1 << 34, 1 << 34))
