"""A machine measured whole: `python -m tests.bench_gpu`: planned beside measured, the roof, plain PyTorch and FSDP2, by memory.

In: a model, a minibatch and memory caps; the GPU's own memory is the last one. Out, in a folder: the hardware, the profile, and for
each cap the schedule, its simulated and its measured trace, and `table.md` with a row each:

    planned, measured     seconds of an iteration, medians without the first
    peak, swapped         of the device, planned and measured; bytes in and out
    TFLOP/s               of the model: forward and backward once, no recompute counted
    of the roof           the larger of compute without recompute and of each link's planned bytes over its rate, over measured
    plain                 plain PyTorch, the same microbatches, where it fits the cap
    FSDP2                 fully_shard of the blocks with CPU offload and activation checkpointing, the best of its microbatch sizes
    dp-swap               virtualised memory, simulated (planner/baselines.py)

Without a GPU `--device virtual` runs all of it on a small model, which shows that the command works and nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from executor.count import count
from executor.models import DTYPES, load_workload
from planner.baselines import dp_swap
from planner.contract import store
from planner.contract.errors import HarmonyError
from planner.contract.hardware import Hardware, budget_bytes
from planner.contract.profile import Profile
from planner.contract.schedule import Schedule
from planner.contract.trace import Trace
from planner.contract.units import format_bytes, parse_bytes
from planner.search import plan
from planner.search.problem import Problem
from planner.simulate import simulate

MODEL = "hf:gpt2?n_layer=48&n_embd=1600&n_head=25&n_positions=1024&vocab_size=50257&seq=1024&tie_word_embeddings=false"
SMALL = "hf:gpt2?n_layer=4&n_embd=128&n_head=2&vocab_size=256&seq=64&tie_word_embeddings=false"
CAPS = "11GiB,16GiB,24GiB,40GiB"
SMALL_CAPS = "10MiB"
VIRTUAL = (
    "--devices",
    "1",
    "--memory",
    "64MiB",
    "--h2d",
    "500MB/s",
    "--d2h",
    "500MB/s",
    "--compute-scale",
    "0.5",
)
HASH_STORE: type = vars(dist)["HashStore"]
COLUMNS = (
    *("memory", "planned, s", "measured, s", "difference", "peak planned", "peak measured"),
    *("swapped planned", "swapped measured", "TFLOP/s", "of the roof", "plain, s", "FSDP2, s", "dp-swap, s"),
)


@dataclass(frozen=True)
class Task:
    """What is measured, and where files go."""

    device: str
    model: str
    dtype: str
    minibatch: int
    steps: int
    folder: Path

    def execute(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of the executor in a process of its own, so that each begins with an empty device."""
        command = [sys.executable, "-m", "executor", *arguments, "--device", self.device]
        return subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
        )

    def insist(self, *arguments: str) -> None:
        """Raise HarmonyError where the command fails."""
        done = self.execute(*arguments)
        if done.returncode:
            raise HarmonyError(f"{' '.join(arguments[:2])}: {done.stderr.strip()}")


