"""`harmony-executor profile`: what each layer of a model costs."""

from __future__ import annotations

from typing import Annotated

import typer

from executor.commands import render, terminal
from executor.commands.options import (
    DEFAULT_OPTIMIZER,
    Data,
    DeviceOption,
    Dtype,
    Json,
    LayerPatterns,
    LearningRate,
    ModelSpec,
    Momentum,
    Optimizer,
    Output,
    Seed,
    WeightDecay,
    check_device,
    check_dtype,
    check_output,
    optimizer_settings,
)
from planner.contract import store
from planner.contract.errors import FormatError
from planner.contract.output import STANDARD


def profile_command(
    model: ModelSpec,
    microbatches: Annotated[
        str, typer.Option("--microbatches", metavar="N,N,...", help="Microbatch sizes to measure.")
    ] = "1,2,4,8",
    device: DeviceOption = "virtual",
    optimizer: Optimizer = DEFAULT_OPTIMIZER,
    lr: LearningRate = 1e-3,
    weight_decay: WeightDecay = None,
    momentum: Momentum = None,
    layers: LayerPatterns = None,
    repeats: Annotated[int, typer.Option("--repeats", min=2, help="Runs of which the median counts.")] = 5,
    dtype: Dtype = "",
    seed: Seed = 0,
    data: Data = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure what each layer of a model costs: seconds and bytes, forward, backward and update."""
    sizes = _parse_sizes(microbatches)
    check_device(device)
    check_dtype(dtype)
    check_output(output, as_json)
    from executor.models import load_workload
    from executor.profile import measure_profile

    workload = load_workload(model, seed=seed, data=data, dtype=dtype)
    with terminal.progress("measuring layers") as advance:
        profile = measure_profile(
            workload,
            model,
            sizes,
            optimizer=optimizer or DEFAULT_OPTIMIZER,
            settings=optimizer_settings(lr, weight_decay, momentum),
            patterns=tuple(layers or ()),
            repeats=repeats,
            device="cuda" if device == "cuda" else "cpu",
            device_name=_device_name(device),
            notice=lambda line: terminal.complain(f"note: {line}"),
            progress=lambda done, total: advance(done, total, ""),
        )
    if output is not None:
        store.save(profile, output)
    if as_json:
        terminal.print_json(render.profile_json(profile))
    else:
        terminal.show(render.profile_table(profile), to_stderr=output == STANDARD)


def _parse_sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise FormatError(f"--microbatches {text!r}: sizes look like 1,2,4,8")
    return [int(part) for part in parts]


def _device_name(device: str) -> str:
    if device == "virtual":
        return device
    import torch

    return torch.cuda.get_device_name(0)
