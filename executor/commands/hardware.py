"""`harmony-executor hardware`: a machine's devices, links and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import msgspec
import typer

from executor.commands import render, terminal
from executor.commands.options import (
    DeviceOption,
    Json,
    Output,
    Size,
    check_device,
    check_output,
)
from planner.contract import hardware as hardwares
from planner.contract import store
from planner.contract.errors import FormatError
from planner.contract.hardware import Hardware
from planner.contract.output import STANDARD
from planner.contract.units import format_seconds, parse_bytes, parse_rate

if TYPE_CHECKING:
    from executor.hardware import Sharing

SHARINGS = ("none", "fair", "static")


def hardware_command(
    device: DeviceOption = "virtual",
    devices: Annotated[
        int | None,
        typer.Option("--devices", min=1, metavar="N", help="How many; all GPUs, or 1 virtual device."),
    ] = None,
    memory: Annotated[
        Size,
        typer.Option(
            "--memory", metavar="SIZE", help="Of each device, e.g. 200MiB; for cuda a limit below its own."
        ),
    ] = None,
    reserved: Annotated[
        Size, typer.Option("--reserved", metavar="SIZE", help="Of that, not for the plan; for cuda measured.")
    ] = None,
    h2d: Annotated[
        Size, typer.Option("--h2d", metavar="RATE", help="Host to device, e.g. 500MB/s; for cuda measured.")
    ] = None,
    d2h: Annotated[Size, typer.Option("--d2h", metavar="RATE", help="Device to host.")] = None,
    latency: Annotated[
        float, typer.Option("--latency", min=0.0, metavar="SECONDS", help="Of each copy.")
    ] = 0.0,
    sharing: Annotated[
        str, typer.Option("--sharing", help="How devices share the host link: none, fair or static.")
    ] = "none",
    peer: Annotated[
        Size,
        typer.Option("--peer", metavar="RATE", help="Device to device; through the host where not given."),
    ] = None,
    compute_scale: Annotated[
        str,
        typer.Option(
            "--compute-scale",
            metavar="X,X,...",
            help="Speed relative to the profile's device, one or one each.",
        ),
    ] = "1",
    host_memory: Annotated[
        Size, typer.Option("--host-memory", metavar="SIZE", help="This machine's where not given.")
    ] = None,
    pinnable: Annotated[
        Size, typer.Option("--pinnable", metavar="SIZE", help="Of that, what can be pinned.")
    ] = None,
    update_workers: Annotated[
        int | None,
        typer.Option(
            "--update-workers", min=1, metavar="N", help="Host updates that run at once at full speed."
        ),
    ] = None,
    name: Annotated[str, typer.Option("--name", help="What to call it.")] = "",
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Describe a machine: a virtual one as asked for (its links are checked by copying), or the GPUs as they measure."""
    check_device(device)
    check_output(output, as_json)
    if device == "cuda":
        from executor.hardware import cuda_hardware

        found = _limited(cuda_hardware(devices, name), memory)
    else:
        if sharing not in SHARINGS:
            raise FormatError(f"--sharing {sharing}: use one of {', '.join(SHARINGS)}")
        asked = {"--memory": memory, "--h2d": h2d, "--d2h": d2h}
        missing = [option for option, text in asked.items() if text is None]
        if missing:
            raise FormatError(
                f"--device virtual: {', '.join(missing)} missing; say e.g. --memory 200MiB --h2d 500MB/s --d2h 500MB/s"
            )
        from executor.hardware import virtual_hardware

        found = virtual_hardware(
            devices or 1,
            parse_bytes(memory or "", "--memory"),
            h2d_bytes_per_second=parse_rate(h2d or "", "--h2d"),
            d2h_bytes_per_second=parse_rate(d2h or "", "--d2h"),
            latency_seconds=latency,
            sharing=cast("Sharing", sharing),
            peer_bytes_per_second=None if peer is None else parse_rate(peer, "--peer"),
            compute_scales=_parse_scales(compute_scale),
            reserved_bytes=0 if reserved is None else parse_bytes(reserved, "--reserved"),
            host_memory_bytes=None if host_memory is None else parse_bytes(host_memory, "--host-memory"),
            pinnable_bytes=None if pinnable is None else parse_bytes(pinnable, "--pinnable"),
            update_workers=update_workers,
            name=name or "virtual",
        )
        _warn_of_slow_links(found)
    if output is not None:
        store.save(found, output)
    if as_json:
        terminal.print_json(msgspec.to_builtins(found))
    else:
        terminal.show(render.hardware_table(found), to_stderr=output == STANDARD)


def _parse_scales(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise FormatError(f"--compute-scale {text!r}: speeds look like 1 or 1,0.5") from None


def _limited(hardware: Hardware, memory: str | None) -> Hardware:
    """GPUs of which only a part is used."""
    if memory is None:
        return hardware
    size = parse_bytes(memory, "--memory")
    for device in hardware.devices:
        if size > device.memory_bytes:
            raise FormatError(
                f"--memory {memory}: {device.name} has {device.memory_bytes} bytes; a limit is below that"
            )
    devices = tuple(msgspec.structs.replace(device, memory_bytes=size) for device in hardware.devices)
    limited = msgspec.structs.replace(hardware, devices=devices)
    hardwares.check(limited)
    return limited


def _warn_of_slow_links(hardware: Hardware) -> None:
    from executor.hardware import TOLERANCE, check_links

    for check in check_links(hardware):
        if abs(check.error) > TOLERANCE:
            terminal.complain(
                f"warning: {check.direction} of device {check.device} takes {format_seconds(check.measured_seconds)} where "
                f"its rate says {format_seconds(check.expected_seconds)} ({check.error:+.0%}); ask for slower links"
            )
