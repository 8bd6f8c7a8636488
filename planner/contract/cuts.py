"""Which tensors cross a cut of the layer DAG, and how large they are.

In: a profile's edges. Out: its tensors, each with its consumers, and the ones that enter or leave a pack.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from planner.contract.profile import BATCH, Profile

TARGETS = "(targets)"


class Tensor(msgspec.Struct, frozen=True, gc=False):
    """One tensor between layers, however many layers consume it. consumers are in layer order."""

    src: int
    name: str
    bytes_per_sample: int
    bytes_fixed: int
    differentiable: bool
    consumers: tuple[int, ...]


def tensors_of(profile: Profile) -> tuple[Tensor, ...]:
    """Every tensor of the DAG by (source, name); labels are a tensor from the batch to the last layer."""
    found: dict[tuple[int, str], Tensor] = {}
    for edge in profile.edges:
        key = (edge.src, edge.tensor)
        known = found.get(key)
        consumers = (edge.dst,) if known is None else tuple(sorted({*known.consumers, edge.dst}))
        differentiable = edge.differentiable and edge.src != BATCH
        found[key] = Tensor(
            edge.src, edge.tensor, edge.bytes_per_sample, edge.bytes_fixed, differentiable, consumers
        )
    if profile.target_bytes_per_sample:
        last = len(profile.layers) - 1
        found[BATCH, TARGETS] = Tensor(BATCH, TARGETS, profile.target_bytes_per_sample, 0, False, (last,))
    return tuple(found[key] for key in sorted(found))


def entering(tensors: Iterable[Tensor], first: int, last: int) -> tuple[Tensor, ...]:
    """The tensors made before layer `first` that a layer in [first, last] consumes."""
    return tuple(t for t in tensors if t.src < first and any(first <= c <= last for c in t.consumers))


def leaving(tensors: Iterable[Tensor], first: int, last: int) -> tuple[Tensor, ...]:
    """The tensors made in [first, last] that a layer after `last` consumes."""
    return tuple(t for t in tensors if first <= t.src <= last < t.consumers[-1])


def nbytes(tensors: Iterable[Tensor], num_samples: int) -> int:
    """Their bytes for one microbatch of that many samples."""
    return sum(t.bytes_per_sample * num_samples + t.bytes_fixed for t in tensors)
