"""bfloat16 with float32 masters: bit-equal to plain PyTorch that does the same, and small steps are not lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor.checkpoint import Checkpoints
from executor.launch import run_schedule
from executor.load import load
from executor.optimizer import MASTER
from executor.options import RunOptions
from executor.reference import train
from planner.contract.schedule import Schedule
from tests.executor.test_any_model import LR, STEPS, check_equals, each_layer_alone, run_here

GPT2 = "hf:gpt2?n_layer=2&n_embd=32&n_head=2&vocab_size=64&n_positions=16&seq=16"


def make_options(spec: str = GPT2, **changes: float) -> RunOptions:
    settings = {"lr": LR, "weight_decay": 0.1} | changes
    return RunOptions(spec, steps=STEPS, settings=settings, paced=False, dtype="bfloat16")


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return each_layer_alone(make_options(f"{GPT2}&tie_word_embeddings=False"), 1)


def test_sizes_are_those_of_bfloat16_with_masters(schedule: Schedule) -> None:
    assert schedule.profile.dtype == "bfloat16"
    # the batch is of token numbers, everything else halves: 2 bytes a weight, 4 + 4 + 4 of state
    options = make_options(f"{GPT2}&tie_word_embeddings=False")
    _, _, profile = load(options, check=False)
    _, _, wide = load(replace(options, dtype=""), check=False)
    block, as_float = profile.layers[1], wide.layers[1]
    assert block.weight_bytes < 0.6 * as_float.weight_bytes
    assert block.gradient_bytes < 0.6 * as_float.gradient_bytes
    assert block.optimizer_state_bytes > 1.4 * as_float.optimizer_state_bytes


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_one_device_is_bit_equal_to_plain_pytorch(schedule: Schedule, optimizer: str) -> None:
    options = make_options(f"{GPT2}&tie_word_embeddings=False")
    if optimizer == "sgd":
        options = replace(options, optimizer="sgd", settings={"lr": LR, "momentum": 0.9})
        schedule = each_layer_alone(options, 1)
    losses, weights, decomposition = run_here(schedule, options)
    plain = train(
        options.load(), options, schedule.configuration.microbatches.backward, decomposition=decomposition
    )
    assert next(iter(plain.parameters.values())).dtype is torch.bfloat16
    check_equals(losses, weights, plain, lambda name: False, rel=0.0)


@pytest.mark.slow
def test_two_devices_and_tied_weights_are_close_to_plain_pytorch() -> None:
    options = make_options()
    schedule = each_layer_alone(options, 2)
    trace = run_schedule(schedule, options)
    plain = train(options.load(), options, schedule.configuration.microbatches.backward)
    assert trace.losses == pytest.approx(plain.losses, rel=1e-3)


def test_steps_below_the_weights_precision_add_up(schedule: Schedule, tmp_path: Path) -> None:
    """Without a master every one of them would be rounded away."""
    options = make_options(f"{GPT2}&tie_word_embeddings=False", lr=2e-6, weight_decay=0.0)
    options = replace(options, steps=4, checkpoints=Checkpoints(tmp_path / "checkpoints"))
    run_schedule(schedule, options)
    folder = tmp_path / "checkpoints" / "step-00000004"
    first = options.load().model.state_dict()
    name = "transformer.h.0.mlp.c_fc.weight"
    states = {k: v for file in folder.glob("optimizer-*") for k, v in load_file(file).items()}
    weights = {k: v for file in folder.glob("model-*") for k, v in load_file(file).items()}
    moved = (states[f"{name}/{MASTER}"] - first[name].float()).abs()
    assert moved.max() == pytest.approx(4 * 2e-6, rel=0.2)
    assert torch.equal(weights[name], states[f"{name}/{MASTER}"].bfloat16())
    assert (weights[name] == first[name]).float().mean() > 0.9, "the steps are below most weights' precision"


def test_a_resumed_run_goes_on_from_its_masters(schedule: Schedule, tmp_path: Path) -> None:
    options = make_options(f"{GPT2}&tie_word_embeddings=False")
    whole = run_schedule(schedule, options, weights_out=tmp_path / "whole")
    saving = replace(options, checkpoints=Checkpoints(tmp_path / "checkpoints"))
    run_schedule(schedule, replace(saving, steps=1))
    rest = run_schedule(schedule, saving, weights_out=tmp_path / "resumed", resume=True)
    assert rest.losses == whole.losses[1:]
    expected, found = load_file(tmp_path / "whole"), load_file(tmp_path / "resumed")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_weights_of_more_bits_are_rounded(schedule: Schedule, tmp_path: Path) -> None:
    options = make_options(f"{GPT2}&tie_word_embeddings=False")
    wide = {k: v.float() + 1e-6 for k, v in options.load().model.state_dict().items()}
    save_file(wide, tmp_path / "wide.safetensors")
    once = replace(options, steps=1)
    ours = run_schedule(schedule, replace(once, weights=tmp_path / "wide.safetensors"))
    narrow = {k: v.bfloat16() for k, v in wide.items()}
    save_file(narrow, tmp_path / "narrow.safetensors")
    theirs = run_schedule(schedule, replace(once, weights=tmp_path / "narrow.safetensors"))
    assert ours.losses == theirs.losses
