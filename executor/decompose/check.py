"""Run one microbatch whole and cut, with the same random numbers, and compare loss, gradients and buffers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from executor.decompose.buffers import kept
from executor.decompose.layers import BATCH, DecomposeError, Decomposition, TensorName
from executor.randomness import seed_layer, seeding_hooks
from executor.workload import Workload

RELATIVE_TOLERANCE = 1e-5
COARSE_ROUNDINGS = 8
"""How many roundings types of fewer bits than float32 may be apart."""


class CheckError(DecomposeError):
    """The cut model is another than the whole one."""


def check_cut(workload: Workload, decomposition: Decomposition, batch: dict[str, Tensor]) -> Decomposition:
    """Raises CheckError that names the first layer whose results differ; rounding is a notice.

    The model, its buffers and the random generators are left as they were.
    """
    notices = list(decomposition.notices)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=devices):
        for seed in (1, 2):
            for part in (batch, _another_size(workload, decomposition, batch)):
                with kept(workload.model):
                    whole = _run_whole(workload, decomposition, part, seed)
                _compare(decomposition, whole, _run_cut(workload, decomposition, part, seed), "", notices)
                with torch.no_grad():
                    plain = _run_cut(workload, decomposition, part, seed)
                _compare(decomposition, replace(whole, gradients={}), plain, "without gradients, ", notices)
    return replace(decomposition, notices=tuple(dict.fromkeys(notices)))


@dataclass(frozen=True)
class _Results:
    """What one run gives: the loss, gradients and changed buffers by name."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def _another_size(
    workload: Workload, decomposition: Decomposition, batch: dict[str, Tensor]
) -> dict[str, Tensor]:
    """One sample; one more than there are where samples are mixed, since BatchNorm refuses one."""
    if any(layer.batch_coupled for layer in decomposition.layers):
        return workload.with_one_more(batch)
    return workload.samples(batch, 0, 1)


def _run_whole(
    workload: Workload, decomposition: Decomposition, batch: dict[str, Tensor], seed: int
) -> _Results:
    names = [n for n, p in decomposition.parameters.items() if p.requires_grad]
    with seeding_hooks(workload.model, decomposition.entries, lambda layer: seed_layer(seed, 0, layer, 0)):
        loss = workload.loss(workload.model, batch)
    gradients = torch.autograd.grad(loss, [decomposition.parameters[n] for n in names], allow_unused=True)
    changed = {name for layer in decomposition.layers for name in layer.mutated_buffers}
    buffers = decomposition.buffers | dict(workload.model.named_buffers(remove_duplicate=False))
    return _Results(
        loss=loss.detach(),
        gradients={n: g for n, g in zip(names, gradients, strict=True) if g is not None},
        buffers={name: buffers[name].clone() for name in changed},
    )


def _run_cut(
    workload: Workload, decomposition: Decomposition, batch: dict[str, Tensor], seed: int
) -> _Results:
    num_samples = workload.num_samples(batch)
    values: dict[TensorName, Tensor] = {(BATCH, name): tensor for name, tensor in batch.items()}
    buffers = {name: buffer.clone() for name, buffer in decomposition.buffers.items()}
    parameters = {n: p.detach().requires_grad_(p.requires_grad) for n, p in decomposition.parameters.items()}
    loss = torch.zeros(())
    for i, layer in enumerate(decomposition.layers):
        seed_layer(seed, 0, i, 0)
        out = layer(
            [parameters[name] for name in layer.parameters],
            [buffers[name] for name in layer.buffers],
            [values[key] for key in layer.inputs],
            num_samples,
        )
        if i == len(decomposition.layers) - 1:
            (loss,) = out
        else:
            values |= {(i, name): tensor for name, tensor in zip(layer.outputs, out, strict=True)}
    if not torch.is_grad_enabled():
        return _Results(loss, {}, buffers)
    trainable = {n: p for n, p in parameters.items() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
    found = {n: g for n, g in zip(trainable, gradients, strict=True) if g is not None}
    return _Results(loss.detach(), found, buffers)


def _compare(
    decomposition: Decomposition, whole: _Results, cut: _Results, how: str, notices: list[str]
) -> None:
    if not torch.equal(whole.loss, cut.loss):
        difference = _difference(whole.loss, cut.loss)
        if not difference <= _tolerance(cut.loss):
            raise CheckError(
                f"{how}the cut model's loss is {cut.loss.item()}, the whole model's {whole.loss.item()}; "
                f"it is not the same model"
            )
        notices.append(
            f"{how}the cut model's loss differs from the whole one's by {difference:.1e}, relative"
        )
    if set(whole.gradients) != set(cut.gradients):
        name = sorted(set(whole.gradients) ^ set(cut.gradients))[0]
        raise CheckError(f"parameter {name} has a gradient in the whole model or in the cut one, not in both")
    # from the end: there a wrong gradient begins
    for i, layer in reversed(list(enumerate(decomposition.layers))):
        for kind, names, ours, theirs in (
            ("gradient", layer.parameters, whole.gradients, cut.gradients),
            ("buffer", layer.mutated_buffers, whole.buffers, cut.buffers),
        ):
            for name in names:
                if name not in ours or torch.equal(ours[name], theirs[name]):
                    continue
                difference = _difference(ours[name], theirs[name])
                where = f"{how}layer {i} ({layer.name}): {kind} of {name} differs"
                if not difference <= _tolerance(ours[name]):
                    raise CheckError(f"{where} by {difference:.1e}, relative")
                notices.append(f"{where} by rounding ({difference:.1e}, relative)")


def _tolerance(tensor: Tensor) -> float:
    return (
        max(RELATIVE_TOLERANCE, COARSE_ROUNDINGS * torch.finfo(tensor.dtype).eps)
        if tensor.is_floating_point()
        else 0.0
    )


def _difference(a: Tensor, b: Tensor) -> float:
    scale = a.abs().max().item()
    return (a.double() - b.double()).abs().max().item() / (scale or 1.0)
