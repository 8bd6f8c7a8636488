"""Count the bytes that live on a virtual device, and refuse what goes past its budget.

A dispatch mode sees every operation's outputs before its inputs are let go, so the peak is the true one. A
storage counts from the operation that made it until its last tensor is gone. Buffers that the executor
manages itself are told by `allocate` and `free`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Allocated bytes now and at most, under an optional budget.

    on_change is told the allocated bytes after every change. Raises torch.OutOfMemoryError beyond the budget.
    """

    def __init__(
        self,
        budget_bytes: int | None = None,
        name: str = "gpu0",
        on_change: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.budget_bytes = budget_bytes
        self.name = name
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.doing = ""
        self._on_change = on_change
        self._known: set[int] = set()
        # reentrant: a storage may be finalized by the garbage collector inside any of our own lines
        self._lock = threading.RLock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args
        if kwargs and "out" in kwargs:
            # its memory was there before the operation, unless it was empty and gets its size here
            given = (*args, [t for t in _tensors(kwargs["out"]) if t.untyped_storage().nbytes()])
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self._see(out, given)
        elif isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, Tensor):
                    self._see(item, given)
        return out

    def allocate(self, num_bytes: int, what: str) -> None:
        """Count bytes managed elsewhere. Raises torch.OutOfMemoryError beyond the budget."""
        with self._lock:
            if self.budget_bytes is not None and self.allocated_bytes + num_bytes > self.budget_bytes:
                raise torch.OutOfMemoryError(
                    f"{self.name}: {what} needs {num_bytes} bytes beside the {self.allocated_bytes} allocated, "
                    f"{self.allocated_bytes + num_bytes - self.budget_bytes} over the limit of {self.budget_bytes}"
                )
            self.allocated_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
            if self._on_change is not None:
                self._on_change(self.allocated_bytes)

    def free(self, num_bytes: int) -> None:
        """Bytes counted by `allocate` are gone."""
        with self._lock:
            self.allocated_bytes -= num_bytes
            if self._on_change is not None:
                self._on_change(self.allocated_bytes)

    def track(self, tensor: Tensor, what: str = "") -> None:
        """Count a tensor made outside, until its storage is gone. Raises torch.OutOfMemoryError beyond the budget."""
        self._adopt(tensor.untyped_storage(), what)

    def exclude(self, tensor: Tensor) -> None:
        """Never count this tensor's storage: it is managed elsewhere."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            self._known.add(key)
        weakref.finalize(storage, self._known.discard, key)

    def reset_peak(self) -> None:
        """The peak starts again from what is allocated now."""
        with self._lock:
            self.peak_bytes = self.allocated_bytes

    def _see(self, tensor: Tensor, args: Any) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        # a view of something that was never counted (host memory, an excluded slot) is not new memory
        for arg in args:
            for given in _tensors(arg):
                if given.untyped_storage()._cdata == storage._cdata:
                    return
        self._adopt(storage)

    def _adopt(self, storage: torch.UntypedStorage, what: str = "") -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if not num_bytes:
            return
        with self._lock:
            if key in self._known:
                return
            self.allocate(num_bytes, what or self.doing or "an operation")
            self._known.add(key)
        weakref.finalize(storage, self._release, key, num_bytes)

    def _release(self, key: int, num_bytes: int) -> None:
        with self._lock:
            self._known.discard(key)
            self.free(num_bytes)


def _tensors(value: Any) -> Sequence[Tensor]:
    """The tensors of an argument: itself, or those of a list."""
    if isinstance(value, Tensor):
        return (value,)
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, (list, tuple)) else ()
