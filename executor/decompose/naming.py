"""Which modules of a model are layers: those that a user names, or those that repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from executor.decompose.layers import DecomposeError


@dataclass(frozen=True)
class LayerNames:
    """Module paths that begin a layer: `always`, or only once one of those has begun (`later`)."""

    always: frozenset[str]
    later: frozenset[str]

    def layer_path(self, path: str, has_begun: bool) -> str | None:
        """The layer module that a module path lies in, if any."""
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            prefix = ".".join(parts[:end])
            if prefix in self.always or (has_begun and prefix in self.later):
                return prefix
        return None


def layer_names(model: nn.Module, patterns: Sequence[str]) -> LayerNames:
    """Layers by patterns (`transformer.h.*`), else the items of repeated containers and what follows them.

    Raises DecomposeError where a pattern matches no module, naming the modules that there are.
    """
    paths = [path for path, _ in model.named_modules() if path]
    if not patterns:
        items = _repeated(model, "")
        beside = {path for item in items for path in _siblings(model, item)}
        return LayerNames(frozenset(items), frozenset(beside - _ancestors(items) - set(items)))
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            top = ", ".join(path for path in paths if path.count(".") < 2)[:300]
            raise DecomposeError(f"--layers {pattern}: no module of the model is called so; there are {top}")
    return LayerNames(
        frozenset(p for p in paths if any(fnmatchcase(p, pattern) for pattern in patterns)), frozenset()
    )


def _repeated(module: nn.Module, path: str) -> list[str]:
    """Items of the outermost lists of two or more modules with parameters."""
    children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
    with_parameters = [child for _, child in children if any(True for _ in child.parameters())]
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(with_parameters) >= 2:
        return [name for name, _ in children]
    return [item for name, child in children for item in _repeated(child, name)]


def _siblings(model: nn.Module, item: str) -> list[str]:
    """Modules with parameters beside an item's containers."""
    found, parts = [], item.split(".")
    for end in range(len(parts) - 1):
        parent = ".".join(parts[:end])
        for name, child in model.get_submodule(parent).named_children():
            if any(True for _ in child.parameters()):
                found.append(f"{parent}.{name}" if parent else name)
    return found


def _ancestors(items: Sequence[str]) -> set[str]:
    return {item.rsplit(".", k)[0] for item in items for k in range(1, item.count(".") + 1)}
