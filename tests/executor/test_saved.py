"""Activations that a forward keeps: the same numbers as with recompute, and none from a slot that was filled again."""

from __future__ import annotations

import gc
import weakref
from functools import cache

import msgspec
import pytest
import torch
from torch import Tensor, nn

from executor.decompose import decompose
from executor.host import HostStore, create_memory, plan_store
from executor.memory import SlotPool
from executor.models import load_workload
from executor.optimizer import recipe
from executor.options import RunOptions
from executor.profile import measure_profile
from executor.reference import train
from executor.replay import Rank
from executor.saved import Piece, SavedTensors
from executor.streams import VirtualDevice
from executor.structure import layer_places
from executor.workload import Workload
from planner.contract.fixed import Fixed
from planner.contract.hardware import DeviceSpec, Hardware, Host, HostLink
from planner.contract.precedence import Graph
from planner.contract.profile import Profile
from planner.contract.rules import Rules
from planner.contract.schedule import Schedule, parse_program
from planner.search import plan_fixed
from tests.executor.networks import damped

GPT = "hf:gpt2?n_layer=3&n_embd=32&n_head=2&vocab_size=64&n_positions=16&seq=8&tie_word_embeddings={tied}"
SETTINGS = {"lr": 1e-3, "weight_decay": 0.01}
STEPS = 3
SAMPLES = ((0, 2), (2, 4), (4, 6), (6, 8))


def make_gpt(tied: bool = False) -> Workload:
    return load_workload(GPT.format(tied=str(tied).lower()), seed=0)


