"""A plan in the terms of the search, and the configuration that it stands for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from planner.contract.schedule import BackwardPack, Configuration, ForwardPack, Microbatches
from planner.search.problem import Problem, Shape

Cuts = tuple[int, ...]
"""First layers of packs, and behind them the end of the last one."""

Choice = Literal["recompute", "keep", "offload"]


@dataclass(frozen=True)
class Draft:
    """What the search decides.

    forward_cuts end where the fused pack (the last backward one) begins. reflected: a pack's backward runs where its
    forward ran, which needs the same packs in both phases; else packs follow each other around the devices.
    kept, offloaded (of reflected drafts; empty: whatever fits is kept): of each backward pack's microbatches in a replica, how many keep their activations on the
    device and how many on the host, the rest recomputes. held: backward packs whose weights stay
    on the device after their forward.
    """

    shape: Shape
    forward_size: int
    backward_size: int
    forward_cuts: Cuts
    backward_cuts: Cuts
    reflected: bool = False
    kept: tuple[int, ...] = ()
    offloaded: tuple[int, ...] = ()
    held: tuple[bool, ...] = ()
    may_offload: bool = False
    """Where kept is still open: whether activations also go to the host while links are idle."""

    @property
    def is_filled(self) -> bool:
        """Whether what it keeps is still to be filled in from the memory that is left."""
        return self.reflected and not self.kept

    @property
    def num_forward(self) -> int:
        return len(self.forward_cuts) - 1

    @property
    def num_backward(self) -> int:
        return len(self.backward_cuts) - 1

    def forward_stage(self, pack: int) -> int:
        return pack % self.shape.num_stages

    def backward_stage(self, pack: int) -> int:
        if self.reflected:
            return pack % self.shape.num_stages
        return (self.num_forward + self.num_backward - 1 - pack) % self.shape.num_stages

    def choices(self, pack: int, num_microbatches: int) -> tuple[Choice, ...]:
        """What happens to the activations of each microbatch of one replica."""
        kept = self.kept[pack] if self.kept else 0
        offloaded = self.offloaded[pack] if self.offloaded else 0
        order: tuple[Choice, ...] = ("keep", "offload", "recompute")
        counts = (kept, offloaded, max(0, num_microbatches - kept - offloaded))
        names = tuple(choice for choice, count in zip(order, counts, strict=True) for _ in range(count))
        return names[:num_microbatches]


def configure(problem: Problem, draft: Draft) -> Configuration:
    """The configuration of a draft."""
    shape = draft.shape
    held = draft.held or (False,) * draft.num_backward
    forward = tuple(
        ForwardPack(a, b - 1, draft.forward_stage(i), "hold" if draft.reflected and held[i] else "stream")
        for i, (a, b) in enumerate(pairwise(draft.forward_cuts))
    )
    counts = [-(-share // draft.backward_size) for share in shape.shares]
    backward = []
    for i, (a, b) in enumerate(pairwise(draft.backward_cuts)):
        choices = tuple(choice for count in counts for choice in draft.choices(i, count))
        is_held = held[i] and i < draft.num_forward
        backward.append(
            BackwardPack(
                a,
                b - 1,
                draft.backward_stage(i),
                "hold" if is_held else "stream",
                activations=choices if set(choices) != {"recompute"} else (),
            )
        )
    microbatches = Microbatches(
        shape.microbatches(draft.forward_size), shape.microbatches(draft.backward_size)
    )
    return Configuration(
        shape.mode,
        problem.num_devices,
        problem.minibatch,
        microbatches,
        forward,
        tuple(backward),
        shape.replicas,
    )
