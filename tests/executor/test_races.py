"""No race in the real executor over random schedules, and every planted one is found: on a device that records what could
run at the same time (recording.py)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor import handlers, p2p, replay, servers
from executor.decompose import Decomposition, decompose
from executor.host import HostStore, create_memory, plan_store
from executor.memory import SlotPool
from executor.options import RunOptions
from executor.reference import train
from executor.replay import Rank
from executor.streams import Event
from executor.structure import layer_places, structure
from executor.weights import fill
from executor.workload import Workload, flat
from planner.contract.actions import SwapIn
from planner.contract.errors import HarmonyError
from planner.contract.hardware import DeviceSpec, Hardware, Host, HostLink
from planner.contract.precedence import Graph
from planner.contract.profile import Profile
from planner.contract.rules import Rules
from planner.contract.schedule import BackwardPack, Configuration, ForwardPack, Microbatches, Samples
from planner.contract.verify import check_microbatches, check_program
from planner.lower import lower
from tests.executor.recording import Flags, RaceError, Recording, RecordingDevice, Transfers, watch
from tests.executor.test_replay import with_costs

STEPS = 3
NUM_LAYERS = 5
WIDTH = 8


class Counting(nn.Module):
    """A recompute has to begin with the count that its forward had."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1.0)
        return x / self.calls


