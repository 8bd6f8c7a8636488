"""Run a schedule: one process per device, a store between them, and an end to all when one fails.

    parent                    rank 0                            rank 1 ...
    hosts the rendezvous      makes the store, fills it         opens the store
    shows progress            runs its streams, feeds batches   runs its streams
    kills all on a failure    merges the records

Ranks are fresh interpreters with torchrun's environment. They end with their parent, however it ends, and
the store is memory without a name, so nothing is left behind. Under torchrun (RANK is set) this process is
that rank, and torchrun is the parent. Several servers are started by torchrun on each of them.
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

import msgspec
import torch
import torch.distributed as dist

from executor.load import (
    as_planned,
    check_clipping,
    check_optimizer,
    cut_for_evaluation,
    load,
    load_held_out,
    load_structure,
)
from executor.machine import check_machine
from executor.options import RunOptions
from executor.prepare import check_checkpoints, prepare, resumed_options
from executor.record import merge
from executor.recorder import RankRecord
from executor.replay import Aborted
from executor.weights import save_weights
from planner.contract import store as files
from planner.contract.errors import HarmonyError
from planner.contract.output import check_outputs
from planner.contract.schedule import Schedule, parse_program
from planner.contract.trace import Evaluation, Trace

Progress = Callable[[int, float, float], None]
"""progress(iteration, loss, seconds), as iterations end."""
Evaluated = Callable[[Evaluation], None]
"""evaluated(evaluation), as evaluations end."""

PATIENCE = timedelta(hours=1)
"""How long ranks wait for each other while they load. A rank that dies is noticed by the parent at once."""
KILL_SECONDS = 2.0
LISTEN_SECONDS = 0.3
"""How long after the first failure others are listened to: what it broke elsewhere may be heard of first."""
LOOPBACK = "127.0.0.1"


class RunError(RuntimeError):
    """A rank failed for a reason that is no user's: the message is its traceback, or how its process ended."""


@dataclass(frozen=True)
class Job:
    """What every rank is told. text: the schedule as JSON; pickled, it would not hash to the same any more.

    resumed: the checkpoint to go on from.
    """

    text: bytes
    options: RunOptions
    weights_out: Path | None = None
    resumed: Path | None = None

    @property
    def schedule(self) -> Schedule:
        """The schedule, read anew."""
        return msgspec.json.decode(self.text, type=Schedule)


@dataclass(frozen=True)
class Failure:
    """What a rank says before it ends, or what is said of one that could not. error: what to raise for it."""

    rank: int
    kind: str
    message: str
    error: type[Exception] = RunError


CAUSES = ("user", "memory", "died", "bug", "aborted")
"""Kinds of failures; of several that are heard of at once, the first kind here caused the others."""


def run_schedule(
    schedule: Schedule | Path,
    options: RunOptions,
    *,
    trace_path: Path | str | None = None,
    weights_out: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    evaluated: Evaluated | None = None,
) -> Trace:
    """Train by a schedule (or a file with one) and return the measured trace; write it, the weights, and checkpoints
    where options has them. resume: go on from the newest of these; options.steps counts what that one has done, too.

    Raises HarmonyError (it does not belong to the model or machine), OSError, torch.OutOfMemoryError, RunError.
    """
    if isinstance(schedule, Path):
        schedule = files.load_schedule(schedule)
    check_optimizer(schedule, options)
    parse_program(schedule.programs.train)
    check_outputs(trace_path, weights_out)
    options = as_planned(schedule, options)
    check_clipping(schedule, options)
    check_machine(schedule, options.device)
    check_checkpoints(options, resume)
    options, resumed = resumed_options(options) if resume else (options, None)
    job = Job(files.encode(schedule), options, weights_out, resumed)
    note, note_evaluation = progress or _note_nothing, evaluated or _note_nothing
    is_rank = "RANK" in os.environ
    run = _run_as_rank if is_rank else _run_locally
    trace = run(job, note, note_evaluation)
    if trace_path is not None and (not is_rank or os.environ["RANK"] == "0"):
        files.save(trace, trace_path)
    return trace


def _note_nothing(*news: object) -> None:
    return


def _run_locally(job: Job, progress: Progress, evaluated: Evaluated) -> Trace:
    num_devices, num_servers = job.schedule.configuration.num_devices, job.schedule.configuration.num_servers
    if num_servers > 1:
        raise HarmonyError(
            f"the schedule is for {num_servers} servers; start it on each, with torchrun --nnodes {num_servers} "
            f"--nproc-per-node {num_devices} --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m executor run ..."
        )
    # port 0: the system picks a free one, and nobody can take it in between
    rendezvous = dist.TCPStore(  # type: ignore[attr-defined]
        LOOPBACK, 0, None, True, PATIENCE, wait_for_workers=False
    )
    context = multiprocessing.get_context("spawn")
    ranks: list[tuple[Any, Connection]] = []
    try:
        for rank in range(num_devices):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (job, rank, rendezvous.port, os.getpid(), theirs)
            process = context.Process(target=_rank_main, args=arguments, name=f"gpu{rank}", daemon=True)
            process.start()
            # the rank has the only writing end now: its end is the end of what we read
            theirs.close()
            ranks.append((process, ours))
        return _watch(ranks, progress, evaluated)
    finally:
        for process, _ in ranks:
            if process.is_alive():
                process.kill()
        for process, connection in ranks:
            process.join(KILL_SECONDS)
            connection.close()


