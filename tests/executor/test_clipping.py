"""Clipping by global norm: updates wait for all gradients, and the numbers are torch.nn.utils.clip_grad_norm_'s."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from executor.launch import run_schedule
from executor.load import load
from executor.optimizer import LayerOptimizer, clip_coefficient, recipe
from executor.options import RunOptions
from executor.reference import train
from planner.contract.errors import FormatError
from planner.contract.fixed import Fixed
from planner.contract.profile import Profile
from planner.contract.schedule import Schedule
from planner.contract.verify import verify
from planner.search import plan_fixed
from tests.executor.test_any_model import (
    LR,
    MINIBATCH,
    STEPS,
    check_equals,
    make_hardware,
    profiled,
    run_here,
)

UNTIED = "hf:gpt2?n_layer=2&n_embd=16&n_head=2&vocab_size=40&seq=8&tie_word_embeddings=False"
CLIP = 0.3
"""Below every norm of these steps, so that all of them are clipped."""


def make_options(**changes: Any) -> RunOptions:
    options = RunOptions(UNTIED, steps=STEPS, settings={"lr": LR}, paced=False, clip_norm=CLIP)
    return replace(options, **changes)


def make_schedule(profile: Profile, devices: int, replicas: int = 1, clip: bool = True) -> Schedule:
    num_layers = len(profile.layers)
    fixed = Fixed(2, 2, (1,) * (num_layers - 1), (1,) * num_layers, replicas)
    schedule = plan_fixed(profile, make_hardware(devices), fixed, minibatch=MINIBATCH, clip=clip).schedule
    assert schedule is not None
    verify(schedule, profile, schedule.hardware)
    return schedule


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profiled(make_options())


@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_one_device_is_bit_equal_to_plain_pytorch(profile: Profile, dtype: str) -> None:
    options = make_options(dtype=dtype)
    schedule = make_schedule(profiled(options) if dtype else profile, 1)
    losses, weights, decomposition = run_here(schedule, options)
    samples = schedule.configuration.microbatches.backward
    plain = train(options.load(), options, samples, decomposition=decomposition)
    check_equals(losses, weights, plain, lambda name: False, 0)
    unclipped = train(options.load(), replace(options, clip_norm=None), samples, decomposition=decomposition)
    assert plain.losses[1:] != unclipped.losses[1:]


@pytest.mark.parametrize(("devices", "replicas"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_several_devices_agree_on_one_norm(profile: Profile, devices: int, replicas: int) -> None:
    options = make_options()
    schedule = make_schedule(profile, devices, replicas)
    trace = run_schedule(schedule, options)
    plain = train(options.load(), options, schedule.configuration.microbatches.backward)
    if replicas == 1:
        assert trace.losses == plain.losses
    assert trace.losses == pytest.approx(plain.losses, rel=1e-5)


def test_tied_gradients_count_as_their_sum() -> None:
    options = make_options(model=UNTIED.replace("&tie_word_embeddings=False", ""))
    schedule = make_schedule(profiled(options), 1)
    losses, weights, decomposition = run_here(schedule, options)
    assert decomposition.ties
    plain = train(options.load(), options, schedule.configuration.microbatches.backward)
    check_equals(losses, weights, plain, lambda name: True, 1e-6)


@pytest.mark.parametrize("max_norm", [0.5, 50.0])
def test_norm_and_coefficient_are_torch_s(max_norm: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weights: list[dict[str, Tensor]] = [
        {name: torch.randn(7, 5, generator=generator) for name in names} for names in ("ab", "c")
    ]
    gradients = [{n: torch.randn(7, 5, generator=generator) for n in layer} for layer in weights]
    touched = [{n: torch.ones((), dtype=torch.bool) for n in layer} for layer in weights]
    optimizer = LayerOptimizer(
        recipe("sgd", {"lr": 1.0}), weights, gradients, {name: {} for name in "abc"}, touched=touched
    )
    parameters = {n: torch.nn.Parameter(t.clone()) for layer in weights for n, t in layer.items()}
    for layer in gradients:
        for name, gradient in layer.items():
            parameters[name].grad = gradient.clone()
    order = ["c", "a", "b"]
    expected = torch.nn.utils.clip_grad_norm_([parameters[name] for name in order], max_norm)
    norm = optimizer.norm(order)
    assert torch.equal(norm, expected)
    optimizer.step_layers([0, 1], scale=clip_coefficient(norm, max_norm))
    torch.optim.SGD(parameters.values(), lr=1.0, fused=True).step()
    for layer in weights:
        for name, tensor in layer.items():
            assert torch.equal(tensor, parameters[name]), name


def test_schedule_and_run_must_both_clip_or_neither(profile: Profile) -> None:
    with pytest.raises(FormatError, match=r"--clip-norm 0.3: .* plan with --clip"):
        run_schedule(make_schedule(profile, 1, clip=False), make_options())
    with pytest.raises(FormatError, match="--clip-norm is missing: the schedule was planned with --clip"):
        run_schedule(make_schedule(profile, 1), make_options(clip_norm=None))


def test_norms_are_measured(profile: Profile) -> None:
    _, decomposition, _ = load(make_options(), check=False)
    assert len(profile.layers) == len(decomposition.layers)
    for layer in profile.layers:
        if layer.gradient_bytes:
            assert layer.update.norm_seconds is not None
            assert layer.update.norm_seconds > 0
