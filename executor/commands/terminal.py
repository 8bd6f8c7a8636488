"""How the commands print: results on stdout, progress and complaints on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from planner.contract.trace import Evaluation
from planner.contract.units import format_seconds


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """advance(done, total, line): a bar on stderr where that is a terminal; lines go above it."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task: TaskID = bar.add_task(what, total=None)

        def advance(done: int, total: int, line: str) -> None:
            bar.update(task, completed=done, total=total)
            if line:
                console.print(line)

        yield advance


@contextmanager
def iterations(steps: int, num_samples: int) -> Iterator[Callable[[int, float, float], None]]:
    """Progress of a run: a line per iteration."""
    with progress("training") as advance:

        def note(iteration: int, loss: float, seconds: float) -> None:
            rate = f"{num_samples / seconds:.4g} samples/s"
            advance(
                iteration + 1,
                steps,
                f"iteration {iteration + 1}/{steps}  loss {loss:.6g}  {format_seconds(seconds)}  {rate}",
            )

        yield note


def note_evaluation(evaluation: Evaluation) -> None:
    """A line for an evaluation."""
    line = f"evaluation after {evaluation.iterations}  loss {evaluation.loss:.6g}  {format_seconds(evaluation.seconds)}"
    Console(stderr=True, highlight=False, soft_wrap=True).print(line)


def show(table: Table, to_stderr: bool = False) -> None:
    """A table, as wide as the terminal."""
    console = Console(stderr=to_stderr, highlight=False)
    if not console.is_terminal:
        # no terminal, no width: a file or a pipe gets whole lines
        console = Console(stderr=to_stderr, highlight=False, width=200)
    console.print(table)


def print_json(result: object) -> None:
    """A result for machines, on stdout."""
    typer.echo(msgspec.json.format(msgspec.json.encode(result), indent=1).decode())


def complain(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    typer.echo(f"harmony-executor: {' '.join(message.split())}", err=True)
