"""From a configuration to a program: rules -> lanes.

Passes over each device, in this order:

    compute     the tasks of the device: its forward packs, then its backward packs in reverse
    swaps       weights, batch tensors and stashes in; stashes, gradients and changed buffers out
    transfers   sends by production, receives in the order in which their senders produce them
    frees       each value behind its last reader; where two streams read it, behind the one that is less urgent
    waits       every allocation waits for a free, so no peak depends on timing

        compute   F0.0 F0.1 F0.2 F0.3 F2.0 ...
        h2d     WF0 I0.0 I0.1 [WF2] I0.2 ...      [WF2] waits for the free of the pack before F0: two packs of weights

Values of one kind on one device go through a ring: number k waits for the free of number k - depth. What a ring
holds at a time is what `task_bytes` counts, and the weights of the next task or the gradients of the last one
are let in beside the running task only where that fits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from planner.contract.actions import (
    STREAMS,
    Action,
    Agree,
    Backward,
    Entry,
    Forward,
    Free,
    Lane,
    Lanes,
    Receive,
    Reduce,
    Send,
    SwapIn,
    SwapOut,
    Update,
    Value,
    Wait,
)
from planner.contract.errors import InfeasibleError
from planner.contract.rules import Rules

Compute = Forward | Backward

MAX_LATE = 3
"""Gradients of how many tasks before may still be on their way out."""


class Task:
    """One pack's run over all its microbatches on one device, and what it brings along."""

    def __init__(self, rules: Rules, actions: list[Compute]) -> None:
        self.actions = actions
        self.is_forward = isinstance(actions[0], Forward)
        self.pack = actions[0].pack
        packs = rules.forward_packs if self.is_forward else rules.backward_packs
        layers = packs[self.pack]
        replica = (rules.forward_replica if self.is_forward else rules.backward_replica)[
            actions[0].microbatch
        ]
        self.tag = rules.replica_tag(replica)
        self.is_owner = not self.is_forward and replica == rules.owner(self.pack)
        kind = "WF" if self.is_forward else "WB"
        self.is_held = self.is_forward and layers.weights == "hold"
        loads = rules.has_weights(layers) and (layers.weights == "stream" or self.is_held)
        self.weights = Value(kind, self.pack, replica=self.tag) if loads else None
        # held weights stay until the backward that reads them last
        self.last_uses: tuple[Value, ...] = ()
        trained = not self.is_forward and rules.is_trained(self.pack)
        is_updated_there = trained and rules.backward_packs[self.pack].update == "device"
        gradients = Value("G", self.pack, replica=self.tag) if trained else None
        self.gradients = None if is_updated_there else gradients
        """Those that leave the device."""
        self.consumed = gradients if is_updated_there else None
        """Those that an update on the device takes."""
        writes_back = (
            replica == 0 and self.weights is not None and rules.moved_bytes(SwapOut(self.weights)) > 0
        )
        self.writes_back = writes_back
        self.name = f"{'forward' if self.is_forward else 'backward'} pack {self.pack} (layers {layers.first} to {layers.last})"

    @property
    def is_streamed(self) -> bool:
        """Whether its weights come for this task alone."""
        return self.weights is not None and not self.is_held


