"""Replay equals plain PyTorch, bit for bit, however the packs are cut; failures surface at once.

The programs are text, written by hand for one device (or by the planner's lowering where it says so):

    0 -> 1 -> 2     three layers; `x` enters layer 0, `y` (targets) layer 2
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from executor.checkpoint import Checkpoints
from executor.decompose import Decomposition, decompose
from executor.host import HostStore, create_memory, plan_store
from executor.iterations import draw_batch
from executor.launch import run_schedule
from executor.models import load_workload
from executor.options import RunOptions
from executor.profile import measure_profile
from executor.reference import train
from executor.replay import Rank
from executor.streams import VirtualDevice
from executor.structure import layer_places, structure
from executor.workload import Workload
from planner.contract.actions import parse_lane
from planner.contract.errors import HarmonyError
from planner.contract.hardware import DeviceSpec, Hardware, Host, HostLink
from planner.contract.memory import peaks
from planner.contract.precedence import Graph
from planner.contract.profile import BackwardCost, ForwardCost, Profile, model_hash
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
from planner.contract.verify import check_microbatches, check_program
from planner.lower import lower

MiB = 1 << 20
LR = 1e-2
GPT = "hf:gpt2?n_layer=2&n_embd=32&n_head=2&vocab_size=64&n_positions=16&seq=8"
FOUR = ((0, 2), (2, 4), (4, 6), (6, 8))


def make_mlp(*, dropout: float = 0.0, norm: bool = False) -> Workload:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16) if norm else nn.Tanh(), nn.Dropout(dropout)),
        nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(dropout)),
        nn.Sequential(nn.Linear(16, 4)),
    ]
    model = nn.ModuleDict({"blocks": nn.ModuleList(blocks)})

    def forward(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x

    model.forward = forward

    def draw(generator: torch.Generator, num_samples: int) -> dict[str, Tensor]:
        x = torch.randn(num_samples, 8, generator=generator)
        return {"x": x, "y": torch.randn(num_samples, 4, generator=generator)}

    model.train()
    return Workload(model, draw, lambda m, batch: nn.functional.mse_loss(m(batch["x"]), batch["y"]))


def make_gpt(*, is_tied: bool = True) -> Workload:
    return load_workload(f"{GPT}&tie_word_embeddings={str(is_tied).lower()}", seed=0)


def make_hardware(memory_bytes: int = 64 * MiB, devices: int = 1) -> Hardware:
    return Hardware(
        tuple(DeviceSpec(f"v{i}", memory_bytes) for i in range(devices)),
        (HostLink(1e10, 1e10),),
        Host(1 << 34, 1 << 34),
    )


def make_configuration(
    forward_cuts: Sequence[int],
    backward_cuts: Sequence[int],
    num_layers: int,
    samples: tuple[tuple[int, int], ...] = FOUR,
) -> Configuration:
    """Packs that begin at these layers, on one device."""
    ends = [*forward_cuts[1:], backward_cuts[-1]]
    forward = (
        [ForwardPack(a, b - 1, 0) for a, b in zip(forward_cuts, ends, strict=True)] if forward_cuts else []
    )
    backward = [
        BackwardPack(a, b - 1, 0)
        for a, b in zip(backward_cuts, [*backward_cuts[1:], num_layers], strict=True)
    ]
    return Configuration(
        "pp", 1, samples[-1][1], Microbatches(samples, samples), tuple(forward), tuple(backward)
    )


def with_costs(profile: Profile) -> Profile:
    """Large flat costs: what the lowering needs to plan at all."""
    forward = (ForwardCost(64, 1e-4, MiB),)
    backward = (BackwardCost(64, 1e-4, MiB, 1000),)
    layers = tuple(
        msgspec.structs.replace(layer, forward=forward, backward=backward) for layer in profile.layers
    )
    return msgspec.structs.replace(profile, layers=layers)


class Replayed:
    """One rank, ready to run in this process."""

    def __init__(
        self,
        workload: Workload,
        configuration: Configuration,
        streams: dict[str, list[str]] | None = None,
        *,
        optimizer: str = "adamw",
        steps: int = 3,
        hardware: Hardware | None = None,
        decomposition: Decomposition | None = None,
        costs: Profile | None = None,
    ) -> None:
        hardware = hardware or make_hardware()
        self.options = RunOptions("test", steps=steps, optimizer=optimizer, settings={"lr": LR}, paced=False)
        self.decomposition = decomposition or decompose(
            workload, workload.draw(torch.Generator().manual_seed(0), 2), check=False
        )
        profile = structure(self.decomposition, "test", self.options.recipe)
        self.rules = Rules(profile, configuration)
        if streams is None:
            lanes = lower(Rules(costs or with_costs(profile), configuration), [64 * MiB])
        else:
            lanes = tuple(parse_lane(0, stream, texts) for stream, texts in streams.items())
        self.graph = Graph(lanes, self.rules)
        check_microbatches(self.rules)
        check_program(self.graph)
        places = layer_places(self.decomposition, self.options.recipe)
        layout = plan_store(self.rules, self.decomposition, len(self.graph.actions))
        self.store = HostStore(create_memory(layout.total), layout, self.rules, self.decomposition, places)
        for i in range(len(self.decomposition.layers)):
            for name, target in self.store.weights(i).items():
                target.copy_(self.decomposition.parameters[name].detach())
            for name, target in self.store.buffers(i).items():
                target.copy_(self.decomposition.buffers[name])
        self.rank = Rank(
            0, self.graph, hardware, workload, self.decomposition, places, self.store, self.options
        )
        self.losses: list[float] = []

    def run(self) -> None:
        self.rank.run(lambda iteration, loss, seconds: self.losses.append(loss))

    def parameters(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for i in range(len(self.decomposition.layers)):
            found |= {
                k: v for k, v in (self.store.weights(i) | self.store.buffers(i)).items() if k not in found
            }
        return found


def check_equals_plain(
    workload: Workload,
    replayed: Replayed,
    samples: tuple[tuple[int, int], ...] = FOUR,
    *,
    is_tied: bool = False,
) -> None:
    """is_tied: gradients are added per use first and over the uses then, not in plain training's order."""
    replayed.run()
    plain = train(workload, replayed.options, samples, decomposition=replayed.decomposition)
    assert replayed.losses == (pytest.approx(plain.losses, rel=1e-6) if is_tied else list(plain.losses))
    assert len(set(replayed.losses)) == replayed.options.steps, "every step must change the loss"
    buffers = dict(workload.model.named_buffers())
    for name, tensor in replayed.parameters().items():
        expected = plain.parameters[name] if name in plain.parameters else buffers.get(name)
        if expected is None:
            continue
        if is_tied:
            assert torch.allclose(tensor, expected, rtol=0, atol=0.01 * LR * replayed.options.steps), name
        else:
            assert torch.equal(tensor, expected), name
    assert replayed.rank.memory._held == {}


