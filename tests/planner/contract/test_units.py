"""Sizes, rates and times as people write them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.contract.errors import FormatError
from planner.contract.units import format_bytes, format_rate, format_seconds, parse_bytes, parse_rate


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1048576", 1048576),
        ("512B", 512),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("200MiB", 200 * 2**20),
        ("500 MB", 500_000_000),
        (" 16GiB ", 16 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("0.1GB", 100_000_000),
        ("2TB", 2 * 10**12),
    ],
)
def test_size_is_read_exactly(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "16Gb", "16gib", "-1GiB", "1e9", "nan", "16 GiB B", "1,5GB", "16GB/s", "1  GB", "٣GB", "G"],
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(FormatError, match="a size looks like 16GiB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("500MB/s", 5e8),
        ("12.3GB/s", 12.3e9),
        ("1GiB/s", 2.0**30),
        ("500 MB / s", 5e8),
        ("1000", 1e3),
        ("2GB", 2e9),
    ],
)
def test_rate_is_read_exactly(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["500MB/h", "500Mb/s", "/s", "fast", "-1GB/s", "1GB/s/s"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match=re.escape(repr(text))):
        parse_rate(text)


def test_rate_of_nothing_is_refused() -> None:
    with pytest.raises(FormatError, match="above 0"):
        parse_rate("0GB/s")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1000, "1000 B"),
        (1024, "1.0 KiB"),
        (200 * 2**20, "200.0 MiB"),
        (2**30 - 1, "1.0 GiB"),
        (15.5 * 2**30, "15.5 GiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_size_is_told_in_its_unit(nbytes: float, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_rate_is_told_in_powers_of_ten() -> None:
    assert format_rate(5e8) == "500.0 MB/s"
    assert format_rate(12.3e9) == "12.3 GB/s"
    assert format_rate(12) == "12 B/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 us"),
        (3.1e-6, "3.10 us"),
        (0.0125, "12.5 ms"),
        (0.9999, "1.00 s"),
        (1.25, "1.25 s"),
        (9.999, "10.0 s"),
        (99.99, "1 min 40 s"),
        (125.2, "2 min 05 s"),
        (7260, "2 h 01 min"),
    ],
)
def test_time_is_told_in_its_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.integers(0, 2**50))
def test_size_is_read_back_within_its_rounding(nbytes: int) -> None:
    read = parse_bytes(format_bytes(nbytes))
    assert abs(read - nbytes) <= max(0.05 * nbytes + 1, 1)


@given(st.integers(1, 2**40))
def test_told_rate_is_read_back_within_its_rounding(rate: int) -> None:
    assert parse_rate(format_rate(rate)) == pytest.approx(rate, rel=0.06)
