"""Is training by schedule plain training? `python -m tests.bench_exact`: a table of models, placements and types.

Each model is trained for 20 steps by plain PyTorch in the schedule's microbatches, and by a schedule of packs of one
layer each on one device, a pipeline of two, two replicas, two replicas of a pipeline of two, and a reflected pipeline.
A cell is `equal` (losses and parameters, bit for bit), `losses equal` or the largest relative difference of a loss, with `!` behind
what is beyond its gate: 1e-5 in float32 and 1e-3 in bfloat16 for losses, and in float32 0.01 x lr x steps for
parameters; on one device nothing but equal, where no reason below is given.

The last column sets errors beside each other: the model is trained a third time by plain PyTorch in float64, from the same
weights and with the same masks, and the parameters that the worst of the schedules leaves are so many times as far from those (root
mean square) as the ones that plain training leaves. Its gate is 1.5.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from executor.launch import run_schedule
from executor.options import RunOptions
from executor.reference import PlainResult, train
from executor.workload import Batch, Workload
from planner.contract.errors import HarmonyError
from planner.contract.fixed import Fixed
from planner.contract.profile import Profile
from planner.contract.schedule import Schedule
from planner.search import plan_fixed
from tests.executor.test_any_model import LR, MINIBATCH, SPECS, make_hardware, profiled

STEPS = 20
PLACES = {
    "1 device": (1, 1, False),
    "pp 2": (2, 1, False),
    "dp 2": (2, 2, False),
    "hybrid 2x2": (4, 2, False),
    "reflected": (2, 1, True),
}
"""Devices, replicas, and whether a pack's backward runs where its forward ran."""
LOSS_GATES = {"float32": 1e-5, "bfloat16": 1e-3}
ERROR_GATE = 1.5
REASONS = {
    "tied": "tied weights: gradients are added per use first, in plain training as they come",
    "lstm": "an exported LSTM is its products and gates, outside it is one operation that rounds otherwise",
}


@dataclass(frozen=True)
class Difference:
    """Of a run from plain training: the largest of its losses, relative, and of its parameters."""

    loss: float
    parameter: float
    error_ratio: float | None
    """None where torch cannot train it in float64. How much further from training in float64 its parameters are than plain training's."""

    @property
    def is_equal(self) -> bool:
        return self.loss == 0.0 and self.parameter == 0.0

    @property
    def text(self) -> str:
        if self.is_equal:
            return "equal"
        return f"{self.loss:.0e}" if self.loss else "losses equal"

    def holds(self, place: str, dtype: str, reason: str) -> bool:
        """Whether it is within the gates."""
        if place == "1 device" and not reason:
            return self.is_equal
        within = self.loss <= LOSS_GATES[dtype]
        return within and (dtype != "float32" or self.parameter <= 0.01 * LR * STEPS)


def make_options(spec: str, dtype: str) -> RunOptions:
    settings = {"lr": LR, "weight_decay": 0.1}
    return RunOptions(
        spec, steps=STEPS, settings=settings, paced=False, dtype="" if dtype == "float32" else dtype
    )


def make_schedule(profile: Profile, place: str) -> Schedule:
    devices, replicas, reflected = PLACES[place]
    packs = (1,) * len(profile.layers)
    fixed = Fixed(2, 2, packs[1:], packs, replicas, reflected)
    schedule = plan_fixed(profile, make_hardware(devices), fixed, minibatch=MINIBATCH).schedule
    assert schedule is not None
    return schedule


def in_float64(workload: Workload) -> Workload:
    """The same model, weights and batches in float64."""
    model = workload.model.double()

    def draw(generator: torch.Generator, num_samples: int) -> Batch:
        batch = workload.draw(generator, num_samples)
        return {name: t.double() if t.is_floating_point() else t for name, t in batch.items()}

    return replace(workload, model=model, draw=draw)


def error(weights: dict[str, Tensor], exact: PlainResult) -> float:
    """Root mean square over all parameters."""
    squares, count = 0.0, 0
    for name, tensor in exact.parameters.items():
        if name in weights:
            squares += float((weights[name].double() - tensor).square().sum())
            count += tensor.numel()
    return math.sqrt(squares / count)


def difference(
    losses: tuple[float, ...], weights: dict[str, Tensor], plain: PlainResult, exact: PlainResult | None
) -> Difference:
    loss = max(abs(a - b) / abs(b) for a, b in zip(losses, plain.losses, strict=True))
    parameter = max(
        float((weights[name].double() - tensor.double()).abs().max())
        for name, tensor in plain.parameters.items()
        if name in weights
    )
    if exact is None:
        return Difference(loss, parameter, None)
    ours, theirs = (
        error(weights, exact),
        error({n: plain.parameters[n] for n in weights if n in plain.parameters}, exact),
    )
    return Difference(loss, parameter, ours / theirs if theirs else 1.0)


def reason_of(name: str, profile: Profile) -> str:
    if name == "lstm":
        return "lstm"
    return "tied" if profile.ties else ""


def main() -> int:
    """Print the table; returns the exit status: 1 where something is beyond its gate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", choices=list(SPECS), help="only these")
    parser.add_argument("--dtype", action="append", choices=list(LOSS_GATES), help="only these")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows, num_beyond, reasons = [], 0, set()
    for name in chosen.model or SPECS:
        for dtype in chosen.dtype or LOSS_GATES:
            options = make_options(SPECS[name], dtype)
            profile = profiled(options)
            reason = reason_of(name, profile)
            samples = make_schedule(profile, "1 device").configuration.microbatches.backward
            as_cut = replace(options, patterns=profile.model.patterns, cut_by=profile.model.cut_by)
            plain = train(options.load(), as_cut, samples)
            # masters and rounding are what float64 goes without
            try:
                exact = train(in_float64(options.load()), replace(as_cut, dtype=""), samples)
            except RuntimeError as error:
                # torch's grouped matrix products know no float64
                if "got Double" not in str(error):
                    raise
                exact = None
            cells, ratios = [], []
            for place in PLACES:
                try:
                    with tempfile.TemporaryDirectory() as folder:
                        out = Path(folder, "w.safetensors")
                        trace = run_schedule(make_schedule(profile, place), options, weights_out=out)
                        found = difference(trace.losses, load_file(out), plain, exact)
                except HarmonyError as refusal:
                    cells.append(f"refused: {refusal}")
                    num_beyond += 1
                    continue
                holds = found.holds(place, dtype, reason)
                num_beyond += not holds
                cell = found.text
                if not found.is_equal and reason:
                    reasons.add(reason)
                cells.append(cell if holds else f"{cell}!")
                if found.error_ratio is not None:
                    ratios.append(found.error_ratio)
            worst = max(ratios, default=None)
            num_beyond += worst is not None and worst > ERROR_GATE
            cells.append("-" if worst is None else f"{worst:.3g}{'!' if worst > ERROR_GATE else ''}")
            rows.append((name, dtype, *cells))
            sys.stderr.write(f"{' | '.join(rows[-1])}\n")
    header = ("model", "type", *PLACES, "error in float64 terms")
    lines = ["| " + " | ".join(row) + " |" for row in (header, ("---",) * len(header), *rows)]
    lines += ["", *(f"Not equal on one device: {REASONS[reason]}." for reason in sorted(reasons))]
    lines.append(f"{num_beyond} beyond their gates.")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if num_beyond else 0


if __name__ == "__main__":
    sys.exit(main())
