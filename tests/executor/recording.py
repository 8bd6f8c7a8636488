"""A device that runs nothing later than it is launched, and notes what could have run at the same time.

Streams, threads and ranks are agents with vector clocks (Mattern 1989): what an agent has done happens before what follows
an event, a flag or a transfer that carries its clock. Each stretch of memory remembers who wrote and read it last. An
access that does not happen behind the last write, or a write that does not happen behind all reads, is a race
on a GPU, whether or not the bytes came out right here (Flanagan and Freund, FastTrack, PLDI 2009).

    device memory    slots of the pool, what `empty` gives, what operations on a stream make
    host memory      the store, areas for offloading; operations on host memory alone run on the launching thread at once
    sync             events; flags: what is read from `done`, `begun`, `recorded` carries the clock of who wrote it
    allocator        memory made on one stream and read on another, unless `used_on` says so, is given back too soon
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from executor.replay import Rank
from executor.streams import Copies, Event

Agent = tuple[str, ...]
Clock = dict[Agent, int]


class RaceError(Exception):
    """What was found: who, what, and whom it does not wait for."""


@dataclass
class Stretch:
    """Bytes [start, end) of some memory. wrote: agent, its time, what it did; read: by agent."""

    start: int
    end: int
    wrote: tuple[Agent, int, str] | None = None
    read: dict[Agent, tuple[int, str]] = field(default_factory=dict)
    is_ready: bool = True

    def part(self, start: int, end: int) -> Stretch:
        return Stretch(start, end, self.wrote, dict(self.read), self.is_ready)


@dataclass
class Memory:
    """A storage. stream: where the allocator made it, None for slots and the host's. owner: whose value lies in a slot."""

    name: str
    is_host: bool
    stream: Agent | None
    stretches: list[Stretch]
    used_on: set[Agent] = field(default_factory=set)
    is_open: bool = True


