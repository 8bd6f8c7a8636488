"""Steps of single layers over a flat store equal one step of torch.optim over the whole model, bit for bit."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from executor.host import over_storage
from executor.optimizer import LayerOptimizer, optimizer_class, recipe, state_layout
from planner.contract.errors import HarmonyError

Shapes = tuple[dict[str, tuple[int, ...]], ...]
SHAPES: Shapes = (
    {"0.weight": (5, 3), "0.bias": (3,)},
    {"1.weight": (70, 9)},
    {"2.weight": (8, 8), "2.gain": ()},
)
STEPS = 4

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("adamw", {"lr": 1e-2, "weight_decay": 0.1}),
    "adam": ("Adam", {"lr": 1e-2, "betas": (0.8, 0.99)}),
    "amsgrad": ("adam", {"lr": 1e-2, "amsgrad": True}),
    "sgd": ("sgd", {"lr": 1e-2}),
    "momentum": ("sgd", {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    "dampened": ("sgd", {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}),
    "adagrad": ("adagrad", {"lr": 1e-2, "initial_accumulator_value": 0.25}),
    "rmsprop": ("rmsprop", {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    "nadam": ("nadam", {"lr": 1e-2}),
    "radam": ("radam", {"lr": 1e-2}),
    "rprop": ("rprop", {"lr": 1e-2}),
    "asgd": ("asgd", {"lr": 1e-2}),
    "adadelta": ("adadelta", {}),
    "adamax": ("adamax", {"lr": 1e-2}),
}


class FlatStore:
    """Weights, gradients and states as views of flat memory, as the host store has them."""

    def __init__(self, name: str, settings: dict[str, Any], shapes: Shapes = SHAPES) -> None:
        generator = torch.Generator().manual_seed(1)
        self._flat = torch.zeros(1 << 16, dtype=torch.uint8)
        self._end = 0
        self.weights = [{n: self._place(s, torch.float32) for n, s in layer.items()} for layer in shapes]
        self.gradients = [{n: self._place(s, torch.float32) for n, s in layer.items()} for layer in shapes]
        self.touched = [{n: torch.ones((), dtype=torch.bool) for n in layer} for layer in shapes]
        self.states: dict[str, dict[str, Tensor]] = {}
        seen: dict[str, Tensor] = {}
        for layer in self.weights:
            for parameter, tensor in layer.items():
                tensor.copy_(seen.setdefault(parameter, torch.randn(tensor.shape, generator=generator)))
                entries = state_layout(recipe(name, settings), parameter, tensor)
                self.states.setdefault(
                    parameter, {key: self._place(shape, dtype) for key, shape, dtype in entries}
                )

    def _place(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = over_storage(self._flat.untyped_storage(), self._end, shape, dtype)
        self._end += -(-max(tensor.nbytes, 1) // 512) * 512
        return tensor

    def optimizer(self, name: str, settings: dict[str, Any], *, is_resumed: bool = False) -> LayerOptimizer:
        return LayerOptimizer(
            recipe(name, settings),
            self.weights,
            self.gradients,
            self.states,
            touched=self.touched,
            is_resumed=is_resumed,
        )


def draw_gradients(store: FlatStore, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for layer, touched in zip(store.gradients, store.touched, strict=True):
        for name, tensor in layer.items():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
            touched[name].fill_(True)


def train_whole(
    name: str, settings: dict[str, Any], store: FlatStore
) -> tuple[dict[str, Tensor], torch.optim.Optimizer]:
    """One torch.optim step over all parameters at once, with the gradients that the store is given."""
    parameters = {n: t.clone() for layer in store.weights for n, t in layer.items()}
    optimizer = recipe(name, settings).make(parameters)
    for step in range(STEPS):
        draw_gradients(store, step)
        for layer in store.gradients:
            for n, tensor in layer.items():
                parameters[n].grad = tensor.clone()
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_steps_of_single_layers_equal_one_step_of_the_whole(case: str) -> None:
    name, settings = OPTIMIZERS[case]
    store = FlatStore(name, settings)
    expected, whole = train_whole(name, settings, store)
    optimizer = store.optimizer(name, settings)
    for step in range(STEPS):
        draw_gradients(store, step)
        for layers in ((2,), (0, 1)):
            optimizer.step_layers(layers)
    for layer in store.weights:
        for n, tensor in layer.items():
            assert torch.equal(tensor, expected[n]), n
    for n, state in store.states.items():
        theirs = {key: value for key, value in whole.state[expected[n]].items() if value is not None}
        assert state.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(state[key], value), f"{n} {key} in the store"


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_state_lives_in_the_store_only(case: str) -> None:
    name, settings = OPTIMIZERS[case]
    store = FlatStore(name, settings)
    optimizer = store.optimizer(name, settings)
    draw_gradients(store, 0)
    optimizer.step_layers(range(3))
    optimizer.step_layers(range(3))
    storage = store.weights[0]["0.weight"].untyped_storage().data_ptr()
    for state in optimizer.optimizer.state.values():
        for key, value in state.items():
            assert value is None or value.untyped_storage().data_ptr() == storage, key


@pytest.mark.parametrize("case", ["adamw", "momentum", "dampened", "adagrad"])
def test_resumed_optimizer_goes_on_where_the_state_in_the_store_stands(case: str) -> None:
    """Case 32: a new optimizer over an old store equals the uninterrupted run."""
    name, settings = OPTIMIZERS[case]
    store = FlatStore(name, settings)
    expected, _ = train_whole(name, settings, store)
    optimizer = store.optimizer(name, settings)
    for step in range(STEPS):
        if step == 2:
            optimizer = store.optimizer(name, settings, is_resumed=True)
        draw_gradients(store, step)
        optimizer.step_layers(range(3))
    for layer in store.weights:
        for n, tensor in layer.items():
            assert torch.equal(tensor, expected[n]), n


def test_layers_that_are_not_named_stay_as_they_are() -> None:
    name, settings = OPTIMIZERS["adamw"]
    store = FlatStore(name, settings)
    before = [{n: t.clone() for n, t in layer.items()} for layer in store.weights]
    draw_gradients(store, 0)
    store.optimizer(name, settings).step_layers([1])
    for layer in (0, 2):
        for n, tensor in store.weights[layer].items():
            assert torch.equal(tensor, before[layer][n])
            assert not any(value.any() for value in store.states[n].values())
    assert not torch.equal(store.weights[1]["1.weight"], before[1]["1.weight"])


def test_tied_parameter_steps_once_on_the_sum_of_its_uses() -> None:
    """Case 7: one owner, gradients summed over the uses, the new weights in every use."""
    name, settings = OPTIMIZERS["adamw"]
    shapes: Shapes = ({"shared": (6, 4)}, {"own": (4,)}, {"shared": (6, 4)})
    store = FlatStore(name, settings, shapes)
    parameter = store.weights[0]["shared"].clone()
    plain = recipe(name, settings).make({"shared": parameter})
    optimizer = store.optimizer(name, settings)
    for step in range(STEPS):
        draw_gradients(store, step)
        parameter.grad = store.gradients[0]["shared"] + store.gradients[2]["shared"]
        plain.step()
        before = store.weights[0]["shared"].clone()
        optimizer.step_layers([2, 1])  # layer 2 uses the parameter and does not own it
        assert torch.equal(store.weights[0]["shared"], before)
        optimizer.step_layers([0])
    assert torch.equal(store.weights[0]["shared"], parameter)
    assert torch.equal(store.weights[2]["shared"], parameter)
    assert len(optimizer.param_groups[0]["params"]) == 2


def test_scheduler_changes_the_next_step() -> None:
    """Case 17: param_groups are live."""
    name, settings = OPTIMIZERS["sgd"]
    store = FlatStore(name, settings)
    optimizer = store.optimizer(name, settings)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 0.5**step)
    for rate in (1e-2, 5e-3, 2.5e-3):
        draw_gradients(store, 0)
        before = store.weights[1]["1.weight"].clone()
        optimizer.step_layers(range(3))
        moved = before - store.weights[1]["1.weight"]
        assert torch.allclose(moved, rate * store.gradients[1]["1.weight"], rtol=1e-3, atol=1e-6)
        scheduler.step()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lbfgs", "all gradients at once"),
        ("SparseAdam", "sparse gradients"),
        ("adafactor", "size of its state"),
        ("optimizer", "no such optimizer"),
        ("adamm", "no such optimizer"),
    ],
)
def test_what_cannot_be_stepped_by_layer_is_refused_by_name(name: str, message: str) -> None:
    """Case 18."""
    with pytest.raises(HarmonyError, match=message) as caught:
        optimizer_class(name)
    assert f"--optimizer {name}" in str(caught.value)


@pytest.mark.parametrize("settings", [{"lr": -1.0}, {"lr": 1e-3, "momentum": 0.9}])
def test_setting_that_the_optimizer_does_not_take_is_one_line(settings: dict[str, float]) -> None:
    with pytest.raises(HarmonyError, match=r"^--optimizer adamw: ") as caught:
        state_layout(recipe("adamw", settings), "w", torch.zeros(2))
    assert "\n" not in str(caught.value)


def test_state_layout_follows_the_parameter() -> None:
    assert state_layout(recipe("adamw", {"lr": 1e-3}), "w", torch.zeros(7, 2, 3)) == (
        ("step", (), torch.float32),
        ("exp_avg", (7, 2, 3), torch.float32),
        ("exp_avg_sq", (7, 2, 3), torch.float32),
    )
    assert state_layout(recipe("sgd", {"lr": 1e-3}), "w", torch.zeros(2)) == ()


def test_two_threads_step_layers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes every gradient that is set: those that another thread has just set for its layers, too."""
    stepped, expected = (FlatStore("adamw", {"lr": 1e-2}) for _ in range(2))
    for store in (stepped, expected):
        draw_gradients(store, 0)
    reference = expected.optimizer("adamw", {"lr": 1e-2})
    for layer in range(len(SHAPES)):
        reference.step_layers([layer])
    optimizer = stepped.optimizer("adamw", {"lr": 1e-2})
    real = optimizer.optimizer.step

    def slow() -> None:
        time.sleep(0.05)
        real()

    monkeypatch.setattr(optimizer.optimizer, "step", slow)
    threads = [
        threading.Thread(target=optimizer.step_layers, args=([layer],)) for layer in range(len(SHAPES))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, theirs in zip(stepped.weights, expected.weights, strict=True):
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
