"""The same random numbers for the same (seed, step, layer, first sample), whatever the schedule.

The default generator is seeded on entering each layer, in a forward and in its recompute alike, so a mask
drawn twice is the same mask. The plain model gets the same numbers from hooks that seed where its layers begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

_MASK = (1 << 64) - 1


def mixed_seed(seed: int, step: int, layer: int, first_sample: int) -> int:
    """One 63-bit seed from four numbers (SplitMix64 over them; Steele, Lea and Flood, OOPSLA 2014)."""
    state = seed & _MASK
    for part in (step, layer, first_sample):
        state = (state + 0x9E3779B97F4A7C15 * (part + 1)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_layer(seed: int, step: int, layer: int, first_sample: int) -> None:
    """Seed the default generators for one layer. (torch.manual_seed takes a hundred times longer.)"""
    value = mixed_seed(seed, step, layer, first_sample)
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(value)


@contextmanager
def seeding_hooks(
    model: nn.Module, entries: Sequence[tuple[str, int]], seed_entry: Callable[[int], None]
) -> Iterator[None]:
    """Call seed_entry(layer) whenever the plain model enters a layer; entries: (module path, layer) in order.

    A module that is run several times has several entries; the n-th call takes its n-th entry. The path ""
    is the model itself.
    """
    handles = []
    by_path: dict[str, list[int]] = {}
    for path, layer in entries:
        by_path.setdefault(path, []).append(layer)
    counts = dict.fromkeys(by_path, 0)

    def hook_for(path: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if path == "":
                counts.update(dict.fromkeys(counts, 0))
            layers = by_path[path]
            seed_entry(layers[min(counts[path], len(layers) - 1)])
            counts[path] += 1

        return hook

    try:
        for path in by_path:
            handles.append(model.get_submodule(path).register_forward_pre_hook(hook_for(path), prepend=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
