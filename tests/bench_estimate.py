"""How far off are estimates? `python -m tests.bench_estimate ../shared/reference`: beside profiles measured on a GTX 1080 Ti.

Each network is counted without weights, estimated from the data sheet, and scaled by one factor for the device, the
one of GPT-2 XL. Columns: errors of layers' seconds in the median and at the 90th percentile, forward and backward, over all
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
BERT = "hf:bert?hidden_size=1024&intermediate_size=4096&num_attention_heads=16&vocab_size=30522&seq=512&task=classification&num_labels=2&hidden_act=gelu_python&attn_implementation=eager&num_hidden_layers="
SPECS = {
    "gpt2_xl": "hf:gpt2?n_layer=48&n_embd=1600&n_head=25&n_positions=1024&vocab_size=50257&seq=1024&tie_word_embeddings=false&attn_implementation=eager",
    "bert_large_seqlen512": f"{BERT}24",
    "bert_96_seqlen512": f"{BERT}96",
}
HARDWARE = {
    "gpt2_xl": "4x1080ti-9gb",
    "bert_large_seqlen512": "4x1080ti-10gib",
    "bert_96_seqlen512": "4x1080ti-9gb",
}


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
    factor, failed = 1.0, False
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
    for name, spec in SPECS.items():
        measured = joined(store.load_profile(reference / "profiles" / f"{name}.json"))
        counts = count(spec, optimizer="adam", settings={"lr": 1e-3})
        if name == "gpt2_xl":
            factor = calibration(measured, estimate(counts, GPU, GPUS[GPU]))
        found = estimate(counts, GPU, GPUS[GPU], factor=factor)
        pairs = list(zip(found.layers, measured.layers, strict=True))
        cells = [name]
        for direction in ("forward", "backward"):
            off = [abs(e) for a, b in pairs for e in errors(a, b, direction, "seconds")]
            failed |= median(off) > 0.25
            cells.append(f"{median(off):.1%}, {quantiles(off, n=10)[8]:.1%}")
        weights = sum(a.weight_bytes for a, _ in pairs) / sum(b.weight_bytes for _, b in pairs) - 1
        cells.append(f"{weights:+.2%}")
        for direction in ("forward", "backward"):
            cells.append(f"{median(e for a, b in pairs for e in errors(a, b, direction, 'peak_bytes')):+.1%}")
        cells.append(
            transferred(
                found, measured, store.load_hardware(reference / "hardware" / f"{HARDWARE[name]}.json")
            )
        )
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
        sys.stdout.flush()
    sys.stdout.write(f"\nfactor {factor:.3g}\n")
    return int(failed)


def transferred(found: Profile, measured: Profile, hardware: Hardware) -> str:
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
        return "does not fit"
    try:
        moved = plan_fixed(measured, hardware, theirs.configuration, minibatch=64)
    except HarmonyError as error:
        return str(error)
    if moved.schedule is None:
        return moved.reason
    ours, best = moved.schedule.predicted.iteration_seconds, own.predicted.iteration_seconds
    return f"{ours:.3g} s, {ours / best - 1:+.1%}"


if __name__ == "__main__":
    sys.exit(main())
