"""What limits a run on this machine: memory, pinning, shared memory, threads, GPUs; each problem with its remedy.

`findings` is what `harmony-executor doctor` says; `check_machine` refuses a schedule that cannot run here, before
anything is loaded.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from executor.host import available_bytes
from executor.optimizer import recipe
from executor.options import DeviceKind
from planner.contract.errors import InfeasibleError
from planner.contract.hardware import budget_bytes
from planner.contract.schedule import Schedule
from planner.contract.units import format_bytes

SHARED_MEMORY_BYTES = 1 << 30
"""What /dev/shm should hold: data loaders and NCCL put their buffers there."""
FREE_SHARE = 0.5
"""Below this part of its memory that is free, a host is busy with something else."""
BEYOND_LIMIT = 1 << 20
"""What is pinned beyond the limit on locked memory to see whether the driver honours it."""
RAISE_LIMIT = "ulimit -l unlimited, or memlock in /etc/security/limits.conf; docker run --ulimit memlock=-1"
PARAMETERS = 1 << 24
"""Of the optimizer step that is timed."""


@dataclass(frozen=True)
class Finding:
    """Something about the machine. problem: empty where it stands in no way; remedy: what to do about it."""

    name: str
    found: str
    problem: str = ""
    remedy: str = ""


def findings(device: DeviceKind) -> Iterator[Finding]:
    """Everything that is worth knowing, in the order that it is to be mended."""
    yield Finding("torch", str(torch.__version__))
    yield from _gpus() if device == "cuda" else ()
    yield from _host_memory()
    yield _pinning(device)
    yield _shared_memory()
    yield from _processors()


def check_machine(schedule: Schedule, device: DeviceKind) -> None:
    """Raise InfeasibleError, with both numbers, where a schedule needs more than this machine has."""
    devices = schedule.hardware.devices[: schedule.configuration.num_devices]
    needed, what = schedule.predicted.host_bytes, "weights, gradients, states and stashes"
    if device == "cuda":
        present = torch.cuda.device_count()
        if len(devices) > present:
            raise InfeasibleError(
                f"the schedule uses {len(devices)} GPUs, torch sees {present} here; plan for this server"
            )
        for i, planned in enumerate(devices):
            total = torch.cuda.get_device_properties(i).total_memory
            if budget_bytes(planned) > total:
                raise InfeasibleError(
                    f"gpu{i} ({torch.cuda.get_device_name(i)}) has {total} bytes, the schedule was planned for "
                    f"{budget_bytes(planned)} on {planned.name}; plan for this server"
                )
        if schedule.profile.dtype == "bfloat16" and not torch.cuda.is_bf16_supported():
            raise InfeasibleError(
                f"{torch.cuda.get_device_name(0)} does not compute in bfloat16; profile and plan with --dtype float16"
            )
        check_pinning(needed)
    else:
        needed += sum(device.peak_bytes for device in schedule.predicted.devices)
        what += ", and the virtual devices"
    available = available_bytes()
    if needed > available:
        raise InfeasibleError(
            f"host: {needed} bytes for {what}, {available} are free; end other programs, or plan with less"
        )


def check_pinning(needed: int) -> None:
    """Raise InfeasibleError where so many bytes are more than may be locked. Not every driver honours that limit: a little more than it
    is pinned to find out."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or needed <= limit or can_pin(min(needed, limit + BEYOND_LIMIT)):
        return
    raise InfeasibleError(
        f"host: {needed} bytes are to be pinned, this process may lock {limit}; {RAISE_LIMIT}, or plan with less host memory"
    )


def can_pin(nbytes: int) -> bool:
    """Whether a process can pin so much now: a short one tries, as pinning makes a CUDA context that stays."""
    code = f"import torch; from executor.streams import register; register(torch.empty({nbytes}, dtype=torch.uint8))"
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, check=False
    )
    return done.returncode == 0


# ---- findings


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        yield Finding(
            "GPUs",
            "none",
            "torch sees no GPU",
            "install a build of torch with CUDA"
            if built is None
            else f"torch is built for CUDA {built}: check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES",
        )
        return
    yield Finding("CUDA", f"{torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")  # type: ignore[no-untyped-call]
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        busy = free < 0.9 * total
        yield Finding(
            f"gpu{i}",
            f"{properties.name}, {format_bytes(free)} of {format_bytes(total)} free",
            "another program uses it" if busy else "",
            "end that program, or leave this GPU out by CUDA_VISIBLE_DEVICES" if busy else "",
        )


def _host_memory() -> Iterator[Finding]:
    memory, free = psutil.virtual_memory(), available_bytes()
    busy = free < FREE_SHARE * memory.total
    limited = busy and memory.available > free
    yield Finding(
        "host memory",
        f"{format_bytes(free)} of {format_bytes(memory.total)} can be used",
        ("this container may use no more" if limited else "other programs use the rest") if busy else "",
        ("raise the container's memory limit" if limited else "end them") if busy else "",
    )


def _pinning(device: DeviceKind) -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding("pinned memory", "no limit")
    short = device == "cuda" and limit < psutil.virtual_memory().total // 2
    return Finding(
        "pinned memory",
        f"at most {format_bytes(limit)} (memlock)",
        "pinning fails where the driver honours that" if short else "",
        RAISE_LIMIT if short else "",
    )


def _shared_memory() -> Finding:
    try:
        total = shutil.disk_usage("/dev/shm").total
    except OSError:
        return Finding("/dev/shm", "none", "there is no shared memory", "mount -t tmpfs tmpfs /dev/shm")
    short = total < SHARED_MEMORY_BYTES
    return Finding(
        "/dev/shm",
        format_bytes(total),
        "data loaders with workers and NCCL need more" if short else "",
        f"mount -o remount,size={SHARED_MEMORY_BYTES >> 30}G /dev/shm; docker run --shm-size=1g"
        if short
        else "",
    )


def _processors() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0))
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    yield Finding("processors", f"{usable} usable of {os.cpu_count()}, {max(nodes, 1)} NUMA node(s)")
    before = torch.get_num_threads()
    rates = []
    try:
        for threads in dict.fromkeys((1, max(1, usable // 2), usable)):
            torch.set_num_threads(threads)
            rates.append(f"{_step_rate() / 1e6:.0f} M/s with {threads}")
    finally:
        torch.set_num_threads(before)
    yield Finding("AdamW on the host", f"parameters stepped: {', '.join(rates)} thread(s)")


def _step_rate() -> float:
    """Parameters a second, the faster of two steps after the first."""
    parameter = torch.zeros(PARAMETERS)
    optimizer = recipe("adamw", {"lr": 1e-3}).make({"": parameter})
    parameter.grad = torch.full_like(parameter, 1e-3)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    return PARAMETERS / min(seconds[1:])
