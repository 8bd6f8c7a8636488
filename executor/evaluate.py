"""A pack in an iteration of evaluation: its layers forward, and where it is the last one, the loss.

F1.0    Y0.0 I1.0 ─ layers in evaluation mode ─► Y1.0      no stash, nothing saved
B4.0    X4.0 Y3.0 ─ likewise ─► the loss                   no gradients
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from executor.compute import forget, given, own_buffers, pack_weights, run_layer, standalone
from executor.decompose.cut import TAPE
from executor.decompose.evaluation import evaluating
from executor.randomness import seed_layer
from planner.contract.actions import Action, Backward, Forward

if TYPE_CHECKING:
    from executor.replay import Rank


def evaluate_pack(rank: Rank, action: Action, iteration: int) -> bool:
    """Run a forward pack, or of the fused one what comes before its backward. Buffers stay as they are."""
    started = time.perf_counter()
    rules, cut = rank.rules, rank.evaluation
    assert cut is not None
    assert isinstance(action, Forward | Backward)
    is_last = isinstance(action, Backward)
    pack: Any = (rules.backward_packs if is_last else rules.forward_packs)[action.pack]
    first, end = (rules.backward_samples if is_last else rules.forward_samples)[action.microbatch]
    if is_last:
        weights = rules.backward_weights(action.pack, rules.backward_replica[action.microbatch])
    else:
        weights = rules.forward_weights(action.pack, rules.forward_replica[action.microbatch])
    held = pack_weights(rank, weights)
    values = [value for value in rules.effects(action).makes if value in rank.needed.values]
    handed = {value: [(t.src, t.name) for t in rules.tensors_of(value)] for value in values}
    kept = {key for keys in handed.values() for key in keys}
    environment, step = given(rank, action), rank.iterations.step(iteration)
    with ExitStack() as stack:
        stack.enter_context(rank.device.on("compute"))
        stack.enter_context(torch.no_grad())
        if cut.cut_by == TAPE:
            # modules that stay whole ask in which mode they are
            stack.enter_context(evaluating(rank.workload.model))
        for layer in range(pack.first, pack.last + 1):
            # a model may draw in evaluation, too
            seed_layer(rank.options.seed, rank.options.done + step, layer, rank.first_sample + first)
            out = run_layer(rank, cut, layer, held, environment, end - first, own_buffers(rank, held, layer))
            if layer == len(cut.layers) - 1:
                rank.store.losses[iteration % 2][action.microbatch].copy_(out[0], non_blocking=True)
            forget(rank, environment, layer, pack.last, kept)
        for value, keys in handed.items():
            for key in keys:
                if key not in environment:  # only training hands it on
                    boundary = cut.boundaries[key]
                    environment[key] = torch.zeros(
                        boundary.shape_of(end - first),
                        dtype=boundary.dtype,
                        device=rank.memory.nothing.device,
                    )
            rank.memory.keep(
                value, {key: standalone(rank, environment[key], environment, key) for key in keys}
            )
        environment.clear()
    # what a fused pack's forward alone takes is not planned
    seconds = 0.0 if is_last or not pack.seconds else pack.seconds[action.microbatch]
    return rank.device.pace(started, seconds)
