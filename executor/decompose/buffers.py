"""Run a model without leaving a trace in its buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Afterwards the model has the same buffers, with the same values: some models write to them, some assign others."""
    before = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in before:
                module._buffers[name] = buffer
                buffer.copy_(value)


@contextmanager
def apart(model: nn.Module) -> Iterator[None]:
    """Meanwhile the model's buffers are copies in memory of their own: other processes may be using the others."""
    before = [(buffer, buffer.data) for buffer in model.buffers()]
    for buffer, value in before:
        buffer.data = value.clone()
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.data = value
