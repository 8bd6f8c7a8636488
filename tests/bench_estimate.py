"""How far off are estimates? `python -m tests.bench_estimate ../shared/reference`: beside profiles measured on a GTX 1080 Ti.

Each network is counted without weights, estimated from published figures, and scaled by one factor for the device. It is
fitted on GPT-2 XL, so that row is no test of the seconds; the others are. BERT stands here twice, with the GELU of transformers and
with one that composes it of its operations (`gelu_python`): which one was measured is not known. Columns: errors of layers' seconds in the median and at the 90th percentile, forward and backward, over all
microbatches that both have; of weights and of peaks; and the plan made from the estimate, run in the simulator on the
measured profile, against the plan made from the measured one (4 devices, 64 samples).
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median, quantiles

import msgspec

from executor.count import count
from planner.contract import store
from planner.contract.errors import HarmonyError
from planner.contract.gpus import GPUS
from planner.contract.hardware import Hardware
from planner.contract.profile import Layer, Profile
from planner.contract.roofline import calibration, estimate
from planner.search import plan, plan_fixed

GPU = "gtx1080ti"
BERT = (
    "hf:bert?hidden_size=1024&intermediate_size=4096&num_attention_heads=16&vocab_size=30522&seq=512"
    "&task=classification&num_labels=2&attn_implementation=eager&hidden_act={gelu}&num_hidden_layers={layers}"
)
GPT2 = (
    "hf:gpt2?n_layer=48&n_embd=1600&n_head=25&n_positions=1024&vocab_size=50257&seq=1024"
    "&tie_word_embeddings=false&attn_implementation=eager"
)
CASES = [
    ("gpt2_xl", "4x1080ti-9gb", GPT2),
    *(
        (name, hardware, BERT.format(gelu=gelu, layers=layers))
        for name, hardware, layers in (
            ("bert_large_seqlen512", "4x1080ti-10gib", 24),
            ("bert_96_seqlen512", "4x1080ti-9gb", 96),
        )
        for gelu in ("gelu", "gelu_python")
    ),
]
"""Profile, hardware and what is counted."""
SECONDS_GATE = 0.25
BYTES_GATE = 0.02
PLAN_GATE = 0.05


def joined(profile: Profile) -> Profile:
    """The last two layers as one: what was measured has the loss by itself."""
    *others, first, second = profile.layers
    last = msgspec.structs.replace(
        first,
        forward=tuple(
            msgspec.structs.replace(
                a, seconds=a.seconds + b.seconds, peak_bytes=max(a.peak_bytes, b.peak_bytes)
            )
            for a, b in zip(first.forward, second.forward, strict=True)
        ),
        backward=tuple(
            msgspec.structs.replace(
                a, seconds=a.seconds + b.seconds, peak_bytes=max(a.peak_bytes, b.peak_bytes)
            )
            for a, b in zip(first.backward, second.backward, strict=True)
        ),
    )
    count = len(profile.layers)
    edges = tuple(edge for edge in profile.edges if edge.dst < count - 1)
    return msgspec.structs.replace(profile, layers=(*others, last), edges=edges)


def errors(ours: Layer, theirs: Layer, direction: str, what: str) -> list[float]:
    """Relative, of each microbatch that both have."""
    known = {cost.microbatch_size: getattr(cost, what) for cost in getattr(ours, direction)}
    return [
        known[cost.microbatch_size] / getattr(cost, what) - 1
        for cost in getattr(theirs, direction)
        if cost.microbatch_size in known
    ]


def main() -> int:
    """Print the table; returns 1 where a gate does not hold."""
    reference = Path(sys.argv[1])
    factor, num_beyond = 1.0, 0
    header = (
        "model",
        "forward",
        "backward",
        "weights",
        "peak forward",
        "peak backward",
        "plan of the estimate",
    )
    sys.stdout.write(f"| {' | '.join(header)} |\n|{'---|' * len(header)}\n")
    for name, hardware, spec in CASES:
        measured = joined(store.load_profile(reference / "profiles" / f"{name}.json"))
        counts = count(spec, optimizer="adam", settings={"lr": 1e-3})
        if name == "gpt2_xl":
            factor = calibration(measured, estimate(counts, GPU, GPUS[GPU]))
        found = estimate(counts, GPU, GPUS[GPU], factor=factor)
        pairs = list(zip(found.layers, measured.layers, strict=True))
        cells = [f"{name}, gelu_python" if "gelu_python" in spec else name]
        for direction in ("forward", "backward"):
            off = [abs(e) for a, b in pairs for e in errors(a, b, direction, "seconds")]
            num_beyond += median(off) > SECONDS_GATE
            cells.append(
                f"{median(off):.1%}, {quantiles(off, n=10)[8]:.1%}{_flag(median(off) > SECONDS_GATE)}"
            )
        weights = sum(a.weight_bytes for a, _ in pairs) / sum(b.weight_bytes for _, b in pairs) - 1
        num_beyond += abs(weights) > BYTES_GATE
        cells.append(f"{weights:+.2%}{_flag(abs(weights) > BYTES_GATE)}")
        for direction in ("forward", "backward"):
            peak = median(e for a, b in pairs for e in errors(a, b, direction, "peak_bytes"))
            cells.append(f"{peak:+.1%}")
        cell, is_near = transferred(
            found, measured, store.load_hardware(reference / "hardware" / f"{hardware}.json")
        )
        num_beyond += not is_near
        cells.append(f"{cell}{_flag(not is_near)}")
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
        sys.stdout.flush()
    sys.stdout.write(f"\nfactor {factor:.3g}; {num_beyond} beyond their gates\n")
    return 1 if num_beyond else 0


def _flag(is_beyond: bool) -> str:
    return "!" if is_beyond else ""


def transferred(found: Profile, measured: Profile, hardware: Hardware) -> tuple[str, bool]:
    """The estimate's plan on the measured profile, beside that one's own. What forwards save was not measured, so
    neither plan may know it."""
    layers = tuple(
        msgspec.structs.replace(
            layer, backward=tuple(msgspec.structs.replace(cost, saved_bytes=None) for cost in layer.backward)
        )
        for layer in found.layers
    )
    found = msgspec.structs.replace(found, layers=layers)
    own = plan(measured, hardware, minibatch=64).schedule
    theirs = plan(found, hardware, minibatch=64).schedule
    assert own is not None
    if theirs is None:
        return "does not fit", False
    try:
        moved = plan_fixed(measured, hardware, theirs.configuration, minibatch=64)
    except HarmonyError as error:
        return str(error), False
    if moved.schedule is None:
        return moved.reason, False
    ours, best = moved.schedule.predicted.iteration_seconds, own.predicted.iteration_seconds
    return f"{ours:.4g} s, {ours / best - 1:+.2%}", ours <= best * (1 + PLAN_GATE)


if __name__ == "__main__":
    sys.exit(main())