class Net(nn.Module):
    """Blocks of which one has statistics and one a state, and a tensor that skips some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH),
                {1: nn.BatchNorm1d(WIDTH, momentum=0.5), 2: Counting()}.get(i, nn.Tanh()),
                nn.Linear(WIDTH, WIDTH),
            )
            for i in range(NUM_LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for i, block in enumerate(self.blocks):
            x = block(x)
            first = x if i == 0 else first
        return x + first


def draw(generator: torch.Generator, num_samples: int) -> dict[str, Tensor]:
    return {name: torch.randn(num_samples, WIDTH, generator=generator) for name in "xy"}


def make_workload() -> Workload:
    torch.manual_seed(0)
    return flat(
        Net().train(), draw, lambda model, batch: nn.functional.mse_loss(model(batch["x"]), batch["y"])
    )


OPTIONS = RunOptions("net", steps=STEPS, settings={"lr": 1e-2}, paced=False, evaluate_every=2)


@cache
def cut() -> tuple[Workload, Decomposition, Profile, dict[str, Tensor]]:
    workload = make_workload()
    decomposition = decompose(workload, draw(torch.Generator().manual_seed(0), 2), check=False)
    state = {n: t.clone() for n, t in (decomposition.parameters | decomposition.buffers).items()}
    return workload, decomposition, structure(decomposition, "net", OPTIONS.recipe), state


# ---- random schedules


def random_configuration(pick: random.Random) -> Configuration:
    """One device, a ring, a reflected ring, replicas; weights that stay; activations of every kind; uneven microbatches."""
    stages, replicas = pick.choice([(1, 1), (1, 1), (2, 1), (1, 2)])
    backward = random_cuts(pick, NUM_LAYERS)
    if pick.random() < 0.5 and len(backward) > 1:
        forward = backward[:-1]
    else:
        forward = random_cuts(pick, backward[-1][0]) if backward[-1][0] else []
    is_alike = forward == backward[:-1]
    is_reflected = is_alike and (stages == 1 or pick.random() < 0.5)
    # a batch-coupled model has one size of microbatches; BatchNorm wants two samples
    ranges: list[Samples] = []
    shares: list[Samples] = []
    start = 0
    for _ in range(replicas):
        first = start
        for _ in range(pick.randint(1, 3)):
            end = start + pick.choice([2, 2, 3])
            ranges.append((start, end))
            start = end
        shares.append((first, start))
    last = len(forward) + len(backward) - 1
    device_of = [i % stages for i in range(len(backward))]
    holds, residents, choices = [], [], []
    for i in range(len(backward)):
        stays = is_reflected and i < len(forward)
        residents.append(is_reflected and replicas == 1 and pick.random() < 0.25)
        holds.append(stays and not residents[-1] and pick.random() < 0.3)
        choices.append(tuple(pick.choice(["recompute", "keep", "offload"]) for _ in ranges) if stays else ())
    weights = ["resident" if r else "hold" if h else "stream" for r, h in zip(residents, holds, strict=True)]
    return Configuration(
        "pp" if replicas == 1 else "dp",
        stages * replicas,
        start,
        Microbatches(tuple(ranges), tuple(ranges)),
        tuple(
            ForwardPack(a, b, i % stages, weights=weights[i] if is_reflected else "stream")  # type: ignore[arg-type]
            for i, (a, b) in enumerate(forward)
        ),
        tuple(
            BackwardPack(
                a,
                b,
                device_of[i] if is_reflected else (last - i) % stages,
                weights=weights[i],  # type: ignore[arg-type]
                update="device" if residents[i] and pick.random() < 0.7 else "host",
                activations=choices[i] if any(c != "recompute" for c in choices[i]) else (),  # type: ignore[arg-type]
            )
            for i, (a, b) in enumerate(backward)
        ),
        replicas=tuple(shares) if replicas > 1 else (),
    )


def random_cuts(pick: random.Random, end: int) -> list[tuple[int, int]]:
    inner = pick.sample(range(1, end), pick.randint(0, min(3, end - 1))) if end > 1 else []
    return [(a, b - 1) for a, b in pairwise(sorted({0, end, *inner}))]


def random_graph(seed: int) -> Graph:
    """A verified program, tight or loose."""
    pick = random.Random(seed)
    profile = cut()[2]
    while True:
        rules = Rules(with_costs(profile), random_configuration(pick))
        limit = pick.choice([1 << 21, 1 << 22, 1 << 30])
        try:
            check_microbatches(rules)
            lanes = lower(rules, [limit] * rules.configuration.num_devices)
            graph = Graph(lanes, Rules(profile, rules.configuration))
            check_program(graph)
            handlers.check_supported(graph.rules)
        except HarmonyError:
            continue
        return graph


def statistics_of(store: HostStore, decomposition: Decomposition) -> list[tuple[int, int]]:
    """The bytes of the store that layers change as they run."""
    found = []
    for i, layer in enumerate(decomposition.layers):
        for name in layer.mutated_buffers:
            tensor = store.buffers(i)[name]
            start = int(tensor.storage_offset()) * tensor.element_size()
            found.append((start, start + tensor.nbytes))
    return sorted(found)


class Run:
    """A program on recording devices, all ranks threads of this process."""

    def __init__(self, graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
        workload, decomposition, _, state = cut()
        with torch.no_grad():
            for name, tensor in (decomposition.parameters | decomposition.buffers).items():
                tensor.data = state[name].clone()
        self.graph, self.recording = graph, Recording()
        self.transfers = Transfers(self.recording)
        monkeypatch.setattr(p2p, "dist", self.transfers)
        monkeypatch.setattr(servers, "dist", self.transfers)
        monkeypatch.setattr(
            replay, "make_device", lambda kind, index, *_, **__: RecordingDevice(self.recording, index)
        )
        places = layer_places(decomposition, OPTIONS.recipe)
        layout = plan_store(graph.rules, decomposition, len(graph.actions))
        self.store = HostStore(create_memory(layout.total), layout, graph.rules, decomposition, places)
        fill(self.store, decomposition)
        self.recording.register(self.store.memory, "the host store", is_host=True)
        count = graph.rules.configuration.num_devices
        hardware = Hardware(
            tuple(DeviceSpec(f"g{i}", 1 << 30) for i in range(count)),
            (HostLink(1e9, 1e9),),
            Host(1 << 34, 1 << 34),
        )
        self.ranks = []
        for rank in range(count):
            self.transfers.make_groups()
            self.ranks.append(
                Rank(rank, graph, hardware, workload, decomposition, places, self.store, OPTIONS)
            )
            self.ranks[-1].evaluation = decomposition
            watch(self.ranks[-1], self.recording, self.transfers)
        unused = statistics_of(self.store, decomposition)

        def swap_in(rank: Rank, action: SwapIn, iteration: int) -> bool:
            """A recompute has no use for the statistics that come with its weights: it normalizes with the batch's."""
            value = action.value
            is_used = value.kind != "WB" or value.pack == rank.rules.fused
            with self.recording.not_using([] if is_used else unused):
                return handlers.run_swap_in(rank, action, iteration)

        monkeypatch.setitem(handlers.HANDLERS, SwapIn, swap_in)
        for name in ("done", "begun", "_words"):
            setattr(self.store, name, Flags(self.recording, getattr(self.store, name)))
        self.losses: list[float] = []

    def run(self) -> None:
        """Raises the first failure."""
        self.recording.start()
        failures: list[BaseException] = []

        def run(rank: Rank) -> None:
            try:
                rank.run(lambda k, loss, seconds: self.losses.append(loss))
            except BaseException as error:
                failures.append(error)
                self.transfers.has_failed = True

        threads = [threading.Thread(target=run, args=(rank,)) for rank in self.ranks[1:]]
        for thread in threads:
            thread.start()
        run(self.ranks[0])
        for thread in threads:
            thread.join()
        races = [error for error in failures if isinstance(error, RaceError)]
        if failures:
            raise (races or failures)[0]
        if self.recording.races:
            raise RaceError(self.recording.races[0])


