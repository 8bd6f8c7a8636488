"""Calls of modules that stay whole: run once and looked at, then one operation each, with the module's own code inside.

What a module does may depend on its data (an expert that no token chose is not run), so it is not traced but run:
with its parameters, buffers and inputs put in for the moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from executor.decompose.layers import DecomposeError

SIMPLE = (bool, int, float, str, torch.dtype, type(None))
"""What says the same in every process when it is printed."""


@dataclass(frozen=True)
class Result:
    """A tensor that a call gave. shapes: by the number of samples that it was run with."""

    dtype: torch.dtype
    shapes: Mapping[int, tuple[int, ...]]
    requires_grad: bool

    def shape(self, samples: Any) -> tuple[Any, ...] | None:
        """Its shape for any number of samples; None where some dimension is neither fixed nor rows for each sample."""
        found: list[Any] = []
        for dims in zip(*self.shapes.values(), strict=True):
            rows = {dim / size for size, dim in zip(self.shapes, dims, strict=True)}
            if len(set(dims)) == 1:
                found.append(dims[0])
            elif len(rows) == 1 and (a_sample := rows.pop()).is_integer():
                found.append(int(a_sample) * samples)
            else:
                return None
        return tuple(found)


@dataclass(eq=False)
class Observed:
    """What one call of a module did when it ran, at every size."""

    path: str
    spec: pytree.TreeSpec
    leaves: list[Any]
    """Tensors are Results."""
    is_stochastic: bool = False
    buffers: set[str] = field(default_factory=set)
    """Those that it changed."""
    inputs: set[int] = field(default_factory=set)
    """Those of its tensors that it changed, by position among them."""

    @property
    def results(self) -> list[Result]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Result)]

    def add(self, other: Observed) -> None:
        """The same call at another size. Raises DecomposeError where it is not the same."""
        if (self.path, self.spec, len(self.results)) != (other.path, other.spec, len(other.results)):
            raise DecomposeError(
                f"module {self.path} is called otherwise, or gives something else, for other data"
            )
        for i, (ours, theirs) in enumerate(zip(self.leaves, other.leaves, strict=True)):
            if isinstance(ours, Result) and isinstance(theirs, Result):
                grad = ours.requires_grad or theirs.requires_grad
                self.leaves[i] = Result(ours.dtype, {**ours.shapes, **theirs.shapes}, grad)
        self.is_stochastic |= other.is_stochastic
        self.buffers |= other.buffers
        self.inputs |= other.inputs


class ModuleCall:
    """One call of a module, as an operation of a graph: (tensors, sizes, number of samples, parameters, buffers) ->
    tensors.

    arguments: leaves of (args, kwargs), where a Slot stands for a tensor or a size.
    """

    def __init__(
        self, module: nn.Module, observed: Observed, spec: pytree.TreeSpec, arguments: list[Any]
    ) -> None:
        self.observed = observed
        self.parameters = tuple(name for name, _ in module.named_parameters(remove_duplicate=False))
        self.buffers = tuple(name for name, _ in module.named_buffers(remove_duplicate=False))
        self._inner = _Inner(module)
        self._spec = spec
        self._arguments = arguments
        self._text = _text(module, observed, arguments, spec)
        # what fx asks of a function
        self.__name__ = "module_call"
        self.__module__ = __name__

    def __str__(self) -> str:
        """The same for calls that do the same."""
        return self._text

    def __call__(
        self,
        tensors: Sequence[Tensor],
        sizes: Sequence[int],
        samples: int,
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
    ) -> list[Tensor]:
        """Raises DecomposeError where the module gives other tensors than when it was observed."""
        given: dict[str, Sequence[Any]] = {"tensor": tensors, "size": sizes}
        leaves = [given[a.kind][a.place] if isinstance(a, Slot) else a for a in self._arguments]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        own = dict(zip(self.parameters, parameters, strict=True)) | dict(
            zip(self.buffers, buffers, strict=True)
        )
        state = {f"module.{name}": tensor for name, tensor in own.items()}
        out = torch.func.functional_call(self._inner, state, args, kwargs)
        for name, buffer in zip(self.buffers, buffers, strict=True):
            changed = state[f"module.{name}"]
            if changed is not buffer:  # assigned, not written to
                with torch.no_grad():
                    buffer.copy_(changed)
        found = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        shapes = [tuple(tensor.shape) for tensor in found]
        expected = [result.shape(samples) for result in self.observed.results]
        if shapes != expected:
            raise DecomposeError(
                f"module {self.observed.path} gave tensors of {shapes} for {samples} samples, expected were {expected}; "
                f"what a layer gives must not depend on its data in number and shape"
            )
        return found


@dataclass(frozen=True)
class Slot:
    """The place of a leaf of a call's arguments among its tensors or its sizes."""

    kind: str
    place: int


