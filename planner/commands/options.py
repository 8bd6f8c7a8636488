"""What several commands are asked, and how they print: results on stdout, progress and complaints on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as ProgressBar

from planner.contract.errors import FormatError
from planner.contract.hardware import Hardware
from planner.contract.output import STANDARD, check_outputs
from planner.contract.units import format_seconds, parse_bytes

ProfileFile = Annotated[
    str, typer.Argument(metavar="PROFILE", help="What each layer costs; - reads standard input.")
]
HardwareFile = Annotated[
    str, typer.Argument(metavar="HARDWARE", help="Devices, links and host; - reads standard input.")
]
ScheduleFile = Annotated[str, typer.Argument(metavar="SCHEDULE", help="A schedule; - reads standard input.")]
Memory = Annotated[
    str | None, typer.Option("--memory", metavar="SIZE", help="Use this memory for every device, e.g. 16GiB.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Output = Annotated[
    str | None, typer.Option("-o", "--output", metavar="PATH", help="Where to write; - is standard output.")
]


# ---- input


def check_one_standard_input(*files: str) -> None:
    """Raise FormatError where two files would be read from standard input."""
    if files.count(STANDARD) > 1:
        raise FormatError("-: standard input holds one file; name the others")


def check_output(output: str | None, as_json: bool, *inputs: str | None) -> None:
    """Raise FormatError where nothing can be written there, or two results would go to one place, or over an input."""
    check_outputs(output, inputs=inputs)
    if output == STANDARD and as_json:
        raise FormatError("-o - and --json both write to standard output; choose one")


def check_file(option: str, path: str | None) -> None:
    """Raise FormatError where a picture or page would be printed among text."""
    if path == STANDARD:
        raise FormatError(f"{option} -: standard output has the text; name a file")


def with_memory(hardware: Hardware, memory: str | None, option: str = "--memory") -> Hardware:
    """The hardware with other devices' memory; what is reserved on them stays reserved."""
    if memory is None:
        return hardware
    size = parse_bytes(memory, option)
    for device in hardware.devices:
        if size <= device.reserved_bytes:
            raise FormatError(
                f"{option} {memory}: {size} bytes of which {device.reserved_bytes} are reserved on {device.name} leave nothing"
            )
    devices = tuple(msgspec.structs.replace(device, memory_bytes=size) for device in hardware.devices)
    return msgspec.structs.replace(hardware, devices=devices)


# ---- output


@contextmanager
def progress() -> Iterator[Callable[[Any], None] | None]:
    """A bar on stderr where that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("searching"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[best]}"))
    with ProgressBar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("searching", total=None, best="")

        def report(progress: Any) -> None:
            best = "" if progress.best_seconds is None else f"best {format_seconds(progress.best_seconds)}"
            bar.update(task, completed=progress.done, total=progress.total, best=best)

        yield report


def show(renderable: RenderableType, to_stderr: bool = False) -> None:
    """Print for people, as wide as the terminal."""
    console = Console(stderr=to_stderr, highlight=False)
    if not console.is_terminal:
        # no terminal, no width: a file or a pipe gets whole lines
        console = Console(stderr=to_stderr, highlight=False, width=200)
    console.print(renderable)


def print_json(result: object) -> None:
    """A result for machines, on standard output."""
    typer.echo(msgspec.json.format(msgspec.json.encode(result), indent=1).decode())


def complain(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    typer.echo(f"harmony-planner: {' '.join(message.split())}", err=True)
