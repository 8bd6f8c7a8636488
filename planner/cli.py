"""`harmony-planner`: plan, frontier, verify, simulate, show, compare, calibrate, what-if, report; they are in commands/.

Results for people on stdout, progress on stderr. Exit status 0; 1 where a check that was asked for does not
hold; 2 for bad input or an infeasible problem, with one line on stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from planner.commands.compare import calibrate_command, compare_command
from planner.commands.options import complain
from planner.commands.plan import frontier_command, plan_command
from planner.commands.report import report_command
from planner.commands.show import show_command, simulate_command, verify_command
from planner.commands.what_if import what_if_command
from planner.contract.output import open_standard_streams

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""What typer raises for options that do not exist or do not parse; it has no public name of its own."""

app = typer.Typer(
    name="harmony-planner",
    help="Plan how to train a network that is larger than GPU memory; files in, files out, no GPU needed.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.command("plan")(plan_command)
app.command("frontier")(frontier_command)
app.command("verify")(verify_command)
app.command("simulate")(simulate_command)
app.command("show")(show_command)
app.command("compare")(compare_command)
app.command("calibrate")(calibrate_command)
app.command("what-if")(what_if_command)
app.command("report")(report_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    open_standard_streams()
    try:
        status = app(args=arguments, standalone_mode=False)
    except UsageError as error:
        message: str = getattr(error, "format_message", lambda: "")()
        return _refuse(message or "no command given")
    except BrokenPipeError:
        # the reader of our output has gone; nothing of it may be flushed at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except ValueError as error:
        return _refuse(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _refuse("interrupted")
    return status if isinstance(status, int) else 0


def _refuse(message: str) -> int:
    complain(message)
    return 2
