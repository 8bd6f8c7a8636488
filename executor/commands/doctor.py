"""`harmony-executor doctor`: what limits runs on this machine, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict
from typing import cast

import typer
from rich.table import Table

from executor.commands import terminal
from executor.commands.options import DeviceOption, Json, check_device_name


def doctor_command(device: DeviceOption = "virtual", as_json: Json = False) -> None:
    """Look at memory, pinning, shared memory, threads and GPUs; exit status 1 where something stands in the way."""
    check_device_name(device)
    from executor.machine import findings
    from executor.options import DeviceKind

    found = list(findings(cast(DeviceKind, device)))
    if as_json:
        terminal.print_json([asdict(finding) for finding in found])
    else:
        table = Table(box=None)
        for name in ("", "found", "problem", "remedy"):
            table.add_column(name)
        for finding in found:
            table.add_row(finding.name, finding.found, finding.problem, finding.remedy)
        terminal.show(table)
    if any(finding.problem for finding in found):
        raise typer.Exit(1)