class Ring:
    """Values of one kind in the order in which they come; `depth` of them may be there at a time."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.drained_at: int | None = None
        """The task that waits until all items of the tasks before it are gone, where one does."""
        self.items: list[tuple[int, Action, tuple[Value, ...]]] = []  # (task, allocating action, values)

    def add(self, task: int, action: Action, values: Iterable[Value]) -> None:
        self.items.append((task, action, tuple(values)))

    def waits(self) -> dict[Action, list[Wait]]:
        """What each allocating action waits for: the frees of the item `depth` before it, around the iteration."""
        found: dict[Action, list[Wait]] = {}
        count = len(self.items)
        for k, (_, action, _) in enumerate(self.items if self.depth < count else ()):
            if k < self.depth and self.drained_at is not None:
                continue
            _, _, values = self.items[(k - self.depth) % count]
            found[action] = [Wait(Free(value), int(k < self.depth)) for value in values]
        return found

    def bytes_by_task(self, num_tasks: int, nbytes: Callable[[Value], int], ahead: bool) -> list[int]:
        """The most that is there while each task runs: `depth` items in a row, from one that the task uses on (ahead)
        or up to one that it makes."""
        if self.drained_at is not None:
            return self._bytes_until_drained(num_tasks, nbytes)
        sizes = [sum(map(nbytes, values)) for _, _, values in self.items]
        count = len(sizes)
        if count <= self.depth:
            return [sum(sizes)] * num_tasks
        # windows[k]: items k to k + depth - 1, around the iteration
        windows = [sum(sizes[: self.depth])]
        for k in range(count - 1):
            windows.append(windows[-1] - sizes[k] + sizes[(k + self.depth) % count])
        users = [task for task, _, _ in self.items]
        found = []
        for task in range(num_tasks):
            low, high = bisect_left(users, task), bisect_right(users, task)
            shift = 0 if ahead else -self.depth
            found.append(max(windows[(k + shift) % count] for k in range(low, high + 1)))
        return found

    def _bytes_until_drained(self, num_tasks: int, nbytes: Callable[[Value], int]) -> list[int]:
        """The same for made values of which nothing is left from one task on to the end of the iteration."""
        assert self.drained_at is not None
        found, recent = [0] * num_tasks, [0] * self.depth
        items = iter([*self.items, None])
        item = next(items)
        for task in range(self.drained_at):
            found[task] = sum(recent)
            while item is not None and item[0] == task:
                recent = [*recent[1:], sum(map(nbytes, item[2]))]
                found[task] = max(found[task], sum(recent))
                item = next(items)
        return found


class Depths(NamedTuple):
    """How many received values and how many inputs from the host may be on a device at a time."""

    received: int
    inputs: int


class DeviceDraft:
    """The lanes of one device while they are made."""

    def __init__(self, rules: Rules, device: int, depths: Depths) -> None:
        self.rules = rules
        self.device = device
        self.tasks = _tasks(rules, device)
        self.held_bytes = sum(
            rules.nbytes(t.weights) for t in self.tasks if t.is_held and t.weights is not None
        )
        self.held_bytes += sum(rules.nbytes(v) for v in rules.residents() if rules.device_of(v) == device)
        self._find_last_uses()
        chosen = {choice for pack in rules.backward_packs for choice in pack.activations}
        self.last_stashed: dict[int, Value] = {}
        self.offloads = rules.stages == 1 and "offload" in chosen
        self.lanes: dict[str, list[Action]] = {stream: [] for stream in STREAMS}
        self.waits: dict[Action, list[Wait]] = {}
        self.inputs = Ring(depths.inputs)
        self.returned = Ring(2)
        self.outputs = Ring(2)
        self.received = Ring(depths.received)
        self.is_prefetched = [False] * len(self.tasks)
        self.has_second = [False] * len(self.tasks)
        """Whether the weights after the next ones may be there too."""
        self.num_late = [0] * len(self.tasks)
        self.drained = [t for t, task in enumerate(self.tasks) if task.gradients is not None]
        self.last_reader = self._last_readers()
        self.free_at: dict[Compute, list[Value]] = {}
        for value, (_, action) in self.last_reader.items():
            self.free_at.setdefault(action, []).append(value)

    def _last_readers(self) -> dict[Value, tuple[int, Compute]]:
        """Activations and gradients on this device: the task and the action that reads each last."""
        last: dict[Value, tuple[int, Compute]] = {}
        for t, task in enumerate(self.tasks):
            for action in task.actions:
                for place, value in self.rules.effects(action).reads:
                    if place == "gpu" and value.kind in ("I", "X", "Y", "D", "AF", "AB"):
                        last[value] = (t, action)
        return last

    def _find_last_uses(self) -> None:
        """Held weights are freed behind the last backward that reads them."""
        last: dict[Value, Task] = {}
        for task in self.tasks:
            for place, value in self.rules.effects(task.actions[0]).reads:
                if place == "gpu" and value.kind == "WF":
                    last[value] = task
        for value, task in last.items():
            if not task.is_forward:
                task.last_uses = (*task.last_uses, value)

    # ---- passes

    def add_compute(self) -> None:
        lane = self.lanes["compute"]
        for t, task in enumerate(self.tasks):
            for action in task.actions:
                lane.append(action)
                if action == task.actions[-1]:
                    lane.extend(Free(value) for value in task.last_uses)
                if action == task.actions[-1] and task.is_streamed and not task.writes_back:
                    assert task.weights is not None
                    # first, so that whoever waits for one of the others finds the weights gone too
                    lane.append(Free(task.weights))
                for value in self.free_at.get(action, ()):
                    # behind offloaded activations a stash may leave late: compute does not wait for that
                    waits_for_stash = self.offloads and value.kind == "Y"
                    (self.lanes["send"] if waits_for_stash else lane).append(Free(value))
                    if waits_for_stash:
                        self.last_stashed[t] = value
            if task.consumed is not None:
                lane += [Update(task.pack), Free(task.consumed)]
            for action in task.actions:
                self._collect_outputs(t, action)
        self._drain_outputs()

    def _drain_outputs(self) -> None:
        """On a pipeline of one device backward tasks hand nothing out: the second one waits until what the forward
        made has left, so that its place is free for what returns."""
        backward = [t for t, task in enumerate(self.tasks) if not task.is_forward]
        if self.rules.stages > 1 or len(backward) < 2 or not self.outputs.items:
            return
        self.outputs.drained_at = backward[1]

    def add_drain_waits(self) -> None:
        if self.outputs.drained_at is None:
            return
        first = self.tasks[self.outputs.drained_at].actions[0]
        last = self.outputs.items[-self.outputs.depth :]
        for _, _, values in last:
            self.waits.setdefault(first, []).extend(Wait(Free(value)) for value in values)
        # what returns takes the place of what left last
        for (_, _, values), (_, action, _) in zip(last, self.returned.items, strict=False):
            self.waits.setdefault(action, []).extend(Wait(Free(value)) for value in values)

    def _collect_outputs(self, t: int, action: Compute) -> None:
        """What leaves this device after an action goes through the ring of outputs."""
        leaving = [
            v
            for v in self.rules.effects(action).makes
            if v.kind in ("Y", "S", "D", "AF") and v not in self.last_reader
        ]
        if leaving:
            self.outputs.add(t, action, leaving)

    def add_swap_in(self) -> None:
        """Inputs by use; the next task's weights behind as many inputs as may be there, where they fit beside this task's."""
        lane = self.lanes["h2d"]
        weighted = [t for t, task in enumerate(self.tasks) if task.weights is not None]
        following = dict(pairwise(weighted))
        if weighted:
            self._load(weighted[0])
        for t, task in enumerate(self.tasks):
            inputs = [
                value
                for action in task.actions
                for place, value in self.rules.effects(action).reads
                if place == "gpu" and value.kind in ("I", "X", "AB")
            ]
            successor = following.get(t)
            early = successor is not None and self.is_prefetched[t]
            for k, value in enumerate(inputs):
                if early and k == self.inputs.depth:
                    self._load(successor)
                    early, successor = False, None
                (self.returned if value.kind == "AB" else self.inputs).add(t, SwapIn(value), [value])
                lane.append(SwapIn(value))
            if successor is not None:
                self._load(successor)

    def _load(self, t: int | None) -> None:
        assert t is not None
        weights = self.tasks[t].weights
        assert weights is not None
        self.lanes["h2d"].append(SwapIn(weights))
        if self.tasks[t].is_held:
            return  # they have their own place, and wait for their free of the iteration before
        weighted = [u for u, task in enumerate(self.tasks) if task.is_streamed]
        k = weighted.index(t)
        target = k - 1
        if self.is_prefetched[weighted[k - 1]]:
            has_second = len(weighted) > 3 and self.has_second[weighted[k - 2]]
            target = k - 3 if has_second else k - 2
        freed = self.tasks[weighted[target % len(weighted)]].weights
        if freed is not None and freed != weights and -len(weighted) <= target:
            self.waits.setdefault(SwapIn(weights), []).append(Wait(Free(freed), int(target < 0)))

    def add_swap_out(self) -> None:
        rules, lane = self.rules, self.lanes["d2h"]
        for task in self.tasks:
            for action in task.actions:
                if isinstance(action, Forward) and rules.stashed_tensors(action.pack):
                    stash = Value("S", action.pack, action.microbatch)
                    lane.append(SwapOut(stash))
                    freed = [
                        v
                        for _, v in rules.effects(SwapOut(stash)).reads
                        if v.kind == "S" or v not in self.last_reader
                    ]
                    lane.extend(Free(value) for value in freed)
                for value in rules.effects(action).makes:
                    if value.kind == "AF" and value not in self.last_reader:
                        lane += [SwapOut(value), Free(value)]
            if task.writes_back and task.weights is not None:
                lane.append(SwapOut(task.weights))
                if task.is_streamed:
                    lane.append(Free(task.weights))
            if task.gradients is not None:
                self._drain(task)

    def _drain(self, task: Task) -> None:
        """Gradients leave: over the reduction to their owner, from there to the host and into the update."""
        assert task.gradients is not None
        if task.tag >= 0:
            self.lanes["reduce"].append(Reduce(task.gradients))
        if task.is_owner:
            self.lanes["d2h"] += [SwapOut(task.gradients), Free(task.gradients)]
            self.lanes["host"].append(Update(task.pack))
        else:
            self.lanes["reduce"].append(Free(task.gradients))

    def add_sends(self) -> None:
        lane = self.lanes["send"]
        for task in self.tasks:
            for action in task.actions:
                for value in self.rules.effects(action).makes:
                    if value.kind not in "YD":
                        continue
                    lane.extend(Send(copy) for copy in _copies(self.rules, value, self.device))
                    stashed = value.kind == "Y" and bool(self.rules.stashed_tensors(value.pack))
                    if value not in self.last_reader and not stashed:
                        lane.append(Free(value))

    def add_receives(self) -> None:
        """In the order in which the senders produce: forward packs up, backward packs down."""
        copies = [v for v in self.last_reader if v.device >= 0]
        copies.sort(key=lambda v: (v.kind == "D", v.pack if v.kind == "Y" else -v.pack, v.microbatch))
        for value in copies:
            self.lanes["recv"].append(Receive(value))
            if self._goes_to_next(value):
                self.received.add(self.last_reader[value][0], Receive(value), [value])

    def _goes_to_next(self, value: Value) -> bool:
        task = self.tasks[self.last_reader[value][0]]
        if value.kind == "D":
            return task.pack == value.pack - 1
        return (task.pack if task.is_forward else len(self.rules.forward_packs)) == value.pack + 1

    def add_waits(self) -> None:
        for ring in (self.inputs, self.returned, self.outputs, self.received):
            for action, waits in ring.waits().items():
                self.waits.setdefault(action, []).extend(waits)
        for t, value in self.last_stashed.items():
            if t + 2 < len(self.tasks):
                self.waits.setdefault(self.tasks[t + 2].actions[0], []).append(Wait(Free(value)))
        self._wait_for_gradients()

    def _wait_for_gradients(self) -> None:
        """Each task starts behind the free of the gradients that have no place beside it, unless one before did."""
        count = len(self.tasks)
        # gradients leave over d2h where this replica owns them, else over reduce: each stream in its own order
        behind = {True: -1, False: -1}
        # twice around: what the end of an iteration waited for, the next one need not
        for position in range(2 * count):
            t = position % count
            latest: dict[bool, tuple[int, int]] = {}
            for ago, target in self._drained_before(t)[self.num_late[t] :]:
                latest.setdefault(self.tasks[target].is_owner, (ago, target))
            for is_owner, (ago, target) in latest.items():
                freed = self.tasks[target].gradients
                assert freed is not None
                produced = position - t - ago * count + target
                if produced <= behind[is_owner]:
                    continue
                behind[is_owner] = produced
                if position >= count:
                    self.waits.setdefault(self.tasks[t].actions[0], []).append(Wait(Free(freed), ago))

    def _drained_before(self, t: int) -> list[tuple[int, int]]:
        """The tasks before t that make gradients, the latest first, around the iteration: (iterations ago, task)."""
        drained = self.drained
        k = bisect_left(drained, t)
        last = bisect_right(drained, t)
        return [(0, u) for u in reversed(drained[:k])] + [(1, u) for u in reversed(drained[last:])]

    # ---- memory

    def choose(self, limit_bytes: int) -> None:
        """Prefetch weights beside each task where they fit, then let gradients of tasks before leave beside it.

        Raises InfeasibleError where a task does not fit at all.
        """
        needed = self._task_bytes()
        weighted = [t for t, task in enumerate(self.tasks) if task.is_streamed]
        for t, task in enumerate(self.tasks):
            used = needed[t]
            if used > limit_bytes:
                raise InfeasibleError(
                    f"gpu{self.device}: {task.name} needs {used} bytes, {used - limit_bytes} over the limit of {limit_bytes}"
                )
            left = limit_bytes - used
            later = [u for u in weighted if u > t] or weighted
            incoming = self._nbytes(self.tasks[later[0]].weights) if later else 0
            self.is_prefetched[t] = incoming <= left
            if self.is_prefetched[t]:
                left -= incoming
            elif not task.is_streamed:
                # nothing of this task's goes that they could wait for
                raise InfeasibleError(
                    f"gpu{self.device}: {task.name} with the next weights needs {used + incoming} bytes, "
                    f"{incoming - left} over the limit of {limit_bytes}"
                )
            late = 0
            for _, u in self._drained_before(t)[:MAX_LATE]:
                size = self._nbytes(self.tasks[u].gradients)
                if size > left:
                    break
                left -= size
                late += 1
            self.num_late[t] = late
            after = [u for u in weighted if u > later[0]] or weighted if later else []
            second = self._nbytes(self.tasks[after[0]].weights) if after else 0
            self.has_second[t] = len(weighted) > 3 and self.is_prefetched[t] and 0 <= second <= left

    @property
    def num_hidden(self) -> int:
        """How many tasks have the next weights or the last gradients beside them."""
        return sum(self.is_prefetched) + sum(late > 0 for late in self.num_late)

    def _nbytes(self, value: Value | None) -> int:
        return 0 if value is None else self.rules.nbytes(value)

    def _task_bytes(self) -> list[int]:
        """The most each task needs beside prefetched weights and the last task's gradients."""
        rules, count = self.rules, len(self.tasks)
        rings = [
            self.inputs.bytes_by_task(count, rules.nbytes, ahead=True),
            self._returned_by_task(),
            self.received.bytes_by_task(count, rules.nbytes, ahead=True),
            self.outputs.bytes_by_task(count, rules.nbytes, ahead=False),
            self._held_by_task(),
        ]
        found = []
        for t, task in enumerate(self.tasks):
            own = (
                self.held_bytes
                + self._nbytes(task.gradients)
                + self._nbytes(task.consumed)
                + (self._nbytes(task.weights) if task.is_streamed else 0)
            )
            found.append(own + sum(ring[t] for ring in rings) + max(map(rules.workspace, task.actions)))
        return found

    def _returned_by_task(self) -> list[int]:
        """Offloaded activations that came back, or are to: where they take the place of outputs, only the excess."""
        found = self.returned.bytes_by_task(len(self.tasks), self.rules.nbytes, ahead=True)
        if self.outputs.drained_at is None or not self.returned.items:
            return found
        leaving = [
            sum(map(self.rules.nbytes, values)) for _, _, values in self.outputs.items[-self.outputs.depth :]
        ]
        coming = [sum(map(self.rules.nbytes, values)) for _, _, values in self.returned.items]
        excess = sum(max(0, new - old) for old, new in zip(leaving, coming, strict=False))
        first, second = self.outputs.items[-1][0], self.outputs.drained_at
        return [0] * first + [excess] * (second - first) + found[second:]

    def _held_by_task(self) -> list[int]:
        """The most bytes of values that stay on this device between two of its tasks."""
        rules = self.rules
        live, held = 0, []
        early = [v for v in self.last_reader if v.device >= 0 and not self._goes_to_next(v)]
        stashed_before = 0
        for t, task in enumerate(self.tasks):
            most = leaving = 0
            for action in task.actions:
                live += sum(rules.nbytes(v) for v in rules.effects(action).makes if v in self.last_reader)
                most = max(most, live)
                live -= sum(
                    rules.nbytes(v)
                    for v in self.free_at.get(action, ())
                    if v.kind in ("Y", "D", "AF") and v.device < 0
                )
                leaving += sum(rules.nbytes(v) for v in self.free_at.get(action, ()) if v.kind == "Y")
            if self.offloads:
                most += leaving + stashed_before
                stashed_before = leaving
            # what skips packs may arrive long before its last reader
            held.append(most + sum(rules.nbytes(v) for v in early if self.last_reader[v][0] >= t))
        return held

    def finish(self) -> list[Lane]:
        return [
            Lane(
                self.device,
                stream,
                tuple(Entry(a, tuple(dict.fromkeys(self.waits.get(a, ())))) for a in actions),
            )
            for stream, actions in self.lanes.items()
            if actions
        ]


