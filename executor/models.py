"""Where a model comes from: `hf:NAME?key=value`, `path/to/file.py:function` or `module:function`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from executor.huggingface import make_workload
from executor.workload import Workload, flat
from planner.contract.errors import HarmonyError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types that a whole model can be trained in; fewer bits keep float32 masters (optimizer.py), float16 scales its losses (scaling.py)."""


def load_workload(spec: str, *, seed: int, data: Path | None = None, dtype: str = "") -> Workload:
    """The workload that a spec names; random weights come from `seed`. dtype: what floating-point weights, buffers and
    batches are rounded to; as the model has them where empty. Raises HarmonyError.
    """
    torch.manual_seed(seed)
    if spec.startswith("hf:"):
        workload = make_workload(spec, data)
    else:
        if data is not None:
            raise HarmonyError(f"--data {data}: only hf: models read it; {spec!r} draws its own batches")
        workload = _from_function(spec)
    workload.model.train()
    if dtype:
        workload.model.to(DTYPES[dtype])
    return flat(workload.model, workload.draw, workload.loss, workload.pad, DTYPES.get(dtype), workload.count)


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
    made = _running(spec, f"{name}()", function)
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
    loader = spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    _running(str(path), "it", lambda: loader.exec_module(module))
    return module


def _import(name: str) -> Any:
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise HarmonyError(f"--model {name}: cannot be imported: no module of that name is on the path")
    return _running(name, "importing it", lambda: importlib.import_module(name))


def _running(spec: str, what: str, run: Callable[[], Any]) -> Any:
    """What the user's code gives. Raises HarmonyError with where it stopped."""
    try:
        return run()
    except HarmonyError:
        raise
    except Exception as error:  # code that is not ours can raise anything
        message = str(error) or "no message"
        where = ""
        if not isinstance(error, SyntaxError):
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f" ({last.filename}, line {last.lineno})"
        raise HarmonyError(
            f"--model {spec}: {what} raised {type(error).__name__}: {message}{where}; mend it"
        ) from error
