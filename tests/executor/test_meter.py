"""The meter counts storages: each once, from the operation that makes it until its last tensor is gone."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from executor.meter import Meter

KIB = 1024
FLOATS = 256
"""Floats in a KiB."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_result_counts_until_its_last_tensor_is_gone() -> None:
    with Meter() as meter:
        made = torch.ones(FLOATS)
        assert meter.allocated_bytes == KIB
        view = made[10:]
        assert meter.allocated_bytes == KIB
        del made
        assert meter.allocated_bytes == KIB
        del view
    assert meter.allocated_bytes == 0
    assert meter.peak_bytes == KIB


def test_each_result_of_an_operation_counts() -> None:
    source = torch.randn(4, 64)
    with Meter() as meter:
        values, indices = source.sort()
    assert meter.allocated_bytes == values.nbytes + indices.nbytes


def test_peak_sees_a_result_beside_its_inputs() -> None:
    with Meter() as meter:
        x = torch.ones(FLOATS)
        for _ in range(5):
            x = x + 1
    assert (meter.allocated_bytes, meter.peak_bytes) == (KIB, 2 * KIB)


def test_peak_starts_again_from_what_is_allocated() -> None:
    with Meter() as meter:
        kept = torch.ones(FLOATS)
        torch.ones(8 * FLOATS)
        assert meter.peak_bytes == 9 * KIB
        meter.reset_peak()
        assert meter.peak_bytes == KIB
        del kept


def test_alias_of_memory_from_outside_is_not_counted() -> None:
    outside, other = torch.zeros(FLOATS), torch.ones(FLOATS)
    with Meter() as meter:
        kept = [outside[3:], outside.view(2, -1), outside.add_(1)]
        torch.add(other, 1, out=outside)
        kept += torch.split(outside, 64)
        kept += list(torch._foreach_mul_([outside], 2) or ())
    assert meter.peak_bytes == 0


def test_empty_out_that_gets_its_size_is_counted() -> None:
    source, target = torch.ones(FLOATS), torch.empty(0)
    with Meter() as meter:
        torch.add(source, 1, out=target)
    assert meter.allocated_bytes == KIB


def test_backward_is_counted_on_the_calling_thread() -> None:
    weight = torch.ones(16, 16, requires_grad=True)
    x = torch.ones(4, 16)
    with Meter() as meter:
        y = (x @ weight).sum()
        assert meter.allocated_bytes == 4  # sum keeps no values, matmul keeps what came from outside
        torch.autograd.backward(y)
        assert weight.grad is not None
        assert meter.allocated_bytes == 4 + weight.nbytes
    # the product and its sum, in forward; in backward more than the weight's gradient
    assert meter.peak_bytes >= 4 + weight.nbytes


def test_gradients_accumulate_into_memory_from_outside() -> None:
    weight = torch.ones(64, 64, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    with Meter() as meter:
        torch.autograd.backward((torch.ones(2, 64) @ weight).sum())
    assert meter.allocated_bytes == 0


def test_operation_over_the_budget_is_named_with_all_numbers() -> None:
    meter = Meter(budget_bytes=3 * KIB, name="gpu1")
    with meter:
        held = torch.ones(2 * FLOATS)
        meter.doing = "F3.0"
        with pytest.raises(torch.OutOfMemoryError) as failure:
            held * 2
    assert str(failure.value) == (
        "gpu1: F3.0 needs 2048 bytes beside the 2048 allocated, 1024 over the limit of 3072"
    )


def test_meter_goes_on_after_a_refusal() -> None:
    meter = Meter(budget_bytes=2 * KIB)
    with meter:
        held = torch.ones(FLOATS)
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(2 * FLOATS)
        assert meter.allocated_bytes == KIB
        assert meter.peak_bytes == KIB
        more = torch.ones(FLOATS)
        assert meter.allocated_bytes == 2 * KIB
        del held, more
    assert meter.allocated_bytes == 0


def test_refusal_in_backward_reaches_the_caller() -> None:
    weight = torch.ones(64, 64, requires_grad=True)
    with Meter(budget_bytes=weight.nbytes - 1), pytest.raises(torch.OutOfMemoryError, match="over the limit"):
        torch.autograd.backward((torch.ones(1, 64) @ weight).sum())


def test_buffers_managed_elsewhere_count_against_the_budget() -> None:
    meter = Meter(budget_bytes=2 * KIB)
    meter.allocate(KIB, "slot 0")
    with meter, pytest.raises(torch.OutOfMemoryError, match="beside the 1024 allocated"):
        torch.ones(2 * FLOATS)
    with pytest.raises(torch.OutOfMemoryError, match="slot 1 needs 1025 bytes"):
        meter.allocate(KIB + 1, "slot 1")
    meter.free(KIB)
    assert (meter.allocated_bytes, meter.peak_bytes) == (0, KIB)


def test_tracked_tensor_counts_until_it_is_gone() -> None:
    meter = Meter()
    adopted = torch.ones(FLOATS)
    meter.track(adopted)
    meter.track(adopted[1:])
    assert meter.allocated_bytes == KIB
    del adopted
    assert meter.allocated_bytes == 0


def test_excluded_tensor_never_counts() -> None:
    meter = Meter()
    slot = torch.ones(FLOATS)
    meter.exclude(slot)
    meter.track(slot)
    with meter:
        slot.view(-1).mul_(2)
    assert meter.peak_bytes == 0


def test_every_change_is_told() -> None:
    told: list[int] = []
    with Meter(on_change=told.append):
        made = torch.ones(FLOATS)
        del made
    assert told == [KIB, 0]


def test_threads_share_one_count() -> None:
    meter, problems = Meter(), []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        try:
            with meter:
                for _ in range(200):
                    kept: list[Tensor] = [torch.ones(FLOATS) for _ in range(3)]
                    del kept
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert meter.allocated_bytes == 0
    assert 3 * KIB <= meter.peak_bytes <= 4 * 3 * KIB


def test_known_network_has_the_bytes_worked_out_by_hand() -> None:
    """x[4, 8] -> 8x16 -> tanh -> 16x1: forward keeps what backward wants, and nothing else."""
    first = torch.randn(8, 16, requires_grad=True)
    last = torch.randn(16, 1, requires_grad=True)
    x = torch.randn(4, 8)
    with Meter() as meter:
        hidden = torch.tanh(x @ first)
        out = hidden @ last
    tanh, result = 4 * 16 * 4, 4 * 1 * 4
    assert meter.allocated_bytes == tanh + result
    assert meter.peak_bytes == 2 * tanh  # the product beside its tanh
    assert hidden.nbytes + out.nbytes == meter.allocated_bytes
