"""`hf:NAME?key=value` specs: a transformers model from its configuration, with random weights, batches and a loss.

    task            batch                                         loss
    causal          tokens                                        of each token given those before it
    seq2seq         tokens, targets                               of the targets, given the tokens
    masked          tokens (some hidden), targets                 of the hidden tokens
    pretraining     the same, and follows (a class a sample)      of the hidden tokens, plus of the class
    classification  tokens, labels                                of the label
    image           pixels, labels                                of the label

The same number of tokens is hidden in each sample, so that a mean over tokens is a mean over samples.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.text import TokenSource, token_source
from executor.workload import Batch, Workload
from planner.contract.errors import HarmonyError

DEFAULT_SEQUENCE_LENGTH = 128
DEFAULT_IMAGE_SIZE = 224
HIDDEN_SHARE = 0.15
"""Of a sample's tokens, as in BERT (Devlin and others, NAACL 2019, section 3.1)."""
IGNORED = -100
"""A target that transformers' losses leave out."""
CLASS_LABELS = dict.fromkeys(("bert", "mobilebert", "megatron-bert", "fnet"), "next_sentence_label") | {
    "albert": "sentence_order_label"
}
"""Models that are pre-trained with a class of the sample beside hidden tokens, and what they call it."""
IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
"""Options that transformers takes beside the configuration."""

# ids beyond a smaller vocabulary would only draw warnings
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@dataclass(frozen=True)
class _Task:
    """auto_class: of transformers. mapping: the model types that it knows, of those `only`. reads_text: takes --data."""

    auto_class: str
    mapping: str
    make: Callable[[_Request, Any], tuple[Callable[[torch.Generator, int], Batch], Callable[..., Tensor]]]
    reads_text: bool = True
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Request:
    """A spec in parts, without what is the configuration's."""

    spec: str
    name: str
    options: dict[str, str]
    data: Path | None

    def number(self, key: str, default: int, least: int, most: int | None = None, of: str = "") -> int:
        """An option that counts something. Raises HarmonyError."""
        text = self.options.get(key)
        if text is None:
            return default
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            upto = f" to the model's {most} {of}" if most is not None else " on"
            raise HarmonyError(f"--model {self.spec}: {key}={text} must be a number from {least}{upto}")
        return int(text)


def make_workload(spec: str, data: Path | None) -> Workload:
    """The workload that an `hf:` spec names. Raises HarmonyError."""
    try:
        import transformers
        from transformers.utils import logging
    except ImportError:
        raise HarmonyError(f"--model {spec}: needs transformers; pip install 'harmony-train[hf]'") from None
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    name, _, query = spec.removeprefix("hf:").partition("?")
    wanted = _options(spec, query)
    options = {
        key: wanted.pop(key) for key in ("seq", "image", "task", "lora", *IMPLEMENTATIONS) if key in wanted
    }
    request = _Request(spec, name, options, data)
    try:
        defaults = transformers.AutoConfig.for_model(name)
    except ValueError:
        known = transformers.CONFIG_MAPPING.keys()
        close = ", ".join(difflib.get_close_matches(name, known, n=3)) or "gpt2, llama, ..."
        raise HarmonyError(
            f"--model {spec}: transformers knows no model type {name!r}; did you mean {close}?"
        ) from None
    task = _task_of(request)
    if data is not None and not task.reads_text:
        raise HarmonyError(
            f"--data {data}: text has no labels for the task of {spec}; it draws its own batches"
        )
    overrides = {key: _typed(spec, key, text, defaults) for key, text in wanted.items()}
    _check_counts(spec, overrides)
    special = NO_SPECIAL_TOKENS | (
        {"decoder_start_token_id": 0, "pad_token_id": 0} if task is SEQ2SEQ else {}
    )
    chosen = {key: options[key] for key in IMPLEMENTATIONS if key in options}
    try:
        config = transformers.AutoConfig.for_model(name, **{"use_cache": False} | special | overrides)
        draw, loss = task.make(request, config)
        model = getattr(transformers, task.auto_class).from_config(config, **chosen)
    except HarmonyError:
        raise
    except Exception as error:  # each model class checks its configuration in a way of its own
        cause = str(error).strip().splitlines() or [type(error).__name__]
        raise HarmonyError(f"--model {spec}: transformers cannot build it: {cause[0]}") from error
    if task.auto_class == CLASSIFIER:
        # models that read the last token look for padding, of which there is none
        config.pad_token_id = config.vocab_size
    if "lora" in options:
        model = _with_lora(model, request)
    return Workload(model, draw, loss)


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


