"""Between a model and a run: load it, check that it is the planned one, its weights into the store and out again."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from executor.decompose import Decomposition, decompose
from executor.decompose.move import move_code
from executor.host import HostStore
from executor.options import RunOptions
from executor.structure import structure
from executor.workload import Workload
from planner.contract.errors import FormatError
from planner.contract.output import whole
from planner.contract.profile import Profile, model_hash
from planner.contract.schedule import Schedule


def load(options: RunOptions, *, check: bool) -> tuple[Workload, Decomposition, Profile]:
    """The model, its layers, and their sizes as a profile has them."""
    workload = options.load()
    example = workload.draw(torch.Generator().manual_seed(0), 2)
    decomposition = decompose(workload, example, patterns=options.patterns, check=check)
    if options.device == "cuda":
        move_code(decomposition, torch.device("cuda"))
    profile = structure(decomposition, options.model, options.optimizer, options.settings, options.patterns)
    return workload, decomposition, profile


def check_model(schedule: Schedule, profile: Profile) -> None:
    """Raise FormatError where a schedule was planned for another model than the one that is to run."""
    ours, planned = model_hash(profile), schedule.profile
    if ours == planned.model_hash:
        return
    theirs = planned.model.spec or planned.model.name
    remedy = "run the planned model, or profile and plan this one"
    if theirs == profile.model.spec:
        remedy = "its code, layers or optimizer settings are others now: profile and plan again"
    raise FormatError(
        f"the schedule was planned for model {theirs!r} ({planned.model_hash}), "
        f"--model is {profile.model.spec!r} ({ours}); {remedy}"
    )


def check_optimizer(schedule: Schedule, options: RunOptions) -> None:
    """Raise FormatError where a schedule was planned for another optimizer."""
    planned = schedule.profile.optimizer
    if planned != options.optimizer.lower():
        raise FormatError(
            f"the schedule was planned for optimizer {planned!r}, the run asks for {options.optimizer.lower()!r}; "
            f"run with --optimizer {planned}, or profile and plan again"
        )


# ---- weights


def fill(store: HostStore, decomposition: Decomposition) -> None:
    """The model's weights and buffers into the store. The optimizer fills its state with its first step."""
    for i in range(len(decomposition.layers)):
        for name, target in store.weights(i).items():
            target.copy_(decomposition.parameters[name].detach())
        for name, target in store.buffers(i).items():
            target.copy_(decomposition.buffers[name])


def release(workload: Workload, decomposition: Decomposition) -> None:
    """Let a process's own copy of the parameters go; the store has them."""
    for tensor in (*decomposition.parameters.values(), *workload.model.parameters()):
        tensor.data = torch.empty(0, dtype=tensor.dtype)


def save_weights(store: HostStore, decomposition: Decomposition, path: Path) -> None:
    """All parameters and buffers by their original names, as safetensors."""
    tensors: dict[str, torch.Tensor] = {}
    for i in range(len(decomposition.layers) - 1, -1, -1):
        for name, tensor in (*store.weights(i).items(), *store.buffers(i).items()):
            for alias in decomposition.aliases.get(name, (name,)):
                tensors[alias] = tensor.clone()
    write_weights(tensors, path)


def write_weights(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Whole or not at all."""
    with whole(path) as beside:
        save_file(tensors, str(beside))
