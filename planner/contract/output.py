"""Where results go: looked at before the work, written whole after it. The only place that knows how a file appears."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from planner.contract.errors import FormatError

STANDARD = "-"
"""The path that stands for standard input or output."""


def open_standard_streams() -> None:
    """Where a process was started with standard streams closed, what is printed goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 (it stays open)


def check_outputs(*paths: Path | str | None, inputs: Iterable[Path | str | None] = ()) -> None:
    """Raise FormatError where nothing could be written to one of the paths: hours later would be too late to find out.

    inputs: files that are read, which no result may replace.
    """
    seen: dict[Path, Path | str] = {}
    if [str(path) for path in paths].count(STANDARD) > 1:
        raise FormatError("-: two results would go to standard output; name a file")
    read = {Path(path).resolve() for path in inputs if path is not None and str(path) != STANDARD}
    for path in paths:
        if path is None or str(path) == STANDARD:
            continue
        target = Path(path)
        if target.resolve() in read and not _is_special(target):
            raise FormatError(f"{path}: is read here too, and would be replaced; name another file")
        twin = seen.setdefault(target.resolve(), path)
        if twin is not path and not _is_special(target):
            raise FormatError(f"{path}: two results would go to one file; name another one")
        if not str(path):
            raise FormatError("an output has no name; give a path, or - for standard output")
        if target.is_dir():
            raise FormatError(f"{path}: is a folder; name a file in it")
        if not target.absolute().parent.is_dir():
            raise FormatError(f"{path}: no such folder to write to; make it first")
        writable = target if _is_special(target) else target.absolute().parent
        if not os.access(writable, os.W_OK):
            raise FormatError(f"{path}: {writable} cannot be written to; name another place")


@contextmanager
def whole(path: Path | str) -> Iterator[Path]:
    """A path to write to; what is written appears at `path` at the end, whole or not at all.

    What is no regular file (a pipe, a device) is written to as it is. Raises OSError.
    """
    target = Path(path)
    if _is_special(target):
        yield target
        return
    # a link stays one
    target = target.resolve()
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        try:
            beside.touch()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        mode = beside.stat().st_mode
        yield beside
        # some writers make a file that only its owner may read
        beside.chmod(mode)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def write_whole(path: Path | str, content: bytes) -> None:
    """Write a file whole or not at all, or to standard output. Raises OSError."""
    if str(path) == STANDARD:
        sys.stdout.buffer.write(content)
        sys.stdout.flush()
        return
    with whole(path) as beside:
        try:
            beside.write_bytes(content)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None


def _is_special(path: Path) -> bool:
    """Whether it is there and neither a file nor a folder."""
    return path.exists() and not path.is_file() and not path.is_dir()
