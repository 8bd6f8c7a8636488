"""The actions of a program and their text: `str(action) == "F3.0"` and `parse_entry("F3.0").action == action`.

    F3.0        forward of forward pack 3, microbatch 0        compute
    B3.0        (recompute and) backward of backward pack 3    compute
    in:WF3      host to device                                 h2d
    out:S3.0    device to host                                 d2h
    send:Y3.0>1 / recv:Y3.0>1   to device 1                    send / recv
    reduce:G3/1 replica 1's share of a gradient sum            reduce
    update:3    optimizer step of backward pack 3              host, or compute on the device
    agree       norm and overflow over all gradients           host
    free:WF3    from here the bytes may be used again          any

A value is what memory holds:

    WF3 WB3     weights and buffers of a forward / backward pack
    I3.0 X3.0   what forward / backward pack 3 needs from the host for a microbatch: batch tensors, stash
    Y3.0        what forward pack 3 makes for later forward packs; Y3.0>1 its copy on device 1
    S3.0        what forward pack 3 makes only for the recompute of backward packs
    D3.0        gradients of what backward pack 3 was given; D3.0>1 their copy on device 1
    AF3.0       saved activations of backward pack 3, kept or offloaded instead of recomputed
    AB3.0       offloaded ones that came back
    G3 K3       weight gradients, optimizer state of backward pack 3

`/r` names the replica of weights, gradients and states where there are several; a microbatch belongs to
one replica anyway. ` after free:V` makes an action wait for a free; `free:V@-1` is the one of the
iteration before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from planner.contract.errors import FormatError

STREAMS = ("compute", "h2d", "d2h", "send", "recv", "reduce", "host")


class _Frozen(msgspec.Struct, frozen=True, gc=False):
    """Immutable, compared and hashed by its fields."""


class Value(_Frozen, frozen=True):
    """What memory holds; see the table above. Absent parts are -1; `device` is a copy's device."""

    kind: str
    pack: int
    microbatch: int = -1
    replica: int = -1
    device: int = -1

    def __str__(self) -> str:
        text = f"{self.kind}{self.pack}"
        if self.microbatch >= 0:
            text += f".{self.microbatch}"
        if self.replica >= 0:
            text += f"/{self.replica}"
        if self.device >= 0:
            text += f">{self.device}"
        return text


class Forward(_Frozen, frozen=True, tag="F"):
    pack: int
    microbatch: int

    def __str__(self) -> str:
        return f"F{self.pack}.{self.microbatch}"


class Backward(_Frozen, frozen=True, tag="B"):
    pack: int
    microbatch: int

    def __str__(self) -> str:
        return f"B{self.pack}.{self.microbatch}"


class SwapIn(_Frozen, frozen=True, tag="in"):
    value: Value

    def __str__(self) -> str:
        return f"in:{self.value}"


class SwapOut(_Frozen, frozen=True, tag="out"):
    value: Value

    def __str__(self) -> str:
        return f"out:{self.value}"


class Send(_Frozen, frozen=True, tag="send"):
    value: Value

    def __str__(self) -> str:
        return f"send:{self.value}"


class Receive(_Frozen, frozen=True, tag="recv"):
    value: Value

    def __str__(self) -> str:
        return f"recv:{self.value}"


class Reduce(_Frozen, frozen=True, tag="reduce"):
    value: Value

    def __str__(self) -> str:
        return f"reduce:{self.value}"


class Update(_Frozen, frozen=True, tag="update"):
    pack: int

    def __str__(self) -> str:
        return f"update:{self.pack}"


class Agree(_Frozen, frozen=True, tag="agree"):
    def __str__(self) -> str:
        return "agree"


class Free(_Frozen, frozen=True, tag="free"):
    value: Value

    def __str__(self) -> str:
        return f"free:{self.value}"


Action = Forward | Backward | SwapIn | SwapOut | Send | Receive | Reduce | Update | Agree | Free


class Wait(_Frozen, frozen=True):
    """A free that must be over first, `ago` iterations before this one (0 or 1)."""

    free: Free
    ago: int = 0

    def __str__(self) -> str:
        return f"{self.free}@-{self.ago}" if self.ago else str(self.free)


