"""Evaluations between the steps of a run: what they are made of, what they leave as it was, what is refused.

That their losses are the plain model's is in test_any_model.py and test_session.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from executor.cli import main
from executor.decompose import Decomposition, decompose
from executor.decompose.evaluation import decompose_for_evaluation
from executor.launch import run_schedule
from executor.models import load_workload
from executor.options import RunOptions
from executor.workload import Batch, Workload, flat
from planner.contract import store
from planner.contract.errors import HarmonyError
from planner.contract.schedule import Schedule
from tests.executor.schedules import make_schedule
from tests.executor.test_checkpoint import MODEL, saving

STEPS = 6


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> RunOptions:
    path = tmp_path_factory.mktemp("evaluation") / "evaluated_model.py"
    path.write_text(MODEL)
    return RunOptions(f"{path}:make", steps=STEPS, settings={"lr": 1e-2}, paced=False)


@pytest.fixture(scope="module")
def schedule(options: RunOptions) -> Schedule:
    return make_schedule(options, 2)


def test_evaluations_leave_training_as_it_was(
    schedule: Schedule, options: RunOptions, tmp_path: Path
) -> None:
    """Statistics, counters, dropout, checkpoints beside them, and the bytes that an iteration swaps."""
    without = run_schedule(schedule, options, weights_out=tmp_path / "without.safetensors")
    evaluated = replace(options, evaluate_every=2, evaluate_batches=3)
    told: list[int] = []
    trace = run_schedule(
        schedule,
        saving(evaluated, tmp_path / "checkpoints", every=1),
        weights_out=tmp_path / "with.safetensors",
        evaluated=lambda evaluation: told.append(evaluation.iterations),
    )
    assert trace.losses == without.losses
    assert trace.devices[0].swap_in_bytes == without.devices[0].swap_in_bytes
    assert trace.devices[1].swap_in_bytes == without.devices[1].swap_in_bytes
    assert [device.peer_bytes for device in trace.devices] == [d.peer_bytes for d in without.devices]
    assert len(trace.iteration_seconds) == len(without.iteration_seconds) == STEPS - 1
    assert {span.iteration for span in trace.spans} == {span.iteration for span in without.spans}
    assert told == [evaluation.iterations for evaluation in trace.evaluations] == [2, 4, 6]
    assert all(evaluation.minibatches == 3 and evaluation.seconds > 0 for evaluation in trace.evaluations)
    assert len({evaluation.loss for evaluation in trace.evaluations}) == 3, "weights have changed"
    weights, expected = (load_file(tmp_path / f"{name}.safetensors") for name in ("with", "without"))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    # what was saved beside evaluations goes on as if nothing had been
    for step in (4, 6):
        assert (tmp_path / "checkpoints" / f"step-{step:08d}").exists() == (step == 6)
    assert (tmp_path / "checkpoints" / "step-00000005").exists()


def test_a_resumed_run_evaluates_where_the_whole_one_does(
    schedule: Schedule, options: RunOptions, tmp_path: Path
) -> None:
    evaluated = replace(options, evaluate_every=2)
    whole = run_schedule(schedule, evaluated)
    run_schedule(schedule, saving(evaluated, tmp_path / "c", steps=3))
    rest = run_schedule(schedule, saving(evaluated, tmp_path / "c"), resume=True)
    assert rest.losses == whole.losses[3:]
    assert [(e.iterations, e.loss) for e in rest.evaluations] == [
        (e.iterations, e.loss) for e in whole.evaluations[1:]
    ]


def test_held_out_text_is_drawn_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that has seen one letter only knows it, and nothing of another."""
    (tmp_path / "a.txt").write_text("a" * 4000)
    (tmp_path / "b.txt").write_text("b" * 4000)
    spec = "hf:gpt2?n_layer=1&n_embd=16&n_head=2&vocab_size=256&seq=8&tie_word_embeddings=false"
    options = RunOptions(spec, settings={"lr": 1e-2})
    store.save(make_schedule(options, 1), tmp_path / "s.json")
    arguments = [
        "run",
        str(tmp_path / "s.json"),
        "--data",
        str(tmp_path / "a.txt"),
        "--steps",
        "8",
        "--lr",
        "0.01",
    ]
    arguments += ["--unpaced", "--evaluate-every", "4", "--evaluate-batches", "2", "--json"]
    found = {}
    for name in ("a", "b"):
        assert main([*arguments, "--evaluate-data", str(tmp_path / f"{name}.txt")]) == 0
        out, err = capsys.readouterr()
        assert [line.split()[:3] for line in err.splitlines() if "evaluation" in line] == [
            ["evaluation", "after", "4"],
            ["evaluation", "after", "8"],
        ]
        found[name] = [evaluation["loss"] for evaluation in json.loads(out)["evaluations"]]
    assert found["a"][1] < found["a"][0] < found["b"][0] < found["b"][1]


