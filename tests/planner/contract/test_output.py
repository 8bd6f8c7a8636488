"""Files appear whole; what is no file is written to, never replaced; what cannot be written is said before the work."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from planner.contract.errors import FormatError
from planner.contract.output import check_outputs, whole, write_whole


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    target.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError):
        write_half(target)
    assert target.read_bytes() == b"old"
    write_whole(target, b"new")
    assert target.read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    check_outputs(pipe)
    write_whole(pipe, b"through")
    reader.join(10)
    assert read == [b"through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_what_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    check_outputs(None, "-", tmp_path / "new.json")
    for path, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "a.json", "no such folder to write to"),
        ("", "has no name"),
        ("/proc/no/such", "no such folder"),
    ):
        with pytest.raises(FormatError, match=message):
            check_outputs(path)


def write_half(target: Path) -> None:
    with whole(target) as beside:
        beside.write_bytes(b"half")
        raise ZeroDivisionError


def test_two_results_do_not_go_to_one_file(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="two results would go to one file"):
        check_outputs(tmp_path / "a", None, tmp_path / "b" / ".." / "a")


def test_an_error_names_the_file_and_not_what_is_written_first() -> None:
    with pytest.raises(OSError, match="'/proc/x'"):
        write_whole("/proc/x", b"")
