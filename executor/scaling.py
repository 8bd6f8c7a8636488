"""Dynamic loss scaling for float16 (Micikevicius et al., ICLR 2018), by the rule and constants of torch.amp.GradScaler.

Losses are multiplied by a scale, so that small gradients do not vanish. Where any gradient overflows, the whole step
is skipped and the scale halves; after enough steps without it the scale doubles.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

INITIAL = 65536.0
GROWTH = 2.0
BACKOFF = 0.5
GROWTH_INTERVAL = 2000


def reset(state: Tensor) -> None:
    """state: the scale, steps since it changed, and whether the last step was skipped: 3 float32 of the host store."""
    state.copy_(torch.tensor([INITIAL, 0.0, 0.0]))


def agree(state: Tensor, norm: float) -> float:
    """From the norm over all scaled gradients, what they are multiplied by, and the next scale; 0 for a step to skip."""
    scale, num_good, _ = state.tolist()
    if not math.isfinite(norm):
        state.copy_(torch.tensor([scale * BACKOFF, 0.0, 1.0]))
        return 0.0
    num_good += 1
    if num_good == GROWTH_INTERVAL:
        state.copy_(torch.tensor([scale * GROWTH, 0.0, 0.0]))
    else:
        state.copy_(torch.tensor([scale, num_good, 0.0]))
    return float(1.0 / scale)
