"""Which tests run where, and golden files.

--slow runs the tests marked slow; --update-golden rewrites golden files instead of comparing with them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# the same examples in every run; the machines that run this are shared and slow at times
settings.register_profile("harmony", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("harmony")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
    on_gpu = [item for item in items if "gpu" in item.keywords]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="gpu: no CUDA device here"))


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """golden(name, text): `text` equals the file golden/NAME beside the test."""

    def check(name: str, text: str) -> None:
        path: Path = request.path.parent / "golden" / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"no golden file {path.name}; make golden writes it"
        assert text == path.read_text()

    return check
