"""The commands as a user meets them: what goes to which stream, and what the exit status says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from executor import hardware as measured
from executor.cli import main
from planner.contract import store
from planner.contract.hardware import DeviceSpec
from planner.contract.profile import model_hash
from planner.contract.rules import Rules
from planner.contract.schedule import (
    BackwardPack,
    Configuration,
    DevicePrediction,
    ForwardPack,
    Microbatches,
    PlannedFor,
    Predicted,
    Programs,
    Schedule,
    print_program,
)
from planner.lower import lower

MiB = 1 << 20
LINKS = ("--h2d", "500MB/s", "--d2h", "500MB/s")
MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def draw(generator, num_samples):
    return {name: torch.randn(num_samples, 16, generator=generator) for name in "xy"}


def make():
    return Net().train(), draw, lambda model, batch: nn.functional.mse_loss(model(batch["x"]), batch["y"])


def broken():
    raise ZeroDivisionError("the model's own fault")


def broken_data():
    model, draw, loss = make()

    def draw_once(generator, num_samples, drawn=[]):
        drawn.append(num_samples)
        if len(drawn) > 1:
            raise ZeroDivisionError("the data's own fault")
        return draw(generator, num_samples)

    return model, draw_once, loss
"""


class Made:
    """Files that every test here may read, made once by the commands themselves."""

    def __init__(self, folder: Path) -> None:
        self.model_file = folder / "cli_model.py"
        self.model_file.write_text(MODEL)
        self.spec = f"{self.model_file}:make"
        self.profile, self.hardware, self.schedule = (
            str(folder / f"{n}.json") for n in ("profile", "hardware", "schedule")
        )
        measure = ["profile", "--model", self.spec, "--microbatches", "1,2,4", "--repeats", "2"]
        assert main([*measure, "-o", self.profile]) == 0
        assert main(["hardware", "--memory", "16MiB", *LINKS, "-o", self.hardware]) == 0
        store.save(self.plan(), self.schedule)

    def plan(self, memory_bytes: int = 16 * MiB) -> Schedule:
        profile, hardware = store.load_profile(self.profile), store.load_hardware(self.hardware)
        last = len(profile.layers) - 1
        samples = ((0, 4), (4, 8))
        packs = (BackwardPack(0, last - 1, 0), BackwardPack(last, last, 0))
        configuration = Configuration(
            "pp", 1, 8, Microbatches(samples, samples), (ForwardPack(0, last - 1, 0),), packs
        )
        return Schedule(
            PlannedFor(profile.model, model_hash(profile), profile.dtype, profile.optimizer),
            msgspec.structs.replace(hardware, devices=(DeviceSpec("v0", memory_bytes),)),
            configuration,
            Predicted(0.01, 0.005, 1, (DevicePrediction(MiB, MiB, MiB),)),
            Programs(print_program(lower(Rules(profile, configuration), [16 * MiB]))),
        )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("cli"))


Capture = pytest.CaptureFixture[str]


# ---- profile


def test_profile_is_a_file_with_every_layer(made: Made) -> None:
    profile = store.load_profile(made.profile)
    assert profile.model.spec == made.spec
    assert len(profile.layers) >= 3
    assert [cost.microbatch_size for cost in profile.layers[0].backward] == [1, 2, 4]
    assert profile.device.name == "virtual"
    assert profile.device.threads == 1, "ranks run with one thread, so the profile does"