def _watch(ranks: list[tuple[Any, Connection]], progress: Progress, evaluated: Evaluated) -> Trace:
    """Pass progress on until rank 0 hands over the trace; raise the first failure."""
    trace: Trace | None = None
    listening = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    failures: dict[int, Failure] = {}
    deadline: float | None = None
    while listening and (deadline is None or time.monotonic() < deadline):
        for connection in wait(list(listening), timeout=LISTEN_SECONDS):
            assert isinstance(connection, Connection)
            rank = listening[connection]
            try:
                message = connection.recv()
            except (EOFError, OSError):
                del listening[connection]
                process, _ = ranks[rank]
                process.join(KILL_SECONDS)
                if process.exitcode != 0:
                    failures.setdefault(
                        rank, Failure(rank, "died", f"gpu{rank}: {_how_it_ended(process.exitcode)}")
                    )
                continue
            if isinstance(message, Failure):
                failures[rank] = message
            elif isinstance(message, Trace):
                trace = message
            elif isinstance(message, Evaluation):
                evaluated(message)
            else:
                progress(*message)
        if failures and deadline is None:
            deadline = time.monotonic() + LISTEN_SECONDS
    if failures:
        first = min(failures.values(), key=lambda failure: CAUSES.index(failure.kind))
        raise first.error(first.message)
    if trace is None:
        raise RunError("no rank handed over a trace")
    return trace


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"its process ended with exit status {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = "; the system kills so when the host is out of memory" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{hint}"


def _rank_main(job: Job, rank: int, port: int, parent_pid: int, parent: Connection) -> None:
    """A rank's process."""
    _die_with(parent_pid)
    # Ctrl-C goes to the whole group: the parent answers it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    world = job.schedule.configuration.num_devices
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    # local ranks talk over the loopback; a host name need not resolve
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        rendezvous = dist.TCPStore(LOOPBACK, port, None, False, PATIENCE)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=world, timeout=PATIENCE)
        trace = _run_rank(job, rank, lambda *news: parent.send(news), parent.send)
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
        return Failure(rank, "memory", str(error).splitlines()[0], torch.OutOfMemoryError)
    if isinstance(error, HarmonyError):
        return Failure(rank, "user", str(error), type(error))
    if isinstance(error, OSError) and error.filename:
        return Failure(rank, "user", f"{error.filename}: {error.strerror}", HarmonyError)
    return Failure(rank, "bug", f"gpu{rank} failed:\n{''.join(traceback.format_exception(error))}")


def _die_with(parent_pid: int) -> None:
    """Linux ends this process when its parent ends, however that happens."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
    # it may have ended before we asked
    if os.getppid() != parent_pid:
        os._exit(1)


def _run_as_rank(job: Job, progress: Progress, evaluated: Evaluated) -> Trace:
    """This process is a rank of torchrun's. Every rank returns the trace, which is the first server's."""
    check_world(job.schedule)
    _die_with(os.getppid())
    dist.init_process_group("gloo", timeout=PATIENCE)
    box = [_run_rank(job, int(os.environ["RANK"]), progress, evaluated)]
    dist.broadcast_object_list(box, src=0)
    dist.destroy_process_group()
    assert box[0] is not None
    return box[0]


def check_world(schedule: Schedule) -> None:
    """Raise HarmonyError where there are not as many processes as the schedule has devices."""
    devices, servers = schedule.configuration.num_devices, schedule.configuration.num_servers
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if world == devices * servers:
        return
    on, nodes = ("", "") if servers == 1 else (f" on each of {servers} servers", f"--nnodes {servers} ")
    raise HarmonyError(
        f"the schedule uses {devices} devices{on}, there are {world} processes; "
        f"use torchrun {nodes}--nproc-per-node {devices}"
    )


def _run_rank(job: Job, rank: int, on_iteration: Progress, on_evaluation: Evaluated) -> Trace | None:
    """Load, run, and on rank 0 merge."""
    options, schedule = job.options, job.schedule
    if options.device == "virtual":
        torch.set_num_threads(1)
    device = rank % schedule.configuration.num_devices
    # a server's weights are loaded once, and the cut is checked once
    has_weights = device == 0 and options.weights is None and job.resumed is None
    loaded = load(options, check=True) if has_weights else load_structure(options)
    ready = prepare(schedule, options, *loaded, resumed=job.resumed)
    held_out = None
    if options.evaluate_every:
        ready.rank.evaluation = cut_for_evaluation(
            ready.workload, ready.decomposition, options, check=device == 0
        )
        held_out = load_held_out(options) if device == 0 else None
    losses: list[float] = []

    def note(iteration: int, loss: float, seconds: float) -> None:
        losses.append(loss)
        on_iteration(iteration, loss, seconds)

    save = ready.save if ready.writer is not None else None
    record = ready.rank.run(note, save, on_evaluation, held_out)
    records: list[RankRecord] | None = ready.servers.to_first(record)
    if rank != 0 or records is None:
        return None
    if ready.writer is not None:
        ready.save(options.done + options.steps)
    if job.weights_out is not None:
        save_weights(ready.store, ready.decomposition, ready.state, job.weights_out)
    return merge(
        records,
        schedule,
        ready.graph,
        options,
        losses,
        ready.rank.iterations.evaluations,
    )
