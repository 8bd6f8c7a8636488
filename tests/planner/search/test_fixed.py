"""Plans that are given, and what is wrong with some of them."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from planner.contract.errors import FormatError, InfeasibleError
from planner.contract.fixed import Fixed
from planner.contract.verify import verify
from planner.search import plan, plan_fixed
from tests.planner.chains import MB, random_chain, server

GOOD = Fixed(forward_microbatch=2, backward_microbatch=4, forward_packs=(2, 1), backward_packs=(1, 2, 3))
replace = msgspec.structs.replace


def test_a_given_plan_is_lowered_verified_and_bounded_like_any_other() -> None:
    profile, hardware = random_chain(Random(1), 6), server(2)
    result = plan_fixed(profile, hardware, GOOD, minibatch=8)
    assert result.schedule is not None
    verify(result.schedule, profile, hardware)
    assert [pack.first for pack in result.schedule.configuration.backward_packs] == [0, 1, 3]
    best = plan(profile, hardware, minibatch=8)
    assert best.lower_bound_seconds <= best.seconds <= result.seconds
    # and what was found can be given again
    assert best.schedule is not None
    again = plan_fixed(profile, hardware, best.schedule.configuration, minibatch=8)
    assert again.seconds == best.seconds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"replicas": 3}, "3 do not divide 2 devices"),
        ({"forward_microbatch": 9}, "9 samples of a minibatch of 8"),
        ({"backward_packs": (1, 2, 2)}, "cover 5 of 6 layers"),
        (
            {"forward_packs": (2, 2)},
            "cover 4 layers; the last backward pack runs its own forward, so 3 are left",
        ),
        ({"forward_packs": (3, 0)}, "at least one layer"),
        ({"reflected": True}, "the same packs forward and backward"),
        ({"kept": (1, 1, 0)}, "needs reflected packs"),
        ({"resident": (False, True)}, "2 choices for 3 backward packs"),
        ({"resident": (True, False, False)}, "needs reflected packs"),
        ({"resident": (False, False, True)}, r"resident\[2\]: the profile has no device_seconds"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        plan_fixed(random_chain(Random(1), 6), server(2), replace(GOOD, **change), minibatch=8)


def test_a_plan_that_does_not_fit_says_what_and_by_how_much() -> None:
    with pytest.raises(InfeasibleError, match=r"needs \d+ bytes, \d+ over the limit of 9000000"):
        plan_fixed(random_chain(Random(1), 6), server(2, 9 * MB), GOOD, minibatch=8)


def test_a_pipeline_that_wraps_has_places_enough_for_many_microbatches() -> None:
    """Where four devices had two places each for 64 microbatches, the first could not end its forward: a deadlock."""
    profile, hardware = random_chain(Random(2), 9), server(4, 25 * MB)
    fixed = Fixed(1, 1, (1,) * 8, (1,) * 9)
    result = plan_fixed(profile, hardware, fixed, minibatch=64)
    assert result.schedule is not None
    verify(result.schedule, profile, hardware)
