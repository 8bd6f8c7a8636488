"""Any torch.optim optimizer whose state is per parameter, stepped layer by layer over the host store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.contract.errors import HarmonyError

REFUSED = {"LBFGS": "it needs all gradients at once", "SparseAdam": "it needs sparse gradients"}
FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
"""torch.optim classes with fused CPU kernels."""

StateEntry = tuple[str, tuple[int, ...], torch.dtype]


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The torch.optim class of a name, whatever its case. Raises HarmonyError."""
    known = {key.lower(): key for key, value in vars(torch.optim).items() if isinstance(value, type)}
    key = known.get(name.lower())
    if key is None or key == "Optimizer":
        raise HarmonyError(f"--optimizer {name}: torch.optim has no such optimizer; try adamw, adam or sgd")
    if key in REFUSED:
        raise HarmonyError(f"--optimizer {name}: cannot be stepped pack by pack, {REFUSED[key]}")
    found: type[torch.optim.Optimizer] = getattr(torch.optim, key)
    return found


def make_optimizer(name: str, parameters: Iterable[Any], settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    """A torch optimizer with fused kernels where torch has them. settings: lr, weight_decay, momentum, ..."""
    found = optimizer_class(name)
    fused = {"fused": True} if found.__name__ in FUSED else {}
    try:
        return found(parameters, **settings, **fused)  # type: ignore[call-arg]
    except TypeError as error:
        raise HarmonyError(f"--optimizer {name}: {error}") from None


def state_layout(name: str, settings: Mapping[str, Any], parameter: Tensor) -> tuple[StateEntry, ...]:
    """What the optimizer keeps for a parameter, learnt from one step on a small tensor of its type."""
    probe = torch.zeros(2, 3, dtype=parameter.dtype, requires_grad=True)
    optimizer = make_optimizer(name, [probe], settings)
    probe.grad = torch.zeros_like(probe)
    optimizer.step()
    entries = []
    for key, value in optimizer.state[probe].items():
        if isinstance(value, Tensor):
            shape = tuple(parameter.shape) if value.shape == probe.shape else tuple(value.shape)
            entries.append((key, shape, value.dtype))
        elif value is not None:
            raise HarmonyError(f"--optimizer {name}: keeps {key} outside tensors, which cannot be swapped")
    return tuple(entries)


class LayerOptimizer:
    """One optimizer over all parameters; `step_layers` steps those of some layers and leaves the others alone.

    weights, gradients: per layer and parameter name the views of the host store. states: per owned parameter its
    state tensors by key. Parameters used by several layers belong to the first; the gradients of all uses are
    added in layer order and the new weights copied to every use.
    """

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any],
        weights: Sequence[Mapping[str, Tensor]],
        gradients: Sequence[Mapping[str, Tensor]],
        states: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
        self._gradients = gradients
        self._weights = weights
        self._uses: dict[str, list[int]] = {}
        for i, layer in enumerate(gradients):
            for parameter in layer:
                self._uses.setdefault(parameter, []).append(i)
        self._own = {parameter: weights[uses[0]][parameter] for parameter, uses in self._uses.items()}
        self.optimizer = make_optimizer(name, list(self._own.values()), settings)
        for parameter, tensor in self._own.items():
            self.optimizer.state[tensor] = dict(states[parameter])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Live: a learning rate changed here holds from the next step on."""
        return self.optimizer.param_groups

    def step_layers(self, layers: Iterable[int]) -> None:
        """One optimizer step of the parameters that these layers own, from the gradients in the store."""
        stepped = [name for layer in layers for name in self._gradients[layer] if self._uses[name][0] == layer]
        with torch.no_grad():
            for name in stepped:
                first, *others = self._uses[name]
                gradient = self._gradients[first][name]
                for other in others:
                    gradient.add_(self._gradients[other][name])
                self._own[name].grad = gradient
            self.optimizer.step()
            for name in stepped:
                self._own[name].grad = None
                for other in self._uses[name][1:]:
                    self._weights[other][name].copy_(self._own[name])