class Recording:
    """All ranks' clocks and memory."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.clocks: dict[Agent, Clock] = {}
        self.memories: dict[int, Memory] = {}
        self.races: list[str] = []
        self.accesses = 0
        self._started: Clock = {}
        self._local = threading.local()

    # ---- agents

    @property
    def thread(self) -> Agent:
        return ("thread", threading.current_thread().name, str(threading.get_ident()))

    @property
    def agent(self) -> Agent:
        """Whose work this thread is launching: a stream's, or its own."""
        return getattr(self._local, "agent", None) or self.thread

    @contextmanager
    def on(self, agent: Agent | None) -> Iterator[None]:
        before = getattr(self._local, "agent", None)
        self._local.agent = agent
        try:
            yield
        finally:
            self._local.agent = before

    def clock(self, agent: Agent) -> Clock:
        if agent not in self.clocks:
            self.clocks[agent] = dict(self._started) | {agent: 1}
        return self.clocks[agent]

    def start(self) -> None:
        """Threads and streams that begin from here on know all that was done before."""
        with self.lock:
            self._started = dict(self.clock(self.thread))

    def join(self, agent: Agent, other: Clock) -> None:
        clock = self.clock(agent)
        for who, when in other.items():
            if when > clock.get(who, 0):
                clock[who] = when

    def snapshot(self, agent: Agent) -> Clock:
        """All that an agent has done and knows; what it does next is later."""
        clock = self.clock(agent)
        found = dict(clock)
        clock[agent] = clock.get(agent, 0) + 1
        return found

    def complain(self, message: str) -> None:
        self.races.append(message)
        raise RaceError(message)

    # ---- memory

    def register(
        self,
        tensor: Tensor,
        name: str,
        *,
        is_host: bool = False,
        stream: Agent | None = None,
        is_ready: bool = True,
    ) -> None:
        """From now on a storage is looked at. is_ready: something is in it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self.lock:
            whole = Stretch(0, storage.nbytes(), is_ready=is_ready)
            self.memories[key] = Memory(name, is_host, stream, [whole])
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        """The allocator may give the memory to the next operation of the stream that made it."""
        with self.lock:
            memory = self.memories.pop(key, None)
            if memory is None or memory.stream is None:
                return
            known = dict(self.clock(memory.stream))
            for who, when in self.clock(self.thread).items():
                known[who] = max(when, known.get(who, 0))
            for stretch in memory.stretches:
                users = dict(stretch.read)
                if stretch.wrote is not None:
                    users.setdefault(stretch.wrote[0], stretch.wrote[1:])
                for agent, (when, what) in users.items():
                    if agent[0] == "thread" or agent == memory.stream or agent in memory.used_on:
                        continue
                    if known.get(agent, 0) < when:
                        # finalizers cannot raise
                        self.races.append(
                            f"{memory.name}, made on {_say(memory.stream)}, is given back while {what} may still use it"
                        )
                        return

    def opened(self, slot: Tensor, nbytes: int) -> None:
        """A slot has a new value to come."""
        with self.lock:
            if slot.nbytes < nbytes:
                self.complain(f"a slot of {slot.nbytes} bytes is taken for {nbytes}")
            memory = self.memories[slot.untyped_storage()._cdata]
            memory.is_open = True
            for stretch in memory.stretches:
                stretch.is_ready = False

    def closed(self, slot: Tensor) -> None:
        """A slot is given back: what is launched from now on must not touch it."""
        with self.lock:
            self.memories[slot.untyped_storage()._cdata].is_open = False

    def memory_of(self, tensor: Tensor) -> Memory | None:
        return self.memories.get(tensor.untyped_storage()._cdata)

    def access(self, tensor: Tensor, what: str, agent: Agent, *, writes: bool) -> None:
        """Raises RaceError."""
        memory = self.memory_of(tensor)
        if memory is None or not tensor.numel():
            return
        self.accesses += 1
        size = tensor.element_size()
        start = int(tensor.storage_offset()) * size
        end = start + size * (
            1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        )
        what = f"{what} on {_say(agent)}"
        if not memory.is_open:
            self.complain(f"{what} uses {memory.name} after it was given back")
        unused = getattr(self._local, "unused", ()) if memory.is_host and not writes else ()
        for first, last in _without(start, end, unused):
            self._access(memory, first, last, what, agent, writes=writes)

    @contextmanager
    def not_using(self, ranges: Sequence[tuple[int, int]]) -> Iterator[None]:
        """What is read of these bytes of host memory meanwhile is used for nothing."""
        self._local.unused = ranges
        try:
            yield
        finally:
            self._local.unused = ()

    def _access(self, memory: Memory, start: int, end: int, what: str, agent: Agent, *, writes: bool) -> None:
        clock = self.clock(agent)
        kept: list[Stretch] = []
        for stretch in memory.stretches:
            if stretch.end <= start or end <= stretch.start:
                kept.append(stretch)
                continue
            if stretch.start < start:
                kept.append(stretch.part(stretch.start, start))
            inside = stretch.part(max(start, stretch.start), min(end, stretch.end))
            earlier = _same_flag(inside, what) if writes else None
            if earlier is None:
                self._check(inside, memory, what, clock, writes)
            if writes:
                inside.wrote, inside.read, inside.is_ready = (agent, clock[agent], what), {}, True
            else:
                inside.read[agent] = (clock[agent], what)
            if earlier is not None:
                inside.read[earlier[0]] = earlier[1:]
            kept.append(inside)
            if end < stretch.end:
                kept.append(stretch.part(end, stretch.end))
        memory.stretches = _merged(kept)

    def _check(self, stretch: Stretch, memory: Memory, what: str, clock: Clock, writes: bool) -> None:
        if not writes and not stretch.is_ready:
            self.complain(f"{what} reads {memory.name} before anything was written to it")
        if stretch.wrote is not None:
            agent, when, other = stretch.wrote
            if clock.get(agent, 0) < when:
                self.complain(f"{what} uses {memory.name} and does not wait for {other}, which writes it")
        if writes:
            for agent, (when, other) in stretch.read.items():
                if clock.get(agent, 0) < when:
                    self.complain(
                        f"{what} writes {memory.name} and does not wait for {other}, which reads it"
                    )


def _same_flag(stretch: Stretch, what: str) -> tuple[Agent, int, str] | None:
    """The write before, where it was of the same flag: those need not wait for each other."""
    flag, _, _ = what.partition(" ")
    if stretch.wrote is not None and flag.startswith("fill_(") and stretch.wrote[2].startswith(flag):
        return stretch.wrote
    return None


def _without(start: int, end: int, holes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """[start, end) without the holes, which are in order."""
    found = []
    for first, last in holes:
        if first >= end or last <= start:
            continue
        if start < first:
            found.append((start, first))
        start = max(start, last)
    return [*found, (start, end)] if start < end else found


def _merged(stretches: list[Stretch]) -> list[Stretch]:
    found: list[Stretch] = []
    for stretch in stretches:
        last = found[-1] if found else None
        if last is not None and (last.wrote, last.read, last.is_ready) == (
            stretch.wrote,
            stretch.read,
            stretch.is_ready,
        ):
            last.end = stretch.end
        else:
            found.append(stretch)
    return found


def _say(agent: Agent) -> str:
    return "/".join(agent) if agent[0] != "thread" else f"the host ({agent[1]})"


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of a thread: what it reads, writes and makes, and on which stream."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recording = kwargs or {}, self.recording
        schema = func._schema
        is_view = "set_" in schema.name or any(
            r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
        )
        read: list[Tensor] = []
        written: list[Tensor] = []
        for i, argument in enumerate(schema.arguments):
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            tensors = [t for t in pytree.tree_leaves(given) if isinstance(t, Tensor)]
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (written if is_written else read).extend(tensors)
        with recording.lock:
            agent = self._agent([*read, *written])
            if not is_view:
                if agent[0] != "thread":
                    recording.join(agent, recording.snapshot(recording.thread))
                for tensor in read if not schema.name.endswith("_like") else ():
                    recording.access(tensor, schema.name, agent, writes=False)
                # flags: whoever writes the same value need not wait for each other
                name = f"fill_({args[1]})" if schema.name == "aten::fill_" and read == [] else schema.name
                for tensor in written:
                    recording.access(tensor, name, agent, writes=True)
                recording.snapshot(agent)
            out = func(*args, **kwargs)
            if self._blocks(schema.name, args, kwargs, [*read, *written]):
                recording.join(recording.thread, recording.clock(agent))
            # what is made of nothing may be made on the host
            if agent[0] != "thread" and not is_view and not written and self._is_on_device(read):
                for tensor in pytree.tree_leaves(out):
                    is_new = isinstance(tensor, Tensor) and recording.memory_of(tensor) is None
                    if is_new and tensor.untyped_storage().nbytes():
                        recording.register(tensor, f"what {schema.name} made", stream=agent)
        return out

    def _is_on_device(self, tensors: Sequence[Tensor]) -> bool:
        memories = map(self.recording.memory_of, tensors)
        return any(memory is not None and not memory.is_host for memory in memories)

    def _blocks(self, name: str, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> bool:
        """A copy between host and device is over when it returns, unless it is asked not to wait; so is reading a number."""
        if name == "aten::_local_scalar_dense":
            return True
        if name != "aten::copy_" or (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
            return False
        memories = [self.recording.memory_of(tensor) for tensor in tensors]
        return any(memory is not None and memory.is_host for memory in memories)

    def _agent(self, tensors: Sequence[Tensor]) -> Agent:
        """Operations on host memory alone are the thread's own."""
        memories = [memory for memory in map(self.recording.memory_of, tensors) if memory is not None]
        if memories and all(memory.is_host for memory in memories):
            return self.recording.thread
        return self.recording.agent


