"""Load and save the files; the only place that knows paths, versions and JSON.

A file is refused with its path, the place inside it and what to do; a version by naming both versions.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from planner.contract import counts as countings
from planner.contract import fixed as fixeds
from planner.contract import hardware as hardwares
from planner.contract import profile as profiles
from planner.contract import schedule as schedules
from planner.contract import trace as traces
from planner.contract.counts import Counts
from planner.contract.errors import FormatError
from planner.contract.fixed import Fixed
from planner.contract.hardware import Hardware
from planner.contract.output import STANDARD, write_whole
from planner.contract.profile import Profile
from planner.contract.schedule import Configuration, Schedule
from planner.contract.trace import Trace, TraceFile

_KINDS = {
    module.SCHEMA.rpartition("/")[0] for module in (countings, fixeds, hardwares, profiles, schedules, traces)
}

T = TypeVar("T")


class _InTrace(msgspec.Struct, frozen=True):
    schema: str = ""


class _Header(msgspec.Struct, frozen=True):
    """What names a file's kind; a trace has it one level down."""

    schema: str = ""
    harmony: _InTrace = _InTrace()

    @property
    def kind(self) -> str:
        return self.schema or self.harmony.schema


def load_profile(path: str | Path) -> Profile:
    """Raises FormatError, OSError."""
    profile = _load(path, Profile, profiles.SCHEMA)
    _checked(path, lambda: profiles.check(profile))
    return profile


def load_hardware(path: str | Path) -> Hardware:
    """Raises FormatError, OSError."""
    hardware = _load(path, Hardware, hardwares.SCHEMA)
    _checked(path, lambda: hardwares.check(hardware))
    return hardware


def load_schedule(path: str | Path) -> Schedule:
    """Raises FormatError, OSError."""
    schedule = _load(path, Schedule, schedules.SCHEMA)
    _checked(path, lambda: schedules.check(schedule))
    _checked(path, lambda: schedules.parse_program(schedule.programs.train))
    return schedule


def load_counts(path: str | Path) -> Counts:
    """Raises FormatError, OSError."""
    found = _load(path, Counts, countings.SCHEMA)
    _checked(path, lambda: countings.check(found))
    return found


def load_fixed(path: str | Path) -> Fixed | Configuration:
    """A plan that is given: a `harmony-fixed/1` file, or the configuration of a schedule. Raises FormatError, OSError."""
    if str(path) == STANDARD:
        raise FormatError("-: name a file here, it is looked at before it is read")
    if _header(path, _read(path)).kind == schedules.SCHEMA:
        return load_schedule(path).configuration
    return _load(path, Fixed, fixeds.SCHEMA)


def load_trace(path: str | Path) -> Trace:
    """Raises FormatError, OSError."""
    text = _read(path)
    _check_schema(path, _header(path, text).kind, traces.SCHEMA)
    file = _decode(path, text, TraceFile)
    try:
        return traces.from_chrome(file)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


def load_schedule_or_trace(path: str | Path) -> Schedule | Trace:
    """Whichever of the two the file is. Raises FormatError, OSError."""
    if str(path) == STANDARD:
        raise FormatError("-: name a file here, it is looked at before it is read")
    if _header(path, _read(path)).kind == schedules.SCHEMA:
        return load_schedule(path)
    return load_trace(path)


def save(noun: Profile | Hardware | Schedule | Trace | Counts, path: str | Path) -> None:
    """Write a file whole or not at all. Same noun, same bytes."""
    write_whole(path, encode(noun))


def encode(noun: Profile | Hardware | Schedule | Trace | Counts) -> bytes:
    """The JSON of a file, its schema first, one action or span a line; counts, which nobody reads, on one."""
    if isinstance(noun, Trace):
        body = msgspec.to_builtins(traces.to_chrome(noun))
        body["harmony"] = {"schema": noun.schema} | body["harmony"]
    else:
        body = {"schema": noun.schema} | msgspec.to_builtins(noun)
    text = msgspec.json.encode(body)
    return (text if isinstance(noun, Counts) else msgspec.json.format(text, indent=1)) + b"\n"


def schedule_hash(schedule: Schedule) -> str:
    """Names a schedule's configuration and program."""
    text = msgspec.json.encode(
        [_without_defaults(schedule.configuration), _without_defaults(schedule.programs)]
    )
    return hashlib.sha256(text).hexdigest()[:16]


def _without_defaults(value: Any) -> Any:
    """Plain data without fields that have their default. msgspec leaves out defaults by identity, so what
    it leaves out depends on where an object came from."""
    if isinstance(value, tuple):
        return [_without_defaults(item) for item in value]
    if not isinstance(value, msgspec.Struct):
        return value
    fields = msgspec.structs.fields(value)
    return {f.name: _without_defaults(v) for f in fields if (v := getattr(value, f.name)) != f.default}


def json_schemas() -> dict[str, dict[str, Any]]:
    """The JSON Schema of each file, by file name."""
    types = {
        "profile": Profile,
        "hardware": Hardware,
        "schedule": Schedule,
        "trace": TraceFile,
        "fixed": Fixed,
        "counts": Counts,
    }
    return {f"{name}.schema.json": msgspec.json.schema(kind) for name, kind in types.items()}


def _read(path: str | Path) -> bytes:
    if str(path) == STANDARD:
        return sys.stdin.buffer.read()
    return Path(path).read_bytes()


def _load(path: str | Path, kind: type[T], expected: str) -> T:
    text = _read(path)
    _check_schema(path, _header(path, text).kind, expected)
    return _decode(path, text, kind)


def _decode(path: str | Path, text: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise FormatError(f"{path}: {error}") from None
    except msgspec.DecodeError as error:
        raise FormatError(f"{path}: is no whole JSON file in UTF-8 ({error}); make it again") from None
    except RecursionError:
        raise FormatError(f"{path}: is nested too deeply to be one of our files; make it again") from None


def _header(path: str | Path, text: bytes) -> _Header:
    if not text.strip():
        raise FormatError(f"{path}: is empty; make it again")
    return _decode(path, text, _Header)


def _check_schema(path: str | Path, found: str, expected: str) -> None:
    kind = found.rpartition("/")[0]
    needed = expected.rpartition("/")[0]
    if kind in _KINDS and kind != needed:
        raise FormatError(
            f"{path}: this is a {kind.removeprefix('harmony-')} file ({found}), "
            f"needed here is a {needed.removeprefix('harmony-')} file ({expected})"
        )
    if found != expected:
        raise FormatError(
            f"{path}: its schema is {found or 'missing'!r}, this version reads {expected!r}; "
            f"make the file again with this version, or use the version that wrote it"
        )


def _checked(path: str | Path, check: Any) -> None:
    try:
        check()
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
