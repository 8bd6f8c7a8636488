"""The host store: the same bytes in every process, as large as the rules say, and nothing left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import Tensor, nn

from executor.decompose import Decomposition, decompose
from executor.host import PAGE, WORD, HostStore, create_memory, plan_store
from executor.optimizer import recipe
from executor.structure import layer_places, structure
from executor.workload import Workload
from planner.contract.errors import HarmonyError
from planner.contract.rules import Rules
from planner.contract.schedule import BackwardPack, Configuration, ForwardPack, Microbatches

NODES = 17
SETTINGS = {"lr": 1e-3}


def make_workload() -> Workload:
    torch.manual_seed(0)
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3)])
    model = nn.ModuleDict({"blocks": blocks})

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


def make_parts() -> tuple[Rules, Decomposition]:
    workload = make_workload()
    decomposition = decompose(workload, workload.draw(torch.Generator().manual_seed(0), 2), check=False)
    samples = ((0, 2), (2, 4), (4, 6))
    configuration = Configuration(
        "pp", 1, 6, Microbatches(samples, samples), (ForwardPack(0, 1, 0),),
        (BackwardPack(0, 0, 0), BackwardPack(1, 1, 0), BackwardPack(2, 2, 0)),
    )  # fmt: skip
    return Rules(structure(decomposition, "test", recipe("adamw", SETTINGS)), configuration), decomposition


def make_store(descriptor: int | None = None) -> tuple[HostStore, int]:
    rules, decomposition = make_parts()
    layout = plan_store(rules, decomposition, NODES)
    descriptor = create_memory(layout.total) if descriptor is None else descriptor
    return HostStore(
        descriptor, layout, rules, decomposition, layer_places(decomposition, recipe("adamw", SETTINGS))
    ), descriptor


def test_store_is_what_the_rules_say_and_a_control_area() -> None:
    store, _ = make_store()
    rules, decomposition = make_parts()
    areas = 3 + 2 * len(store.layout.batch[0]) + len(store.layout.stash)
    words = WORD * (2 + 2 + 2 * NODES) + 4 * 2 * 3
    beyond = store.layout.total - rules.host_bytes()
    assert 0 < beyond <= words + PAGE * (areas + 1)
    assert len(decomposition.layers) == 3


def test_areas_do_not_overlap() -> None:
    store, _ = make_store()
    tensors = [
        t
        for i in range(3)
        for part in (store.weights(i), store.buffers(i), store.gradients(i))
        for t in part.values()
    ]
    tensors += [t for states in store.states().values() for t in states.values()]
    tensors += [store.batch(k, name, 0, 6) for k in (0, 1) for name in ("x", "y")]
    tensors += [store.stash(key, 0, 6, 0) for key in store.layout.stash]
    tensors.append(store.losses)
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    control = WORD * (2 + 2 + 2 * NODES)
    assert ranges[0][0] >= store.memory.data_ptr() + control


def test_words_of_different_meaning_are_different_words() -> None:
    store, _ = make_store()
    for node in range(NODES):
        store.done[node] = 1000 + node
        store.begun[node] = 2000 + node
    store.failed, store.num_batches = 3, 4
    store.busy[0], store.busy[1] = 5, 6
    store.losses.fill_(7.0)
    assert list(store.done) == [1000 + n for n in range(NODES)]
    assert list(store.begun) == [2000 + n for n in range(NODES)]
    assert (store.failed, store.num_batches, list(store.busy)) == (3, 4, [5, 6])


def test_pack_of_layers_is_one_range() -> None:
    store, _ = make_store()
    for i in range(3):
        for j, tensor in enumerate((*store.weights(i).values(), *store.buffers(i).values())):
            tensor.fill_(10 * i + j)
    whole = store.weight_range(0, 2)
    assert torch.equal(torch.cat([store.weight_range(0, 0), store.weight_range(1, 2)]), whole)
    first = store.weights(1)
    name = next(iter(first))
    start = first[name].data_ptr() - store.weight_range(1, 1).data_ptr()
    assert start == 0, "a layer's first parameter begins its range"
    assert all(t.data_ptr() % 512 == store.weight_range(0, 0).data_ptr() % 512 for t in first.values())


def test_batches_alternate_and_rows_are_samples() -> None:
    store, _ = make_store()
    store.batch(0, "x", 0, 6).copy_(torch.arange(6.0)[:, None].expand(6, 8))
    store.batch(1, "x", 0, 6).fill_(-1)
    assert store.batch(2, "x", 2, 4)[:, 0].tolist() == [2.0, 3.0]
    assert store.batch(3, "x", 2, 4)[:, 0].tolist() == [-1.0, -1.0]


def test_copy_into_one_tensor_does_not_make_autograd_refuse_another() -> None:
    store, _ = make_store()
    weight, other = (next(iter(store.weights(i).values())) for i in (0, 1))
    weight.fill_(3.0)
    leaf = weight.requires_grad_()
    loss = (leaf * leaf).sum()
    other.fill_(1.0)
    store.gradient_range(0, 2).zero_()
    torch.autograd.backward(loss)
    assert leaf.grad is not None
    assert bool((leaf.grad == 6.0).all())


def _other_process(process: int, descriptor: int, answer: Connection) -> None:
    opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
    store, _ = make_store(opened)
    answer.send((store.done[3], next(iter(store.weights(2).values())).flatten()[0].item()))
    store.begun[5] = 77
    answer.close()


def test_other_process_sees_the_same_bytes_and_nothing_is_left_behind() -> None:
    """Case 26: one copy, whatever the number of ranks."""
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else set()
    store, descriptor = make_store()
    store.done[3] = 42
    next(iter(store.weights(2).values())).fill_(2.5)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_other_process, args=(os.getpid(), descriptor, theirs))
    child.start()
    theirs.close()
    assert ours.poll(60), "the other process did not answer"
    assert ours.recv() == (42, 2.5)
    child.join(30)
    assert child.exitcode == 0
    assert store.begun[5] == 77
    after = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else set()
    assert after <= before
    os.close(descriptor)


def test_tensor_outlives_the_store() -> None:
    store, descriptor = make_store()
    tensor = next(iter(store.weights(0).values()))
    tensor.fill_(1.25)
    del store
    os.close(descriptor)
    gc.collect()
    assert bool((tensor == 1.25).all())


def test_too_little_free_memory_is_said_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 25."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=12345, total=1 << 60))
    with pytest.raises(HarmonyError, match="needs 99999 bytes of memory, 12345 are free") as caught:
        create_memory(99999)
    assert "\n" not in str(caught.value)
