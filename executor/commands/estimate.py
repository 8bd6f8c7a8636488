"""`harmony-executor estimate`: a profile without the GPU, the weights or a run."""

from __future__ import annotations

from typing import Annotated

import typer

from executor.commands import render, terminal
from executor.commands.options import (
    DEFAULT_OPTIMIZER,
    Dtype,
    Json,
    LayerPatterns,
    LearningRate,
    ModelSpec,
    Momentum,
    Optimizer,
    Output,
    WeightDecay,
    check_dtype,
    check_output,
    optimizer_settings,
)
from planner.contract import store
from planner.contract.counts import Counts
from planner.contract.errors import FormatError
from planner.contract.gpus import Gpu, find_gpu
from planner.contract.output import STANDARD
from planner.contract.roofline import calibration, estimate


def estimate_command(
    model: ModelSpec,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="NAME",
            help="Of the catalogue, as rtx4090; without it OUTPUT has counts for any GPU.",
        ),
    ] = None,
    measured: Annotated[
        str | None,
        typer.Option(
            "--measured",
            metavar="PROFILE",
            help="Of any model on that GPU: estimates are scaled by how far off its own is.",
        ),
    ] = None,
    dtype: Dtype = "",
    optimizer: Optimizer = DEFAULT_OPTIMIZER,
    lr: LearningRate = 1e-3,
    weight_decay: WeightDecay = None,
    momentum: Momentum = None,
    layers: LayerPatterns = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Estimate what each layer of a model costs, from what it computes and moves and from the GPU's data sheet."""
    check_dtype(dtype)
    check_output(output, as_json)
    if gpu is None and (measured is not None or output is None):
        raise FormatError("--gpu is missing: which one? Without it -o FILE writes counts that serve for any")
    chosen = None if gpu is None else find_gpu(gpu)
    known = None if measured is None else store.load_profile(measured)
    from executor.count import count

    settings = optimizer_settings(lr, weight_decay, momentum)
    with terminal.progress("counting") as advance:
        counts = count(
            model,
            optimizer=optimizer or DEFAULT_OPTIMIZER,
            settings=settings,
            patterns=tuple(layers or ()),
            dtype=dtype,
            progress=lambda done, total: advance(done, total, ""),
        )
    if chosen is None:
        assert output is not None
        store.save(counts, output)
        return
    factor = 1.0
    if known is not None:
        theirs = count(
            known.model.spec or known.model.name,
            optimizer=known.optimizer,
            settings={"lr": lr},
            patterns=known.model.patterns,
            dtype=known.dtype if known.dtype in ("float16", "bfloat16") else "",
        )
        factor = calibration(known, estimate(theirs, *chosen))
    _tell(counts, chosen, factor, output, as_json)


def _tell(counts: Counts, chosen: tuple[str, Gpu], factor: float, output: str | None, as_json: bool) -> None:
    profile = estimate(counts, *chosen, factor=factor)
    if output is not None:
        store.save(profile, output)
    if as_json:
        terminal.print_json(render.profile_json(profile))
        return
    terminal.show(render.profile_table(profile), to_stderr=output == STANDARD)
    terminal.complain(f"note: {profile.model.source}; factor {factor:.3g}")
