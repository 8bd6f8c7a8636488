"""Where a profile was wrong, a measured trace mends it: the prediction of the same plan, and of others."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from planner.calibrate import calibrate
from planner.contract.errors import FormatError
from planner.contract.hardware import Hardware
from planner.contract.profile import Profile
from planner.contract.schedule import Schedule
from planner.contract.trace import Trace
from planner.search import plan
from planner.simulate import simulate
from tests.planner.chains import random_chain, server

MB = 10**6
replace = msgspec.structs.replace


def slowed(profile: Profile, forward: list[float], backward: list[float], update: float) -> Profile:
    """The truth: every layer slower or faster than it was profiled."""
    return replace(
        profile,
        layers=tuple(
            replace(
                layer,
                forward=tuple(replace(c, seconds=c.seconds * f) for c in layer.forward),
                backward=tuple(replace(c, seconds=c.seconds * b) for c in layer.backward),
                update=replace(layer.update, host_seconds=layer.update.host_seconds * update),
            )
            for layer, f, b in zip(profile.layers, forward, backward, strict=True)
        ),
    )


def with_links(hardware: Hardware, factor: float) -> Hardware:
    links = tuple(
        replace(
            link,
            h2d_bytes_per_second=link.h2d_bytes_per_second * factor,
            d2h_bytes_per_second=link.d2h_bytes_per_second * factor,
        )
        for link in hardware.host_links
    )
    return replace(hardware, host_links=links)


def measured(schedule: Schedule, truth: Profile, hardware: Hardware) -> Trace:
    return replace(simulate(schedule, truth, hardware), origin="measured")


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_the_next_prediction_is_nearer_to_the_truth(seed: int, devices: int) -> None:
    random = Random(seed)
    profile, machine = random_chain(random, 8), server(devices, 60 * MB)
    # neighbours are wrong by about the same, as one kernel's or one clock's fault is
    base = (0.6, 1.4, 1.9)[seed]
    forward = [base * random.uniform(0.95, 1.05) for _ in profile.layers]
    backward = [base * random.uniform(0.95, 1.05) for _ in profile.layers]
    truth, real = slowed(profile, forward, backward, 1.4), with_links(machine, 0.8)
    schedule = plan(profile, machine, minibatch=8).schedule
    assert schedule is not None
    found = calibrate(profile, schedule, measured(schedule, truth, real))
    before = abs(found.planned_seconds / found.measured_seconds - 1)
    after = abs(found.corrected_seconds / found.measured_seconds - 1)
    assert before > 0.1
    assert after < 0.02
    # another plan, for other samples
    other = plan(found.profile, found.hardware, minibatch=12).schedule
    assert other is not None
    predicted = simulate(other, found.profile, found.hardware).iteration_seconds[0]
    real_seconds = simulate(other, truth, real).iteration_seconds[0]
    assert predicted == pytest.approx(real_seconds, rel=0.05)
    link = found.hardware.host_links[0]
    assert link.h2d_bytes_per_second == pytest.approx(real.host_links[0].h2d_bytes_per_second, rel=0.02)


def test_one_slow_iteration_does_not_count() -> None:
    profile, machine = random_chain(Random(0), 6), server(1, 60 * MB)
    schedule = plan(profile, machine, minibatch=8).schedule
    assert schedule is not None
    once = measured(schedule, profile, machine)
    spans = [
        replace(
            span, iteration=k, end_seconds=span.start_seconds + (span.end_seconds - span.start_seconds) * slow
        )
        for k, slow in enumerate((1.0, 9.0, 1.0))
        for span in once.spans
    ]
    found = calibrate(profile, schedule, replace(once, spans=tuple(spans)))
    assert all(factor.forward == pytest.approx(1.0) for factor in found.factors)
    assert found.corrected_seconds == pytest.approx(found.planned_seconds)


def test_what_does_not_belong_together_is_refused() -> None:
    profile, machine = random_chain(Random(0), 6), server(1, 60 * MB)
    schedule = plan(profile, machine, minibatch=8).schedule
    other = plan(profile, machine, minibatch=4).schedule
    assert schedule is not None
    assert other is not None
    trace = measured(schedule, profile, machine)
    with pytest.raises(FormatError, match="use the schedule that was run"):
        calibrate(profile, other, trace)
    with pytest.raises(FormatError, match="the trace is simulated"):
        calibrate(profile, schedule, replace(trace, origin="simulated"))
    with pytest.raises(FormatError, match="no actions"):
        calibrate(profile, schedule, replace(trace, spans=()))
    with pytest.raises(FormatError, match="planned for model"):
        calibrate(random_chain(Random(1), 6), schedule, trace)
