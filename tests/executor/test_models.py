"""Workloads from a spec: same seed, same weights; every mistake in a spec is one clear line."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from executor.models import load_workload
from executor.text import fingerprint
from executor.workload import Workload
from planner.contract.errors import HarmonyError

TINY = "hf:gpt2?n_layer=1&n_embd=16&n_head=2&n_positions=32"
LLAMA = (
    "hf:llama?num_hidden_layers=1&hidden_size=16&intermediate_size=24&num_attention_heads=2"
    "&num_key_value_heads=2&vocab_size=40&seq=6"
)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("a model was looked for on the network")

    torch.set_num_threads(1)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def draw(workload: Workload, seed: int, num_samples: int) -> dict[str, torch.Tensor]:
    return workload.draw(torch.Generator().manual_seed(seed), num_samples)


def test_same_seed_gives_the_same_weights() -> None:
    spec = f"{TINY}&vocab_size=40"
    first, again, other = (load_workload(spec, seed=seed).model.state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["transformer.wte.weight"], other["transformer.wte.weight"])


def test_model_is_in_train_mode_and_keeps_no_cache() -> None:
    model: Any = load_workload(f"{TINY}&vocab_size=40", seed=0).model
    assert all(module.training for module in model.modules())
    assert model.config.use_cache is False


def test_options_take_the_type_of_the_default() -> None:
    spec = (
        f"{TINY}&vocab_size=40&resid_pdrop=0.25&tie_word_embeddings=false&activation_function=relu&n_inner=24"
    )
    model: Any = load_workload(spec, seed=0).model
    config = model.config
    assert (config.resid_pdrop, config.n_inner, config.activation_function) == (0.25, 24, "relu")
    assert model.lm_head.weight is not model.transformer.wte.weight


def test_words_stay_tied_unless_told_otherwise() -> None:
    model: Any = load_workload(f"{TINY}&vocab_size=40", seed=0).model
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize(
    ("options", "length"),
    [("n_positions=32", 32), ("n_positions=512", 128), ("n_positions=512&seq=200", 200), ("seq=2", 2)],
)
def test_sequence_is_as_told_or_as_long_as_the_model_allows_up_to_128(options: str, length: int) -> None:
    spec = f"hf:gpt2?n_layer=1&n_embd=16&n_head=2&vocab_size=40&{options}"
    assert draw(load_workload(spec, seed=0), 0, 3)["tokens"].shape == (3, length)


def test_batches_follow_from_their_generator_alone() -> None:
    workload = load_workload(f"{TINY}&vocab_size=40", seed=0)
    first = draw(workload, 7, 3)["tokens"]
    torch.manual_seed(99)
    assert torch.equal(first, draw(workload, 7, 3)["tokens"])
    assert not torch.equal(first, draw(workload, 8, 3)["tokens"])
    assert first.min() >= 0
    assert first.max() < 40


@pytest.mark.parametrize("spec", [f"{TINY}&vocab_size=40&seq=6", LLAMA])
def test_loss_is_the_mean_cross_entropy_of_the_next_token(spec: str) -> None:
    workload = load_workload(spec, seed=0)
    workload.model.eval()
    batch = draw(workload, 0, 2)
    tokens = batch["tokens"]
    probabilities = workload.model(input_ids=tokens).logits.double().softmax(-1)
    wanted = [
        -probabilities[sample, place, tokens[sample, place + 1]].log()
        for sample in range(2)
        for place in range(5)
    ]
    loss = workload.loss(workload.model, batch)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(torch.stack(wanted).mean().item(), rel=1e-5)


def test_mean_over_two_halves_is_the_loss_of_the_whole() -> None:
    workload = load_workload(f"{TINY}&vocab_size=40", seed=0)
    workload.model.eval()
    tokens = draw(workload, 0, 4)["tokens"]
    whole, first, second = (
        workload.loss(workload.model, {"tokens": part}).item() for part in (tokens, tokens[:2], tokens[2:])
    )
    assert whole == pytest.approx((first + second) / 2, rel=1e-6)


def test_data_are_windows_of_the_text_files_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("klmnopqrst" * 3)
    (tmp_path / "a.txt").write_text("abcdefghij" * 3)
    (tmp_path / "c.bin").write_bytes(b"\0\1\2" * 20)
    (tmp_path / ".hidden").write_text("ZZZZZZZZ")
    workload = load_workload(f"{TINY}&vocab_size=256&seq=8", seed=0, data=tmp_path)
    text = "abcdefghij" * 3 + "\n" + "klmnopqrst" * 3
    for row in draw(workload, 0, 64)["tokens"].tolist():
        assert bytes(row).decode() in text


def test_data_of_exactly_one_sample_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("abcdefgh")
    workload = load_workload(f"{TINY}&vocab_size=256&seq=8", seed=0, data=file)
    assert bytes(draw(workload, 0, 1)["tokens"][0].tolist()) == b"abcdefgh"
    file.write_text("abcdefg")
    with pytest.raises(HarmonyError, match="7 bytes of text, one sample needs 8"):
        load_workload(f"{TINY}&vocab_size=256&seq=8", seed=0, data=file)


def test_missing_data_and_small_vocabularies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HarmonyError, match="no such file or folder"):
        load_workload(f"{TINY}&vocab_size=256", seed=0, data=tmp_path / "nowhere")
    with pytest.raises(HarmonyError, match="vocabulary of 256, the model has 255; add vocab_size=256"):
        load_workload(f"{TINY}&vocab_size=255", seed=0, data=tmp_path)


FUNCTIONS = """
import torch
from torch import nn
from executor.workload import Workload

