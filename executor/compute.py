"""Forward and backward of a pack on one microbatch: from values on the device to the values that it makes.

    F1.0    Y0.0 I1.0 ─ layers without gradients ─► Y1.0 S1.0
    B1.0    X1.0 ─ layers with gradients, same random numbers ─► outputs; D2.0 ─ backward ─► D1.0, G1 += ...

Where a microbatch's activations are kept or offloaded, its forward runs with gradients and leaves its graph (AF1.0),
and the backward goes through that one instead of a second forward.

The last backward pack has no forward of its own before it: it starts from Y and ends in the loss (fused).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from executor.decompose.layers import Decomposition, TensorName
from executor.host import over_storage
from executor.memory import Held
from executor.randomness import seed_layer
from executor.saved import SavedGraph, SavedTensors, Shared
from planner.contract.actions import Backward, Forward, Value
from planner.contract.rules import Rules
from planner.contract.schedule import BackwardPack

if TYPE_CHECKING:
    from executor.replay import Rank

End = TypeVar("End", Tensor, GradientEdge)

Environment = dict[TensorName, Tensor]
"""The tensors between layers that a pack has at a moment."""


def run_forward(rank: Rank, action: Forward, iteration: int) -> bool:
    """A forward pack: what later packs and recomputes need stays, the rest goes at once.

    Without gradients, unless its backward will not recompute.
    """
    started = time.perf_counter()
    pack = rank.rules.forward_packs[action.pack]
    first, end = rank.rules.forward_samples[action.microbatch]
    weights = pack_weights(
        rank, rank.rules.forward_weights(action.pack, rank.rules.forward_replica[action.microbatch])
    )
    makes = rank.rules.effects(action).makes
    handed = {v: [(t.src, t.name) for t in rank.rules.tensors_of(v)] for v in makes if v.kind in "YS"}
    saves = next((value for value in makes if value.kind == "AF"), None)
    environment, step = given(rank, action), rank.options.done + rank.iterations.step(iteration)
    with rank.device.on("compute"):
        graph = _open_graph(rank, action, weights, environment) if saves is not None else None
        kept = {key for keys in handed.values() for key in keys}
        with graph.saved.hooks() if graph is not None else torch.no_grad():
            for layer in range(pack.first, pack.last + 1):
                seed_layer(rank.options.seed, step, layer, rank.first_sample + first)
                own = _states(rank, weights, layer, iteration, action.microbatch, is_saved=graph is not None)
                run_layer(rank, rank.decomposition, layer, weights, environment, end - first, own)
                for name, changed in own.items():
                    weights.buffers[layer][name].copy_(changed)
                forget(rank, environment, layer, pack.last, kept)
        for value, keys in handed.items():
            rank.memory.keep(
                value, {key: standalone(rank, environment[key], environment, key) for key in keys}
            )
        if saves is not None and graph is not None:
            ends = {
                key: environment[key] for key in kept if rank.decomposition.boundaries[key].is_differentiable
            }
            graph.close(dict(sorted(ends.items())), rank.memory.nothing)
            del ends
            rank.memory.keep_graph(saves, graph)
        environment.clear()
    return rank.device.pace(started, pack.seconds[action.microbatch] if pack.seconds else 0.0)


def _open_graph(rank: Rank, action: Forward, weights: Held, environment: Environment) -> SavedGraph:
    """A graph that begins at the pack's inputs: leaves take their places in the environment."""
    slots: dict[int, Shared] = {}
    others = []
    if weights.slot is not None:
        slots[weights.slot.data_ptr()] = "weights"
    for place, value in rank.rules.effects(action).reads:
        held = rank.memory[value] if place == "gpu" and value.kind in "IY" else None
        if held is None or held.slot is None:
            continue
        if value.kind == "I":
            slots[held.slot.data_ptr()] = "batch"
        else:
            others += list(held.tensors.values())
    leaves = _leaves(rank, environment)
    environment |= leaves
    saved = SavedTensors(slots, others, rank.memory.pool.owns)
    return SavedGraph(saved, leaves, weights.parameters)


