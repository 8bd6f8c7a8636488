"""What an action reads, makes and frees, where it runs, and how many bytes a value has. Written once, here.

In: a profile (its sizes and edges; times are not looked at) and a configuration. The verifier, the
simulator, the lowering and the executor all ask these rules; precedence.py derives the order from them.

A cell is a place that holds bytes: ("gpu", value), ("host", value), ("link", value) for bytes under way,
("statistics", value) and ("buffers", value) for BatchNorm's on the device and on the host. Persistent cells
(weights and states on the host, resident weights) are read before they are written in an iteration; all
others are written first.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from planner.contract.actions import (
    Action,
    Agree,
    Backward,
    Forward,
    Free,
    Receive,
    Reduce,
    Send,
    SwapIn,
    SwapOut,
    Update,
    Value,
)
from planner.contract.costs import Costs
from planner.contract.cuts import Tensor, nbytes
from planner.contract.errors import VerifyError
from planner.contract.profile import BATCH, Profile
from planner.contract.schedule import BackwardPack, Configuration, ForwardPack, Samples, replica_samples

Cell = tuple[str, Value]


class Effects(msgspec.Struct, frozen=True, gc=False):
    """reads and writes: cells. makes: device values whose bytes begin to count; frees: those that end."""

    reads: tuple[Cell, ...] = ()
    writes: tuple[Cell, ...] = ()
    makes: tuple[Value, ...] = ()
    frees: tuple[Value, ...] = ()


def _overlap(a: Samples, b: Samples) -> bool:
    return a[0] < b[1] and b[0] < a[1]


class Rules:
    """The rules for one profile and configuration."""

    def __init__(self, profile: Profile, configuration: Configuration, costs: Costs | None = None) -> None:
        self.profile = profile
        self.configuration = configuration
        self.costs = costs or Costs(profile)
        self.forward_packs = configuration.forward_packs
        self.backward_packs = configuration.backward_packs
        self.fused = len(self.backward_packs) - 1
        self.replicas = replica_samples(configuration)
        self.stages = configuration.num_devices // len(self.replicas)
        self.forward_samples = configuration.microbatches.forward
        self.backward_samples = configuration.microbatches.backward
        self.forward_replica = self._replica_of(self.forward_samples)
        self.backward_replica = self._replica_of(self.backward_samples)
        self._backward_pack_of = [
            b for b, pack in enumerate(self.backward_packs) for _ in range(pack.first, pack.last + 1)
        ]
        # the fused pack's layers belong to forward pack len(forward_packs)
        self._forward_pack_of = [
            p for p, pack in enumerate(self.forward_packs) for _ in range(pack.first, pack.last + 1)
        ]
        fused = self.backward_packs[self.fused]
        self._forward_pack_of += [len(self.forward_packs)] * (fused.last - fused.first + 1)
        self._stashed = self._find_stashed()
        self._tensors = lru_cache(maxsize=None)(self._find_tensors)
        self.stashed_tensors = lru_cache(maxsize=None)(self._find_stashed_tensors)
        self.effects = lru_cache(maxsize=None)(self._effects)
        self.nbytes = lru_cache(maxsize=None)(self._nbytes)
        self.stash_of = lru_cache(maxsize=None)(self._stash_of)
        self.forward_sources = lru_cache(maxsize=None)(self._forward_sources)
        self.gradient_sources = lru_cache(maxsize=None)(self._gradient_sources)

    # ---- microbatches, replicas, devices

    def _replica_of(self, ranges: tuple[Samples, ...]) -> list[int]:
        return [
            next(r for r, samples in enumerate(self.replicas) if _overlap(samples, item)) for item in ranges
        ]

    def replica_tag(self, replica: int) -> int:
        """What a value of weights carries: the replica where there are several, else nothing."""
        return replica if len(self.replicas) > 1 else -1

    def owner(self, pack: int) -> int:
        """The replica that sums and sends out a backward pack's gradients."""
        return pack % len(self.replicas)

    def forward_device(self, pack: int, replica: int = 0) -> int:
        """The device of a forward pack; pack len(forward_packs) is the fused one."""
        packs = self.forward_packs
        stage = packs[pack].device if pack < len(packs) else self.backward_packs[self.fused].device
        return max(replica, 0) * self.stages + stage

    def backward_device(self, pack: int, replica: int = 0) -> int:
        return max(replica, 0) * self.stages + self.backward_packs[pack].device

    def device_of(self, value: Value) -> int:
        """The device whose memory holds a value."""
        if value.device >= 0:
            return value.device
        if value.kind in ("WF", "I", "Y", "S"):
            replica = value.replica if value.kind == "WF" else self.forward_replica[value.microbatch]
            return self.forward_device(value.pack, replica)
        if value.kind == "AF":
            return self.backward_device(value.pack, self.backward_replica[value.microbatch])
        replica = self.backward_replica[value.microbatch] if value.microbatch >= 0 else value.replica
        return self.backward_device(value.pack, replica)

    def place(self, action: Action) -> tuple[int, str]:
        """The device and stream where an action runs; a free may stand in any stream of its device ("")."""
        match action:
            case Forward(pack, microbatch):
                return self.forward_device(pack, self.forward_replica[microbatch]), "compute"
            case Backward(pack, microbatch):
                return self.backward_device(pack, self.backward_replica[microbatch]), "compute"
            case SwapIn(value):
                return self.device_of(value), "h2d"
            case SwapOut(value):
                return self.device_of(value), "d2h"
            case Send(value):
                return self.device_of(Value(value.kind, value.pack, value.microbatch)), "send"
            case Receive(value):
                return value.device, "recv"
            case Reduce(value):
                return self.device_of(value), "reduce"
            case Update(pack):
                device = self.backward_device(pack, self.owner(pack))
                return device, "host" if self.backward_packs[pack].update == "host" else "compute"
            case Agree():
                return 0, "host"
            case Free(value):
                return self.device_of(value), ""

    # ---- which tensors a value has

    def _find_stashed(self) -> tuple[int, ...]:
        """Positions in costs.tensors of what some backward pack recomputes from."""
        stashed = set()
        for b, pack in enumerate(self.backward_packs[:-1]):
            if self._is_recomputed(b):
                wanted = set(self.costs.entering(pack.first, pack.last))
                stashed |= {i for i, t in enumerate(self.costs.tensors) if t in wanted and t.src != BATCH}
        return tuple(sorted(stashed))

    def _is_recomputed(self, pack: int) -> bool:
        activations = self.backward_packs[pack].activations
        return not activations or "recompute" in activations

    def activations(self, pack: int, microbatch: int) -> str:
        choices = self.backward_packs[pack].activations
        return choices[microbatch] if choices else "recompute"

    def _layers(self, pack: int) -> tuple[int, int]:
        fused = self.backward_packs[self.fused]
        packs = self.forward_packs
        return (packs[pack].first, packs[pack].last) if pack < len(packs) else (fused.first, fused.last)

    def tensors_of(self, value: Value) -> tuple[Tensor, ...]:
        """The tensors in a value of kind I, X, Y, S or D, in (source, name) order."""
        kind, replica = value.kind, 0
        if value.device >= 0:
            replica = (self.forward_replica if kind == "Y" else self.backward_replica)[value.microbatch]
        is_stashed = (
            kind == "X"
            and value.pack != self.fused
            and self.activations(value.pack, value.microbatch) == "recompute"
        )
        return self._tensors(kind, value.pack, value.device, replica, is_stashed)

    def _find_tensors(
        self, kind: str, pack: int, device: int, replica: int, is_stashed: bool
    ) -> tuple[Tensor, ...]:
        """The same, by what it depends on: all microbatches of a replica have the same tensors."""
        if kind == "I":
            return tuple(t for t in self.costs.entering(*self._layers(pack)) if t.src == BATCH)
        if kind == "Y":
            made = self.costs.leaving(*self._layers(pack))
            if device < 0:
                return made
            return tuple(
                t
                for t in made
                if any(self.forward_device(self._forward_pack_of[c], replica) == device for c in t.consumers)
            )
        if kind == "S":
            first, last = self._layers(pack)
            return tuple(
                t for t in self.stashed_tensors(pack) if first <= t.src <= last and t.consumers[-1] <= last
            )
        backward = self.backward_packs[pack]
        given = self.costs.entering(backward.first, backward.last)
        if kind == "X":
            return tuple(t for t in given if t.src == BATCH or is_stashed)
        if kind == "D":
            gradients = tuple(t for t in given if t.differentiable)
            if device < 0:
                return gradients
            return tuple(
                t for t in gradients if self.backward_device(self._backward_pack_of[t.src], replica) == device
            )
        raise VerifyError(f"{kind}{pack} has no tensors of its own")

    def _find_stashed_tensors(self, pack: int) -> tuple[Tensor, ...]:
        """What forward pack `pack` writes to the host for recompute: `out:S`."""
        first, last = self._layers(pack)
        return tuple(t for t in (self.costs.tensors[i] for i in self._stashed) if first <= t.src <= last)

    def _nbytes(self, value: Value) -> int:
        """A value's bytes on its device."""
        kind, pack = value.kind, value.pack
        if kind == "WF":
            return self.costs.weight_bytes(*self._layers(pack))
        if kind in ("I", "Y", "S"):
            first, end = self.forward_samples[value.microbatch]
            return nbytes(self.tensors_of(value), end - first)
        if kind in ("X", "D"):
            first, end = self.backward_samples[value.microbatch]
            return nbytes(self.tensors_of(value), end - first)
        layers = self.backward_packs[pack].first, self.backward_packs[pack].last
        if kind == "WB":
            return self.costs.weight_bytes(*layers)
        if kind == "G":
            return self.costs.gradient_bytes(*layers)
        if kind == "K":
            return self.costs.state_bytes(*layers)
        first, end = self.backward_samples[value.microbatch]
        return self.costs.kept_bytes(*layers, end - first)

    def moved_bytes(self, action: Action) -> int:
        """The bytes that a swap, transfer or reduction moves; 0 for other actions."""
        match action:
            case SwapOut(Value(kind="S") as value):
                first, end = self.forward_samples[value.microbatch]
                return nbytes(self.stashed_tensors(value.pack), end - first)
            case SwapOut(Value(kind="WF") as value):
                return self.costs.mutated_buffer_bytes(*self._layers(value.pack))
            case SwapOut(Value(kind="WB") as value):
                pack = self.backward_packs[value.pack]
                changed = self.costs.gradient_bytes(pack.first, pack.last) if pack.update == "device" else 0
                if value.pack == self.fused:
                    changed += self.costs.mutated_buffer_bytes(pack.first, pack.last)
                return changed
            case SwapIn(value) | SwapOut(value) | Send(value) | Reduce(value):
                return self.nbytes(value)
            case _:
                return 0

    def workspace(self, action: Action) -> int:
        """Bytes that exist only while a forward or backward runs, beyond every value."""
        match action:
            case Forward(pack, microbatch):
                first, end = self.forward_samples[microbatch]
                return self.costs.forward_workspace(*self._layers(pack), end - first)
            case Backward(pack, microbatch):
                first, end = self.backward_samples[microbatch]
                layers = self.backward_packs[pack]
                joined = 0
                if pack == self.fused and len(self.intersecting(microbatch)) > 1:
                    # several forward microbatches are joined into one input
                    given = self.costs.entering(layers.first, layers.last)
                    joined = nbytes((t for t in given if t.src != BATCH), end - first)
                if self.activations(pack, microbatch) != "recompute":
                    return self.costs.kept_workspace(layers.first, layers.last, end - first)
                return joined + self.costs.backward_workspace(layers.first, layers.last, end - first)
            case _:
                return 0

    # ---- who gives what to whom

    def _forward_sources(self, pack: int) -> tuple[int, ...]:
        """The forward packs whose outputs a forward pack (or the fused one) takes."""
        return self._makers_of(*self._layers(pack))

    def _gradient_sources(self, pack: int) -> tuple[int, ...]:
        """The later backward packs that hand a gradient to a backward pack."""
        backward = self.backward_packs[pack]
        made = self.costs.leaving(backward.first, backward.last)
        return tuple(
            sorted(
                {
                    self._backward_pack_of[c]
                    for t in made
                    if t.differentiable
                    for c in t.consumers
                    if c > backward.last
                }
            )
        )

    def _stash_of(self, pack: int) -> tuple[int, ...]:
        """The forward packs whose stash a backward pack recomputes from."""
        backward = self.backward_packs[pack]
        return self._makers_of(backward.first, backward.last)

    def _makers_of(self, first: int, last: int) -> tuple[int, ...]:
        """The forward packs that make what enters layers first..last."""
        given = self.costs.entering(first, last)
        return tuple(sorted({self._forward_pack_of[t.src] for t in given if t.src != BATCH}))

    def has_weights(self, pack: BackwardPack | ForwardPack) -> bool:
        return self.costs.weight_bytes(pack.first, pack.last) > 0

    def is_trained(self, pack: int) -> bool:
        """Whether a backward pack has gradients to sum and weights to update."""
        return self.costs.gradient_bytes(self.backward_packs[pack].first, self.backward_packs[pack].last) > 0

    def intersecting(self, microbatch: int) -> tuple[int, ...]:
        """The forward microbatches whose samples a backward microbatch has."""
        samples = self.backward_samples[microbatch]
        return tuple(j for j, other in enumerate(self.forward_samples) if _overlap(samples, other))

    def forward_weights(self, pack: int, replica: int) -> tuple[Value, ...]:
        """The device values that hold a forward pack's weights."""
        forward = self.forward_packs[pack]
        if not self.has_weights(forward):
            return ()
        tag = self.replica_tag(replica)
        if forward.weights != "resident":
            return (Value("WF", pack, replica=tag),)
        packs = sorted(set(self._backward_pack_of[forward.first : forward.last + 1]))
        return tuple(Value("WB", b, replica=tag) for b in packs if self.has_weights(self.backward_packs[b]))

    def backward_weights(self, pack: int, replica: int) -> tuple[Value, ...]:
        """The device values that hold a backward pack's weights."""
        backward = self.backward_packs[pack]
        if not self.has_weights(backward):
            return ()
        tag = self.replica_tag(replica)
        if backward.weights != "hold":
            return (Value("WB", pack, replica=tag),)
        packs = sorted(set(self._forward_pack_of[backward.first : backward.last + 1]))
        return tuple(
            Value("WF", p, replica=tag)
            for p in packs
            if p < len(self.forward_packs) and self.has_weights(self.forward_packs[p])
        )

    def is_persistent(self, cell: Cell) -> bool:
        """Whether a cell lives on from iteration to iteration: read first, written later."""
        place, value = cell
        if place == "host":
            return value.kind in ("WB", "K")
        if place == "gpu":
            return value.kind in ("WB", "K") and self.backward_packs[value.pack].weights == "resident"
        return place == "buffers"

    def residents(self) -> tuple[Value, ...]:
        """Device values that are there before the first action and after the last one."""
        found = []
        for b, pack in enumerate(self.backward_packs):
            for r in range(len(self.replicas) if pack.weights == "resident" else 0):
                if self.has_weights(pack):
                    found.append(Value("WB", b, replica=self.replica_tag(r)))
                if pack.update == "device" and r == self.owner(b):
                    found.append(Value("K", b))
        return tuple(found)

    # ---- effects

    def _effects(self, action: Action) -> Effects:
        match action:
            case Forward(pack, microbatch):
                return self._forward_effects(pack, microbatch)
            case Backward(pack, microbatch):
                return self._backward_effects(pack, microbatch)
            case SwapIn(value):
                return Effects(reads=self._swap_in_reads(value), writes=(("gpu", value),), makes=(value,))
            case SwapOut(value):
                return self._swap_out_effects(value)
            case Send(value):
                source = Value(value.kind, value.pack, value.microbatch)
                return Effects(reads=(("gpu", source),), writes=(("link", value),))
            case Receive(value):
                return Effects(reads=(("link", value),), writes=(("gpu", value),), makes=(value,))
            case Reduce(value):
                return self._reduce_effects(value)
            case Update(pack):
                return self._update_effects(pack)
            case Agree():
                trained = [Value("G", b) for b in range(len(self.backward_packs)) if self.is_trained(b)]
                return Effects(reads=tuple(("host", g) for g in trained), writes=(("host", _AGREED),))
            case Free(value):
                return Effects(frees=(value,))

    def _forward_effects(self, pack: int, microbatch: int) -> Effects:
        replica = self.forward_replica[microbatch]
        device = self.forward_device(pack, replica)
        reads: list[Cell] = [("gpu", w) for w in self.forward_weights(pack, replica)]
        batch = Value("I", pack, microbatch)
        if self.tensors_of(batch):
            reads.append(("gpu", batch))
        reads += [
            ("gpu", self._copy("Y", p, microbatch, self.forward_device(p, replica), device))
            for p in self.forward_sources(pack)
        ]
        makes = [
            v for v in (Value("Y", pack, microbatch), Value("S", pack, microbatch)) if self.tensors_of(v)
        ]
        saved = self._saved_by(pack, microbatch)
        if saved is not None:
            makes.append(saved)
        writes: list[Cell] = [("gpu", v) for v in makes]
        if self.costs.mutated_buffer_bytes(*self._layers(pack)):
            writes += [("statistics", w) for w in self.forward_weights(pack, replica)]
        return Effects(reads=tuple(reads), writes=tuple(writes), makes=tuple(makes))

    def _saved_by(self, pack: int, microbatch: int) -> Value | None:
        """What a forward saves for a backward that does not recompute."""
        layers = self._layers(pack)
        b = self._backward_pack_of[layers[0]]
        backward = self.backward_packs[b]
        if (backward.first, backward.last) != layers or not backward.activations:
            return None
        samples = self.forward_samples[microbatch]
        for i, choice in enumerate(backward.activations):
            if choice != "recompute" and self.backward_samples[i] == samples:
                return Value("AF", b, i)
        return None

    def _copy(self, kind: str, pack: int, microbatch: int, source: int, device: int) -> Value:
        return Value(kind, pack, microbatch, device=-1 if source == device else device)

    def _backward_effects(self, pack: int, microbatch: int) -> Effects:
        replica = self.backward_replica[microbatch]
        device = self.backward_device(pack, replica)
        reads: list[Cell] = [("gpu", w) for w in self.backward_weights(pack, replica)]
        given = Value("X", pack, microbatch)
        if self.tensors_of(given):
            reads.append(("gpu", given))
        choice = self.activations(pack, microbatch)
        if choice != "recompute":
            reads.append(("gpu", Value("AF" if choice == "keep" else "AB", pack, microbatch)))
        elif pack == self.fused:
            for p in self.forward_sources(len(self.forward_packs)):
                source = self.forward_device(p, replica)
                reads += [
                    ("gpu", self._copy("Y", p, j, source, device)) for j in self.intersecting(microbatch)
                ]
        for b in self.gradient_sources(pack):
            reads.append(("gpu", self._copy("D", b, microbatch, self.backward_device(b, replica), device)))
        makes, writes = [], []
        handed = Value("D", pack, microbatch)
        if self.tensors_of(handed):
            makes.append(handed)
        if self.is_trained(pack):
            gradients = Value("G", pack, replica=self.replica_tag(replica))
            writes.append(gradients)
            if microbatch == self.backward_replica.index(replica):
                makes.append(gradients)
        cells: list[Cell] = [("gpu", v) for v in dict.fromkeys([*makes, *writes])]
        if self._changes_statistics(pack):
            cells += [("statistics", w) for w in self.backward_weights(pack, replica)]
        return Effects(reads=tuple(reads), writes=tuple(cells), makes=tuple(makes))

    def _changes_statistics(self, pack: int) -> bool:
        """Whether a backward pack runs the forward that updates BatchNorm's statistics: only the fused one does."""
        layers = self.backward_packs[pack]
        return pack == self.fused and self.costs.mutated_buffer_bytes(layers.first, layers.last) > 0

    def _swap_in_reads(self, value: Value) -> tuple[Cell, ...]:
        match value.kind:
            case "WF":
                pack = self.forward_packs[value.pack]
                packs = sorted(set(self._backward_pack_of[pack.first : pack.last + 1]))
                cells: list[Cell] = [("host", Value("WB", b)) for b in packs if self.is_trained(b)]
                if self.costs.mutated_buffer_bytes(pack.first, pack.last):
                    cells.append(("buffers", Value("WF", value.pack)))
                return tuple(cells)
            case "WB":
                cells = [("host", Value("WB", value.pack))] if self.is_trained(value.pack) else []
                if self._changes_statistics(value.pack):
                    cells.append(("buffers", Value("WB", value.pack)))
                return tuple(cells)
            case "K":
                return (("host", value),)
            case "X":
                if value.pack == self.fused or self.activations(value.pack, value.microbatch) != "recompute":
                    return ()
                overlapping = self.intersecting(value.microbatch)
                return tuple(
                    ("host", Value("S", p, j)) for p in self.stash_of(value.pack) for j in overlapping
                )
            case "AB":
                return (("host", Value("AF", value.pack, value.microbatch)),)
            case _:
                return ()

    def _swap_out_effects(self, value: Value) -> Effects:
        match value.kind:
            case "WF":
                changed: tuple[Cell, ...] = (("gpu", value), ("statistics", value))
                return Effects(reads=changed, writes=(("buffers", Value("WF", value.pack)),))
            case "WB":
                backward = self.backward_packs[value.pack]
                reads: list[Cell] = [("gpu", value)]
                writes: list[Cell] = []
                if backward.update == "device":
                    writes.append(("host", Value("WB", value.pack)))
                if self._changes_statistics(value.pack):
                    reads.append(("statistics", value))
                    writes.append(("buffers", Value("WB", value.pack)))
                return Effects(reads=tuple(reads), writes=tuple(writes))
            case "S":
                makes = (Value("Y", value.pack, value.microbatch), value)
                given = tuple(("gpu", v) for v in makes if self.tensors_of(v))
                return Effects(reads=given, writes=(("host", value),))
            case "G":
                return Effects(reads=(("gpu", value),), writes=(("host", Value("G", value.pack)),))
            case _:
                return Effects(reads=(("gpu", value),), writes=(("host", value),))

    def _reduce_effects(self, value: Value) -> Effects:
        if value.replica != self.owner(value.pack):
            return Effects(reads=(("gpu", value),), writes=(("link", value),))
        others = (r for r in range(len(self.replicas)) if r != value.replica)
        shares = tuple(("link", Value("G", value.pack, replica=r)) for r in others)
        return Effects(reads=(("gpu", value), *shares), writes=(("gpu", value),))

    def _update_effects(self, pack: int) -> Effects:
        backward = self.backward_packs[pack]
        agreed: tuple[Cell, ...] = (("host", _AGREED),) if self.configuration.agree else ()
        if backward.update == "device":
            gradients = Value("G", pack, replica=self.replica_tag(self.owner(pack)))
            cells: tuple[Cell, ...] = (
                ("gpu", Value("WB", pack, replica=gradients.replica)),
                ("gpu", Value("K", pack)),
            )
            return Effects(reads=(("gpu", gradients), *cells, *agreed), writes=cells)
        uses = self.tied_uses(pack)
        gradients_of = tuple(("host", Value("G", b)) for b in uses)
        weights = tuple(("host", Value("WB", b)) for b in uses)
        return Effects(reads=(*gradients_of, *agreed), writes=(*weights, ("host", Value("K", pack))))

    def tied_uses(self, pack: int) -> tuple[int, ...]:
        """The backward packs whose gradients an update sums and whose weights it writes: itself, and those
        that use a parameter it owns. The first layer of a tie owns it."""
        uses = {pack}
        for tie in self.profile.ties:
            if self._backward_pack_of[tie.layers[0]] == pack:
                uses |= {self._backward_pack_of[layer] for layer in tie.layers}
        return tuple(sorted(uses))

    # ---- what a program must hold

    def host_bytes(self) -> int:
        """Host memory of the run: weights, gradients, states, two batches, stashes and offloaded activations."""
        last, minibatch = self.costs.num_layers - 1, self.configuration.minibatch
        total = (
            self.costs.weight_bytes(0, last)
            + self.costs.gradient_bytes(0, last)
            + self.costs.state_bytes(0, last)
        )
        microbatches = len(self.forward_samples)
        for i, t in enumerate(self.costs.tensors):
            copies = 2 if t.src == BATCH else int(i in self._stashed)
            total += copies * (t.bytes_per_sample * minibatch + t.bytes_fixed * microbatches)
        for b, pack in enumerate(self.backward_packs):
            total += sum(
                self.nbytes(Value("AF", b, i))
                for i, choice in enumerate(pack.activations)
                if choice == "offload"
            )
        return total


_AGREED = Value("agreed", 0)