class _Skip(nn.Module):
    """Saves its input, a view of it, its output, buffers; adds its input again behind."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(x * self.drop(torch.relu_(self.norm(self.inner(x)))) + x)
        return out


def make_skips() -> Workload:
    torch.manual_seed(0)
    blocks = [_Skip(8) for _ in range(5)]
    model = nn.ModuleDict({"blocks": nn.ModuleList(blocks)})

    def forward(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x

    model.forward = forward
    model.train()
    return Workload(
        model,
        lambda g, n: {"x": torch.randn(n, 8, generator=g), "y": torch.randn(n, 8, generator=g)},
        lambda m, batch: nn.functional.mse_loss(m(batch["x"]), batch["y"]),
    )


def make_damped() -> Workload:
    torch.manual_seed(0)
    workload = damped()
    workload.model.train()
    return workload


WORKLOADS = {"gpt2": make_gpt, "skips": make_skips, "states": make_damped}


@cache
def profile_of(name: str) -> Profile:
    torch.set_num_threads(1)
    return measure_profile(WORKLOADS[name](), name, [1, 2], optimizer="adamw", settings=SETTINGS, repeats=2)


def plan_saving(
    name: str, kept: tuple[int, ...], offloaded: tuple[int, ...] = (), *, held: bool = False
) -> Schedule:
    profile = profile_of(name)
    hardware = Hardware((DeviceSpec("v0", 64 << 20),), (HostLink(1e10, 1e10),), Host(1 << 34, 1 << 34))
    last = len(profile.layers) - 4
    fixed = Fixed(2, 2, (2, 2), (2, 2, last), 1, True, kept, offloaded)
    schedule = plan_fixed(profile, hardware, fixed, minibatch=8).schedule
    assert schedule is not None
    if held:
        configuration = schedule.configuration
        *others, fused = configuration.backward_packs
        configuration = msgspec.structs.replace(
            configuration,
            forward_packs=tuple(
                msgspec.structs.replace(p, weights="hold") for p in configuration.forward_packs
            ),
            backward_packs=(*(msgspec.structs.replace(p, weights="hold") for p in others), fused),
        )
        schedule = plan_fixed(profile, hardware, configuration, minibatch=8).schedule
        assert schedule is not None
    return schedule


class Replayed:
    """A schedule on one device in this process."""

    def __init__(self, name: str, schedule: Schedule, steps: int = STEPS) -> None:
        torch.set_num_threads(1)
        workload = WORKLOADS[name]()
        self.options = RunOptions(name, steps=steps, settings=SETTINGS, paced=False)
        self.decomposition = decompose(
            workload, workload.draw(torch.Generator().manual_seed(0), 2), check=False
        )
        # sizes and edges, not costs: all that a run knows
        profile = profile_of(name)
        layers = tuple(msgspec.structs.replace(layer, forward=(), backward=()) for layer in profile.layers)
        rules = Rules(msgspec.structs.replace(profile, layers=layers), schedule.configuration)
        graph = Graph(parse_program(schedule.programs.train), rules)
        places = layer_places(self.decomposition, recipe("adamw", SETTINGS))
        layout = plan_store(rules, self.decomposition, len(graph.actions))
        self.store = HostStore(create_memory(layout.total), layout, rules, self.decomposition, places)
        for i in range(len(self.decomposition.layers)):
            for key, target in self.store.weights(i).items():
                target.copy_(self.decomposition.parameters[key].detach())
            for key, target in self.store.buffers(i).items():
                target.copy_(self.decomposition.buffers[key])
        self.rank = Rank(
            0, graph, schedule.hardware, workload, self.decomposition, places, self.store, self.options
        )
        self.losses: list[float] = []

    def run(self) -> None:
        self.rank.run(lambda iteration, loss, seconds: self.losses.append(loss))

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for i in range(len(self.decomposition.layers)):
            found |= self.store.weights(i) | self.store.buffers(i)
        return found


def check_equals_plain(name: str, replayed: Replayed) -> None:
    workload = WORKLOADS[name]()
    plain = train(workload, replayed.options, SAMPLES, decomposition=replayed.decomposition)
    assert replayed.losses == list(plain.losses)
    found = replayed.tensors()
    for key, parameter in plain.parameters.items():
        assert torch.equal(found[key], parameter), key
    for key, buffer in workload.model.named_buffers():
        assert key not in found or torch.equal(found[key], buffer), key


@pytest.fixture(autouse=True)
def spoilt_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks into a slot after its free finds no number there, for ever. With reuse a pack's weights may come
    back to where they were, and a graph that reads them from there is right by luck."""

    spoilt = []

    def spoil(self: SlotPool, slot: Tensor, last_use: object) -> None:
        slot.fill_(0xFF)
        spoilt.append(slot)

    monkeypatch.setattr(SlotPool, "give", spoil)


KEPT = [(4, 4, 0), (2, 0, 0), (0, 3, 0), (1, 2, 0)]


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("kept", KEPT)
def test_kept_activations_train_bit_for_bit_as_plain_pytorch(name: str, kept: tuple[int, ...]) -> None:
    """Weights, inputs and batch come to other slots for the backward; statistics change once."""
    schedule = plan_saving(name, kept)
    replayed = Replayed(name, schedule)
    replayed.run()
    check_equals_plain(name, replayed)
    device = replayed.rank.device
    assert isinstance(device, VirtualDevice)
    assert device.meter.allocated_bytes == 0
    assert replayed.rank.memory.graphs == {}
    assert device.peak_bytes <= schedule.predicted.devices[0].peak_bytes


OFFLOADED = [((0, 0, 0), (4, 4, 0)), ((2, 0, 0), (0, 2, 0)), ((1, 1, 0), (2, 1, 0)), ((0, 0, 0), (0, 3, 0))]


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize(("kept", "offloaded"), OFFLOADED)
def test_offloaded_activations_train_bit_for_bit_as_plain_pytorch(
    name: str, kept: tuple[int, ...], offloaded: tuple[int, ...]
) -> None:
    """They leave the device and come back to other addresses; what stays of the graph has no bytes there."""
    schedule = plan_saving(name, kept, offloaded)
    replayed = Replayed(name, schedule)
    replayed.run()
    check_equals_plain(name, replayed)
    device, record = replayed.rank.device, replayed.rank.recorder.record
    assert isinstance(device, VirtualDevice)
    assert device.meter.allocated_bytes == 0
    assert replayed.rank.memory.graphs == {}
    predicted = schedule.predicted.devices[0]
    assert device.peak_bytes <= predicted.peak_bytes
    assert len(replayed.rank.offloaded) == sum(offloaded)
    assert len(record.moved) == 2 * sum(offloaded)
    assert 0.5 * predicted.swap_out_bytes < record.swapped_out_bytes / STEPS <= predicted.swap_out_bytes


