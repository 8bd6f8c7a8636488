"""Trace a model whose layers torch.export cannot see through: what lies between them is exported, they stay whole.

    run      the loss at two numbers of samples, with the modules that begin layers observed: what goes in and out
    export   the loss, with each call of such a module one operation that nobody looks into
    bind     the operation becomes the module's own code, with its parameters and buffers as inputs

So control flow may depend on the data within a layer, not between layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from executor.decompose.buffers import kept
from executor.decompose.calls import ModuleCall, Observed, Result, Slot, forwards, observing, placeholders
from executor.decompose.layers import DecomposeError
from executor.decompose.naming import LayerNames, enclosing, layer_names
from executor.decompose.trace import Traced, TraceError, trace
from executor.workload import Workload

_LIBRARY = torch.library.Library("harmony", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "module_call(Tensor[] tensors, SymInt[] sizes, SymInt samples, int call) -> Tensor[]"
)
_OPERATION = torch.ops.harmony.module_call.default

_exported: list[_Export] = []
"""The export that is going on."""


def trace_calls(
    workload: Workload, batch: dict[str, Tensor], patterns: Sequence[str], cause: DecomposeError | None
) -> tuple[Traced, LayerNames]:
    """A graph in which modules that begin layers stay whole, and the names of its layers.

    Tried are the layers themselves, these and what stands beside them, and larger layers. cause: why the model itself
    cannot be traced. Raises DecomposeError.
    """
    names = layer_names(workload.model, patterns, _count_calls(workload, batch))
    tried: dict[tuple[str, ...], LayerNames] = {}
    for attempt in (names,) if patterns else (names, enclosing(workload.model, names)):
        for items in (attempt.always, attempt.always | attempt.later):
            tried.setdefault(_outermost(items), attempt)
    failure = cause or DecomposeError("the model has no modules to cut between")
    first = failure
    for paths, attempt in tried.items():
        if not paths:
            continue
        try:
            return _trace(workload, batch, paths), attempt
        except TraceError as error:
            failure = error
    if failure is first or "fixes the number of samples" in str(failure):
        raise failure
    raise DecomposeError(
        f"{failure}; control flow that depends on data must lie within a layer: --layers names modules that stay whole"
    ) from cause


def _outermost(paths: frozenset[str]) -> tuple[str, ...]:
    return tuple(
        sorted(p for p in paths if not any(p.startswith(f"{other}.") for other in paths if other != p))
    )


def _count_calls(workload: Workload, batch: dict[str, Tensor]) -> Counter[str]:
    """How often each module is called."""
    counts: Counter[str] = Counter()

    def count(path: str) -> Callable[..., None]:
        return lambda *_: counts.update([path])

    with ExitStack() as stack:
        for path, module in workload.model.named_modules():
            stack.callback(module.register_forward_pre_hook(count(path)).remove)
        _run(workload, batch)
    return counts


def _run(workload: Workload, batch: dict[str, Tensor]) -> None:
    """The loss, once; buffers and generators as they were."""
    with torch.random.fork_rng(devices=[]), kept(workload.model):
        workload.loss(workload.model, batch)


def _trace(workload: Workload, batch: dict[str, Tensor], paths: tuple[str, ...]) -> Traced:
    """Raises TraceError."""
    runs: list[list[Observed]] = []
    for part in (batch, workload.with_one_more(batch)):
        calls: list[Observed] = []
        with forwards(workload.model, paths, observing(calls, workload.num_samples(part))):
            _run(workload, part)
        runs.append(calls)
    if [call.path for call in runs[0]] != [call.path for call in runs[1]]:
        raise TraceError("which layers are called depends on the data")
    for ours, theirs in zip(*runs, strict=True):
        ours.add(theirs)
    export = _Export(runs[0])
    _exported.append(export)
    try:
        with forwards(workload.model, paths, export.operation):
            traced = trace(_noting_samples(workload, export), batch)
    finally:
        _exported.remove(export)
    return _bind(traced, export)


def _noting_samples(workload: Workload, export: _Export) -> Workload:
    """The same workload, whose loss tells the export how many samples its batch has."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        export.samples = workload.num_samples(batch)
        export.calls = []
        return workload.loss(model, batch)

    return Workload(workload.model, workload.draw, loss, workload.fixed)


@dataclass(eq=False)
class _Export:
    """Calls in the order in which they are made."""

    observed: list[Observed]
    samples: Any = 0
    calls: list[ModuleCall] = field(default_factory=list)

    def operation(self, path: str, module: nn.Module, _: Callable[..., Any]) -> Callable[..., Any]:
        """For `forwards`: the call as one operation."""

        def run(*args: Any, **kwargs: Any) -> Any:
            index = len(self.calls)
            if index >= len(self.observed) or self.observed[index].path != path:
                raise DecomposeError(f"module {path} is called in another order under export")
            observed = self.observed[index]
            leaves, spec = pytree.tree_flatten((args, kwargs))
            tensors: list[Tensor] = []
            sizes: list[Any] = []
            arguments = [_argument(path, leaf, tensors, sizes) for leaf in leaves]
            self.calls.append(ModuleCall(module, observed, spec, arguments))
            found = iter(_OPERATION(tensors, sizes, self.samples, index))
            results = [next(found) if isinstance(leaf, Result) else leaf for leaf in observed.leaves]
            return pytree.tree_unflatten(results, observed.spec)

        return run

    def results(self, index: int, samples: Any, device: torch.device) -> list[Tensor]:
        """What a call gives, for a number of samples that is a symbol."""
        observed, found = self.observed[index], []
        for result in observed.results:
            shape = result.shape(samples)
            if shape is None:
                raise DecomposeError(
                    f"module {observed.path} gives a tensor of {' and '.join(map(str, result.shapes.values()))} for "
                    f"{' and '.join(map(str, result.shapes))} samples; a layer's results have as many rows for each sample"
                )
            found.append(torch.empty(shape, dtype=result.dtype, device=device))
        return found


def _argument(path: str, leaf: Any, tensors: list[Tensor], sizes: list[Any]) -> Any:
    if isinstance(leaf, Tensor):
        tensors.append(leaf)
        return Slot("tensor", len(tensors) - 1)
    if isinstance(leaf, torch.SymInt):
        sizes.append(leaf)
        return Slot("size", len(sizes) - 1)
    if isinstance(leaf, torch.SymFloat | torch.SymBool):
        raise DecomposeError(f"module {path} is called with a number that depends on the number of samples")
    return leaf


@torch.library.register_fake("harmony::module_call", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _fakes(tensors: list[Tensor], sizes: list[Any], samples: Any, call: int) -> list[Tensor]:
    return _exported[-1].results(call, samples, tensors[0].device if tensors else torch.device("cpu"))


def _bind(traced: Traced, export: _Export) -> Traced:
    """Each operation becomes the call that it stands for."""
    known = {name: node for node, name in (traced.parameters | traced.buffers).items()}
    nodes = {node.name: node for node in traced.graph.nodes if node.op == "placeholder"}
    for node in list(traced.graph.nodes):
        if node.target is not _OPERATION:
            continue
        tensors, sizes, samples, index = node.args
        call = export.calls[index]
        parameters, buffers = ([nodes[name] for name in names] for names in placeholders(call, known))
        with traced.graph.inserting_before(node):
            bound = traced.graph.call_function(call, (tensors, sizes, samples, parameters, buffers))
        bound.meta = node.meta
        node.replace_all_uses_with(bound)
        traced.graph.erase_node(node)
    return traced
