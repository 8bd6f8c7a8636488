"""From what the ranks recorded, or plain training measured, to one Trace."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from executor.iterations import TRAINING, sequence
from executor.options import RunOptions
from executor.recorder import RankRecord
from executor.reference import PlainResult
from planner.contract.actions import Send, SwapIn
from planner.contract.evaluation import needed_to_evaluate
from planner.contract.precedence import Graph
from planner.contract.schedule import Schedule
from planner.contract.store import schedule_hash
from planner.contract.trace import DeviceSummary, Evaluation, MemorySample, Span, Trace

WARM_UP = 1
"""Iterations at the start that count in no time."""


def merge(
    records: Sequence[RankRecord],
    schedule: Schedule,
    graph: Graph,
    options: RunOptions,
    losses: Sequence[float],
    evaluations: Sequence[Evaluation] = (),
) -> Trace:
    """One trace, its times from the start of the first kept span on.

    iteration_seconds are of those that train, from the end of what went before, the warm-up left out. Per iteration a
    device swaps what it swapped in all divided by the iterations: each does the same.
    """
    order = sequence(options)
    ends = [max(record.ends.get(k, 0.0) for record in records) for k in range(len(order))]
    trained = [k for k, what in enumerate(order) if what == TRAINING]
    step_of = {k: step for step, k in enumerate(trained)}
    origin = min((start for record in records for _, _, start, _, _ in record.spans), default=0.0)
    spans = []
    for record in records:
        for node, iteration, start, end, overrun in record.spans:
            action = graph.actions[node]
            lane = graph.lanes[graph.lane_of[node]]
            nbytes = record.moved[node] if node in record.moved else graph.rules.moved_bytes(action)
            spans.append(
                Span(
                    str(action),
                    lane.device,
                    lane.stream,
                    start - origin,
                    end - origin,
                    nbytes,
                    step_of[iteration],
                    overrun,
                )
            )
    memory = [
        MemorySample(record.rank, seconds - origin, nbytes)
        for record in records
        for seconds, nbytes in record.memory
        if seconds >= origin
    ]
    overruns = [sum(record.overruns.get(k, 0) for record in records) for k in trained]
    return Trace(
        origin="measured",
        model=schedule.profile.model.name,
        model_hash=schedule.profile.model_hash,
        schedule_hash=schedule_hash(schedule),
        devices=tuple(
            _summary(
                record, len(trained), _moved_by_evaluations(record.rank, graph, len(order) - len(trained))
            )
            for record in records
        ),
        iteration_seconds=tuple(ends[k] - ends[k - 1] for k in trained[WARM_UP:]),
        spans=tuple(sorted(spans, key=lambda s: (s.start_seconds, s.end_seconds, s.device, s.stream))),
        memory=tuple(sorted(memory, key=lambda s: s.seconds)),
        losses=tuple(losses),
        evaluations=tuple(evaluations),
        samples_per_iteration=schedule.configuration.samples,
        notes=_notes(options, losses)
        | {
            "paced": str(options.paced and options.device == "virtual").lower(),
            # the first iterations fill caches and slots: what overruns there tells nothing of the plan
            "overruns": sum(overruns[WARM_UP:]),
            "overruns_per_iteration": sum(overruns[WARM_UP:]) / max(len(trained) - WARM_UP, 1),
            "overruns_of_warm_up": sum(overruns[:WARM_UP]),
        },
    )


def _summary(record: RankRecord, steps: int, evaluations: tuple[int, int]) -> DeviceSummary:
    swapped_in, sent = evaluations
    return DeviceSummary(
        record.peak_bytes,
        (record.swapped_in_bytes - swapped_in) // steps,
        record.swapped_out_bytes // steps,
        (record.sent_bytes - sent) // steps,
        record.reserved_bytes,
    )


def _moved_by_evaluations(rank: int, graph: Graph, count: int) -> tuple[int, int]:
    """Bytes that so many iterations of evaluation bring to a device and send from it."""
    if not count:
        return 0, 0
    moved = {SwapIn: 0, Send: 0}
    for node in needed_to_evaluate(graph).nodes:
        action = graph.actions[node]
        if isinstance(action, SwapIn | Send) and graph.lanes[graph.lane_of[node]].device == rank:
            moved[type(action)] += count * graph.rules.moved_bytes(action)
    return moved[SwapIn], moved[Send]


def plain_trace(
    result: PlainResult, model: str, model_hash: str, minibatch: int, options: RunOptions
) -> Trace:
    """The trace of plain training: one device, no spans, nothing swapped."""
    return Trace(
        origin="measured",
        model=model,
        model_hash=model_hash,
        schedule_hash="",
        devices=(DeviceSummary(result.peak_bytes, 0, 0),),
        iteration_seconds=result.seconds[WARM_UP:],
        losses=result.losses,
        samples_per_iteration=minibatch,
        notes=_notes(options, result.losses) | {"plain": "true"},
    )


def _notes(options: RunOptions, losses: Sequence[float]) -> dict[str, str | int | float]:
    """What it takes to run the same again, and how the loss went."""
    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "device": options.device,
        "optimizer": options.optimizer,
        "seed": options.seed,
        "steps": options.steps,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "plain": "false",
    }
