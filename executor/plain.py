"""`run --plain`: the model without a schedule, all of it on one device, with the same trace to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from executor.load import as_planned, check_model, check_optimizer, load
from executor.options import RunOptions
from executor.record import plain_trace
from executor.reference import train
from executor.weights import write_weights
from planner.contract import store as files
from planner.contract.output import check_outputs
from planner.contract.profile import model_hash
from planner.contract.schedule import Samples, Schedule
from planner.contract.trace import Trace


def run_plain(
    schedule: Schedule | None,
    options: RunOptions,
    samples: Sequence[Samples],
    *,
    budget_bytes: int | None = None,
    trace_path: Path | str | None = None,
    weights_out: Path | None = None,
    progress: Callable[[int, float, float], None] = lambda iteration, loss, seconds: None,
) -> Trace:
    """Train the model without a schedule, in this process, all of it on one device; samples: its microbatches.

    Raises HarmonyError (the schedule is another model's), OSError, torch.OutOfMemoryError (it does not fit the budget).
    """
    check_outputs(trace_path, weights_out)
    if options.device == "virtual":
        torch.set_num_threads(1)
    if schedule is not None:
        check_optimizer(schedule, options)
        options = as_planned(schedule, options)
    workload, decomposition, profile = load(options, check=False)
    if schedule is not None:
        check_model(schedule, profile)
    result = train(
        workload,
        options,
        samples,
        decomposition=decomposition,
        budget_bytes=budget_bytes,
        on_iteration=progress,
    )
    trace = plain_trace(result, profile.model.name, model_hash(profile), samples[-1][1], options)
    if weights_out is not None:
        buffers = {
            name: buffer.detach().clone()
            for name, buffer in workload.model.named_buffers(remove_duplicate=False)
        }
        write_weights(result.parameters | buffers, weights_out)
    if trace_path is not None:
        files.save(trace, trace_path)
    return trace
