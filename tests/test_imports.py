"""Each package works where the others' dependencies cannot be imported at all, and the linter's rules are complete."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())

BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if any(name == blocked or name.startswith(blocked + ".") for blocked in BLOCKED):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
sys.path.insert(0, ROOT)
"""

# what `import planner.contract` may bring in besides the standard library
CONTRACT_ALONE = ("msgspec", "planner")


def run_without(blocked: tuple[str, ...], code: str, *arguments: str) -> str:
    """Run code in a fresh process where some modules cannot be imported; returns what it prints."""
    prologue = BLOCKER.replace("BLOCKED", repr(blocked)).replace("ROOT", repr(str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", prologue + code, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_of(package: str) -> list[str]:
    """Every module of a package, `__main__` left out: it runs."""
    paths = sorted((ROOT / package).rglob("*.py"))
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in paths if path.stem != "__main__"]
    return [".".join(part for part in item if part != "__init__") for item in parts]


def test_the_planner_plans_without_torch_and_without_the_executor(tmp_path: Path) -> None:
    code = """
import importlib
for module in sys.argv[4].split(","):
    importlib.import_module(module)
from planner.contract import store
from tests.planner.tiny import PROFILE, hardware
profile, machine, schedule = sys.argv[1:4]
store.save(PROFILE, profile)
store.save(hardware(2), machine)
from planner.cli import main
assert main(["plan", profile, machine, "--minibatch", "4", "-o", schedule]) == 0
assert main(["verify", schedule, profile, machine]) == 0
"""
    files = [str(tmp_path / name) for name in ("profile", "hardware", "schedule")]
    blocked = ("torch", "executor", "transformers", "safetensors", "psutil")
    printed = run_without(blocked, code, *files, ",".join(modules_of("planner")))
    assert "holds" in printed


def test_the_executor_imports_without_the_solvers() -> None:
    pytest.importorskip("torch")
    blocked = ("pulp", "highspy", "networkx", "matplotlib", "planner.search", "planner.cli", "planner.lower")
    # torch has optional uses of networkx: this is about the executor's own imports
    code = """
import warnings
warnings.simplefilter("default")
import importlib
for module in sys.argv[1].split(","):
    importlib.import_module(module)
"""
    run_without(blocked, code, ",".join(modules_of("executor")))


def test_the_contract_imports_msgspec_and_the_standard_library_alone() -> None:
    code = """
before = set(sys.modules)
import importlib
for module in sys.argv[1].split(","):
    importlib.import_module(module)
tops = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(top for top in tops if top not in sys.stdlib_module_names))
"""
    contract = [module for module in modules_of("planner") if module.startswith("planner.contract")]
    # msgspec looks for typing_extensions and does without
    assert tuple(run_without(("typing_extensions",), code, ",".join(contract)).split()) == CONTRACT_ALONE


def test_help_needs_neither_numpy_nor_a_solver() -> None:
    """`harmony-planner --help` answers at once: what takes long to load is loaded by who needs it."""
    code = """
from planner.cli import main
assert main(["--help"]) == 0
"""
    assert "plan" in run_without(("numpy", "pulp", "highspy", "matplotlib", "networkx"), code)


def test_the_linter_names_every_part_of_the_planner_that_others_may_not_import() -> None:
    parts = {
        f"planner.{path.stem}"
        for path in (ROOT / "planner").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    } - {"planner.__init__", "planner.contract"}
    contracts = {
        item["source_modules"][0]: set(item["forbidden_modules"])
        for item in PROJECT["tool"]["importlinter"]["contracts"]
    }
    assert parts <= contracts["executor"], (
        "pyproject.toml: a module of the planner is missing in the executor's rule"
    )
    assert parts <= contracts["planner.contract"], (
        "pyproject.toml: a module of the planner is missing in the contract's rule"
    )


def test_every_dependency_has_a_tested_version() -> None:
    tested = {
        line.partition("==")[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    project = PROJECT["project"]
    wanted = [
        *project["dependencies"],
        *(item for extra in project["optional-dependencies"].values() for item in extra),
    ]
    assert {item.partition(">")[0].lower() for item in wanted} <= tested
