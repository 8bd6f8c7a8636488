"""This process among all of a run: which device of which server, and what servers say to each other.

    rank = server * devices of a server + device        as torchrun numbers them

Processes of one server share its host store (host.py). Those of the same device on all servers form two groups:
one adds gradients, on the thread of the host's updates; one adds losses and counts, on the thread that makes batches or
calls the session. Each thread says the same things in the same order on every server, so none waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.contract.errors import HarmonyError

WIDENED = torch.bfloat16
"""gloo does not add it: it is added in float32, which takes twice the bytes."""
PIECE = 1 << 24
"""Elements that are widened at once."""


class Servers:
    """Groups of a run over several servers; for one server there are none, and sums are what is given.

    Every process makes it, at the same time.
    """

    def __init__(self, num_servers: int = 1, num_devices: int = 1) -> None:
        self.num_servers, self.num_devices = num_servers, num_devices
        self.server = 0 if num_servers == 1 else dist.get_rank() // num_devices
        self._local = None
        self._gradients, self._news = None, None
        if num_servers > 1:
            for server in range(num_servers):
                group = dist.new_group([self._rank(server, d) for d in range(num_devices)], backend="gloo")
                self._local = group if server == self.server else self._local
            own = dist.get_rank() % num_devices
            for device in range(num_devices):
                ranks = [self._rank(server, device) for server in range(num_servers)]
                groups = [dist.new_group(ranks, backend="gloo") for _ in range(2)]
                if device == own:
                    self._gradients, self._news = groups

    # ---- on this server

    def _rank(self, server: int, device: int) -> int:
        return server * self.num_devices + device

    def rank_of(self, device: int) -> int:
        """The process of a device of this server."""
        return self._rank(self.server, device)

    def group(self, devices: Iterable[int], backend: str) -> Any:
        """The group of these devices of this server. Every process asks for the same ones in the same order."""
        devices, own = list(devices), None
        for server in range(self.num_servers):
            group = dist.new_group([self._rank(server, d) for d in devices], backend=backend)
            own = group if server == self.server else own
        return own

    def meet(self) -> None:
        """Wait for the other processes of this server."""
        dist.barrier(group=self._local)

    def from_first(self, value: Any) -> Any:
        """What the process of this server's first device says."""
        box = [value]
        dist.broadcast_object_list(box, src=self.rank_of(0), group=self._local)
        return box[0]

    def to_first(self, value: Any) -> list[Any] | None:
        """What each process of this server says, at its first device; None elsewhere."""
        is_first = dist.get_rank() == self.rank_of(0)
        found: list[Any] | None = [None] * self.num_devices if is_first else None
        dist.gather_object(value, found, dst=self.rank_of(0), group=self._local)
        return found

    # ---- between servers

    def sum(self, value: float) -> float:
        """Over the same device of all servers."""
        if self._news is None:
            return value
        total = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(total, group=self._news)
        return float(total)

    def add_gradients(self, runs: Iterable[Tensor], touched: Iterable[Mapping[str, Tensor]]) -> None:
        """Make flat gradients in host memory the sum over all servers, in place, the same bits on each; one has a gradient
        (touched) where it has one on some server."""
        if self._gradients is None:
            return
        for run in runs:
            if run.dtype != WIDENED:
                dist.all_reduce(run, group=self._gradients)
                continue
            for start in range(0, len(run), PIECE):
                piece = run[start : start + PIECE]
                wide = piece.float()
                dist.all_reduce(wide, group=self._gradients)
                piece.copy_(wide)
        flags = [flag for layer in touched for flag in layer.values()]
        if flags:
            any_touched = torch.stack(flags).to(torch.uint8)
            dist.all_reduce(any_touched, op=dist.ReduceOp.MAX, group=self._gradients)
            for flag, is_touched in zip(flags, any_touched, strict=True):
                flag.copy_(is_touched)

    def check_alike(self, facts: Mapping[str, object]) -> None:
        """Raise HarmonyError, on every server, where one was started otherwise."""
        if self.num_servers == 1:
            return
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, dict(facts))
        for rank, theirs in enumerate(found):
            for name, value in found[0].items():
                if theirs[name] != value:
                    raise HarmonyError(
                        f"server 0 has {name} {value}, server {rank // self.num_devices} has {theirs[name]}; start all servers "
                        f"alike, with checkpoints in a folder that all of them see"
                    )
