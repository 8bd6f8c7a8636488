"""Several servers: agents of torchrun on this machine, one each, train together what one process trains alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from executor.launch import run_schedule
from executor.options import RunOptions
from executor.reference import train
from executor.servers import Servers
from planner.contract import store
from planner.contract.errors import HarmonyError
from planner.contract.fixed import Fixed
from planner.contract.profile import Profile
from planner.contract.schedule import Samples, Schedule
from planner.contract.verify import verify
from planner.search import plan_fixed
from tests.executor.test_any_model import make_hardware, profiled
from tests.executor.test_clipping import UNTIED

ROOT = Path(__file__).parents[2]
NUM_SERVERS = 2
OF_EACH = 4
"""Samples of a server."""
STEPS = 3
LR = 1e-3
CLIP = 0.3


def make_options(dtype: str = "", clip: bool = False) -> RunOptions:
    return RunOptions(
        UNTIED, steps=STEPS, settings={"lr": LR}, dtype=dtype, paced=False, clip_norm=CLIP if clip else None
    )


def make_schedule(profile: Profile, clip: bool = False, num_devices: int = 2) -> Schedule:
    count = len(profile.layers)
    schedule = plan_fixed(
        profile,
        msgspec.structs.replace(make_hardware(num_devices), network_bytes_per_second=1e9),
        Fixed(2, 2, (1,) * (count - 1), (1,) * count),
        minibatch=NUM_SERVERS * OF_EACH,
        clip=clip,
        num_servers=NUM_SERVERS,
    ).schedule
    assert schedule is not None
    verify(schedule, profile, schedule.hardware)
    return schedule


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def is_listening(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0


def start_agent(port: int, arguments: list[str], log: Path, num_devices: int = 2) -> subprocess.Popen[bytes]:
    """torchrun as on one of the servers; a process group of its own, to be killed as one."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(NUM_SERVERS)]
    command += ["--nproc-per-node", str(num_devices), "--max-restarts", "3", "--rdzv-id", "test"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    # a server that is gone is found out sooner than by default
    command += ["--rdzv-conf", "timeout=120,keep_alive_interval=1,keep_alive_max_attempt=3"]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with log.open("wb") as printed:
        return subprocess.Popen(
            [*command, *arguments],
            cwd=log.parent,
            env=environment,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(agents: list[subprocess.Popen[bytes]]) -> None:
    for agent in agents:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()


def run_on_two(arguments: list[str], folder: Path, num_devices: int = 2) -> list[str]:
    """Until both have ended well; what each has printed."""
    port = free_port()
    logs = [folder / f"server{s}.log" for s in range(NUM_SERVERS)]
    agents = [start_agent(port, arguments, log, num_devices) for log in logs]
    try:
        for agent, log in zip(agents, logs, strict=True):
            assert agent.wait(timeout=120) == 0, log.read_text()
    finally:
        end(agents)
    return [log.read_text() for log in logs]


def run_arguments(*more: str) -> list[str]:
    return [
        "-m",
        "executor",
        "run",
        "s.json",
        "--lr",
        str(LR),
        "--unpaced",
        "--weights-out",
        "w.safetensors",
        *more,
    ]


def all_microbatches(schedule: Schedule) -> tuple[Samples, ...]:
    """Of all servers, one after the other."""
    own = schedule.configuration.microbatches.backward
    return tuple((s * OF_EACH + a, s * OF_EACH + b) for s in range(NUM_SERVERS) for a, b in own)


@pytest.mark.parametrize(
    ("dtype", "clip"),
    [
        ("", False),
        pytest.param("", True, marks=pytest.mark.slow),
        pytest.param("bfloat16", False, marks=pytest.mark.slow),
    ],
)
def test_two_servers_train_as_one_process_does(dtype: str, clip: bool, tmp_path: Path) -> None:
    options = make_options(dtype, clip)
    schedule = make_schedule(profiled(options), clip)
    store.save(schedule, tmp_path / "s.json")
    more = ["--clip-norm", str(CLIP)] if clip else []
    run_on_two(run_arguments("--steps", str(STEPS), "-o", "t.json", *more), tmp_path)
    plain = train(options.load(), options, all_microbatches(schedule))
    trace = store.load_trace(tmp_path / "t.json")
    assert trace.samples_per_iteration == NUM_SERVERS * OF_EACH
    exact = dtype == ""
    assert trace.losses == pytest.approx(plain.losses, rel=1e-5 if exact else 1e-3)
    weights = load_file(tmp_path / "w.safetensors")
    for name, parameter in plain.parameters.items():
        # as far as another order of additions takes Adam's first steps
        assert torch.allclose(
            weights[name], parameter, rtol=0, atol=0.02 * LR * STEPS if exact else 2 * LR * STEPS
        ), name


@pytest.mark.slow
def test_a_run_goes_on_from_the_last_checkpoint_when_a_server_is_replaced(tmp_path: Path) -> None:
    """It ends with the weights of a run that nothing happened to."""
    schedule = make_schedule(profiled(make_options()))
    arguments = run_arguments("--steps", "30", "--checkpoint", "c", "--checkpoint-every", "2", "--resume")
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        store.save(schedule, tmp_path / name / "s.json")
    run_on_two(arguments, tmp_path / "whole")
    folder, port = tmp_path / "killed", free_port()
    agents = [start_agent(port, arguments, folder / "server0.log")]
    try:
        deadline = time.monotonic() + 60
        # the one that comes first hosts the rendezvous, and stays
        while not is_listening(port):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        agents.append(start_agent(port, arguments, folder / "server1.log"))
        while not any((folder / "c").glob("step-*")):
            assert time.monotonic() < deadline, (folder / "server0.log").read_text()
            time.sleep(0.02)
        end(agents[1:])
        assert not (folder / "w.safetensors").exists(), "killed in the midst of it"
        agents[1] = start_agent(port, arguments, folder / "again.log")
        for agent in agents:
            assert agent.wait(timeout=120) == 0, [log.read_text() for log in folder.glob("*.log")]
    finally:
        end(agents)
    expected = load_file(tmp_path / "whole" / "w.safetensors")
    found = load_file(folder / "w.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_one_process_alone_is_told_how_to_start_all() -> None:
    options = make_options()
    schedule = make_schedule(profiled(options))
    with pytest.raises(
        HarmonyError, match=r"for 2 servers; start it on each, with torchrun --nnodes 2 --nproc-per-node 2"
    ):
        run_schedule(schedule, options)


def test_one_server_adds_nothing() -> None:
    alone = Servers()
    gradient = torch.ones(3)
    alone.add_gradients([gradient], [])
    assert alone.sum(2.0) == 2.0
    assert torch.equal(gradient, torch.ones(3))
