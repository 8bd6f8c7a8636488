"""Resident packs: their devices update them, nothing of them moves, and they train as the host would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from executor.launch import run_schedule
from executor.options import RunOptions
from executor.profile import measure_profile
from executor.reference import train
from planner.contract.errors import FormatError
from planner.contract.fixed import Fixed
from planner.contract.hardware import DeviceSpec, Hardware, Host, HostLink
from planner.contract.schedule import Schedule
from planner.search import plan_fixed
from tests.executor.test_data_parallel import MODEL

LR = 1e-3
STEPS = 3
GPT = "hf:gpt2?n_layer=3&n_embd=32&n_head=2&vocab_size=64&n_positions=16&seq=8&tie_word_embeddings=false"


@pytest.fixture(scope="module")
def norms(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("resident") / "norms.py"
    path.write_text(MODEL)
    return f"{path}:make"


def make_options(spec: str, optimizer: str) -> RunOptions:
    return RunOptions(spec, steps=STEPS, optimizer=optimizer, settings={"lr": LR}, paced=False)


def make_schedule(options: RunOptions, fixed: Fixed, devices: int, minibatch: int = 8) -> Schedule:
    torch.set_num_threads(1)
    profile = measure_profile(
        options.load(),
        options.model,
        [1, 2],
        optimizer=options.optimizer,
        settings=options.settings,
        repeats=2,
    )
    hardware = Hardware(
        tuple(DeviceSpec(f"v{d}", 64 << 20) for d in range(devices)),
        (HostLink(1e9, 1e9),),
        Host(1 << 34, 1 << 34),
        peer_bytes_per_second=1e9,
    )
    schedule = plan_fixed(profile, hardware, fixed, minibatch=minibatch).schedule
    assert schedule is not None
    return schedule


@pytest.mark.parametrize(
    ("optimizer", "devices", "changes"),
    [
        ("adamw", 1, {"resident": (True, True, True), "kept": (4, 4, 0)}),
        ("sgd", 2, {"resident": (False, True, True), "kept": (1, 2, 0), "offloaded": (1, 0, 0)}),
    ],
)
def test_resident_packs_train_as_plain_pytorch(
    optimizer: str, devices: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    options = make_options(GPT, optimizer)
    fixed = Fixed(2, 2, (2, 2), (2, 2, 2), reflected=True, **changes)
    schedule = make_schedule(options, fixed, devices)
    trace = run_schedule(schedule, options, weights_out=tmp_path / "weights.safetensors")
    plain = train(options.load(), options, schedule.configuration.microbatches.backward)
    assert trace.losses == plain.losses
    weights = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain.parameters.items())
    for device, predicted in zip(trace.devices, schedule.predicted.devices, strict=True):
        assert device.peak_bytes <= predicted.peak_bytes
        # what a forward saves is planned with a margin
        slack = 0.02 if fixed.offloaded else 0.0
        assert predicted.swap_in_bytes * (1 - slack) <= device.swap_in_bytes <= predicted.swap_in_bytes
        assert predicted.swap_out_bytes * (1 - slack) <= device.swap_out_bytes <= predicted.swap_out_bytes
    if all(fixed.resident):
        assert trace.devices[0].swap_out_bytes == 0
        assert trace.devices[0].swap_in_bytes == 3 * 8 * 8 * 8  # ids in both phases and labels of 8 samples


def test_statistics_of_resident_layers_are_those_of_plain_pytorch(norms: str, tmp_path: Path) -> None:
    options = make_options(norms, "adamw")
    fixed = Fixed(2, 2, (2, 2), (2, 2, 2), reflected=True, resident=(True, False, True))
    schedule = make_schedule(options, fixed, 1)
    trace = run_schedule(schedule, options, weights_out=tmp_path / "weights.safetensors")
    model = options.load()
    plain = train(model, options, schedule.configuration.microbatches.backward)
    assert trace.losses == plain.losses
    weights = load_file(tmp_path / "weights.safetensors")
    statistics = dict(model.model.named_buffers())
    assert len(statistics) == 18
    for name, buffer in statistics.items():
        assert torch.equal(weights[name], buffer), name


def test_an_optimizer_with_tensors_on_the_side_is_not_planned_for_the_device() -> None:
    options = make_options(GPT, "rmsprop")
    with pytest.raises(FormatError, match=r"resident\[0\]: the profile has no device_seconds"):
        make_schedule(options, Fixed(2, 2, (2, 2), (2, 2, 2), reflected=True, resident=(True, True, True)), 1)
