"""Which modules of a model are layers: those that a user names, or those that repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def check_patterns(model: nn.Module, patterns: Sequence[str]) -> None:
    """Raise DecomposeError where a pattern matches no module, naming the modules that there are."""
    paths = [path for path, _ in model.named_modules() if path]
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            top = ", ".join(path for path in paths if path.count(".") < 2)[:300]
            raise DecomposeError(f"--layers {pattern}: no module of the model is called so; there are {top}")


def layer_names(model: nn.Module, patterns: Sequence[str], calls: Mapping[str, int]) -> LayerNames:
    """Layers by patterns (`transformer.h.*`), else the modules that repeat and what follows them.

    calls: how often a forward calls each module. Where nothing repeats, the outermost modules side by side are
    layers.
    """
    paths = [path for path, _ in model.named_modules() if path]
    if not patterns:
        return _with_siblings(model, _repeated(model, "", calls) or _side_by_side(model, ""))
    return LayerNames(
        frozenset(p for p in paths if any(fnmatchcase(p, pattern) for pattern in patterns)), frozenset()
    )


def enclosing(model: nn.Module, names: LayerNames) -> LayerNames:
    """Larger layers: the items of the outermost lists, where the given ones are items of lists within those."""
    items = []
    for path in sorted(names.always):
        parts = path.split(".")
        parents = (".".join(parts[:end]) for end in range(len(parts)))
        ends = (end for end, parent in enumerate(parents, 1) if _is_list(model.get_submodule(parent)))
        items.append(".".join(parts[: next(ends, len(parts))]))
    return _with_siblings(model, list(dict.fromkeys(items)))


def _with_siblings(model: nn.Module, items: list[str]) -> LayerNames:
    beside = {path for item in items for path in _siblings(model, item)}
    return LayerNames(frozenset(items), frozenset(beside - _ancestors(items) - set(items)))


def _repeated(module: nn.Module, path: str, calls: Mapping[str, int]) -> list[str]:
    """Items of the outermost lists of two or more modules with parameters, and modules that are called again.

    Where an item is itself a list of blocks of one kind, as a stage of a ResNet is, those blocks are.
    """
    if _is_list(module):
        return [block for name, child in _children(module, path) for block in _blocks(child, name) or [name]]
    found = []
    for name, child in _children(module, path):
        inside = _repeated(child, name, calls)
        is_shared = calls.get(name, 0) > 1 and _has_parameters(child) and any(True for _ in child.children())
        # the innermost list says more; without one, weights used again (ALBERT) are a layer for each use
        has_list = any(_is_list(part) for part in child.modules())
        found += [name] if is_shared and not has_list else inside
    return found


def _blocks(module: nn.Module, path: str) -> list[str]:
    """Items of the lists of two or more blocks of one class within a module; a block is more than one operation."""
    items = [child for child in module.children() if any(True for _ in child.children())]
    if _is_list(module) and len(items) == len(list(module.children())) and len({type(i) for i in items}) == 1:
        return [name for name, _ in _children(module, path)]
    return [block for name, child in _children(module, path) for block in _blocks(child, name)]


def _side_by_side(module: nn.Module, path: str) -> list[str]:
    """The outermost two or more modules with parameters that one module holds."""
    children = [(name, child) for name, child in _children(module, path) if _has_parameters(child)]
    if len(children) == 1:
        return _side_by_side(children[0][1], children[0][0])
    return [name for name, _ in children]


def _is_list(module: nn.Module) -> bool:
    with_parameters = [child for child in module.children() if _has_parameters(child)]
    return isinstance(module, (nn.ModuleList, nn.Sequential)) and len(with_parameters) >= 2


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _children(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    return [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]


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