def draw(generator, num_samples):
    return {"x": torch.randn(num_samples, 4, generator=generator)}

def loss(model, batch):
    return model(batch["x"]).mean()

def three():
    return nn.Linear(4, 2).eval(), draw, loss

def workload():
    return Workload(nn.Linear(4, 2), draw, loss)

def wrong():
    return nn.Linear(4, 2)

number = 3
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "user_model.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.mark.parametrize("name", ["three", "workload"])
def test_function_in_a_file_gives_a_workload_under_the_seed(functions: Path, name: str) -> None:
    first, again = (load_workload(f"{functions}:{name}", seed=5) for _ in range(2))
    assert isinstance(first.model, nn.Linear)
    assert first.model.training
    assert isinstance(again.model, nn.Linear)
    assert torch.equal(first.model.weight, again.model.weight)
    assert first.loss(first.model, draw(first, 0, 3)).shape == ()


def test_function_in_a_module_gives_a_workload(functions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(functions.parent))
    assert isinstance(load_workload("user_model:three", seed=0).model, nn.Linear)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "has no function 'nothing'"),
        ("number", "has no function 'number'"),
        ("wrong", r"wrong\(\) must return a Workload or \(model, draw, loss\), not Linear"),
    ],
)
def test_wrong_function_is_refused(functions: Path, name: str, message: str) -> None:
    with pytest.raises(HarmonyError, match=message):
        load_workload(f"{functions}:{name}", seed=0)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gpt2", "say hf:NAME"),
        (":f", "say hf:NAME"),
        ("nowhere.py:f", "nowhere.py: no such file"),
        ("no_such_module:f", "no_such_module: cannot be imported"),
        ("hf:gtp2", "no model type 'gtp2'; did you mean .*gpt2"),
        ("hf:clip", "transformers cannot build it: .* no attribute 'num_channels'"),
        ("hf:clipseg", "tasks: none"),
        ("hf:gpt2?n_layers=2", "has no 'n_layers'; did you mean n_layer"),
        ("hf:gpt2?to_dict=2", "has no 'to_dict'"),
        ("hf:gpt2?n_layer=two", "n_layer='two' is no int"),
        ("hf:gpt2?resid_pdrop=much", "resid_pdrop='much' is no float"),
        ("hf:gpt2?tie_word_embeddings=maybe", "tie_word_embeddings='maybe' is no bool"),
        ("hf:gpt2?n_layer=-1", "n_layer=-1 must be at least 1"),
        ("hf:gpt2?vocab_size=0", "vocab_size=0 must be at least 1"),
        ("hf:gpt2?n_inner=x", "n_inner='x' is no int"),
        ("hf:gpt2?n_layer", "'n_layer' is no key=value"),
        ("hf:gpt2?n_layer=1&n_layer=2", "n_layer is given twice, as 1 and as 2"),
        ("hf:gpt2?seq=many", "seq=many must be a number from 2"),
        ("hf:gpt2?seq=1", "seq=1 must be a number from 2"),
        ("hf:gpt2?n_positions=16&seq=17", "from 2 to the model's 16 positions"),
        ("hf:gpt2?n_layer=1&n_embd=65&n_head=2&vocab_size=8", "transformers cannot build it: .*divisible"),
    ],
)
def test_mistake_in_a_spec_is_one_line(spec: str, message: str) -> None:
    with pytest.raises(HarmonyError, match=message) as failure:
        load_workload(spec, seed=0)
    assert "\n" not in str(failure.value)


def test_data_for_a_function_is_refused(functions: Path, tmp_path: Path) -> None:
    with pytest.raises(HarmonyError, match="only hf: models read it"):
        load_workload(f"{functions}:three", seed=0, data=tmp_path)


def test_missing_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(HarmonyError, match=r"needs transformers; pip install 'harmony-train\[hf\]'"):
        load_workload("hf:gpt2", seed=0)


def test_the_same_text_has_the_same_fingerprint_wherever_it_lies(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.txt").write_text("to be or not to be")
    assert (
        fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b") == fingerprint(tmp_path / "a" / "text.txt")
    )
    (tmp_path / "b" / "more.txt").write_text("that is the question")
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")
    with pytest.raises(HarmonyError, match="no such file or folder"):
        fingerprint(tmp_path / "c")
