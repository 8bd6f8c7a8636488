"""A run that stops and goes on is the run that did not stop, bit for bit; what cannot go on exactly is refused."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from executor.checkpoint import Checkpoints, Progress, check_same_run
from executor.launch import run_schedule
from executor.options import RunOptions
from planner.contract import store
from planner.contract.errors import FormatError, HarmonyError
from planner.contract.schedule import Schedule
from tests.executor.schedules import make_schedule

STEPS = 6
MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)
        )
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("unused", torch.full((3,), 7.0))
        self.register_buffer("count", torch.zeros(8), persistent=False)

    def forward(self, x):
        self.count.add_(1.0)
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) / self.count.clamp(max=3.0)


def draw(generator, num_samples):
    return {name: torch.randn(num_samples, 8, generator=generator) for name in "xy"}


def make():
    return Net().train(), draw, lambda model, batch: nn.functional.mse_loss(model(batch["x"]), batch["y"])
"""


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> RunOptions:
    path = tmp_path_factory.mktemp("checkpoint") / "saved_model.py"
    path.write_text(MODEL)
    return RunOptions(f"{path}:make", steps=STEPS, settings={"lr": 1e-2}, paced=False)


@pytest.fixture(scope="module")
def schedules(options: RunOptions) -> dict[int, Schedule]:
    """By number of devices."""
    return {count: make_schedule(options, count) for count in (1, 2)}


class Whole:
    """A run that was not interrupted."""

    def __init__(self, schedule: Schedule, options: RunOptions, folder: Path) -> None:
        self.losses = run_schedule(schedule, options, weights_out=folder / "w.safetensors").losses
        self.weights = load_file(folder / "w.safetensors")

    def check(self, losses: tuple[float, ...], weights: dict[str, Tensor]) -> None:
        assert losses == self.losses[len(self.losses) - len(losses) :]
        assert weights.keys() == self.weights.keys()
        for name, tensor in self.weights.items():
            assert torch.equal(weights[name], tensor), name


@pytest.fixture(scope="module")
def whole(
    schedules: dict[int, Schedule], options: RunOptions, tmp_path_factory: pytest.TempPathFactory
) -> Whole:
    return Whole(schedules[1], options, tmp_path_factory.mktemp("whole"))


def saving(options: RunOptions, folder: Path, every: int = 0, **changes: Any) -> RunOptions:
    return replace(options, checkpoints=Checkpoints(folder, every), **changes)


# ---- going on


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_uninterrupted_one(
    before: int, after: int, schedules: dict[int, Schedule], options: RunOptions, whole: Whole, tmp_path: Path
) -> None:
    """With dropout, statistics, tied weights and a buffer that the state_dict leaves out; on other devices, too."""
    folder, weights = tmp_path / "checkpoints", tmp_path / "w.safetensors"
    first = run_schedule(schedules[before], saving(options, folder, steps=3))
    assert first.losses == whole.losses[:3]
    told: list[int] = []
    second = run_schedule(
        schedules[after],
        saving(options, folder),
        weights_out=weights,
        resume=True,
        progress=lambda k, loss, seconds: told.append(k),
    )
    assert told == [3, 4, 5]
    assert len(second.losses) == 3
    whole.check(second.losses, load_file(weights))
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000003", "step-00000006"]


