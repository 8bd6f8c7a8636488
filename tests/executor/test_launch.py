"""Real processes: a run equals plain training, and however it fails, it ends at once and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file

from executor.launch import RunError, run_schedule
from executor.options import RunOptions
from executor.plain import run_plain
from executor.reference import train
from planner.contract import store
from planner.contract.errors import FormatError, HarmonyError, VerifyError
from planner.contract.hardware import DeviceSpec
from planner.contract.schedule import Programs, Schedule
from tests.executor.schedules import FOUR, make_schedule

AT_ONCE_SECONDS = 2.0

MODEL = """
import os
import time

import torch
from torch import nn

COUNT = 0


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4))
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def fail():
    with open(os.environ["WHEN"], "w") as file:
        file.write(str(time.time()))
    raise ZeroDivisionError("the model's own fault")


def draw(generator, num_samples):
    global COUNT
    COUNT += 1
    fault = os.environ.get("FAULT", "")
    if fault == f"load {os.environ.get('RANK')}" or (fault == "late" and COUNT == 6):
        fail()
    if fault == "slow":
        time.sleep(0.05)
    return {name: torch.randn(num_samples, 8, generator=generator) for name in "xy"}


def loss(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def make():
    return Net(8).train(), draw, loss


def make_other():
    model = Net(8)
    model.blocks.append(nn.Linear(8, 8))
    return model.train(), draw, loss
"""


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("launch") / "launched_model.py"
    path.write_text(MODEL)
    return path


@pytest.fixture(scope="module")
def options(model_file: Path) -> RunOptions:
    return RunOptions(f"{model_file}:make", steps=4, settings={"lr": 1e-2}, paced=False)


@pytest.fixture(scope="module")
def schedule(options: RunOptions) -> Schedule:
    return make_schedule(options)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """No process, nothing in /dev/shm, whatever the test did."""
    before = sorted(Path("/dev/shm").iterdir())
    yield
    assert not ranks_of(os.getpid())
    assert sorted(Path("/dev/shm").iterdir()) == before


def ranks_of(pid: int) -> list[psutil.Process]:
    """The processes of ranks that a process has started. (multiprocessing has a tracker of its own beside them.)"""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if any("spawn_main" in part for part in child.cmdline())]


def seconds_since(path: Path) -> float:
    return time.time() - float(path.read_text())


# ---- a run that succeeds


def test_run_equals_plain_training_and_writes_trace_and_weights(
    options: RunOptions, schedule: Schedule, tmp_path: Path
) -> None:
    schedule_path, trace_path, weights_path = (
        tmp_path / name for name in ("s.json", "t.json", "w.safetensors")
    )
    store.save(schedule, schedule_path)
    told: list[tuple[int, float]] = []
    trace = run_schedule(
        schedule_path,
        options,
        trace_path=trace_path,
        weights_out=weights_path,
        progress=lambda k, loss, seconds: told.append((k, loss)),
    )
    plain = train(options.load(), options, FOUR)
    assert trace.losses == plain.losses
    assert told == list(enumerate(plain.losses))
    assert len(trace.iteration_seconds) == options.steps - 1
    weights = load_file(weights_path)
    assert set(weights) == {*plain.parameters, "scale"}
    for name, parameter in plain.parameters.items():
        assert torch.equal(weights[name], parameter), name
    assert weights_path.stat().st_mode == trace_path.stat().st_mode
    written = store.load_trace(trace_path)
    assert written.schedule_hash == store.schedule_hash(store.load_schedule(schedule_path))
    assert written.losses == trace.losses
    assert {span.device for span in written.spans} == {0, 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.json", "t.json", "w.safetensors"]


def test_plain_run_writes_the_same_weights_and_a_trace(
    options: RunOptions, schedule: Schedule, tmp_path: Path
) -> None:
    trace = run_plain(
        schedule, options, FOUR, trace_path=tmp_path / "t.json", weights_out=tmp_path / "w.safetensors"
    )
    plain = train(options.load(), options, FOUR)
    weights = load_file(tmp_path / "w.safetensors")
    assert set(weights) == {*plain.parameters, "scale"}
    assert all(torch.equal(weights[name], parameter) for name, parameter in plain.parameters.items())
    assert trace.losses == plain.losses
    assert store.load_trace(tmp_path / "t.json").devices == trace.devices
    assert trace.model_hash == schedule.profile.model_hash


@pytest.mark.slow
def test_torchrun_starts_the_ranks_as_well(options: RunOptions, schedule: Schedule, tmp_path: Path) -> None:
    store.save(schedule, tmp_path / "s.json")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = ["-m", "executor", "run", str(tmp_path / "s.json"), "--steps", "4", "--lr", "1e-2", "--unpaced"]
    done = subprocess.run(
        [*torchrun, *run, "-o", str(tmp_path / "t.json")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert store.load_trace(tmp_path / "t.json").losses == train(options.load(), options, FOUR).losses
    assert done.stdout.count("an iteration") == 3, "one summary and two devices, from rank 0 alone"


# ---- refused before it runs


def test_schedule_of_another_model_is_one_line_that_names_both(
    options: RunOptions, schedule: Schedule, model_file: Path
) -> None:
    """Case 39."""
    other = replace(options, model=f"{model_file}:make_other")
    with pytest.raises(FormatError) as caught:
        run_schedule(schedule, other)
    message = str(caught.value)
    assert "\n" not in message
    assert options.model in message
    assert schedule.profile.model_hash in message
    assert other.model in message
    with pytest.raises(FormatError, match="planned for model"):
        run_plain(schedule, other, FOUR)


def test_schedule_of_another_optimizer_is_refused_before_a_process_starts(
    options: RunOptions, schedule: Schedule
) -> None:
    started = time.monotonic()
    with pytest.raises(FormatError, match=r"planned for optimizer 'adamw', the run asks for 'sgd'"):
        run_schedule(schedule, replace(options, optimizer="SGD"))
    assert time.monotonic() - started < 0.5


def test_folder_that_is_missing_is_found_out_before_the_run(
    options: RunOptions, schedule: Schedule, tmp_path: Path
) -> None:
    for given in ({"trace_path": tmp_path / "no" / "t.json"}, {"weights_out": tmp_path / "no" / "w"}):
        with pytest.raises(FormatError, match="no such folder"):
            run_schedule(schedule, options, **given)  # type: ignore[arg-type]


def test_program_that_breaks_a_rule_is_refused(options: RunOptions, schedule: Schedule) -> None:
    streams = schedule.programs.train
    short = msgspec.structs.replace(streams[0], actions=streams[0].actions[:-1])
    broken = msgspec.structs.replace(schedule, programs=Programs((short, *streams[1:])))
    with pytest.raises(VerifyError) as caught:
        run_schedule(broken, options)
    assert "\n" not in str(caught.value)


def test_model_that_cannot_be_loaded_is_one_line(options: RunOptions, schedule: Schedule) -> None:
    with pytest.raises(HarmonyError, match=r"has no function 'gone'") as caught:
        run_schedule(schedule, replace(options, model=options.model.replace(":make", ":gone")))
    assert "\n" not in str(caught.value)


# ---- failures


@pytest.mark.parametrize("fault", [pytest.param("load 0", marks=pytest.mark.slow), "load 1", "late"])
def test_rank_that_raises_ends_the_others_at_once_and_shows_its_traceback(
    fault: str, options: RunOptions, schedule: Schedule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("WHEN", str(tmp_path / "when"))
    with pytest.raises(RunError, match="the model's own fault") as caught:
        run_schedule(schedule, replace(options, steps=1000))
    assert seconds_since(tmp_path / "when") < AT_ONCE_SECONDS
    rank = fault.removeprefix("load ") if fault != "late" else "0"
    assert str(caught.value).startswith(f"gpu{rank} failed:\nTraceback")
    assert "in draw" in str(caught.value)


def test_out_of_memory_on_one_rank_is_one_line_that_names_the_action(
    options: RunOptions, schedule: Schedule
) -> None:
    hardware = schedule.hardware
    small = msgspec.structs.replace(hardware, devices=(hardware.devices[0], DeviceSpec("v1", 700)))
    with pytest.raises(
        torch.OutOfMemoryError, match=r"^gpu1/\w+\[\d+\] \S+: .* over the limit of 700$"
    ) as caught:
        run_schedule(msgspec.structs.replace(schedule, hardware=small), replace(options, steps=1000))
    assert "\n" not in str(caught.value)


def test_rank_that_is_killed_is_named_and_the_others_end(options: RunOptions, schedule: Schedule) -> None:
    killed: list[float] = []

    def kill_one(iteration: int, loss: float, seconds: float) -> None:
        if not killed:
            ranks_of(os.getpid())[-1].kill()
            killed.append(time.monotonic())

    with pytest.raises(RunError, match=r"^gpu\d: its process was ended by SIGKILL"):
        run_schedule(schedule, replace(options, steps=100_000), progress=kill_one)
    assert time.monotonic() - killed[0] < AT_ONCE_SECONDS


def test_progress_that_raises_ends_the_run(options: RunOptions, schedule: Schedule) -> None:
    """Ctrl-C arrives in the parent like this."""

    def interrupt(iteration: int, loss: float, seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_schedule(schedule, replace(options, steps=100_000), progress=interrupt)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_killed_parent_leaves_no_process_behind(
    how: signal.Signals, options: RunOptions, schedule: Schedule, tmp_path: Path
) -> None:
    store.save(schedule, tmp_path / "s.json")
    command = [
        sys.executable,
        "-m",
        "executor",
        "run",
        str(tmp_path / "s.json"),
        "--steps",
        "1000000",
        "--unpaced",
        "--lr",
        "1e-2",
    ]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert parent.stderr is not None
        assert parent.stderr.readline().startswith("iteration 1/"), "it runs"
        ranks = ranks_of(parent.pid)
        assert len(ranks) == 2
    finally:
        parent.send_signal(how)
    parent.wait()
    parent.stderr.close()
    _, alive = psutil.wait_procs(ranks, timeout=AT_ONCE_SECONDS)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
