"""What training takes when memory is virtualised instead of planned: the baselines of the Harmony paper (section 2).

In: a problem. Out: seconds of an iteration and swapped bytes of

    dp-swap     every device runs the whole model on its samples, microbatch by microbatch, gradients accumulating
    pp-swap     every device runs a stage of the model, one microbatch forward, one backward (1F1B)

Tensors that do not fit are paged: an operation needs its own on the device, the least recently used make room, dirty
ones are written back first, and nothing is fetched ahead, so transfers and compute take turns. Weights, gradients,
optimizer states and the activations of each layer and microbatch are tensors; the update runs on the device at no cost
where its time was not measured. Of storing all activations and recomputing each layer's the faster counts, and the
best microbatch size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from planner.contract.cuts import nbytes
from planner.contract.errors import InfeasibleError
from planner.search.problem import Problem, ranges

Tensor = tuple[str, int, int]
"""Kind (W, G, K, X, D or A), layer and microbatch."""


@dataclass(frozen=True)
class Baseline:
    """Seconds of one iteration, and what all devices swap in and out in it."""

    name: str
    seconds: float
    swap_in_bytes: int
    swap_out_bytes: int
    microbatch_size: int
    recomputes: bool


@dataclass
class _Paged:
    """The memory of one device, least recently used first, and what it swapped."""

    limit: int
    h2d: float
    d2h: float
    tensors: OrderedDict[Tensor, tuple[int, bool]] = field(default_factory=OrderedDict)
    used: int = 0
    in_bytes: int = 0
    out_bytes: int = 0
    on_host: set[Tensor] = field(default_factory=set)

    def touch(self, needs: list[tuple[Tensor, int, bool]], workspace: int) -> float:
        """Bring tensors (name, bytes, whether written) in, with so many bytes beside them; seconds of transfers."""
        pinned = {tensor for tensor, _, _ in needs}
        total = sum(size for _, size, _ in needs) + workspace
        if total > self.limit:
            raise InfeasibleError(f"an operation needs {total} bytes of {self.limit}")
        seconds = 0.0
        for tensor, size, is_written in needs:
            known = self.tensors.pop(tensor, None)
            if known is None:
                seconds += self._make_room(size + workspace, pinned)
                if tensor in self.on_host:
                    self.in_bytes += size
                    seconds += size / self.h2d
                self.used += size
            self.tensors[tensor] = size, is_written or (known is not None and known[1])
        return seconds + self._make_room(workspace, pinned)

    def _make_room(self, size: int, pinned: set[Tensor]) -> float:
        seconds = 0.0
        while self.used + size > self.limit:
            victim = next((tensor for tensor in self.tensors if tensor not in pinned), None)
            if victim is None:
                break
            held, is_dirty = self.tensors.pop(victim)
            self.used -= held
            if is_dirty:
                self.out_bytes += held
                self.on_host.add(victim)
                seconds += held / self.d2h
        return seconds

    def drop(self, tensor: Tensor) -> None:
        """A tensor that nobody needs any more."""
        known = self.tensors.pop(tensor, None)
        if known is not None:
            self.used -= known[0]
        self.on_host.discard(tensor)


class _Stage:
    """Layers [first, end) on one paged device."""

    def __init__(self, problem: Problem, first: int, end: int, device: int, recomputes: bool) -> None:
        self.problem, self.costs = problem, problem.costs
        self.layers = range(first, end)
        self.recomputes = recomputes
        spec = problem.hardware.devices[device]
        link = problem.hardware.host_links[spec.host_link]
        devices = problem.hardware.devices[: problem.num_devices]
        users = 1 if link.sharing == "none" else sum(d.host_link == spec.host_link for d in devices)
        self.memory = _Paged(
            problem.limits[device], link.h2d_bytes_per_second / users, link.d2h_bytes_per_second / users
        )
        self.scale = spec.compute_scale
        for layer in self.layers:
            self.memory.on_host |= {("W", layer, -1), ("K", layer, -1)}

    def forward(self, microbatch: int, size: int) -> float:
        costs, seconds = self.costs, 0.0
        for layer in self.layers:
            given = nbytes(costs.entering(layer, layer), size)
            saved = 0 if self.recomputes else max(0, costs.kept_bytes(layer, layer, size) - given)
            needs = [(("W", layer, -1), costs.weight_bytes(layer, layer), False)]
            needs.append((("X", layer, microbatch), given, True))
            if saved:
                needs.append((("A", layer, microbatch), saved, True))
            seconds += self.memory.touch(needs, costs.forward_workspace(layer, layer, size))
            seconds += costs.forward_seconds(layer, layer, size) / self.scale
        return seconds

    def backward(self, microbatch: int, size: int) -> float:
        costs, seconds = self.costs, 0.0
        for layer in reversed(self.layers):
            given = nbytes(costs.entering(layer, layer), size)
            needs = [(("W", layer, -1), costs.weight_bytes(layer, layer), False)]
            needs.append((("X", layer, microbatch), given, True))
            if costs.gradient_bytes(layer, layer):
                needs.append((("G", layer, -1), costs.gradient_bytes(layer, layer), True))
            saved = 0 if self.recomputes else max(0, costs.kept_bytes(layer, layer, size) - given)
            if saved:
                needs.append((("A", layer, microbatch), saved, True))
                workspace = costs.kept_workspace(layer, layer, size)
            else:
                workspace = costs.backward_workspace(layer, layer, size)
                seconds += costs.forward_seconds(layer, layer, size) / self.scale
            seconds += self.memory.touch(needs, workspace)
            seconds += costs.backward_seconds(layer, layer, size) / self.scale
            self.memory.drop(("X", layer, microbatch))
            self.memory.drop(("A", layer, microbatch))
        return seconds

    def update(self) -> float:
        costs, seconds = self.costs, 0.0
        for layer in reversed(self.layers):
            if not costs.gradient_bytes(layer, layer):
                continue
            needs = [
                (("W", layer, -1), costs.weight_bytes(layer, layer), True),
                (("G", layer, -1), costs.gradient_bytes(layer, layer), False),
                (("K", layer, -1), costs.state_bytes(layer, layer), True),
            ]
            seconds += self.memory.touch(needs, 0)
            seconds += (costs.device_update_seconds(layer, layer) or 0.0) / self.scale
            self.memory.drop(("G", layer, -1))
        return seconds


def dp_swap(problem: Problem) -> Baseline | None:
    """The best dp-swap; None where even a single operation does not fit."""
    return _best(problem, _dp_swap)


def pp_swap(problem: Problem) -> Baseline | None:
    """The best pp-swap; None where even a single operation does not fit."""
    return _best(problem, _pp_swap)


def _best(problem: Problem, run: object) -> Baseline | None:
    found = []
    for size in problem.sizes():
        for recomputes in (False, True):
            try:
                result = run(problem, size, recomputes)  # type: ignore[operator]
            except InfeasibleError:
                continue
            if result is not None:
                found.append(result)
    return min(found, key=lambda baseline: baseline.seconds, default=None)


def _dp_swap(problem: Problem, size: int, recomputes: bool) -> Baseline | None:
    """Each replica alone; all-reduce once, over the peer links in a ring, behind the last backward."""
    count, costs = problem.num_devices, problem.costs
    if count > problem.minibatch or size > -(-problem.minibatch // count):
        return None
    share = -(-problem.minibatch // count)
    stage = _Stage(problem, 0, costs.num_layers, 0, recomputes)
    before = (0, 0)
    seconds = 0.0
    for iteration in range(2):  # the second one begins with what the first left on the device
        before = stage.memory.in_bytes, stage.memory.out_bytes
        seconds = 0.0
        for j, (first, end) in enumerate(ranges(share, size)):
            seconds += stage.forward(j, end - first) + stage.backward(j, end - first)
        seconds += stage.update()
        if iteration and count > 1:
            peers = problem.hardware.peer_bytes_per_second
            rate = peers if isinstance(peers, float | int) else stage.memory.d2h
            seconds += 2 * (count - 1) / count * costs.gradient_bytes(0, costs.num_layers - 1) / rate
    moved_in, moved_out = stage.memory.in_bytes - before[0], stage.memory.out_bytes - before[1]
    return Baseline("dp-swap", seconds, count * moved_in, count * moved_out, size, recomputes)


def _pp_swap(problem: Problem, size: int, recomputes: bool) -> Baseline | None:
    """Stages of about equal compute under 1F1B: stage s has at most N - s microbatches on their way."""
    count, costs = problem.num_devices, problem.costs
    if count > costs.num_layers:
        return None
    cuts = _stages(problem, size)
    stages = [_Stage(problem, a, b, d, recomputes) for d, (a, b) in enumerate(pairwise(cuts))]
    samples = [end - first for first, end in ranges(problem.minibatch, size)]
    seconds, before = 0.0, (0, 0)
    for _ in range(2):
        before = sum(s.memory.in_bytes for s in stages), sum(s.memory.out_bytes for s in stages)
        seconds = _one_forward_one_backward(stages, samples)
    moved_in = sum(s.memory.in_bytes for s in stages) - before[0]
    moved_out = sum(s.memory.out_bytes for s in stages) - before[1]
    return Baseline("pp-swap", seconds, moved_in, moved_out, size, recomputes)


def _stages(problem: Problem, size: int) -> list[int]:
    costs, count = problem.costs, problem.num_devices
    last = costs.num_layers - 1
    total = costs.forward_seconds(0, last, size) + costs.backward_seconds(0, last, size)
    cuts = [0]
    for layer in range(costs.num_layers):
        done = costs.forward_seconds(0, layer, size) + costs.backward_seconds(0, layer, size)
        left = costs.num_layers - layer - 1
        if len(cuts) < count and (done >= total * len(cuts) / count or left == count - len(cuts)):
            cuts.append(layer + 1)
    return [*cuts, costs.num_layers] if cuts[-1] < costs.num_layers else cuts


def _one_forward_one_backward(stages: list[_Stage], samples: list[int]) -> float:
    """The makespan of 1F1B, operation by operation in the order in which they can start."""
    count, microbatches = len(stages), len(samples)
    orders = [list(_stage_order(count - s, microbatches)) for s in range(count)]
    forward = [[-1.0] * microbatches for _ in stages]
    backward = [[-1.0] * microbatches for _ in stages]
    place, free = [0] * count, [0.0] * count
    while any(place[s] < len(orders[s]) for s in range(count)):
        for s in range(count):
            while place[s] < len(orders[s]):
                is_forward, j = orders[s][place[s]]
                if is_forward:
                    ready = forward[s - 1][j] if s else 0.0
                else:
                    ready = backward[s + 1][j] if s + 1 < count else forward[s][j]
                if ready < 0:
                    break
                spent = stages[s].forward(j, samples[j]) if is_forward else stages[s].backward(j, samples[j])
                free[s] = max(free[s], ready) + spent
                (forward if is_forward else backward)[s][j] = free[s]
                place[s] += 1
    return max(free[s] + stage.update() for s, stage in enumerate(stages))


def _stage_order(ahead: int, microbatches: int) -> Iterator[tuple[bool, int]]:
    """`ahead` forwards, then one backward and one forward in turn, then the backwards that are left."""
    forwards = min(ahead, microbatches)
    yield from ((True, j) for j in range(forwards))
    for j in range(microbatches):
        yield False, j
        if forwards < microbatches:
            yield True, forwards
            forwards += 1
