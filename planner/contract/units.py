"""Sizes, rates and times as people write them: `16GiB`, `12.3GB/s`, `1.25 s`. Files hold plain bytes and seconds."""

from __future__ import annotations

import re
from decimal import Decimal

from planner.contract.errors import FormatError

_DECIMAL = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_FACTORS = _DECIMAL | _BINARY
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", re.ASCII)


def parse_bytes(text: str, option: str = "") -> int:
    """`16GiB`, `500 MB` or a plain number of bytes. option: where it was given. Raises FormatError."""
    return round(_amount(text, text, "a size looks like 16GiB, 500MB or 1048576", option))


def parse_rate(text: str, option: str = "") -> float:
    """`12.3GB/s`, or a plain number of bytes per second. option: where it was given. Raises FormatError."""
    size, slash, per = text.strip().partition("/")
    hint = "a rate looks like 12.3GB/s, 500MiB/s or 500000000"
    if slash and per.strip() != "s":
        raise FormatError(f"{option} {text!r}: {hint}".strip())
    rate = float(_amount(size, text, hint, option))
    if rate <= 0:
        raise FormatError(f"{option} {text!r}: a rate is above 0".strip())
    return rate


def _amount(size: str, text: str, hint: str, option: str) -> Decimal:
    match = _SIZE.fullmatch(size.strip())
    # case matters: a b would be bits
    if match is None or (match[2] and match[2] not in _FACTORS):
        raise FormatError(f"{option} {text!r}: {hint}".strip())
    return Decimal(match[1]) * _FACTORS[match[2] or "B"]


def format_bytes(nbytes: float) -> str:
    """`15.5 GiB`, in the largest unit of which there is at least one."""
    return _scaled(nbytes, _BINARY)


def format_rate(bytes_per_second: float) -> str:
    """`12.3 GB/s`: rates are told in powers of ten, as links are sold."""
    return f"{_scaled(bytes_per_second, {k: v for k, v in _DECIMAL.items() if k not in ('B', 'KB')})}/s"


def _scaled(amount: float, factors: dict[str, int]) -> str:
    unit, factor = "B", 1
    for name, size in factors.items():
        # from 999.95 on one decimal would read 1000.0
        if abs(amount) >= size * 0.99995:
            unit, factor = name, size
    if unit == "B":
        return f"{amount:.0f} B"
    return f"{amount / factor:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """`1.25 s`, `12.5 ms`, `3.1 us` or `2 min 05 s`, to three digits."""
    if seconds >= 99.95:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= factor * 0.9995 or unit == "us":
            amount = seconds / factor
            decimals = 2 if amount < 9.995 else 1 if amount < 99.95 else 0
            return f"{amount:.{decimals}f} {unit}"
    raise AssertionError("every time has a unit")
