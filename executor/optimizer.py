"""Any torch.optim optimizer whose state is per parameter, stepped layer by layer over the host store."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planner.contract.errors import HarmonyError

REFUSED = {
    "LBFGS": "it needs all gradients at once",
    "SparseAdam": "it needs sparse gradients",
    "Adafactor": "the size of its state does not follow the parameter's",
}
FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
"""torch.optim classes with fused CPU kernels."""
PROBE_SHAPE = (2, 3)

MASTER = "master"
"""The state that is the float32 copy of a parameter of fewer bits."""

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


@dataclass(frozen=True)
class Group:
    """Parameters that are stepped with the same settings (torch's param_group). names: None: all of them."""

    settings: Mapping[str, Any]
    names: frozenset[str] | None = None

    def has(self, name: str) -> bool:
        return self.names is None or name in self.names


@dataclass(frozen=True)
class Recipe:
    """Which of torch.optim's optimizers steps which parameters, with which settings."""

    kind: type[torch.optim.Optimizer]
    groups: tuple[Group, ...]

    @property
    def name(self) -> str:
        """The class, as profiles and schedules name it."""
        return self.kind.__name__.lower()

    @property
    def is_fused(self) -> bool:
        """Whether torch steps it in place, with nothing on the side."""
        return self.kind.__name__ in FUSED and all(group.settings.get("fused") for group in self.groups)

    def settings(self, parameter: str) -> Mapping[str, Any]:
        """The settings that a parameter is stepped with. Raises HarmonyError where no group has it."""
        for group in self.groups:
            if group.has(parameter):
                return group.settings
        raise HarmonyError(
            f"parameter {parameter} requires a gradient, but no group of the optimizer has it; add it, or freeze it"
        )

    def make(self, parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        """A torch optimizer over parameters by name, its groups in order, some perhaps empty.

        Raises HarmonyError for settings or parameters that it does not take.
        """
        groups = [
            {"params": [p for name, p in parameters.items() if group.has(name)], **group.settings}
            for group in self.groups
        ]
        make: Any = self.kind
        # as defaults too: that is where torch looks at them
        known = inspect.signature(self.kind).parameters
        defaults = {key: value for key, value in self.groups[0].settings.items() if key in known}
        try:
            found: torch.optim.Optimizer = make(groups, **defaults)
        except (TypeError, ValueError) as error:
            raise HarmonyError(f"--optimizer {self.name}: {error}") from None
        return found


def recipe(name: str, settings: Mapping[str, Any]) -> Recipe:
    """All parameters stepped the same way, with fused kernels where torch has them. settings: lr, weight_decay, ...

    Raises HarmonyError for an optimizer that torch has not, or that cannot be stepped layer by layer.
    """
    kind = optimizer_class(name)
    fused: dict[str, Any] = {"fused": True} if kind.__name__ in FUSED else {}
    known = inspect.signature(kind).parameters
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise HarmonyError(f"--optimizer {name}: {kind.__name__} has no setting {unknown[0]!r}")
    return Recipe(kind, (Group({**settings, **fused}),))


def recipe_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Recipe:
    """What an optimizer over a model's parameters does; names: of parameters by id.

    Raises HarmonyError where it cannot be stepped layer by layer or has a parameter that is not the model's.
    """
    kind = optimizer_class(type(optimizer).__name__)
    if kind is not type(optimizer):
        raise HarmonyError(
            f"optimizer {type(optimizer).__module__}.{type(optimizer).__name__}: only torch.optim's own can be stepped "
            f"layer by layer"
        )
    groups = []
    for i, group in enumerate(optimizer.param_groups):
        unknown = [p for p in group["params"] if id(p) not in names]
        if unknown:
            raise HarmonyError(
                f"param_groups[{i}] has a parameter of shape {tuple(unknown[0].shape)} that is not the model's"
            )
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append(Group(settings, frozenset(names[id(p)] for p in group["params"])))
    return Recipe(kind, tuple(groups))


def has_master(parameter: Tensor) -> bool:
    """Whether a parameter is too coarse for small steps: the optimizer steps a float32 copy, which it is rounded from."""
    return parameter.dtype in (torch.bfloat16, torch.float16)


def state_layout(recipe: Recipe, name: str, parameter: Tensor) -> tuple[StateEntry, ...]:
    """What is kept for a parameter: its master where it has one, and what the optimizer keeps, learnt from one step on a
    small tensor of the type that it steps."""
    if has_master(parameter):
        master = (MASTER, tuple(parameter.shape), torch.float32)
        return (master, *state_layout(recipe, name, parameter.detach().to("meta", torch.float32)))
    probe = torch.zeros(PROBE_SHAPE, dtype=parameter.dtype, requires_grad=True)
    optimizer = Recipe(recipe.kind, (Group(recipe.settings(name)),)).make({name: probe})
    probe.grad = torch.zeros_like(probe)
    optimizer.step()
    entries: list[StateEntry] = []
    for key, value in optimizer.state[probe].items():
        if value is None:
            continue
        if not isinstance(value, Tensor) or value.shape not in (probe.shape, torch.Size()):
            raise HarmonyError(
                f"--optimizer {recipe.name}: keeps {key!r} in a form that cannot be swapped; try adamw, adam or sgd"
            )
        entries.append((key, tuple(parameter.shape) if value.shape == probe.shape else (), value.dtype))
    return tuple(entries)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of a norm are multiplied by, as `torch.nn.utils.clip_grad_norm_` has it: a scalar."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


class LayerOptimizer:
    """One optimizer over all parameters; `step_layers` steps those of some layers and leaves the others alone.

    weights, gradients: per layer and parameter name the views of the host store; touched: likewise whether there is a
    gradient, which a step takes back. states: per owned parameter its state tensors by key; is_resumed: they hold what
    an earlier run left, zeros for a parameter that it never stepped. Parameters used by several layers belong
    to the first; the gradients of all uses are added in layer order and the new weights copied to every use.
    Where a parameter has a master, that one is stepped (as in mixed precision training; Micikevicius et al., ICLR
    2018), and the weights are rounded from it.
    """

    def __init__(
        self,
        recipe: Recipe,
        weights: Sequence[Mapping[str, Tensor]],
        gradients: Sequence[Mapping[str, Tensor]],
        states: Mapping[str, Mapping[str, Tensor]],
        *,
        touched: Sequence[Mapping[str, Tensor]],
        is_resumed: bool = False,
    ) -> None:
        self._gradients = gradients
        self._touched = touched
        self._weights = weights
        self._states = states
        self._uses: dict[str, list[int]] = {}
        for i, layer in enumerate(gradients):
            for parameter in layer:
                self._uses.setdefault(parameter, []).append(i)
        self._own = {
            parameter: states.get(parameter, {}).get(MASTER, weights[uses[0]][parameter])
            for parameter, uses in self._uses.items()
        }
        self.optimizer = recipe.make(self._own)
        self._unplaced = set(self._own)
        self._lock = threading.Lock()
        for parameter, tensor in self._own.items():
            if is_resumed and any(bool(state.any()) for k, state in states[parameter].items() if k != MASTER):
                self.optimizer.state[tensor] = {k: v for k, v in states[parameter].items() if k != MASTER}
                self._unplaced.discard(parameter)
            elif self.optimizer.state.get(tensor):
                # Adagrad fills its state when it is made: into the store with it, or every rank keeps one of its own
                self._place(parameter)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Live: a learning rate changed here holds from the next step on."""
        return self.optimizer.param_groups

    def norm(self, names: Iterable[str]) -> Tensor:
        """The norm over the gradients of these parameters, those without one left out, as
        `torch.nn.utils.get_total_norm` has it: a scalar."""
        norms = []
        for name in names:
            if name not in self._uses:
                continue
            first, *others = self._uses[name]
            gradient = self._gradients[first][name]
            for other in others:
                gradient = gradient + self._gradients[other][name]
            norms.append(torch.linalg.vector_norm(gradient.to(self._own[name].dtype)))
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def step_layers(
        self,
        layers: Iterable[int],
        gradients: Mapping[int, Mapping[str, Tensor]] | None = None,
        *,
        scale: Tensor | None = None,
        settings: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """One optimizer step of the parameters that these layers own, from the gradients in the store or given ones.
        As in torch, one without a gradient is not stepped: it does not decay, and its state stays.

        scale: a scalar that the gradients are multiplied by first. settings: of each group, from this step on.
        """
        found = self._gradients if gradients is None else gradients
        stepped = [
            name
            for layer in layers
            for name in self._gradients[layer]
            if self._uses[name][0] == layer and any(self._touched[use][name] for use in self._uses[name])
        ]
        # a step takes all gradients that are set: those of another thread's layers, too
        with self._lock, torch.no_grad():
            for ours, theirs in zip(self.param_groups, settings or (), strict=False):
                ours.update(theirs)
            for name in stepped:
                first, *others = self._uses[name]
                gradient = found[first][name]
                for other in others:
                    gradient.add_(found[other][name])
                own = self._own[name]
                own.grad = gradient.to(own.dtype)
                if scale is not None:
                    own.grad.mul_(scale)
            # torch passes over parameters without a gradient: all of the other layers'
            self.optimizer.step()
            for name in stepped:
                self._own[name].grad = None
                self._place(name)
                self._take_back(name)
                for use in self._uses[name]:
                    if self._weights[use][name] is not self._own[name]:
                        self._weights[use][name].copy_(self._own[name])

    def pass_over(self, layers: Iterable[int]) -> None:
        """The gradients of these layers are not used."""
        for layer in layers:
            for name in self._gradients[layer]:
                if self._uses[name][0] == layer:
                    self._take_back(name)

    def _take_back(self, name: str) -> None:
        for use in self._uses[name]:
            self._touched[use][name].fill_(False)

    def _place(self, name: str) -> None:
        """Move a parameter's state into the store, once.

        The first step is torch's own, since what a state starts from is each optimizer's secret: zeros for Adam,
        a learning rate for Rprop, the first gradient for momentum.
        """
        if name not in self._unplaced:
            return
        self._unplaced.discard(name)
        state, places = self.optimizer.state[self._own[name]], self._states[name]
        for key, place in places.items():
            if key == MASTER:
                continue
            place.copy_(state[key])
            state[key] = place
