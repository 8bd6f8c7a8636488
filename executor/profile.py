"""Measure a profile: seconds, peak and saved bytes of every layer at several microbatch sizes.

Layers with the same signature are measured once. Bytes come from the meter, seconds from runs without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import msgspec
import torch
from torch import Tensor

from executor.decompose import Decomposition, Layer, decompose
from executor.decompose.layers import BATCH, TensorName
from executor.decompose.move import move_code
from executor.meter import Meter
from executor.optimizer import Recipe, has_master, recipe
from executor.structure import held_bytes, structure
from executor.workload import Workload
from planner.contract import profile as contract
from planner.contract.errors import HarmonyError

WARM_UP = 2


@dataclass(frozen=True)
class Measured:
    """One layer at one size."""

    forward: contract.ForwardCost
    backward: contract.BackwardCost


def measure_profile(
    workload: Workload,
    spec: str,
    microbatch_sizes: Sequence[int],
    *,
    optimizer: str,
    settings: Mapping[str, Any],
    patterns: tuple[str, ...] = (),
    repeats: int = 5,
    device: torch.device | str = "cpu",
    device_name: str = "virtual",
    progress: Callable[[int, int], None] = lambda done, total: None,
    notice: Callable[[str], None] = lambda line: None,
) -> contract.Profile:
    """The profile of a workload: seconds are medians of `repeats`, on a CPU with one thread, as it is run.

    notice is told what the cut changes of the model. progress is told how many of how many measurements are done, one for each unique layer and size. Raises
    HarmonyError for sizes below 1 and for times that cannot be true.
    """
    sizes = sorted(set(microbatch_sizes))
    if not sizes or sizes[0] < 1:
        raise HarmonyError(f"--microbatches {','.join(map(str, microbatch_sizes))}: sizes start at 1")
    chosen = recipe(optimizer, settings)
    decomposition = decompose(workload, workload.draw(torch.Generator().manual_seed(0), 2), patterns=patterns)
    for line in decomposition.notices:
        notice(line)
    if torch.device(device).type == "cuda":
        move_code(decomposition, torch.device(device))
    skeleton = structure(decomposition, spec, chosen, patterns)
    bench = _Bench(decomposition, repeats, torch.device(device))
    with _threads(1 if torch.device(device).type == "cpu" else torch.get_num_threads()):
        profile = _measured(bench, workload, skeleton, sizes, chosen, device_name, progress)
    contract.check(profile)
    return profile


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _measured(
    bench: _Bench,
    workload: Workload,
    skeleton: contract.Profile,
    sizes: Sequence[int],
    recipe: Recipe,
    device_name: str,
    progress: Callable[[int, int], None],
) -> contract.Profile:
    """The skeleton with its costs."""
    decomposition, device = bench.decomposition, bench.device
    generator = torch.Generator().manual_seed(0)
    costs: dict[tuple[str, int], Measured] = {}
    unique = {layer.signature for layer in decomposition.layers}
    for size in sizes:
        bench.run(
            workload.draw(generator, size),
            size,
            costs,
            lambda: progress(len(costs), len(unique) * len(sizes)),
        )
    owners = {name: uses[0] for name, uses in decomposition.ties.items()}
    updates: dict[tuple[str, tuple[int, ...]], contract.UpdateCost] = {}
    layers = []
    for i, (layer, sized) in enumerate(zip(decomposition.layers, skeleton.layers, strict=True)):
        # a tied parameter is stepped by the first layer that uses it
        owned = tuple(k for k, name in enumerate(layer.parameters) if owners.get(name, i) == i)
        update = layer.signature, owned
        if update not in updates:
            updates[update] = bench.update_cost(layer, [layer.parameters[k] for k in owned], recipe)
        found = [costs[layer.signature, size] for size in sizes]
        layers.append(
            msgspec.structs.replace(
                sized,
                forward=tuple(cost.forward for cost in found),
                backward=tuple(cost.backward for cost in found),
                update=updates[update],
            )
        )
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return msgspec.structs.replace(
        skeleton, layers=tuple(layers), device=contract.Device(device_name, memory, torch.get_num_threads())
    )


class _Bench:
    """Runs layers alone, on inputs that the layers before them really made."""

    def __init__(self, decomposition: Decomposition, repeats: int, device: torch.device) -> None:
        self.decomposition = decomposition
        self.repeats = repeats
        self.device = device

    def run(
        self,
        batch: dict[str, Tensor],
        size: int,
        costs: dict[tuple[str, int], Measured],
        done: Callable[[], None],
    ) -> None:
        """Measure every layer not yet measured at this size."""
        values: dict[TensorName, Tensor] = {(BATCH, n): t.to(self.device) for n, t in batch.items()}
        last_use = {key: b.consumers[-1] for key, b in self.decomposition.boundaries.items()}
        for i, layer in enumerate(self.decomposition.layers):
            given = [values[key] for key in layer.inputs]
            parameters, buffers = self._tensors(layer)
            key = layer.signature, size
            if key not in costs:
                costs[key] = Measured(
                    self._forward(layer, parameters, buffers, given, size),
                    self._backward(layer, parameters, buffers, given, size),
                )
                done()
            with torch.no_grad():
                out = layer(parameters, [b.clone() for b in buffers], given, size)
            values |= {(i, name): tensor for name, tensor in zip(layer.outputs, out, strict=True)}
            values = {k: v for k, v in values.items() if last_use.get(k, -1) > i}

    def _tensors(self, layer: Layer) -> tuple[list[Tensor], list[Tensor]]:
        model = self.decomposition
        parameters = []
        for name in layer.parameters:
            tensor = model.parameters[name].detach().to(self.device)
            parameters.append(tensor.requires_grad_(model.parameters[name].requires_grad))
        return parameters, [model.buffers[name].detach().clone().to(self.device) for name in layer.buffers]

    def _forward(
        self, layer: Layer, parameters: list[Tensor], buffers: list[Tensor], given: list[Tensor], size: int
    ) -> contract.ForwardCost:
        def once() -> float:
            with torch.no_grad():
                start = self._now()
                layer(parameters, buffers, given, size)
                return self._now() - start

        seconds, spread = self._timed(once, f"forward of layer {layer.name} at {size}")
        held = held_bytes((*parameters, *buffers), given)
        with self._metered() as meter, torch.no_grad():
            layer(parameters, buffers, given, size)
        return contract.ForwardCost(size, seconds, held + meter.peak_bytes, spread)

    def _backward(
        self, layer: Layer, parameters: list[Tensor], buffers: list[Tensor], given: list[Tensor], size: int
    ) -> contract.BackwardCost:
        differentiable = {k for k, b in self.decomposition.boundaries.items() if b.is_differentiable}
        trainable = [p for p in parameters if p.requires_grad]
        for parameter in trainable:
            parameter.grad = torch.zeros_like(parameter)

        def inputs() -> list[Tensor]:
            return [
                t.detach().requires_grad_(k in differentiable)
                for k, t in zip(layer.inputs, given, strict=True)
            ]

        def forward() -> tuple[tuple[Tensor, ...], list[Tensor]]:
            out = layer(parameters, buffers, inputs(), size)
            return out, [torch.ones_like(t) for t in out if t.requires_grad]

        def once() -> float:
            out, gradients = forward()
            start = self._now()
            torch.autograd.backward([t for t in out if t.requires_grad], gradients)
            return self._now() - start

        seconds, spread = self._timed(once, f"backward of layer {layer.name} at {size}")
        held = held_bytes((*parameters, *trainable, *buffers), given)
        outputs, gradients = forward()
        handed = sum(g.nbytes for g in gradients)
        del outputs
        with self._metered() as meter:
            out = layer(parameters, buffers, inputs(), size)
            saved = meter.allocated_bytes
            torch.autograd.backward([t for t in out if t.requires_grad], gradients)
        for parameter in trainable:
            parameter.grad = None
        return contract.BackwardCost(size, seconds, held + handed + meter.peak_bytes, saved, spread)

    def update_cost(self, layer: Layer, names: Sequence[str], recipe: Recipe) -> contract.UpdateCost:
        """The step of the parameters that a layer owns, on the host and on the device.

        On the device only fused steps: others make tensors on the side that no plan counts.
        """
        tensors = [self.decomposition.parameters[name] for name in names]
        trained = [t.detach() for t in tensors if t.requires_grad]
        if not trained:
            return contract.UpdateCost()
        what = f"update of layer {layer.name}"
        on_host = self._step_seconds([t.cpu() for t in trained], recipe, what)
        norm = self._norm_seconds([t.cpu() for t in trained], f"norm of layer {layer.name}")
        # gradients in the master's type are on the side, too
        if not recipe.is_fused or any(has_master(t) for t in trained):
            return contract.UpdateCost(on_host, None, norm)
        if self.device.type == "cpu":
            return contract.UpdateCost(on_host, on_host, norm)
        on_device = [t.to(self.device) for t in trained]
        return contract.UpdateCost(on_host, self._step_seconds(on_device, recipe, what), norm)

    def _norm_seconds(self, tensors: Sequence[Tensor], what: str) -> float:
        """As LayerOptimizer finds it: in the type that is stepped."""
        gradients = [torch.full_like(t, 1e-4) for t in tensors]

        def once() -> float:
            start = time.perf_counter()
            for gradient in gradients:
                torch.linalg.vector_norm(gradient.float() if has_master(gradient) else gradient)
            return time.perf_counter() - start

        return self._timed(once, what)[0]

    def _step_seconds(self, tensors: Sequence[Tensor], recipe: Recipe, what: str) -> float:
        """As LayerOptimizer steps them: where they have masters, those."""
        weights = [t.clone() for t in tensors]
        own = [(w.float() if has_master(w) else w).requires_grad_() for w in weights]
        stepped = recipe.make({str(i): parameter for i, parameter in enumerate(own)})
        gradients = [torch.full_like(w, 1e-4, requires_grad=False) for w in weights]

        def once() -> float:
            start = self._now()
            with torch.no_grad():
                for parameter, gradient in zip(own, gradients, strict=True):
                    parameter.grad = gradient.to(parameter.dtype)
                stepped.step()
                for weight, parameter in zip(weights, own, strict=True):
                    if weight is not parameter:
                        weight.copy_(parameter)
            return self._now() - start

        return self._timed(once, what)[0]

    def _timed(self, once: Callable[[], float], what: str) -> tuple[float, float]:
        """Median seconds and half the distance between the quartiles, after a warm-up."""
        for _ in range(WARM_UP):
            once()
        times = [once() for _ in range(max(self.repeats, 2))]
        low, _, high = quantiles(times, n=4, method="inclusive")
        seconds = median(times)
        if not 0 < seconds < float("inf"):
            raise HarmonyError(f"{what}: measured {seconds} s; a time is finite and above 0")
        return seconds, (high - low) / 2

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _metered(self) -> Meter:
        return Meter(name="profile")