class _Inner(nn.Module):
    """The module's forward without its hooks, which the graph around it has traced."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


@contextmanager
def forwards(
    model: nn.Module,
    paths: Sequence[str],
    make: Callable[[str, nn.Module, Callable[..., Any]], Callable[..., Any]],
) -> Iterator[None]:
    """For the moment these modules' forward is make(path, module, forward)."""
    modules = {path: model.get_submodule(path) for path in paths}
    before = {path: vars(module).get("forward") for path, module in modules.items()}
    try:
        for path, module in modules.items():
            vars(module)["forward"] = make(path, module, module.forward)
        yield
    finally:
        for path, module in modules.items():
            if before[path] is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = before[path]


def observing(
    calls: list[Observed], samples: int
) -> Callable[[str, nn.Module, Callable[..., Any]], Callable[..., Any]]:
    """For `forwards`: run the module on so many samples, and note what it did."""

    def make(path: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            copies = [tensor.detach().clone() for tensor in given]
            held = dict(module.named_buffers(remove_duplicate=False))
            before = {name: buffer.clone() for name, buffer in held.items()}
            random = torch.get_rng_state()
            out = forward(*args, **kwargs)
            leaves, spec = pytree.tree_flatten(out)
            after = dict(module.named_buffers(remove_duplicate=False))
            calls.append(
                Observed(
                    path,
                    spec,
                    [_result(leaf, samples) if isinstance(leaf, Tensor) else leaf for leaf in leaves],
                    not torch.equal(random, torch.get_rng_state()),
                    {n for n, b in held.items() if after[n] is not b or not torch.equal(b, before[n])},
                    {i for i, tensor in enumerate(given) if not _same(tensor.detach(), copies[i])},
                )
            )
            return out

        return run

    return make


def _result(tensor: Tensor, samples: int) -> Result:
    return Result(tensor.dtype, {samples: tuple(tensor.shape)}, tensor.requires_grad)


def _same(a: Tensor, b: Tensor) -> bool:
    # not equal to itself: a mask of -inf and NaN has not changed
    return torch.equal(a, b) or bool(
        torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
    )


def _text(module: nn.Module, observed: Observed, arguments: list[Any], spec: pytree.TreeSpec) -> str:
    """Classes and plain attributes of a module and all in it, and what it is called with.

    A number that is part of the module's path is its place (layer_idx), which changes nothing of what it does.
    """
    places = {int(part) for part in observed.path.split(".") if part.isdigit()}
    lines = []
    for name, part in module.named_modules():
        plain = {
            key: value
            for key, value in sorted(vars(part).items())
            if not key.startswith("_")
            and type(value) in SIMPLE
            and not (type(value) is int and value in places)
        }
        lines.append(f"{name} {type(part).__module__}.{type(part).__qualname__} {plain}")
    lines.append(f"{spec} {[_plain(argument) for argument in arguments]}")
    lines.append(f"{observed.spec} {[_plain(leaf) for leaf in observed.leaves]}")
    return "\n".join(lines)


def _plain(value: Any) -> str:
    if isinstance(value, Slot):
        return f"{value.kind}{value.place}"
    if isinstance(value, Result):
        return f"{value.dtype} {dict(value.shapes)} {value.requires_grad}"
    return repr(value) if type(value) in SIMPLE else f"{type(value).__module__}.{type(value).__qualname__}"


def placeholders(call: ModuleCall, known: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Where a graph has the call's parameters and buffers; known: placeholders by the model's names."""
    path = call.observed.path
    names = [f"{path}.{name}" if path else name for name in (*call.parameters, *call.buffers)]
    found = [known[name] for name in names]
    return found[: len(call.parameters)], found[len(call.parameters) :]
