"""Token ids of samples: drawn at random, or the bytes of text files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from planner.contract.errors import HarmonyError

TokenSource = Callable[[torch.Generator, int], Tensor]
"""source(generator, num_samples): [samples, positions]."""


def token_source(vocabulary: int, length: int, data: Path | None) -> TokenSource:
    """Samples of `length` ids below `vocabulary`; windows of the text at `data` where that is given.

    Raises HarmonyError: too small a vocabulary, no text, or too little.
    """
    text = None if data is None else _read_bytes(data, vocabulary, length)

    def draw(generator: torch.Generator, num_samples: int) -> Tensor:
        if text is None:
            return torch.randint(0, vocabulary, (num_samples, length), generator=generator)
        starts = torch.randint(0, len(text) - length + 1, (num_samples,), generator=generator)
        return torch.stack([text[start : start + length] for start in starts.tolist()]).long()

    return draw


def _read_bytes(path: Path, vocabulary: int, length: int) -> Tensor:
    """The text files at a path, one after the other, as bytes."""
    text = _joined(path)
    if vocabulary < 256:
        raise HarmonyError(
            f"--data {path}: bytes need a vocabulary of 256, the model has {vocabulary}; add vocab_size=256"
        )
    if len(text) < length:
        raise HarmonyError(f"--data {path}: {len(text)} bytes of text, one sample needs {length}")
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())


def fingerprint(path: Path) -> str:
    """The same for the same text, wherever it lies. Raises HarmonyError."""
    return hashlib.sha256(_joined(path)).hexdigest()[:16]


def _joined(path: Path) -> bytes:
    if not path.exists():
        raise HarmonyError(f"--data {path}: no such file or folder")
    files = (
        [path]
        if path.is_file()
        else sorted(p for p in path.rglob("*") if p.is_file() and not _is_hidden(p, path))
    )
    return b"\n".join(
        content for content in (file.read_bytes() for file in files) if content and b"\0" not in content
    )


def _is_hidden(path: Path, root: Path) -> bool:
    return any(
        part.startswith(".") or part in ("build", "__pycache__") for part in path.relative_to(root).parts
    )