# ---- a model that is another in evaluation mode


class Switching(nn.Module):
    """What happens behind a layer depends on the mode."""

    def __init__(self, behind: Callable[[Switching, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(3))
        self.extra = nn.Parameter(torch.ones(4))
        self.means: list[Tensor] = []
        self.behind = behind

    def forward(self, x: Tensor) -> Tensor:
        self.means = []
        for block in self.blocks:
            x = self.behind(self, block(x))
        return x


def always_scaled(model: Switching, x: Tensor) -> Tensor:
    return x * model.extra


def scaled_in_evaluation(model: Switching, x: Tensor) -> Tensor:
    return x if model.training else x * model.extra


def mixed_in_evaluation(model: Switching, x: Tensor) -> Tensor:
    if model.training:
        return x
    model.means.append(x.mean(-1, keepdim=True))
    return x + model.means[0]


def cuts(behind: Callable[[Switching, Tensor], Tensor]) -> tuple[Decomposition, Decomposition]:
    """A model's layers in training and in evaluation mode."""

    def draw(generator: torch.Generator, num_samples: int) -> Batch:
        return {"x": torch.randn(num_samples, 4, generator=generator)}

    workload: Workload = flat(Switching(behind).train(), draw, lambda model, batch: model(batch["x"]).sum())
    batch = workload.draw(torch.Generator().manual_seed(0), 2)
    trained = decompose(workload, batch)
    found = decompose_for_evaluation(workload, batch, trained)
    assert workload.model.training
    return trained, found


def test_tensors_between_layers_keep_the_names_of_training() -> None:
    trained, found = cuts(always_scaled)
    assert [layer.inputs for layer in found.layers] == [layer.inputs for layer in trained.layers]
    assert [layer.outputs for layer in found.layers[:-1]] == [layer.outputs for layer in trained.layers[:-1]]
    assert not any(layer.stochastic for layer in found.layers)
    assert any(layer.stochastic for layer in trained.layers)


class WriteRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which operations write to some storages."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.writes: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and value.untyped_storage().data_ptr() in self._watched:
                self.writes.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_cut_for_evaluation_writes_to_nothing_that_other_ranks_use() -> None:
    """Rank 0 checks its cut when others may train already; buffers are shared, and this model writes to them."""
    workload = load_workload(f"{Path(__file__).parent}/networks.py:damped", seed=0)
    batch = workload.draw(torch.Generator().manual_seed(0), 2)
    trained = decompose(workload, batch)
    watched = [*workload.model.parameters(), *workload.model.buffers()]
    before = [(tensor.data_ptr(), tensor.detach().clone()) for tensor in watched]
    with WriteRecorder(watched) as recorder:
        decompose_for_evaluation(workload, batch, trained)
    assert recorder.writes == []
    with recorder, torch.no_grad():
        workload.model(batch["x"])
    assert recorder.writes, "the recorder sees what the model writes"
    assert [tensor.data_ptr() for tensor in watched] == [pointer for pointer, _ in before]


def test_a_parameter_that_only_evaluation_uses_is_named() -> None:
    """But the last layer has all that no layer uses."""
    with pytest.raises(
        HarmonyError, match=r"layer blocks.0 uses parameter extra in evaluation mode and not in"
    ):
        cuts(scaled_in_evaluation)


def test_a_tensor_that_only_evaluation_hands_on_is_named() -> None:
    with pytest.raises(
        HarmonyError,
        match=r"layer blocks.0 hands mean \[1, 1\] torch.float32 to blocks.1, blocks.2 in evaluation",
    ):
        cuts(mixed_in_evaluation)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--evaluate-batches", "2"], "how often? say --evaluate-every N"),
        (["--evaluate-data", "x"], "how often? say --evaluate-every N"),
        (["--evaluate-every", "2", "--plain"], "not with --plain"),
        (["--evaluate-every", "-1"], "'--evaluate-every'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "s.json", *arguments]) == 2
    assert part in capsys.readouterr().err