def lower(rules: Rules, limits: Sequence[int]) -> Lanes:
    """The program of a configuration; limits: usable bytes of each device.

    Raises InfeasibleError, naming the device, the pack, both numbers.
    """
    lanes: list[Lane] = []
    for device in range(rules.configuration.num_devices):
        lanes += _lower_device(rules, device, limits[device])
    return tuple(_agreeing(lanes) if rules.configuration.agree else lanes)


def _agreeing(lanes: Sequence[Lane]) -> list[Lane]:
    """Updates wait for one action over all gradients; then the layers come first that the next iteration needs first."""
    found = []
    for lane in lanes:
        if lane.stream == "host":
            entries = sorted(lane.entries, key=_updated_pack)
            lane = Lane(lane.device, lane.stream, tuple(entries))
        found.append(lane)
    agree = Entry(Agree())
    for i, lane in enumerate(found):
        if (lane.device, lane.stream) == (0, "host"):
            found[i] = Lane(0, "host", (agree, *lane.entries))
            return found
    return [Lane(0, "host", (agree,)), *found]


def _updated_pack(entry: Entry) -> int:
    assert isinstance(entry.action, Update)
    return entry.action.pack


def _lower_device(rules: Rules, device: int, limit_bytes: int) -> list[Lane]:
    best: DeviceDraft | None = None
    fault: InfeasibleError | None = None
    for depths in _depths(rules):
        draft = DeviceDraft(rules, device, depths)
        if not draft.tasks:
            return []
        draft.add_receives()
        draft.add_compute()
        # the input ring does not depend on what is prefetched: fill it, decide, and start over with the decision
        draft.add_swap_in()
        try:
            draft.choose(limit_bytes)
        except InfeasibleError as error:
            fault = error
            continue
        if best is None or draft.num_hidden > best.num_hidden:
            best = draft
        if best.num_hidden == len(best.tasks) * (1 + bool(best.drained)):
            break
    if best is None:
        assert fault is not None
        raise fault
    draft = best
    draft.lanes["h2d"].clear()
    draft.inputs.items.clear()
    draft.returned.items.clear()
    draft.waits.clear()
    draft.add_swap_in()
    draft.add_drain_waits()
    draft.add_swap_out()
    draft.add_sends()
    draft.add_waits()
    return draft.finish()