def _leaves(rank: Rank, given: Environment) -> Environment:
    boundaries = rank.decomposition.boundaries
    return {
        key: tensor.detach().requires_grad_(boundaries[key].is_differentiable)
        for key, tensor in given.items()
    }


def run_backward(rank: Rank, action: Backward, iteration: int) -> bool:
    """Forward again with gradients (for the fused pack: for the first time), then backward.

    Where the forward left its graph, backward at once.
    """
    started = time.perf_counter()
    rules = rank.rules
    pack = rules.backward_packs[action.pack]
    replica = rules.backward_replica[action.microbatch]
    weights = pack_weights(rank, rules.backward_weights(action.pack, replica))
    graph = rank.memory.graphs.pop(Value("AF", action.pack, action.microbatch), None)
    versions = _attach_gradients(rank, action, weights.parameters if graph is None else graph.parameters)
    with rank.device.on("compute"):
        if graph is None:
            leaves = _backward_after_forward(rank, action, weights, iteration)
        else:
            leaves = _backward_through_graph(rank, action, weights, graph)
            del graph
        _note_touched(rank, versions)
        handed = Value("D", action.pack, action.microbatch)
        tensors = rules.tensors_of(handed)
        if tensors:
            found = {(t.src, t.name): leaves[t.src, t.name] for t in tensors}
            rank.memory.keep(
                handed,
                {
                    k: standalone(rank, t.grad if t.grad is not None else torch.zeros_like(t), {}, k)
                    for k, t in found.items()
                },
            )
        leaves.clear()
    return rank.device.pace(started, pack.seconds[action.microbatch] if pack.seconds else 0.0)


def _backward_after_forward(rank: Rank, action: Backward, weights: Held, iteration: int) -> Environment:
    """Run forward and backward; the leaves, with their gradients."""
    rules = rank.rules
    pack = rules.backward_packs[action.pack]
    is_fused = action.pack == rules.fused
    leaves = _leaves(rank, given(rank, action))
    loss, ends = _recompute(rank, action, pack, iteration, weights, dict(leaves))
    if is_fused:
        share = float(rank.store.shares[iteration % 2][action.microbatch])
        rank.store.losses[iteration % 2][action.microbatch].copy_(loss.detach(), non_blocking=True)
        if rank.options.is_scaled:
            share *= rank.wait_for_scale(iteration)
        if share:
            torch.autograd.backward([loss], [torch.full_like(loss, share)])
    else:
        outputs, gradients = _received_gradients(rank, action, ends)
        torch.autograd.backward(outputs, gradients)
    return leaves


def _backward_through_graph(rank: Rank, action: Backward, weights: Held, graph: SavedGraph) -> Environment:
    """Backward through what the forward left; the leaves, with their gradients."""
    shared: dict[Shared, torch.UntypedStorage] = {}
    if weights.slot is not None:
        shared["weights"] = weights.slot.untyped_storage()
    batch = Value("X", action.pack, action.microbatch)
    if rank.rules.tensors_of(batch):
        slot = rank.memory[batch].slot
        assert slot is not None
        shared["batch"] = slot.untyped_storage()
    graph.saved.resolve(shared)
    outputs, gradients = _received_gradients(rank, action, graph.ends)
    if outputs:
        torch.autograd.backward(outputs, gradients)
    graph.ends.clear()
    return graph.leaves


