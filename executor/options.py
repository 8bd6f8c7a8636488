"""What a run is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from executor.checkpoint import Checkpoints
from executor.models import load_workload
from executor.optimizer import Recipe, recipe
from executor.workload import Workload

DeviceKind = Literal["virtual", "cuda"]


@dataclass(frozen=True)
class RunOptions:
    """model: a spec for models.load_workload. settings: the optimizer's arguments by torch.optim's names.

    paced: on virtual devices actions take their planned seconds; without, as long as they take. metered: what compute
    allocates counts against their budget; without, it costs no time to look at.
    clip_norm: the largest norm over all gradients; larger ones are scaled down to it.
    dtype: what the model is rounded to; as it is where empty.
    cut_by: how the model was cut, as profiles have it, where that is known.
    given: how parameters are stepped, instead of `optimizer` and `settings`.
    evaluate_every: after how many iterations of training each an evaluation follows, 0: none; evaluate_batches: minibatches
    in each; evaluate_data: text that these are drawn from instead of `data`.
    done: iterations that an earlier run has done; steps are those that follow. weights: a file to start from.
    """

    model: str
    device: DeviceKind = "virtual"
    steps: int = 10
    optimizer: str = "adamw"
    settings: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-3})
    seed: int = 0
    data: Path | None = None
    paced: bool = True
    metered: bool = True
    patterns: tuple[str, ...] = ()
    cut_by: str = ""
    clip_norm: float | None = None
    dtype: str = ""
    given: Recipe | None = None
    evaluate_every: int = 0
    evaluate_batches: int = 1
    evaluate_data: Path | None = None
    done: int = 0
    weights: Path | None = None
    checkpoints: Checkpoints | None = None

    @property
    def is_scaled(self) -> bool:
        """Whether the loss is scaled, as float16 needs it."""
        return self.dtype == "float16"

    @property
    def recipe(self) -> Recipe:
        """Which optimizer steps which parameters. Raises HarmonyError."""
        return self.given or recipe(self.optimizer, self.settings)

    def load(self) -> Workload:
        """The workload, the same in every process."""
        return load_workload(self.model, seed=self.seed, data=self.data, dtype=self.dtype)
