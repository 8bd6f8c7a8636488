"""Slots are counted as planned, used again safely, and never show through tensors that live longer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from executor.host import over_storage
from executor.memory import DeviceMemory, Shapes, slot_bytes, tensors_in
from executor.streams import VirtualDevice
from planner.contract.actions import parse_value
from planner.contract.hardware import DeviceSpec, Hardware, Host, HostLink

MiB = 1 << 20


def make_device(memory_bytes: int = MiB) -> VirtualDevice:
    hardware = Hardware((DeviceSpec("v0", memory_bytes),), (HostLink(1e9, 1e9),), Host(1 << 34, 1 << 34))
    return VirtualDevice(0, hardware, 1, None, paced=False)


class _Events:
    """A device whose events are names, as a GPU's are objects; it writes down who waits for what."""

    def __init__(self) -> None:
        self.waits: list[tuple[str, Any]] = []

    def slot(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def account(self, nbytes: int, what: str) -> None: ...

    def release(self, nbytes: int) -> None: ...

    def mark(self, stream: str) -> Any:
        return f"end of {stream}"

    def wait(self, stream: str, event: Any) -> None:
        self.waits.append((stream, event))


def test_bytes_count_from_make_to_free() -> None:
    device = make_device()
    memory = DeviceMemory(device)
    memory.make(parse_value("WF0"), 1000, "h2d", 4096)
    assert device.meter.allocated_bytes == 1000
    memory.make(parse_value("I0.0"), 24, "h2d")
    memory.free(parse_value("WF0"), "compute")
    assert device.meter.allocated_bytes == 24
    assert device.peak_bytes == 1024


def test_value_over_the_budget_is_named_with_both_numbers() -> None:
    memory = DeviceMemory(make_device(1000))
    memory.make(parse_value("WF0"), 900, "h2d")
    with pytest.raises(
        torch.OutOfMemoryError,
        match="WF1 needs 200 bytes beside the 900 allocated, 100 over the limit of 1000",
    ):
        memory.make(parse_value("WF1"), 200, "h2d")


def test_freed_slot_is_used_again_and_nothing_is_allocated() -> None:
    memory = DeviceMemory(make_device())
    first = memory.make(parse_value("WF0"), 1000, "h2d")
    memory.free(parse_value("WF0"), "compute")
    second = memory.make(parse_value("WF1"), 900, "h2d")
    assert second.slot is first.slot
    assert memory.pool.reserved_bytes == 1000


def test_slot_in_use_is_not_given_twice() -> None:
    memory = DeviceMemory(make_device())
    held = [memory.make(parse_value(f"I0.{j}"), 64, "h2d") for j in range(4)]
    assert len({h.slot.data_ptr() for h in held if h.slot is not None}) == 4


def test_stream_that_takes_a_slot_waits_for_the_work_that_used_it_last() -> None:
    """Case 21. The program orders in:X0.1 behind some free; the pool may give it the slot of another one."""
    device = _Events()
    memory = DeviceMemory(device)  # type: ignore[arg-type]
    memory.make(parse_value("WF0"), 1000, "h2d")
    memory.free(parse_value("WF0"), "compute")
    memory.make(parse_value("X0.1"), 1000, "h2d")
    assert device.waits == [("h2d", "end of compute")]


def test_refilled_slot_does_not_disturb_a_graph_over_another_slot() -> None:
    """Views of one arena share a version counter: a copy into one made autograd refuse all others' graphs."""
    memory = DeviceMemory(make_device())
    weights = memory.make(parse_value("WB0"), 4 * 4, "h2d")
    assert weights.flat is not None
    parameter = over_storage(weights.flat.untyped_storage(), 0, (4,), torch.float32)
    parameter.copy_(torch.arange(4.0))
    parameter.requires_grad_()
    loss = (parameter * parameter).sum()
    other = memory.make(parse_value("WB1"), 4 * 4, "h2d")
    assert other.flat is not None
    other.flat.fill_(7)
    torch.autograd.backward(loss)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_slot_refilled_for_the_next_value_serves_a_new_graph_while_the_old_one_is_alive() -> None:
    memory = DeviceMemory(make_device())
    graphs = []
    for round_ in range(3):
        value = parse_value(f"WB{round_}")
        weights = memory.make(value, 4 * 4, "h2d")
        assert weights.flat is not None
        parameter = over_storage(weights.flat.untyped_storage(), 0, (4,), torch.float32)
        # as a swap does it: bytes into the slot, past the parameter's own version counter
        weights.flat.copy_(torch.full((4,), float(round_ + 1)).view(torch.uint8))
        parameter.requires_grad_()
        loss = (parameter * parameter).sum()
        graphs.append(loss)  # kept alive while the slot is refilled
        (gradient,) = torch.autograd.grad(loss, parameter, retain_graph=True)
        assert gradient.tolist() == [2.0 * (round_ + 1)] * 4
        memory.free(value, "compute")
    assert memory.pool.reserved_bytes == 16, "all three shared one slot"


def test_pool_knows_what_lies_in_its_slots() -> None:
    memory = DeviceMemory(make_device())
    held = memory.make(parse_value("X0.0"), 64, "h2d")
    assert held.flat is not None
    assert memory.pool.owns(held.flat.view(torch.float32).reshape(4, 4))
    assert not memory.pool.owns(torch.empty(64))


def test_tensors_in_a_slot_are_aligned_and_apart() -> None:
    shapes: Shapes = {
        (-1, "mask"): ((3,), torch.bool),
        (-1, "tokens"): ((2, 3), torch.int64),
        (0, "hidden"): ((5,), torch.bfloat16),
        (0, "scale"): ((), torch.float32),
    }
    slot = torch.zeros(slot_bytes(shapes), dtype=torch.uint8)
    tensors = tensors_in(slot, shapes)
    for i, tensor in enumerate(tensors.values()):
        assert (tensor.data_ptr() - slot.data_ptr()) % 64 == 0
        tensor.fill_(i)
    assert [tensor.flatten().tolist() for tensor in tensors.values()] == [
        [False] * 3,
        [1] * 6,
        [2.0] * 5,
        [3.0],
    ]
