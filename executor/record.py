"""Merge what the ranks recorded into one measured Trace."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from executor.options import RunOptions
from executor.recorder import RankRecord
from planner.contract.precedence import Graph
from planner.contract.schedule import Schedule
from planner.contract.store import schedule_hash
from planner.contract.trace import DeviceSummary, MemorySample, Span, Trace

MEMORY_SAMPLES = 20_000
"""At most so many per device, the last ones."""


def merge(
    records: Sequence[RankRecord], schedule: Schedule, graph: Graph, options: RunOptions, losses: Sequence[float]
) -> Trace:
    """One trace, its times from the start of the first kept span on.

    iteration_seconds are the differences of the iterations' ends: the first iteration, which fills caches and
    slots, is the warm-up and counts in none of them.
    """
    steps = options.steps
    ends = [max(record.ends.get(k, 0.0) for record in records) for k in range(steps)]
    origin = min((start for record in records for _, _, start, _, _ in record.spans), default=0.0)
    spans = []
    for record in records:
        for node, iteration, start, end, overrun in record.spans:
            action = graph.actions[node]
            lane = graph.lanes[graph.lane_of[node]]
            nbytes = graph.rules.moved_bytes(action)
            spans.append(
                Span(str(action), lane.device, lane.stream, start - origin, end - origin, nbytes, iteration, overrun)
            )
    memory = [
        MemorySample(record.rank, seconds - origin, nbytes)
        for record in records
        for seconds, nbytes in record.memory[-MEMORY_SAMPLES:]
        if seconds >= origin
    ]
    overruns = sum(sum(record.overruns.values()) for record in records)
    return Trace(
        origin="measured",
        model=schedule.profile.model.name,
        model_hash=schedule.profile.model_hash,
        schedule_hash=schedule_hash(schedule),
        devices=tuple(
            DeviceSummary(
                record.peak_bytes,
                record.swapped_in_bytes // steps,
                record.swapped_out_bytes // steps,
                record.sent_bytes // steps,
                record.reserved_bytes,
            )
            for record in records
        ),
        iteration_seconds=tuple(ends[k] - ends[k - 1] for k in range(1, steps)),
        spans=tuple(sorted(spans, key=lambda s: (s.start_seconds, s.end_seconds, s.device, s.stream))),
        memory=tuple(sorted(memory, key=lambda s: s.seconds)),
        losses=tuple(losses),
        samples_per_iteration=schedule.configuration.minibatch,
        notes={
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "device": options.device,
            "paced": str(options.paced and options.device == "virtual").lower(),
            "seed": options.seed,
            "steps": steps,
            "overruns": overruns,
        },
    )