# ---- the real executor


def replay_random(seed: int, monkeypatch: pytest.MonkeyPatch) -> Run:
    run = Run(random_graph(seed), monkeypatch)
    run.run()
    return run


def test_recorded_runs_train_as_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is watched is real training."""
    seed = next(
        s
        for s in range(100)
        if random_graph(s).rules.configuration.num_devices == 2 and len(random_graph(s).rules.replicas) == 1
    )
    run = replay_random(seed, monkeypatch)
    samples = run.graph.rules.configuration.microbatches.backward
    workload = make_workload()
    torch.set_num_threads(1)
    plain = train(workload, OPTIONS, samples)
    assert run.losses == list(plain.losses)
    assert run.recording.accesses > 1000


@pytest.mark.parametrize("first", range(0, 24, 8))
def test_no_race_over_random_schedules(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(first, first + 8):
        replay_random(seed, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 50))
def test_no_race_over_a_thousand_random_schedules(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(first, first + 50):
        replay_random(seed, monkeypatch)


# ---- planted races


def launched(rank: Rank, node: int, iteration: int) -> bool:
    """Until an action is launched; whether it is one of this rank's."""
    if rank.graph.lanes[rank.graph.lane_of[node]].device != rank.rank:
        rank.poll(lambda: rank.store.done[node] > iteration)
        return False
    with rank._changed:
        while rank._recorded[node] <= iteration:
            rank.check()
            rank._changed.wait(0.5)
    return True


def a_wait_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches wait for launches, and streams for nothing."""
    monkeypatch.setattr(
        Rank, "_wait", lambda rank, stream, node, iteration: iteration < 0 or launched(rank, node, iteration)
    )


def a_slot_is_taken_while_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SlotPool.take

    def take(pool: SlotPool, nbytes: int, stream: str) -> Tensor:
        pool._free = [(slot, None) for slot, _ in pool._free]
        return real(pool, nbytes, stream)

    monkeypatch.setattr(SlotPool, "take", take)


def a_slot_is_given_back_behind_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SlotPool.give

    def give(pool: SlotPool, slot: Tensor, last_use: Event) -> None:
        real(pool, slot, pool._device.mark("recv"))

    monkeypatch.setattr(SlotPool, "give", give)


def events_are_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before an action takes the place of the one behind it."""
    real = Rank._mark

    def mark(rank: Rank, stream: str, span: Any, before: Event) -> None:
        real(rank, stream, span, before)
        if (span.node, span.iteration) in rank._events:
            rank._events[span.node, span.iteration] = before

    monkeypatch.setattr(Rank, "_mark", mark)


