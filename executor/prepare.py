"""From a schedule and a loaded model to a rank that is ready to run: checked, its store filled, perhaps resumed.

Every rank of the process group calls `prepare` at the same time; the first of each server makes the store and fills it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from executor.checkpoint import Progress, Writer, check_same_run, read_progress, restore
from executor.decompose import Decomposition
from executor.host import HostStore, create_memory, plan_store
from executor.load import check_model
from executor.options import RunOptions
from executor.replay import Rank
from executor.servers import Servers
from executor.structure import LayerPlaces, layer_places
from executor.text import fingerprint
from executor.weights import ModelState, attach, fill, fill_from, model_state, open_weights
from executor.workload import Workload
from planner.contract.errors import HarmonyError
from planner.contract.precedence import Graph
from planner.contract.profile import Profile
from planner.contract.rules import Rules
from planner.contract.schedule import Schedule, parse_program
from planner.contract.store import schedule_hash
from planner.contract.verify import check_microbatches, check_program


@dataclass(frozen=True)
class Prepared:
    """A rank that is ready, and what belongs to its run. writer: on rank 0 of all servers, where the run saves checkpoints."""

    workload: Workload
    decomposition: Decomposition
    graph: Graph
    store: HostStore
    state: ModelState
    rank: Rank
    servers: Servers
    progress: Progress
    writer: Writer | None

    def save(self, steps: int, on_layer: Callable[[int], None] = lambda layer: None) -> None:
        """Write the checkpoint of what so many iterations left. Raises OSError."""
        assert self.writer is not None
        scale = tuple(self.store.scaling.tolist()) if self.rank.options.is_scaled else None
        self.writer.write(msgspec.structs.replace(self.progress, steps=steps, scaling=scale), on_layer)


def prepare(
    schedule: Schedule,
    options: RunOptions,
    workload: Workload,
    decomposition: Decomposition,
    profile: Profile,
    *,
    resumed: Path | None = None,
) -> Prepared:
    """Raises HarmonyError where the schedule is not the model's or breaks a rule, or a checkpoint is another run's."""
    check_model(schedule, profile)
    rules = Rules(profile, schedule.configuration)
    check_microbatches(rules)
    graph = Graph(parse_program(schedule.programs.train), rules)
    check_program(graph)
    _check_residents(rules, options)
    servers = Servers(schedule.configuration.num_servers, schedule.configuration.num_devices)
    servers.check_alike(
        {"the schedule": schedule_hash(schedule), "--seed": options.seed, "iterations done": options.done}
    )
    rank = dist.get_rank() - servers.rank_of(0)
    places = layer_places(decomposition, options.recipe)
    store = _share_store(servers, rank, rules, decomposition, len(graph.actions), places)
    progress = Progress(
        options.done,
        schedule.configuration.samples,
        options.seed,
        options.optimizer.lower(),
        options.settings | ({} if options.clip_norm is None else {"clip_norm": options.clip_norm}),
        decomposition.structure_hash,
        "" if options.data is None else fingerprint(options.data),
    )
    state = model_state(workload, decomposition)
    if rank != 0:
        attach(store, decomposition)
    else:
        fill(store, decomposition)
        if options.weights is not None:
            fill_from(store, decomposition, open_weights(options.weights))
        if resumed is not None:
            saved = read_progress(resumed)
            check_same_run(resumed, saved, progress)
            restore(store, decomposition, places, resumed)
            if saved.scaling is not None:
                store.scaling.copy_(torch.tensor(saved.scaling))
    writer = None
    if rank == servers.server == 0 and options.checkpoints is not None:
        writer = Writer(options.checkpoints, store, decomposition, places, state)
    servers.meet()
    runner = Rank(rank, graph, schedule.hardware, workload, decomposition, places, store, options, servers)
    servers.meet()
    return Prepared(workload, decomposition, graph, store, state, runner, servers, progress, writer)


def check_checkpoints(options: RunOptions, resume: bool) -> None:
    """Raise HarmonyError where checkpoints cannot be written, or another run's are there."""
    if options.checkpoints is None:
        if resume:
            raise HarmonyError("--resume: from which folder? say --checkpoint FOLDER")
        return
    options.checkpoints.check_place()
    if not resume:
        options.checkpoints.check_new()


def resumed_options(options: RunOptions) -> tuple[RunOptions, Path | None]:
    """What is left to do, and the checkpoint to go on from; all, and None, where there is none yet."""
    assert options.checkpoints is not None
    newest = options.checkpoints.newest()
    if newest is None:
        return options, None
    done = read_progress(newest).steps
    if done >= options.steps:
        raise HarmonyError(
            f"--resume: {newest} has {done} iterations done, --steps {options.steps} leaves none to do; ask for more"
        )
    return replace(options, done=done, steps=options.steps - done, weights=None), newest


def _check_residents(rules: Rules, options: RunOptions) -> None:
    """Raise HarmonyError where the host has no weights to save before the run ends."""
    checkpoints = options.checkpoints
    if checkpoints is None or not 0 < checkpoints.every < options.steps:
        return
    for b, pack in enumerate(rules.backward_packs):
        if pack.update == "device":
            raise HarmonyError(
                f"--checkpoint-every {checkpoints.every}: backward pack {b} stays on its device until the run ends; "
                f"plan with --updates host, or leave --checkpoint-every out"
            )


def _share_store(
    servers: Servers,
    rank: int,
    rules: Rules,
    decomposition: Decomposition,
    num_nodes: int,
    places: Sequence[LayerPlaces],
) -> HostStore:
    layout = plan_store(rules, decomposition, num_nodes)
    made: Any = None
    if rank == 0:
        try:
            descriptor = create_memory(layout.total)
            made = os.getpid(), descriptor
        except HarmonyError as error:
            made = error
    made = servers.from_first(made)
    if isinstance(made, HarmonyError):
        raise made
    process, theirs = made
    if rank != 0:
        descriptor = os.open(f"/proc/{process}/fd/{theirs}", os.O_RDWR)
    return HostStore(descriptor, layout, rules, decomposition, places)
