"""Transfers between devices, by torch.distributed: one process group for each ordered pair of devices.

Each pair has one order, the one of its send and recv streams, which the planner made the same. Sizes are
fixed by the plan. A group per direction keeps a send and a recv between the same two from waiting for each
other.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from executor.streams import Device


class Peers:
    """The groups that a program's transfers need; every rank makes all of them, in the same order."""

    def __init__(self, pairs: list[tuple[int, int]], backend: str) -> None:
        self._groups = {pair: dist.new_group(list(pair), backend=backend) for pair in sorted(pairs)}

    def send(self, tensor: Tensor, device: Device, source: int, target: int) -> None:
        """Send a tensor's bytes, each chunk when the link would have delivered it."""
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        for start, end in device.hop(len(flat), target):
            dist.send(flat[start:end], dst=target, group=self._groups[source, target])

    def receive(self, tensor: Tensor, device: Device, source: int, target: int) -> None:
        """Fill a tensor with what the other side sends."""
        flat = tensor.reshape(-1).view(torch.uint8)
        for start, end in device.pieces(len(flat)):
            dist.recv(flat[start:end], src=source, group=self._groups[source, target])
