"""What does replaying cost? `python -m tests.bench_overhead`: steps of a session beside steps of a plain loop.

One device on which everything stays (one pack with all layers; only the batch comes in), not paced and not
metered, against plain PyTorch with the same microbatches and one thread. Steps alternate, so that both see the same
machine; the figure is the ratio of the medians, and the exit status 1 where it is above 1.03.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median

import torch

from executor.models import load_workload
from executor.profile import measure_profile
from executor.session import Session
from planner.contract.fixed import Fixed
from planner.contract.hardware import DeviceSpec, Hardware, Host, HostLink
from planner.search import plan_fixed

MODEL = "hf:gpt2?n_layer=6&n_embd=384&n_head=6&vocab_size=256&seq=128&tie_word_embeddings=false"
LIMIT = 1.03
LR = 1e-3
WARM_UP = 2


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--minibatch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    workload = load_workload(chosen.model, seed=0)
    profile = measure_profile(
        workload, chosen.model, [1, 2, 4], optimizer="adamw", settings={"lr": LR}, repeats=3
    )
    hardware = Hardware(
        (DeviceSpec("large", 8 << 30),), (HostLink(1e11, 1e11),), Host(1 << 40, 1 << 40, 1), "large"
    )
    size = chosen.minibatch // 4
    everything = Fixed(size, size, (), (len(profile.layers),), resident=(True,))
    schedule = plan_fixed(profile, hardware, everything, minibatch=chosen.minibatch).schedule
    assert schedule is not None
    configuration = schedule.configuration
    samples = configuration.microbatches.backward

    ours = load_workload(chosen.model, seed=0)
    optimizer = torch.optim.AdamW(ours.model.parameters(), lr=LR, fused=True)
    plain = load_workload(chosen.model, seed=0)
    plain_optimizer = torch.optim.AdamW(plain.model.parameters(), lr=LR, fused=True)
    generator = torch.Generator().manual_seed(0)
    batches = [ours.draw(generator, chosen.minibatch) for _ in range(4)]

    def plain_step(batch: dict[str, torch.Tensor]) -> float:
        total = 0.0
        for first, end in samples:
            loss = plain.loss(plain.model, plain.samples(batch, first, end)) * (
                (end - first) / chosen.minibatch
            )
            loss.backward()
            total += loss.item()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        return total

    times: dict[str, list[float]] = {"replayed": [], "plain": []}
    with Session(schedule, ours.model, optimizer, ours.loss, batches[0], metered=False) as session:
        for k in range(chosen.steps + WARM_UP):
            batch = batches[k % len(batches)]
            started = time.perf_counter()
            session.step(batch)
            between = time.perf_counter()
            plain_step(batch)
            times["replayed"].append(between - started)
            times["plain"].append(time.perf_counter() - between)
    found = {name: median(seconds[WARM_UP:]) for name, seconds in times.items()}
    ratio = found["replayed"] / found["plain"]
    sys.stdout.write(
        f"{len(samples)} microbatches of {samples[0][1]} samples, {len(configuration.backward_packs)} packs: "
        f"replayed {found['replayed']:.4f} s, plain {found['plain']:.4f} s a step, medians of {chosen.steps}: "
        f"{ratio - 1:+.1%}\n"
    )
    return 1 if ratio > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
