"""`harmony-executor run`: train by a schedule, or by a script (script.py)."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from executor.commands import render, terminal
from executor.commands.options import (
    DEFAULT_OPTIMIZER,
    ClipNorm,
    Data,
    DeviceOption,
    Dtype,
    Json,
    LearningRate,
    Momentum,
    Optimizer,
    Output,
    Seed,
    Size,
    WeightDecay,
    check_device,
    check_dtype,
    check_output,
    optimizer_settings,
)
from executor.commands.script import is_script, run_script, was_given
from planner.contract import store
from planner.contract.errors import FormatError
from planner.contract.output import STANDARD, check_outputs
from planner.contract.schedule import Samples, Schedule
from planner.contract.units import parse_bytes


def run_command(
    context: typer.Context,
    schedule_file: Annotated[
        str | None,
        typer.Argument(
            metavar="SCHEDULE",
            help="What to run; - reads standard input. May be left out with --plain. Or a SCRIPT.py with a loop of its own.",
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Of SCRIPT.py, behind --.")
    ] = None,
    devices: Annotated[
        int, typer.Option("--devices", min=1, help="With SCRIPT.py: how many, one process each.")
    ] = 1,
    model: Annotated[
        str | None, typer.Option("--model", metavar="SPEC", help="The planned one where not given.")
    ] = None,
    device: DeviceOption = "virtual",
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Iterations; the first one is a warm-up.")
    ] = 10,
    optimizer: Optimizer = None,
    lr: LearningRate = 1e-3,
    weight_decay: WeightDecay = None,
    momentum: Momentum = None,
    clip_norm: ClipNorm = None,
    dtype: Dtype = "",
    seed: Seed = 0,
    data: Data = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Train without the schedule, all of it on one device.")
    ] = False,
    budget: Annotated[
        Size, typer.Option("--budget", metavar="SIZE", help="With --plain: the device's memory.")
    ] = None,
    minibatch: Annotated[
        int | None,
        typer.Option(
            "--minibatch", min=1, metavar="SAMPLES", help="With --plain: the schedule's where not given."
        ),
    ] = None,
    microbatch: Annotated[
        int | None,
        typer.Option(
            "--microbatch", min=1, metavar="SAMPLES", help="With --plain: the schedule's where not given."
        ),
    ] = None,
    unpaced: Annotated[
        bool, typer.Option("--unpaced", help="Virtual devices run as fast as they can.")
    ] = False,
    weights_out: Annotated[
        Path | None,
        typer.Option("--weights-out", metavar="PATH", help="Write the trained weights (safetensors)."),
    ] = None,
    weights_in: Annotated[
        Path | None,
        typer.Option(
            "--weights-in",
            metavar="PATH",
            help="Start from these: safetensors, a folder of them, or a state_dict by torch.save.",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", metavar="FOLDER", help="Save what it takes to go on exactly."),
    ] = None,
    checkpoint_every: Annotated[
        int,
        typer.Option(
            "--checkpoint-every", min=0, metavar="N", help="After every N iterations; 0: after the last one."
        ),
    ] = 0,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from the newest checkpoint in FOLDER, up to --steps in all."),
    ] = False,
    evaluate_every: Annotated[
        int,
        typer.Option(
            "--evaluate-every",
            min=0,
            metavar="N",
            help="The loss in evaluation mode after every N iterations.",
        ),
    ] = 0,
    evaluate_batches: Annotated[
        int, typer.Option("--evaluate-batches", min=1, metavar="M", help="Minibatches of an evaluation.")
    ] = 1,
    evaluate_data: Annotated[
        Path | None,
        typer.Option(
            "--evaluate-data",
            metavar="PATH",
            help="Text held out from training; else other samples of --data.",
        ),
    ] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Train by a schedule and record what ran when."""
    if schedule_file is not None and is_script(schedule_file):
        run_script(context, schedule_file, devices, arguments or ())
        return
    if arguments or was_given(context, "devices"):
        raise FormatError(
            f"{' '.join(arguments) if arguments else '--devices'}: only with a script; a schedule says it itself"
        )
    check_device(device)
    check_dtype(dtype)
    if clip_norm is not None and not 0 < clip_norm < math.inf:
        raise FormatError(f"--clip-norm {clip_norm}: must be finite and above 0")
    if dtype and schedule_file is not None:
        raise FormatError(f"--dtype {dtype}: only with --plain and no SCHEDULE; a schedule says it itself")
    check_output(output, as_json)
    check_outputs(output, weights_out, inputs=(schedule_file, weights_in))
    if str(checkpoint) == STANDARD:
        raise FormatError("--checkpoint -: checkpoints are folders; name one")
    settings = optimizer_settings(lr, weight_decay, momentum)
    if plain and (checkpoint or resume or weights_in):
        raise FormatError("--checkpoint, --resume and --weights-in: not with --plain; run by a schedule")
    if checkpoint is None and (checkpoint_every or resume):
        raise FormatError("--checkpoint-every and --resume: of which folder? say --checkpoint FOLDER")
    if plain and evaluate_every:
        raise FormatError("--evaluate-every: not with --plain; run by a schedule")
    if not evaluate_every and (evaluate_data is not None or was_given(context, "evaluate_batches")):
        raise FormatError("--evaluate-batches and --evaluate-data: how often? say --evaluate-every N")
    if weights_in is not None and resume:
        raise FormatError("--weights-in and --resume: a checkpoint has the weights already; choose one")
    if weights_in is not None and not weights_in.exists():
        raise FormatError(f"--weights-in {weights_in}: no such file or folder")
    for option, path in (("--data", data), ("--evaluate-data", evaluate_data)):
        if path is not None and not path.exists():
            raise FormatError(f"{option} {path}: no such file or folder")
    if not plain:
        for option, given in (("--budget", budget), ("--minibatch", minibatch), ("--microbatch", microbatch)):
            if given is not None:
                raise FormatError(f"{option} {given}: only with --plain; a schedule says it itself")
        if schedule_file is None:
            raise FormatError("no SCHEDULE; plan one, or train with --plain --model SPEC --minibatch SAMPLES")
    schedule = None if schedule_file is None else store.load_schedule(schedule_file)
    spec = model or (schedule.profile.model.spec if schedule is not None else "")
    if not spec:
        raise FormatError(
            "--model is missing" + ("" if schedule is None else "; the schedule's profile names none")
        )
    limit = None if budget is None else parse_bytes(budget, "--budget")
    samples = _plain_samples(schedule, minibatch, microbatch) if plain else ()
    from executor.checkpoint import Checkpoints
    from executor.launch import run_schedule
    from executor.options import RunOptions
    from executor.plain import run_plain
    from executor.replay import Aborted

    checkpoints = None if checkpoint is None else Checkpoints(checkpoint, checkpoint_every)
    options = RunOptions(
        model=spec,
        device=cast(Literal["virtual", "cuda"], device),
        steps=steps,
        optimizer=optimizer or (schedule.profile.optimizer if schedule is not None else DEFAULT_OPTIMIZER),
        settings=settings,
        seed=seed,
        data=data,
        clip_norm=clip_norm,
        dtype=dtype,
        paced=not unpaced,
        weights=weights_in,
        checkpoints=checkpoints,
        evaluate_every=evaluate_every,
        evaluate_batches=evaluate_batches,
        evaluate_data=evaluate_data,
    )
    num_samples = samples[-1][1] if plain or schedule is None else schedule.configuration.samples
    with terminal.iterations(steps, num_samples) as note:
        if plain:
            trace = run_plain(
                schedule,
                options,
                samples,
                budget_bytes=limit,
                trace_path=output,
                weights_out=weights_out,
                progress=note,
            )
        else:
            assert schedule is not None
            try:
                trace = run_schedule(
                    schedule,
                    options,
                    trace_path=output,
                    weights_out=weights_out,
                    resume=resume,
                    progress=note,
                    evaluated=terminal.note_evaluation,
                )
            except Aborted:
                # under torchrun: the rank that failed says why
                raise typer.Exit(1) from None
    if not _is_first_rank():
        return
    if as_json:
        terminal.print_json(render.trace_json(trace))
    else:
        for line in render.trace_lines(trace, None if plain else schedule, limit):
            typer.echo(line, err=output == STANDARD)


def _plain_samples(
    schedule: Schedule | None, minibatch: int | None, microbatch: int | None
) -> tuple[Samples, ...]:
    """The microbatches of plain training: the schedule's backward ones, or as asked for."""
    if schedule is not None and minibatch is None and microbatch is None:
        configuration = schedule.configuration
        starts = range(0, configuration.samples, configuration.minibatch)
        return tuple((s + a, s + b) for s in starts for a, b in configuration.microbatches.backward)
    if minibatch is None and schedule is None:
        raise FormatError("--plain: --minibatch is missing; it is how many samples an iteration has")
    total = minibatch or (schedule.configuration.samples if schedule is not None else 0)
    from executor.reference import even_microbatches

    return even_microbatches(total, microbatch or total)


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"
