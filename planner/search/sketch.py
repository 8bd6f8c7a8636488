"""How long a draft takes, about: the simulator's recurrences for one replica, without making the program.

In: a draft. Out: seconds of a steady-state iteration, or infinity where a task does not fit. A fiftieth of the
work of lowering and simulating, and mostly equal to it; the search ranks and refines by it, and the simulator
decides. What is left out: places in receive queues, transfers that skip packs, differences between replicas,
sharing of a link as it is needed.

        compute   F0.0 F0.1 F0.2 F2.0 ...          an action starts when its stream is free and its inputs are there;
        h2d     WF0      WF2                       the next weights load behind a task's inputs where memory allows
        d2h          S0.0 S0.1 ...   G3            gradients go out, are applied, and come in with the next iteration
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from planner.search.draft import Cuts, Draft
from planner.search.pack_models import PackModels
from planner.search.tasks import Task, TaskMaker

NUM_ITERATIONS = 4
"""At most, where the next iteration need not wait for all of this one."""
SETTLED = 1e-6
TASK_STEPS = 6
"""What making a task costs, in microbatch steps."""
INFEASIBLE = float("inf")


class Neighbours(NamedTuple):
    """Tasks of the same device, around the iteration: whose weights come next, and came one, two and three before; whose
    gradients must be gone."""

    following: int | None
    previous: int | None
    before_previous: int | None
    third: int | None
    waited: int | None


class Sketcher:
    """Sketches the drafts of one shape, and counts the microbatch steps that it took."""

    def __init__(self, models: PackModels) -> None:
        self.models = models
        self.maker = TaskMaker(models)
        self.problem = models.problem
        self.shape = models.shape
        self.steps = 0
        self.evened: dict[tuple[int, bool, int, int], Cuts] = {}
        """Evened out packs that were asked for before; refine.py fills it."""

    def seconds(self, draft: Draft) -> float:
        """Seconds of one iteration; infinity where it does not fit."""
        filled = self.filled(draft)
        tasks = self.maker.tasks(filled)
        if tasks is None:
            self.steps += TASK_STEPS * (draft.num_forward + draft.num_backward)
            return INFEASIBLE
        return _Run(self, filled, tasks).seconds()

    def is_slower(self, draft: Draft, seconds: float) -> bool:
        """Whether it computes for longer than that, whatever is hidden: what costs next to nothing to find out."""
        self.steps += draft.num_forward + draft.num_backward
        return self.maker.compute_seconds(draft) > seconds

    def filled(self, draft: Draft) -> Draft:
        """The draft, with what it keeps filled in where that is open."""
        return self.maker.fill(draft) if draft.is_filled else draft


class _Run:
    """The recurrences of one draft: when each stream of each stage of a replica is free."""

    def __init__(self, sketcher: Sketcher, draft: Draft, tasks: list[Task]) -> None:
        self.sketcher = sketcher
        self.tasks = tasks
        self.draft = draft
        maker, shape = sketcher.maker, sketcher.shape
        self.stages, self.replicas = shape.num_stages, shape.num_replicas
        self.fused = draft.num_backward - 1
        self.neighbours = _neighbours(tasks)
        self.covering = _covering(draft)
        # the last forward microbatch that each backward one needs
        forward_ends = list(accumulate(maker.lengths(draft.forward_size)))
        backward_ends = list(accumulate(maker.lengths(draft.backward_size)))
        self.needs = [next(j for j, e in enumerate(forward_ends) if e >= end) for end in backward_ends]
        self.h2d = [0.0] * self.stages
        self.ready_at = [0.0] * len(tasks)
        self.weights_free = [0.0] * len(tasks)
        self.updated = [0.0] * draft.num_backward
        self.firsts = []
        for stage in range(self.stages):
            loading = (k for k, t in enumerate(tasks) if t.stage == stage and (t.weight_bytes or t.is_held))
            self.firsts.append(next(loading, None))

    def seconds(self) -> float:
        """The period, once it settles."""
        sketcher, tasks, draft = self.sketcher, self.tasks, self.draft
        rates, costs, problem = sketcher.models.rates, sketcher.problem.costs, sketcher.problem
        stages, replicas, fused = self.stages, self.replicas, self.fused
        trained = [task for task in tasks if task.gradient_bytes]
        queues = len({(task.pack % replicas, task.stage) for task in trained})
        host_share = max(1.0, queues / problem.hardware.host.update_workers)
        update_seconds = [
            host_share * costs.host_update_seconds(first, end - 1)
            for first, end in pairwise(draft.backward_cuts)
        ]
        reduce_rate = rates.peer if replicas > 1 and rates.peer else float("inf")
        stash_maker = [bisect_right(draft.forward_cuts, cut - 1) - 1 for cut in draft.backward_cuts]
        compute, send, reduce, stash_end = ([0.0] * stages for _ in range(4))
        d2h = [[0.0] * stages for _ in range(replicas)]
        host = [[0.0] * stages for _ in range(replicas)]
        gradients_free = [0.0] * len(tasks)
        rings = [[0.0] * depth for depth in sketcher.maker.depths]
        returned, left = [[0.0, 0.0] for _ in range(stages)], [[0.0, 0.0] for _ in range(stages)]
        places = [0] * stages
        h2d, ready_at, neighbours, needs, d2h_rate = (
            self.h2d,
            self.ready_at,
            self.neighbours,
            self.needs,
            rates.d2h,
        )
        first_drained = draft.num_forward + 1
        is_single, received = stages == 1, sketcher.maker.received
        last_end = last_period = period = 0.0
        sketcher.steps += TASK_STEPS * len(tasks)
        num_steps = len(tasks) + sum(
            len(task.seconds)
            for task in tasks
            if stages > 1 or task.loads or task.stash_seconds or task.offload_seconds
        )
        # the first layers' next forward waits for their update, and their backward was the last: what an iteration
        # takes is what it takes alone
        waits_for_all = tasks[-1].gradient_bytes > 0
        for iteration in range(1 if waits_for_all else NUM_ITERATIONS):
            for first in self.firsts:
                if first is not None:
                    self._load(first)
            sketcher.steps += num_steps
            outputs: list[float] = []  # arrivals of what the task before made
            stashes: list[list[float]] = []
            for k, task in enumerate(tasks):
                stage, near = task.stage, neighbours[k]
                successor = near.following
                end = compute[stage]
                if ready_at[k] > end and (task.weight_bytes or task.is_held):
                    end = ready_at[k]
                if near.waited is not None and gradients_free[near.waited] > end:
                    end = gradients_free[near.waited]
                if is_single and k == first_drained and stash_end[stage] > end:
                    end = stash_end[stage]  # what the forward made has left
                loads, sends, stash, offloads = (
                    task.loads,
                    task.send_seconds,
                    task.stash_seconds,
                    task.offload_seconds,
                )
                if successor is not None and not loads:
                    self._load(successor)
                    successor = None
                is_forward = task.is_forward
                # without offloading compute frees a task's inputs, behind their stash
                holding = (
                    stashes[-1]
                    if is_single and stashes and not draft.offloaded and k <= draft.num_forward
                    else []
                )
                if is_single and not loads and not stash and not offloads and not holding:
                    end += sum(task.seconds)
                    stashes.append([])
                    outputs = []
                else:
                    came = outputs
                    if not is_forward and task.pack == fused and came:
                        came = [came[j] for j in needs]
                    stashed: list[float] = []
                    if not is_forward and 0 < task.pack < fused and stashes[stash_maker[task.pack]]:
                        made = stashes[stash_maker[task.pack]]
                        stashed = [made[j] for j in needs]
                    outputs, own_stash = [], []
                    ring, depth = rings[stage], len(rings[stage])
                    taken = 0.0  # when the next device takes, about, what has no place there yet
                    if sends and k + 1 < len(tasks):
                        after = tasks[k + 1]
                        places_there = received[after.stage]
                        is_pressed = places_there < len(sends)
                        taken, interval = (
                            max(compute[after.stage], ready_at[k + 1] if is_pressed else 0.0),
                            after.seconds[0],
                        )
                    else:
                        is_pressed = False
                    for i, seconds in enumerate(task.seconds):
                        if loads:
                            if i == depth and successor is not None and task.is_prefetching:
                                self._load(successor)
                                successor = None
                            place, start = places[stage], h2d[stage]
                            is_returned = task.first_returned <= i < task.end_returned
                            freed = returned[stage][0] if is_returned else ring[place]
                            if freed > start:
                                start = freed
                            if stashed and stashed[i] > start:
                                start = stashed[i]
                            h2d[stage] = start = start + loads[i]
                            if start > end:
                                end = start
                        if came and came[i] > end:
                            end = came[i]
                        if offloads and offloads[i] and left[stage][0] > end:
                            end = left[stage][0]
                        if is_pressed and i >= 2 and outputs[i - 2] > end:
                            end = outputs[i - 2]
                        end += seconds
                        if holding:
                            held_until = holding[needs[i] if k == draft.num_forward else i]
                            if held_until > end:
                                end = held_until
                        if loads:
                            if is_returned:
                                returned[stage] = [returned[stage][1], end]
                            else:
                                ring[place] = end
                                places[stage] = (place + 1) % depth
                        if sends:
                            begun = send[stage]
                            if is_pressed and i >= places_there:
                                begun = max(begun, taken + (i - places_there + 1) * interval)
                            send[stage] = arrival = (begun if begun > end else end) + sends[i]
                            outputs.append(arrival)
                        elif not is_single:
                            outputs.append(end)
                        if stash:
                            begun = max(stash_end[stage], d2h[0][stage])
                            stash_end[stage] = leaves = (begun if begun > end else end) + stash[i]
                            own_stash.append(leaves)
                        if offloads and offloads[i]:
                            begun = max(stash_end[stage], d2h[0][stage], end)
                            stash_end[stage] = begun + offloads[i]
                            left[stage] = [left[stage][1], stash_end[stage]]
                    stashes.append(own_stash)
                compute[stage] = end
                if task.weight_bytes:
                    self.weights_free[k] = end
                elif not is_forward and task.pack < fused:
                    self.weights_free[task.pack] = end  # of held weights: forward task p is at position p
                if successor is not None:
                    self._load(successor)
                if task.gradient_bytes:
                    owner = task.pack % replicas
                    reduce[stage] = ready = max(reduce[stage], end) + task.gradient_bytes / reduce_rate
                    out = max(d2h[owner][stage], stash_end[stage], ready) + task.gradient_bytes / d2h_rate
                    # the owner's are there for longest, and the other replicas wait for the owner
                    d2h[owner][stage] = gradients_free[k] = out
                    if not problem.agree:
                        done = max(host[owner][stage], out) + update_seconds[task.pack]
                        host[owner][stage] = self.updated[task.pack] = done
            if problem.agree:
                self._update_agreed(host, max(max(lane) for lane in d2h), update_seconds)
            makespan = max(*compute, *(max(lane) for lane in host), *(max(lane) for lane in d2h))
            period = makespan - last_end
            if iteration and abs(period - last_period) <= SETTLED * period:
                break
            last_end, last_period = makespan, period
        return period

    def _update_agreed(
        self, host: list[list[float]], arrived: float, update_seconds: Sequence[float]
    ) -> None:
        """All updates once the norm over all gradients is known, the first layers first."""
        agreed = arrived + self.sketcher.problem.costs.norm_seconds()
        trained = {task.pack: task.stage for task in self.tasks if task.gradient_bytes}
        for lane in host:
            lane[:] = [max(agreed, free) for free in lane]
        for pack in sorted(trained):
            lane, stage = host[pack % self.replicas], trained[pack]
            lane[stage] = self.updated[pack] = lane[stage] + update_seconds[pack]

    def _load(self, k: int) -> None:
        """Weights of a task: behind what is queued, the update of their layers, and the free one or two tasks before."""
        task, near = self.tasks[k], self.neighbours[k]
        start = self.h2d[task.stage]
        if task.is_held:
            # their own place: free since the backward of the iteration before
            start = max(start, self.weights_free[k])
        freed = near.previous
        if freed is not None and self.tasks[freed].is_prefetching:
            second = near.before_previous
            freed = near.third if second is not None and self.tasks[second].has_second else second
        if freed is not None and self.weights_free[freed] > start:
            start = self.weights_free[freed]
        if task.is_forward:
            for b in self.covering[task.pack]:
                if self.updated[b] > start:
                    start = self.updated[b]
        elif task.pack == self.fused and self.updated[task.pack] > start:
            # of the backward packs only the fused one has no forward that waited for its update already
            start = self.updated[task.pack]
        self.h2d[task.stage] = self.ready_at[k] = start + task.weight_seconds


def _neighbours(tasks: list[Task]) -> list[Neighbours]:
    """For each task the tasks of its device around it."""
    found: list[Neighbours] = [Neighbours(None, None, None, None, None)] * len(tasks)
    stages: dict[int, list[int]] = {}
    for k, task in enumerate(tasks):
        stages.setdefault(task.stage, []).append(k)
    for own in stages.values():
        weighted = [k for k in own if tasks[k].weight_bytes]
        loading = [k for k in own if tasks[k].weight_bytes or tasks[k].is_held]
        drained = [k for k in own if tasks[k].gradient_bytes]
        w = later = before = 0
        for k in own:
            task = tasks[k]
            one = two = three = following = waited = None
            is_streamed, makes = task.weight_bytes > 0, task.gradient_bytes > 0
            if is_streamed or task.is_held:
                later += 1
                following = loading[later] if later < len(loading) else None
            if is_streamed:
                one = weighted[w - 1] if len(weighted) > 1 else None
                two = weighted[w - 2] if len(weighted) > 2 else None
                three = weighted[w - 3] if len(weighted) > 3 else None
                w += 1
            if task.num_late < len(drained) - makes:
                waited = drained[(before - 1 - task.num_late) % len(drained)]
            before += makes
            found[k] = Neighbours(following, one, two, three, waited)
    return found


def _covering(draft: Draft) -> list[tuple[int, ...]]:
    """The backward packs that share layers with each forward pack."""
    found = []
    for first, end in pairwise(draft.forward_cuts):
        low = bisect_right(draft.backward_cuts, first) - 1
        high = bisect_right(draft.backward_cuts, end - 1) - 1
        found.append(tuple(range(low, high + 1)))
    return found
