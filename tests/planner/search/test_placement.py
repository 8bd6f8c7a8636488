"""The integer program: within memory, never better by its own word than by the simulator's, silent."""

from __future__ import annotations

from random import Random

import pytest

from planner.search.draft import Draft, configure
from planner.search.outcome import check_fits, evaluate
from planner.search.pack_models import PackModels, Points
from planner.search.placement import place
from planner.search.problem import Problem
from planner.search.tasks import TaskMaker
from tests.planner.chains import MB, random_chain, server


def draft_of(memory_bytes: int, seed: int = 4) -> tuple[Problem, TaskMaker, Draft]:
    problem = Problem(random_chain(Random(seed), 8), server(1, memory_bytes), 8, 1)
    shape = problem.shape(1)
    maker = TaskMaker(PackModels(problem, shape, Points(problem)))
    return problem, maker, Draft(shape, 2, 2, (0, 2, 4, 6), (0, 2, 4, 6, 8), reflected=True)


def test_with_ample_memory_everything_is_kept_and_nothing_recomputes() -> None:
    problem, maker, draft = draft_of(300 * MB)
    placed = place(draft, maker)
    assert placed is not None
    assert [k + o for k, o in zip(placed.kept, placed.offloaded or (0,) * 4, strict=True)] == [4, 4, 4, 0]
    outcome = evaluate(problem, configure(problem, placed))
    check_fits(problem, outcome)
    assert outcome.seconds < evaluate(problem, configure(problem, recomputed(draft))).seconds


@pytest.mark.parametrize("memory", [40, 50, 70])
def test_what_is_placed_fits_and_helps(memory: int) -> None:
    problem, maker, draft = draft_of(memory * MB)
    placed = place(draft, maker)
    assert placed is not None
    outcome = evaluate(problem, configure(problem, placed))
    check_fits(problem, outcome)
    assert outcome.seconds <= evaluate(problem, configure(problem, recomputed(draft))).seconds * 1.001


def recomputed(draft: Draft) -> Draft:
    return Draft(draft.shape, 2, 2, draft.forward_cuts, draft.backward_cuts, True, (0,) * draft.num_backward)


def test_without_room_there_is_no_answer() -> None:
    _, maker, draft = draft_of(15 * MB)
    assert place(draft, maker) is None


def test_the_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    _, maker, draft = draft_of(60 * MB)
    place(draft, maker)
    assert capfd.readouterr().out == ""
