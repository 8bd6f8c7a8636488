"""What an iteration of evaluation needs, in programs small enough to see it."""

from __future__ import annotations

import pytest

from planner.contract.evaluation import needed_to_evaluate
from planner.contract.precedence import Graph
from planner.contract.rules import Rules
from planner.contract.schedule import Configuration
from planner.lower import lower
from tests.planner.tiny import (
    ONE,
    ONE_PROGRAM,
    PROFILE,
    THREE,
    THREE_PROGRAM,
    TWO,
    TWO_PROGRAM,
    Program,
    graph_of,
)

NEEDED = {
    "one device": (
        ONE,
        ONE_PROGRAM,
        "F0.0 F0.1 B1.0 B1.1 in:WF0 in:I0.0 in:I0.1 in:WB1 in:X1.0 in:X1.1 "
        "free:WF0 free:I0.0 free:I0.1 free:WB1 free:X1.0 free:X1.1 free:Y0.0 free:Y0.1",
    ),
    "two devices": (
        TWO,
        TWO_PROGRAM,
        "F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 in:WF0 in:WF1 in:WB1 in:I0.0 in:I0.1 in:X1.0 in:X1.1 "
        "send:Y0.0>1 send:Y0.1>1 recv:Y0.0>1 recv:Y0.1>1 send:Y1.0>0 send:Y1.1>0 recv:Y1.0>0 recv:Y1.1>0 "
        "free:WF0 free:WF1 free:WB1 free:I0.0 free:I0.1 free:X1.0 free:X1.1 free:Y0.0 free:Y0.1 free:Y0.0>1 "
        "free:Y0.1>1 free:Y1.0 free:Y1.1 free:Y1.0>0 free:Y1.1>0",
    ),
    "a stash that only training reads": (
        THREE,
        THREE_PROGRAM,
        "F0.0 F0.1 B2.0 B2.1 in:WF0 in:I0.0 in:I0.1 in:WB2 in:X2.0 in:X2.1 "
        "free:WF0 free:I0.0 free:I0.1 free:WB2 free:X2.0 free:X2.1 free:Y0.0 free:Y0.1",
    ),
}


@pytest.mark.parametrize("name", NEEDED)
def test_the_loss_needs_the_forward_and_what_it_reads(name: str) -> None:
    configuration, program, expected = NEEDED[name]
    check(program, configuration, set(expected.split()))


def check(program: Program, configuration: Configuration, expected: set[str]) -> None:
    graph = graph_of(program, configuration)
    assert {str(graph.actions[node]) for node in needed_to_evaluate(graph).nodes} == expected


@pytest.mark.parametrize(("configuration", "devices"), [(ONE, 1), (TWO, 2), (THREE, 1)])
def test_what_is_made_is_freed_and_what_is_freed_was_made(configuration: Configuration, devices: int) -> None:
    rules = Rules(PROFILE, configuration)
    graph = Graph(lower(rules, [10**6] * devices), rules)
    needed = needed_to_evaluate(graph)
    made = {v for n in needed.nodes for v in graph.effects[n].makes if v in needed.values}
    freed = {v for n in needed.nodes for v in graph.effects[n].frees}
    assert made == freed == needed.values