# F0 = 0, F1 = 1; B1 = 2 (fused), B0 = 0..1
#
#   compute   F0.* F1.* B1.* B0.*
#   h2d     WF0 I0.*  WF1  WB1 X1.*  WB0 X0.*     one pack's weights at a time
def streams_two_forward_packs() -> dict[str, list[str]]:
    m = range(4)
    return {
        "compute": [
            *(a for j in m for a in (f"F0.{j}", f"free:I0.{j}")), "free:WF0",
            *(a for j in m for a in (f"F1.{j}", f"free:Y0.{j}")), "free:WF1",
            *(a for j in m for a in (f"B1.{j}", f"free:Y1.{j}", f"free:X1.{j}")), "free:WB1",
            *(a for j in m for a in (f"B0.{j}", f"free:D1.{j}", f"free:X0.{j}")), "free:WB0",
        ],
        "h2d": [
            "in:WF0 after free:WB0@-1", *(f"in:I0.{j}" for j in m),
            "in:WF1 after free:WF0",
            "in:WB1 after free:WF1", *(f"in:X1.{j}" for j in m),
            "in:WB0 after free:WB1", *(f"in:X0.{j}" for j in m),
        ],
        "d2h": ["out:G1", "free:G1", "out:G0", "free:G0"],
        "host": ["update:1", "update:0"],
    }  # fmt: skip


