"""The errors that users see: one clear line each, exit status by class."""

from __future__ import annotations


class HarmonyError(ValueError):
    """Bad input, said in one line: where, what, both numbers, what to do."""


class FormatError(HarmonyError):
    """A file is not what it should be; the message carries the path inside the file."""


class VerifyError(HarmonyError):
    """A schedule breaks a rule; the message names the device, the stream, the place and the action."""


class InfeasibleError(HarmonyError):
    """No schedule fits; the message names what does not, the bytes, the limit and the remedy."""
