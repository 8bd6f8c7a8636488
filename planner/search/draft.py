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

Residency = Literal["none", "first", "some", "all"]
"""Which packs are to be resident: the one that the next iteration waits for, as many as fit, all."""


@dataclass(frozen=True)
class Draft:
    """What the search decides.

    forward_cuts end where the fused pack (the last backward one) begins. reflected: a pack's backward runs where its
    forward ran, which needs the same packs in both phases; else packs follow each other around the devices.
    kept, offloaded (of reflected drafts; empty: whatever fits is kept): of each backward pack's microbatches in a replica, how many keep their activations on the
    device and how many on the host, the rest recomputes. held: backward packs whose weights stay
    on the device after their forward. resident: those whose weights and states never leave it.
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
    resident: tuple[bool, ...] = ()
    may_offload: bool = False
    """Where kept is still open: whether activations also go to the host while links are idle."""
    may_reside: Residency = "none"
    """Where kept is still open: which packs' weights and states are to be resident, before anything is kept."""

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
    resident = draft.resident or (False,) * draft.num_backward
    weights: list[Literal["stream", "hold", "resident"]] = [
        "resident" if resident[i] else "hold" if held[i] and i < draft.num_forward else "stream"
        for i in range(draft.num_backward)
    ]
    forward = tuple(
        ForwardPack(a, b - 1, draft.forward_stage(i), weights[i] if draft.reflected else "stream")
        for i, (a, b) in enumerate(pairwise(draft.forward_cuts))
    )
    counts = [-(-share // draft.backward_size) for share in shape.shares]
    backward = []
    for i, (a, b) in enumerate(pairwise(draft.backward_cuts)):
        choices = tuple(choice for count in counts for choice in draft.choices(i, count))
        is_updated_there = resident[i] and problem.costs.gradient_bytes(a, b - 1) > 0
        backward.append(
            BackwardPack(
                a,
                b - 1,
                draft.backward_stage(i),
                weights[i],
                "device" if is_updated_there else "host",
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
        agree=problem.agree,
        num_servers=problem.num_servers,
    )


def why_not_resident(problem: Problem, num_replicas: int, first: int, end: int) -> str:
    """What keeps layers [first, end) from being updated on their device; empty where nothing does.

    The owner of a sum has no way to hand its result to replicas but the host, and a tied parameter is updated once.
    """
    costs = problem.costs
    if not costs.gradient_bytes(first, end - 1):
        return ""
    if problem.num_servers > 1:
        return f"{problem.num_servers} servers add their gradients in host memory, and update there"
    if problem.agree:
        return f"layers {first} to {end - 1} wait for a norm over all gradients, which is found on the host"
    if num_replicas > 1:
        return f"layers {first} to {end - 1} are trained by {num_replicas} replicas, which get new weights from the host"
    if costs.device_update_seconds(first, end - 1) is None:
        return f"the profile has no device_seconds of the update of layers {first} to {end - 1}"
    for tie in problem.profile.ties:
        outside = [layer for layer in tie.layers if not first <= layer < end]
        if outside and len(outside) < len(tie.layers):
            return f"layers {first} to {end - 1} share a parameter with layer {outside[0]}, which is updated with them"
    return ""
