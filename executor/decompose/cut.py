"""Cut a model into layers: traced whole, or layer by layer where that does not do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from executor.decompose.check import CheckError, check_cut
from executor.decompose.layers import Decomposition
from executor.decompose.naming import check_patterns, layer_names
from executor.decompose.notices import lost_hooks, switch_off_checkpointing
from executor.decompose.split import count_calls, split
from executor.decompose.tape import trace_calls
from executor.decompose.trace import TraceError, trace
from executor.workload import Workload

TAPE = "tape"


def decompose(
    workload: Workload,
    batch: dict[str, Tensor],
    *,
    patterns: Sequence[str] = (),
    check: bool = True,
    cut_by: str = "",
) -> Decomposition:
    """A workload's layers, from one example batch of two or more samples.

    patterns: module paths that are layers; without them repeated modules are found. check: run one microbatch
    whole and cut and compare. cut_by: `export` or `tape` where that is known; without it the tape takes over where
    torch.export cannot trace the model or what it traced is another model. Raises DecomposeError.
    """
    check_patterns(workload.model, patterns)
    notices = (*switch_off_checkpointing(workload.model), *lost_hooks(workload.model))
    cause: TraceError | CheckError | None = None
    if cut_by != TAPE:
        try:
            traced = trace(workload, batch)
            names = layer_names(workload.model, patterns, count_calls(traced))
            found = split(workload, traced, names, "export")
            return _with(notices, check_cut(workload, found, batch) if check else found)
        except (TraceError, CheckError) as error:
            cause = error
    traced, names = trace_calls(workload, batch, patterns, cause)
    found = split(workload, traced, names, TAPE)
    try:
        found = check_cut(workload, found, batch) if check else found
    except CheckError:
        if cause is not None:
            raise cause from None
        raise
    why = "" if cause is None else f": {cause}"
    return _with((*notices, f"cut by a tape, with the modules that are layers whole{why}"), found)


def _with(notices: tuple[str, ...], found: Decomposition) -> Decomposition:
    return replace(found, notices=(*notices, *found.notices))