@pytest.mark.parametrize("name", WORKLOADS)
def test_weights_that_stay_for_the_backward_train_bit_for_bit_as_plain_pytorch(name: str) -> None:
    """Kept, offloaded and recomputed microbatches of packs whose weights come in once."""
    schedule = plan_saving(name, (2, 1, 0), (1, 0, 0), held=True)
    assert not any("in:WB0" in text for stream in schedule.programs.train for text in stream.actions)
    replayed = Replayed(name, schedule)
    replayed.run()
    check_equals_plain(name, replayed)


def test_offloaded_bytes_are_gone_from_the_device_until_they_return() -> None:
    schedule = plan_saving("gpt2", (0, 0, 0), (4, 4, 0))
    keeps = plan_saving("gpt2", (4, 4, 0))
    peaks = []
    for chosen in (schedule, keeps):
        replayed = Replayed("gpt2", chosen)
        replayed.run()
        peaks.append(replayed.rank.device.peak_bytes)
    assert peaks[0] < 0.6 * peaks[1]


def test_graph_over_a_slot_that_is_filled_again_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hooks are for: without them nothing fails and the gradients are those of other weights."""
    monkeypatch.setattr(SavedTensors, "hooks", lambda self: torch.enable_grad())
    replayed = Replayed("gpt2", plan_saving("gpt2", (4, 4, 0)), steps=1)
    replayed.run()
    assert not all(tensor.isfinite().all() for tensor in replayed.tensors().values())


def test_saved_tensors_share_pieces_and_let_them_go() -> None:
    saved = SavedTensors({}, [], lambda tensor: False)
    x = torch.randn(6, 4, requires_grad=True)
    with saved.hooks():
        y = torch.tanh(x)
        out = (y * y.t().reshape(6, 4)).exp()
    # x is not needed; y and the two factors' storages are, y once for both of its uses
    pieces = list(saved._pieces.values())
    assert sorted(piece.nbytes for piece in pieces) == [96, 96, 96]
    kept = [weakref.ref(piece) for piece in pieces]
    del pieces, y
    torch.autograd.backward(out.sum())
    gc.collect()
    assert all(piece() is None for piece in kept), "a cycle keeps what nobody needs any more"
    expected = torch.tanh(leaf := x.detach().requires_grad_())
    torch.autograd.backward((expected * expected.t().reshape(6, 4)).exp().sum())
    assert x.grad is not None
    assert leaf.grad is not None
    assert torch.equal(x.grad, leaf.grad)


def test_pieces_leave_one_behind_the_other_and_return_to_memory_of_their_own() -> None:
    saved = SavedTensors({}, [], lambda tensor: False)
    tensors = [torch.arange(n).to(d) for n, d in ((3, torch.bool), (5, torch.float64), (32, torch.float32))]
    places = [saved._pack(tensor) for tensor in tensors]
    left = saved.leave(torch.device("cpu"))
    assert [(start, data.nbytes) for start, data in left] == [(0, 3), (3, 40), (43, 128)]
    assert all(isinstance(place.source, Piece) and place.source.data is None for place in places)
    for (_, target), (_, source) in zip(
        saved.come_back(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)), left, strict=True
    ):
        target.copy_(source)
    assert all(torch.equal(saved._unpack(p), t) for p, t in zip(places, tensors, strict=True))
    kept = weakref.ref(places[0].source)
    del places[0]
    assert kept() is None, "what the graph lets go of is gone"
