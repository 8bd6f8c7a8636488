"""What a cut changes of a model is said; nothing of it is silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from executor.cli import main
from executor.decompose import decompose
from executor.models import load_workload
from executor.workload import Workload

GPT2 = "hf:gpt2?n_layer=1&n_embd=16&n_head=2&vocab_size=40&seq=8"


def notices_of(workload: Workload) -> tuple[str, ...]:
    return decompose(workload, workload.draw(torch.Generator().manual_seed(0), 2)).notices


def test_a_model_s_own_gradient_checkpointing_is_switched_off() -> None:
    workload = load_workload(GPT2, seed=0)
    enable: Any = workload.model.activation_checkpointing_enable
    enable()
    assert workload.model.is_activation_checkpointing
    assert any("gradient checkpointing of GPT2" in line for line in notices_of(workload))
    assert not workload.model.is_activation_checkpointing
    assert not any("checkpointing" in line for line in notices_of(workload))


def test_hooks_that_a_cut_would_lose_are_named() -> None:
    workload = load_workload(GPT2, seed=0)
    assert not any("hooks" in line for line in notices_of(workload))
    block = workload.model.get_submodule("transformer.h.0")
    block.register_forward_hook(lambda module, inputs, output: None)
    block.register_full_backward_hook(lambda module, given, made: None)
    hook: Any = next(workload.model.parameters()).register_hook
    hook(lambda gradient: gradient)
    lines = notices_of(workload)
    assert any(line.startswith("forward hooks of transformer.h.0 are traced once") for line in lines)
    assert "backward hooks of transformer.h.0, transformer.wte.weight are not called" in lines


def test_profile_says_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hooked_model.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\n"
        "def make():\n"
        "    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))\n"
        "    model[0].register_forward_hook(lambda module, inputs, output: None)\n"
        "    draw = lambda generator, n: {'x': torch.randn(n, 4, generator=generator)}\n"
        "    return model, draw, lambda model, batch: model(batch['x']).square().mean()\n"
    )
    assert main(["profile", "--model", f"{path}:make", "--microbatches", "1", "--repeats", "2"]) == 0
    assert "harmony-executor: note: forward hooks of 0 are traced once" in capsys.readouterr().err