def _recompute(
    rank: Rank,
    action: Backward,
    pack: BackwardPack,
    iteration: int,
    weights: Held,
    environment: Environment,
) -> tuple[Tensor, Environment]:
    """The loss (of the fused pack), and what leaves the pack with a gradient to come."""
    ends: Environment = {}
    kept: set[TensorName] = set()
    loss = torch.empty(0)
    first, end = rank.rules.backward_samples[action.microbatch]
    is_fused = action.pack == rank.rules.fused
    step = rank.options.done + rank.iterations.step(iteration)
    for layer in range(pack.first, pack.last + 1):
        seed_layer(rank.options.seed, step, layer, rank.first_sample + first)
        # statistics are updated once: by the forward, which for the fused pack is this one
        own = {} if is_fused else own_buffers(rank, weights, layer)
        if own and rank.decomposition.layers[layer].states:
            snapshots = rank.store.snapshots(layer, iteration, action.microbatch)
            for name, state in snapshots.items():
                own[name].copy_(state, non_blocking=True)
        out = run_layer(rank, rank.decomposition, layer, weights, environment, end - first, own)
        if is_fused and layer == pack.last:
            (loss,) = out
        for name in (
            rank.decomposition.layers[layer].outputs if layer < len(rank.decomposition.layers) - 1 else ()
        ):
            boundary = rank.decomposition.boundaries[layer, name]
            tensor = environment[layer, name]
            # a module that stays whole may give one that depends on no parameter this time
            if boundary.consumers[-1] > pack.last and boundary.is_differentiable and tensor.requires_grad:
                ends[layer, name] = tensor
        forget(rank, environment, layer, pack.last, kept)
    return loss, ends


def run_layer(
    rank: Rank,
    cut: Decomposition,
    layer: int,
    weights: Held,
    environment: Environment,
    num_samples: int,
    own: Mapping[str, Tensor],
) -> tuple[Tensor, ...]:
    """Run one layer of a cut, for training or for evaluation; its outputs go into the environment. own: buffers that
    take the place of the pack's."""
    code = cut.layers[layer]
    parameters = weights.parameters.get(layer, {})
    buffers = weights.buffers.get(layer, {})
    out = code(
        [parameters[name] for name in code.parameters],
        [own[name] if name in own else buffers[name] for name in code.buffers],
        [environment[key] for key in code.inputs],
        num_samples,
    )
    if layer < len(rank.decomposition.layers) - 1:
        for name, tensor in zip(code.outputs, out, strict=True):
            environment[layer, name] = tensor
    return out


def own_buffers(rank: Rank, weights: Held, layer: int) -> dict[str, Tensor]:
    """Copies of what a layer changes, so that it stays as it is."""
    return {
        name: weights.buffers[layer][name].clone()
        for name in rank.decomposition.layers[layer].mutated_buffers
    }


def _states(
    rank: Rank, weights: Held, layer: int, iteration: int, microbatch: int, *, is_saved: bool
) -> dict[str, Tensor]:
    """Before a forward: its layer's states go where a recompute finds them; copies to run on, where a saved graph
    must not hold the ones that the next microbatch changes."""
    names = rank.decomposition.layers[layer].states
    if names and not is_saved:
        for name, snapshot in rank.store.snapshots(layer, iteration, microbatch).items():
            snapshot.copy_(weights.buffers[layer][name], non_blocking=True)
    return {name: weights.buffers[layer][name].clone() for name in names} if is_saved else {}


def forget(rank: Rank, environment: Environment, layer: int, last: int, kept: set[TensorName]) -> None:
    """Let go of what no later layer of the pack uses and nobody outside waits for."""
    for key in list(environment):
        consumers = rank.decomposition.boundaries[key].consumers
        if key not in kept and not any(layer < consumer <= last for consumer in consumers):
            del environment[key]


def standalone(rank: Rank, tensor: Tensor, environment: Environment, key: TensorName) -> Tensor:
    """The tensor in a storage of its own.

    A view would keep the rest alive, uncounted by the plan; a view of a slot would change with the slot's
    next value.
    """
    tensor = tensor.detach()
    storage = tensor.untyped_storage()
    shared = any(
        other is not tensor and name != key and other.untyped_storage().data_ptr() == storage.data_ptr()
        for name, other in environment.items()
    )
    if (
        shared
        or rank.memory.pool.owns(tensor)
        or storage.nbytes() != tensor.nbytes
        or not tensor.is_contiguous()
    ):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def pack_weights(rank: Rank, values: tuple[Value, ...]) -> Held:
    """Parameters and buffers of a pack, from one value or from several held ones."""
    if len(values) == 1:
        return rank.memory[values[0]]
    joined = Held()
    for value in values:
        held = rank.memory[value]
        joined.parameters |= held.parameters
        joined.buffers |= held.buffers
    return joined


