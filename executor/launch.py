"""Run a schedule: one process per device, a store between them, and an end to all when one fails.

    parent                    rank 0                          rank 1 ...
    hosts the rendezvous      makes the store, fills it       opens the store
    shows progress            runs its streams, feeds batches runs its streams
    kills all on a failure    merges the records

Under torchrun (RANK is set) this process is that rank, and torchrun is the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from executor.decompose import Decomposition, decompose
from executor.host import HostStore, StoreLayout, create_memory, plan_store
from executor.models import Workload
from executor.options import RunOptions
from executor.record import merge
from executor.recorder import RankRecord
from executor.replay import Aborted, Rank
from executor.structure import layer_places, structure
from planner.contract.errors import FormatError, HarmonyError
from planner.contract.precedence import Graph
from planner.contract.profile import Profile, model_hash
from planner.contract.rules import Rules
from planner.contract.schedule import Schedule, parse_program
from planner.contract.trace import Trace
from planner.contract.verify import check_microbatches, check_program

Progress = Callable[[int, float, float], None]
PATIENCE = timedelta(seconds=300)
"""How long ranks wait for each other while they load."""
KILL_SECONDS = 2.0


class RunError(RuntimeError):
    """A rank failed for a reason that is no user's: the message is its traceback."""


@dataclass(frozen=True)
class Job:
    """What every rank is told."""

    schedule: Schedule
    options: RunOptions
    weights_out: Path | None = None


@dataclass(frozen=True)
class Failure:
    """What a rank says before it ends."""

    rank: int
    kind: str
    message: str