def _check_counts(spec: str, overrides: dict[str, Any]) -> None:
    """Some model classes build something else of a count below 1, and say nothing."""
    for key, value in overrides.items():
        is_count = key.startswith(("n_", "num_")) or key.endswith(("_size", "_dim", "_layers", "_heads"))
        if is_count and isinstance(value, int) and value < 1:
            raise HarmonyError(f"--model {spec}: {key}={value} must be at least 1")


def _typed(spec: str, key: str, text: str, defaults: Any) -> Any:
    """A config value from its text, with the type of the config's default; lists are comma-separated."""
    key = getattr(defaults, "attribute_map", {}).get(key, key)
    known = [k for k in defaults.to_dict() if not k.startswith("_")]
    if not hasattr(defaults, key) or callable(getattr(defaults, key)):
        close = ", ".join(difflib.get_close_matches(key, known, n=3)) or ", ".join(sorted(known)[:8])
        raise HarmonyError(f"--model {spec}: its config has no {key!r}; did you mean {close}?")
    default = getattr(defaults, key)
    try:
        if isinstance(default, (list, tuple)) and default:
            return [_scalar(part, default[0]) for part in text.split(",")]
        return _scalar(text, default)
    except (KeyError, ValueError):
        kind = "int" if default is None else type(default).__name__
        raise HarmonyError(f"--model {spec}: {key}={text!r} is no {kind}") from None
    except TypeError:
        raise HarmonyError(
            f"--model {spec}: {key} is a {type(default).__name__}, which cannot be given here"
        ) from None


def _scalar(text: str, default: Any) -> Any:
    if isinstance(default, bool):
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    if default is None or isinstance(default, int):
        return int(text)
    if isinstance(default, (float, str)):
        return type(default)(text)
    raise TypeError(type(default).__name__)


def _task_of(request: _Request) -> _Task:
    """The task that the spec names, or the first that the model type is made for."""
    from transformers.models.auto import modeling_auto

    able = [
        name
        for name, task in TASKS.items()
        if request.name in getattr(modeling_auto, task.mapping)
        and (not task.only or request.name in task.only)
    ]
    wanted = request.options.get("task", able[0] if able else None)
    if wanted is None or wanted not in able:
        what = (
            f"there is no task {wanted!r} for it" if wanted else "transformers has no trainable head for it"
        )
        raise HarmonyError(f"--model {request.spec}: {what}; tasks: {', '.join(able) or 'none'}")
    return TASKS[wanted]


def _with_lora(model: nn.Module, request: _Request) -> nn.Module:
    """Low-rank adapters beside the layers that peft knows of this model type; all else is frozen."""
    try:
        from peft import LoraConfig, get_peft_model
        from transformers.pytorch_utils import Conv1D
    except ImportError:
        raise HarmonyError(
            f"--model {request.spec}: lora needs peft; pip install 'harmony-train[hf]'"
        ) from None
    rank = request.number("lora", 0, 1)
    stores_transposed = any(isinstance(module, Conv1D) for module in model.modules())
    config = LoraConfig(r=rank, lora_alpha=2 * rank, fan_in_fan_out=stores_transposed)
    try:
        with warnings.catch_warnings():
            # peft asks transformers in words that it no longer likes
            warnings.simplefilter("ignore", FutureWarning)
            adapted: nn.Module = get_peft_model(model, config)
    except ValueError as error:
        raise HarmonyError(
            f"--model {request.spec}: peft cannot adapt it: {str(error).splitlines()[0]}"
        ) from None
    return adapted


# ---- tasks: where batches come from, and the loss


def _tokens(request: _Request, config: Any, *, extra: int = 0) -> tuple[TokenSource, int]:
    """Where samples of `length + extra` tokens come from, and the length."""
    positions = getattr(config, "max_position_embeddings", None)
    default = min(positions or DEFAULT_SEQUENCE_LENGTH, DEFAULT_SEQUENCE_LENGTH)
    # one token to start from and at least one to predict
    length = request.number("seq", default, 2, positions, "positions")
    return token_source(config.vocab_size, length * (1 + extra), request.data), length


