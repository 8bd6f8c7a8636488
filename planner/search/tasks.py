"""The tasks of a draft: what each pack's run over a replica's microbatches costs, and what fits beside it.

In: a draft. Out: tasks in the order in which they run, F0 F1 .. B9 B8 .., for sketch.py; or None where one does
not fit. The memory rules are lower.py's: a task has its weights and gradients, its working set, its inputs and two
outputs on their way; the next weights and the last gradients are beside it where there is room.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from planner.contract.cuts import nbytes
from planner.lower import MAX_LATE, depth_options
from planner.search.draft import Draft, why_not_resident
from planner.search.pack_models import PackModels
from planner.search.problem import ranges


class Part(NamedTuple):
    """A pack of layers in one phase at one microbatch size. Bytes of tensors are per sample."""

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    total_seconds: tuple[float, float]
    """Of all microbatches: forward, backward."""
    weight_bytes: int
    gradient_bytes: int
    batch: int
    given: int
    handed: int
    handed_back: int
    working_bytes: float
    kept_bytes: int
    """Of one microbatch, without recompute."""
    kept_working_bytes: float


@dataclass(slots=True)
class Task:
    """One pack's run over a replica's microbatches."""

    is_forward: bool
    pack: int
    stage: int
    seconds: list[float]
    weight_seconds: float
    weight_bytes: int
    """Of weights that come for this task alone; 0 where they are held."""
    is_held: bool
    """Its weights come in and stay for the backward."""
    gradient_bytes: int
    loads: list[float]
    """Seconds over h2d per microbatch: batch tensors, stash, offloaded activations."""
    stash_seconds: list[float]
    offload_seconds: list[float]
    send_seconds: list[float]
    base_bytes: float
    input_bytes: int
    """Of one microbatch, from the host."""
    output_bytes: float
    """Of one microbatch, to other devices and to the host."""
    received_bytes: int
    """Of one microbatch, from another device."""
    returned_bytes: int = 0
    """Of one microbatch, offloaded activations that return."""
    first_returned: int = 0
    end_returned: int = 0
    """The microbatches whose offloaded activations return."""
    is_prefetching: bool = False
    has_second: bool = False
    """Whether the weights after the next ones may be there too."""
    num_late: int = 0
    """Of how many tasks before the gradients may still be on their way out."""


class TaskMaker:
    """Makes the tasks of the drafts of one shape."""

    def __init__(self, models: PackModels) -> None:
        self.models = models
        self.problem = models.problem
        self.shape = models.shape
        stages = self.shape.num_stages
        devices = self.problem.hardware.devices[: self.problem.num_devices]
        self.limits = [min(self.problem.limits[s::stages]) for s in range(stages)]
        self.scales = [min(d.compute_scale for d in devices[s::stages]) for s in range(stages)]
        speeds = [
            sum(d.compute_scale for d in devices[r : r + stages]) for r in range(0, len(devices), stages)
        ]
        loads = zip(self.shape.shares, speeds, strict=True)
        self.samples = max(loads, key=lambda item: item[0] / item[1])[0]
        self._parts: dict[tuple[bool, int, int, int], Part] = {}
        self._lengths: dict[int, list[int]] = {}
        self._forward_lists: dict[
            tuple[int, int, int, int], tuple[list[float], list[float], list[float]]
        ] = {}
        self._backward_lists: dict[
            tuple[int, int, int, int, int, int, bool], tuple[list[float], list[float], list[float]]
        ] = {}

    def lengths(self, size: int) -> list[int]:
        """The samples of each microbatch of a replica."""
        found = self._lengths.get(size)
        if found is None:
            found = self._lengths[size] = [b - a for a, b in ranges(self.samples, size)]
        return found

    def part(self, is_forward: bool, first: int, end: int, size: int) -> Part:
        key = is_forward, first, end, size
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = self._measure(is_forward, first, end - 1, size)
        return found

    def _measure(self, is_forward: bool, first: int, last: int, size: int) -> Part:
        costs = self.problem.costs
        entering = costs.entering(first, last)
        working = self.models.working_bytes(is_forward, first, last + 1, size)
        kept, kept_working, trained = 0, 0.0, 0
        backward: tuple[float, ...] = ()
        if not is_forward:
            kept = costs.kept_bytes(first, last, size)
            kept_working = working - costs.backward_workspace(first, last, size)
            kept_working += costs.kept_workspace(first, last, size)
            trained = costs.gradient_bytes(first, last)
            backward = tuple(costs.backward_seconds(first, last, u) for u in self.lengths(size))
        forward = tuple(costs.forward_seconds(first, last, u) for u in self.lengths(size))
        return Part(
            forward,
            backward,
            (sum(forward), sum(backward)),
            costs.weight_bytes(first, last),
            trained,
            nbytes((t for t in entering if t.src < 0), 1),
            nbytes((t for t in entering if t.src >= 0), 1),
            nbytes(costs.leaving(first, last), 1),
            nbytes((t for t in entering if t.differentiable), 1),
            working,
            kept,
            kept_working,
        )

    def tasks(self, draft: Draft) -> list[Task] | None:
        """The tasks of a draft, with what is hidden behind each; None where one does not fit."""
        found = self.bare_tasks(draft)
        if draft.offloaded and self.shape.num_stages == 1:
            self._add_stashes_behind(draft, found)
        self._add_staying(draft, found)
        return found if self._hide(draft, found) else None

    def depth(self, size: int) -> int:
        """How many inputs a device may have at most: those of one task."""
        return max(2, len(self.lengths(size)))

    def fused_start(self, size: int) -> int:
        """First layer of the largest fused pack that fits; num_layers where none does."""
        costs, limit = self.problem.costs, min(self.limits)
        found = end = costs.num_layers
        for start in range(end - 1, -1, -1):
            held = costs.weight_bytes(start, end - 1) + costs.gradient_bytes(start, end - 1)
            if held > limit:
                break
            if held + self.models.bytes_needed(False, start, end, size) <= limit:
                found = start
        return found

    # ---- costs

    def _forward_tasks(self, draft: Draft) -> list[Task]:
        rates, size = self.models.rates, draft.forward_size
        lengths = self.lengths(size)
        peer = rates.peer if self.shape.num_stages > 1 and rates.peer else 0.0
        stashed, inner = self._stashed(draft)
        found = []
        for p, (first, end) in enumerate(pairwise(draft.forward_cuts)):
            part, stage = self.part(True, first, end, size), draft.forward_stage(p)
            held = bool(draft.held) and draft.held[p]
            streamed = 0 if held or _is_resident(draft, p) else part.weight_bytes
            received = part.given * size if peer else 0
            key = first, end, size, stage
            lists = self._forward_lists.get(key)
            if lists is None:
                lists = self._forward_lists[key] = (
                    [seconds / self.scales[stage] for seconds in part.forward_seconds],
                    [u * part.batch / rates.h2d for u in lengths] if part.batch else [],
                    [u * part.handed / peer for u in lengths] if peer else [],
                )
            seconds, loads, sends = lists
            offloads: list[float] = []
            if draft.offloaded and draft.offloaded[p]:
                out = self.part(False, first, end, size).kept_bytes / rates.d2h
                choices = draft.choices(p, len(lengths))
                offloads = [out if choice == "offload" else 0.0 for choice in choices]
            found.append(
                Task(
                    True,
                    p,
                    stage,
                    seconds,
                    part.weight_bytes / rates.h2d,
                    streamed,
                    held,
                    0,
                    loads,
                    [u * stashed[p] / rates.d2h for u in lengths] if stashed[p] else [],
                    offloads,
                    sends,
                    part.working_bytes - 2 * received + streamed,
                    part.batch * size,
                    size * (inner[p] + (part.handed if peer else 0))
                    + (self.part(False, first, end, size).kept_bytes if offloads else 0),
                    received,
                )
            )
        return found

    def _stashed(self, draft: Draft) -> tuple[list[int], list[int]]:
        """Per forward pack the bytes per sample that it stashes, and of those the ones that nobody else takes."""
        stashed, inner = [0] * draft.num_forward, [0] * draft.num_forward
        count = len(self.lengths(draft.backward_size))
        for b in range(1, draft.num_backward - 1):
            if draft.kept and draft.kept[b] + (draft.offloaded[b] if draft.offloaded else 0) >= count:
                continue
            first = draft.backward_cuts[b]
            given = self.part(False, first, draft.backward_cuts[b + 1], draft.backward_size).given
            maker = bisect_right(draft.forward_cuts, first - 1) - 1
            stashed[maker] += given
            if first < draft.forward_cuts[maker + 1]:
                inner[maker] += given
        return stashed, inner

    def _backward_tasks(self, draft: Draft) -> list[Task]:
        rates, size = self.models.rates, draft.backward_size
        lengths, fused = self.lengths(size), draft.num_backward - 1
        peer = rates.peer if self.shape.num_stages > 1 and rates.peer else 0.0
        found = []
        for b in range(fused, -1, -1):
            first, end = draft.backward_cuts[b], draft.backward_cuts[b + 1]
            part, stage = self.part(False, first, end, size), draft.backward_stage(b)
            kept = draft.kept[b] if draft.kept and b < fused else 0
            saved = kept + (draft.offloaded[b] if draft.offloaded and b < fused else 0)
            stash = part.given if b < fused else 0
            key = first, end, size, stage, kept, saved, b < fused
            lists = self._backward_lists.get(key)
            if lists is None:
                lists = self._backward_lists[key] = self._lists(part, stage, lengths, kept, saved, stash)
            seconds, loads, sends = lists
            held = bool(draft.held) and b < fused and draft.held[b]
            resident = _is_resident(draft, b)
            streamed = 0 if held or resident else part.weight_bytes
            if resident and part.gradient_bytes:
                seconds = [*seconds[:-1], seconds[-1] + self.device_update_seconds(first, end, stage)]
            working = part.working_bytes if saved < len(lengths) else part.kept_working_bytes
            # what comes from the host and from other devices is counted as it comes
            received = part.handed * size if peer else 0
            working -= 2 * part.given * size + 2 * received
            if b == fused:  # takes its inputs from the last forward pack, joined where those are smaller
                joined = part.given * size if size > draft.forward_size else 0
                received = part.given * draft.forward_size if peer else 0
                working += joined + (0 if peer else 2 * part.given * size)
            found.append(
                Task(
                    False,
                    b,
                    stage,
                    seconds,
                    part.weight_bytes / rates.h2d,
                    streamed,
                    False,
                    0 if resident else part.gradient_bytes,
                    loads,
                    [],
                    [],
                    sends,
                    working + part.gradient_bytes + streamed,
                    (part.batch + stash) * size,
                    size * part.handed_back if peer else 0.0,
                    received,
                    part.kept_bytes if saved > kept else 0,
                    kept,
                    saved,
                )
            )
        return found

    def compute_seconds(self, draft: Draft) -> float:
        """What the busiest device computes at least, without making tasks; where what is kept is open, nothing recomputed."""
        busy = [0.0] * self.shape.num_stages
        for p, (first, end) in enumerate(pairwise(draft.forward_cuts)):
            stage = draft.forward_stage(p)
            busy[stage] += self.part(True, first, end, draft.forward_size).total_seconds[0]
        fused, recomputes = draft.num_backward - 1, not draft.reflected
        for b, (first, end) in enumerate(pairwise(draft.backward_cuts)):
            forward, backward = self.part(False, first, end, draft.backward_size).total_seconds
            busy[draft.backward_stage(b)] += backward + (forward if recomputes or b == fused else 0.0)
        return max(seconds / scale for seconds, scale in zip(busy, self.scales, strict=True))

    def device_update_seconds(self, first: int, end: int, stage: int) -> float:
        """Of layers [first, end); infinity where it was not measured."""
        seconds = self.problem.costs.device_update_seconds(first, end - 1)
        return float("inf") if seconds is None else seconds / self.scales[stage]

    def _lists(
        self, part: Part, stage: int, lengths: list[int], kept: int, saved: int, stash: int
    ) -> tuple[list[float], list[float], list[float]]:
        """Of a backward pack by microbatch: seconds of compute, of loads, of sends."""
        rates, scale = self.models.rates, self.scales[stage]
        seconds = [
            (backward + (forward if i >= saved else 0.0)) / scale
            for i, (forward, backward) in enumerate(
                zip(part.forward_seconds, part.backward_seconds, strict=True)
            )
        ]
        loads: list[float] = []
        if part.batch or (stash and saved < len(lengths)) or saved > kept:
            loads = [
                (u * part.batch + (u * stash if i >= saved else part.kept_bytes if i >= kept else 0))
                / rates.h2d
                for i, u in enumerate(lengths)
            ]
        has_peer = self.shape.num_stages > 1 and rates.peer
        sends = [u * part.handed_back / rates.peer for u in lengths] if has_peer and rates.peer else []
        return seconds, loads, sends

    # ---- memory

    def _add_stashes_behind(self, draft: Draft, tasks: list[Task]) -> None:
        """Behind offloaded activations the inputs of a task and of the one before may still be leaving."""
        size = draft.forward_size
        before = 0
        for task in tasks[: draft.num_forward + 2]:
            cuts = draft.forward_cuts if task.is_forward else draft.backward_cuts
            given = self.part(task.is_forward, cuts[task.pack], cuts[task.pack + 1], size).given
            own = size * given * len(self.lengths(size)) if task.pack else 0
            task.base_bytes += own + before
            before = own

    def _add_staying(self, draft: Draft, tasks: list[Task]) -> None:
        """Activations that stay from a pack's forward to its backward count in all tasks between, held weights and
        what is resident always."""
        if not draft.kept and not draft.held and not draft.resident:
            return
        staying = self.resident_bytes(draft)
        parts = [self.part(False, a, b, draft.backward_size) for a, b in pairwise(draft.backward_cuts)]
        for p in range(draft.num_forward):
            if draft.held and draft.held[p]:
                staying[draft.forward_stage(p)] += parts[p].weight_bytes
        for task in tasks:
            kept = draft.kept[task.pack] if draft.kept and task.pack < draft.num_forward else 0
            own = kept * parts[task.pack].kept_bytes if kept else 0
            if task.is_forward:
                staying[task.stage] += own
            task.base_bytes += staying[task.stage]
            if not task.is_forward:
                staying[task.stage] -= own

    def resident_bytes(self, draft: Draft) -> list[int]:
        """Of each stage: weights and states that never leave it."""
        found = [0] * self.shape.num_stages
        for b, (first, end) in enumerate(pairwise(draft.backward_cuts)):
            if _is_resident(draft, b):
                found[draft.backward_stage(b)] += self._resident_pack_bytes(first, end)
        return found

    def _resident_pack_bytes(self, first: int, end: int) -> int:
        costs = self.problem.costs
        return costs.weight_bytes(first, end - 1) + costs.state_bytes(first, end - 1)

    def _hide(self, draft: Draft, tasks: list[Task]) -> bool:
        """Decide what is hidden behind each task; whether all fit."""
        stages = self.shape.num_stages
        forward, backward = len(self.lengths(draft.forward_size)), len(self.lengths(draft.backward_size))
        least = 1 + -(-draft.backward_size // draft.forward_size)
        options = depth_options(max(forward, backward), stages, max(2, backward), least)
        self.depths, self.received = [2] * stages, [least] * stages
        for stage in range(stages):
            own = [task for task in tasks if task.stage == stage]
            if not own:
                continue
            best, most = -1, len(own) * (1 + any(task.gradient_bytes for task in own))
            for tried in options:
                hidden = hide(own, self.limits[stage], *tried, stages == 1)
                if hidden > best:
                    best, (self.received[stage], self.depths[stage]) = hidden, tried
                if best == most:
                    break
            if best < 0:
                return False
            if best < most:
                hide(own, self.limits[stage], self.received[stage], self.depths[stage], stages == 1)
        return True

    def bare_tasks(self, draft: Draft) -> list[Task]:
        """The tasks of a draft, whether they fit or not."""
        return self._forward_tasks(draft) + self._backward_tasks(draft)

    def fill(self, draft: Draft) -> Draft:
        """A reflected draft with as many activations kept as fit beside what hides transfers, the inner packs first.

        Where it may offload: of each pack as many as leave while its forward runs and return while its backward does.
        """
        bare = replace(draft, kept=(0,) * draft.num_backward, offloaded=(), may_reside="none")
        if draft.may_reside != "none":
            bare = replace(bare, resident=self._residents(draft, bare))
        tasks = self.bare_tasks(bare)
        packs, size = draft.num_forward, draft.backward_size
        parts = [self.part(False, a, b, size) for a, b in pairwise(draft.forward_cuts)]
        left = self.room(tasks, size)
        resident = self.resident_bytes(bare)
        left = [room - resident[task.stage] for room, task in zip(left, tasks, strict=True)]
        count = len(self.lengths(size))
        offloaded = (
            self._offloaded(tasks, parts, left, count) if draft.may_offload else [0] * draft.num_backward
        )
        kept = [0] * draft.num_backward
        room = [float("inf")] * self.shape.num_stages
        room[tasks[packs].stage] = left[packs]
        for p in range(packs - 1, -1, -1):
            stage, own = tasks[p].stage, parts[p].kept_bytes
            room[stage] = min(room[stage], left[p], left[2 * packs - p])
            most = count - offloaded[p]
            kept[p] = max(0, min(most, int(room[stage] // own))) if own else most
            room[stage] -= kept[p] * own
        return replace(bare, kept=tuple(kept), offloaded=tuple(offloaded) if any(offloaded) else ())

    def _residents(self, draft: Draft, bare: Draft) -> tuple[bool, ...]:
        """Which packs are resident: all that may be, or of those the first, or the inner ones that fit beside what
        hides transfers."""
        cuts = list(pairwise(draft.backward_cuts))
        may = [not why_not_resident(self.problem, self.shape.num_replicas, *cut) for cut in cuts]
        if draft.may_reside == "all":
            return tuple(may)
        if draft.may_reside == "first":
            return (may[0], *(False for _ in cuts[1:]))
        tasks = self.bare_tasks(bare)
        left = [float("inf")] * self.shape.num_stages
        for task, room in zip(tasks, self.room(tasks, draft.backward_size), strict=True):
            left[task.stage] = min(left[task.stage], room)
        found = [False] * len(cuts)
        for b in range(len(cuts) - 1, -1, -1):
            stage, needed = draft.backward_stage(b), self._resident_pack_bytes(*cuts[b])
            if may[b] and needed <= left[stage]:
                left[stage] -= needed
                found[b] = True
        return tuple(found)

    def _offloaded(self, tasks: list[Task], parts: list[Part], left: list[float], count: int) -> list[int]:
        """Per pack how many microbatches' activations leave and return while the links have nothing else to do.

        The buffers that they go through come off what the tasks have `left`.
        """
        packs, stages, rates = len(parts), self.shape.num_stages, self.models.rates
        found = [0] * (packs + 1)
        now, free = [0.0] * stages, [0.0] * stages
        buffers = [0.0] * stages
        for p, (part, task) in enumerate(zip(parts, tasks, strict=False)):
            stage, needed = task.stage, 2 * part.kept_bytes
            fits = part.kept_bytes and min(left[p], left[2 * packs - p]) >= needed
            for seconds in task.seconds:
                now[stage] += seconds
                if fits and free[stage] <= now[stage]:
                    free[stage] = now[stage] + part.kept_bytes / rates.d2h
                    found[p] += 1
            free[stage] += sum(task.stash_seconds)
            if found[p]:
                buffers[stage] = max(buffers[stage], needed)
        now, free = [0.0] * stages, [0.0] * stages
        for task in tasks[packs:]:
            stage, pack = task.stage, task.pack
            free[stage] += task.weight_seconds
            if pack < packs and found[pack]:
                # what comes too late is recomputed
                back, stash = parts[pack].kept_bytes / rates.h2d, max(task.loads, default=0.0)
                wanted, found[pack] = found[pack], 0
                for _ in range(wanted):
                    if free[stage] + back <= now[stage] + sum(task.seconds):
                        free[stage] += back
                        found[pack] += 1
                free[stage] += (count - found[pack]) * stash
            else:
                free[stage] += sum(task.loads)
            now[stage] += sum(task.seconds)
            free[stage] = max(free[stage], now[stage] - sum(task.seconds))
        for k, task in enumerate(tasks):
            left[k] -= buffers[task.stage]
        return found

    def room(self, tasks: list[Task], size: int) -> list[float]:
        """What each task leaves free on its device beside what hides transfers."""
        depth, left = self.depth(size), [0.0] * len(tasks)
        received = max(2, len(self.lengths(size)) - self.shape.num_stages + 2)
        for stage in range(self.shape.num_stages):
            own = [k for k, task in enumerate(tasks) if task.stage == stage]
            for i, k in enumerate(own):
                task, after, before = tasks[k], tasks[own[(i + 1) % len(own)]], tasks[own[i - 1]]
                hidden = (
                    after.weight_bytes
                    + before.gradient_bytes
                    + 2 * max(task.output_bytes, before.output_bytes)
                )
                hidden += depth * max(task.input_bytes, after.input_bytes)
                hidden += received * max(task.received_bytes, after.received_bytes)
                left[k] = self.limits[stage] - task.base_bytes - hidden
        return left


def _is_resident(draft: Draft, pack: int) -> bool:
    return bool(draft.resident) and draft.resident[pack]


def returned_by_task(own: list[Task], is_drained: bool) -> list[int]:
    """The most that offloaded activations take on their way back while each task runs: two of them."""
    found = [0] * len(own)
    if not any(task.returned_bytes for task in own):
        return found
    items = [
        (k, task.returned_bytes)
        for k, task in enumerate(own)
        for _ in range(task.end_returned - task.first_returned)
    ]
    windows = [a[1] + b[1] for a, b in pairwise(items)] or [items[0][1]]
    first_backward = next(k for k, task in enumerate(own) if not task.is_forward)
    place = 0
    for k in range(first_backward if is_drained else 0, len(own)):
        while place < len(items) and items[place][0] < k:
            place += 1
        end = place
        while end < len(items) and items[end][0] == k:
            end += 1
        found[k] = max(
            windows[
                min(place, len(windows) - 1) : max(
                    min(end + 1, len(windows)), min(place, len(windows) - 1) + 1
                )
            ]
        )
    if is_drained:
        found[first_backward] = 0  # in the place of what left last
    return found


def hide(own: list[Task], limit: float, received: int, depth: int, is_drained: bool) -> int:
    """Decide for each task of a device, with so many received values and inputs at a time, whether the next weights load beside it and
    how many gradients leave beside it. is_drained: outputs of the forward are gone before the second backward task.
    Returns how much is hidden, -1 where a task does not fit."""
    incoming = next((task.weight_bytes for task in own if task.weight_bytes), 0)
    coming = []
    for task in reversed(own):
        coming.append(incoming)
        incoming = task.weight_bytes or incoming
    coming.reverse()
    leaving = [task.gradient_bytes for task in own if task.gradient_bytes]
    made = hidden = 0  # gradients of this iteration so far
    last_output = next((task.output_bytes for task in reversed(own) if task.output_bytes), 0.0)
    if is_drained:
        last_output = 0.0
    num_backward = place = 0
    weights = [task.weight_bytes for task in own if task.weight_bytes]
    returned = returned_by_task(own, is_drained)
    for k, (task, incoming, after) in enumerate(zip(own, coming, [*own[1:], own[0]], strict=True)):
        left = -returned[k] + limit - task.base_bytes - depth * max(task.input_bytes, after.input_bytes)
        left -= received * max(task.received_bytes, after.received_bytes)
        num_backward += not task.is_forward
        if is_drained and num_backward == 2:
            last_output = 0.0
        # two outputs of this task, or of the one before, are on their way
        left -= 2 * max(task.output_bytes, last_output)
        last_output = task.output_bytes or last_output
        if left < 0:
            return -1
        task.is_prefetching = incoming <= left
        if task.is_prefetching:
            left -= incoming
            hidden += 1
        elif not task.weight_bytes:
            return -1
        task.num_late = 0
        for j in range(1, min(MAX_LATE, len(leaving) - bool(task.gradient_bytes)) + 1):
            if leaving[made - j] > left:
                break
            left -= leaving[made - j]
            task.num_late = j
        hidden += task.num_late > 0
        made += bool(task.gradient_bytes)
        place += task.weight_bytes > 0
        task.has_second = (
            len(weights) > 3 and task.is_prefetching and weights[(place + 1) % len(weights)] <= left
        )
    return hidden
