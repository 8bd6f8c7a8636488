"""Between a model and a run: load it, and check that it is the planned one."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from executor.decompose import Decomposition, decompose
from executor.decompose.cut import TAPE
from executor.decompose.evaluation import decompose_for_evaluation
from executor.decompose.move import move_code
from executor.hollow import give_memory, hollow
from executor.models import DTYPES
from executor.options import RunOptions
from executor.structure import structure
from executor.workload import Workload
from planner.contract.errors import FormatError
from planner.contract.profile import Profile, model_hash
from planner.contract.schedule import Schedule

Loaded = tuple[Workload, Decomposition, Profile]


def load(options: RunOptions, *, check: bool) -> Loaded:
    """The model, its layers, and their sizes as a profile has them."""
    return cut(options.load(), options, check=check)


def load_structure(options: RunOptions) -> Loaded:
    """The same without the weights' values and memory, where the model can be built and cut so; else with them."""
    if options.cut_by == TAPE:
        return load(options, check=False)
    try:
        with hollow():
            workload = options.load()
        give_memory(workload.model)
        loaded = cut(workload, options, check=False)
    except (
        Exception
    ):  # the model's own code may need its weights in any way; loaded whole it says what is wrong
        return load(options, check=False)
    # what is run to be cut needs its weights
    return load(options, check=False) if loaded[1].cut_by == TAPE else loaded


def cut(workload: Workload, options: RunOptions, *, check: bool) -> Loaded:
    """A workload that is there already, its layers, and their sizes as a profile has them."""
    example = workload.draw(torch.Generator().manual_seed(0), 2)
    decomposition = decompose(
        workload, example, patterns=options.patterns, check=check, cut_by=options.cut_by
    )
    if options.device == "cuda":
        move_code(decomposition, torch.device("cuda"))
    profile = structure(decomposition, options.model, options.recipe, options.patterns)
    return workload, decomposition, profile


def load_held_out(options: RunOptions) -> Workload | None:
    """What evaluations draw from where it is other text than training's; its model has no weights. Raises HarmonyError."""
    if options.evaluate_data is None:
        return None
    with hollow():
        return replace(options, data=options.evaluate_data).load()


def cut_for_evaluation(
    workload: Workload, trained: Decomposition, options: RunOptions, *, check: bool
) -> Decomposition:
    """The same layers in evaluation mode. Raises HarmonyError."""
    example = workload.draw(torch.Generator().manual_seed(0), 2)
    found = decompose_for_evaluation(workload, example, trained, patterns=options.patterns, check=check)
    if options.device == "cuda":
        move_code(found, torch.device("cuda"))
    return found


def as_planned(schedule: Schedule, options: RunOptions) -> RunOptions:
    """Layers and types are the planned ones unless others are asked for."""
    planned = schedule.profile
    return replace(
        options,
        patterns=options.patterns or planned.model.patterns,
        cut_by=planned.model.cut_by,
        dtype=options.dtype or (planned.dtype if planned.dtype in DTYPES else ""),
    )


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


def check_clipping(schedule: Schedule, options: RunOptions) -> None:
    """Raise FormatError where a schedule clips gradients and the run does not, or the other way round."""
    norm = options.clip_norm
    if norm is not None and not (isinstance(norm, int | float) and 0 < norm < math.inf):
        raise FormatError(f"clip_norm {norm!r}: must be a number, finite and above 0")
    if options.clip_norm is not None and not schedule.configuration.agree:
        raise FormatError(
            f"--clip-norm {options.clip_norm}: the schedule applies gradients before all are there; plan with --clip"
        )
    if options.clip_norm is None and schedule.configuration.agree and not options.is_scaled:
        raise FormatError(
            "--clip-norm is missing: the schedule was planned with --clip, for a largest norm that the run says"
        )


def check_optimizer(schedule: Schedule, options: RunOptions) -> None:
    """Raise FormatError where a schedule was planned for another optimizer."""
    planned = schedule.profile.optimizer
    if planned != options.optimizer.lower():
        raise FormatError(
            f"the schedule was planned for optimizer {planned!r}, the run asks for {options.optimizer.lower()!r}; "
            f"run with --optimizer {planned}, or profile and plan again"
        )
