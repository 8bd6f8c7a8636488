"""What several commands are asked: their options, and how the answers are read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from planner.contract.errors import FormatError, HarmonyError
from planner.contract.output import STANDARD, check_outputs

DEVICES = ("virtual", "cuda")
DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_OPTIMIZER = "adamw"

DeviceOption = Annotated[
    str, typer.Option("--device", metavar="KIND", help="virtual (the CPU as an accelerator) or cuda.")
]
Optimizer = Annotated[
    str | None,
    typer.Option("--optimizer", metavar="NAME", help="One of torch.optim's, e.g. adamw, adam, sgd."),
]
LearningRate = Annotated[float, typer.Option("--lr", metavar="RATE", help="The optimizer's learning rate.")]
WeightDecay = Annotated[
    float | None,
    typer.Option("--weight-decay", metavar="X", help="The optimizer's; torch's default where not given."),
]
Momentum = Annotated[
    float | None, typer.Option("--momentum", metavar="X", help="SGD's; the same when profiling and running.")
]
ClipNorm = Annotated[
    float | None,
    typer.Option(
        "--clip-norm",
        metavar="X",
        help="Clip gradients by their global norm; for schedules planned with --clip.",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        help="float32, bfloat16 or float16 (those with float32 masters); as the model has it where not given.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of weights, batches and dropout.")]
Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="PATH", help="A text file, or a folder of them, for hf: models."),
]
ModelSpec = Annotated[
    str,
    typer.Option(
        "--model", metavar="SPEC", help="hf:NAME?key=value, path/to/file.py:function or module:function."
    ),
]
LayerPatterns = Annotated[
    list[str] | None,
    typer.Option(
        "--layers", metavar="PATTERN", help="Modules that are layers, e.g. transformer.h.*; repeat for more."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Output = Annotated[
    str | None, typer.Option("-o", "--output", metavar="PATH", help="Where to write; - is standard output.")
]
Size = str | None


def check_device_name(device: str) -> None:
    """Raise FormatError where there is no such kind of device."""
    if device not in DEVICES:
        raise FormatError(f"--device {device}: use one of {', '.join(DEVICES)}")


def check_device(device: str) -> None:
    """Raise HarmonyError where there is no such device."""
    check_device_name(device)
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise HarmonyError("--device cuda: torch sees no GPU here; use --device virtual")


def check_dtype(dtype: str) -> None:
    """Raise FormatError where a model cannot be trained in that type."""
    if dtype and dtype not in DTYPES:
        raise FormatError(f"--dtype {dtype}: use one of {', '.join(DTYPES)}")


def check_output(output: str | None, as_json: bool) -> None:
    """Raise FormatError where nothing can be written there, or two results would go to one place."""
    check_outputs(output)
    if output == STANDARD and as_json:
        raise FormatError("-o - and --json both write to standard output; choose one")


def optimizer_settings(lr: float, weight_decay: float | None, momentum: float | None) -> dict[str, Any]:
    """The optimizer's arguments by torch.optim's names; what is not given is torch's to choose."""
    given = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
    for key, value in given.items():
        if value is not None and not 0 <= value < math.inf:
            raise FormatError(f"--{key.replace('_', '-')} {value}: must be finite and 0 or more")
    return {key: value for key, value in given.items() if value is not None}