def weights_come_in_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RecordingDevice.copy

    def copy(device: RecordingDevice, copies: Any, stream: str, started: float) -> None:
        real(device, copies, {"h2d": "recv"}.get(stream, stream), started)

    monkeypatch.setattr(RecordingDevice, "copy", copy)


def the_allocator_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordingDevice, "used_on", lambda *_: None)


def what_is_launched_counts_as_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordingDevice, "when_over", lambda device, event, call: call())


def the_host_updates_before_gradients_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RecordingDevice.wait

    def wait(device: RecordingDevice, stream: str, event: Event) -> None:
        if stream != "host":
            real(device, stream, event)

    monkeypatch.setattr(RecordingDevice, "wait", wait)


def a_slot_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SlotPool.take
    monkeypatch.setattr(
        SlotPool, "take", lambda pool, nbytes, stream: real(pool, max(1, nbytes // 2), stream)
    )


def the_iteration_before_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(rank: Rank, stream: str, node: int, iteration: int) -> None:
        if iteration >= 0 and launched(rank, node, iteration):
            rank.device.wait(stream, rank._events.get((node, iteration - 1)))

    monkeypatch.setattr(Rank, "_wait", wait)


def a_batch_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as all copies of it are launched."""

    def is_over(rank: Rank, iteration: int) -> bool:
        graph = rank.graph
        copies = [n for n, lane in enumerate(graph.lane_of) if graph.lanes[lane].stream == "h2d"]
        return all(rank._recorded[node] > iteration for node in copies)

    monkeypatch.setattr(Rank, "is_over", is_over)


def gradients_are_summed_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RecordingDevice.on
    monkeypatch.setattr(
        RecordingDevice, "on", lambda device, stream: real(device, "recv" if stream == "reduce" else stream)
    )


PLANTED: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    a_wait_is_missing: r"does not wait for aten::copy_ on gpu\d/h2d, which writes it",
    a_slot_is_taken_while_it_is_in_use: r"(writes|uses) a slot of \d+ bytes and does not wait for",
    a_slot_is_given_back_behind_another_stream: r"(writes|uses) a slot of \d+ bytes and does not wait for",
    events_are_swapped: r"does not wait for aten::copy_ on gpu\d/h2d, which writes it",
    weights_come_in_on_another_stream: r"does not wait for aten::copy_ on gpu\d/recv, which writes it",
    the_allocator_is_not_told: r"is given back while aten::copy_ on gpu\d/d2h may still use it",
    what_is_launched_counts_as_done: r"writes the host store and does not wait for",
    the_host_updates_before_gradients_have_arrived: r"the host store and does not wait for",
    a_slot_is_too_small: r"a slot of \d+ bytes is taken for \d+",
    the_iteration_before_is_waited_for: r"does not wait for aten::copy_ on gpu\d/h2d, which writes it",
    a_batch_is_written_over: r"on the host \(gpu0/batches\) writes the host store and does not wait for",
    gradients_are_summed_on_another_stream: r"send on gpu\d/recv uses a slot",
}
"""And what is said of each."""


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_race_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first schedule of two replicas (of one device, where host threads meet), whatever its threads' timing."""
    plant(monkeypatch)
    wanted = 1 if plant is a_batch_is_written_over else 2
    seed = next(
        s
        for s in range(100)
        if len(random_graph(s).rules.replicas) == random_graph(s).rules.configuration.num_devices == wanted
    )
    with pytest.raises(RaceError, match=PLANTED[plant]):
        replay_random(seed, monkeypatch)
