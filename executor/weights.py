"""Weights between a model, the host store and files.

Read are a safetensors file, a folder of them with an index, and what torch.save wrote of a state_dict; written is one
safetensors file that `model.load_state_dict` takes.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from executor import scaling
from executor.decompose import Decomposition
from executor.host import HostStore
from executor.optimizer import MASTER
from executor.workload import Workload
from planner.contract.errors import FormatError
from planner.contract.output import whole

INDEX = "model.safetensors.index.json"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True)
class Source:
    """Tensors by the model's names, each read when it is asked for."""

    path: Path
    names: Collection[str]
    get: Callable[[str], Tensor]


def open_weights(path: Path) -> Source:
    """What a file or a folder with an index has. Raises FormatError, OSError."""
    if path.is_dir():
        return _folder(path)
    if path.suffix == ".safetensors":
        opened = _opened(path)
        return Source(path, frozenset(opened.keys()), opened.get_tensor)
    try:
        # files of the older format cannot be mapped
        tensors = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, AttributeError, KeyError):
        raise FormatError(
            f"{path}: neither a .safetensors file nor a state_dict that torch.save wrote; save model.state_dict() itself"
        ) from None
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise FormatError(f"{path}: is no state_dict; save model.state_dict() itself")
    return Source(path, frozenset(tensors), tensors.__getitem__)


def _folder(path: Path) -> Source:
    single = path / "model.safetensors"
    if single.is_file():
        return open_weights(single)
    index = path / INDEX
    if not index.is_file():
        raise FormatError(f"{path}: has neither {single.name} nor {INDEX}; name a folder with weights")
    try:
        files = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except msgspec.MsgspecError as error:
        raise FormatError(f"{index}: {error}") from None
    opened = {name: _opened(path / name) for name in sorted(set(files.values()))}

    def get(name: str) -> Tensor:
        try:
            tensor: Tensor = opened[files[name]].get_tensor(name)
        except SafetensorError as error:
            raise FormatError(f"{path / files[name]}: {error}") from None
        return tensor

    return Source(path, frozenset(files), get)


def _opened(path: Path) -> Any:
    try:
        return safe_open(str(path), "pt")
    except FileNotFoundError:
        raise FormatError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise FormatError(f"{path}: {error}") from None


# ---- into the store


@dataclass(frozen=True)
class ModelState:
    """The names in a model's state_dict, and those of its tensors that no layer uses, which never change."""

    names: frozenset[str]
    loose: dict[str, Tensor]


def model_state(workload: Workload, decomposition: Decomposition) -> ModelState:
    """What is not in the store is copied."""
    found = workload.model.state_dict()
    used = {
        alias
        for layer in decomposition.layers
        for name in (*layer.parameters, *layer.buffers)
        for alias in decomposition.aliases.get(name, (name,))
    }
    loose = {name: tensor.detach().clone() for name, tensor in found.items() if name not in used}
    return ModelState(frozenset(found), loose)


def fill(store: HostStore, decomposition: Decomposition) -> None:
    """The model's weights and buffers into the store, whose memory they have from then on: layer by layer, so that
    nothing is there twice. The optimizer fills its state with its first step, but for masters."""
    moved = set()
    for i in range(len(decomposition.layers)):
        for tensors, targets in (
            (decomposition.parameters, store.weights(i)),
            (decomposition.buffers, store.buffers(i)),
        ):
            for name, target in targets.items():
                target.copy_(tensors[name].detach())
                if name not in moved:
                    tensors[name].data = target
                    moved.add(name)
    _fill_masters(store, decomposition)
    scaling.reset(store.scaling)


def _fill_masters(store: HostStore, decomposition: Decomposition) -> None:
    weights = {
        name: tensor for i in range(len(decomposition.layers)) for name, tensor in store.weights(i).items()
    }
    for name, states in store.states().items():
        if MASTER in states:
            states[MASTER].copy_(weights[name])


def fill_from(store: HostStore, decomposition: Decomposition, source: Source) -> None:
    """Weights and buffers of a file into the store, by any of their names; buffers that it lacks stay as they are.
    Rounded where the model's type has fewer bits.

    Raises FormatError where a parameter is missing, or has another shape or type.
    """
    for layer in range(len(decomposition.layers)):
        for tensors, is_needed in ((store.weights(layer), True), (store.buffers(layer), False)):
            for name, target in tensors.items():
                aliases = decomposition.aliases.get(name, (name,))
                known = next((alias for alias in aliases if alias in source.names), None)
                if known is not None:
                    tensor = source.get(known)
                    if tensor.is_floating_point() and target.is_floating_point():
                        tensor = tensor.to(target.dtype)
                    copy_checked(target, tensor, f"{source.path}: {known}")
                elif is_needed:
                    raise FormatError(f"{source.path}: has no {name}; it was written for another model")
    _fill_masters(store, decomposition)


def copy_checked(target: Tensor, source: Tensor, where: str) -> None:
    """Raises FormatError where shapes or types differ, or there is no data."""
    if source.layout != torch.strided or source.is_meta:
        raise FormatError(f"{where} is sparse or has no data; save it as a plain tensor on the CPU")
    if (target.shape, target.dtype) != (source.shape, source.dtype):
        raise FormatError(
            f"{where} has shape {tuple(source.shape)} and type {source.dtype}, "
            f"the model's has {tuple(target.shape)} and {target.dtype}"
        )
    target.copy_(source)


def attach(store: HostStore, decomposition: Decomposition) -> None:
    """The model's own parameters and buffers become the store's: what training changes, they show."""
    for i in range(len(decomposition.layers) - 1, -1, -1):
        for name, tensor in store.weights(i).items():
            decomposition.parameters[name].data = tensor
        for name, tensor in store.buffers(i).items():
            decomposition.buffers[name].data = tensor


# ---- out of it


def layer_state(
    store: HostStore, decomposition: Decomposition, state: ModelState, layer: int
) -> dict[str, Tensor]:
    """What a layer is the first to use, by all names that the model's state_dict has for it, each in memory of its own."""
    found: dict[str, Tensor] = dict(state.loose) if layer == 0 else {}
    before = {name for other in decomposition.layers[:layer] for name in (*other.parameters, *other.buffers)}
    for name, tensor in (store.weights(layer) | store.buffers(layer)).items():
        known = [alias for alias in decomposition.aliases.get(name, (name,)) if alias in state.names]
        if name not in before:
            found |= {alias: tensor.clone() for alias in known}
    return found


def save_weights(store: HostStore, decomposition: Decomposition, state: ModelState, path: Path) -> None:
    """All parameters and buffers by their original names, as safetensors."""
    tensors: dict[str, Tensor] = {}
    for layer in range(len(decomposition.layers)):
        tensors |= layer_state(store, decomposition, state, layer)
    write_weights(tensors, path)


def write_weights(tensors: dict[str, Tensor], path: Path) -> None:
    """One safetensors file, whole or not at all."""
    with whole(path) as beside:
        if beside.is_file():
            save_file(tensors, str(beside))
        else:  # a pipe or a device, which save_file would replace
            beside.write_bytes(save(tensors))
