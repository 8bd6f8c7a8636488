"""Plans for several servers: what the network costs, the same in search, simulator and bound; what is refused."""

from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec
import pytest

from planner.cli import main
from planner.contract import store
from planner.contract.errors import FormatError, HarmonyError, VerifyError
from planner.contract.hardware import Hardware
from planner.contract.profile import Profile
from planner.contract.schedule import Schedule, check
from planner.contract.verify import verify
from planner.search import plan
from planner.servers import over_servers, samples_of_each
from planner.simulate import simulate
from tests.planner.chains import MB, random_chain, server

replace = msgspec.structs.replace
FAST, SLOW = 1e12, 5e6
"""Networks that cost nothing and almost everything, in bytes per second."""


def profile() -> Profile:
    return random_chain(Random(1), 4)


def hardware(network: float | None = None, num_devices: int = 2) -> Hardware:
    return replace(server(num_devices, 25 * MB), network_bytes_per_second=network)


def planned(network: float, num_servers: int, minibatch: int, clip: bool = False) -> Schedule:
    schedule = plan(
        profile(), hardware(network), minibatch=minibatch, clip=clip, num_servers=num_servers
    ).schedule
    assert schedule is not None
    return schedule


# ---- the network's time


@pytest.mark.parametrize(("num_servers", "share"), [(2, 1.0), (3, 4 / 3), (4, 1.5)])
def test_an_update_waits_for_a_ring_of_its_gradients(num_servers: int, share: float) -> None:
    found = over_servers(profile(), hardware(1e6, num_devices=1), num_servers, 1, agree=False)
    for layer, before in zip(found.layers, profile().layers, strict=True):
        exchange = share * layer.gradient_bytes / 1e6
        assert layer.update.host_seconds == pytest.approx(before.update.host_seconds + exchange)
        assert layer.update.device_seconds is None


def test_devices_that_update_at_once_share_the_network_and_bfloat16_travels_wider() -> None:
    def exchange(dtype: str, num_devices: int, update_workers: int, agree: bool = False) -> float:
        given = hardware(1e6, num_devices)
        given = replace(given, host=replace(given.host, update_workers=update_workers))
        before = replace(profile(), dtype=dtype)
        found = over_servers(before, given, 2, num_devices, agree=agree)
        update, old = found.layers[0].update, before.layers[0].update
        if agree:
            assert update.host_seconds == old.host_seconds, "the exchange comes before the norm, once"
            assert update.norm_seconds is not None
            norm = old.host_seconds if old.norm_seconds is None else old.norm_seconds
            return update.norm_seconds - norm
        return update.host_seconds - old.host_seconds

    alone = exchange("float32", 1, 1)
    assert alone > 0
    assert exchange("float32", 2, 2) == pytest.approx(2 * alone)
    assert exchange("float32", 2, 1) == pytest.approx(alone)
    assert exchange("bfloat16", 1, 1) == pytest.approx(2 * alone)
    assert exchange("float32", 2, 2, agree=True) == pytest.approx(alone)


def test_a_plan_for_two_servers_is_the_plan_of_half_the_minibatch_where_the_network_costs_nothing() -> None:
    alone = plan(profile(), hardware(), minibatch=4, updates="host").schedule
    assert alone is not None
    assert planned(FAST, 2, 8).predicted.iteration_seconds == pytest.approx(
        alone.predicted.iteration_seconds, rel=1e-3
    )


@pytest.mark.parametrize("clip", [False, True])
def test_the_simulator_and_the_bound_know_the_network(clip: bool) -> None:
    """At 5 MB/s adding the gradients is most of an iteration."""
    fast, slow = planned(FAST, 2, 8, clip), planned(SLOW, 2, 8, clip)
    at_least = sum(layer.gradient_bytes for layer in profile().layers) / SLOW
    for schedule in (fast, slow):
        verify(schedule, profile(), schedule.hardware)
        trace = simulate(schedule, profile(), schedule.hardware)
        predicted = schedule.predicted
        assert trace.iteration_seconds[-1] == pytest.approx(predicted.iteration_seconds)
        assert predicted.lower_bound_seconds <= predicted.iteration_seconds
        assert trace.samples_per_iteration == 8
        assert schedule.configuration.minibatch == 4
    assert slow.predicted.lower_bound_seconds > at_least * 0.99
    assert fast.predicted.iteration_seconds < at_least


# ---- what is refused


def test_statistics_of_batches_are_refused_by_plan_and_verify() -> None:
    def keeping(before: Profile) -> Profile:
        first = replace(before.layers[0], batch_coupled=True, buffer_bytes=64)
        return replace(before, layers=(first, *before.layers[1:]))

    with pytest.raises(HarmonyError, match=r"--nodes 2: layer 0 .* keeps statistics of its batches"):
        plan(keeping(profile()), hardware(FAST), minibatch=8, num_servers=2)
    given = keeping(profile())
    alone = plan(given, hardware(FAST), minibatch=4).schedule
    assert alone is not None
    schedule = replace(alone, configuration=replace(alone.configuration, num_servers=2))
    with pytest.raises(VerifyError, match="keeps statistics of its batches, and 2 servers see different"):
        verify(schedule, given, schedule.hardware)


def test_a_device_update_is_refused_in_a_file() -> None:
    schedule = planned(FAST, 2, 8)
    first, *others = schedule.configuration.backward_packs
    configuration = replace(
        schedule.configuration, backward_packs=(replace(first, update="device", weights="resident"), *others)
    )
    with pytest.raises(FormatError, match="2 servers add their gradients"):
        check(replace(schedule, configuration=configuration))


def test_a_minibatch_is_a_multiple_of_the_servers() -> None:
    assert samples_of_each(12, 3) == 4
    with pytest.raises(HarmonyError, match="--minibatch 8: does not divide by 3 servers"):
        samples_of_each(8, 3)


NODES = ("plan", "profile", "hardware", "--minibatch", "8", "--nodes", "2")
REFUSED = {
    "no network": (NODES, "hardware says no network_bytes_per_second between them; say --network RATE"),
    "a network of nothing": ((*NODES, "--network", "0"), "'0': a rate is above 0"),
    "a network that is none": ((*NODES, "--network", "fast"), "'fast'"),
    "servers that do not divide": ((*NODES[:-1], "3", "--network", "1GB/s"), "does not divide by 3 servers"),
    "a network of one server": ((*NODES[:-2], "--network", "1GB/s"), "one server needs none"),
    "baselines": ((*NODES, "--network", "1GB/s", "--baselines"), "--baselines: of one server"),
    "no server": ((*NODES[:-1], "0"), "--nodes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_command_refuses(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    store.save(profile(), tmp_path / "profile")
    store.save(hardware(), tmp_path / "hardware")
    arguments, message = REFUSED[case]
    assert main(list(arguments)) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("harmony-planner: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


def test_the_command_plans_shows_and_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    store.save(profile(), tmp_path / "profile")
    store.save(hardware(), tmp_path / "hardware")
    assert main([*NODES, "--network", "1GB/s", "--explain", "-o", "out"]) == 0
    assert "8 samples, 4 on each of 2 servers" in capfd.readouterr().out
    assert main(["verify", "out", "profile", "hardware"]) == 0
    assert main(["simulate", "out", "profile", "hardware", "-o", "trace"]) == 0
    assert main(["report", "out", "--profile", "profile", "-o", "page.html"]) == 0
    assert "2 servers" in (tmp_path / "page.html").read_text()
