"""The benchmark command on one measured case."""

from __future__ import annotations

import pytest

from planner.bench import main
from tests.planner.chains import REFERENCE


def test_bench_prints_a_row_and_means_and_we_are_not_slower(capsys: pytest.CaptureFixture[str]) -> None:
    if not REFERENCE.is_dir():
        pytest.skip(f"no reference profiles at {REFERENCE.name}/")
    flags = ["--model", "bert_large", "--minibatch", "16", "--devices", "2", "--baselines"]
    assert main([str(REFERENCE), *flags]) == 0
    header, row, *rest = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["model", "mini", "gpus", "ours"]
    model, minibatch, devices, ours, bound = row.split()[:5]
    assert (model, minibatch, devices) == ("bert_large_seqlen512", "16", "2")
    assert float(bound) <= float(ours) <= 2.178
    assert "dp-swap" in row
    assert any("faster than their own best prediction" in line for line in rest)