def _depths(rules: Rules) -> list[Depths]:
    """From the most that helps down to the least that works.

    Received: as many as a wrap-around pipeline makes early. A device that runs a pack over m microbatches is busy
    with the pack before while m - N outputs for it arrive; fewer places make the senders wait (planning-notes.md,
    pitfall 2). Inputs: a task's, so that the weights behind them never keep one waiting.
    """
    num_replicas = len(rules.replicas)
    microbatches = max(len(rules.forward_samples), len(rules.backward_samples)) // num_replicas
    most = max(len(rules.intersecting(i)) for i in range(len(rules.backward_samples)))
    return depth_options(
        microbatches, rules.stages, max(2, len(rules.backward_samples) // num_replicas), most + 1
    )


def depth_options(microbatches: int, stages: int, inputs: int, least: int) -> list[Depths]:
    """The depths worth trying for so many microbatches in a replica, the best first.

    A pipeline that wraps around stops dead where all places around it are taken while its first device still makes
    more: of m microbatches each of N devices has one at work, two on their way out and the received ones.
    """
    full = max(least, microbatches - stages + 2)
    enough = min(full, max(least, -(-(microbatches + 1) // stages) - 2))
    received = sorted({full, (full + enough) // 2, enough}, reverse=True)
    return [Depths(r, i) for r in received for i in dict.fromkeys((inputs, (inputs + 2) // 2, 2))]


def _tasks(rules: Rules, device: int) -> list[Task]:
    replica, stage = divmod(device, rules.stages)
    forward = [j for j, r in enumerate(rules.forward_replica) if r == replica]
    backward = [i for i, r in enumerate(rules.backward_replica) if r == replica]
    tasks: list[list[Compute]] = []
    for p, pack in enumerate(rules.forward_packs):
        if pack.device == stage:
            tasks.append([Forward(p, j) for j in forward])
    for b in range(len(rules.backward_packs) - 1, -1, -1):
        if rules.backward_packs[b].device == stage:
            tasks.append([Backward(b, i) for i in backward])
    return [Task(rules, actions) for actions in tasks]


def _copies(rules: Rules, value: Value, device: int) -> list[Value]:
    """The copies that other devices of the same replica need, by device."""
    replica = (rules.forward_replica if value.kind == "Y" else rules.backward_replica)[value.microbatch]
    first = replica * rules.stages
    copies = [
        Value(value.kind, value.pack, value.microbatch, device=d) for d in range(first, first + rules.stages)
    ]
    return [copy for copy in copies if copy.device != device and rules.tensors_of(copy)]
