"""Models whose parameters have shapes and types, and no memory until something is written to them.

A rank needs the structure of a model; the weights are in the host store, once. So every rank but the first builds the
model hollow, and the first one too where the weights come from files.

    with hollow():                      # parameters go as modules register them; buffers are computed as ever
        model = build()
    give_memory(model)                  # pages that nobody has touched, so that the model can be traced
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakTensorKeyDictionary

from planner.contract.errors import HarmonyError

NO_RESERVE = 0x4000
"""Linux's MAP_NORESERVE, which the mmap module names from Python 3.13 on."""


@contextmanager
def hollow() -> Iterator[None]:
    """Parameters that modules register meanwhile are on the meta device; one at a time has memory.

    Initialisations do nothing there. What computes with weights, as `.item()` does, raises.
    """
    register = nn.Module.register_parameter
    known = WeakTensorKeyDictionary()

    def register_hollow(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is None or parameter.is_meta or isinstance(parameter, UninitializedParameter):
            return
        # a parameter that two modules register stays one
        if parameter not in known:
            known[parameter] = _replaced(parameter, parameter.detach().to("meta"))
        module._parameters[name] = known[parameter]

    nn.Module.register_parameter = register_hollow  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def give_memory(model: nn.Module) -> frozenset[str]:
    """Parameters and buffers on the meta device (or FakeTensors) get memory that is not there until it is touched.

    Returns their names: what they hold has to come from somewhere. Raises HarmonyError for a buffer that no
    state_dict has, since nobody could say what it was.
    """
    saved = set(model.state_dict(keep_vars=True))
    made = WeakTensorKeyDictionary()
    names = set()
    for path, module in model.named_modules(remove_duplicate=False):
        for kind in (module._parameters, module._buffers):
            for key, tensor in kind.items():
                if tensor is None or not _is_hollow(tensor):
                    continue
                name = f"{path}.{key}" if path else key
                if name not in saved:
                    raise HarmonyError(
                        f"buffer {name} is on the {tensor.device} device and no weights file has it; "
                        f"build the model under executor.hollow.hollow(), which computes buffers"
                    )
                if tensor not in made:
                    memory = untouched(tuple(tensor.shape), tensor.dtype)
                    made[tensor] = _replaced(tensor, memory) if isinstance(tensor, nn.Parameter) else memory
                kind[key] = made[tensor]
                names.add(name)
    return frozenset(names)


def is_hollow(model: nn.Module) -> bool:
    """Whether some parameter or buffer has no memory."""
    return any(_is_hollow(tensor) for tensor in (*model.parameters(), *model.buffers()))


def _is_hollow(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor)


def _replaced(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    found = nn.Parameter(data, requires_grad=parameter.requires_grad)
    found.__dict__.update(parameter.__dict__)
    return found


def untouched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU that take no memory before they are written to."""
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    area = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    return torch.frombuffer(area, dtype=dtype).view(shape)