def _causal(request: _Request, config: Any) -> Any:
    source, _ = _tokens(request, config)
    return (lambda generator, num_samples: {"tokens": source(generator, num_samples)}), next_token_loss


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of each token given those before it; tokens: [samples, positions]."""
    tokens = batch["tokens"]
    logits = model(input_ids=tokens).logits
    predicted = logits[:, :-1].reshape(-1, logits.shape[-1])
    return functional.cross_entropy(predicted.float(), tokens[:, 1:].reshape(-1))


def _seq2seq(request: _Request, config: Any) -> Any:
    """The targets are what follows the tokens."""
    source, length = _tokens(request, config, extra=1)

    def draw(generator: torch.Generator, num_samples: int) -> Batch:
        text = source(generator, num_samples)
        return {"tokens": text[:, :length].contiguous(), "targets": text[:, length:].contiguous()}

    return draw, lambda model, batch: model(input_ids=batch["tokens"], labels=batch["targets"]).loss


def _masked(request: _Request, config: Any) -> Any:
    draw = _masked_source(request, config)
    return draw, lambda model, batch: model(input_ids=batch["tokens"], labels=batch["targets"]).loss


def _masked_source(request: _Request, config: Any) -> Callable[[torch.Generator, int], Batch]:
    source, length = _tokens(request, config)
    num_hidden = max(1, round(HIDDEN_SHARE * length))

    def draw(generator: torch.Generator, num_samples: int) -> Batch:
        tokens = source(generator, num_samples)
        order = torch.rand(num_samples, length, generator=generator).argsort(1)
        is_hidden = order < num_hidden
        # the last id stands for a hidden token; text never has it
        return {
            "tokens": tokens.masked_fill(is_hidden, config.vocab_size - 1),
            "targets": tokens.masked_fill(~is_hidden, IGNORED),
        }

    return draw


def _pretraining(request: _Request, config: Any) -> Any:
    """Hidden tokens, and whether a sample's second half follows its first (BERT) or comes before it (ALBERT)."""
    masked = _masked_source(request, config)
    label = CLASS_LABELS[request.name]

    def draw(generator: torch.Generator, num_samples: int) -> Batch:
        batch = masked(generator, num_samples)
        return batch | {"follows": torch.randint(0, 2, (num_samples,), generator=generator)}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        given = {"input_ids": batch["tokens"], "labels": batch["targets"], label: batch["follows"]}
        found: Tensor = model(**given).loss
        return found

    return draw, loss


def _classification(request: _Request, config: Any) -> Any:
    source, _ = _tokens(request, config)

    def draw(generator: torch.Generator, num_samples: int) -> Batch:
        tokens = source(generator, num_samples)
        return {"tokens": tokens, "labels": _labels(config, num_samples, generator)}

    return draw, lambda model, batch: model(input_ids=batch["tokens"], labels=batch["labels"]).loss


def _image(request: _Request, config: Any) -> Any:
    fixed = getattr(config, "image_size", None)
    if fixed is not None and "image" in request.options:
        raise HarmonyError(f"--model {request.spec}: its config says the size; give image_size, not image")
    size, channels = fixed or request.number("image", DEFAULT_IMAGE_SIZE, 1), config.num_channels

    def draw(generator: torch.Generator, num_samples: int) -> Batch:
        pixels = torch.randn(num_samples, channels, size, size, generator=generator)
        return {"pixels": pixels, "labels": _labels(config, num_samples, generator)}

    return draw, lambda model, batch: model(pixel_values=batch["pixels"], labels=batch["labels"]).loss


def _labels(config: Any, num_samples: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, config.num_labels, (num_samples,), generator=generator)


CLASSIFIER = "AutoModelForSequenceClassification"
SEQ2SEQ = _Task("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", _seq2seq)
TASKS = {
    "causal": _Task("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", _causal),
    "seq2seq": SEQ2SEQ,
    "masked": _Task("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", _masked),
    "image": _Task(
        "AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", _image, False
    ),
    "pretraining": _Task(
        "AutoModelForPreTraining",
        "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
        _pretraining,
        only=tuple(CLASS_LABELS),
    ),
    "classification": _Task(
        CLASSIFIER,
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        _classification,
        False,
    ),
}
"""In the order in which one is chosen where the spec names none."""
