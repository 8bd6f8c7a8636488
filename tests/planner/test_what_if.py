"""`what-if`: from a model's name and a server's to an answer, without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.cli import main
from planner.contract import store

MODEL = "gpt2-medium"


def test_a_server_that_can_says_how_fast_and_what_limits_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.json"
    assert main(["what-if", "--model", MODEL, "--gpus", "2x3060", "--minibatch", "8", "-o", str(path)]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("2x3060", "tokens/s", "limited by", "not measured"))
    assert store.load_schedule(path).configuration.num_devices <= 2


def test_the_answer_is_a_page_too_which_says_that_it_is_an_estimate(tmp_path: Path) -> None:
    page = tmp_path / "answer.html"
    assert (
        main(["what-if", "--model", MODEL, "--gpus", "2x3060", "--minibatch", "8", "--report", str(page)])
        == 0
    )
    text = page.read_text()
    assert f"{MODEL} on 2x3060, estimated by published figures" in text
    assert "tokens a second" in text
    assert text.count("<h3>gpu") == 2


def test_a_server_that_cannot_gets_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "answer.html"
    small = ["--memory", "1GiB", "--host-memory", "1GiB", "--report", str(page)]
    assert main(["what-if", "--model", MODEL, "--gpus", "1x3060", "--minibatch", "8", *small]) == 2
    assert f"--report {page}: 1x3060 cannot train it: " in capsys.readouterr().err
    assert not page.exists()


def test_servers_are_compared_and_one_that_cannot_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "servers.png"
    arguments = [
        "what-if",
        "--model",
        MODEL,
        "--gpus",
        "1x4090",
        "--minibatch",
        "8",
        "--picture",
        str(picture),
    ]
    assert main([*arguments, "--compare", "1x3060,1x1080ti", "--json"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    first, second, third = json.loads(capsys.readouterr().out)
    assert first["samples_per_second"] > second["samples_per_second"]
    assert not third["fits"]
    assert "bfloat16" in third["reason"]


def test_where_no_server_can_there_is_no_solution(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--gpus", "1x3060", "--minibatch", "8", "--memory", "1GiB", "--host-memory", "1GiB", "--json"]
    assert main(["what-if", "--model", MODEL, *small]) == 2
    printed = capsys.readouterr()
    assert not json.loads(printed.out)[0]["fits"]
    assert "1x3060 cannot train it" in printed.err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--model", "gpt5"], "not in the library"),
        (["--dtype", "int8"], "the library has bfloat16 and float32"),
        (["--gpus", "4x4091"], "did you mean"),
        (["--gpus", "4090"], "looks like 4x4090"),
        (["--memory", "80GiB"], "a rtx4090 has"),
    ],
)
def test_bad_input_is_one_line(change: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"--model": MODEL, "--gpus": "1x4090", "--minibatch": "8"} | {change[0]: change[1]}
    assert main(["what-if", *(part for pair in given.items() for part in pair)]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1
