"""Transfers between devices, by torch.distributed: process groups of two devices each.

Sends have one group for each ordered pair, each with one order: the one of its send and recv streams, which the
planner made the same. Sizes are fixed by the plan. A group per direction keeps a send and a recv between the same two
from waiting for each other. Reductions have groups of their own, so that their bytes never meet those of a send; one for
both directions, since a pair reduces in one order (handlers.check_reductions).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from executor.servers import Servers
from executor.streams import CHUNK, Device

Pair = tuple[int, int]


class Peers:
    """The groups that a program's transfers need; every rank makes all of them, in the same order.

    sends: (source, target) devices. reductions: devices, in any order.
    """

    def __init__(
        self, sends: Iterable[Pair], reductions: Iterable[Pair], backend: str, servers: Servers
    ) -> None:
        self._servers = servers
        self._sends = {pair: servers.group(pair, backend) for pair in sorted(set(sends))}
        pairs = {(min(pair), max(pair)) for pair in reductions}
        self._reductions = {pair: servers.group(pair, backend) for pair in sorted(pairs)}

    def send(self, tensor: Tensor, device: Device, source: int, target: int) -> None:
        """Send a tensor's bytes, each chunk when the link would have delivered it."""
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        for start, end in device.hop(len(flat), target):
            dist.send(flat[start:end], dst=self._servers.rank_of(target), group=self._sends[source, target])

    def receive(self, tensor: Tensor, device: Device, source: int, target: int) -> None:
        """Fill a tensor with what the other side sends."""
        flat = tensor.reshape(-1).view(torch.uint8)
        for start, end in device.pieces(len(flat)):
            dist.recv(flat[start:end], src=self._servers.rank_of(source), group=self._sends[source, target])

    def send_share(self, share: Tensor, device: Device, source: int, owner: int) -> None:
        """Send a replica's share of a sum, a flat tensor, to the device that adds."""
        flat = share.view(torch.uint8)
        group = self._reductions[min(source, owner), max(source, owner)]
        for start, end in _chunks(device.hop(len(flat), owner)):
            dist.send(flat[start:end], dst=self._servers.rank_of(owner), group=group)

    def add_shares(self, own: Tensor, device: Device, owner: int, sources: Sequence[int]) -> None:
        """Make the owner's share, a flat tensor, the sum of all: those of `sources`, itself among them, in their order.

        Chunk by chunk: the room for two chunks is what a transfer library keeps for itself on a device, and like that
        part of the reserved bytes, not of a plan.
        """
        room = torch.empty(2, min(CHUNK, own.nbytes), dtype=torch.uint8, device=own.device)
        flat = own.view(torch.uint8)
        for start, end in _chunks(device.pieces(len(flat))):
            part = flat[start:end].view(own.dtype)
            total: Tensor | None = None
            for source in sources:
                share = part
                if source != owner:
                    received = room[0 if total is None else 1, : end - start]
                    group = self._reductions[min(source, owner), max(source, owner)]
                    dist.recv(received, src=self._servers.rank_of(source), group=group)
                    share = received.view(own.dtype)
                total = share if total is None else total.add_(share)
            if total is not None and total is not part:
                part.copy_(total)


def _chunks(pieces: Iterable[Pair]) -> Iterator[Pair]:
    """The same ranges, none larger than a chunk."""
    for start, end in pieces:
        for begin in range(start, end, CHUNK):
            yield begin, min(begin + CHUNK, end)
