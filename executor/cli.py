"""`harmony-executor`: profile a model or estimate it, describe a machine, run a schedule, look for what stands in the way. The commands are in commands/.

Results for people on stdout, progress on stderr. Exit status 0; 1 where a run fails (out of memory in one line,
anything else with its traceback); 2 for bad input, with one line on stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, cast

import typer

from executor.commands import terminal
from executor.commands.doctor import doctor_command
from executor.commands.estimate import estimate_command
from executor.commands.hardware import hardware_command
from executor.commands.profile import profile_command
from executor.commands.run import run_command
from planner.contract.errors import HarmonyError
from planner.contract.output import open_standard_streams

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""What typer raises for options that do not exist or do not parse; it has no public name of its own."""

# torch takes seconds to load: each command imports what it needs, so that --help and bad input answer at once
app = typer.Typer(
    name="harmony-executor",
    help="Measure a model and a machine, and train by a schedule; files in, files out.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    no_args_is_help=True,
)
app.command("profile")(profile_command)
app.command("estimate")(estimate_command)
app.command("hardware")(hardware_command)
app.command("run")(run_command)
app.command("doctor")(doctor_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    open_standard_streams()
    status = _run(arguments)
    if "RANK" in os.environ and status:
        # a failed rank of torchrun's: threads may hang in a transfer with another one
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _run(arguments: Sequence[str] | None) -> int:
    try:
        status = app(args=arguments, standalone_mode=False)
    except UsageError as error:
        # it names the option; without a command the message is the whole help
        message = str(cast(Any, error).format_message())
        return _refuse(message if "\n" not in message else "no command; --help lists them")
    except BrokenPipeError:
        # the reader of our output has gone; nothing of it may be flushed at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except HarmonyError as error:
        return _refuse(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _refuse("interrupted")
    except RuntimeError as error:
        return _fail(error)
    return status if isinstance(status, int) else 0


def _fail(error: RuntimeError) -> int:
    """A run that failed: out of memory in one line, a rank's bug with its traceback, any other as Python shows it."""
    import torch

    from executor.launch import RunError

    if isinstance(error, torch.OutOfMemoryError):
        terminal.complain(f"out of memory: {error}")
    elif isinstance(error, RunError):
        typer.echo(f"harmony-executor: {error}", err=True)
    else:
        raise error
    return 1


def _refuse(message: str) -> int:
    terminal.complain(message)
    return 2
