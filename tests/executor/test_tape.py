"""Layers that torch.export cannot trace stay whole; parameters that no token chose are not stepped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook

from executor.decompose import DecomposeError, Decomposition, decompose
from executor.launch import run_schedule
from executor.options import RunOptions
from executor.reference import train
from executor.workload import Batch, Workload
from tests.executor import networks
from tests.executor.schedules import make_schedule

SPEC = f"{Path(networks.__file__)}:mixture"
STEPS = 4


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Plain training adds up in the order of its threads."""
    torch.set_num_threads(1)


def cut(workload: Workload, **options: Any) -> Decomposition:
    return decompose(workload, workload.draw(torch.Generator().manual_seed(0), 2), **options)


class Block(nn.Module):
    """A layer that decides by its data whether to go on, and tells how many did in a number that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.norm(self.linear(x))) if x.abs().max() > 0 else x


class Branches(nn.Module):
    def __init__(self, *, between: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 1)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if self.between and x.sum() > 0:
                x = -x
        out: Tensor = self.head(x)
        return out


def make_workload(model: nn.Module) -> Workload:
    def draw(generator: torch.Generator, num_samples: int) -> Batch:
        return {"x": torch.randn(num_samples, 8, generator=generator)}

    return Workload(model, draw, lambda model, batch: model(batch["x"]).square().mean())


def test_modules_that_begin_layers_stay_whole() -> None:
    decomposition = cut(networks.mixture())
    assert decomposition.cut_by == "tape"
    assert [layer.name for layer in decomposition.layers] == [
        "inputs",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "head",
    ]
    blocks = decomposition.layers[1:4]
    assert len({layer.signature for layer in blocks}) == 1
    assert all(layer.stochastic and layer.batch_coupled for layer in blocks)
    assert [layer.mutated_buffers for layer in blocks] == [(f"blocks.{i}.calls",) for i in range(3)]
    (notice,) = decomposition.notices
    assert notice.startswith(
        "cut by a tape, with the modules that are layers whole: torch.export cannot trace"
    )


def test_statistics_are_found_and_the_model_is_left_as_it_was() -> None:
    workload = make_workload(Branches())
    before = {name: value.clone() for name, value in workload.model.state_dict().items()}
    decomposition = cut(workload)
    assert decomposition.cut_by == "tape"
    assert [len(layer.mutated_buffers) for layer in decomposition.layers] == [3, 3, 3, 0]
    assert all("forward" not in vars(module) for module in workload.model.modules())
    assert all(torch.equal(value, before[name]) for name, value in workload.model.state_dict().items())


def test_tape_takes_over_where_export_gives_another_model() -> None:
    """Under autocast torch.export forgets that a block is without gradients."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = self.linear(x).abs().mean(-1, keepdim=True) + 1
            out: Tensor = self.linear(x) / scale
            return out

    def under_autocast(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = model(batch["x"]).float().square().mean()
            return out

    workload = make_workload(nn.Sequential(*(Scaled() for _ in range(3))))
    decomposition = cut(replace(workload, loss=under_autocast))
    assert decomposition.cut_by == "tape"
    assert "gradient of 2.linear" in decomposition.notices[0]
    known = cut(replace(workload, loss=under_autocast), cut_by="tape", check=False)
    assert known.structure_hash == decomposition.structure_hash
    assert cut(workload).cut_by == "export"


def test_control_flow_between_layers_says_what_helps() -> None:
    with pytest.raises(
        DecomposeError, match=r"must lie within a layer: --layers names modules that stay whole"
    ):
        cut(make_workload(Branches(between=True)))


def test_modules_that_a_user_names_stay_whole() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Branches(between=True)
            self.last = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.inner(x))
            return out

    decomposition = cut(make_workload(Outer()), patterns=["inner", "last"])
    assert [layer.name for layer in decomposition.layers] == ["inner", "last"]
    assert decomposition.cut_by == "tape"


def test_result_of_a_size_that_depends_on_data_is_refused() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Some(), nn.Linear(8, 8)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            return x[1:] if x.abs().max() > 0 else x

    with pytest.raises(DecomposeError, match=r"gives a tensor of .* a layer's results have as many rows"):
        cut(make_workload(Chosen()))


def test_result_of_another_shape_in_the_run_is_refused() -> None:
    workload = make_workload(Branches())
    decomposition = cut(workload)
    batch = workload.draw(torch.Generator().manual_seed(0), 3)
    layer = decomposition.layers[0]
    parameters = [decomposition.parameters[name] for name in layer.parameters]
    buffers = [decomposition.buffers[name] for name in layer.buffers]
    assert layer(parameters, buffers, [batch["x"]], 3)[0].shape == (3, 8)
    with pytest.raises(DecomposeError, match=r"module blocks.0 gave tensors of .*3, 8.* for 2 samples"):
        layer(parameters, buffers, [batch["x"]], 2)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_experts_train_as_in_plain_pytorch(num_devices: int, tmp_path: Path) -> None:
    """Cases 6 and 14. Adam with weight decay: an expert that a step does not use must neither decay nor drift."""
    options = RunOptions(SPEC, steps=STEPS, settings={"lr": 1e-2, "weight_decay": 0.5}, paced=False)
    schedule = make_schedule(options, num_devices)
    trace = run_schedule(schedule, options, weights_out=tmp_path / "weights.safetensors")
    workload = options.load()
    with watched(workload.model) as unused:
        plain = train(workload, options, schedule.configuration.microbatches.backward)
    assert unused, "some expert must be without a token in some step"
    assert trace.losses == plain.losses
    weights = load_file(tmp_path / "weights.safetensors")
    for name, parameter in plain.parameters.items():
        assert torch.equal(weights[name], parameter), name
    for name, buffer in workload.model.named_buffers():
        assert torch.equal(weights[name], buffer), name


@contextmanager
def watched(model: nn.Module) -> Iterator[set[str]]:
    """The parameters that some step leaves out."""
    found: set[str] = set()

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found.update(name for name, parameter in model.named_parameters() if parameter.grad is None)

    handle = register_optimizer_step_pre_hook(look)
    try:
        yield found
    finally:
        handle.remove()


def test_parameter_that_nothing_uses_is_not_stepped(tmp_path: Path) -> None:
    options = RunOptions(
        f"{Path(__file__)}:idle", steps=2, settings={"lr": 1e-2, "weight_decay": 0.5}, paced=False
    )
    schedule = make_schedule(options, 1)
    run_schedule(schedule, options, weights_out=tmp_path / "weights.safetensors")
    weights = load_file(tmp_path / "weights.safetensors")
    plain = train(options.load(), options, schedule.configuration.microbatches.backward)
    assert torch.equal(weights["idle.weight"], options.load().model.get_parameter("idle.weight"))
    assert all(torch.equal(weights[name], parameter) for name, parameter in plain.parameters.items())


def idle() -> Workload:
    workload = networks.sequential()
    workload.model.register_module("idle", Idle())
    return workload


class Idle(nn.Module):
    """Given a place among the model's blocks, it hands on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x