class RecordingDevice:
    """The interface of streams.Device with the meaning that a GPU gives to it."""

    peak_bytes = 0

    def __init__(self, recording: Recording, index: int) -> None:
        self.recording = recording
        self.index = index

    def agent(self, stream: str) -> Agent:
        return self.recording.thread if stream == "host" else (f"gpu{self.index}", stream)

    def slot(self, nbytes: int) -> Tensor:
        slot = torch.empty(nbytes, dtype=torch.uint8)
        # what is taken before anyone watches (resident weights) is filled then, too
        self.recording.register(slot, f"a slot of {nbytes} bytes", is_ready=True)
        return slot

    def empty(self, nbytes: int, what: str, stream: str) -> Tensor:
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        self.recording.register(tensor, what, stream=self.agent(stream), is_ready=False)
        return tensor

    def host_area(self, nbytes: int) -> Tensor:
        area = torch.empty(nbytes, dtype=torch.uint8)
        self.recording.register(area, "an area of the host", is_host=True)
        return area

    def account(self, nbytes: int, what: str) -> None:
        return

    def release(self, nbytes: int) -> None:
        return

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        with self.recording.on(None if stream == "host" else self.agent(stream)):
            yield

    def copy(self, copies: Copies, stream: str, started: float) -> None:
        with self.on(stream):
            for target, source in copies:
                if target.nbytes != source.nbytes:
                    self.recording.complain(f"a copy of {source.nbytes} bytes into {target.nbytes}")
                target.copy_(source, non_blocking=True)

    def hop(self, nbytes: int, other: int) -> Iterator[tuple[int, int]]:
        yield 0, nbytes

    def pieces(self, nbytes: int) -> Iterator[tuple[int, int]]:
        yield 0, nbytes

    def pace(self, started: float, seconds: float) -> bool:
        return False

    def mark(self, stream: str) -> Event:
        if stream == "host":
            return None
        with self.recording.lock:
            agent = self.agent(stream)
            self.recording.join(agent, self.recording.snapshot(self.recording.thread))
            return self.recording.snapshot(agent), time.perf_counter()

    def seconds(self, event: Event) -> float:
        return time.perf_counter() if event is None else float(event[1])

    def wait(self, stream: str, event: Event) -> None:
        if event is not None:
            with self.recording.lock:
                self.recording.join(self.agent(stream), event[0])

    def when_over(self, event: Event, call: Callable[[], None]) -> None:
        self.wait("host", event)
        call()

    def used_on(self, tensor: Tensor, stream: str) -> None:
        with self.recording.lock:
            memory = self.recording.memory_of(tensor)
            if memory is not None:
                memory.used_on.add(self.agent(stream))

    def finish(self) -> None:
        with self.recording.lock:
            for agent in list(self.recording.clocks):
                if agent[0] == f"gpu{self.index}":
                    self.recording.join(self.recording.thread, self.recording.clocks[agent])

    def stop(self) -> None:
        return


