"""Plain PyTorch: the unmodified model, everything on the device, the same microbatches and random numbers.

The oracle of the tests, and what `run --plain` and the demo's "what plain training needs" are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.amp import GradScaler

from executor.decompose import Decomposition, decompose
from executor.iterations import draw_batch, minibatch_loss
from executor.meter import Meter
from executor.optimizer import has_master
from executor.options import RunOptions
from executor.randomness import seed_layer, seeding_hooks
from executor.workload import Workload

METERED_ITERATIONS = 2
"""The first makes the optimizer's state, the second has all at once; later ones run without the meter's cost."""


@dataclass(frozen=True)
class PlainResult:
    """Losses and seconds by iteration; parameters by original name at the end; peak bytes by the meter.

    Buffers are the workload's model's own.
    """

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
    if decomposition is None:
        example = workload.draw(torch.Generator().manual_seed(0), 2)
        decomposition = decompose(
            workload, example, patterns=options.patterns, check=False, cut_by=options.cut_by
        )
    place = torch.device("cuda" if options.device == "cuda" else "cpu")
    model, minibatch = workload.model.to(place), samples[-1][1]
    meter = Meter(budget_bytes, "plain")
    meter.allocate(sum(t.nbytes for t in (*model.parameters(), *model.buffers())), "the model")
    trained = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float() if has_master(p) else p for p in trained]
    meter.allocate(sum(m.nbytes for m, p in zip(masters, trained, strict=True) if m is not p), "masters")
    optimizer = options.recipe.make({str(i): master for i, master in enumerate(masters)})
    scaler = _make_scaler(place) if options.is_scaled else None
    losses, seconds = [], []
    for iteration in range(options.steps):
        batch = draw_batch(workload, options.seed, iteration, minibatch)
        started = time.perf_counter()
        # under a budget every allocation is looked at: shapes may depend on the data
        is_metered = iteration < METERED_ITERATIONS or budget_bytes is not None
        parts = []
        with meter if is_metered else nullcontext():
            shares = workload.shares(batch, samples)
            for (first, end), share in zip(samples, shares, strict=True):
                # clones: on the device only what the microbatch needs
                given = workload.samples(batch, first, end)
                microbatch = {name: tensor.clone().to(place) for name, tensor in given.items()}
                seed_entry = partial(_seed_entry, options.seed, iteration, first)
                with seeding_hooks(model, decomposition.entries, seed_entry):
                    loss = workload.loss(model, microbatch)
                seed = share if scaler is None else share * scaler.get_scale()
                if share:
                    torch.autograd.backward([loss], [torch.full_like(loss, seed)])
                parts.append(loss.item())
                del loss, microbatch
            _step(optimizer, trained, masters, options.clip_norm, scaler)
        losses.append(minibatch_loss(parts, shares))
        seconds.append(time.perf_counter() - started)
        on_iteration(iteration, losses[-1], seconds[-1])
    parameters = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
    return PlainResult(tuple(losses), tuple(seconds), parameters, meter.peak_bytes)


def _make_scaler(place: torch.device) -> GradScaler:
    scaler = GradScaler(place.type)
    # it makes its state when it first scales something
    scaler.scale(torch.ones((), device=place))
    return scaler


def _step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    masters: Sequence[Tensor],
    clip_norm: float | None,
    scaler: GradScaler | None,
) -> None:
    """One step, of the masters where parameters have them; no gradients are left."""
    with torch.no_grad():
        for parameter, master in zip(parameters, masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.to(master.dtype), None
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(masters, clip_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=True)
        for parameter, master in zip(parameters, masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)


def even_microbatches(minibatch: int, size: int) -> tuple[tuple[int, int], ...]:
    """The sample ranges of a minibatch in microbatches of a size, the last one with what is left."""
    return tuple((first, min(first + size, minibatch)) for first in range(0, minibatch, size))


def _seed_entry(seed: int, iteration: int, first_sample: int, layer: int) -> None:
    seed_layer(seed, iteration, layer, first_sample)
