"""What the pages say is so: their commands run, their options and files exist, the messages that they quote are said.

```console   commands behind `$ `, run one after the other, in one folder for the tutorial and the pages that go on from it
```python F  a file of theirs
```sh        commands for a server with GPUs, not run: their options exist
> text       a message of the program, with ... for what differs
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

import executor.cli
import planner.cli

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
IN_ORDER = (
    "docs/tutorial.md",
    "docs/training.md",
    "docs/planning.md",
    "docs/troubleshooting.md",
    "README.md",
)
"""Pages that go on in the folder of those before."""
PROGRAMS = {"harmony-planner": planner.cli, "harmony-executor": executor.cli}
MAY_BE_1 = ("compare", "doctor")
"""Commands that say by 1 that a plan does not hold or something is in the way, which is the machine's."""
BLOCK = re.compile(r"^```(\w*) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """(language, name, text) of each fenced block."""
    for found in BLOCK.finditer(page.read_text()):
        yield found[1], found[2], found[3]


def commands(page: Path, language: str) -> Iterator[list[str]]:
    """Of the page's blocks in that language, those of ours, as arguments."""
    for kind, _, text in blocks(page):
        if kind != language:
            continue
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if "-m" in words and words[words.index("-m") + 1] == "executor":
                words = ["harmony-executor", *words[words.index("-m") + 2 :]]
            if words and words[0] in PROGRAMS:
                yield words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_page_shows_is_run_or_for_a_gpu(page: Path) -> None:
    shown = sum(line.startswith("$ ") for kind, _, text in blocks(page) for line in text.splitlines())
    assert shown == len(list(commands(page, "console"))), (
        "a console block has something else than our commands"
    )
    if shown:
        assert str(page.relative_to(ROOT)) in IN_ORDER


def test_the_commands_of_the_pages_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in IN_ORDER:
        page = ROOT / name
        for language, file, text in blocks(page):
            if language == "python" and file:
                (tmp_path / file).write_text(text)
        for program, *arguments in commands(page, "console"):
            status = PROGRAMS[program].main(arguments)
            allowed = (0, 1) if arguments[0] in MAY_BE_1 else (0,)
            assert status in allowed, f"{name}: {shlex.join(arguments)}\n{capfd.readouterr()}"
            if "-o" in arguments:
                assert (tmp_path / arguments[arguments.index("-o") + 1]).is_file()
    for made in ("timeline.png", "report.html", "servers.png", "answer.html", "model.pt"):
        assert (tmp_path / made).stat().st_size > 1000, made


@cache
def known_options(program: str, command: str) -> frozenset[str]:
    commands = get_command(PROGRAMS[program].app).commands  # type: ignore[attr-defined]
    assert command in commands, f"{program} has no command {command}"
    return frozenset(option for param in commands[command].params for option in param.opts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_that_a_page_mentions_exists(page: Path) -> None:
    for words in [*commands(page, "console"), *commands(page, "sh")]:
        asked = {word.partition("=")[0] for word in words[2:] if re.match(r"--?[a-z]", word)}
        assert asked <= known_options(words[0], words[1]), words
    everything = {
        option
        for program, module in PROGRAMS.items()
        for command in get_command(module.app).commands  # type: ignore[attr-defined]
        for option in known_options(program, command)
    }
    elsewhere = {"--help", "--ulimit", "--shm-size", "--extra-index-url"}
    elsewhere |= {
        "--nnodes",
        "--nproc-per-node",
        "--max-restarts",
        "--rdzv-backend",
        "--rdzv-id",
        "--rdzv-endpoint",
    }
    prose = BLOCK.sub("", page.read_text())
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", prose)) <= everything | elsewhere


@cache
def messages() -> tuple[str, ...]:
    """Every text in the sources, with \\0 for what is filled in."""
    found = []
    for package in ("planner", "executor"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    found.append(
                        "".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values)
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return tuple(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_message_that_a_page_quotes_is_said(page: Path) -> None:
    for line in page.read_text().splitlines():
        if not line.startswith("> "):
            continue
        parts = [re.escape(part) for part in re.split(r"\.\.\.", line[2:])]
        pattern = re.compile(r"[^a-z]*\0?.*".join(parts))
        assert any(pattern.search(message) for message in messages()), line


def test_the_check_of_quotes_can_fail() -> None:
    assert not any(re.search(r"host: .* bytes are to be glued", message) for message in messages())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", BLOCK.sub("", page.read_text())):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}, target


def test_the_index_has_every_page_and_make_every_target_that_pages_name() -> None:
    index = (ROOT / "docs/README.md").read_text()
    for page in PAGES:
        assert page.name == "README.md" or f"({page.name})" in index
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for name in re.findall(r"`make ([a-z-]+)", page.read_text()):
            assert name in targets, (page.name, name)
