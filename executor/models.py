"""Where a model comes from: `hf:NAME?key=value`, `path/to/file.py:function` or `module:function`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.contract.errors import HarmonyError

Batch = dict[str, Tensor]
DEFAULT_SEQUENCE_LENGTH = 128


@dataclass(frozen=True, eq=False)
class Workload:
    """A model, where its batches come from, and its loss.

    draw(generator, num_samples): every tensor has its samples in dimension 0.
    loss(model, batch): the mean over the samples of the batch it is given; it calls the model.
    """

    model: nn.Module
    draw: Callable[[torch.Generator, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]


def load_workload(spec: str, *, seed: int, data: Path | None = None) -> Workload:
    """The workload that a spec names; random weights come from `seed`. Raises HarmonyError."""
    torch.manual_seed(seed)
    if spec.startswith("hf:"):
        workload = _from_transformers(spec, data)
    else:
        if data is not None:
            raise HarmonyError(f"--data {data}: only hf: models read it; {spec!r} draws its own batches")
        workload = _from_function(spec)
    workload.model.train()
    return workload


def _from_function(spec: str) -> Workload:
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise HarmonyError(
            f"--model {spec!r}: say hf:NAME?key=value, path/to/file.py:function or module:function"
        )
    module = _load_file(Path(where)) if where.endswith(".py") else _import(where)
    function = getattr(module, name, None)
    if not callable(function):
        raise HarmonyError(f"--model {spec!r}: {where} has no function {name!r}")
    made = function()
    if isinstance(made, tuple) and len(made) == 3:
        made = Workload(*made)
    if not isinstance(made, Workload):
        raise HarmonyError(
            f"--model {spec!r}: {name}() must return a Workload or (model, draw, loss), not {type(made).__name__}"
        )
    return made


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise HarmonyError(f"--model {path}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise HarmonyError(f"--model {name}: cannot be imported: {error}") from None


def _from_transformers(spec: str, data: Path | None) -> Workload:
    try:
        from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError:
        raise HarmonyError(f"--model {spec}: needs transformers; pip install 'harmony-train[hf]'") from None
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    name, _, query = spec.removeprefix("hf:").partition("?")
    wanted = _options(spec, query)
    length = wanted.pop("seq", None)
    try:
        defaults = AutoConfig.for_model(name)
    except ValueError:
        close = ", ".join(difflib.get_close_matches(name, CONFIG_MAPPING.keys(), n=3)) or "gpt2, llama, ..."
        raise HarmonyError(
            f"--model {spec}: transformers knows no model type {name!r}; did you mean {close}?"
        ) from None
    overrides = {key: _typed(spec, key, text, defaults) for key, text in wanted.items()}
    # ids beyond a smaller vocabulary would only draw warnings
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    try:
        config = AutoConfig.for_model(name, **{"use_cache": False} | special | overrides)
        positions = getattr(config, "max_position_embeddings", DEFAULT_SEQUENCE_LENGTH)
        sequence_length = _sequence_length(spec, length, positions)
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except HarmonyError:
        raise
    except Exception as error:  # each model class checks its configuration in a way of its own
        cause = str(error).strip().splitlines() or [type(error).__name__]
        raise HarmonyError(f"--model {spec}: transformers cannot build it: {cause[0]}") from error
    return Workload(model, _token_source(config.vocab_size, sequence_length, data), next_token_loss)


def _options(spec: str, query: str) -> dict[str, str]:
    """The key=value pairs of a spec, each key once."""
    found: dict[str, str] = {}
    for part in query.split("&") if query else []:
        key, equals, text = part.partition("=")
        if not (key and equals and text):
            raise HarmonyError(f"--model {spec}: {part!r} is no key=value")
        if key in found:
            raise HarmonyError(f"--model {spec}: {key} is given twice, as {found[key]} and as {text}")
        found[key] = text
    return found


def _sequence_length(spec: str, text: str | None, positions: int) -> int:
    """Tokens a sample: one to start from and at least one to predict."""
    if text is None:
        return min(positions, DEFAULT_SEQUENCE_LENGTH)
    if not text.isdecimal() or not 2 <= int(text) <= positions:
        raise HarmonyError(
            f"--model {spec}: seq={text} must be a number from 2 to the model's {positions} positions"
        )
    return int(text)


def _typed(spec: str, key: str, text: str, defaults: Any) -> Any:
    """A config value from its text, with the type of the config's default."""
    key = getattr(defaults, "attribute_map", {}).get(key, key)
    known = [k for k in defaults.to_dict() if not k.startswith("_")]
    if not hasattr(defaults, key) or callable(getattr(defaults, key)):
        close = ", ".join(difflib.get_close_matches(key, known, n=3)) or ", ".join(sorted(known)[:8])
        raise HarmonyError(f"--model {spec}: its config has no {key!r}; did you mean {close}?")
    default = getattr(defaults, key)
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if default is None or isinstance(default, int):
            return int(text)
        if isinstance(default, (float, str)):
            return type(default)(text)
    except (KeyError, ValueError):
        kind = "int" if default is None else type(default).__name__
        raise HarmonyError(f"--model {spec}: {key}={text!r} is no {kind}") from None
    raise HarmonyError(f"--model {spec}: {key} is a {type(default).__name__}, which cannot be given here")


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of each token given those before it; tokens: [samples, positions]."""
    tokens = batch["tokens"]
    logits = model(input_ids=tokens).logits
    predicted = logits[:, :-1].reshape(-1, logits.shape[-1])
    return functional.cross_entropy(predicted.float(), tokens[:, 1:].reshape(-1))


def _token_source(vocabulary: int, length: int, data: Path | None) -> Callable[[torch.Generator, int], Batch]:
    text = None if data is None else _read_bytes(data, vocabulary, length)

    def draw(generator: torch.Generator, num_samples: int) -> Batch:
        if text is None:
            return {"tokens": torch.randint(0, vocabulary, (num_samples, length), generator=generator)}
        starts = torch.randint(0, len(text) - length + 1, (num_samples,), generator=generator)
        return {"tokens": torch.stack([text[start : start + length] for start in starts.tolist()]).long()}

    return draw


def _read_bytes(path: Path, vocabulary: int, length: int) -> Tensor:
    """The text files at a path, one after the other, as bytes."""
    if vocabulary < 256:
        raise HarmonyError(
            f"--data {path}: bytes need a vocabulary of 256, the model has {vocabulary}; add vocab_size=256"
        )
    if not path.exists():
        raise HarmonyError(f"--data {path}: no such file or folder")
    files = (
        [path]
        if path.is_file()
        else sorted(p for p in path.rglob("*") if p.is_file() and not _is_hidden(p, path))
    )
    parts = [content for content in (file.read_bytes() for file in files) if content and b"\0" not in content]
    text = b"\n".join(parts)
    if len(text) < length:
        raise HarmonyError(f"--data {path}: {len(text)} bytes of text, one sample needs {length}")
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())


def _is_hidden(path: Path, root: Path) -> bool:
    return any(
        part.startswith(".") or part in ("build", "__pycache__") for part in path.relative_to(root).parts
    )
