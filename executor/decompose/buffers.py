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
