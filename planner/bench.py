"""How good plans are on measured profiles, beside the published planner's: `python -m planner.bench REFERENCE`.

In: a folder with profiles/, hardware/ and, where there are results to compare with, upstream.json. Out: one row a case
on stdout and geometric means at the end. For each case: our predicted seconds; the other planner's configuration, of
its two modes the faster, lowered and simulated by our simulator on the same server; its own best prediction, without
and with prefetch; our bound and gap; both searches' seconds; and the two baselines of virtualised memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from planner.baselines import Baseline, dp_swap, pp_swap
from planner.contract import store
from planner.contract.errors import InfeasibleError, VerifyError
from planner.contract.fixed import Fixed
from planner.contract.hardware import Hardware
from planner.contract.profile import Profile
from planner.contract.units import parse_bytes
from planner.contract.verify import verify
from planner.search import plan, plan_fixed
from planner.search.problem import Problem

SMALLER = ("bert_96_seqlen512", "gpt2_xl")
"""Models whose reference was planned with 9e9 bytes a device instead of 10 GiB."""


@dataclass
class Row:
    """One case. Times in seconds; None where there is none."""

    model: str
    minibatch: int
    devices: int
    ours: float
    bound: float
    search: float
    kind: str
    microbatches_per_device: float
    swapped: int
    theirs_simulated: float | None = None
    theirs_predicted: float | None = None
    theirs_prefetched: float | None = None
    their_search: float | None = None
    baselines: list[Baseline] = field(default_factory=list)

    @property
    def gap(self) -> float:
        return 1 - self.bound / self.ours

    @property
    def theirs_best(self) -> float | None:
        return min(
            (s for s in (self.theirs_predicted, self.theirs_prefetched) if s is not None), default=None
        )


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 where one of our plans is slower than the other planner's configuration."""
    parser = argparse.ArgumentParser(prog="python -m planner.bench", description=__doc__)
    parser.add_argument("reference", type=Path, help="folder with profiles/, hardware/ and upstream.json")
    parser.add_argument("--model", default="", help="only models whose name begins with this")
    parser.add_argument(
        "--minibatch", type=int, action="append", help="only these minibatches; may be repeated"
    )
    parser.add_argument("--devices", type=int, action="append", help="only so many devices; may be repeated")
    parser.add_argument("--memory", help="this memory on every device instead, e.g. 24GiB")
    parser.add_argument("--baselines", action="store_true", help="also dp-swap and pp-swap")
    options = parser.parse_args(arguments)
    rows = []
    _print(_header())
    for case in _cases(options.reference, options):
        row = _row(options.reference, case, options)
        rows.append(row)
        _print(_line(row))
    _print("\n".join(_summary(rows)))
    slower = [
        row for row in rows if row.theirs_simulated is not None and row.ours > row.theirs_simulated * 1.0001
    ]
    return 1 if slower else 0


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _cases(reference: Path, options: argparse.Namespace) -> list[tuple[str, int, int, list[dict[str, Any]]]]:
    """(model, minibatch, devices, what the other planner found), by model and size."""
    upstream = msgspec.json.decode((reference / "upstream.json").read_bytes())["cases"]
    found: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for case in upstream:
        key = case["model"], case["minibatch"], case["devices"]
        if not key[0].startswith(options.model):
            continue
        if (options.minibatch and key[1] not in options.minibatch) or (
            options.devices and key[2] not in options.devices
        ):
            continue
        found.setdefault(key, []).append(case)
    return [(*key, cases) for key, cases in sorted(found.items())]


def _row(
    reference: Path, case: tuple[str, int, int, list[dict[str, Any]]], options: argparse.Namespace
) -> Row:
    model, minibatch, devices, theirs = case
    profile = store.load_profile(reference / "profiles" / f"{model}.json")
    name = f"{devices}x1080ti-{'9gb' if model in SMALLER else '10gib'}.json"
    hardware = store.load_hardware(reference / "hardware" / name)
    if options.memory:
        size = parse_bytes(options.memory)
        devices_ = tuple(msgspec.structs.replace(device, memory_bytes=size) for device in hardware.devices)
        hardware = msgspec.structs.replace(hardware, devices=devices_)
    started = time.perf_counter()
    result = plan(profile, hardware, minibatch=minibatch)
    elapsed = time.perf_counter() - started
    if result.schedule is None:
        raise SystemExit(f"{model}, {minibatch} samples, {devices} devices: {result.reason}")
    verify(result.schedule, profile, hardware)
    configuration = result.schedule.configuration
    replicas = max(1, len(configuration.replicas))
    first, end = configuration.microbatches.backward[0]
    kinds = {choice for pack in configuration.backward_packs for choice in pack.activations}
    sizes = "/".join(
        str(r[0][1] - r[0][0])
        for r in (configuration.microbatches.forward, configuration.microbatches.backward)
    )
    row = Row(
        model,
        minibatch,
        devices,
        result.seconds,
        result.lower_bound_seconds,
        elapsed,
        f"{configuration.mode} R{replicas} u{sizes} {' '.join(sorted(kinds - {'recompute'}))}".strip(),
        minibatch / (end - first) / devices,
        sum(d.swap_in_bytes + d.swap_out_bytes for d in result.schedule.predicted.devices),
    )
    for case_ in theirs:
        seconds = case_["seconds"]
        if case_["simulated_with_prefetch"]:
            row.theirs_prefetched = min(seconds, row.theirs_prefetched or seconds)
        else:
            row.theirs_predicted = min(seconds, row.theirs_predicted or seconds)
        row.their_search = (row.their_search or 0.0) + case_["search_seconds"]
        simulated = _simulated(profile, hardware, case_)
        if simulated is not None:
            row.theirs_simulated = min(simulated, row.theirs_simulated or simulated)
    if options.baselines:
        problem = Problem(profile, hardware, minibatch, devices)
        row.baselines = [b for b in (dp_swap(problem), pp_swap(problem)) if b is not None]
    return row


