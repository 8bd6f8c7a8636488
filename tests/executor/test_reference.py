"""Plain training is what a user would write: the oracle must not need an oracle of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from executor.iterations import draw_batch, minibatch_loss
from executor.options import RunOptions
from executor.reference import METERED_ITERATIONS, even_microbatches, train
from executor.workload import Workload

WIDTH = 32
FOUR = ((0, 2), (2, 4), (4, 6), (6, 8))
UNEVEN = ((0, 3), (3, 4), (4, 8))


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def make_workload(dropout: float = 0.0) -> Workload:
    torch.manual_seed(0)

    def draw(generator: torch.Generator, num_samples: int) -> dict[str, Tensor]:
        x = torch.randn(num_samples, WIDTH, generator=generator)
        return {"x": x, "y": torch.randn(num_samples, WIDTH, generator=generator)}

    return Workload(
        Net(dropout).train(), draw, lambda model, batch: nn.functional.mse_loss(model(batch["x"]), batch["y"])
    )


def make_options(steps: int = 4, optimizer: str = "adamw") -> RunOptions:
    return RunOptions("test", steps=steps, optimizer=optimizer, settings={"lr": 1e-2})


@pytest.mark.parametrize("samples", [FOUR, UNEVEN, ((0, 8),)])
def test_equals_a_loop_written_by_hand(samples: tuple[tuple[int, int], ...]) -> None:
    options = make_options()
    found = train(make_workload(), options, samples)
    workload = make_workload()
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=1e-2, fused=True)
    for step in range(options.steps):
        batch = draw_batch(workload, options.seed, step, 8)
        losses = []
        for first, end in samples:
            loss = workload.loss(workload.model, {name: tensor[first:end] for name, tensor in batch.items()})
            (loss * ((end - first) / 8)).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item() * ((end - first) / 8))
        optimizer.step()
        optimizer.zero_grad()
        assert found.losses[step] == sum(losses)
    for name, parameter in workload.model.named_parameters():
        assert torch.equal(found.parameters[name], parameter), name


def test_loss_is_the_whole_minibatch_s_with_uneven_microbatches() -> None:
    """Case 5: the mean of the microbatches' means is another number."""
    whole = train(make_workload(), make_options(), ((0, 8),))
    uneven = train(make_workload(), make_options(), UNEVEN)
    assert uneven.losses == pytest.approx(whole.losses, rel=1e-6)
    assert minibatch_loss([1.0, 2.0, 3.0], [3 / 8, 1 / 8, 4 / 8]) == (3 * 1.0 + 1 * 2.0 + 4 * 3.0) / 8


def test_dropout_is_the_same_for_the_same_seed_and_new_in_each_step() -> None:
    options = make_options(optimizer="sgd")
    first = train(make_workload(0.5), options, FOUR)
    torch.manual_seed(1234)
    again = train(make_workload(0.5), options, FOUR)
    assert first.losses == again.losses
    still = RunOptions("test", steps=4, optimizer="sgd", settings={"lr": 0.0})
    assert len(set(train(make_workload(0.5), still, FOUR).losses)) == 4


def test_peak_holds_weights_gradients_and_states() -> None:
    """What plain training needs: four times the weights under Adam, and activations."""
    workload = make_workload()
    weight_bytes = sum(p.nbytes for p in workload.model.parameters())
    one = train(workload, make_options(), ((0, 8),))
    activations = 8 * WIDTH * 4 * 12
    assert 4 * weight_bytes <= one.peak_bytes <= 4 * weight_bytes + activations
    plain_sgd = train(make_workload(), make_options(optimizer="sgd"), ((0, 8),))
    assert 2 * weight_bytes <= plain_sgd.peak_bytes <= 2 * weight_bytes + activations


def test_smaller_microbatches_need_less() -> None:
    large = train(make_workload(), make_options(), even_microbatches(256, 256))
    small = train(make_workload(), make_options(), even_microbatches(256, 8))
    assert small.peak_bytes < large.peak_bytes


def test_budget_of_the_peak_is_enough_and_a_byte_less_is_not() -> None:
    needed = train(make_workload(), make_options(), FOUR).peak_bytes
    assert train(make_workload(), make_options(), FOUR, budget_bytes=needed).peak_bytes == needed
    with pytest.raises(torch.OutOfMemoryError, match=rf"^plain: .* 1 over the limit of {needed - 1}$"):
        train(make_workload(), make_options(), FOUR, budget_bytes=needed - 1)


def test_model_that_does_not_fit_at_all_is_refused_before_it_runs() -> None:
    seen: list[int] = []
    with pytest.raises(torch.OutOfMemoryError, match="the model needs"):
        train(
            make_workload(),
            make_options(),
            FOUR,
            budget_bytes=1000,
            on_iteration=lambda k, *_: seen.append(k),
        )
    assert not seen


def test_peak_is_reached_while_the_meter_runs() -> None:
    few = train(make_workload(), make_options(METERED_ITERATIONS), FOUR)
    many = train(make_workload(), make_options(METERED_ITERATIONS + 4), FOUR, budget_bytes=1 << 30)
    assert few.peak_bytes == many.peak_bytes


def test_frozen_parameters_stay_and_have_no_state() -> None:
    """Case 9."""
    workload = make_workload()
    frozen = list(workload.model.parameters())[:2]
    before = [p.detach().clone() for p in frozen]
    for parameter in frozen:
        parameter.requires_grad_(False)
    found = train(workload, make_options(), FOUR)
    for parameter, old in zip(frozen, before, strict=True):
        assert torch.equal(parameter, old)
    assert found.peak_bytes < train(make_workload(), make_options(), FOUR).peak_bytes


def test_iterations_are_told_as_they_end() -> None:
    told: list[tuple[int, float]] = []
    found = train(
        make_workload(), make_options(), FOUR, on_iteration=lambda k, loss, seconds: told.append((k, loss))
    )
    assert told == list(enumerate(found.losses))
    assert len(found.seconds) == 4
    assert all(seconds > 0 for seconds in found.seconds)


@pytest.mark.parametrize(
    ("minibatch", "size", "ranges"),
    [(8, 4, ((0, 4), (4, 8))), (7, 3, ((0, 3), (3, 6), (6, 7))), (2, 8, ((0, 2),))],
)
def test_even_microbatches_cover_the_minibatch(
    minibatch: int, size: int, ranges: tuple[tuple[int, int], ...]
) -> None:
    assert even_microbatches(minibatch, size) == ranges
