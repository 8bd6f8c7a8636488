"""Batches of any shape: nested, with constants, with tensors that all samples share, padded or refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.models import load_workload
from executor.reference import train
from executor.workload import BatchError, Pad, Workload, flat
from tests.executor.test_any_model import (
    check_equals,
    each_layer_alone,
    make_options,
    run_here,
)

SELF = f"{__file__}:nested"
WIDTH = 6


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, given: tuple[Tensor, None], bias: Tensor, mask: Tensor, power: int) -> Tensor:
        x, nothing = given
        assert nothing is None
        for block in self.blocks:
            x = (functional.gelu(block(x)) + bias) * mask
        return x**power


def draw_nested(generator: torch.Generator, num_samples: int) -> Any:
    x = torch.randn(num_samples, WIDTH, generator=generator)
    mask = torch.rand(num_samples, WIDTH, generator=generator) > 0.3
    shared = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))
    return {"given": (x, None), "more": {"bias": shared, "mask": mask}, "power": 2, "flag": True}


def loss_of_nested(model: nn.Module, batch: Any) -> Tensor:
    assert batch["flag"] is True
    loss: Tensor = model(batch["given"], batch["more"]["bias"], batch["more"]["mask"], batch["power"]).mean()
    return loss


def nested() -> Workload:
    return Workload(Scaled(), draw_nested, loss_of_nested)


def drawing(draw: Any, pad: dict[str, Pad] | None = None) -> Workload:
    return flat(nn.Linear(1, 1), draw, lambda model, batch: model(batch).mean(), pad)


def test_nested_batch_has_flat_names_and_its_loss_gets_it_back() -> None:
    workload = load_workload(SELF, seed=0)
    batch = workload.draw(torch.Generator().manual_seed(0), 4)
    assert {name: tuple(t.shape) for name, t in batch.items()} == {
        "given.0": (4, WIDTH),
        "more.bias": (WIDTH,),
        "more.mask": (4, WIDTH),
    }
    assert workload.fixed == {"more.bias"}
    part = workload.samples(batch, 1, 3)
    assert torch.equal(part["given.0"], batch["given.0"][1:3])
    assert torch.equal(part["more.bias"], batch["more.bias"])
    assert workload.loss(workload.model, batch).isfinite()


def test_nested_batch_trains_as_plain_pytorch() -> None:
    options = make_options(SELF)
    schedule = each_layer_alone(options, 1)
    losses, weights, _ = run_here(schedule, options)
    plain = train(options.load(), options, schedule.configuration.microbatches.backward)
    check_equals(losses, weights, plain, lambda name: False, 0)


def test_samples_of_different_lengths_are_refused_with_both_shapes() -> None:
    lengths = iter([5, 5, 7])
    workload = drawing(lambda generator, n: {"x": torch.zeros(n, next(lengths))})
    with pytest.raises(
        BatchError,
        match=re.escape("batch x is [4, 7] torch.float32, the model was cut and profiled for [4, 5]"),
    ):
        workload.draw(torch.Generator(), 4)


def test_samples_of_different_lengths_are_padded_where_that_is_asked_for() -> None:
    lengths = iter([5, 6, 3])
    pad = {"x": Pad(-1, (8,))}
    workload = drawing(lambda generator, n: {"x": torch.zeros(n, next(lengths), dtype=torch.long)}, pad)
    batch = workload.draw(torch.Generator(), 2)
    assert batch["x"].tolist() == [[0] * 3 + [-1] * 5] * 2


REFUSED: dict[str, tuple[Any, dict[str, Pad], str]] = {
    "an object": (lambda g, n: {"x": torch.zeros(n), "y": object()}, {}, "batch y is a object; batches hold"),
    "no samples": (lambda g, n: {"x": torch.zeros(5)}, {}, "no tensor whose first dimension"),
    "samples elsewhere": (lambda g, n: torch.zeros(5, n), {}, "[5, 2] for 2 samples and [5, 3] for 3"),
    "parts that come and go": (
        lambda g, n: {"x": torch.zeros(n)} | ({"y": torch.zeros(n)} if n == 3 else {}),
        {},
        "batches differ in their parts: x and x, y",
    ),
    "padding of nothing": (lambda g, n: {"x": torch.zeros(n)}, {"z": Pad(0, ())}, "pad names z"),
    "padding too short": (
        lambda g, n: {"x": torch.zeros(n, 9)},
        {"x": Pad(0, (8,))},
        "samples of [9] cannot be padded to [8]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_batch_that_cannot_be_used_is_refused(case: str) -> None:
    draw, pad, message = REFUSED[case]
    with pytest.raises(BatchError, match=re.escape(message)):
        drawing(draw, pad)


@pytest.mark.parametrize(("first", "later"), [(2, 3), (True, 1), (None, 0), (1, 1.0)])
def test_constant_that_changes_is_refused(first: Any, later: Any) -> None:
    values = iter([first, first, later])
    workload = drawing(lambda generator, n: {"x": torch.zeros(n), "k": next(values)})
    with pytest.raises(BatchError, match=r"batch k is .* and was .* what changes must be a tensor"):
        workload.draw(torch.Generator(), 2)
