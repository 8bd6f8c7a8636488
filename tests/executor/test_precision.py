"""bfloat16 with float32 masters: bit-equal to plain PyTorch that does the same, and small steps are not lost."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from executor import reference, scaling
from executor.checkpoint import Checkpoints
from executor.launch import run_schedule
from executor.load import load
from executor.optimizer import MASTER
from executor.options import RunOptions
from executor.reference import train
from planner.contract.errors import FormatError
from planner.contract.schedule import Schedule
from planner.contract.verify import check_belongs
from tests.executor.test_any_model import LR, SPECS, STEPS, check_equals, each_layer_alone, run_here

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


# ---- float16: losses are scaled, and a step whose gradients overflow is skipped


def make_half(**changes: Any) -> RunOptions:
    options = make_options(f"{GPT2}&tie_word_embeddings=False")
    return replace(options, dtype="float16", steps=6, **changes)


@pytest.fixture(scope="module")
def half_schedule() -> Schedule:
    schedule = each_layer_alone(make_half(), 1)
    assert schedule.configuration.agree, "updates wait whether any gradient overflowed"
    return schedule


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("initial", [65536.0, 2.0**40])
def test_float16_is_bit_equal_to_plain_pytorch_with_torch_s_scaler(
    half_schedule: Schedule, initial: float, clip_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 16. From a scale that overflows for many steps, steps are skipped until it is low enough."""
    monkeypatch.setattr(scaling, "INITIAL", initial)
    monkeypatch.setattr(scaling, "GROWTH_INTERVAL", 2)
    monkeypatch.setattr(
        reference, "GradScaler", partial(torch.amp.GradScaler, init_scale=initial, growth_interval=2)
    )
    options = make_half(clip_norm=clip_norm)
    losses, weights, decomposition = run_here(half_schedule, options)
    samples = half_schedule.configuration.microbatches.backward
    plain = train(options.load(), options, samples, decomposition=decomposition)
    assert losses == list(plain.losses)
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain.parameters.items())
    before = options.load().model.state_dict()
    is_moved = [not torch.equal(weights[name], before[name]) for name in plain.parameters]
    assert any(is_moved) == (initial == 65536.0), "every step of six is skipped from 2^40"


def test_skipped_steps_and_experts_that_no_token_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what a skipped step touched nor what it did not may be remembered in the next one."""
    initial = 2.0**21
    monkeypatch.setattr(scaling, "INITIAL", initial)
    monkeypatch.setattr(reference, "GradScaler", partial(torch.amp.GradScaler, init_scale=initial))
    options = replace(make_half(), model=SPECS["experts by data"], steps=8)
    schedule = each_layer_alone(options, 1)
    losses, weights, decomposition = run_here(schedule, options)
    samples = schedule.configuration.microbatches.backward
    plain = train(options.load(), options, samples, decomposition=decomposition)
    assert losses == list(plain.losses)
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain.parameters.items())
    before = options.load().model.state_dict()
    experts = [name for name in plain.parameters if "experts" in name]
    is_moved = [not torch.equal(weights[name], before[name]) for name in experts]
    assert any(is_moved)
    assert not all(is_moved), "no token chose some expert"
    # the first steps were skipped: the same run with fewer steps moves nothing
    _, early, _ = run_here(schedule, replace(options, steps=2))
    assert all(torch.equal(early[name], before[name]) for name in plain.parameters)


def test_scale_follows_torch_s_rule() -> None:
    state = torch.empty(3)
    scaling.reset(state)
    assert scaling.agree(state, float("nan")) == 0.0
    assert state.tolist() == [32768.0, 0.0, 1.0]
    assert scaling.agree(state, 5.0) == 1 / 32768
    assert state.tolist() == [32768.0, 1.0, 0.0]
    for _ in range(scaling.GROWTH_INTERVAL - 1):
        scaling.agree(state, 5.0)
    assert state.tolist() == [65536.0, 0.0, 0.0]


def test_a_resumed_run_goes_on_with_its_scale(half_schedule: Schedule, tmp_path: Path) -> None:
    options = make_half()
    whole = run_schedule(half_schedule, options)
    saving = replace(options, checkpoints=Checkpoints(tmp_path / "checkpoints", 1))
    run_schedule(half_schedule, replace(saving, steps=3))
    record = json.loads((tmp_path / "checkpoints" / "step-00000003" / "run.json").read_text())
    assert record["scaling"][0] <= 65536.0
    rest = run_schedule(half_schedule, saving, resume=True)
    assert rest.losses == whole.losses[3:]


def test_float16_without_an_agreement_is_refused(half_schedule: Schedule) -> None:
    configuration = msgspec.structs.replace(half_schedule.configuration, agree=False)
    _, _, profile = load(make_half(), check=False)
    with pytest.raises(FormatError, match=r"\$.configuration.agree: false, but float16 gradients overflow"):
        check_belongs(
            msgspec.structs.replace(half_schedule, configuration=configuration),
            profile,
            half_schedule.hardware,
        )
