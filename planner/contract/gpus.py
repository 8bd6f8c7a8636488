"""GPUs and the buses they are on, by their published peak figures, for estimates before there is anything to measure.

Rates are dense ones with sums in float32: float32 on the ordinary cores (PyTorch multiplies so unless told otherwise),
float16 and bfloat16 on tensor cores; consumer cards have half the advertised rate there, which is with float16 sums.

    looked up in tables of others      a100-40, a100-80, h100 and h200 (tensor rate or memory rate), rtx4090; rtxa6000's memory
                                       and float32 rates, its tensor rate by the ratio of its sister A4000
    as commonly given, not looked up   all others
    measured                           the PCIe 3 rate, on a server of GTX 1080 Ti; 4 and 5 are twice and four times that

None was checked against its maker's own document; measure where it matters.
"""

from __future__ import annotations

import difflib
import re

from planner.contract.errors import FormatError
from planner.contract.hardware import DeviceSpec, Hardware, Host, HostLink
from planner.contract.profile import Noun

TERA = 1e12
GIGA = 1e9
PCIE = {3: 12.3 * GIGA, 4: 24.6 * GIGA, 5: 49.2 * GIGA}
"""Bytes per second over 16 lanes, each way, by generation."""
RESERVED_BYTES = 700 << 20
"""Context, libraries, allocator slack."""


class Gpu(Noun):
    """flops: per second, by type. bus: PCIe generation; lanes: of it. link_bytes_per_second: NVLink to another one,
    each way; None: bytes go through the host."""

    memory_bytes: int
    flops: dict[str, float]
    memory_bytes_per_second: float
    bus: int
    lanes: int = 16
    link_bytes_per_second: float | None = None


def _gpu(
    gib: float,
    float32: float,
    float16: float | None,
    rate: float,
    bus: int,
    *,
    bfloat16: bool = True,
    lanes: int = 16,
    link: float | None = None,
) -> Gpu:
    flops = {"float32": float32 * TERA}
    if float16 is not None:
        flops["float16"] = float16 * TERA
        if bfloat16:
            flops["bfloat16"] = float16 * TERA
    return Gpu(
        int(gib * (1 << 30)), flops, rate * GIGA, bus, lanes, None if link is None else link * GIGA
    )  # fmt: skip


GPUS = {
    "gtx1080ti": _gpu(11, 11.3, None, 484, 3),
    "v100-32": _gpu(32, 15.7, 125, 900, 3, bfloat16=False, link=150),
    "rtx2080ti": _gpu(11, 13.4, 53.8, 616, 3, bfloat16=False),
    "rtx3060": _gpu(12, 12.7, 25.5, 360, 4),
    "rtx3080": _gpu(10, 29.8, 59.5, 760, 4),
    "rtx3090": _gpu(24, 35.6, 71, 936, 4),
    "rtxa6000": _gpu(48, 38.7, 154.8, 768, 4),
    "a100-40": _gpu(40, 19.5, 312, 1555, 4, link=300),
    "a100-80": _gpu(80, 19.5, 312, 2039, 4, link=300),
    "rtx4060ti": _gpu(16, 22.1, 44.1, 288, 4, lanes=8),
    "rtx4080": _gpu(16, 48.7, 97.5, 717, 4),
    "rtx4090": _gpu(24, 82.6, 165.2, 1008, 4),
    "l40s": _gpu(48, 91.6, 362, 864, 4),
    "rtx5090": _gpu(32, 104.8, 209.5, 1792, 5),
    "h100": _gpu(80, 66.9, 989, 3350, 5, link=450),
    "h200": _gpu(141, 66.9, 989, 4800, 5, link=450),
}


def find_gpu(name: str) -> tuple[str, Gpu]:
    """A GPU of the catalogue: `rtx4090`, or `4090` where that is one only. Raises FormatError."""
    wanted = re.sub(r"[\s_]+", "", name.lower())
    found = [known for known in GPUS if known == wanted] or [
        known for known in GPUS if known.endswith(wanted)
    ]
    if len(found) != 1 or not wanted:
        close = ", ".join(difflib.get_close_matches(wanted, GPUS, n=3) or sorted(GPUS))
        raise FormatError(f"GPU {name!r}: the catalogue has none of that name; did you mean {close}?")
    return found[0], GPUS[found[0]]


def server(name: str, *, memory_bytes: int | None, host_bytes: int) -> tuple[Hardware, Gpu]:
    """A server of GPUs of one kind, each on a bus of its own: `4x4090`. memory_bytes: of each, where less than it has.

    Raises FormatError.
    """
    count, times, kind = name.partition("x")
    if not times or not count.isdecimal() or not 1 <= int(count) <= 64:
        raise FormatError(
            f"{name!r}: a server looks like 4x4090: how many (1 to 64), x, and a GPU of the catalogue"
        )
    known, gpu = find_gpu(kind)
    memory = gpu.memory_bytes if memory_bytes is None else memory_bytes
    if memory > gpu.memory_bytes:
        raise FormatError(f"{memory} bytes of memory: a {known} has {gpu.memory_bytes}; ask for no more")
    if memory <= RESERVED_BYTES:
        raise FormatError(
            f"{memory} bytes of memory, of which {RESERVED_BYTES} are reserved on a {known}, leave nothing; ask for more"
        )
    rate = PCIE[gpu.bus] * gpu.lanes / 16
    hardware = Hardware(
        devices=tuple(
            DeviceSpec(f"{known}-{i}", memory, RESERVED_BYTES, host_link=i) for i in range(int(count))
        ),
        host_links=tuple(HostLink(rate, rate, 1e-5) for _ in range(int(count))),
        # a step of the optimizer uses all cores
        host=Host(host_bytes, int(0.9 * host_bytes), 1),
        name=f"{count}x {known} (published figures)",
        peer_bytes_per_second=gpu.link_bytes_per_second,
    )
    return hardware, gpu
