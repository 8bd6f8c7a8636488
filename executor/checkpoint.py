"""Checkpoints: what a run needs to go on exactly, and what plain PyTorch needs to load its weights.

    FOLDER/step-00000040/
        run.json                               how far, of which run
        model.safetensors.index.json           which file has which weight, as transformers reads it
        model-00003-of-00014.safetensors       a layer's weights and buffers, by the model's own names
        optimizer-00003-of-00014.safetensors   a layer's optimizer states, PARAMETER/KEY

Written beside, synced, renamed; then the one before the last goes. Layers are written from the last to the first, as
updates come: the next iteration's update of a layer waits until that layer is saved (replay.py), so that training goes
on meanwhile and nothing is copied.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from executor.decompose import Decomposition
from executor.host import HostStore
from executor.structure import LayerPlaces
from executor.weights import INDEX, ModelState, copy_checked, fill_from, layer_state, open_weights
from planner.contract.errors import FormatError, HarmonyError
from planner.contract.output import check_outputs

SCHEMA = "harmony-checkpoint/1"
RUN = "run.json"
KEPT = 2
"""The newest, and the one before."""
BUFFER = "buffer/"
"""Buffers that layers change and that the model's state_dict leaves out lie with the optimizer's states."""

_STEP = re.compile(r"step-(\d{8,})")
_OURS = re.compile(r"step-\d{8,}|\.step-\d{8,}\.tmp")
_STATES = re.compile(r"optimizer-(\d{5,})-of-\d{5,}\.safetensors")


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a run is, and what has to be the same for it to go on exactly."""

    steps: int
    minibatch: int
    seed: int
    optimizer: str
    settings: dict[str, float | int | bool | str]
    structure_hash: str
    data: str = ""
    """Names the text that training draws from."""
    scaling: tuple[float, ...] | None = None
    """The loss scale, where losses are scaled."""
    schema: str = SCHEMA


@dataclass(frozen=True)
class Checkpoints:
    """Where checkpoints lie, and after how many iterations each one is made; 0: only after the last."""

    folder: Path
    every: int = 0

    def is_due(self, steps: int) -> bool:
        """Whether one is made when this many iterations are done, though more follow."""
        return self.every > 0 and steps > 0 and steps % self.every == 0

    @staticmethod
    def name(steps: int) -> str:
        """What the checkpoint after so many iterations is called."""
        return f"step-{steps:08d}"

    def check_place(self) -> None:
        """Raise FormatError where no checkpoint can be written there."""
        if not self.folder.exists() and not self.folder.is_symlink():
            check_outputs(self.folder)
            return
        if not self.folder.is_dir():
            raise FormatError(f"--checkpoint {self.folder}: is no folder; name another one")
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise FormatError(f"--checkpoint {self.folder}: cannot be written to; name another folder")
        for path in self.folder.iterdir():
            if _OURS.fullmatch(path.name) and not path.is_dir():
                raise FormatError(f"{path}: is no folder, but named like a checkpoint; remove it")

    def check_new(self) -> None:
        """Raise FormatError where the folder holds another run's checkpoints."""
        found = self.newest()
        if found is not None:
            raise FormatError(
                f"--checkpoint {self.folder}: has {found.name} of an earlier run; go on with it by --resume, "
                f"or name another folder"
            )

    def newest(self) -> Path | None:
        """The checkpoint with most iterations; None where there is none."""
        found = self._found()
        return found[-1] if found else None

    def _found(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if path.is_dir() and _STEP.fullmatch(path.name))


def read_progress(path: Path) -> Progress:
    """Raises FormatError, with the file, where a checkpoint does not say how far it is."""
    file = path / RUN
    try:
        progress = msgspec.json.decode(file.read_bytes(), type=Progress)
    except FileNotFoundError:
        raise FormatError(f"{file}: is missing; {_remedy(path)}") from None
    except msgspec.MsgspecError as error:
        raise FormatError(f"{file}: {error}; {_remedy(path)}") from None
    if progress.schema != SCHEMA:
        raise FormatError(f"{file}: its schema is {progress.schema!r}, this version reads {SCHEMA!r}")
    if Checkpoints.name(progress.steps) != path.name:
        raise FormatError(
            f"{file}: says {progress.steps} iterations, its folder is {path.name}; {_remedy(path)}"
        )
    return progress


def _remedy(path: Path) -> str:
    others = [p for p in Checkpoints(path.parent)._found() if p.name < path.name]
    if others:
        return f"remove {path} to resume from {others[-1].name}"
    return f"there is no checkpoint before it: remove {path} to begin anew"


def check_same_run(path: Path, saved: Progress, ours: Progress) -> None:
    """Raise HarmonyError where a run would not go on as the one that wrote the checkpoint."""
    for name in ("minibatch", "seed", "optimizer", "settings", "structure_hash", "data"):
        before, now = getattr(saved, name), getattr(ours, name)
        if before == now:
            continue
        what = "layers" if name == "structure_hash" else name
        raise HarmonyError(
            f"--resume: {path} was written with {what} {before}, this run has {now}; give the same to go on exactly, "
            f"or start from its weights alone by --weights-in {path}"
        )