def run_schedule(
    schedule: Schedule, options: RunOptions, *, weights_out: Path | None = None, progress: Progress | None = None
) -> Trace:
    """Train by a schedule and return the measured trace.

    Raises HarmonyError (it does not belong to the model or machine), torch.OutOfMemoryError, RunError (a bug).
    """
    job = Job(schedule, options, weights_out)
    _check_optimizer(schedule, options)
    num_devices = schedule.configuration.num_devices
    if "RANK" in os.environ:
        return _run_as_rank(job, num_devices, progress)
    rendezvous = dist.TCPStore("127.0.0.1", 0, None, True, PATIENCE, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ranks = []
    for rank in range(num_devices):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (job, rank, num_devices, rendezvous.port, theirs)
        process = context.Process(target=_rank_main, args=arguments, name=f"gpu{rank}", daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        return _watch(ranks, progress or (lambda iteration, loss, seconds: None))
    finally:
        for process, _ in ranks:
            if process.is_alive():
                process.kill()
        for process, connection in ranks:
            process.join(KILL_SECONDS)
            connection.close()


def _check_optimizer(schedule: Schedule, options: RunOptions) -> None:
    planned = schedule.profile.optimizer
    if planned != options.optimizer.lower():
        raise FormatError(
            f"the schedule was planned for optimizer {planned!r}, the run asks for {options.optimizer.lower()!r}; "
            f"run with --optimizer {planned}, or profile and plan again"
        )


def _watch(ranks: list[tuple[Any, Connection]], progress: Progress) -> Trace:
    """Pass progress on until rank 0 hands over the trace; raise the first failure."""
    trace: Trace | None = None
    open_connections = {connection: (rank, process) for rank, (process, connection) in enumerate(ranks)}
    failures: list[Failure] = []
    deadline: float | None = None
    while open_connections and (deadline is None or time.monotonic() < deadline):
        for connection in wait(list(open_connections), timeout=0.5):
            assert isinstance(connection, Connection)
            rank, process = open_connections[connection]
            try:
                message = connection.recv()
            except EOFError:
                del open_connections[connection]
                process.join(KILL_SECONDS)
                if process.exitcode != 0 and not any(f.rank == rank for f in failures):
                    failures.append(Failure(rank, "bug", f"gpu{rank}: its process ended with exit status {process.exitcode}"))
                continue
            if isinstance(message, Failure):
                failures.append(message)
            elif isinstance(message, Trace):
                trace = message
            else:
                progress(*message)
        # what the first failure broke in other ranks may be heard of first: listen a little longer
        if failures and deadline is None:
            deadline = time.monotonic() + 0.5
    if failures:
        raise _to_error(min(failures, key=lambda f: ("user", "memory", "bug", "aborted").index(f.kind)))
    if trace is None:
        raise RunError("no rank handed over a trace")
    return trace


def _to_error(failure: Failure) -> Exception:
    if failure.kind == "user":
        return HarmonyError(failure.message)
    if failure.kind == "memory":
        return torch.OutOfMemoryError(failure.message)
    return RunError(failure.message)


def _rank_main(job: Job, rank: int, num_devices: int, port: int, parent: Connection) -> None:
    """A rank's process."""
    _die_with_parent()
    # local ranks talk over the loopback; a host name need not resolve
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        rendezvous = dist.TCPStore("127.0.0.1", port, None, False, PATIENCE)
        dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=num_devices, timeout=PATIENCE)
        trace = _run_rank(job, rank, lambda *news: parent.send(news))
        if trace is not None:
            parent.send(trace)
    except BaseException as error:
        parent.send(_failure(rank, error))
        parent.close()
        # no orderly end: threads may hang in a transfer with a rank that is gone
        os._exit(1)
    parent.close()
    os._exit(0)


def _failure(rank: int, error: BaseException) -> Failure:
    if isinstance(error, Aborted):
        return Failure(rank, "aborted", str(error))
    if isinstance(error, torch.OutOfMemoryError):
        return Failure(rank, "memory", str(error).splitlines()[0])
    if isinstance(error, HarmonyError):
        return Failure(rank, "user", str(error))
    return Failure(rank, "bug", f"gpu{rank} failed:\n{''.join(traceback.format_exception(error))}")


def _die_with_parent() -> None:
    """Linux ends this process when its parent ends, however that happens."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
    if os.getppid() == 1:
        os._exit(1)


def _run_as_rank(job: Job, num_devices: int, progress: Progress | None) -> Trace:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != num_devices:
        raise HarmonyError(f"the schedule uses {num_devices} devices, torchrun started {world} ranks; use --nproc-per-node {num_devices}")
    dist.init_process_group("gloo", timeout=PATIENCE)
    trace = _run_rank(job, int(os.environ["RANK"]), progress or (lambda iteration, loss, seconds: None))
    box = [trace]
    dist.broadcast_object_list(box, src=0)
    assert box[0] is not None
    return box[0]


def _run_rank(job: Job, rank: int, on_iteration: Progress) -> Trace | None:
    """Load, run, and on rank 0 merge."""
    options, schedule = job.options, job.schedule
    if options.device == "virtual":
        torch.set_num_threads(1)
    workload = options.load()
    example = workload.draw(torch.Generator().manual_seed(0), 2)
    decomposition = decompose(workload, example, patterns=options.patterns, check=rank == 0)
    profile = structure(decomposition, options.model, options.optimizer, options.settings, options.patterns)
    check_model(schedule, profile)
    rules = Rules(profile, schedule.configuration)
    check_microbatches(rules)
    graph = Graph(parse_program(schedule.programs.train), rules)
    check_program(graph)
    store = _share_store(rank, rules, decomposition, len(graph.actions), options)
    if rank == 0:
        _fill(store, decomposition)
    dist.barrier()
    losses: list[float] = []

    def note(iteration: int, loss: float, seconds: float) -> None:
        losses.append(loss)
        on_iteration(iteration, loss, seconds)

    places = layer_places(decomposition, options.optimizer, options.settings)
    # the store has the weights now: let this process's own copy go
    _release(workload, decomposition)
    runner = Rank(rank, graph, schedule.hardware, workload, decomposition, places, store, options)
    dist.barrier()
    record = runner.run(note)
    records: list[RankRecord | None] = [None] * dist.get_world_size()
    dist.gather_object(record, records if rank == 0 else None)
    if rank != 0:
        return None
    if job.weights_out is not None:
        save_weights(store, decomposition, job.weights_out)
    return merge([r for r in records if r is not None], schedule, graph, options, losses)


def check_model(schedule: Schedule, profile: Profile) -> None:
    """Raise FormatError where a schedule was planned for another model than the one that is to run."""
    ours, planned = model_hash(profile), schedule.profile
    if ours != planned.model_hash:
        raise FormatError(
            f"the schedule was planned for model {planned.model.spec or planned.model.name!r} ({planned.model_hash}), "
            f"--model is {profile.model.spec!r} ({ours}); run the planned model, or profile and plan this one"
        )


def _share_store(
    rank: int, rules: Rules, decomposition: Decomposition, num_nodes: int, options: RunOptions
) -> HostStore:
    layout: StoreLayout = plan_store(rules, decomposition, num_nodes)
    places = layer_places(decomposition, options.optimizer, options.settings)
    box: list[Any] = [None]
    if rank == 0:
        try:
            descriptor = create_memory(layout.total)
            box = [(os.getpid(), descriptor)]
        except HarmonyError as error:
            box = [error]
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], HarmonyError):
        raise box[0]
    process, theirs = box[0]
    if rank != 0:
        descriptor = os.open(f"/proc/{process}/fd/{theirs}", os.O_RDWR)
    return HostStore(descriptor, layout, rules, decomposition, places)


def _fill(store: HostStore, decomposition: Decomposition) -> None:
    """The model's weights and buffers into the store; states start at 0, as torch's do."""
    for i, layer in enumerate(decomposition.layers):
        for name, target in store.weights(i).items():
            target.copy_(decomposition.parameters[name].detach())
        for name, target in store.buffers(i).items():
            target.copy_(decomposition.buffers[name])
        del layer


def _release(workload: Workload, decomposition: Decomposition) -> None:
    for tensor in (*decomposition.parameters.values(), *workload.model.parameters()):
        tensor.data = torch.empty(0, dtype=tensor.dtype)


def save_weights(store: HostStore, decomposition: Decomposition, path: Path) -> None:
    """All parameters and buffers by their original names, as safetensors."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for i in range(len(decomposition.layers) - 1, -1, -1):
        for name, tensor in (*store.weights(i).items(), *store.buffers(i).items()):
            for alias in decomposition.aliases.get(name, (name,)):
                tensors[alias] = tensor.clone()
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    save_file(tensors, str(beside))
    beside.replace(path)
