"""`harmony-executor run train.py`: a script with a training loop of its own, one process a device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from planner.contract.errors import FormatError, HarmonyError

OF_SCRIPTS = {"schedule_file", "devices", "arguments"}


def is_script(name: str | None) -> bool:
    """Whether `run` is asked for a script rather than a schedule."""
    return name is not None and name.endswith(".py")


def was_given(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def run_script(context: typer.Context, script: str, devices: int, arguments: Sequence[str]) -> None:
    """Run a script in a process for each device, as torchrun does. Raises HarmonyError where it does not end well."""
    for name in context.params:
        if name not in OF_SCRIPTS and was_given(context, name):
            option = f"--{name.replace('_', '-')}"
            raise FormatError(f"{option}: not with {script}, whose own loop says it")
    if not Path(script).is_file():
        raise FormatError(f"{script}: no such file")
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    try:
        main(["--standalone", "--nproc-per-node", str(devices), script, *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"exit status {failure.exitcode}" if failure.exitcode >= 0 else failure.signal_name()
        raise HarmonyError(f"{script}: rank {rank} ended with {how}; what it printed says why") from None
