"""The commands: results on stdout, one line on stderr where something is wrong, exit status 0, 1 or 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from planner.cli import main
from planner.commands.compare import parse_share
from planner.contract import store
from planner.contract.errors import FormatError
from planner.contract.hardware import Hardware
from planner.contract.profile import Profile
from planner.contract.schedule import DevicePrediction, Schedule
from planner.contract.trace import Trace
from planner.render import lane_in_short
from planner.simulate import simulate
from tests.planner.tiny import (
    PROFILE,
    TWO,
    TWO_PROGRAM,
    hardware,
    lanes_of,
    measured,
    mutated,
    peak_bytes,
    schedule_of,
)

ROOT = Path(__file__).parents[2]
replace = msgspec.structs.replace


class Done(NamedTuple):
    status: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, the current one, with every kind of file of the two-device program."""
    monkeypatch.chdir(tmp_path)
    schedule = schedule_of(TWO_PROGRAM, TWO)
    trace = simulate(schedule, PROFILE, hardware(2))
    devices = tuple(
        DevicePrediction(d.peak_bytes, d.swap_in_bytes, d.swap_out_bytes, d.peer_bytes) for d in trace.devices
    )
    seconds = trace.iteration_seconds[0]
    predicted = replace(
        schedule.predicted, iteration_seconds=seconds, lower_bound_seconds=seconds / 2, devices=devices
    )
    schedule = replace(schedule, predicted=predicted)
    broken = schedule_of(mutated(TWO_PROGRAM, "gpu0/host", ("update:1",), ()), TWO)
    nouns: dict[str, Profile | Hardware | Schedule | Trace] = {
        "profile": PROFILE,
        "hardware": hardware(2),
        "schedule": schedule,
        "broken": broken,
        "trace": trace,
        "run": measured(trace, slower=1.02),
        "slow": measured(trace, slower=1.5),
    }
    for name, noun in nouns.items():
        store.save(noun, tmp_path / name)
    return tmp_path


