"""The model's layers in evaluation mode, as functions between the same tensors as in training.

    train    L3: (weights, buffers, add_2) ─► add_5      dropout draws, BatchNorm counts
    eval     L3: (weights, buffers, add)   ─► add_3      cut anew, then renamed: add_2 ─► add_5

What a schedule moves are the tensors of training, so those of evaluation take their names and places. What only
training hands on is zeros; what only evaluation needs is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from executor.decompose.buffers import apart
from executor.decompose.cut import decompose
from executor.decompose.layers import BATCH, Boundary, Decomposition, Layer, TensorName
from executor.workload import Workload
from planner.contract.errors import HarmonyError


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """All of a model in evaluation mode, then each module as it was."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was_training in before.items():
            module.training = was_training


def decompose_for_evaluation(
    workload: Workload,
    batch: dict[str, Tensor],
    trained: Decomposition,
    *,
    patterns: Sequence[str] = (),
    check: bool = True,
) -> Decomposition:
    """The layers of `trained` as they run in evaluation mode, with the names of its tensors. Arguments as `decompose`
    has them.

    Other ranks may train meanwhile: nothing that the model shares with them is written.

    Raises HarmonyError where the model in evaluation mode uses more than training hands from layer to layer.
    """
    with evaluating(workload.model), apart(workload.model):
        found = decompose(workload, batch, patterns=patterns, check=check, cut_by=trained.cut_by)
    ours, theirs = ([layer.name for layer in cut.layers] for cut in (found, trained))
    if ours != theirs:
        other = next((n for n in [*ours, *theirs] if n not in ours or n not in theirs), ours[0])
        raise HarmonyError(
            f"evaluation: the model has {len(ours)} layers in evaluation mode and {len(theirs)} in training; "
            f"{other} is not in both"
        )
    names = {key: key for key in found.boundaries if key[0] == BATCH}
    for source in range(len(trained.layers)):
        names |= _names(trained, found, source)
    layers = tuple(_renamed(layer, names, i, trained, found) for i, layer in enumerate(found.layers))
    return replace(trained, layers=layers)


def _names(trained: Decomposition, found: Decomposition, source: int) -> dict[TensorName, TensorName]:
    """What each tensor that leaves a layer is called in training: by name where that fits, else in their order."""
    free = {key: b for key, b in trained.boundaries.items() if key[0] == source}
    wanted = {key: b for key, b in found.boundaries.items() if key[0] == source}
    names = {key: key for key, b in wanted.items() if key in free and _fits(b, free[key])}
    for key, boundary in wanted.items():
        if key in names:
            continue
        fitting = [k for k, b in free.items() if k not in names.values() and _fits(boundary, b)]
        if not fitting:
            users = ", ".join(found.layers[c].name for c in boundary.consumers)
            raise HarmonyError(
                f"evaluation: layer {found.layers[source].name} hands {boundary.name} {list(boundary.shape)} "
                f"{boundary.dtype} to {users} in evaluation mode and nothing like it in training"
            )
        names[key] = fitting[0]
    return names


def _fits(boundary: Boundary, other: Boundary) -> bool:
    alike = all(
        getattr(boundary, field) == getattr(other, field) for field in ("dtype", "shape", "is_batched")
    )
    return alike and set(boundary.consumers) <= set(other.consumers)


def _renamed(
    layer: Layer,
    names: dict[TensorName, TensorName],
    index: int,
    trained: Decomposition,
    found: Decomposition,
) -> Layer:
    other, where = trained.layers[index], f"evaluation: layer {layer.name}"
    missing = [name for name in layer.parameters if name not in other.parameters]
    if missing:
        raise HarmonyError(f"{where} uses parameter {missing[0]} in evaluation mode and not in training")
    buffers = tuple(_buffer(name, other, trained, found) for name in layer.buffers)
    unknown = [name for name, ours in zip(layer.buffers, buffers, strict=True) if ours is None]
    if unknown:
        raise HarmonyError(f"{where} uses buffer {unknown[0]} in evaluation mode and not in training")
    is_last = index == len(found.layers) - 1
    changed = [
        known for name, known in zip(layer.buffers, buffers, strict=True) if name in layer.mutated_buffers
    ]
    return replace(
        layer,
        mutated_buffers=tuple(name for name in changed if name is not None),
        inputs=tuple(names[key] for key in layer.inputs),
        outputs=layer.outputs if is_last else tuple(names[index, name][1] for name in layer.outputs),
        buffers=tuple(name for name in buffers if name is not None),
    )


def _buffer(name: str, layer: Layer, trained: Decomposition, found: Decomposition) -> str | None:
    """A buffer's name in training; a constant's is any with its value."""
    if name in layer.buffers and _equal(found.buffers[name], trained.buffers[name]):
        return name
    return next((n for n in layer.buffers if _equal(found.buffers[name], trained.buffers[n])), None)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
