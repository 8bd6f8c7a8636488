"""Counts have the bytes that are measured, and an estimate's schedule is the model's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor import cli
from executor.count import SIZES, count
from executor.launch import run_schedule
from executor.models import load_workload
from executor.options import RunOptions
from executor.profile import measure_profile
from planner.contract import store
from planner.contract.errors import FormatError, HarmonyError
from planner.contract.gpus import GPUS, PCIE, find_gpu, server
from planner.contract.profile import model_hash
from planner.contract.roofline import calibration, estimate
from planner.search import plan
from tests.executor.test_any_model import SPECS, make_hardware

# without dropout: a CPU's saves numbers where a GPU's, which is what is counted, saves a mask
SPEC = (
    "hf:gpt2?n_layer=2&n_embd=32&n_head=2&vocab_size=64&seq=16&resid_pdrop=0.0&embd_pdrop=0.0&attn_pdrop=0.0"
)
SETTINGS = {"lr": 1e-3, "weight_decay": 0.1}


def test_bytes_are_those_that_are_measured() -> None:
    counted = estimate(count(SPEC, optimizer="adamw", settings=SETTINGS), "rtx4090", GPUS["rtx4090"])
    measured = measure_profile(
        load_workload(SPEC, seed=0), SPEC, SIZES, optimizer="adamw", settings=SETTINGS, repeats=2
    )
    assert model_hash(counted) == model_hash(measured)
    assert counted.edges == measured.edges
    for ours, theirs in zip(counted.layers, measured.layers, strict=True):
        for size in SIZES:
            found = [
                next(c for c in costs if c.microbatch_size == size)
                for costs in (ours.forward, theirs.forward)
            ]
            assert found[0].peak_bytes == pytest.approx(found[1].peak_bytes, rel=0.02), ours.name
            back = [
                next(c for c in costs if c.microbatch_size == size)
                for costs in (ours.backward, theirs.backward)
            ]
            assert back[0].saved_bytes == back[1].saved_bytes, ours.name
            assert back[0].peak_bytes == pytest.approx(back[1].peak_bytes, rel=0.02), ours.name


def test_a_plan_made_from_an_estimate_runs() -> None:
    options = RunOptions(SPEC, steps=2, settings=SETTINGS, paced=False)
    profile = estimate(count(SPEC, optimizer="adamw", settings=SETTINGS), "rtx4090", GPUS["rtx4090"])
    schedule = plan(profile, make_hardware(1), minibatch=4).schedule
    assert schedule is not None
    assert len(run_schedule(schedule, options).losses) == 2


def test_flops_are_those_of_the_matrix_products() -> None:
    counts = count(SPEC, optimizer="adamw", settings=SETTINGS)
    block = counts.kinds[counts.kind_of[1]]
    seq, width = 16, 32
    # 12 width^2 weights, two flops each a token; scores and values: 4 seq^2 width
    expected = 24 * seq * width * width + 4 * seq * seq * width
    assert sum(o.times * o.flops.at(1) for o in block.forward.operations) == expected


def test_one_factor_brings_estimates_to_measured_times() -> None:
    profile = estimate(count(SPEC, optimizer="adamw", settings=SETTINGS), "rtx4090", GPUS["rtx4090"])
    slower = estimate(
        count(SPEC, optimizer="adamw", settings=SETTINGS), "rtx4090", GPUS["rtx4090"], factor=3.0
    )
    assert calibration(slower, profile) == pytest.approx(3.0, rel=0.05)


def test_a_layer_that_depends_on_its_data_is_named() -> None:
    with pytest.raises(
        HarmonyError, match=r"layer blocks.0: .* depends on the data, .*; profile the model on a device"
    ):
        count(SPECS["experts by data"], optimizer="adamw", settings=SETTINGS)


def test_servers_and_gpus_by_name() -> None:
    assert find_gpu("4090")[0] == find_gpu("RTX 4090")[0] == "rtx4090"
    hardware, _ = server("2x4060ti", memory_bytes=None, host_bytes=1 << 38)
    assert len(hardware.devices) == 2
    assert hardware.host_links[0].h2d_bytes_per_second == PCIE[4] / 2, "half the lanes"
    for name, words in (("4090", "looks like 4x4090"), ("0x4090", "looks like"), ("4x4091", "did you mean")):
        with pytest.raises(FormatError, match=words):
            server(name, memory_bytes=None, host_bytes=1)
    with pytest.raises(FormatError, match="has no rate for bfloat16"):
        estimate(
            count(SPEC, optimizer="adamw", settings=SETTINGS, dtype="bfloat16"),
            "gtx1080ti",
            GPUS["gtx1080ti"],
        )


def test_estimate_writes_a_profile_or_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, counts = tmp_path / "p.json", tmp_path / "c.json"
    assert cli.main(["estimate", "--model", SPEC, "--gpu", "3090", "-o", str(profile)]) == 0
    assert store.load_profile(profile).device.name == "rtx3090 (estimated)"
    assert "not measured" in capsys.readouterr().err
    assert cli.main(["estimate", "--model", SPEC, "-o", str(counts)]) == 0
    assert len(store.load_counts(counts).kind_of) == len(store.load_profile(profile).layers)
    assert cli.main(["estimate", "--model", SPEC]) == 2
    assert "--gpu is missing" in capsys.readouterr().err