class Flags:
    """Counters that carry the clock of who wrote them to who reads them."""

    def __init__(self, recording: Recording, words: Any) -> None:
        self._recording = recording
        self._words = words
        self._clocks: dict[int, Clock] = {}

    def __getitem__(self, index: int) -> int:
        with self._recording.lock:
            if index in self._clocks:
                self._recording.join(self._recording.thread, self._clocks[index])
            return int(self._words[index])

    def __setitem__(self, index: int, value: int) -> None:
        with self._recording.lock:
            self._clocks[index] = self._recording.snapshot(self._recording.thread)
            self._words[index] = value


class Transfers:
    """What p2p.py needs of torch.distributed, between ranks that are threads of this process: a recv takes what was sent,
    and follows it."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._queues: dict[tuple[int, int, int], queue.Queue[tuple[Tensor, Clock]]] = {}
        self._local = threading.local()
        self._num_groups = 0
        self.has_failed = False

    def make_groups(self) -> None:
        """A rank begins to make its groups; all make the same ones."""
        self._num_groups = 0

    def as_rank(self, rank: int) -> None:
        """This thread is one of a rank's."""
        self._local.rank = rank

    def new_group(self, ranks: list[int], backend: str) -> int:
        self._num_groups += 1
        return self._num_groups

    def send(self, tensor: Tensor, dst: int, group: int) -> None:
        recording = self._recording
        with recording.lock, _disable_current_modes():
            agent = recording.agent
            recording.join(agent, recording.snapshot(recording.thread))
            recording.access(tensor, "send", agent, writes=False)
            data, clock = tensor.clone(), recording.snapshot(agent)
        self._queue(group, self._local.rank, dst).put((data, clock))

    def recv(self, tensor: Tensor, src: int, group: int) -> None:
        sent = self._queue(group, src, self._local.rank)
        while True:
            try:
                data, clock = sent.get(timeout=0.05)
                break
            except queue.Empty:
                if self.has_failed:
                    raise RaceError("the other side has failed") from None
        with self._recording.lock:
            self._recording.join(self._recording.agent, clock)
        tensor.copy_(data)

    def _queue(self, group: int, source: int, target: int) -> queue.Queue[tuple[Tensor, Clock]]:
        with self._recording.lock:
            return self._queues.setdefault((group, source, target), queue.Queue())


def watch(rank: Rank, recording: Recording, transfers: Transfers) -> None:
    """All that a rank's threads do is recorded from now on."""
    guard, pool = rank._guard, rank.memory.pool

    def watched(work: Callable[[], None]) -> None:
        transfers.as_rank(rank.rank)
        with Watching(recording):
            guard(work)

    def take(nbytes: int, stream: str) -> Tensor:
        slot = type(pool).take(pool, nbytes, stream)
        recording.opened(slot, nbytes)
        return slot

    def give(slot: Tensor, last_use: Event) -> None:
        recording.closed(slot)
        type(pool).give(pool, slot, last_use)

    rank._guard = watched  # type: ignore[method-assign]
    pool.take, pool.give = take, give  # type: ignore[method-assign]
    rank._recorded = Flags(recording, rank._recorded)  # type: ignore[assignment]