class Writer:
    """Writes checkpoints from the host store."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        store: HostStore,
        decomposition: Decomposition,
        places: Sequence[LayerPlaces],
        state: ModelState,
    ) -> None:
        self.checkpoints = checkpoints
        self._store = store
        self._decomposition = decomposition
        self._places = places
        self._state = state
        checkpoints.folder.mkdir(exist_ok=True)
        # held as long as this process lives
        self._folder = os.open(checkpoints.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._folder)
            raise HarmonyError(
                f"--checkpoint {checkpoints.folder}: another run writes its checkpoints there; wait for its end, "
                f"or name another folder"
            ) from None
        for path in checkpoints.folder.glob(".step-*.tmp"):
            shutil.rmtree(path)

    def close(self) -> None:
        """Let another run write to the folder."""
        os.close(self._folder)

    def write(self, progress: Progress, on_layer: Callable[[int], None] = lambda layer: None) -> None:
        """One checkpoint. on_layer(layer) is called when this layer and all later ones are on disk.

        Raises OSError.
        """
        folder = self.checkpoints.folder
        target = folder / self.checkpoints.name(progress.steps)
        beside = folder / f".{target.name}.tmp"
        beside.mkdir()
        files: dict[str, str] = {}
        total = 0
        for layer in range(len(self._places) - 1, -1, -1):
            weights = layer_state(self._store, self._decomposition, self._state, layer)
            total += sum(tensor.nbytes for tensor in weights.values())
            files |= self._write_layer(beside, layer, weights)
            on_layer(layer)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        _write(beside / INDEX, msgspec.json.format(msgspec.json.encode(index)))
        _write(beside / RUN, msgspec.json.format(msgspec.json.encode(progress)))
        _sync(beside)
        if target.exists():
            shutil.rmtree(target)
        beside.rename(target)
        _sync(folder)
        for old in self.checkpoints._found()[:-KEPT]:
            shutil.rmtree(old)

    def _write_layer(self, folder: Path, layer: int, weights: dict[str, Tensor]) -> dict[str, str]:
        """The files of a layer; names of weights and buffers, and their file."""
        suffix = f"{layer + 1:05d}-of-{len(self._places):05d}.safetensors"
        states = self._states(layer)
        for name, tensors in ((f"model-{suffix}", weights), (f"optimizer-{suffix}", states)):
            if tensors:
                save_file(tensors, str(folder / name))
                _sync(folder / name)
        return dict.fromkeys(weights, f"model-{suffix}")

    def _states(self, layer: int) -> dict[str, Tensor]:
        code, store = self._decomposition.layers[layer], self._store
        states = {
            BUFFER + name: store.buffers(layer)[name]
            for name in code.mutated_buffers
            if name not in self._state.names
        }
        found = store.states()
        return states | {f"{name}/{key}": found[name][key] for name, key in self._places[layer].states}


def restore(
    store: HostStore, decomposition: Decomposition, places: Sequence[LayerPlaces], path: Path
) -> None:
    """Weights, buffers and optimizer states of a checkpoint into the store.

    Raises FormatError, naming the file, where it lacks one or has another shape or type.
    """
    try:
        fill_from(store, decomposition, open_weights(path))
    except FormatError as error:
        raise FormatError(f"{error}; {_remedy(path)}") from None
    states = store.states()
    for layer, file in _optimizer_files(path):
        if layer >= len(places):
            raise FormatError(
                f"{file}: of layer {layer}, the model has {len(places)} layers; {_remedy(path)}"
            )
        wanted = {f"{name}/{key}": states[name][key] for name, key in places[layer].states}
        changed = decomposition.layers[layer].mutated_buffers
        wanted |= {BUFFER + name: store.buffers(layer)[name] for name in changed}
        try:
            with safe_open(str(file), "pt") as tensors:
                names = set(tensors.keys())
                for name, target in wanted.items():
                    if name in names:
                        copy_checked(target, tensors.get_tensor(name), f"{file}: {name}")
                    elif not name.startswith(BUFFER):
                        raise FormatError(f"{file}: {name} is missing; {_remedy(path)}")
        except (SafetensorError, OSError) as error:
            raise FormatError(f"{file}: {error}; {_remedy(path)}") from None
    missing = {i for i, place in enumerate(places) if place.states} - {i for i, _ in _optimizer_files(path)}
    if missing:
        raise FormatError(f"{path}: no optimizer states of layer {min(missing)}; {_remedy(path)}")


def _optimizer_files(path: Path) -> Iterator[tuple[int, Path]]:
    for file in sorted(path.iterdir()):
        match = _STATES.fullmatch(file.name)
        if match is not None and int(match[1]) > 0:
            yield int(match[1]) - 1, file


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    _sync(path)


def _sync(path: Path) -> None:
    """Until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
