"""Weights and optimizer states that never leave a device: in before the first action, updated there, out at the end.

    before      host ─► W, K
    B3.0 .. update:3        G3 ─► step on the device ─► W, K
    after       W, K ─► host, for checkpoints and what the run leaves

What an optimizer's state starts from is its own secret, and its first step makes that state beside everything else.
So the first update of a pack is made on the host, where there is room: gradients out, a step of the host's optimizer,
W and K in again. From the second on the same step runs on the device; both are bit-equal where torch's kernels are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from executor.host import over_storage
from executor.memory import Held
from executor.optimizer import LayerOptimizer
from planner.contract.actions import Value

if TYPE_CHECKING:
    from executor.replay import Rank


class Residents:
    """The resident packs of one rank's device."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._optimizers: dict[int, LayerOptimizer] = {}
        self._values = [v for v in rank.rules.residents() if rank.rules.device_of(v) == rank.rank]
        for value in self._values:
            held = rank.memory.make(value, rank.rules.nbytes(value), "compute")
            if value.kind == "WB":
                place_weights(rank, held, *self._layers(value.pack))
            self._load(value, held)

    @property
    def optimizers(self) -> list[LayerOptimizer]:
        """Those that step on the device so far."""
        return list(self._optimizers.values())

    def update(self, pack: int, settings: Sequence[Mapping[str, Any]]) -> None:
        """One optimizer step of a pack, from the gradients on the device; settings: of each parameter group."""
        rank, layers = self._rank, self._layers(pack)
        replica = rank.rules.replica_tag(rank.rules.owner(pack))
        weights, gradients = (rank.memory[Value(kind, pack, replica=replica)] for kind in ("WB", "G"))
        optimizer = self._optimizers.get(pack)
        with rank.device.on("compute"):
            if optimizer is not None:
                optimizer.step_layers(range(layers[0], layers[1] + 1), gradients.gradients, settings=settings)
                return
            assert gradients.flat is not None
            assert weights.flat is not None
            # statistics have changed since they came in
            rank.store.weight_range(*layers).copy_(weights.flat)
            rank.store.gradient_range(*layers).copy_(gradients.flat)
            rank.optimizer.step_layers(range(layers[0], layers[1] + 1), settings=settings)
            states = Value("K", pack)
            self._load(Value("WB", pack, replica=replica), weights)
            self._load(states, rank.memory[states])
            self._optimizers[pack] = self._on_device(pack, weights)

    def write_back(self) -> None:
        """Give the host what the device has: weights, buffers, states."""
        for value in self._values:
            flat = self._rank.memory[value].flat
            assert flat is not None
            if value.replica <= 0:
                self._on_host(value).copy_(flat)

    def _on_device(self, pack: int, weights: Held) -> LayerOptimizer:
        rank, (first, last) = self._rank, self._layers(pack)
        flat = rank.memory[Value("K", pack)].flat
        assert flat is not None
        states: dict[str, dict[str, Tensor]] = {}
        trained: list[dict[str, Tensor]] = [{} for _ in rank.places]
        start = 0
        for layer in range(first, last + 1):
            places = rank.places[layer]
            trained[layer] = {name: weights.parameters[layer][name] for name in places.gradients}
            for name in places.gradients:
                states.setdefault(name, {})
            for (name, key), place in places.states.items():
                states[name][key] = over_storage(
                    flat.untyped_storage(), start + place.offset, place.shape, place.dtype
                )
            start += places.state_bytes
        touched = rank.store.touched
        return LayerOptimizer(rank.options.recipe, trained, trained, states, touched=touched, is_resumed=True)

    def _load(self, value: Value, held: Held) -> None:
        assert held.flat is not None
        held.flat.copy_(self._on_host(value))

    def _on_host(self, value: Value) -> Tensor:
        store, layers = self._rank.store, self._layers(value.pack)
        return store.weight_range(*layers) if value.kind == "WB" else store.state_range(*layers)

    def _layers(self, pack: int) -> tuple[int, int]:
        backward = self._rank.rules.backward_packs[pack]
        return backward.first, backward.last


def place_weights(rank: Rank, held: Held, first: int, last: int) -> None:
    """Name the parameters and buffers of layers first..last in a value's bytes."""
    assert held.flat is not None
    storage, start = held.flat.untyped_storage(), 0
    for layer in range(first, last + 1):
        places = rank.places[layer]
        parameters = {
            n: over_storage(storage, start + p.offset, p.shape, p.dtype) for n, p in places.weights.items()
        }
        # those of a forward too: its graph may be kept
        for name in places.gradients:
            parameters[name].requires_grad_()
        held.parameters[layer] = parameters
        held.buffers[layer] = {
            n: over_storage(storage, start + p.offset, p.shape, p.dtype) for n, p in places.buffers.items()
        }
        start += places.weight_bytes + places.buffer_bytes
