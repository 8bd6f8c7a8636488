"""What each action does. `HANDLERS[type(action)](rank, action, iteration)` runs it, already in its order.

A handler never waits for another action: replay.py has done that. One that changes the host's weights waits for the
checkpoint that is being written of them. It runs on its stream's thread. Forward and
backward are in compute.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from executor import scaling
from executor.compute import run_backward, run_forward
from executor.decompose.layers import BATCH, TensorName
from executor.host import check_free, over_storage
from executor.memory import slot_bytes, tensors_in
from executor.optimizer import clip_coefficient
from executor.resident import place_weights
from planner.contract.actions import (
    Action,
    Agree,
    Backward,
    Forward,
    Free,
    Receive,
    Reduce,
    Send,
    SwapIn,
    SwapOut,
    Update,
    Value,
)
from planner.contract.errors import HarmonyError
from planner.contract.precedence import Graph
from planner.contract.rules import Rules

if TYPE_CHECKING:
    from executor.replay import Rank

# ---- swaps


def run_swap_in(rank: Rank, action: SwapIn, iteration: int) -> bool:
    """Host to device, into a slot."""
    value = action.value
    if value.kind == "AB":
        nbytes = _swap_in_saved(rank, action)
    else:
        nbytes = rank.rules.nbytes(value)
        if value.kind in ("WF", "WB"):
            _swap_in_weights(rank, value, nbytes)
        else:
            _swap_in_tensors(rank, value, nbytes, iteration)
    rank.recorder.record.swapped_in_bytes += nbytes
    return False


def _swap_in_weights(rank: Rank, value: Value, nbytes: int) -> None:
    started = time.perf_counter()
    pack: Any = (rank.rules.forward_packs if value.kind == "WF" else rank.rules.backward_packs)[value.pack]
    held = rank.memory.make(value, nbytes, "h2d")
    place_weights(rank, held, pack.first, pack.last)
    assert held.flat is not None
    rank.device.copy([(held.flat, rank.store.weight_range(pack.first, pack.last))], "h2d", started)


def _swap_in_tensors(rank: Rank, value: Value, nbytes: int, iteration: int) -> None:
    """Batch tensors and stashes of one microbatch."""
    samples = (rank.rules.forward_samples if value.kind == "I" else rank.rules.backward_samples)[
        value.microbatch
    ]
    boundaries = rank.decomposition.boundaries
    keys = [(t.src, t.name) for t in rank.rules.tensors_of(value)]
    shapes = {k: (boundaries[k].shape_of(samples[1] - samples[0]), boundaries[k].dtype) for k in keys}
    if any(key[0] == BATCH for key in keys):
        rank.iterations.wait_for_batch(iteration)
    started = time.perf_counter()
    held = rank.memory.make(value, nbytes, "h2d", slot_bytes(shapes))
    assert held.slot is not None
    held.tensors = tensors_in(held.slot, shapes)
    copies = []
    for key, tensor in held.tensors.items():
        if key[0] == BATCH:
            source = rank.store.batch(iteration, key[1], *samples)
        else:
            source = rank.store.stash(key, *samples, rank.rules.intersecting(value.microbatch)[0])
        copies.append((tensor, source))
    rank.device.copy(copies, "h2d", started)


def _swap_out_saved(rank: Rank, action: SwapOut) -> int:
    """What a forward saved, to memory of this process: no other one has its graph."""
    started = time.perf_counter()
    pieces = rank.memory.graphs[action.value].saved.leave(rank.memory.nothing.device)
    nbytes = sum(data.nbytes for _, data in pieces)
    area = rank.offloaded.get(action.value)
    if area is None or area.nbytes < nbytes:
        check_free(nbytes, f"gpu{rank.rank}: {action}")
        area = rank.offloaded[action.value] = rank.device.host_area(nbytes)
    for _, data in pieces:
        rank.device.used_on(data, "d2h")
    rank.device.copy([(area[start : start + data.nbytes], data) for start, data in pieces], "d2h", started)
    # until the free: the copies may still run
    rank.memory[action.value].pieces = [data for _, data in pieces]
    rank.recorder.moved(rank.graph.node_of[action], nbytes)
    return nbytes


def _swap_in_saved(rank: Rank, action: SwapIn) -> int:
    """The same pieces back into memory that their graph holds."""
    started = time.perf_counter()
    left = Value("AF", action.value.pack, action.value.microbatch)
    area = rank.offloaded[left]
    pieces = rank.memory.graphs[left].saved.come_back(
        lambda nbytes: rank.device.empty(nbytes, str(action.value), "h2d")
    )
    rank.memory.come_back(action.value)
    rank.device.copy([(data, area[start : start + data.nbytes]) for start, data in pieces], "h2d", started)
    for _, data in pieces:
        rank.device.used_on(data, "compute")
    nbytes = sum(data.nbytes for _, data in pieces)
    rank.recorder.moved(rank.graph.node_of[action], nbytes)
    return nbytes


def run_swap_out(rank: Rank, action: SwapOut, iteration: int) -> bool:
    """Device to host: stashes, saved activations, gradients, changed buffers."""
    if action.value.kind == "AF":
        rank.recorder.record.swapped_out_bytes += _swap_out_saved(rank, action)
        return False
    started = time.perf_counter()
    value, rules = action.value, rank.rules
    copies: list[tuple[Tensor, Tensor]] = []
    if value.kind == "S":
        first, end = rules.forward_samples[value.microbatch]
        tensors: dict[TensorName, Tensor] = {}
        for _, part in rules.effects(action).reads:
            tensors |= rank.memory[part].tensors
        for tensor in rules.stashed_tensors(value.pack):
            source = tensors[tensor.src, tensor.name]
            rank.device.used_on(source, "d2h")
            copies.append((rank.store.stash((tensor.src, tensor.name), first, end, value.microbatch), source))
    elif value.kind == "G":
        pack = rules.backward_packs[value.pack]
        flat = rank.memory[value].flat
        assert flat is not None
        copies.append((rank.store.gradient_range(pack.first, pack.last), flat))
    else:
        rank.iterations.wait_until_saved(min(rank.memory[value].buffers), iteration)
        for layer, buffers in rank.memory[value].buffers.items():
            if rank.decomposition.layers[layer].batch_coupled:
                copies += [(target, buffers[name]) for name, target in rank.store.buffers(layer).items()]
    rank.device.copy(copies, "d2h", started)
    rank.recorder.record.swapped_out_bytes += rules.moved_bytes(action)
    return False


# ---- transfers, updates, frees


def run_send(rank: Rank, action: Send, iteration: int) -> bool:
    """To another device, tensor by tensor in their order."""
    value = action.value
    held = rank.memory[Value(value.kind, value.pack, value.microbatch)]
    for tensor in rank.rules.tensors_of(value):
        sent = held.tensors[tensor.src, tensor.name]
        rank.device.used_on(sent, "send")
        with rank.device.on("send"):
            rank.peers.send(sent, rank.device, rank.rank, value.device)
    rank.recorder.record.sent_bytes += rank.rules.moved_bytes(action)
    return False


def run_receive(rank: Rank, action: Receive, iteration: int) -> bool:
    """From another device, into a slot."""
    value, rules = action.value, rank.rules
    source, _ = rules.place(Send(value))
    samples = (rules.forward_samples if value.kind == "Y" else rules.backward_samples)[value.microbatch]
    boundaries = rank.decomposition.boundaries
    keys = [(t.src, t.name) for t in rules.tensors_of(value)]
    shapes = {k: (boundaries[k].shape_of(samples[1] - samples[0]), boundaries[k].dtype) for k in keys}
    held = rank.memory.make(value, rules.nbytes(value), "recv", slot_bytes(shapes))
    assert held.slot is not None
    held.tensors = tensors_in(held.slot, shapes)
    for tensor in held.tensors.values():
        with rank.device.on("recv"):
            rank.peers.receive(tensor, rank.device, source, rank.rank)
    return False


def run_reduce(rank: Rank, action: Reduce, iteration: int) -> bool:
    """A pack's gradients: a replica's share to the owner, or at the owner the sum of all."""
    value, rules = action.value, rank.rules
    owner = rules.backward_device(value.pack, rules.owner(value.pack))
    with rank.device.on("reduce"):
        flat = rank.memory[value].flat
        assert flat is not None
        for run in _gradient_runs(rank, value.pack, flat):
            if rank.rank == owner:
                devices = [rules.backward_device(value.pack, r) for r in range(len(rules.replicas))]
                rank.peers.add_shares(run, rank.device, owner, devices)
            else:
                rank.peers.send_share(run, rank.device, rank.rank, owner)
    return False


def _gradient_runs(rank: Rank, number: int, flat: Tensor) -> list[Tensor]:
    """The bytes of a backward pack's gradients as flat tensors, one for each stretch of one type."""
    pack = rank.rules.backward_packs[number]
    starts: list[tuple[int, torch.dtype]] = []
    layer_start = 0
    for layer in range(pack.first, pack.last + 1):
        for place in rank.places[layer].gradients.values():
            if not starts or starts[-1][1] != place.dtype:
                starts.append((layer_start + place.offset, place.dtype))
        layer_start += rank.places[layer].gradient_bytes
    ends = [start for start, _ in starts[1:]] + [flat.nbytes]
    return [
        over_storage(
            flat.untyped_storage(),
            int(flat.storage_offset()) + start,
            ((end - start) // dtype.itemsize,),
            dtype,
        )
        for (start, dtype), end in zip(starts, ends, strict=True)
    ]


def run_update(rank: Rank, action: Update, iteration: int) -> bool:
    """The optimizer step of a pack, on the host or on the device."""
    started = time.perf_counter()
    pack = rank.rules.backward_packs[action.pack]
    if pack.update == "device":
        rank.residents.update(action.pack, rank.group_settings(iteration))
    else:
        rank.iterations.wait_until_saved(pack.first, iteration)
        scale = rank.store.agreed[1] if rank.rules.configuration.agree else None
        layers = range(pack.first, pack.last + 1)
        if not rank.rules.configuration.agree:
            _add_over_servers(rank, [action.pack])
        if rank.options.is_scaled and rank.store.scaling[2]:
            # some gradient overflowed: nothing is stepped
            rank.optimizer.pass_over(layers)
            return rank.device.pace(started, pack.update_seconds)
        rank.optimizer.step_layers(layers, scale=scale, settings=rank.group_settings(iteration))
    return rank.device.pace(started, pack.update_seconds)


def run_agree(rank: Rank, action: Agree, iteration: int) -> bool:
    """The norm over all gradients, summed in the model's order, and what updates multiply them by."""
    started = time.perf_counter()
    store, options = rank.store, rank.options
    _add_over_servers(rank, range(len(rank.rules.backward_packs)))
    norm, coefficient = rank.optimizer.norm(rank.decomposition.parameters), torch.ones(())
    if options.is_scaled:
        # a checkpoint of the iteration before has its scale
        rank.iterations.wait_until_saved(len(rank.decomposition.layers) - 1, iteration)
        coefficient = coefficient * scaling.agree(store.scaling, float(norm))
        norm = norm * coefficient
    if options.clip_norm is not None:
        coefficient = coefficient * clip_coefficient(norm, options.clip_norm)
    store.agreed[0], store.agreed[1] = norm, coefficient
    return rank.device.pace(started, rank.rules.configuration.agree_seconds)


def _add_over_servers(rank: Rank, packs: Iterable[int]) -> None:
    """Make the gradients of backward packs, which are in host memory, the sum over all servers."""
    for number in packs if rank.servers.num_servers > 1 else ():
        pack = rank.rules.backward_packs[number]
        if rank.rules.is_trained(number):
            flat = rank.store.gradient_range(pack.first, pack.last)
            touched = rank.store.touched[pack.first : pack.last + 1]
            rank.servers.add_gradients(_gradient_runs(rank, number, flat), touched)


def run_free(rank: Rank, action: Free, iteration: int) -> bool:
    """The value's bytes may be used again."""
    rank.memory.free(action.value, rank.stream_of(action))
    return False


HANDLERS: dict[type[Action], Callable[..., bool]] = {
    Forward: run_forward,
    Backward: run_backward,
    SwapIn: run_swap_in,
    SwapOut: run_swap_out,
    Send: run_send,
    Receive: run_receive,
    Reduce: run_reduce,
    Update: run_update,
    Agree: run_agree,
    Free: run_free,
}
"""By type of action; each returns whether it overran its planned seconds."""


def check_supported(rules: Rules) -> None:
    """Raise HarmonyError, naming it, for what this version plans but does not replay yet."""
    for b, backward in enumerate(rules.backward_packs):
        if backward.update == "device" and backward.weights != "resident":
            raise HarmonyError(
                f"backward pack {b}: weights {backward.weights!r} with an update on the device cannot be replayed yet, "
                f"only 'resident'"
            )
        if backward.update == "device" and rules.configuration.agree:
            raise HarmonyError(
                f"backward pack {b}: an update on the device cannot wait for a norm over all gradients; "
                f"plan with --clip, which updates on the host"
            )


def check_reductions(graph: Graph) -> None:
    """Raise HarmonyError where two replicas reduce in different orders: each would wait for the other for ever."""
    rules = graph.rules
    orders = {
        lane.device: [entry.action.value.pack for entry in lane.entries if isinstance(entry.action, Reduce)]
        for lane in graph.lanes
        if lane.stream == "reduce"
    }
    for device, packs in orders.items():
        first = device % rules.stages
        for place, (ours, theirs) in enumerate(zip(packs, orders.get(first, []), strict=False)):
            if ours != theirs:
                raise HarmonyError(
                    f"gpu{device}/reduce: pack {ours} is number {place}, on gpu{first}/reduce pack {theirs} is; "
                    f"replicas must reduce in one order"
                )