def test_profile_to_standard_output_leaves_the_table_to_standard_error(made: Made, capsys: Capture) -> None:
    arguments = [
        "profile",
        "--model",
        made.spec,
        "--microbatches",
        "2",
        "--repeats",
        "2",
        "--layers",
        "blocks.*",
    ]
    assert main([*arguments, "-o", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["schema"] == "harmony-profile/1"
    assert json.loads(out)["model"]["patterns"] == ["blocks.*"]
    assert "blocks.1" in err


def test_profile_as_json_and_as_a_table(made: Made, capsys: Capture) -> None:
    arguments = ["profile", "--model", made.spec, "--microbatches", "2", "--repeats", "2"]
    assert main([*arguments, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["microbatch_sizes"] == [2]
    assert summary["model_hash"] == model_hash(store.load_profile(made.profile))
    assert main(arguments) == 0
    assert "blocks.1" in capsys.readouterr().out


def test_momentum_counts_as_state(made: Made, capsys: Capture) -> None:
    arguments = [
        "profile",
        "--model",
        made.spec,
        "--microbatches",
        "2",
        "--repeats",
        "2",
        "--optimizer",
        "sgd",
        "--json",
    ]
    sizes = []
    for more in ([], ["--momentum", "0.9"]):
        assert main([*arguments, *more]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["optimizer_state_bytes"])
    assert sizes[0] == 0 < sizes[1]


# ---- hardware


def test_virtual_hardware_is_what_was_asked_for(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "h.json"
    asked = [
        "--devices",
        "2",
        "--memory",
        "200MiB",
        "--reserved",
        "8MiB",
        *LINKS,
        "--latency",
        "0.001",
        "--sharing",
        "static",
    ]
    more = [
        "--peer",
        "1GB/s",
        "--compute-scale",
        "1,0.5",
        "--host-memory",
        "4GiB",
        "--pinnable",
        "2GiB",
        "--update-workers",
        "3",
    ]
    assert main(["hardware", *asked, *more, "--name", "two", "-o", str(path)]) == 0
    found = store.load_hardware(path)
    assert [d.memory_bytes for d in found.devices] == [200 * MiB] * 2
    assert [d.reserved_bytes for d in found.devices] == [8 * MiB] * 2
    assert [d.compute_scale for d in found.devices] == [1.0, 0.5]
    (link,) = found.host_links
    assert (link.h2d_bytes_per_second, link.d2h_bytes_per_second, link.latency_seconds) == (5e8, 5e8, 0.001)
    assert (link.sharing, found.peer_bytes_per_second, found.name) == ("static", 1e9, "two")
    assert (found.host.memory_bytes, found.host.pinnable_bytes, found.host.update_workers) == (
        4 << 30,
        2 << 30,
        3,
    )
    assert "200.0 MiB" in capsys.readouterr().out


def test_hardware_is_checked_by_copying_and_a_rate_out_of_reach_is_a_warning(capsys: Capture) -> None:
    assert main(["hardware", "--memory", "1GiB", "--h2d", "900GB/s", "--d2h", "100MB/s", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["host_links"][0]["h2d_bytes_per_second"] == 9e11
    lines = [line for line in err.splitlines() if "h2d" in line]
    assert len(lines) == 1
    assert lines[0].startswith("harmony-executor: warning: h2d of device 0 takes ")


@pytest.mark.parametrize("sharing", ["none", "static", "fair"])
def test_copies_take_what_the_rate_says(sharing: Any) -> None:
    """Two devices, both directions at once; the bound leaves room for the other users of this machine."""
    found = measured.virtual_hardware(
        2, MiB, h2d_bytes_per_second=2e8, d2h_bytes_per_second=1e8, sharing=sharing
    )
    checks = measured.check_links(found)
    assert [(c.device, c.direction) for c in checks] == [(0, "h2d"), (0, "d2h"), (1, "h2d"), (1, "d2h")]
    assert all(-0.001 <= check.error < 0.25 for check in checks), checks


# ---- run


def test_run_trains_and_tells(made: Made, tmp_path: Path, capsys: Capture) -> None:
    trace_path, weights = tmp_path / "t.json", tmp_path / "w.safetensors"
    arguments = ["run", made.schedule, "--steps", "3", "--seed", "1", "--unpaced"]
    assert main([*arguments, "-o", str(trace_path), "--weights-out", str(weights)]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[:2] for line in err.splitlines()] == [["iteration", f"{k}/3"] for k in (1, 2, 3)]
    assert all(word in err for word in ("loss", "samples/s"))
    assert "an iteration" in out.splitlines()[0]
    assert "(planned 10.0 ms, " in out.splitlines()[0]
    assert out.splitlines()[1].startswith("gpu0: peak ")
    trace = store.load_trace(trace_path)
    assert trace.notes["seed"] == 1
    assert trace.schedule_hash == store.schedule_hash(store.load_schedule(made.schedule))
    assert weights.stat().st_size > 0
    # the same numbers without the schedule
    assert main(["run", made.schedule, "--plain", "--steps", "3", "--seed", "1", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert tuple(summary["losses"]) == trace.losses
    assert len(summary["iteration_seconds"]) == 2


def test_trace_to_standard_output_leaves_results_to_standard_error(made: Made, capsys: Capture) -> None:
    arguments = ["run", made.schedule, "--plain", "--steps", "2", "-o", "-"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["harmony"]["schema"] == "harmony-trace/1"
    assert "an iteration" in err


def test_schedule_from_standard_input(made: Made) -> None:
    command = [sys.executable, "-m", "executor", "run", "-", "--plain", "--steps", "1", "--json"]
    with Path(made.schedule).open() as file:
        done = subprocess.run(command, stdin=file, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["median_iteration_seconds"] is None, "one iteration is all warm-up"


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_plain_needs_no_schedule(made: Made, capsys: Capture) -> None:
    arguments = [
        "run",
        "--plain",
        "--model",
        made.spec,
        "--minibatch",
        "6",
        "--microbatch",
        "4",
        "--steps",
        "2",
    ]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"][0]["swap_in_bytes"] == 0


def test_plain_over_its_budget_is_one_line_and_status_1(made: Made, capsys: Capture) -> None:
    assert main(["run", made.schedule, "--plain", "--budget", "8KiB"]) == 1
    check_one_line(capsys, "out of memory: plain: ", "over the limit of 8192")


def test_out_of_memory_during_a_run_is_one_line_and_status_1(
    made: Made, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "s.json"
    store.save(made.plan(memory_bytes=5000), path)
    assert main(["run", str(path), "--steps", "2", "--unpaced"]) == 1
    check_one_line(capsys, "out of memory: gpu0/", "over the limit of 5000")


def test_bug_in_a_rank_shows_its_traceback_and_status_1(made: Made, capsys: Capture) -> None:
    assert main(["run", made.schedule, "--model", made.spec.replace(":make", ":broken_data")]) == 1
    err = capsys.readouterr().err
    assert "gpu0 failed:" in err
    assert "ZeroDivisionError: the data's own fault" in err


@pytest.mark.parametrize("command", ["profile", "run"])
def test_model_that_cannot_be_made_is_one_line(made: Made, capsys: Capture, command: str) -> None:
    arguments = [command] if command == "profile" else [command, made.schedule]
    assert main([*arguments, "--model", made.spec.replace(":make", ":broken")]) == 2
    check_one_line(capsys, "broken() raised ZeroDivisionError: the model's own fault", "cli_model.py, line ")


def test_model_file_that_is_no_python_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "no_python.py").write_text("def make(:\n")
    assert main(["profile", "--model", f"{tmp_path / 'no_python.py'}:make"]) == 2
    check_one_line(capsys, "it raised SyntaxError", "line 1")


def check_one_line(capsys: Capture, *parts: str) -> None:
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if not line.startswith("iteration ")]
    assert len(lines) == 1, err
    assert lines[0].startswith("harmony-executor: ")
    for part in parts:
        assert part in lines[0]


# ---- bad input: one line, no traceback, status 2


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "no command"),
        (["walk"], "walk"),
        (["run", "--steps", "many", "SCHEDULE"], "'--steps'"),
        (["run", "SCHEDULE", "--lr", "nan"], "--lr nan: must be finite and 0 or more"),
        (["run", "SCHEDULE", "--weight-decay", "inf"], "--weight-decay inf: must be finite"),
        (["run", "SCHEDULE", "-o", "."], ".: is a folder; name a file in it"),
        (["run", "SCHEDULE", "--weights-out", "no/w"], "no/w: no such folder to write to"),
        (["profile", "--model", "x.py:f", "-o", "no/p"], "no/p: no such folder to write to"),
        (["run", "SCHEDULE", "--steps", "0"], "'--steps'"),
        (["run"], "no SCHEDULE"),
        (["run", "gone.json"], "gone.json: No such file"),
        (["run", "PROFILE"], "this is a profile file (harmony-profile/1), needed here is a schedule file"),
        (["run", "SCHEDULE", "--device", "tpu"], "--device tpu: use one of virtual, cuda"),
        (["run", "SCHEDULE", "--budget", "1GiB"], "only with --plain"),
        (["run", "SCHEDULE", "--plain", "--budget", "1Gb"], "a size looks like"),
        (["run", "SCHEDULE", "--optimizer", "sgd"], "planned for optimizer 'adamw'"),
        (["run", "SCHEDULE", "-o", "no/such/t.json"], "no such folder"),
        (["run", "SCHEDULE", "-o", "-", "--json"], "choose one"),
        (["run", "--plain", "--minibatch", "4"], "--model is missing"),
        (["run", "--plain", "--model", "MODEL"], "--minibatch is missing"),
        (["run", "--plain", "--model", "MODEL", "--minibatch", "4", "--optimizer", "lbfgs"], "all gradients at once"),
        (["profile"], "--model"),
        (["profile", "--model", "nowhere"], "say hf:NAME"),
        (["profile", "--model", "MODEL", "--microbatches", "1,x"], "sizes look like 1,2,4,8"),
        (["profile", "--model", "MODEL", "--microbatches", "0"], "sizes look like 1,2,4,8"),
        (["profile", "--model", "MODEL", "--layers", "nothing.*", "--microbatches", "1"], "nothing.*"),
        (["profile", "--model", "MODEL", "--optimizer", "adamm", "--microbatches", "1"], "no such optimizer"),
        (["profile", "--model", "MODEL", "--data", "x.txt"], "only hf: models read it"),
        (["hardware"], "--memory, --h2d, --d2h missing"),
        (["hardware", "--memory", "1GiB", "--h2d", "fast", "--d2h", "1GB/s"], "'fast': a rate looks like"),
        (["hardware", "--memory", "1GiB", *LINKS, "--sharing", "some"], "none, fair, static"),
        (["hardware", "--memory", "1GiB", *LINKS, "--devices", "2", "--compute-scale", "1,1,1"], "3 figures for 2 devices"),
        (["hardware", "--memory", "1GiB", *LINKS, "--compute-scale", "fast"], "speeds look like"),
        (["hardware", "--memory", "1GiB", *LINKS, "--reserved", "2GiB"], "leave nothing"),
        (["hardware", "--memory", "1GiB", *LINKS, "--devices", "0"], "'--devices'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], part: str, made: Made, capsys: Capture
) -> None:
    known = {"SCHEDULE": made.schedule, "PROFILE": made.profile, "MODEL": made.spec}
    assert main([known.get(argument, argument) for argument in arguments]) == 2
    check_one_line(capsys, part)


@pytest.mark.parametrize("command", ["profile", "hardware", "run"])
def test_cuda_without_a_gpu_is_one_line(command: str, made: Made, capsys: Capture) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    arguments = {
        "profile": ["--model", made.spec, "--microbatches", "1"],
        "hardware": [],
        "run": [made.schedule],
    }[command]
    assert main([command, *arguments, "--device", "cuda"]) == 2
    check_one_line(capsys, "--device cuda")


def test_help_and_bad_input_do_not_wait_for_torch() -> None:
    code = "import sys; from executor.cli import main; status = main(['run', 'gone.json']); sys.exit(status + ('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
