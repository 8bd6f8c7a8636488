"""Case 5: a mean over tokens of which half are masked out, on unequal microbatches, is the whole minibatch's mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from executor.iterations import draw_batch
from executor.models import load_workload
from executor.options import RunOptions
from executor.reference import train
from executor.workload import BatchError, Workload
from tests.executor.test_any_model import each_layer_alone, run_here

LENGTH, WORDS, IGNORED = 6, 11, -100


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def draw(generator: torch.Generator, num_samples: int) -> dict[str, Tensor]:
    """The second sample counts no token at all, others between none and all."""
    tokens = torch.randint(0, WORDS, (num_samples, LENGTH), generator=generator)
    hidden = torch.rand(num_samples, LENGTH, generator=generator) < 0.5
    hidden[1:2] = True
    return {"tokens": tokens, "targets": tokens.masked_fill(hidden, IGNORED)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def count(batch: dict[str, Tensor]) -> int:
    return int((batch["targets"] != IGNORED).sum())


def make() -> Workload:
    return Workload(Net(), draw, loss, count=count)


def make_uncounted() -> Workload:
    return Workload(Net(), draw, loss)


OPTIONS = RunOptions(f"{Path(__file__)}:make", steps=3, settings={"lr": 1e-2}, optimizer="sgd", paced=False)


@pytest.mark.parametrize("samples", [((0, 2), (2, 4)), ((0, 1), (1, 2), (2, 4)), ((0, 3), (3, 4))])
def test_microbatches_weigh_as_many_tokens_as_they_count(samples: tuple[tuple[int, int], ...]) -> None:
    """Plain training in microbatches against plain training on the whole minibatch at once."""
    whole = train(OPTIONS.load(), OPTIONS, ((0, 4),))
    parts = train(OPTIONS.load(), OPTIONS, samples)
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)
    for name, tensor in whole.parameters.items():
        torch.testing.assert_close(parts.parameters[name], tensor, rtol=1e-4, atol=1e-6)
    uncounted = replace(OPTIONS, model=OPTIONS.model + "_uncounted")
    wrong = train(uncounted.load(), uncounted, ((0, 3), (3, 4))).losses
    assert wrong != pytest.approx(whole.losses, rel=1e-3), "by samples it would be another mean"


def test_replay_weighs_the_same_bit_for_bit() -> None:
    schedule = each_layer_alone(OPTIONS, 1)
    losses, weights, _ = run_here(schedule, OPTIONS)
    plain = train(OPTIONS.load(), OPTIONS, schedule.configuration.microbatches.backward)
    assert losses == list(plain.losses)
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain.parameters.items())


def test_a_microbatch_without_a_token_that_counts_changes_nothing() -> None:
    """Its mean is over nothing: not a number, and so would its gradient be."""
    workload = load_workload(OPTIONS.model, seed=0)
    batch = draw_batch(workload, 0, 0, 4)
    shares = workload.shares(batch, ((0, 1), (1, 2), (2, 4)))
    assert shares[1] == 0.0
    assert sum(shares) == pytest.approx(1.0)
    result = train(OPTIONS.load(), OPTIONS, ((0, 1), (1, 2), (2, 4)))
    assert all(loss == loss for loss in result.losses)
    assert all(tensor.isfinite().all() for tensor in result.parameters.values())


def test_a_minibatch_without_any_is_refused() -> None:
    workload = load_workload(OPTIONS.model, seed=0)
    batch = draw_batch(workload, 0, 0, 2)
    batch["targets"].fill_(IGNORED)
    with pytest.raises(BatchError, match=r"count \[0.0, 0.0\] items of the loss"):
        workload.shares(batch, ((0, 1), (1, 2)))