class Entry(_Frozen, frozen=True):
    """An action at its place in a stream, with the frees it waits for beyond what the rules demand."""

    action: Action
    after: tuple[Wait, ...] = ()

    def __str__(self) -> str:
        if not self.after:
            return str(self.action)
        return f"{self.action} after {' '.join(map(str, self.after))}"


class Lane(_Frozen, frozen=True):
    """One stream of one device: its entries run in this order."""

    device: int
    stream: str
    entries: tuple[Entry, ...]


Lanes = tuple[Lane, ...]

# one text for one number: no leading zeros, no digits of other scripts
_NUMBER = "(0|[1-9][0-9]*)"
_VALUE = re.compile(rf"([A-Z]+){_NUMBER}(?:\.{_NUMBER})?(?:/{_NUMBER})?(?:>{_NUMBER})?")
_COMPUTE = re.compile(rf"([FB]){_NUMBER}\.{_NUMBER}")
_UPDATE = re.compile(rf"update:{_NUMBER}")
_WHOLE = ("WF", "WB", "G", "K")
_PIECES = ("I", "X", "Y", "S", "D", "A", "AF", "AB")
_ON_VALUES: dict[str, type[SwapIn | SwapOut | Send | Receive | Reduce | Free]] = {
    "in": SwapIn,
    "out": SwapOut,
    "send": Send,
    "recv": Receive,
    "reduce": Reduce,
    "free": Free,
}


def parse_value(text: str) -> Value:
    """The value that prints as `text`. Raises FormatError."""
    match = _VALUE.fullmatch(text)
    if match is None:
        raise FormatError(f"{text!r} is no value; one looks like WF3, X3.0, G3/1 or Y3.0>1")
    kind, pack, microbatch, replica, device = match.groups()
    value = Value(
        kind, int(pack), *(-1 if part is None else int(part) for part in (microbatch, replica, device))
    )
    if not (kind in _WHOLE and microbatch is None and device is None) and not (
        kind in _PIECES and microbatch is not None and replica is None and (device is None or kind in "YD")
    ):
        raise FormatError(
            f"{text!r} is no value; {', '.join(_WHOLE)} have a pack, {', '.join(_PIECES)} a pack and microbatch"
        )
    return value


def parse_action(text: str) -> Action:
    """The action that prints as `text`. Raises FormatError."""
    if text == "agree":
        return Agree()
    match = _COMPUTE.fullmatch(text)
    if match is not None:
        kind = Forward if match[1] == "F" else Backward
        return kind(int(match[2]), int(match[3]))
    match = _UPDATE.fullmatch(text)
    if match is not None:
        return Update(int(match[1]))
    verb, colon, rest = text.partition(":")
    if colon and verb in _ON_VALUES:
        return _ON_VALUES[verb](parse_value(rest))
    raise FormatError(
        f"{text!r} is no action; one looks like F3.0, B3.0, in:WF3, send:Y3.0>1, update:3 or free:WF3"
    )


def parse_entry(text: str) -> Entry:
    """The entry that prints as `text`. Raises FormatError."""
    action, after, waits = text.partition(" after ")
    if not after:
        return Entry(parse_action(action))
    return Entry(parse_action(action), tuple(_parse_wait(wait) for wait in waits.split(" ")))


def _parse_wait(text: str) -> Wait:
    name, at, ago = text.partition("@-")
    free = parse_action(name)
    if not isinstance(free, Free) or (at and ago != "1"):
        raise FormatError(
            f"{text!r} is nothing to wait for; name a free, of this iteration or with @-1 of the one before"
        )
    return Wait(free, 1 if at else 0)


def parse_lane(device: int, stream: str, texts: Iterable[str]) -> Lane:
    """A lane from its action texts. Raises FormatError that names gpuD/stream[i]."""
    entries = []
    for i, text in enumerate(texts):
        try:
            entries.append(parse_entry(text))
        except FormatError as error:
            raise FormatError(f"gpu{device}/{stream}[{i}]: {error}") from None
    return Lane(device, stream, tuple(entries))
