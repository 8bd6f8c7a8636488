"""A virtual device takes the time and refuses the bytes that a real one would."""

from __future__ import annotations

import threading
import time
from typing import Literal

import pytest
import torch

from executor.streams import VirtualDevice, make_device
from planner.contract.errors import HarmonyError
from planner.contract.hardware import DeviceSpec, Hardware, Host, HostLink

MB = 1_000_000
RATE = 50e6
# how much later than due a thread may wake on a loaded machine
LATE_SECONDS = 0.08


class _Store:
    """The words of a host store that a link looks at."""

    def __init__(self, num_devices: int) -> None:
        self.busy = [0] * (2 * num_devices)


def make_virtual(
    *,
    devices: int = 1,
    sharing: Literal["fair", "static", "none"] = "none",
    latency_seconds: float = 0.0,
    paced: bool = True,
    peer: float | None = None,
    memory_bytes: int = 100 * MB,
) -> tuple[VirtualDevice, _Store]:
    hardware = Hardware(
        tuple(DeviceSpec(f"v{i}", memory_bytes) for i in range(devices)),
        (HostLink(RATE, RATE / 2, latency_seconds, sharing),),
        Host(1 << 34, 1 << 34),
        peer_bytes_per_second=peer,
    )
    store = _Store(devices)
    return VirtualDevice(0, hardware, devices, store, paced=paced), store  # type: ignore[arg-type]


def seconds_of_copy(device: VirtualDevice, stream: str, sizes: tuple[int, ...] = (5 * MB,)) -> float:
    pairs = [
        (torch.zeros(size, dtype=torch.uint8), torch.full((size,), 3, dtype=torch.uint8)) for size in sizes
    ]
    started = time.perf_counter()
    device.copy(pairs, stream, started)
    seconds = time.perf_counter() - started
    assert all(bool((target == 3).all()) for target, _ in pairs), "the bytes must really be there"
    return seconds


def check_seconds(measured: float, expected: float) -> None:
    assert expected * 0.999 <= measured <= expected + LATE_SECONDS


def test_copy_takes_bytes_over_rate_in_each_direction() -> None:
    device, _ = make_virtual()
    check_seconds(seconds_of_copy(device, "h2d"), 0.1)
    check_seconds(seconds_of_copy(device, "d2h"), 0.2)


def test_copy_of_several_tensors_has_one_latency() -> None:
    device, _ = make_virtual(latency_seconds=0.05)
    check_seconds(seconds_of_copy(device, "h2d", (MB, MB, MB)), 0.05 + 0.06)


def test_static_link_is_divided_by_its_devices_even_when_they_are_idle() -> None:
    device, _ = make_virtual(devices=2, sharing="static")
    check_seconds(seconds_of_copy(device, "h2d"), 0.2)


def test_fair_link_is_divided_by_the_devices_busy_in_the_same_direction() -> None:
    device, store = make_virtual(devices=2, sharing="fair")
    check_seconds(seconds_of_copy(device, "h2d"), 0.1)
    store.busy[2 + 1] = 1  # device 1, device to host
    check_seconds(seconds_of_copy(device, "h2d"), 0.1)
    store.busy[2 + 0] = 1
    check_seconds(seconds_of_copy(device, "h2d"), 0.2)
    assert store.busy[:2] == [0, 0], "idle again after the copy"


def test_copies_in_both_directions_overlap() -> None:
    device, _ = make_virtual()
    other = threading.Thread(target=seconds_of_copy, args=(device, "d2h"))
    started = time.perf_counter()
    other.start()
    seconds_of_copy(device, "h2d")
    other.join()
    check_seconds(time.perf_counter() - started, 0.2)


def test_unpaced_copy_is_as_fast_as_memory() -> None:
    device, _ = make_virtual(paced=False)
    assert seconds_of_copy(device, "h2d") < 0.1


def test_compute_waits_for_its_planned_seconds_and_an_overrun_is_told() -> None:
    device, _ = make_virtual()
    started = time.perf_counter()
    assert device.pace(started, 0.05) is False
    check_seconds(time.perf_counter() - started, 0.05)
    assert device.pace(time.perf_counter() - 1.0, 0.5) is True


def test_failed_run_does_not_wait_for_a_long_transfer() -> None:
    device, _ = make_virtual()
    timer = threading.Timer(0.05, device.stop)
    timer.start()
    assert seconds_of_copy(device, "h2d", (50 * MB,)) < 0.5  # planned: one second
    timer.join()


def test_transfer_to_a_peer_takes_the_peer_rate_or_both_host_links() -> None:
    def seconds(peer: float | None, sharing: Literal["static", "none"]) -> float:
        device, _ = make_virtual(devices=2, peer=peer, sharing=sharing, latency_seconds=0.01)
        started = time.perf_counter()
        ranges = list(device.hop(2 * MB, 1))
        assert ranges[0][0] == 0
        assert ranges[-1][1] == 2 * MB
        return time.perf_counter() - started

    check_seconds(seconds(40e6, "none"), 0.05)
    check_seconds(seconds(None, "none"), 0.02 + 2 / 25 + 2 / 50)
    check_seconds(seconds(None, "static"), 0.02 + 2 * (2 / 25 + 2 / 50))


def test_sender_and_receiver_cut_a_transfer_alike() -> None:
    """The receiver once took pieces of a fixed size whatever the sender sent."""
    device, _ = make_virtual(devices=2, peer=1e9)
    for nbytes in (0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20):
        assert list(device.hop(nbytes, 1)) == list(device.pieces(nbytes))


def test_compute_beyond_the_budget_is_refused_and_copies_are_not_counted() -> None:
    device, _ = make_virtual(memory_bytes=MB, paced=False)
    seconds_of_copy(device, "h2d")
    with (
        pytest.raises(torch.OutOfMemoryError, match=r"gpu0: .* over the limit of 1000000"),
        device.on("compute"),
    ):
        torch.zeros(MB + 1, dtype=torch.uint8)


def test_slot_is_not_counted_by_what_compute_does_in_it() -> None:
    device, _ = make_virtual(memory_bytes=MB, paced=False)
    slot = device.slot(10 * MB)
    with device.on("compute"):
        slot.zero_()
        slot.view(torch.float32)[:10].fill_(1.0)
    assert device.meter.allocated_bytes == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused_in_one_line() -> None:
    hardware = Hardware((DeviceSpec("v0", MB),), (HostLink(1e9, 1e9),), Host(1 << 34, 1 << 34))
    with pytest.raises(HarmonyError, match="--device cuda: gpu0 is asked for, torch sees 0 GPUs") as caught:
        make_device("cuda", 0, hardware, 1, None, paced=True)
    assert "\n" not in str(caught.value)