@pytest.fixture
def run(files: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """run(*arguments): the command in this process."""

    def call(*arguments: str) -> Done:
        capfd.readouterr()
        status = main(list(arguments))
        printed = capfd.readouterr()
        return Done(status, printed.out, printed.err)

    return call


PLAN = ("plan", "profile", "hardware", "--minibatch", "4")


# ---- what the commands do


def test_plan_writes_a_schedule_that_verifies_and_prints_what_it_costs(run: Run) -> None:
    done = run(*PLAN, "-o", "out")
    assert done.status == 0
    assert done.err == ""
    for word in (
        "predicted",
        "lower bound",
        "gap",
        "limited by",
        "peak",
        "limit",
        "swap in",
        "swap out",
        "packs",
        "microbatches",
    ):
        assert word in done.out
    assert run("verify", "out", "profile", "hardware").status == 0


def test_plan_is_deterministic(run: Run, files: Path) -> None:
    run(*PLAN, "-o", "a")
    run(*PLAN, "-o", "b")
    assert (files / "a").read_bytes() == (files / "b").read_bytes()


def test_plan_as_json(run: Run) -> None:
    found = json.loads(run(*PLAN, "--json").out)
    predicted = found["predicted"]
    assert found["gap"] == pytest.approx(
        1 - predicted["lower_bound_seconds"] / predicted["iteration_seconds"]
    )
    assert found["limited_by"]
    assert found["num_candidates"] > 0
    assert len(predicted["devices"]) == found["configuration"]["num_devices"] == 2


def test_plan_uses_as_many_devices_as_asked_for(run: Run) -> None:
    assert json.loads(run(*PLAN, "--devices", "1", "--json").out)["configuration"]["num_devices"] == 1


def test_plan_that_is_out_of_time_is_a_plan(run: Run, files: Path) -> None:
    assert run(*PLAN, "--time-limit", "0", "-o", "out").status == 0
    assert run("verify", "out", "profile", "hardware").status == 0


def test_plan_explains_where_the_time_goes_and_compares(run: Run) -> None:
    done = run(*PLAN, "--explain", "--top", "2", "--baselines")
    assert done.status == 0
    for word in ("critical path", "one more device", "host links twice as fast", "dp-swap", "pp-swap"):
        assert word in done.out
    figures = json.loads(run(*PLAN, "--explain", "--top", "2", "--json").out)
    assert sum(figures["critical_path_seconds"].values()) == pytest.approx(
        figures["predicted"]["iteration_seconds"]
    )
    assert len(figures["what_if"]) == 4
    assert len(figures["others"]) == 1
    other = figures["others"][0]["predicted"]["iteration_seconds"]
    assert other >= figures["predicted"]["iteration_seconds"]


def test_plan_takes_a_given_plan_or_the_one_of_a_schedule(run: Run, files: Path) -> None:
    given = {
        "schema": "harmony-fixed/1",
        "forward_microbatch": 2,
        "backward_microbatch": 2,
        "forward_packs": [1],
        "backward_packs": [1, 2],
    }
    (files / "fixed").write_text(json.dumps(given))
    assert run(*PLAN, "--fixed", "fixed", "-o", "out").status == 0
    assert run("verify", "out", "profile", "hardware").status == 0
    first, again = (run(*PLAN, "--fixed", name, "--json").out for name in ("fixed", "out"))
    assert json.loads(first)["predicted"] == json.loads(again)["predicted"]


def test_frontier_is_a_table_a_picture_and_json(run: Run, files: Path) -> None:
    grid = ("frontier", "profile", "hardware", "--minibatch", "2,4", "--devices", "1,2")
    done = run(*grid, "--memory", "1500,10KB", "--picture", "frontier.png")
    assert done.status == 0
    assert len(done.out.strip().splitlines()) == 1 + 8
    assert (files / "frontier.png").read_bytes().startswith(b"\x89PNG")
    points = json.loads(run(*grid, "--json").out)
    assert [(p["minibatch"], p["num_devices"]) for p in points] == [(2, 1), (2, 2), (4, 1), (4, 2)]


def test_a_grid_on_which_nothing_fits_has_no_solution(run: Run) -> None:
    done = run("frontier", "profile", "hardware", "--minibatch", "4", "--memory", "300", "--json")
    assert done.status == 2
    assert json.loads(done.out)[0]["seconds"] is None
    assert "nothing on this grid fits" in done.err


def test_plan_with_other_memory_plans_for_that_memory(run: Run, files: Path) -> None:
    assert run(*PLAN, "--memory", "1500", "-o", "out").status == 0
    schedule = store.load_schedule(files / "out")
    assert [device.memory_bytes for device in schedule.hardware.devices] == [1500, 1500]
    assert all(device.peak_bytes <= 1500 for device in schedule.predicted.devices)


def test_plan_to_standard_output_leaves_the_table_to_standard_error(run: Run, files: Path) -> None:
    done = run(*PLAN, "-o", "-")
    (files / "out").write_text(done.out)
    assert store.load_schedule(files / "out").configuration.minibatch == 4
    assert "predicted" in done.err


def test_verify_prints_each_device_and_where_its_peak_is(run: Run) -> None:
    done = run("verify", "schedule", "profile", "hardware")
    assert done.status == 0
    assert done.out.startswith("gpu0: at most ")
    assert "holds" in done.out
    found = json.loads(run("verify", "schedule", "profile", "hardware", "--json").out)
    assert found["holds"] is True
    assert [peak["bytes"] for peak in found["peaks"]] == peak_bytes(TWO_PROGRAM, TWO)


def test_verify_exits_with_1_where_a_rule_is_broken(run: Run) -> None:
    done = run("verify", "broken", "profile", "hardware")
    assert done.status == 1
    assert done.err.startswith("harmony-planner: does not hold: update:1 is in no stream")
    assert done.err.count("\n") == 1
    found = json.loads(run("verify", "broken", "profile", "hardware", "--json").out)
    assert found["holds"] is False
    assert "update:1" in found["fault"]


def test_verify_exits_with_1_where_the_memory_is_too_small(run: Run) -> None:
    enough = max(peak_bytes(TWO_PROGRAM, TWO))
    assert run("verify", "schedule", "profile", "hardware", "--memory", f"{enough}B").status == 0
    done = run("verify", "schedule", "profile", "hardware", "--memory", f"{enough - 1}B")
    assert done.status == 1
    assert f"1 over the limit of {enough - 1} bytes" in done.err


def test_simulate_writes_the_trace(run: Run, files: Path) -> None:
    done = run("simulate", "schedule", "profile", "hardware", "-o", "out")
    assert done.status == 0
    assert "an iteration" in done.out
    assert store.load_trace(files / "out") == store.load_trace(files / "trace")
    found = json.loads(run("simulate", "schedule", "profile", "hardware", "--json").out)
    assert found["iteration_seconds"] == store.load_trace(files / "trace").iteration_seconds[0]


def test_simulate_refuses_a_schedule_that_breaks_a_rule(run: Run) -> None:
    done = run("simulate", "broken", "profile", "hardware")
    assert done.status == 2
    assert "update:1" in done.err


def test_show_prints_configuration_packs_and_program(run: Run) -> None:
    done = run("show", "schedule")
    assert done.status == 0
    for word in (
        "forward pack",
        "backward pack",
        "gpu0/compute",
        "F0.0-1 B1.0-1",
        "in:WF0 in:I0.0-1",
        "send:Y0.0-1>1",
    ):
        assert word in done.out
    found = json.loads(run("show", "schedule", "--json").out)
    assert found["configuration"]["minibatch"] == 4
    assert len(found["schedule_hash"]) == 16


def test_show_looks_like_this(run: Run, golden: Callable[[str, str], None]) -> None:
    lines = [line.rstrip() for line in run("show", "schedule").out.splitlines()]
    golden("show.txt", "\n".join(lines) + "\n")


def test_compare_exits_with_0_where_the_plan_holds_and_1_where_not(run: Run) -> None:
    for planned in ("trace", "schedule"):
        assert run("compare", planned, "run").status == 0
        done = run("compare", planned, "slow")
        assert done.status == 1
        assert "does not hold: iteration" in done.out
        assert run("compare", planned, "slow", "--tolerance", "60%").status == 0
        assert run("compare", planned, "run", "--tolerance", "0.01").status == 1


def test_compare_as_json(run: Run) -> None:
    done = run("compare", "trace", "slow", "--json")
    found = json.loads(done.out)
    assert done.status == 1
    assert found["holds"] is False
    assert found["iteration_seconds"]["measured"] == pytest.approx(
        1.5 * found["iteration_seconds"]["planned"]
    )
    assert [phase["name"] for phase in found["phases"]] == ["forward", "fused", "backward", "update"]
    assert {"peak_bytes", "swap_in_bytes", "swap_out_bytes", "busy_seconds"} <= found["devices"][0].keys()


def test_compare_draws_a_picture(run: Run, files: Path) -> None:
    assert run("compare", "trace", "run", "--picture", "out.png", "--schedule", "schedule").status == 0
    assert (files / "out.png").read_bytes().startswith(b"\x89PNG")


def test_calibrate_writes_a_better_profile(run: Run, files: Path) -> None:
    done = run("calibrate", "profile", "schedule", "slow", "-o", "better", "--hardware-output", "links")
    assert done.status == 0, done.err
    assert "with the corrections" in done.out
    before, after = store.load_profile(files / "profile"), store.load_profile(files / "better")
    assert after.layers[0].forward[0].seconds > before.layers[0].forward[0].seconds
    assert store.load_hardware(files / "links").devices == store.load_hardware(files / "hardware").devices
    found = json.loads(run("calibrate", "profile", "schedule", "slow", "--json").out)
    assert len(found["factors"]) == len(before.layers)


def test_help_names_every_command(run: Run) -> None:
    done = run("--help")
    assert done.status == 0
    for command in ("plan", "verify", "simulate", "show", "compare", "calibrate"):
        assert f"  {command}" in done.out


# ---- what they refuse

REFUSED = {
    "no command": ((), "Missing command"),
    "an unknown command": (("draw",), "No such command 'draw'"),
    "an unknown option": ((*PLAN, "--fast"), "No such option: --fast"),
    "a missing argument": (("plan", "profile"), "HARDWARE"),
    "a missing option": (("plan", "profile", "hardware"), "--minibatch"),
    "a minibatch that is no number": (("plan", "profile", "hardware", "--minibatch", "x"), "'--minibatch'"),
    "a minibatch of none": (("plan", "profile", "hardware", "--minibatch", "0"), "'--minibatch'"),
    "an unknown mode": ((*PLAN, "--mode", "tp"), "--mode tp: use one of any, pp, dp, hybrid"),
    "unknown updates": ((*PLAN, "--updates", "gpu"), "--updates gpu: use one of any, host"),
    "more devices than there are": ((*PLAN, "--devices", "3"), "--devices 3: the hardware has 2"),
    "a size that is none": ((*PLAN, "--memory", "16GB!"), "'16GB!': a size looks like"),
    "no memory left": (
        (*PLAN, "--memory", "0"),
        "--memory 0: 0 bytes of which 0 are reserved on gpu0 leave nothing",
    ),
    "a given plan of other layers": (
        (*PLAN, "--fixed", "profile"),
        "needed here is a fixed file (harmony-fixed/1)",
    ),
    "a grid that is no list": (("frontier", "profile", "hardware", "--minibatch", "4,x"), "write 1,2,4"),
    "a grid of more devices than there are": (
        ("frontier", "profile", "hardware", "--minibatch", "4", "--devices", "5"),
        "the hardware has 2",
    ),
    "a missing file": (("plan", "none", "hardware", "--minibatch", "4"), "none: No such file or directory"),
    "a folder": (("show", "."), "Is a directory"),
    "another kind of file": (("show", "profile"), "profile: this is a profile file"),
    "an output that cannot be written": ((*PLAN, "-o", "no/where"), "no/where: no such folder to write to"),
    "an output that is a folder": ((*PLAN, "-o", "."), ".: is a folder"),
    "a picture in no folder": (
        ("frontier", "profile", "hardware", "--minibatch", "4", "--picture", "no/x.png"),
        "no/x.png: no such folder",
    ),
    "a result over what is read": ((*PLAN, "-o", "hardware"), "hardware: is read here too"),
    "a report over its schedule": (("report", "schedule", "-o", "schedule"), "schedule: is read here too"),
    "a trace over its schedule": (
        ("simulate", "schedule", "profile", "hardware", "-o", "./schedule"),
        "schedule: is read here too",
    ),
    "a picture among text": (("compare", "trace", "run", "--picture", "-"), "--picture -: standard output"),
    "two files to standard output": (
        ("calibrate", "profile", "schedule", "run", "-o", "-", "--hardware-output", "-"),
        "-: two results would go to standard output",
    ),
    "a measured trace as the plan": (
        ("compare", "run", "run"),
        "the plan to compare with is a measured trace",
    ),
    "the limits of another schedule": (
        ("compare", "trace", "run", "--picture", "x.png", "--schedule", "broken"),
        "--schedule broken: planned for schedule",
    ),
    "memory that is none for a report": (
        ("report", "schedule", "-o", "x", "--profile", "profile", "--frontier", "much"),
        "--frontier 'much': a size looks like",
    ),
    "an empty grid": (("frontier", "profile", "hardware", "--minibatch", ""), "--minibatch ''"),
    "a grid with a hole": (("frontier", "profile", "hardware", "--minibatch", "8,"), "--minibatch '8,'"),
    "memory with a hole": (
        ("frontier", "profile", "hardware", "--minibatch", "8", "--memory", "1GiB,"),
        "'': a size looks like",
    ),
    "a minibatch beyond all searching": (
        ("plan", "profile", "hardware", "--minibatch", str(10**23)),
        "more than 10000 microbatches",
    ),
    "limits without a picture": (
        ("compare", "trace", "run", "--schedule", "schedule"),
        "--schedule schedule: only with --picture",
    ),
    "two results on standard output": ((*PLAN, "-o", "-", "--json"), "-o - and --json both"),
    "two files on standard input": (
        ("plan", "-", "-", "--minibatch", "4"),
        "-: standard input holds one file",
    ),
    "a share that is none": (("compare", "trace", "run", "--tolerance", "much"), "--tolerance 'much'"),
    "a picture without times": (
        ("compare", "schedule", "run", "--picture", "x.png"),
        "--picture x.png: a schedule has no times",
    ),
    "a simulated trace to calibrate with": (
        ("calibrate", "profile", "schedule", "trace"),
        "the trace is simulated",
    ),
    "a simulated trace as measured": (
        ("compare", "trace", "trace"),
        "the trace to compare with is simulated",
    ),
    "a model that fits nowhere": ((*PLAN, "--memory", "300"), "layer 1 (b) alone needs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_on_standard_error_and_status_2(run: Run, case: str) -> None:
    arguments, message = REFUSED[case]
    done = run(*arguments)
    assert done.status == 2
    assert done.out == ""
    assert done.err.startswith("harmony-planner: ")
    assert done.err.endswith("\n")
    assert done.err.count("\n") == 1
    assert message in done.err


DAMAGED = {
    "no time": (
        "schedule",
        '"iteration_seconds": ',
        '"iteration_seconds": -',
        "$.predicted.iteration_seconds: -",
    ),
    "a bound that is above": (
        "schedule",
        '"lower_bound_seconds": 0',
        '"lower_bound_seconds": 9',
        "a bound is from 0",
    ),
    "half a file": ("schedule", '"programs"', '"programs', "is no whole JSON file in UTF-8"),
    "a run in no time": (
        "run",
        '"iteration_seconds": [\n',
        '"iteration_seconds": [\n 0,',
        "iteration_seconds[0]: 0.0",
    ),
    "numbers that cannot be trained": ("profile", '"dtype": "float32"', '"dtype": "int8"', "$.dtype: 'int8'"),
    "a nest": ("profile", '"dtype"', f'"x": {"[" * 100_000}, "dtype"', "is nested too deeply"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_file_that_cannot_be_true_is_refused(run: Run, files: Path, case: str) -> None:
    name, good, bad, message = DAMAGED[case]
    text = (files / name).read_text()
    assert good in text
    (files / name).write_text(text.replace(good, bad, 1))
    commands = {"schedule": ("show", name), "run": ("compare", "trace", name), "profile": PLAN}
    done = run(*commands[name])
    assert done.status == 2
    assert done.err.count("\n") == 1
    assert done.err.startswith(f"harmony-planner: {name}: ")
    assert message in done.err


def test_a_damaged_file_is_refused_with_its_place(run: Run, files: Path) -> None:
    (files / "profile").write_text(
        (files / "profile").read_text().replace('"seconds": 0.002', '"seconds": -1')
    )
    done = run(*PLAN)
    assert done.status == 2
    assert "profile: $.layers[0].forward[1].seconds: -1.0; a time is from 1e-12" in done.err


# ---- as a program


def program(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """A command in a process of its own; `given` is its standard input."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "planner", *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, env=environment, check=False)


def test_the_module_is_the_command_and_reads_and_writes_standard_streams(files: Path) -> None:
    done = program(
        *("plan", "-", "hardware", "--minibatch", "4", "-o", "-"), given=(files / "profile").read_text()
    )
    assert done.returncode == 0
    (files / "out").write_text(done.stdout)
    assert program("verify", "out", "profile", "hardware").returncode == 0
    done = program("verify", "-", "profile", "hardware", given=(files / "broken").read_text())
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1


def test_environment_variables_change_nothing(files: Path) -> None:
    plain = program("show", "schedule")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HARMONY_MODE": "dp",
        "COLUMNS": "20",
        "NO_COLOR": "1",
    }
    command = [sys.executable, "-m", "planner", "show", "schedule"]
    changed = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert changed.stdout == plain.stdout


def test_with_standard_output_closed_it_plans_all_the_same(files: Path) -> None:
    command = f"exec {sys.executable} -m planner {' '.join(PLAN)} -o out >&-"
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=files,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (files / "out").is_file()


def test_a_page_goes_to_standard_output(run: Run) -> None:
    done = run("report", "schedule", "-o", "-")
    assert done.status == 0
    assert done.out.startswith("<!DOCTYPE html>")
    assert not Path("-").exists()


def test_a_reader_that_goes_away_is_no_error_to_read(files: Path) -> None:
    command = f"{sys.executable} -m planner simulate schedule profile hardware -o - | head -c 1 > /dev/null"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment, check=True
    )
    assert "Traceback" not in done.stderr


# ---- parts


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.05", 0.05), (" 12.5% ", 0.125), ("0", 0.0)])
def test_a_share_is_a_percentage_or_a_number(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "-5%", "5 percent", "nan", "inf", "1e-2"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match=r"write 5% or 0\.05"):
        parse_share(text)


@pytest.mark.parametrize(
    ("texts", "short"),
    [
        (("F0.0", "free:I0.0", "F0.1", "F0.2", "B0.2"), "F0.0-2 B0.2"),
        (("F0.0", "F1.0", "F1.1", "F0.1"), "F0.0 F1.0-1 F0.1"),
        (("in:WF0", "in:I0.0 after free:X0.0@-1", "in:I0.1"), "in:WF0 in:I0.0-1"),
        (("send:Y0.0>1", "send:Y0.1>1", "send:Y0.2>2"), "send:Y0.0-1>1 send:Y0.2>2"),
        (("update:1", "update:0", "agree"), "update:1 update:0 agree"),
        (("free:WF0",), ""),
        (tuple(f"in:WF{i}" for i in range(20)), " ".join([*(f"in:WF{i}" for i in range(8)), "... 4 more ...", *(f"in:WF{i}" for i in range(12, 20))])),
    ],
)  # fmt: skip
def test_a_lane_in_short(texts: tuple[str, ...], short: str) -> None:
    [lane] = lanes_of({"gpu0/compute": texts})
    assert lane_in_short(lane) == short


def test_the_files_of_these_tests_are_what_they_say(files: Path) -> None:
    traces = {name: store.load_trace(files / name) for name in ("trace", "run", "slow")}
    assert all(isinstance(trace, Trace) for trace in traces.values())
    assert [trace.origin for trace in traces.values()] == ["simulated", "measured", "measured"]
