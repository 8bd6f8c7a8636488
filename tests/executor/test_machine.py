"""What stands in the way of a run is said with its remedy, and a schedule that cannot run here is refused at once."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
import torch

from executor import host, machine
from executor.cli import main
from executor.host import available_bytes
from executor.launch import run_schedule
from executor.machine import Finding, check_machine, findings
from executor.options import RunOptions
from planner.contract.errors import InfeasibleError
from planner.contract.schedule import Schedule
from tests.planner.tiny import ONE, ONE_PROGRAM, TWO, TWO_PROGRAM, schedule_of

GIB = 1 << 30


def by_name(found: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in found}


@pytest.fixture(autouse=True)
def _a_quick_optimizer_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PARAMETERS", 1 << 10)


def test_every_finding_of_this_machine_is_told() -> None:
    found = by_name(list(findings("virtual")))
    assert {
        "torch",
        "host memory",
        "pinned memory",
        "/dev/shm",
        "processors",
        "AdamW on the host",
    } <= found.keys()
    assert found["torch"].found == torch.__version__
    assert "M/s with 1" in found["AdamW on the host"].found
    assert all(finding.remedy for finding in found.values() if finding.problem)


def test_a_container_s_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "limit").write_text(f"{3 * GIB}\n")
    (tmp_path / "used").write_text(f"{2 * GIB}\n")
    memory = SimpleNamespace(total=64 * GIB, available=50 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(host, "CGROUPS", ((str(tmp_path / "none"), "none"),))
    assert available_bytes() == 50 * GIB
    monkeypatch.setattr(host, "CGROUPS", ((str(tmp_path / "limit"), str(tmp_path / "used")),))
    assert available_bytes() == GIB
    finding = by_name(list(machine._host_memory()))["host memory"]
    assert finding.problem == "this container may use no more"
    (tmp_path / "limit").write_text("max\n")
    assert available_bytes() == 50 * GIB


def test_what_is_short_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (64 << 20, 64 << 20))
    assert machine._pinning("virtual").problem == ""
    assert "ulimit -l unlimited" in machine._pinning("cuda").remedy
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=64 << 20))
    assert "--shm-size" in machine._shared_memory().remedy


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cuda", "--json"]) == 1
    found = {item["name"]: item for item in json.loads(capsys.readouterr().out)}
    assert found["GPUs"]["problem"] == "torch sees no GPU"
    assert found["GPUs"]["remedy"]


def test_doctor_prints_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "findings", lambda device: iter([Finding("a", "b")]))
    assert main(["doctor"]) == 0
    monkeypatch.setattr(
        machine, "findings", lambda device: iter([Finding("a", "b", "too little", "buy more")])
    )
    assert main(["doctor"]) == 1
    assert "buy more" in capsys.readouterr().out


# ---- before a run


def with_host_bytes(schedule: Schedule, nbytes: int) -> Schedule:
    replace = msgspec.structs.replace
    return replace(schedule, predicted=replace(schedule.predicted, host_bytes=nbytes))


def test_a_schedule_beyond_the_host_s_memory_is_refused_before_anything_is_loaded() -> None:
    schedule = with_host_bytes(schedule_of(ONE_PROGRAM, ONE), 1 << 60)
    with pytest.raises(InfeasibleError, match=r"host: 11529215046\d+ bytes for .*, \d+ are free"):
        check_machine(schedule, "virtual")
    options = RunOptions("no/such/model.py:make", optimizer=schedule.profile.optimizer)
    with pytest.raises(InfeasibleError, match="are free; end other programs"):
        run_schedule(schedule, options)


def fake_gpus(monkeypatch: pytest.MonkeyPatch, count: int, nbytes: int, bf16: bool = True) -> None:
    cuda: Any = torch.cuda
    monkeypatch.setattr(cuda, "device_count", lambda: count)
    monkeypatch.setattr(cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=nbytes))
    monkeypatch.setattr(cuda, "get_device_name", lambda i=0: "a card")
    monkeypatch.setattr(cuda, "is_bf16_supported", lambda: bf16)


def test_a_schedule_for_other_gpus_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    two = with_host_bytes(schedule_of(TWO_PROGRAM, TWO), 1000)
    needed = two.hardware.devices[0].memory_bytes
    fake_gpus(monkeypatch, 1, GIB)
    with pytest.raises(InfeasibleError, match="uses 2 GPUs, torch sees 1 here"):
        check_machine(two, "cuda")
    fake_gpus(monkeypatch, 2, needed - 1)
    with pytest.raises(
        InfeasibleError, match=rf"gpu0 \(a card\) has {needed - 1} bytes, .* planned for {needed} on"
    ):
        check_machine(two, "cuda")
    fake_gpus(monkeypatch, 2, needed)
    check_machine(two, "cuda")
    replace = msgspec.structs.replace
    narrow = replace(two, profile=replace(two.profile, dtype="bfloat16"))
    fake_gpus(monkeypatch, 2, needed, bf16=False)
    with pytest.raises(
        InfeasibleError, match="does not compute in bfloat16; profile and plan with --dtype float16"
    ):
        check_machine(narrow, "cuda")


@pytest.mark.parametrize(
    ("limit", "driver_honours_it", "is_refused"),
    [(resource.RLIM_INFINITY, True, False), (GIB, True, True), (GIB, False, False), (4 * GIB, True, False)],
)
def test_what_may_not_be_pinned_is_refused_before_a_run(
    limit: int, driver_honours_it: bool, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(machine, "can_pin", lambda nbytes: not driver_honours_it or nbytes <= limit)
    if not is_refused:
        machine.check_pinning(2 * GIB)
        return
    with pytest.raises(
        InfeasibleError, match=f"{2 * GIB} bytes are to be pinned, this process may lock {limit}; ulimit -l"
    ):
        machine.check_pinning(2 * GIB)


def test_nothing_can_be_pinned_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert not machine.can_pin(1 << 10)
