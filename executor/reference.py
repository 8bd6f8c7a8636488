"""Plain PyTorch: the unmodified model, everything on the device, the same microbatches and random numbers.

The oracle of the tests, and what `run --plain` and the demo's "what plain training needs" are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.decompose import Decomposition, decompose
from executor.meter import Meter
from executor.models import Workload
from executor.optimizer import make_optimizer
from executor.options import RunOptions
from executor.randomness import seed_layer, seeding_hooks
from executor.replay import draw_batch, minibatch_loss


@dataclass(frozen=True)
class PlainResult:
    """Losses and seconds by iteration; parameters by original name at the end; peak bytes by the meter."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    parameters: dict[str, Tensor]
    peak_bytes: int


def train(
    workload: Workload,
    options: RunOptions,
    samples: Sequence[tuple[int, int]],
    *,
    decomposition: Decomposition | None = None,
    budget_bytes: int | None = None,
    on_iteration: Callable[[int, float, float], None] = lambda iteration, loss, seconds: None,
) -> PlainResult:
    """Train for options.steps iterations with these microbatches (sample ranges of the minibatch).

    Raises torch.OutOfMemoryError where weights, gradients, states and activations exceed the budget.
    """
    model, minibatch = workload.model, samples[-1][1]
    if decomposition is None:
        example = workload.draw(torch.Generator().manual_seed(0), 2)
        decomposition = decompose(workload, example, patterns=options.patterns, check=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(options.optimizer, trained, options.settings)
    meter = Meter(budget_bytes, "plain")
    meter.allocate(sum(t.nbytes for t in (*model.parameters(), *model.buffers())), "the model")
    losses, seconds = [], []
    for iteration in range(options.steps):
        batch = draw_batch(workload, options.seed, iteration, minibatch)
        started = time.perf_counter()
        parts = []
        with meter:
            for first, end in samples:
                microbatch = {name: tensor[first:end].clone() for name, tensor in batch.items()}

                def seed_entry(layer: int, iteration: int = iteration, first: int = first) -> None:
                    seed_layer(options.seed, iteration, layer, first)

                with seeding_hooks(model, decomposition.entries, seed_entry):
                    loss = workload.loss(model, microbatch)
                share = (end - first) / minibatch
                loss.backward(torch.full_like(loss, share))
                parts.append(loss.item())
                del loss
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(minibatch_loss(parts, samples))
        seconds.append(time.perf_counter() - started)
        on_iteration(iteration, losses[-1], seconds[-1])
    parameters = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
    return PlainResult(tuple(losses), tuple(seconds), parameters, meter.peak_bytes)
