"""Replay a program in simulated time: schedule x profile x hardware -> Trace.

With a fixed order per stream the times are one topological pass over recurrences: an action starts when the
one before it in its stream and all it waits for are over. Iterations follow each other without a barrier, so
the iteration time is the period of the steady state. A send and its recv start together. Links that are shared
fairly, and updates for which there are too few workers, depend on what else runs: fluid.py simulates those by events.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from planner.contract.actions import (
    Action,
    Agree,
    Backward,
    Forward,
    Lanes,
    Receive,
    Reduce,
    Send,
    SwapIn,
    SwapOut,
    Update,
)
from planner.contract.hardware import Hardware, peer_rate
from planner.contract.memory import peaks
from planner.contract.precedence import Graph
from planner.contract.profile import Profile, model_hash
from planner.contract.rules import Rules
from planner.contract.schedule import Schedule, parse_program
from planner.contract.store import schedule_hash
from planner.contract.trace import DeviceSummary, MemorySample, Span, Trace
from planner.servers import over_servers

MAX_ITERATIONS = 12
SETTLED = 1e-9


class Work(NamedTuple):
    """Seconds of its own, then seconds at the full speed of a resource that it shares."""

    own_seconds: float
    shared_seconds: float
    resource: str | None


class Timing:
    """Seconds of every action of one configuration on one hardware."""

    def __init__(self, rules: Rules, hardware: Hardware) -> None:
        self.rules = rules
        self.hardware = hardware
        num_devices = rules.configuration.num_devices
        self.scales = [device.compute_scale for device in hardware.devices]
        self.h2d_rates, self.d2h_rates, self.latencies = [], [], []
        self.shared: dict[str, float] = {}
        """Resources that several use at a time, and how many of them have the full speed."""
        self._links: list[int | None] = []  # of each device, where it is shared fairly
        for device in hardware.devices[:num_devices]:
            link = hardware.host_links[device.host_link]
            users = sum(d.host_link == device.host_link for d in hardware.devices[:num_devices])
            is_fair = link.sharing == "fair" and users > 1
            share = users if link.sharing == "static" else 1
            self.h2d_rates.append(link.h2d_bytes_per_second / share)
            self.d2h_rates.append(link.d2h_bytes_per_second / share)
            self.latencies.append(link.latency_seconds)
            self._links.append(device.host_link if is_fair else None)
            if is_fair:
                self.shared |= {f"h2d {device.host_link}": 1.0, f"d2h {device.host_link}": 1.0}
        hosts = {rules.place(Update(b)) for b in range(len(rules.backward_packs)) if rules.is_trained(b)}
        queues = sum(stream == "host" for _, stream in hosts)
        self._has_workers_for_all = queues <= hardware.host.update_workers
        if not self._has_workers_for_all:
            self.shared["update workers"] = float(hardware.host.update_workers)

    def seconds(self, action: Action) -> float:
        """How long an action takes once it runs. A recv takes no time of its own beyond its send."""
        match action:
            case Forward() | Backward():
                return self.compute_seconds(action)
            case SwapIn(value):
                device = self.rules.device_of(value)
                return self.latencies[device] + self.rules.moved_bytes(action) / self.h2d_rates[device]
            case SwapOut(value):
                device = self.rules.device_of(value)
                return self.latencies[device] + self.rules.moved_bytes(action) / self.d2h_rates[device]
            case Send(value):
                source, _ = self.rules.place(action)
                return self._peer_seconds(source, value.device, self.rules.moved_bytes(action))
            case Reduce(value):
                owner = self.rules.backward_device(value.pack, self.rules.owner(value.pack))
                device = self.rules.device_of(value)
                return (
                    0.0
                    if device == owner
                    else self._peer_seconds(device, owner, self.rules.moved_bytes(action))
                )
            case Update(pack):
                return self.update_seconds(pack)
            case Agree():
                return self.rules.costs.norm_seconds()
            case _:
                return 0.0

    def work(self, action: Action) -> Work:
        """How long an action takes, apart from others and at the full speed of what it shares with them."""
        seconds = self.seconds(action)
        match action:
            case SwapIn(value) | SwapOut(value):
                device = self.rules.device_of(value)
                link = self._links[device]
                if link is not None:
                    name = f"{'h2d' if isinstance(action, SwapIn) else 'd2h'} {link}"
                    return Work(self.latencies[device], seconds - self.latencies[device], name)
            case Update(pack):
                if not self._has_workers_for_all and self.rules.backward_packs[pack].update == "host":
                    return Work(0.0, seconds, "update workers")
        return Work(seconds, 0.0, None)

    def compute_seconds(self, action: Forward | Backward) -> float:
        rules, costs = self.rules, self.rules.costs
        device, _ = rules.place(action)
        if isinstance(action, Forward):
            first, end = rules.forward_samples[action.microbatch]
            pack = rules.forward_packs[action.pack]
            return costs.forward_seconds(pack.first, pack.last, end - first) / self.scales[device]
        first, end = rules.backward_samples[action.microbatch]
        layers = rules.backward_packs[action.pack]
        seconds = costs.backward_seconds(layers.first, layers.last, end - first)
        if rules.activations(action.pack, action.microbatch) == "recompute":
            seconds += costs.forward_seconds(layers.first, layers.last, end - first)
        return seconds / self.scales[device]

    def update_seconds(self, pack: int) -> float:
        layers = self.rules.backward_packs[pack]
        if layers.update == "host":
            return self.rules.costs.host_update_seconds(layers.first, layers.last)
        device, _ = self.rules.place(Update(pack))
        seconds = self.rules.costs.device_update_seconds(layers.first, layers.last)
        if seconds is None:
            raise ValueError(f"backward pack {pack}: its update on the device was not measured")
        return seconds / self.scales[device]

    def _peer_seconds(self, source: int, target: int, num_bytes: int) -> float:
        rate = peer_rate(self.hardware, source, target)
        if rate is not None:
            return num_bytes / rate
        # through the host: out of one device, then into the other
        latency = self.latencies[source] + self.latencies[target]
        return latency + num_bytes / self.d2h_rates[source] + num_bytes / self.h2d_rates[target]


class Run(msgspec.Struct, frozen=True):
    """Times of every node in the last iteration, and the period."""

    period_seconds: float
    starts: list[float]
    ends: list[float]
    iteration_start: float


def run(graph: Graph, timing: Timing, max_iterations: int = MAX_ITERATIONS) -> Run:
    """Repeat a program until its period settles; by events where actions share what they run on."""
    if timing.shared:
        from planner.fluid import run_shared  # which builds on the nouns of this file

        return run_shared(graph, timing)
    durations = [timing.seconds(action) for action in graph.actions]
    receives = [isinstance(action, Receive) for action in graph.actions]
    count = len(durations)
    previous = [0.0] * count
    last_end, last_period = 0.0, -1.0
    steps = []
    for node in graph.order:
        lane = graph.lanes[graph.lane_of[node]]
        now = [other for other, ago in graph.waits[node] if not ago]
        before = [other for other, ago in graph.waits[node] if ago]
        if graph.is_first(node):
            before.append(node + len(lane.entries) - 1)
        else:
            now.append(node - 1)
        steps.append((node, now, before, durations[node]))
    for iteration in range(max_iterations):
        ends = [0.0] * count
        for node, now, before, duration in steps:
            start = 0.0
            for other in now:
                if ends[other] > start:
                    start = ends[other]
            for other in before:
                if previous[other] > start:
                    start = previous[other]
            ends[node] = start + duration
        end = max(ends)
        period = end - last_end
        settled = abs(period - last_period) <= SETTLED * period
        iteration_start, last_end, last_period, previous = last_end, end, period, ends
        if settled and iteration >= 2:
            break
    starts = [end - duration for end, duration in zip(previous, durations, strict=True)]
    for node, is_receive in enumerate(receives):
        if is_receive:
            starts[node] = starts[graph.node_of[Send(graph.actions[node].value)]]  # type: ignore[union-attr]
    return Run(last_period, starts, previous, iteration_start)


def summarize(graph: Graph, lanes: Lanes) -> list[DeviceSummary]:
    """Per device: peak bytes and the bytes it moves in one iteration."""
    num_devices = graph.rules.configuration.num_devices
    moved = [{"h2d": 0, "d2h": 0, "send": 0} for _ in range(num_devices)]
    for lane in lanes:
        if lane.stream in ("h2d", "d2h", "send"):
            moved[lane.device][lane.stream] += sum(
                graph.rules.moved_bytes(entry.action) for entry in lane.entries
            )
    return [
        DeviceSummary(peak.nbytes, moved[d]["h2d"], moved[d]["d2h"], moved[d]["send"])
        for d, peak in enumerate(peaks(graph, num_devices))
    ]


def simulate(schedule: Schedule, profile: Profile, hardware: Hardware) -> Trace:
    """One steady-state iteration of a schedule, times from 0.

    Raises FormatError or VerifyError where the schedule does not fit the profile or breaks a rule.
    """
    rules = timed_rules(schedule, profile, hardware)
    lanes = parse_program(schedule.programs.train)
    graph = Graph(lanes, rules)
    result = run(graph, Timing(rules, hardware))
    spans = []
    for node in graph.order:
        action = graph.actions[node]
        lane = graph.lanes[graph.lane_of[node]]
        start = result.starts[node] - result.iteration_start
        end = result.ends[node] - result.iteration_start
        nbytes = rules.moved_bytes(action)
        spans.append(Span(str(action), lane.device, lane.stream, start, end, nbytes))
    earliest = min((span.start_seconds for span in spans), default=0.0)
    shift = -min(earliest, 0.0)
    spans = [
        msgspec.structs.replace(s, start_seconds=s.start_seconds + shift, end_seconds=s.end_seconds + shift)
        for s in spans
    ]
    return Trace(
        origin="simulated",
        model=profile.model.name,
        model_hash=model_hash(profile),
        schedule_hash=schedule_hash(schedule),
        devices=tuple(summarize(graph, lanes)),
        iteration_seconds=(result.period_seconds,),
        spans=tuple(sorted(spans, key=lambda s: (s.start_seconds, s.end_seconds, s.device, s.stream))),
        memory=tuple(_memory(graph, result, shift)),
        samples_per_iteration=schedule.configuration.samples,
    )


def timed_rules(schedule: Schedule, profile: Profile, hardware: Hardware) -> Rules:
    """The rules of a schedule whose costs know of the network between servers, if there are several.

    Its rate is the hardware's, or where that has none, the one that was planned for.
    """
    configuration = schedule.configuration
    if hardware.network_bytes_per_second is None:
        hardware = schedule.hardware
    return Rules(
        over_servers(
            profile,
            hardware,
            configuration.num_servers,
            configuration.num_devices,
            agree=configuration.agree,
        ),
        configuration,
    )


def _memory(graph: Graph, result: Run, shift: float) -> list[MemorySample]:
    """Bytes of values and workspace over one iteration, at this timing."""
    rules = graph.rules
    changes: list[tuple[float, int, int, int]] = []
    offset = shift - result.iteration_start
    for node, effects in enumerate(graph.effects):
        device = graph.lanes[graph.lane_of[node]].device
        made = sum(map(rules.nbytes, effects.makes))
        freed = sum(map(rules.nbytes, effects.frees))
        workspace = rules.workspace(graph.actions[node])
        if made or workspace:
            changes.append((result.starts[node] + offset, 1, device, made + workspace))
        if freed or workspace:
            changes.append((result.ends[node] + offset, 0, device, -freed - workspace))
    live = [0] * rules.configuration.num_devices
    for value in rules.residents():
        live[rules.device_of(value)] += rules.nbytes(value)
    samples = []
    for seconds, _, device, change in sorted(changes):
        live[device] += change
        samples.append(MemorySample(device, seconds, live[device]))
    return samples
