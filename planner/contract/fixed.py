"""Fixed (`harmony-fixed/1`): a plan in a few lines, written by hand, for `plan --fixed`."""

from __future__ import annotations

from planner.contract.profile import Noun

SCHEMA = "harmony-fixed/1"


class Fixed(Noun):
    """forward_packs and backward_packs: layers of each pack, first to last; the last backward pack also runs its own
    forward, so the forward packs cover that many layers less. replicas: 1 is a pipeline over all devices, as many as
    devices is data parallelism. reflected: a pack's backward runs where its forward ran, which takes the same packs
    in both phases. kept, offloaded: of each backward pack's microbatches in a replica, how many do not recompute.
    resident: of each backward pack whether its weights and optimizer states never leave the device, which updates them.
    """

    forward_microbatch: int
    backward_microbatch: int
    forward_packs: tuple[int, ...]
    backward_packs: tuple[int, ...]
    replicas: int = 1
    reflected: bool = False
    kept: tuple[int, ...] = ()
    offloaded: tuple[int, ...] = ()
    resident: tuple[bool, ...] = ()
    schema: str = SCHEMA
