"""The sketch against the simulator, on random drafts of every kind."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import median

import pytest

from planner.contract.errors import InfeasibleError, VerifyError
from planner.contract.verify import check_program
from planner.search.draft import Draft, configure
from planner.search.outcome import check_fits, evaluate
from planner.search.pack_models import PackModels, Points
from planner.search.problem import Problem, Shape
from planner.search.sketch import INFEASIBLE, Sketcher
from tests.planner.chains import MB, random_chain, server, updated_anywhere


def random_draft(random: Random, shape: Shape, num_layers: int) -> Draft:
    def cuts(end: int) -> tuple[int, ...]:
        inner = random.sample(range(1, end), random.randrange(0, end)) if end > 1 else []
        return (0, *sorted(inner), end)

    backward = cuts(num_layers)
    start = backward[-2]
    sizes = [u for u in (1, 2, 4) if u <= shape.samples]
    f, b = random.choice(sizes), random.choice(sizes)
    if start and random.random() < 0.5:
        count = -(-shape.samples // b)
        kept = tuple(random.randrange(0, count + 1) for _ in backward[:-2])
        offloaded = tuple(random.randrange(0, count - k + 1) for k in kept)
        resident = tuple(random.random() < 0.4 for _ in backward[1:]) if shape.num_replicas == 1 else ()
        return Draft(
            shape,
            b,
            b,
            backward[:-1],
            backward,
            reflected=True,
            kept=(*kept, 0),
            offloaded=(*offloaded, 0),
            resident=resident,
        )
    return Draft(shape, f, b, cuts(start) if start else (0,), backward)


@pytest.mark.parametrize(
    ("replicas", "clip"), [(1, False), (2, False), (4, False), (1, True), (2, True), (4, True)]
)
def test_sketch_is_close_to_the_simulation_of_random_drafts(replicas: int, clip: bool) -> None:
    differences, kinds, residents = [], set(), 0
    for seed in range(60):
        random = Random(seed)
        profile = updated_anywhere(random_chain(random, 7))
        problem = Problem(profile, server(4, 60 * MB), 8, 4, clip)
        shape = problem.shape(replicas)
        draft = random_draft(random, shape, 7)
        if clip:
            draft = replace(draft, resident=())
        sketched = Sketcher(PackModels(problem, shape, Points(problem))).seconds(draft)
        try:
            outcome = evaluate(problem, configure(problem, draft))
            check_program(outcome.graph)
            check_fits(problem, outcome)
        except (InfeasibleError, VerifyError):
            continue
        kinds.add((draft.reflected, bool(sum(draft.kept)), bool(sum(draft.offloaded))))
        residents += any(draft.resident)
        if sketched < INFEASIBLE:
            differences.append(abs(sketched / outcome.seconds - 1))
    assert len(differences) > 20
    assert len(kinds) >= 4
    assert replicas > 1 or clip or residents > 10
    assert median(differences) < (0.02 if clip else 0.01)
    assert sorted(differences)[int(0.9 * len(differences))] < 0.1


def test_more_is_kept_where_there_is_more_memory() -> None:
    profile = random_chain(Random(3), 8)
    found = []
    for memory in (30, 60, 120):
        problem = Problem(profile, server(1, memory * MB), 8, 1)
        sketcher = Sketcher(PackModels(problem, problem.shape(1), Points(problem)))
        draft = Draft(problem.shape(1), 2, 2, (0, 2, 4, 6), (0, 2, 4, 6, 8), reflected=True)
        found.append(sum(sketcher.filled(draft).kept))
    assert found[0] < found[1] <= found[2] == 12
