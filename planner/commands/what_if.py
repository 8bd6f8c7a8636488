"""`harmony-planner what-if`: can a server train a model, how fast, and what limits it? From the library alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from planner import render
from planner.commands.options import Json, Output, check_file, check_output, print_json, progress, show
from planner.commands.show import schedule_json
from planner.contract import store
from planner.contract.counts import Counts
from planner.contract.errors import FormatError, InfeasibleError
from planner.contract.gpus import server
from planner.contract.hardware import Hardware
from planner.contract.output import STANDARD, check_outputs, write_whole
from planner.contract.profile import Profile
from planner.contract.roofline import HOW_SURE, estimate
from planner.contract.schedule import Schedule
from planner.contract.units import parse_bytes

LIBRARY = Path(__file__).parents[2] / "profiles"
"""Counts of published models, where the project lies beside its packages."""


@dataclass(frozen=True)
class ServerAnswer:
    """What a server makes of a model. schedule: None where it cannot train it, and reason says why."""

    server: str
    schedule: Schedule | None
    limited_by: str
    reason: str
    samples_per_second: float = 0.0
    tokens_per_second: float | None = None
    bound_samples_per_second: float = 0.0


def what_if_command(
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="NAME", help="Of the library in profiles/, as llama-8b; or a file of counts."
        ),
    ],
    gpus: Annotated[str, typer.Option("--gpus", metavar="NxGPU", help="How many of which, as 4x4090.")],
    minibatch: Annotated[
        int, typer.Option("--minibatch", min=1, metavar="SAMPLES", help="Samples of one iteration.")
    ],
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="Of each GPU, where less than it has.")
    ] = None,
    host_memory: Annotated[
        str, typer.Option("--host-memory", metavar="SIZE", help="Of the server.")
    ] = "256GiB",
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16 or float32.")] = "bfloat16",
    compare: Annotated[
        str, typer.Option("--compare", metavar="NxGPU,..", help="Other servers, in one table.")
    ] = "",
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit", min=0.0, metavar="SECONDS", help="Search no longer than this for each server."
        ),
    ] = None,
    output: Output = None,
    page: Annotated[
        str | None, typer.Option("--report", metavar="HTML", help="The plan for --gpus as a page.")
    ] = None,
    picture: Annotated[
        str | None, typer.Option("--picture", metavar="PNG", help="Draw the servers side by side.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Can that server train this model, how fast, and what limits it? Without a GPU, a profile or PyTorch."""
    check_output(output, as_json)
    check_file("--report", page)
    check_file("--picture", picture)
    check_outputs(output, page, picture, inputs=(model,))
    counts = find_counts(model, dtype)
    names = [gpus, *(part.strip() for part in compare.split(",") if part.strip())]
    limit = None if memory is None else parse_bytes(memory, "--memory")
    servers = [
        server(name, memory_bytes=limit, host_bytes=parse_bytes(host_memory, "--host-memory"))
        for name in names
    ]
    # numpy and the solver load with the search
    from planner.search import plan

    answers: list[ServerAnswer] = []
    details: list[RenderableType] = []
    with progress() as report:
        for name, (hardware, gpu) in zip(names, servers, strict=True):
            try:
                profile = estimate(counts, name.partition("x")[2], gpu)
            except FormatError as error:
                if len(names) == 1:
                    raise
                answers.append(ServerAnswer(name, None, "", str(error)))
                continue
            result = plan(
                profile, hardware, minibatch=minibatch, time_limit_seconds=time_limit, progress=report
            )
            answers.append(_answer(name, result, profile, minibatch))
            if result.schedule is not None:
                details.append(render.plan_result(result))
    first = answers[0]
    for option, path in (("-o", output), ("--report", page)):
        if path is not None and first.schedule is None:
            raise FormatError(f"{option} {path}: {gpus} cannot train it: {first.reason}")
    if first.schedule is not None and output is not None:
        store.save(first.schedule, output)
    if first.schedule is not None and page is not None:
        from planner.report import make_report

        profile = estimate(counts, gpus.partition("x")[2], servers[0][1])
        remark = f"{model} on {gpus}, {_how_sure(servers[0][0])}."
        write_whole(page, make_report(first.schedule, profile, remark=remark).encode())
    skeleton = counts.profile
    title = f"{model} ({skeleton.dtype}, {skeleton.optimizer}), {minibatch} samples an iteration"
    if picture is not None:
        from planner.picture import Bar, servers_png

        bars = [
            Bar(a.server, a.samples_per_second, a.bound_samples_per_second, a.limited_by or a.reason)
            for a in answers
        ]
        write_whole(picture, servers_png(title, bars))
    if as_json:
        print_json([_json(answer) for answer in answers])
        _check_one_can(answers)
        return
    show(render.server_answers(title, answers), to_stderr=output == STANDARD)
    if len(answers) == 1:
        for detail in details:
            show(detail, to_stderr=output == STANDARD)
    typer.echo(_how_sure(servers[0][0]), err=output == STANDARD)
    _check_one_can(answers)


def find_counts(model: str, dtype: str) -> Counts:
    """Of the library, or a file. Raises FormatError, OSError."""
    if "/" in model or model.endswith(".json"):
        return store.load_counts(model)
    known = sorted(
        {path.name.split(".")[0] for path in LIBRARY.glob("*.*.json") if "schema" not in path.name}
    )
    path = LIBRARY / f"{model}.{dtype}.json"
    if model not in known:
        there = f"it has {', '.join(known)}" if known else f"{LIBRARY} is not there"
        raise FormatError(
            f"--model {model}: not in the library ({there}); for another one make counts: harmony-executor estimate "
            f"--model SPEC -o counts.json"
        )
    if not path.is_file():
        raise FormatError(f"--dtype {dtype}: the library has bfloat16 and float32")
    return store.load_counts(path)


def _check_one_can(answers: list[ServerAnswer]) -> None:
    """Raise InfeasibleError where no server can train the model."""
    if all(answer.schedule is None for answer in answers):
        raise InfeasibleError(f"{answers[0].server} cannot train it: {answers[0].reason}")


def _answer(name: str, result: Any, profile: Profile, minibatch: int) -> ServerAnswer:
    if result.schedule is None:
        return ServerAnswer(name, None, "", result.reason)
    rate = minibatch / result.schedule.predicted.iteration_seconds
    length = re.search(r"[?&]seq=(\d+)", profile.model.spec)
    return ServerAnswer(
        name,
        result.schedule,
        result.limits,
        "",
        rate,
        rate * int(length.group(1)) if length else None,
        minibatch / result.schedule.predicted.lower_bound_seconds,
    )


def _how_sure(hardware: Hardware) -> str:
    rate = hardware.host_links[0].h2d_bytes_per_second / 1e9
    return (
        f"estimated {HOW_SURE}; assumed is a bus of {rate:.3g} GB/s for each GPU. "
        f"To be sure, measure with harmony-executor profile and hardware"
    )


def _json(answer: ServerAnswer) -> dict[str, Any]:
    found: dict[str, Any] = {"server": answer.server, "fits": answer.schedule is not None}
    if answer.schedule is None:
        return found | {"reason": answer.reason}
    return found | {
        "iteration_seconds": answer.schedule.predicted.iteration_seconds,
        "samples_per_second": answer.samples_per_second,
        "tokens_per_second": answer.tokens_per_second,
        "limited_by": answer.limited_by,
        "schedule": schedule_json(answer.schedule),
    }
