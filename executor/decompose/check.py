"""Run one microbatch whole and cut, with the same random numbers, and compare the loss and every gradient."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from executor.decompose.layers import BATCH, DecomposeError, Decomposition, TensorName
from executor.models import Workload
from executor.randomness import seed_layer, seeding_hooks

RELATIVE_TOLERANCE = 1e-5


def check_cut(workload: Workload, decomposition: Decomposition, batch: dict[str, Tensor]) -> Decomposition:
    """Raises DecomposeError that names the first layer whose results differ; rounding is a notice."""
    notices = list(decomposition.notices)
    sizes = {len(next(iter(batch.values()))), 1}
    state = {name: buffer.clone() for name, buffer in workload.model.named_buffers()}
    for seed in (1, 2):
        for num_samples in sorted(sizes, reverse=True):
            part = {name: tensor[:num_samples] for name, tensor in batch.items()}
            whole_loss, whole = _run_whole(workload, decomposition, part, seed)
            _restore(workload, state)
            cut_loss, cut = _run_cut(decomposition, part, seed)
            _compare(decomposition, whole_loss, cut_loss, whole, cut, notices)
            with torch.no_grad():
                plain_loss, _ = _run_cut(decomposition, part, seed)
            if not torch.equal(plain_loss, cut_loss):
                notices.append(f"without gradients the loss differs by {_difference(plain_loss, cut_loss):.1e}")
    return replace(decomposition, notices=tuple(dict.fromkeys(notices)))


def _run_whole(
    workload: Workload, decomposition: Decomposition, batch: dict[str, Tensor], seed: int
) -> tuple[Tensor, dict[str, Tensor]]:
    names = [n for n, p in decomposition.parameters.items() if p.requires_grad]
    with seeding_hooks(workload.model, decomposition.entries, lambda layer: seed_layer(seed, 0, layer, 0)):
        loss = workload.loss(workload.model, batch)
    gradients = torch.autograd.grad(loss, [decomposition.parameters[n] for n in names], allow_unused=True)
    return loss.detach(), {n: g for n, g in zip(names, gradients, strict=True) if g is not None}


def _restore(workload: Workload, state: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in workload.model.named_buffers():
            buffer.copy_(state[name])


def _run_cut(decomposition: Decomposition, batch: dict[str, Tensor], seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    num_samples = len(next(iter(batch.values())))
    values: dict[TensorName, Tensor] = {(BATCH, name): tensor for name, tensor in batch.items()}
    buffers = {name: buffer.clone() for name, buffer in decomposition.buffers.items()}
    parameters = {n: p.detach().requires_grad_(p.requires_grad) for n, p in decomposition.parameters.items()}
    loss = torch.zeros(())
    for i, layer in enumerate(decomposition.layers):
        seed_layer(seed, 0, i, 0)
        given = [values[key] for key in layer.inputs]
        out = layer([parameters[n] for n in layer.parameters], [buffers[n] for n in layer.buffers], given, num_samples)
        if i == len(decomposition.layers) - 1:
            (loss,) = out
        else:
            values |= {(i, name): tensor for name, tensor in zip(layer.outputs, out, strict=True)}
    trainable = {n: p for n, p in parameters.items() if p.requires_grad}
    if not torch.is_grad_enabled():
        return loss, {}
    gradients = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
    return loss.detach(), {n: g for n, g in zip(trainable, gradients, strict=True) if g is not None}


def _compare(
    decomposition: Decomposition,
    whole_loss: Tensor,
    cut_loss: Tensor,
    whole: dict[str, Tensor],
    cut: dict[str, Tensor],
    notices: list[str],
) -> None:
    if not torch.equal(whole_loss, cut_loss):
        difference = _difference(whole_loss, cut_loss)
        if not difference <= RELATIVE_TOLERANCE:
            raise DecomposeError(f"the cut model's loss is {cut_loss.item()}, the whole model's {whole_loss.item()}; it is not the same model")
        notices.append(f"the cut model's loss differs from the whole one's by {difference:.1e} (order of additions)")
    if set(whole) != set(cut):
        name = sorted(set(whole) ^ set(cut))[0]
        raise DecomposeError(f"parameter {name} has a gradient in the whole model or in the cut one, not in both")
    for i in range(len(decomposition.layers) - 1, -1, -1):
        layer = decomposition.layers[i]
        for name in layer.parameters:
            if name in whole and not torch.equal(whole[name], cut[name]):
                difference = _difference(whole[name], cut[name])
                if not difference <= RELATIVE_TOLERANCE:
                    raise DecomposeError(f"layer {i} ({layer.name}): the gradient of {name} differs by {difference:.1e}, relative")
                notices.append(f"layer {i} ({layer.name}): gradients differ by rounding ({difference:.1e}, relative)")


def _difference(a: Tensor, b: Tensor) -> float:
    scale = a.abs().max().item()
    return (a.double() - b.double()).abs().max().item() / (scale or 1.0)