def test_checkpoints_are_made_while_training_goes_on_and_the_last_two_stay(
    schedules: dict[int, Schedule], options: RunOptions, whole: Whole, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    trace = run_schedule(schedules[2], saving(options, folder, every=1))
    assert trace.losses == whole.losses
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000005", "step-00000006"]
    # the one before the last is of its own moment: what follows from it is what followed
    shutil.rmtree(folder / "step-00000006")
    weights = tmp_path / "w.safetensors"
    again = run_schedule(schedules[1], saving(options, folder), weights_out=weights, resume=True)
    whole.check(again.losses, load_file(weights))
    assert len(again.losses) == 1


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_any_moment_it_goes_on_exactly(
    kills: int, schedules: dict[int, Schedule], options: RunOptions, tmp_path: Path
) -> None:
    """Checkpoints after every iteration, SIGKILL to the whole group at random moments of training."""
    steps = 40 * kills
    whole = Whole(schedules[1], replace(options, steps=steps), tmp_path)
    folder, weights = tmp_path / "checkpoints", tmp_path / "resumed.safetensors"
    store.save(schedules[1], tmp_path / "s.json")
    arguments = ["run", "s.json", "--steps", str(steps), "--lr", "0.01", "--unpaced", "--resume"]
    arguments += ["--checkpoint", str(folder), "--checkpoint-every", "1", "--weights-out", str(weights)]
    command = [sys.executable, "-m", "executor", *arguments]
    dice = random.Random(kills)
    for _ in range(kills):
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stderr is not None
        assert process.stderr.readline().startswith("iteration "), "it trains"
        time.sleep(dice.uniform(0.0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
        assert not weights.exists(), "it was killed before its end"
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    whole.check((), load_file(weights))
    assert sorted(p.name for p in folder.iterdir()) == [f"step-{steps - 1:08d}", f"step-{steps:08d}"]


# ---- other programs' files


def test_plain_pytorch_loads_a_checkpoint_and_a_run_starts_from_plain_pytorch_s(
    schedules: dict[int, Schedule], options: RunOptions, tmp_path: Path
) -> None:
    folder, out = tmp_path / "checkpoints", tmp_path / "out.safetensors"
    run_schedule(schedules[1], saving(options, folder, steps=1), weights_out=out)
    saved: dict[str, Tensor] = {}
    for file in (folder / "step-00000001").glob("model-*.safetensors"):
        saved |= load_file(file)
    model = options.load().model
    model.load_state_dict(saved)
    assert all(torch.equal(saved[name], tensor) for name, tensor in load_file(out).items())
    index = json.loads((folder / "step-00000001" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == saved.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in saved.values())

    torch.save(saved, tmp_path / "plain.pt")
    save_file({name: tensor.clone() for name, tensor in saved.items()}, tmp_path / "plain.safetensors")
    losses = [
        run_schedule(schedules[1], replace(options, steps=1, weights=tmp_path / name)).losses
        for name in ("plain.pt", "plain.safetensors", "checkpoints/step-00000001")
    ]
    assert losses[0] == losses[1] == losses[2]
    assert losses[0] != run_schedule(schedules[1], replace(options, steps=1)).losses


# ---- what is refused


@pytest.fixture(scope="module")
def saved(
    schedules: dict[int, Schedule], options: RunOptions, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with a checkpoint after two iterations; tests work on copies."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    run_schedule(schedules[1], saving(options, folder, steps=2))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "written with seed 0, this run has 1"),
        ({"settings": {"lr": 0.5}}, r"written with settings \{'lr': 0.01\}, this run has \{'lr': 0.5\}"),
        ({"steps": 2}, "has 2 iterations done, --steps 2 leaves none"),
    ],
)
def test_another_run_does_not_go_on(
    changes: dict[str, Any], message: str, schedules: dict[int, Schedule], options: RunOptions, saved: Path
) -> None:
    with pytest.raises(HarmonyError, match=message):
        run_schedule(schedules[1], saving(options, saved, **changes), resume=True)


def test_other_text_is_another_run() -> None:
    saved = Progress(3, 8, 0, "adamw", {"lr": 1e-2}, "abc", data="one")
    with pytest.raises(HarmonyError, match="written with data one, this run has two"):
        check_same_run(Path("step-00000003"), saved, msgspec.structs.replace(saved, data="two", steps=9))
    check_same_run(Path("step-00000003"), saved, msgspec.structs.replace(saved, steps=9))


def test_checkpoints_of_an_earlier_run_are_not_mixed_with_new_ones(
    schedules: dict[int, Schedule], options: RunOptions, saved: Path
) -> None:
    with pytest.raises(FormatError, match="has step-00000002 of an earlier run; go on with it by --resume"):
        run_schedule(schedules[1], saving(options, saved))


def replace_by_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "truncated": ("optimizer-00002-*", lambda file: file.write_bytes(file.read_bytes()[:100]), "optimizer-00002"),
    "lost": ("optimizer-00002-*", lambda file: file.unlink(), "no optimizer states of layer 1"),
    "weights truncated": ("model-00002-*", lambda file: file.write_bytes(file.read_bytes()[:100]), "model-00002"),
    "weights lost": ("model-00002-*", lambda file: file.unlink(), "no such file"),
    "no record": ("run.json", lambda file: file.unlink(), "run.json: is missing; there is no checkpoint before it"),
    "half a record": ("run.json", lambda file: file.write_text('{"steps":'), "run.json: Input data was truncated"),
    "a folder in its place": ("model-00002-*", replace_by_a_folder, "model-00002"),
    "other states": (
        "optimizer-00002-*",
        lambda file: (file.rename(file.with_name("optimizer-xx-of-00005.safetensors"))),
        "no optimizer states of layer 1",
    ),
    "another count": (
        "run.json",
        lambda file: file.write_text(file.read_text().replace('"steps": 2', '"steps": 1')),
        "says 1 iterations, its folder is step-00000002; there is no checkpoint before it",
    ),
    "another shape": (
        "model-00002-*",
        lambda file: save_file({name: torch.zeros(3) for name in load_file(file)}, file),
        r"has shape \(3,\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_its_file(
    damage: str, schedules: dict[int, Schedule], options: RunOptions, saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    pattern, do, message = DAMAGES[damage]
    (file,) = (folder / "step-00000002").glob(pattern)
    do(file)
    with pytest.raises(FormatError, match=message):
        run_schedule(schedules[1], saving(options, folder), resume=True)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("place", ["a file", "read-only", "in no folder", "a file like a checkpoint"])
def test_a_place_that_cannot_hold_checkpoints_is_refused_before_the_run(
    place: str, resume: bool, options: RunOptions, schedules: dict[int, Schedule], tmp_path: Path
) -> None:
    folder = tmp_path / "c"
    if place == "a file":
        folder.touch()
    elif place == "in no folder":
        folder = tmp_path / "no" / "c"
    else:
        folder.mkdir()
    if place == "a file like a checkpoint":
        (folder / "step-00000001").touch()
    if place == "read-only":
        folder.chmod(0o555)
        if os.access(folder, os.W_OK):
            pytest.skip("this user may write everywhere")
    message = {
        "a file": "is no folder",
        "read-only": "cannot be written to",
        "in no folder": "no such folder",
        "a file like a checkpoint": "step-00000001: is no folder, but named like a checkpoint",
    }[place]
    missing = replace(options, model="no/such.py:make")
    with pytest.raises(FormatError, match=message):
        run_schedule(schedules[1], saving(missing, folder), resume=resume)


def test_two_runs_do_not_write_to_one_folder(
    schedules: dict[int, Schedule], options: RunOptions, saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(HarmonyError, match="another run writes its checkpoints there"):
            run_schedule(schedules[1], saving(options, folder), resume=True)
    finally:
        os.close(descriptor)
    assert len(run_schedule(schedules[1], saving(options, folder), resume=True).losses) == STEPS - 2


def test_weights_that_are_no_plain_tensors_are_refused(
    schedules: dict[int, Schedule], options: RunOptions, tmp_path: Path
) -> None:
    state = options.load().model.state_dict()
    name = "first.weight"
    torch.save(state | {name: state[name].to("meta")}, tmp_path / "meta.pt")
    torch.save(state | {name: state[name].to_sparse()}, tmp_path / "sparse.pt")
    for file in ("meta.pt", "sparse.pt"):
        with pytest.raises(FormatError, match=r"is sparse or has no data|neither a .safetensors file nor"):
            run_schedule(schedules[1], replace(options, weights=tmp_path / file))
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert len(run_schedule(schedules[1], replace(options, steps=1, weights=tmp_path / "old.pt")).losses) == 1


def test_weights_go_through_a_pipe(
    options: RunOptions, schedules: dict[int, Schedule], tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    run_schedule(schedules[1], replace(options, steps=1), weights_out=pipe)
    reader.join(10)
    assert "first.weight" in load(read[0])
    assert pipe.is_fifo()


def test_weights_of_another_model_are_refused(
    schedules: dict[int, Schedule], options: RunOptions, tmp_path: Path
) -> None:
    save_file({"other": torch.zeros(3)}, tmp_path / "other.safetensors")
    (tmp_path / "text.pt").write_text("no tensors")
    for name, message in (
        ("other.safetensors", "has no first.weight"),
        ("text.pt", "neither a .safetensors file nor"),
    ):
        with pytest.raises(FormatError, match=message):
            run_schedule(schedules[1], replace(options, weights=tmp_path / name))