def _simulated(profile: Profile, hardware: Hardware, case: dict[str, Any]) -> float | None:
    """The other planner's configuration in our simulator; None where it does not fit."""
    fixed = Fixed(
        forward_microbatch=case["microbatch_forward"],
        backward_microbatch=case["microbatch_backward"],
        forward_packs=tuple(case["forward_packs"]),
        backward_packs=tuple(case["backward_packs"]),
        replicas=case["devices"] if case["mode"] == "dp" else 1,
    )
    try:
        return plan_fixed(profile, hardware, fixed, minibatch=case["minibatch"], with_bound=False).seconds
    except (InfeasibleError, VerifyError):  # no memory, or no place for what is under way
        return None


def _header() -> str:
    return (
        f"{'model':18} {'mini':>4} {'gpus':>4} {'ours':>8} {'bound':>8} {'gap':>6} {'search':>6}   "
        f"{'theirs here':>11} {'predicted':>9} {'prefetch':>8} {'search':>7}  plan"
    )


def _line(row: Row) -> str:
    def number(value: float | None, width: int, digits: int = 3) -> str:
        return f"{value:{width}.{digits}f}" if value is not None else f"{'-':>{width}}"

    simulated = (
        number(row.theirs_simulated, 11) if row.theirs_simulated is not None else f"{'does not fit':>11}"
    )
    line = (
        f"{row.model:18} {row.minibatch:4} {row.devices:4} {row.ours:8.3f} {row.bound:8.3f} {row.gap:6.1%} {row.search:6.2f}   "
        f"{simulated} {number(row.theirs_predicted, 9)} {number(row.theirs_prefetched, 8)} "
        f"{number(row.their_search, 7, 1)}  {row.kind}"
    )
    for baseline in row.baselines:
        moved = baseline.swap_in_bytes + baseline.swap_out_bytes
        less = f"{moved / row.swapped:.2f}x our swaps" if row.swapped else f"{moved} bytes against none"
        line += f"; {baseline.name} {baseline.seconds:.3f} ({baseline.seconds / row.ours:.2f}x, {less})"
    return line


def _summary(rows: list[Row]) -> list[str]:
    """Geometric means, medians and the worst."""
    if not rows:
        return ["no case"]
    many = [row for row in rows if row.devices >= 4]
    return [
        "",
        f"faster than their configuration simulated here: {_mean(r.theirs_simulated and r.theirs_simulated / r.ours for r in rows)}, "
        f"on 4 and 8 devices {_mean(r.theirs_simulated and r.theirs_simulated / r.ours for r in many)}",
        f"faster than their own best prediction: {_mean(r.theirs_best and r.theirs_best / r.ours for r in rows)}, "
        f"on 4 and 8 devices {_mean(r.theirs_best and r.theirs_best / r.ours for r in many)}",
        f"slower than their configuration in {sum(r.theirs_simulated is not None and r.ours > r.theirs_simulated * 1.0001 for r in rows)} of "
        f"{sum(r.theirs_simulated is not None for r in rows)} cases where it fits",
        f"gap to the bound: median {median(r.gap for r in rows):.1%}, largest {max(r.gap for r in rows):.1%}; where there are at "
        f"least 4 microbatches a device largest {max((r.gap for r in rows if r.microbatches_per_device >= 4), default=0.0):.1%}",
        f"search: median {median(r.search for r in rows):.2f} s, longest {max(r.search for r in rows):.2f} s",
    ]


def _mean(ratios: Iterable[float | None]) -> str:
    known = [ratio for ratio in ratios if ratio]
    return f"{exp(sum(map(log, known)) / len(known)):.3f}x ({len(known)} cases)" if known else "no case"


if __name__ == "__main__":
    sys.exit(main())
