"""Swap placement by integer program: what stays on a device, what goes to the host, what is recomputed.

In: a reflected draft (a pack's backward runs where its forward ran). Out: the draft with, for each backward pack, how
many microbatches' activations are kept and how many offloaded, and whether its weights stay from its forward to its
backward; None where the program has no solution. The objective is a model of the iteration time; whoever asks
simulates both drafts and takes the better.

Variables, for pack p of m microbatches and task t (F0 F1 .. then fused .. B1 B0):

    keep_p, offload_p   microbatches, the rest recomputes         all_p     1 where nothing of p recomputes
    hold_p              weights stay                              buffer_s  bytes on stage s through which activations go
    z_t                 seconds of task t                         round_r   seconds of the tasks that run beside each other
    late_t, early_t     seconds that out's lag behind, and that in's are ahead of, the end of task t

Named rows: fit_p, mem_t, occ_t, compute_t, out_t, in_t, round_t. Memory is a running occupancy per stage rather than a
dense row per task, in GB, so that a few hundred packs build and solve in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pulp

from planner.lower import MAX_LATE
from planner.search.draft import Draft
from planner.search.tasks import Part, Task, TaskMaker

GB = 1e9
RELATIVE_GAP = 2e-2
MAX_NODES = 10
"""Branch and bound gives up there: a count, so that the same draft always gets the same answer."""
MAX_INTEGERS = 120
"""Up to so many packs microbatches are whole numbers; beyond, fractions that are rounded down."""


def place(draft: Draft, maker: TaskMaker) -> Draft | None:
    """The draft with what stays, goes and is recomputed chosen by an integer program."""
    if draft.num_forward == 0:
        return None
    return _Program(draft, maker).solve()


class _Program:
    def __init__(self, draft: Draft, maker: TaskMaker) -> None:
        self.draft = replace(draft, kept=(0,) * draft.num_backward, offloaded=(), held=())
        self.maker = maker
        self.packs = draft.num_forward
        self.count = len(maker.lengths(draft.backward_size))
        self.parts = [maker.part(False, a, b, draft.backward_size) for a, b in pairwise(draft.forward_cuts)]
        self.tasks = maker.bare_tasks(self.draft)
        self.room = maker.room(self.tasks, draft.backward_size)
        self.model = pulp.LpProblem("placement", pulp.LpMinimize)
        kind = "Integer" if self.packs <= MAX_INTEGERS else "Continuous"
        packs = range(self.packs)
        self.keep = [self.model.add_variable(f"keep_{p}", 0, self.count, kind) for p in packs]
        self.offload = [self.model.add_variable(f"offload_{p}", 0, self.count, kind) for p in packs]
        self.whole = [self.model.add_variable(f"all_{p}", cat="Binary") for p in packs]
        self.hold = [self.model.add_variable(f"hold_{p}", cat="Binary") for p in packs]
        stages = range(maker.shape.num_stages)
        self.buffer = [self.model.add_variable(f"buffer_{s}", 0) for s in stages]
        self.z = [self.model.add_variable(f"z_{t}", 0) for t in range(len(self.tasks))]

    def solve(self) -> Draft | None:
        self._fit()
        for stage in range(self.maker.shape.num_stages):
            own = [t for t, task in enumerate(self.tasks) if task.stage == stage]
            if own:  # a pipeline of fewer packs leaves stages idle
                self._memory(stage, own)
                self._links(own)
        self._compute()
        self._rounds()
        solver = pulp.HiGHS(msg=False, gapRel=RELATIVE_GAP, threads=1, mip_max_nodes=MAX_NODES)
        try:
            with _silenced():
                status = self.model.solve(solver)
        except KeyError:  # PuLP has no word for a search that was cut off
            return None
        if pulp.LpStatus[status] != "Optimal":
            return None
        kept = [int(_value(v) + 1e-6) for v in self.keep]
        offloaded = [
            min(self.count - k, int(_value(v) + 1e-6)) for k, v in zip(kept, self.offload, strict=True)
        ]
        held = tuple(_value(v) > 0.5 for v in self.hold)
        return replace(
            self.draft,
            kept=(*kept, 0),
            offloaded=(*offloaded, 0) if any(offloaded) else (),
            held=(*held, False) if any(held) else (),
        )

    # ---- rows

    def _add(self, row: pulp.LpConstraint, name: str) -> None:
        self.model.addConstraint(row, name)

    def _fit(self) -> None:
        """Of a pack's microbatches each is kept, offloaded or recomputed; an offloaded one goes through a buffer."""
        for p, part in enumerate(self.parts):
            saved = self.keep[p] + self.offload[p]
            self._add(saved <= self.count, f"fit_{p}")
            self._add(saved >= self.count * self.whole[p], f"all_{p}")
            if not part.kept_bytes:
                continue
            uses = self.model.add_variable(f"offloads_{p}", cat="Binary")
            self._add(self.offload[p] <= self.count * uses, f"offloads_{p}")
            stage = self.draft.forward_stage(p)
            self._add(self.buffer[stage] >= 2 * part.kept_bytes / GB * uses, f"buffer_{p}")

    def _memory(self, stage: int, own: list[int]) -> None:
        """What stays, what passes and what each task needs are within the memory of the stage."""
        held = pulp.lpSum(
            self.hold[p] * (part.weight_bytes / GB)
            for p, part in enumerate(self.parts)
            if self.draft.forward_stage(p) == stage
        )
        occupied: pulp.LpAffineExpression | pulp.LpVariable = pulp.LpAffineExpression()
        for t in own:
            task = self.tasks[t]
            change: pulp.LpAffineExpression = pulp.LpAffineExpression()
            if task.pack < self.packs:
                part = self.parts[task.pack]
                size = part.kept_bytes / GB
                change = size * self.keep[task.pack] * (1 if task.is_forward else 0)
            now = self.model.add_variable(f"occ_{t}", 0)
            self._add(now == occupied + change, f"occ_{t}")
            used = now + held + self.buffer[stage]
            if task.pack < self.packs:
                used -= self.hold[task.pack] * (part.weight_bytes / GB)
                if not task.is_forward:
                    used -= self.whole[task.pack] * ((part.working_bytes - part.kept_working_bytes) / GB)
            self._add(used <= self.room[t] / GB, f"mem_{t}")
            occupied = now
            if task.pack < self.packs and not task.is_forward:
                occupied = now - size * self.keep[task.pack]

    def _compute(self) -> None:
        """A task takes its compute, less the recompute that is spared."""
        for t, task in enumerate(self.tasks):
            total = sum(task.seconds)
            if task.is_forward or task.pack == self.packs:
                self._add(self.z[t] >= total, f"compute_{t}")
                continue
            spared = self._recompute_seconds(task, self.parts[task.pack])
            saved = self.keep[task.pack] + self.offload[task.pack]
            self._add(self.z[t] + spared * saved >= total, f"compute_{t}")

    def _recompute_seconds(self, task: Task, part: Part) -> float:
        return part.forward_seconds[0] / self.maker.scales[task.stage]

    def _links(self, own: list[int]) -> None:
        """Out's may lag behind the tasks that make them, in's may be ahead of those that need them by two buffers."""
        rates = self.maker.models.rates
        late: pulp.LpAffineExpression | pulp.LpVariable = pulp.LpAffineExpression()
        early: pulp.LpAffineExpression | pulp.LpVariable = pulp.LpAffineExpression()
        for t in own:
            task = self.tasks[t]
            out = sum(task.stash_seconds) + task.gradient_bytes / rates.d2h / self.maker.shape.num_replicas
            into: pulp.LpAffineExpression = pulp.LpAffineExpression(
                constant=task.weight_seconds + sum(task.loads)
            )
            leaving: pulp.LpAffineExpression = pulp.LpAffineExpression(constant=out)
            ahead = task.weight_seconds
            if task.pack < self.packs:
                part = self.parts[task.pack]
                p, stash = task.pack, max(task.loads, default=0.0)
                if task.is_forward:
                    leaving += self.offload[p] * (part.kept_bytes / rates.d2h)
                else:
                    into += self.offload[p] * (part.kept_bytes / rates.h2d)
                    into -= (self.keep[p] + self.offload[p]) * stash
                    into -= self.hold[p] * task.weight_seconds
                    ahead += 2 * part.kept_bytes / rates.h2d
            # no more may be late than has a place: two outputs, and the gradients of the last tasks
            behind = (MAX_LATE * task.gradient_bytes + 2 * task.output_bytes) / rates.d2h
            if task.pack < self.packs and task.is_forward:
                behind += 2 * self.parts[task.pack].kept_bytes / rates.d2h
            now = self.model.add_variable(f"late_{t}", 0, behind)
            self._add(now >= late + leaving - self.z[t], f"out_{t}")
            late = now
            before = self.model.add_variable(f"early_{t}", 0, ahead)
            self._add(before + into <= early + self.z[t], f"in_{t}")
            early = before
        # what is late at the end of the iteration lengthens it
        self._add(self.z[own[-1]] >= late, f"late_end_{own[-1]}")

    def _rounds(self) -> None:
        """Tasks of different stages run beside each other, a round at a time; the sum of the rounds is minimised."""
        stages = self.maker.shape.num_stages
        starts = [*range(0, self.packs, stages), *range(self.packs, len(self.tasks), stages)]
        rounds = []
        for r, (first, end) in enumerate(pairwise([*starts, len(self.tasks)])):
            longest = self.model.add_variable(f"round_{r}", 0)
            rounds.append(longest)
            for t in range(first, end):
                self._add(longest >= self.z[t], f"round_{t}")
        self.model.setObjective(pulp.lpSum(rounds))


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """The solver's library greets on standard output, below Python; that stream belongs to results."""
    sys.stdout.flush()
    saved = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(nowhere)


def _value(variable: pulp.LpVariable) -> float:
    return float(variable.varValue or 0.0)
