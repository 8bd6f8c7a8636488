"""A model, its batches and its loss; and batches of any shape (nested, with constants) as flat ones.

All that cuts, stores and replays a model works on flat batches, {name: tensor}. `flat` makes a workload of one whose
batches are pytrees: {"x": (a, None), "y": {"mask": m}} becomes {"x.0": a, "y.mask": m}, and the loss gets its own back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from planner.contract.errors import HarmonyError

Batch = dict[str, Tensor]
Constant = (type(None), bool, int, float, str, torch.dtype)
WHOLE = "batch"
"""The name of a batch that is one tensor."""


class BatchError(HarmonyError):
    """A batch is not what its workload's others are."""


@dataclass(frozen=True)
class Pad:
    """Bring a tensor's samples to `shape` by appending `value`: for batches of samples of different lengths."""

    value: float
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Workload:
    """A model, where its batches come from, and its loss.

    draw(generator, num_samples): tensors by name, with their samples in dimension 0 but for those in `fixed`, which
    all samples share. loss(model, batch): the mean over the samples of the batch it is given; it calls the model.
    count(batch): how many items that mean is over where it is not over samples, as tokens that are not masked out: a
    microbatch weighs as many of them as it has.
    pad: tensors (by flat name) whose samples are brought to one shape; without it another shape is refused.
    """

    model: nn.Module
    draw: Callable[[torch.Generator, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    fixed: frozenset[str] = frozenset()
    pad: Mapping[str, Pad] = field(default_factory=dict)
    count: Callable[[Batch], float] | None = None

    def shares(
        self,
        batch: Batch,
        microbatches: Sequence[tuple[int, int]],
        over_servers: Callable[[float], float] = float,
    ) -> list[float]:
        """What part of the minibatch's loss each microbatch's is; batch: flat. over_servers: the sum of what each server
        counts. Raises BatchError."""
        if self.count is None:
            counts = [float(end - first) for first, end in microbatches]
        else:
            counts = [float(self.count(self.samples(batch, first, end))) for first, end in microbatches]
        total = over_servers(sum(counts))
        if not all(0 <= count < float("inf") for count in counts) or not total:
            raise BatchError(
                f"the microbatches count {counts} items of the loss; counts are finite, and not all of them 0"
            )
        return [count / total for count in counts]

    def samples(self, batch: Batch, first: int, end: int) -> Batch:
        """Samples [first, end) of a flat batch."""
        return {name: tensor if name in self.fixed else tensor[first:end] for name, tensor in batch.items()}

    def with_one_more(self, batch: Batch) -> Batch:
        """A flat batch with its first sample once more."""
        return {
            name: tensor if name in self.fixed else torch.cat([tensor, tensor[:1]])
            for name, tensor in batch.items()
        }

    def num_samples(self, batch: Batch) -> int:
        """How many samples a flat batch has."""
        return next(tensor.shape[0] for name, tensor in batch.items() if name not in self.fixed)


@dataclass(frozen=True)
class _Template:
    """What every batch of a workload has in common. shapes: of one sample; of the whole tensor where it is fixed."""

    spec: pytree.TreeSpec
    constants: tuple[tuple[str, Any], ...]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    fixed: frozenset[str]
    pad: Mapping[str, Pad]

    def read(self, batch: Any, num_samples: int) -> Batch:
        """A batch as {name: tensor}. Raises BatchError."""
        leaves, spec = _leaves(batch)
        if spec != self.spec:
            raise BatchError(
                f"a batch has the parts {', '.join(leaves)}; the one that the model was cut with had others"
            )
        for name, known in self.constants:
            value = leaves[name]
            if type(value) is not type(known) or value != known:
                raise BatchError(
                    f"batch {name} is {value!r} now and was {known!r} when the model was cut; what changes must be a tensor"
                )
        found = {}
        for name, shape in self.shapes.items():
            tensor = _padded(leaves[name], name, self.pad.get(name))
            wanted = shape if name in self.fixed else (num_samples, *shape)
            if tuple(tensor.shape) != wanted or tensor.dtype != self.dtypes[name]:
                raise BatchError(
                    f"batch {name} is {list(tensor.shape)} {tensor.dtype}, the model was cut and profiled for "
                    f"{list(wanted)} {self.dtypes[name]}; pad it (Workload(pad=...)), or profile and plan for this shape"
                )
            found[name] = tensor
        return found

    def write(self, batch: Batch) -> Any:
        """The batch as the user's loss knows it."""
        values: dict[str, Any] = {**dict(self.constants), **batch}
        names = _names(self.spec)
        return pytree.tree_unflatten([values[name] for name in names], self.spec)


def flat(
    model: nn.Module,
    draw: Callable[[torch.Generator, int], Any],
    loss: Callable[[nn.Module, Any], Tensor],
    pad: Mapping[str, Pad] | None = None,
    dtype: torch.dtype | None = None,
    count: Callable[[Any], float] | None = None,
) -> Workload:
    """A workload with flat batches of one whose batches are pytrees, each checked against the first; dtype: what their
    floating-point tensors are rounded to.

    A tensor has samples where its first dimension follows their number, which one draw of two and one of three
    samples tell; others are `fixed`. Raises BatchError.
    """
    template = _template({n: draw(torch.Generator().manual_seed(0), n) for n in (2, 3)}, pad or {})

    def draw_flat(generator: torch.Generator, num_samples: int) -> Batch:
        batch = template.read(draw(generator, num_samples), num_samples)
        if dtype is None:
            return batch
        return {n: t.to(dtype) if t.is_floating_point() else t for n, t in batch.items()}

    def loss_of_flat(model: nn.Module, batch: Batch) -> Tensor:
        return loss(model, template.write(batch))

    def count_of_flat(batch: Batch) -> float:
        assert count is not None
        return count(template.write(batch))

    counted = count_of_flat if count is not None else None
    return Workload(model, draw_flat, loss_of_flat, template.fixed, count=counted)


def _template(drawn: Mapping[int, Any], pad: Mapping[str, Pad]) -> _Template:
    (two, spec), (three, other) = _leaves(drawn[2]), _leaves(drawn[3])
    if spec != other:
        raise BatchError(f"batches differ in their parts: {', '.join(two)} and {', '.join(three)}")
    shapes, dtypes, constants, fixed = {}, {}, [], set()
    for name, value in two.items():
        if not isinstance(value, Tensor):
            if not isinstance(value, Constant):
                raise BatchError(
                    f"batch {name} is a {type(value).__name__}; batches hold tensors, numbers, text and None"
                )
            constants.append((name, value))
            continue
        first, second = (_padded(part[name], name, pad.get(name)) for part in (two, three))
        if first.dim() and (len(first), len(second)) == (2, 3):
            shapes[name] = tuple(first.shape[1:])
        elif first.shape == second.shape:
            shapes[name] = tuple(first.shape)
            fixed.add(name)
        else:
            raise BatchError(
                f"batch {name} is {list(first.shape)} for 2 samples and {list(second.shape)} for 3; samples come first"
            )
        dtypes[name] = value.dtype
    unknown = set(pad) - set(shapes)
    if unknown:
        raise BatchError(f"pad names {sorted(unknown)[0]}, the batch has the tensors {', '.join(shapes)}")
    if not set(shapes) - fixed:
        raise BatchError("the batch has no tensor whose first dimension is the number of samples")
    return _Template(spec, tuple(constants), shapes, dtypes, frozenset(fixed), pad)


def _leaves(batch: Any) -> tuple[dict[str, Any], pytree.TreeSpec]:
    # transformers' tokenizers give mappings that pytree does not know
    batch = dict(batch) if isinstance(batch, Mapping) and type(batch) is not dict else batch
    leaves, spec = pytree.tree_flatten(batch)
    return dict(zip(_names(spec), leaves, strict=True)), spec


def _names(spec: pytree.TreeSpec) -> list[str]:
    """The path of each leaf, joined by dots."""
    numbered = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    return [
        ".".join(_key(part) for part in path) or WHOLE
        for path, _ in pytree.tree_flatten_with_path(numbered)[0]
    ]


def _key(part: Any) -> str:
    return str(getattr(part, "key", getattr(part, "idx", getattr(part, "name", part))))


def _padded(tensor: Any, name: str, pad: Pad | None) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise BatchError(
            f"batch {name} is a {type(tensor).__name__} now and was a tensor when the model was cut"
        )
    if pad is None:
        return tensor
    sizes = tuple(tensor.shape[1:])
    if len(sizes) != len(pad.shape) or any(
        has > wanted for has, wanted in zip(sizes, pad.shape, strict=True)
    ):
        raise BatchError(f"batch {name}: samples of {list(sizes)} cannot be padded to {list(pad.shape)}")
    missing = [wanted - has for has, wanted in zip(sizes, pad.shape, strict=True)]
    amounts = [amount for gap in reversed(missing) for amount in (0, gap)]
    # bool has no constant padding of its own
    filled = functional.pad(
        tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor, amounts, value=pad.value
    )
    return filled.to(tensor.dtype)