# F0 = 0..1; B2 = 2 (fused), B1 = 1, B0 = 0: what leaves layer 0 is stashed for B1
def streams_one_forward_pack() -> dict[str, list[str]]:
    m = range(4)
    return {
        "compute": [
            *(a for j in m for a in (f"F0.{j}", f"free:I0.{j}")), "free:WF0",
            *(a for j in m for a in (f"B2.{j}", f"free:Y0.{j}", f"free:X2.{j}")), "free:WB2",
            *(a for j in m for a in (f"B1.{j}", f"free:D2.{j}", f"free:X1.{j}")), "free:WB1",
            *(a for j in m for a in (f"B0.{j}", f"free:D1.{j}", f"free:X0.{j}")), "free:WB0",
        ],
        "h2d": [
            "in:WF0 after free:WB0@-1", *(f"in:I0.{j}" for j in m),
            "in:WB2 after free:WF0", *(f"in:X2.{j}" for j in m),
            "in:WB1 after free:WB2",
            "in:X1.0", "in:X1.1", "in:X1.2 after free:X1.0", "in:X1.3 after free:X1.1",
            "in:WB0 after free:WB1", *(f"in:X0.{j}" for j in m),
        ],
        "d2h": [
            *(a for j in m for a in (f"out:S0.{j}", f"free:S0.{j}")),
            "out:G2", "free:G2", "out:G1", "free:G1", "out:G0", "free:G0",
        ],
        "host": ["update:2", "update:1", "update:0"],
    }  # fmt: skip


# one pack that does everything: fused, no forward packs
def streams_fused_only() -> dict[str, list[str]]:
    m = range(4)
    return {
        "compute": [*(a for i in m for a in (f"B0.{i}", f"free:X0.{i}")), "free:WB0"],
        "h2d": ["in:WB0", *(f"in:X0.{i}" for i in m)],
        "d2h": ["out:G0", "free:G0"],
        "host": ["update:0"],
    }