def main() -> int:
    """Measure, print and write the table; 1 where a plan is off by more than 5 %."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "virtual"), default="cuda")
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--minibatch", type=int, default=32)
    parser.add_argument("--microbatches", default="1,2,4,8,16")
    parser.add_argument("--caps")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path("build/gpu"))
    parser.add_argument("--fsdp", type=int, metavar="BYTES", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    is_small = chosen.device == "virtual"
    model = chosen.model or (SMALL if is_small else MODEL)
    task = Task(chosen.device, model, chosen.dtype, chosen.minibatch, chosen.steps, chosen.folder)
    if chosen.fsdp is not None:
        sys.stdout.write(json.dumps(fsdp_seconds(task, chosen.fsdp)))
        return 0
    if not is_small and not torch.cuda.is_available():
        sys.stderr.write("bench_gpu: torch sees no GPU here; --device virtual shows the command at work\n")
        return 2
    task.folder.mkdir(parents=True, exist_ok=True)
    files = {name: task.folder / f"{name}.json" for name in ("hardware", "profile")}
    task.insist("hardware", "-o", str(files["hardware"]), *(VIRTUAL if is_small else ("--devices", "1")))
    measure = ("--model", model, "--dtype", task.dtype, "--microbatches", chosen.microbatches)
    task.insist("profile", *measure, "-o", str(files["profile"]))
    hardware, profile = store.load_hardware(files["hardware"]), store.load_profile(files["profile"])
    caps = [parse_bytes(text) for text in (chosen.caps or (SMALL_CAPS if is_small else CAPS)).split(",")]
    whole = hardware.devices[0].memory_bytes
    rows, is_off = [], False
    for cap in [*(cap for cap in caps if cap < whole), whole]:
        device = msgspec.structs.replace(hardware.devices[0], memory_bytes=cap)
        row, error = measure_cap(task, profile, msgspec.structs.replace(hardware, devices=(device,)), cap)
        rows.append(row)
        is_off = is_off or abs(error) > 0.05
        print_row(rows[-1])
    title = (
        f"{model}, {task.dtype}, minibatch {task.minibatch}, on {hardware.name}, torch {torch.__version__}"
    )
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    (task.folder / "table.md").write_text(f"{title}\n\n{table}\n")
    return int(is_off)


def print_row(row: Sequence[str]) -> None:
    sys.stdout.write("; ".join(f"{name} {value}" for name, value in zip(COLUMNS, row, strict=True)) + "\n")
    sys.stdout.flush()


def measure_cap(task: Task, profile: Profile, hardware: Hardware, cap: int) -> tuple[tuple[str, ...], float]:
    """The row of a memory cap, and by how much the plan is off."""
    name = format_bytes(cap)
    rest = (
        _plain(task, cap),
        _fsdp(task, budget_bytes(hardware.devices[0])),
        _swapping(task, profile, hardware),
    )
    schedule = plan(profile, hardware, minibatch=task.minibatch).schedule
    if schedule is None:
        return (name, "does not fit", *("",) * (len(COLUMNS) - 2 - len(rest)), *rest), 0.0
    place = task.folder / name.replace(" ", "")
    place.mkdir(exist_ok=True)
    store.save(schedule, place / "schedule.json")
    store.save(simulate(schedule, profile, hardware), place / "planned.json")
    task.insist(
        *("run", str(place / "schedule.json"), "--steps", str(task.steps), "-o", str(place / "measured.json"))
    )
    measured = store.load_trace(place / "measured.json")
    seconds, planned = median(measured.iteration_seconds), schedule.predicted
    error = seconds / planned.iteration_seconds - 1
    device, found = planned.devices[0], measured.devices[0]
    return (
        name,
        f"{planned.iteration_seconds:.4g}",
        f"{seconds:.4g}",
        f"{error:+.1%}",
        format_bytes(device.peak_bytes),
        format_bytes(max(found.peak_bytes, found.reserved_bytes)),
        format_bytes(device.swap_in_bytes + device.swap_out_bytes),
        format_bytes(found.swap_in_bytes + found.swap_out_bytes),
        f"{flops(task) / seconds / 1e12:.4g}",
        f"{roof_seconds(profile, schedule, hardware) / seconds:.0%}",
        *rest,
    ), error


def flops(task: Task) -> float:
    """Of an iteration: forward and backward of every layer once."""
    counts = count(task.model, optimizer="adamw", settings={"lr": 1e-3}, dtype=task.dtype)
    return sum(
        operation.times * operation.flops.at(task.minibatch)
        for kind in counts.kind_of
        for part in (counts.kinds[kind].forward, counts.kinds[kind].backward)
        for operation in part.operations
    )


def roof_seconds(profile: Profile, schedule: Schedule, hardware: Hardware) -> float:
    """What no replay of the plan on one device can be faster than: compute without recompute, or a link's bytes."""
    first, end = schedule.configuration.microbatches.backward[0]
    per_sample = sum(
        next(c.seconds for c in costs if c.microbatch_size >= end - first) / (end - first)
        for layer in profile.layers
        for costs in (layer.forward, layer.backward)
    )
    link, device = hardware.host_links[0], schedule.predicted.devices[0]
    return max(
        per_sample * schedule.configuration.minibatch / hardware.devices[0].compute_scale,
        device.swap_in_bytes / link.h2d_bytes_per_second,
        device.swap_out_bytes / link.d2h_bytes_per_second,
    )


def _plain(task: Task, cap: int) -> str:
    """Seconds of plain PyTorch with the largest microbatch that fits; empty where none does."""
    size, path = task.minibatch, task.folder / "plain.json"
    while size:
        asked = ["--model", task.model, "--dtype", task.dtype, "--minibatch", str(task.minibatch)]
        asked += (
            "--microbatch",
            str(size),
            "--budget",
            str(cap),
            "--steps",
            str(task.steps),
            "-o",
            str(path),
        )
        if task.execute("run", "--plain", *asked).returncode == 0:
            trace: Trace = store.load_trace(path)
            return f"{median(trace.iteration_seconds):.4g}"
        size //= 2
    return ""


def _swapping(task: Task, profile: Profile, hardware: Hardware) -> str:
    found = dp_swap(Problem(profile, hardware, task.minibatch, 1))
    return "" if found is None else f"{found.seconds:.4g}"


# ---- FSDP2, in a process of its own


def _fsdp(task: Task, budget: int) -> str:
    command = [sys.executable, "-m", "tests.bench_gpu", "--fsdp", str(budget), "--device", task.device]
    command += ["--model", task.model, "--dtype", task.dtype, "--minibatch", str(task.minibatch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(f"bench_gpu: FSDP2: {done.stderr.strip()}\n")
        return ""
    seconds: float | None = json.loads(done.stdout)
    return "" if seconds is None else f"{seconds:.4g}"


def fsdp_seconds(task: Task, budget: int) -> float | None:
    """Seconds of an iteration under fully_shard, the best of the microbatch sizes that fit; None where none does."""
    is_cuda = task.device == "cuda"
    backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
    dist.init_process_group(backend, store=HASH_STORE(), rank=0, world_size=1)
    if is_cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total))
    workload = load_workload(task.model, seed=0)
    model, place = workload.model, torch.device(task.device if is_cuda else "cpu")
    blocks = {id(block) for block in find_blocks(model)}
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in blocks)
    mesh = init_device_mesh(place.type, (1,))
    kind = DTYPES.get(task.dtype)
    precision = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32 if kind else None)
    offload = CPUOffloadPolicy() if is_cuda else OffloadPolicy()
    for block in find_blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = workload.draw(torch.Generator().manual_seed(0), task.minibatch)
    best, size = None, task.minibatch
    while size:
        try:
            times = []
            for _ in range(3):
                started = time.perf_counter()
                for first in range(0, task.minibatch, size):
                    part = {n: t[first : first + size].to(place) for n, t in batch.items()}
                    share = min(size, task.minibatch - first) / task.minibatch
                    torch.autograd.backward([workload.loss(model, part) * share])
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                if is_cuda:
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - started)
            best = min(median(times[1:]), best or float("inf"))
        except torch.OutOfMemoryError:
            optimizer.zero_grad(set_to_none=True)
        size //= 2
    dist.destroy_process_group()
    return best


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts: members of the longest list of modules."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


if __name__ == "__main__":
    sys.exit(main())