def _attach_gradients(
    rank: Rank, action: Backward, parameters: Mapping[int, Mapping[str, Tensor]]
) -> list[tuple[int, str, Tensor, int]]:
    """Each parameter's .grad is its place in G, zeroed by the first microbatch: backward adds in place.

    Returns (layer, name, gradient, its version).
    """
    rules = rank.rules
    if not rules.is_trained(action.pack):
        return []
    replica = rules.backward_replica[action.microbatch]
    value = Value("G", action.pack, replica=rules.replica_tag(replica))
    if value in rules.effects(action).makes:
        held = rank.memory.make(value, rules.nbytes(value), "compute")
        assert held.flat is not None
        with rank.device.on("compute"):
            held.flat.zero_()
        pack = rules.backward_packs[action.pack]
        start = 0
        for layer in range(pack.first, pack.last + 1):
            held.gradients[layer] = {
                name: over_storage(
                    held.flat.untyped_storage(), start + place.offset, place.shape, place.dtype
                )
                for name, place in rank.places[layer].gradients.items()
            }
            start += rank.places[layer].gradient_bytes
    found = []
    for layer, gradients in rank.memory[value].gradients.items():
        for name, gradient in gradients.items():
            parameters[layer][name].grad = gradient
            found.append((layer, name, gradient, gradient._version))
    return found


def _note_touched(rank: Rank, versions: list[tuple[int, str, Tensor, int]]) -> None:
    """Whoever has a gradient that backward added to; what the loss did not depend on has none."""
    for layer, name, gradient, version in versions:
        if gradient._version != version:
            rank.store.touched[layer][name].fill_(True)


def given(rank: Rank, action: Forward | Backward) -> Environment:
    """The tensors that a pack is given, from the values that its effects read."""
    rules = rank.rules
    found: Environment = {}
    parts: dict[TensorName, list[tuple[int, Tensor]]] = {}
    for place, value in rules.effects(action).reads:
        if place != "gpu" or value.kind not in "IXY":
            continue
        for key, tensor in rank.memory[value].tensors.items():
            if value.kind == "Y" and isinstance(action, Backward):
                parts.setdefault(key, []).append((value.microbatch, tensor))
            else:
                found[key] = tensor
    if isinstance(action, Backward):
        for key, pieces in parts.items():
            found[key] = _joined(rank, rules, action, key, pieces)
    wanted = _wanted(rules, action)
    return {key: tensor for key, tensor in found.items() if key in wanted}


def _wanted(rules: Rules, action: Forward | Backward) -> set[TensorName]:
    pack: Any = (rules.forward_packs if isinstance(action, Forward) else rules.backward_packs)[action.pack]
    return {(t.src, t.name) for t in rules.costs.entering(pack.first, pack.last)}


def _joined(
    rank: Rank, rules: Rules, action: Backward, key: TensorName, pieces: list[tuple[int, Tensor]]
) -> Tensor:
    """A backward microbatch's samples out of the forward microbatches that have them."""
    boundary = rank.decomposition.boundaries[key]
    if not boundary.is_batched:
        return pieces[0][1]
    first, end = rules.backward_samples[action.microbatch]
    rows = boundary.shape[0]
    cut = []
    for microbatch, tensor in sorted(pieces, key=lambda piece: piece[0]):
        begin, stop = rules.forward_samples[microbatch]
        cut.append(tensor[(max(first, begin) - begin) * rows : (min(end, stop) - begin) * rows])
    if len(cut) == 1:
        return cut[0]
    return torch.cat(cut)


def _received_gradients(
    rank: Rank, action: Backward, ends: Mapping[TensorName, End]
) -> tuple[list[End], list[Tensor]]:
    """Gradients of what left the pack, summed over the later packs that used it.

    The last of them comes first, as in autograd: another order would round another way.
    """
    sums: Environment = {}
    given = [v for place, v in rank.rules.effects(action).reads if place == "gpu" and v.kind == "D"]
    for value in reversed(given):
        for key, gradient in rank.memory[value].tensors.items():
            if key in ends:
                sums[key] = sums[key] + gradient if key in sums else gradient
    keys = [key for key in ends if key in sums]
    return [ends[key] for key in keys], [sums[key] for key in keys]
