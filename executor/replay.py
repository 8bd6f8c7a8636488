"""Replay a program on one device: a thread per stream runs its actions in order, iteration after iteration.

    wait     for what rules and plan say this action follows (precedence.Graph.waits): here by a condition,
             from other ranks by their done counters in the host store; a recv for its send to have begun
    run      HANDLERS[type(action)]
    mark     an event behind it on its stream; once that has happened, done[action] = iterations completed

Iterations follow each other without a barrier. No thread waits for free bytes, only for named actions, and
the verified program has no cycle, so nothing here can deadlock. A failure in any thread ends all of them.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from executor.decompose import Decomposition
from executor.evaluate import evaluate_pack
from executor.handlers import HANDLERS, check_reductions, check_supported
from executor.host import HostStore
from executor.iterations import Iterations, Save, count, last_of_training
from executor.memory import DeviceMemory
from executor.optimizer import LayerOptimizer
from executor.options import RunOptions
from executor.p2p import Peers
from executor.recorder import SPAN_ITERATIONS, RankRecord, Recorder, Span
from executor.resident import Residents
from executor.servers import Servers
from executor.streams import Device, Event, make_device
from executor.structure import LayerPlaces
from executor.workload import Workload
from planner.contract.actions import Action, Agree, Backward, Forward, Receive, Reduce, Send, Value
from planner.contract.evaluation import needed_to_evaluate
from planner.contract.hardware import Hardware
from planner.contract.precedence import Graph
from planner.contract.trace import Evaluation

POLL_SECONDS = 0.0002
"""How often the counters of other ranks are looked at."""
LAST_SECONDS = 0.5
"""How long a failed rank waits for its threads to end."""


class Aborted(Exception):
    """Another thread or rank failed first."""


class _Closed(Exception):
    """No iteration follows that this thread was waiting in."""


class Rank:
    """One device's part of a run."""

    def __init__(
        self,
        rank: int,
        graph: Graph,
        hardware: Hardware,
        workload: Workload,
        decomposition: Decomposition,
        places: Sequence[LayerPlaces],
        store: HostStore,
        options: RunOptions,
        servers: Servers | None = None,
    ) -> None:
        self.rank = rank
        self.servers = servers or Servers()
        self.first_sample = self.servers.server * graph.rules.configuration.minibatch
        """Of this server's, among all of an iteration."""
        self.graph = graph
        self.rules = graph.rules
        self.workload = workload
        self.decomposition = decomposition
        self.places = places
        self.store = store
        self.options = options
        check_supported(self.rules)
        check_reductions(graph)
        num_devices = self.rules.configuration.num_devices
        self.recorder = Recorder(rank, last_of_training(options, SPAN_ITERATIONS))
        self.device: Device = make_device(
            options.device,
            rank,
            hardware,
            num_devices,
            store,
            paced=options.paced,
            metered=options.metered,
            on_memory=self.recorder.memory,
        )
        self.memory = DeviceMemory(self.device)
        self.iterations = Iterations(self)
        self.needed = needed_to_evaluate(graph)
        self.evaluation: Decomposition | None = None
        """The layers in evaluation mode, where iterations evaluate."""
        self.offloaded: dict[Value, torch.Tensor] = {}
        """Saved activations on the host, in areas that every iteration fills again."""
        self._meets = _meetings(graph)
        self._met = {node for nodes in self._meets.values() for node in nodes}
        pairs: dict[type[Action], set[tuple[int, int]]] = {Receive: set(), Reduce: set()}
        for node, others in self._meets.items():
            target, _ = self.rules.place(graph.actions[node])
            sources = (self.rules.place(graph.actions[other])[0] for other in others)
            pairs[type(graph.actions[node])] |= {(source, target) for source in sources}
        backend = "nccl" if options.device == "cuda" else "gloo"
        self.peers = Peers(pairs[Receive], pairs[Reduce], backend, self.servers)
        layers = range(len(decomposition.layers))
        self.optimizer = LayerOptimizer(
            options.recipe,
            [store.weights(i) for i in layers],
            [store.gradients(i) for i in layers],
            store.states(),
            touched=store.touched,
            is_resumed=options.done > 0,
        )
        self.residents = Residents(self)
        self._settings: dict[int, list[dict[str, Any]]] = {}
        self._lanes = [i for i, lane in enumerate(graph.lanes) if lane.device == rank]
        self._recorded = [0] * len(graph.actions)
        self._events: dict[tuple[int, int], Event] = {}
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._num_iterations = count(options)
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        self._finishers: list[threading.Thread] = []
        # one a stream: a stream that waits for another rank must not hold up what the others have to tell it
        self._over: dict[str, queue.SimpleQueue[tuple[Span, Event, Event] | None]] = {
            graph.lanes[lane].stream: queue.SimpleQueue() for lane in self._lanes
        }

    def run(
        self,
        on_iteration: Callable[[int, float, float], None] | None = None,
        save: Save | None = None,
        on_evaluation: Callable[[Evaluation], None] | None = None,
        held_out: Workload | None = None,
    ) -> RankRecord:
        """Run all iterations. On rank 0 on_iteration(iteration, loss, seconds) and on_evaluation are called as they end,
        and save where a checkpoint is due. held_out: what evaluations draw from; where None, what training does.

        Raises the first failure of this rank, or Aborted where another rank failed first.
        """
        self.start(save)
        draw = partial(self.iterations.draw, on_iteration, on_evaluation, held_out)
        if self.rank == 0:
            self._threads.append(self._thread(draw, "batches"))
        self._guard(self._compute_all)
        return self.finish()

    def start(self, save: Save | None = None) -> None:
        """Begin with all streams but compute, which `compute` runs on the thread that calls it: autograd and the
        generators belong to that one."""
        others = [lane for lane in self._lanes if self.graph.lanes[lane].stream != "compute"]
        self._threads = [
            self._thread(partial(self._run_lane, lane), self.graph.lanes[lane].stream) for lane in others
        ]
        self._finishers = [
            self._thread(partial(self._complete, over), f"{stream} over")
            for stream, over in self._over.items()
        ]
        if self.rank == 0 and save is not None:
            self._threads.append(self._thread(partial(self.iterations.save, save), "checkpoints"))

    def fail(self, error: BaseException) -> None:
        """End all threads and ranks: what calls this rank has failed."""

        def raise_it() -> None:
            raise error

        self._guard(raise_it)
        self._join(self._threads)
        for over in self._over.values():
            over.put(None)
        self._join(self._finishers)

    def compute(self, iteration: int) -> None:
        """Run the compute stream's part of an iteration. Raises the first failure of this rank, or Aborted."""
        self._guard(partial(self._compute, iteration))
        if self._failure is not None:
            self._join(self._threads)
            raise self._failure

    def _compute(self, iteration: int) -> None:
        for lane in self._lanes:
            if self.graph.lanes[lane].stream == "compute":
                self._run_iteration(lane, iteration)

    def _compute_all(self) -> None:
        for iteration in range(self._num_iterations):
            self._compute(iteration)

    def close(self, steps: int) -> None:
        """No more than so many iterations, all of which are over everywhere: what has begun beyond them stops."""
        self._num_iterations, self._is_closed = steps, True
        with self._changed:
            self._changed.notify_all()

    def finish(self) -> RankRecord:
        """Wait for all streams. Raises the first failure of this rank, or Aborted where another rank failed first."""
        self._join(self._threads)
        for over in self._over.values():
            over.put(None)
        self._join(self._finishers)
        if self._failure is not None:
            raise self._failure
        self.device.finish()
        self.residents.write_back()
        record = self.recorder.record
        record.peak_bytes = self.device.peak_bytes
        record.reserved_bytes = self.memory.pool.reserved_bytes
        return record

    # ---- one stream

    def _run_lane(self, lane_index: int) -> None:
        for iteration in itertools.count():
            if self._is_last(iteration):
                return
            self._run_iteration(lane_index, iteration)

    def _is_last(self, iteration: int) -> bool:
        return iteration >= self._num_iterations

    def _run_iteration(self, lane_index: int, iteration: int) -> None:
        lane = self.graph.lanes[lane_index]
        for node, entry in enumerate(lane.entries, self.graph.first_of[lane_index]):
            meets = self._meets.get(node, ())
            for other, ago in self.graph.waits[node]:
                if other not in meets:
                    self._wait(lane.stream, other, iteration - ago)
            for other in meets:
                # a rendezvous: the send is over only once this has begun, so its beginning is what to
                # wait for; no sooner, or the slot would count before the plan lets it
                self.poll(lambda other=other: self.store.begun[other] > iteration)  # type: ignore[misc]
            if self._is_last(iteration):
                raise _Closed
            if node in self._met:
                self.store.begun[node] = iteration + 1
            before = self.device.mark(lane.stream)
            with (
                self.recorder.span(node, iteration) as span,
                self.device.on(lane.stream if lane.stream != "compute" else "host"),
            ):
                span.overrun = self._handle(node, entry.action, iteration)
            self._mark(lane.stream, span, before)

    def _handle(self, node: int, action: Action, iteration: int) -> bool:
        try:
            is_needed, is_pack = node in self.needed.nodes, isinstance(action, Forward | Backward)
            # what both kinds of iterations do alike need not wait to know which one this is
            if (is_needed and not is_pack) or not self.iterations.is_evaluation(iteration):
                return HANDLERS[type(action)](self, action, iteration)
            return is_needed and evaluate_pack(self, action, iteration)
        except torch.OutOfMemoryError as error:
            message = str(error).removeprefix(f"gpu{self.rank}: ")
            raise torch.OutOfMemoryError(f"{self.graph.where(node)}: {message}") from error

    def _wait(self, stream: str, node: int, iteration: int) -> None:
        """Until an action of an iteration is over for this stream; iterations before the first one are."""
        if iteration < 0:
            return
        if self.graph.lanes[self.graph.lane_of[node]].device != self.rank:
            self.poll(lambda: self.store.done[node] > iteration)
            return
        with self._changed:
            while self._recorded[node] <= iteration:
                self.check()
                self._changed.wait(0.5)
        # recorded: now the event is one to wait for; gone: it is over and a later iteration's took its place
        self.device.wait(stream, self._events.get((node, iteration)))

    def _mark(self, stream: str, span: Span, before: Event) -> None:
        node, iteration = span.node, span.iteration
        event = self.device.mark(stream)
        if event is None:
            self.recorder.keep(span)
            self.store.done[node] = iteration + 1
        else:
            self._events[node, iteration] = event
            self._over[stream].put((span, before, event))
        with self._changed:
            self._recorded[node] = iteration + 1
            self._changed.notify_all()

    def _complete(self, over: queue.SimpleQueue[tuple[Span, Event, Event] | None]) -> None:
        """Tell other ranks what has really happened on the GPU, so that no launching thread waits for it."""
        while (item := over.get()) is not None:
            span, before, event = item
            self.device.when_over(event, lambda: None)
            span.started, span.ended = self.device.seconds(before), self.device.seconds(event)
            self.recorder.keep(span)
            self.store.done[span.node] = span.iteration + 1
            # who still looks for the older event finds none: it is over, the stream runs in order
            self._events.pop((span.node, span.iteration - 1), None)

    def stream_of(self, action: Action) -> str:
        """The stream that an action stands in."""
        return self.graph.lanes[self.graph.lane_of[self.graph.node_of[action]]].stream

    def poll(self, is_so: Callable[[], bool]) -> None:
        """Wait for something that other ranks write."""
        while not is_so():
            self.check()
            time.sleep(POLL_SECONDS)

    # ---- what a loop of the user's gives and asks for

    def set_group_settings(self, iteration: int, settings: list[dict[str, Any]]) -> None:
        """What an iteration's updates step with, a dictionary for each parameter group: learning rates change."""
        self._settings[iteration] = settings
        for old in [k for k in self._settings if k < iteration - 2 and self.is_over(k)]:
            del self._settings[old]

    def group_settings(self, iteration: int) -> list[dict[str, Any]]:
        """The settings of an iteration's updates; those of the optimizer where none were set."""
        if iteration in self._settings:
            return self._settings[iteration]
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]

    def wait_for_loss(self, iteration: int) -> float:
        """The loss of an iteration that has begun, once it is known."""
        fused = [
            node
            for node, action in enumerate(self.graph.actions)
            if isinstance(action, Backward) and action.pack == self.rules.fused
        ]
        self.poll(lambda: all(self.store.done[node] > iteration for node in fused))
        return self.servers.sum(self.iterations.loss(iteration))

    def wait_for_norm(self, iteration: int) -> float | None:
        """The norm over all gradients of an iteration that has begun; None where no action finds it."""
        node = self.graph.node_of.get(Agree())
        if node is None:
            return None
        self.poll(lambda: self.store.done[node] > iteration)
        return float(self.store.agreed[0])

    def wait_for_scale(self, iteration: int) -> float:
        """What an iteration's losses are multiplied by: what the one before has left."""
        if iteration > 0:
            node = self.graph.node_of[Agree()]
            self.poll(lambda: self.store.done[node] >= iteration)
        return float(self.store.scaling[0])

    def is_over(self, iteration: int) -> bool:
        """Whether every stream of every rank has finished an iteration."""
        lanes = zip(self.graph.first_of, self.graph.lanes, strict=True)
        ends = (first + len(lane.entries) - 1 for first, lane in lanes if lane.entries)
        return all(self.store.done[node] > iteration for node in ends)

    # ---- failure

    def _thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(
            target=self._guard, args=(work,), name=f"gpu{self.rank}/{name}", daemon=True
        )
        thread.start()
        return thread

    def _guard(self, work: Callable[[], None]) -> None:
        """Run, and on failure end the other threads and ranks."""
        try:
            work()
        except _Closed:
            return
        except BaseException as error:
            with self._changed:
                if self._failure is None or isinstance(self._failure, Aborted):
                    self._failure = error
                if not isinstance(error, Aborted) and not self.store.failed:
                    self.store.failed = self.rank + 1
                self._changed.notify_all()
            self.device.stop()

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for threads to end; after a failure not for daemons that a dead transfer holds."""
        deadline: float | None = None
        for thread in threads:
            while thread.is_alive() and (deadline is None or time.perf_counter() < deadline):
                if deadline is None and self._failure is not None:
                    deadline = time.perf_counter() + LAST_SECONDS
                thread.join(0.05)

    def check(self) -> None:
        if self._failure is not None or self.store.failed:
            raise Aborted(f"gpu{self.store.failed - 1} failed")
        if self._is_closed and threading.current_thread() in self._threads:
            raise _Closed


def _meetings(graph: Graph) -> dict[int, tuple[int, ...]]:
    """The sends that a receive, and the shares that a reduction at the owner, runs together with."""
    found: dict[int, tuple[int, ...]] = {}
    for node, action in enumerate(graph.actions):
        if isinstance(action, Receive):
            found[node] = (graph.node_of[Send(action.value)],)
        if isinstance(action, Reduce):
            shares = (value for place, value in graph.effects[node].reads if place == "link")
            found[node] = tuple(graph.node_of[Reduce(value)] for value in shares)
    return found