PROGRAMS = {
    "two forward packs": ((0, 1), (0, 2), streams_two_forward_packs),
    "a stash between backward packs": ((0,), (0, 1, 2), streams_one_forward_pack),
    "all in one fused pack": ((), (0,), streams_fused_only),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_hand_written_program_equals_plain_training(name: str, optimizer: str, dropout: float) -> None:
    forward, backward, streams = PROGRAMS[name]
    workload = make_mlp(dropout=dropout)
    replayed = Replayed(workload, make_configuration(forward, backward, 3), streams(), optimizer=optimizer)
    assert len(replayed.decomposition.layers) == 3
    check_equals_plain(workload, replayed)


GPT_CUTS = [
    ((0,), (0, 3)),
    ((0, 1), (0, 1, 2)),
    ((0, 1, 2, 3), (0, 1, 2, 3, 4)),
    ((0, 2), (0, 1, 3)),
    ((), (0,)),
]
"""Of the five layers inputs, block 0, block 1, norm, head."""


@pytest.mark.parametrize(("forward", "backward"), GPT_CUTS)
def test_lowered_gpt2_with_dropout_and_tied_weights_equals_plain_training(
    forward: tuple[int, ...], backward: tuple[int, ...]
) -> None:
    workload = make_gpt()
    replayed = Replayed(workload, make_configuration(forward, backward, 5))
    assert len(replayed.decomposition.layers) == 5
    assert replayed.decomposition.ties
    check_equals_plain(workload, replayed, is_tied=True)


@pytest.mark.parametrize(("forward", "backward"), GPT_CUTS)
def test_lowered_gpt2_without_ties_equals_plain_training_bit_for_bit(
    forward: tuple[int, ...], backward: tuple[int, ...]
) -> None:
    workload = make_gpt(is_tied=False)
    replayed = Replayed(workload, make_configuration(forward, backward, 5))
    assert not replayed.decomposition.ties
    check_equals_plain(workload, replayed)


def test_uneven_microbatches_give_the_loss_and_step_of_the_whole_minibatch() -> None:
    """Case 5: the mean of the microbatches' means is not the minibatch's mean."""
    samples = ((0, 3), (3, 6), (6, 7), (7, 8))
    workload = make_mlp()
    replayed = Replayed(workload, make_configuration((0,), (0, 1, 2), 3, samples))
    model = make_mlp()
    batch = draw_batch(model, 0, 0, 8)
    whole = model.loss(model.model, batch).item()
    check_equals_plain(workload, replayed, samples)
    assert replayed.losses[0] == pytest.approx(whole, rel=1e-6)


def test_backward_microbatches_may_be_other_ranges_than_forward_ones() -> None:
    workload = make_mlp()
    same = make_configuration((0,), (0, 1, 2), 3)
    coarse = msgspec.structs.replace(same, microbatches=Microbatches(FOUR, ((0, 5), (5, 8))))
    replayed = Replayed(workload, coarse)
    # a matrix product over 2 rows rounds another way than one over 5
    check_equals_plain(workload, replayed, ((0, 5), (5, 8)), is_tied=True)


def streams_with_statistics(name: str) -> dict[str, list[str]]:
    """The program with the changed buffers of layer 0 brought back behind the last microbatch."""
    streams = PROGRAMS[name][2]()
    weights, last = ("WB0", "free:X0.3") if name == "all in one fused pack" else ("WF0", "free:I0.3")
    streams["compute"].remove(f"free:{weights}")
    streams["d2h"][:0] = [f"out:{weights} after {last}", f"free:{weights}"]
    return streams


@pytest.mark.parametrize("name", PROGRAMS)
def test_batch_norm_statistics_are_updated_once_for_each_microbatch(name: str) -> None:
    """Case 2: recompute must not update them a second time."""
    workload = make_mlp(norm=True)
    forward, backward, _ = PROGRAMS[name]
    replayed = Replayed(workload, make_configuration(forward, backward, 3), streams_with_statistics(name))
    before = {name: buffer.clone() for name, buffer in workload.model.named_buffers()}
    replayed.run()
    for name, buffer in workload.model.named_buffers():
        buffer.data = before[name]
    train(workload, replayed.options, FOUR, decomposition=replayed.decomposition)
    found = replayed.parameters()
    for name, buffer in workload.model.named_buffers():
        assert torch.equal(found[name], buffer), name
    (counted,) = (found[name] for name in found if name.endswith("num_batches_tracked"))
    assert counted.item() == 3 * len(FOUR)


@pytest.mark.parametrize(("forward", "backward"), [((0,), (0, 1, 2)), ((), (0,)), ((0, 1), (0, 2))])
def test_changed_buffers_leave_behind_the_last_forward(
    forward: tuple[int, ...], backward: tuple[int, ...]
) -> None:
    replayed = Replayed(make_mlp(norm=True), make_configuration(forward, backward, 3))
    graph = replayed.graph
    (out,) = (node for node, action in enumerate(graph.actions) if str(action).startswith("out:W"))
    last = "F0.3" if forward else "B0.3"
    assert last in [str(graph.actions[node]) for node, ago in graph.waits[out] if not ago]


def test_frozen_layers_keep_their_weights() -> None:
    """Case 9: first layers frozen, so that a backward pack has nothing to differentiate."""
    workload = make_mlp()
    for parameter in list(workload.model.parameters())[:2]:
        parameter.requires_grad_(False)
    replayed = Replayed(workload, make_configuration((0,), (0, 1, 2), 3))
    check_equals_plain(workload, replayed)


class _Flatten(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 64)


def test_pack_whose_output_is_a_view_of_its_input_has_bytes_of_its_own() -> None:
    """A view of a slot outlives the slot's value: the next value in that slot would show through it."""
    torch.manual_seed(0)
    blocks = [_Flatten(), nn.Linear(64, 8), nn.Linear(8, 4), nn.Linear(4, 4)]
    model = nn.ModuleDict({"blocks": nn.ModuleList(blocks)})

    def forward(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x

    model.forward = forward
    model.train()
    workload = Workload(
        model,
        lambda g, n: {"x": torch.randn(n, 8, 8, generator=g), "y": torch.randn(n, 4, generator=g)},
        lambda m, batch: nn.functional.mse_loss(m(batch["x"]), batch["y"]),
    )
    # layers by name: one without parameters is found no other way
    example = workload.draw(torch.Generator().manual_seed(0), 2)
    decomposition = decompose(workload, example, patterns=("blocks.*",), check=False)
    assert len(decomposition.layers) == 4
    replayed = Replayed(workload, make_configuration((0, 1, 2), (0, 1, 2, 3), 4), decomposition=decomposition)
    check_equals_plain(workload, replayed)


def test_a_slow_checkpoint_holds_the_moment_it_is_of() -> None:
    """The next iteration runs meanwhile; its update of a layer waits until that layer is saved."""
    workload = make_mlp()
    forward, backward, streams = PROGRAMS["two forward packs"]
    replayed = Replayed(workload, make_configuration(forward, backward, 3), streams(), steps=4)
    options = dataclasses.replace(replayed.options, checkpoints=Checkpoints(Path("unused"), 1))
    replayed.rank.options = options
    saved: dict[int, dict[str, Tensor]] = {}
    begun: list[int] = []

    def save(steps: int, on_layer: Callable[[int], None]) -> None:
        found = saved.setdefault(steps, {})
        for layer in (2, 1, 0):
            time.sleep(0.05)
            found |= {name: tensor.clone() for name, tensor in replayed.store.weights(layer).items()}
            begun.append(replayed.store.done[0])
            on_layer(layer)

    replayed.rank.run(save=save)
    assert sorted(saved) == [1, 2, 3]
    assert any(count > steps for steps, count in zip([1] * 3 + [2] * 3 + [3] * 3, begun, strict=True)), (
        "no pause"
    )
    for steps, weights in saved.items():
        fresh = make_mlp()
        plain = train(fresh, dataclasses.replace(options, steps=steps), FOUR)
        assert weights.keys() == plain.parameters.keys()
        for name, tensor in weights.items():
            assert torch.equal(tensor, plain.parameters[name]), (steps, name)


def test_action_over_the_budget_is_named() -> None:
    workload = make_mlp()
    forward, backward, streams = PROGRAMS["two forward packs"]
    # less than the first action brings, for which all the others wait
    hardware = make_hardware(memory_bytes=100)
    replayed = Replayed(workload, make_configuration(forward, backward, 3), streams(), hardware=hardware)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"gpu0/h2d\[0\] in:WF0: WF0 needs 1024 bytes .* over the limit of 100"
    ):
        replayed.run()


def test_compute_over_the_budget_is_named() -> None:
    workload = make_mlp()
    forward, backward, streams = PROGRAMS["all in one fused pack"]
    replayed = Replayed(workload, make_configuration(forward, backward, 3), streams())
    resident = replayed.rules.nbytes(
        replayed.graph.effects[replayed.graph.node_of[replayed.graph.actions[0]]].makes[0]
    )
    hardware = make_hardware(memory_bytes=9 * 512 + resident)
    again = Replayed(make_mlp(), make_configuration(forward, backward, 3), streams(), hardware=hardware)
    with pytest.raises(torch.OutOfMemoryError, match=r"gpu0/compute\[\d+\] B0\.\d: .* over the limit of"):
        again.run()


@pytest.mark.parametrize("stream", ["h2d", "d2h", "host", "compute"])
def test_failure_in_any_stream_surfaces_within_a_second(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import executor.handlers as handlers

    workload = make_mlp()
    forward, backward, streams = PROGRAMS["a stash between backward packs"]
    replayed = Replayed(workload, make_configuration(forward, backward, 3), streams(), steps=50)
    victim = {"h2d": "in:X1.2", "d2h": "out:G1", "host": "update:1", "compute": "B1.1"}[stream]
    failed_at = []

    def fail_on(handler: Callable[..., bool]) -> Callable[..., bool]:
        def run(rank: Any, action: Any, iteration: int) -> bool:
            if str(action) == victim and iteration == 2:
                failed_at.append(time.perf_counter())
                raise ZeroDivisionError(victim)
            return handler(rank, action, iteration)

        return run

    for kind, handler in list(handlers.HANDLERS.items()):
        monkeypatch.setitem(handlers.HANDLERS, kind, fail_on(handler))
    with pytest.raises(ZeroDivisionError, match=victim):
        replayed.run()
    assert time.perf_counter() - failed_at[0] < 1.0
    assert replayed.store.failed
    assert not [t for t in threading.enumerate() if t.name.startswith("gpu0/")]


@pytest.mark.parametrize("seed", range(4))
def test_random_delays_change_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases 20 and 21: threads that are late or early at every action widen each race there is."""
    import executor.handlers as handlers

    workload = make_mlp(dropout=0.2)
    forward, backward, streams = PROGRAMS["a stash between backward packs"]
    replayed = Replayed(workload, make_configuration(forward, backward, 3), streams(), steps=6)
    generator = random.Random(seed)

    def delayed(handler: Callable[..., bool]) -> Callable[..., bool]:
        def run(rank: Any, action: Any, iteration: int) -> bool:
            time.sleep(generator.choice((0.0, 0.0, 0.001, 0.004)))
            overran = handler(rank, action, iteration)
            time.sleep(generator.choice((0.0, 0.0, 0.001, 0.004)))
            return overran

        return run

    for kind, handler in list(handlers.HANDLERS.items()):
        monkeypatch.setitem(handlers.HANDLERS, kind, delayed(handler))
    check_equals_plain(workload, replayed)


@pytest.mark.parametrize(("forward", "backward"), GPT_CUTS)
def test_measured_peak_stays_within_the_planned_one(
    forward: tuple[int, ...], backward: tuple[int, ...]
) -> None:
    """Case 30: the budget is what the contract says of the program, from a measured profile."""
    workload = make_gpt()
    profile = measure_profile(workload, "test", [1, 2], optimizer="adamw", settings={"lr": LR}, repeats=2)
    rules = Rules(profile, make_configuration(forward, backward, 5))
    (planned,) = peaks(Graph(lower(rules, [64 * MiB]), rules), 1)
    hardware = make_hardware(memory_bytes=planned.nbytes)
    replayed = Replayed(workload, rules.configuration, hardware=hardware, costs=profile)
    replayed.run()
    measured = replayed.rank.device.peak_bytes
    assert measured <= planned.nbytes
    assert measured >= 0.5 * planned.nbytes, "the plan wastes half of the device"


def test_two_devices_equal_plain_training() -> None:
    """Wrap-around on two processes: activations and gradients cross; small messages must not deadlock.

    A send is over only when its receive is posted: a receive that waited for the send to be over never ran.
    """
    spec, options, schedule, decomposition = plan_for_two_devices(make_hardware(devices=2))
    workload = load_workload(spec, seed=0)
    trace = run_schedule(schedule, options)
    plain = train(workload, options, FOUR, decomposition=decomposition)
    assert trace.losses == plain.losses
    assert trace.devices[0].peer_bytes > 0 < trace.devices[1].peer_bytes


def test_failure_on_one_of_two_devices_ends_both_at_once() -> None:
    """The other rank waits in a transfer that never comes."""
    small = make_hardware(devices=2)
    small = msgspec.structs.replace(small, devices=(small.devices[0], DeviceSpec("v1", 20_000)))
    _, options, schedule, _ = plan_for_two_devices(small)
    with pytest.raises(torch.OutOfMemoryError, match=r"^gpu1/\w+\[\d+\] \S+: .* over the limit of 20000"):
        run_schedule(schedule, options)


def plan_for_two_devices(hardware: Hardware) -> tuple[str, RunOptions, Schedule, Decomposition]:
    spec = f"{GPT}&tie_word_embeddings=false"
    workload = load_workload(spec, seed=0)
    decomposition = decompose(workload, workload.draw(torch.Generator().manual_seed(0), 2), check=False)
    options = RunOptions(spec, steps=3, settings={"lr": LR}, paced=False)
    profile = structure(decomposition, spec, options.recipe)
    configuration = msgspec.structs.replace(
        make_configuration((0, 1, 2, 3), (0, 1, 2, 3, 4), 5),
        num_devices=2,
        forward_packs=tuple(ForwardPack(i, i, i % 2) for i in range(4)),
        backward_packs=tuple(BackwardPack(i, i, i % 2) for i in range(5)),
    )
    lanes = lower(Rules(with_costs(profile), configuration), [64 * MiB] * 2)
    schedule = Schedule(
        PlannedFor(profile.model, model_hash(profile), profile.dtype, profile.optimizer),
        hardware,
        configuration,
        Predicted(1.0, 1.0, 1, (DevicePrediction(1, 1, 1),) * 2),
        Programs(print_program(lanes)),
    )
    return spec, options, schedule, decomposition


def test_memory_is_flat_over_iterations() -> None:
    """Case 23: nothing is kept from iteration to iteration, on the device or in slots."""
    workload = make_mlp(dropout=0.1)
    forward, backward, streams = PROGRAMS["a stash between backward packs"]
    few = Replayed(workload, make_configuration(forward, backward, 3), streams(), steps=3)
    few.run()
    many = Replayed(make_mlp(dropout=0.1), make_configuration(forward, backward, 3), streams(), steps=60)
    many.run()
    for replayed in (many, few):
        assert isinstance(replayed.rank.device, VirtualDevice)
        assert replayed.rank.device.meter.allocated_bytes == 0
    assert many.rank.memory.pool.reserved_bytes <= 2 * few.rank.memory.pool.reserved_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"update": "device"}, "weights 'stream' with an update on the device"),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_name_before_the_run(
    change: dict[str, object], message: str
) -> None:
    workload = make_mlp()
    forward, backward, streams = PROGRAMS["all in one fused pack"]
    configuration = make_configuration(forward, backward, 3)
    packs = tuple(msgspec.structs.replace(pack, **change) for pack in configuration.backward_packs)
    replayed = Replayed(workload, configuration, streams())
    rules = Rules(replayed.rules.profile, msgspec.structs.replace(configuration, backward_packs=packs))
    from executor.handlers import check_supported

    with pytest.raises(HarmonyError, match=message) as caught:
        check_supported(rules)
    assert "\n" not in str(caught.value)
