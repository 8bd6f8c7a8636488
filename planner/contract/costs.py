"""Seconds and bytes of any pack of layers at any microbatch size, from prefix sums.

In: a profile. Out: what a pack costs; the memory rules are design.md's:
forward   sum of W + the largest layer's (peak - W) + cut tensors alive
backward  sum of (W + dW + saved) + the largest layer's (peak - W - dW - saved);
          where saved is unknown, the sum of the peaks minus the inner inputs.
What a pack exchanges with others (inputs, outputs, their gradients) and its weights and gradients are values
of their own, so a `workspace` here is what comes on top of them.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from math import ceil

from planner.contract.cuts import Tensor, entering, leaving, nbytes, tensors_of
from planner.contract.profile import BATCH, Profile, bracket


class RangeMax:
    """Largest of values[first..last] in O(1) after O(n log n): a sparse table."""

    def __init__(self, values: list[int]) -> None:
        self._rows = [values]
        span = 1
        while 2 * span <= len(values):
            row = self._rows[-1]
            self._rows.append([max(row[i], row[i + span]) for i in range(len(row) - span)])
            span *= 2

    def __call__(self, first: int, last: int) -> int:
        level = (last - first + 1).bit_length() - 1
        row = self._rows[level]
        return max(row[first], row[last - (1 << level) + 1])


def _prefix(values: list[int]) -> list[int]:
    return list(accumulate(values, initial=0))


class _AtSize:
    """One microbatch size: prefix sums of seconds, per-layer bytes beyond weights and gradients."""

    def __init__(self, profile: Profile, size: int) -> None:
        forward_seconds, backward_seconds = [], []
        self.forward_rest: list[int] = []  # peak - W - B
        self.saved: list[int] = []
        self.backward_rest: list[
            int
        ] = []  # peak - W - B - dW - saved, or the whole rest where saved is unknown
        for i, layer in enumerate(profile.layers):
            held = layer.weight_bytes + layer.buffer_bytes
            lo, hi, share = bracket(layer.forward, size, f"$.layers[{i}].forward")
            f_lo, f_hi = layer.forward[lo], layer.forward[hi]
            forward_seconds.append(f_lo.seconds + share * (f_hi.seconds - f_lo.seconds))
            peak = ceil(f_lo.peak_bytes + share * (f_hi.peak_bytes - f_lo.peak_bytes))
            self.forward_rest.append(max(0, peak - held))
            lo, hi, share = bracket(layer.backward, size, f"$.layers[{i}].backward")
            b_lo, b_hi = layer.backward[lo], layer.backward[hi]
            backward_seconds.append(b_lo.seconds + share * (b_hi.seconds - b_lo.seconds))
            peak = ceil(b_lo.peak_bytes + share * (b_hi.peak_bytes - b_lo.peak_bytes))
            saved = 0
            if b_lo.saved_bytes is not None and b_hi.saved_bytes is not None:
                saved = ceil(b_lo.saved_bytes + share * (b_hi.saved_bytes - b_lo.saved_bytes))
            self.saved.append(saved)
            self.backward_rest.append(max(0, peak - held - layer.gradient_bytes - saved))
        self.forward_seconds = list(accumulate(forward_seconds, initial=0.0))
        self.backward_seconds = list(accumulate(backward_seconds, initial=0.0))
        self.largest_forward_rest = RangeMax(self.forward_rest)
        self.largest_backward_rest = RangeMax(self.backward_rest)
        self.saved_sum = _prefix(self.saved)
        self.backward_rest_sum = _prefix(self.backward_rest)


class Costs:
    """What any pack [first, last] of a profile's layers costs. Sizes in bytes, times in profiled seconds."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.num_layers = len(profile.layers)
        self.tensors = tensors_of(profile)
        self._batch = tuple(t for t in self.tensors if t.src == BATCH)
        self._made = tuple(t for t in self.tensors if t.src != BATCH)
        self.is_chain = [(t.src, t.consumers) for t in self._made] == [
            (i, (i + 1,)) for i in range(self.num_layers - 1)
        ]
        self.saved_is_known = all(
            c.saved_bytes is not None for layer in profile.layers for c in layer.backward
        )
        layers = profile.layers
        self._weights = _prefix([layer.weight_bytes + layer.buffer_bytes for layer in layers])
        self._gradients = _prefix([layer.gradient_bytes for layer in layers])
        self._states = _prefix([layer.optimizer_state_bytes for layer in layers])
        self._update = list(accumulate((layer.update.host_seconds for layer in layers), initial=0.0))
        # a step reads gradients among other things: where norms were not measured, they take no longer
        self._norm = sum(
            layer.update.host_seconds if layer.update.norm_seconds is None else layer.update.norm_seconds
            for layer in layers
        )
        self._mutated = _prefix([layer.buffer_bytes if layer.batch_coupled else 0 for layer in layers])
        self.at = lru_cache(maxsize=None)(lambda size: _AtSize(profile, size))
        self.entering = lru_cache(maxsize=None)(self._entering)
        self.leaving = lru_cache(maxsize=None)(self._leaving)
        self.forward_workspace = lru_cache(maxsize=None)(self._forward_workspace)
        self.backward_workspace = lru_cache(maxsize=None)(self._backward_workspace)
        self.kept_bytes = lru_cache(maxsize=None)(self._kept_bytes)
        self.kept_workspace = lru_cache(maxsize=None)(self._kept_workspace)
        self._crossing_sum = lru_cache(maxsize=None)(self._crossing_sum_at)
        self._inner_sum = lru_cache(maxsize=None)(self._inner_sum_at)

    def weight_bytes(self, first: int, last: int) -> int:
        """Weights and buffers."""
        return self._weights[last + 1] - self._weights[first]

    def gradient_bytes(self, first: int, last: int) -> int:
        return self._gradients[last + 1] - self._gradients[first]

    def state_bytes(self, first: int, last: int) -> int:
        return self._states[last + 1] - self._states[first]

    def mutated_buffer_bytes(self, first: int, last: int) -> int:
        """Buffers that a forward pass changes (BatchNorm's statistics)."""
        return self._mutated[last + 1] - self._mutated[first]

    def forward_seconds(self, first: int, last: int, size: int) -> float:
        prefix = self.at(size).forward_seconds
        return prefix[last + 1] - prefix[first]

    def backward_seconds(self, first: int, last: int, size: int) -> float:
        """Backward alone, without the forward that precedes it."""
        prefix = self.at(size).backward_seconds
        return prefix[last + 1] - prefix[first]

    def host_update_seconds(self, first: int, last: int) -> float:
        return self._update[last + 1] - self._update[first]

    def norm_seconds(self) -> float:
        """The norm over the gradients of all layers, on the host."""
        return self._norm

    def device_update_seconds(self, first: int, last: int) -> float | None:
        """None where a layer's was not measured."""
        seconds = [layer.update.device_seconds for layer in self.profile.layers[first : last + 1]]
        return None if any(s is None for s in seconds) else sum(s for s in seconds if s is not None)

    def _entering(self, first: int, last: int) -> tuple[Tensor, ...]:
        return entering(self._batch + self._made_in(first - 1, last), first, last)

    def _leaving(self, first: int, last: int) -> tuple[Tensor, ...]:
        return leaving(self._made_in(last, last), first, last)

    def _made_in(self, first: int, last: int) -> tuple[Tensor, ...]:
        """Tensors made in [first, last]; all of them where the DAG is no chain."""
        return self._made[max(first, 0) : last + 1] if self.is_chain else self._made

    def _forward_workspace(self, first: int, last: int, size: int) -> int:
        """Bytes on top of weights, the pack's inputs and its outputs while it runs forward."""
        at = self.at(size)
        if self.is_chain:
            ends = [first, last] if first < last else [first]
            inner = at.largest_forward_rest(first + 1, last - 1) if last - first > 1 else 0
            return max(inner, *(at.forward_rest[i] - self._exchanged(i, first, last, size, 1) for i in ends))
        return max(
            0,
            *(
                at.forward_rest[i]
                - self._exchanged(i, first, last, size, 1)
                + nbytes(
                    (
                        t
                        for t in self._made
                        if first <= t.src < i < t.consumers[-1] <= last and i not in t.consumers
                    ),
                    size,
                )
                for i in range(first, last + 1)
            ),
        )

    def _backward_workspace(self, first: int, last: int, size: int) -> int:
        """Bytes on top of weights, gradients, the pack's inputs, its gradients in and out, in backward."""
        at = self.at(size)
        if not self.saved_is_known:
            total = at.backward_rest_sum[last + 1] - at.backward_rest_sum[first]
            if self.is_chain:
                sums = self._inner_sum(size)
                inner = sums[last] - sums[first]
            else:
                made = (t for i in range(first, last) for t in self._made_by(i))
                inner = nbytes((t for t in made for c in t.consumers if c <= last), size)
            return max(
                0, total - inner - sum(self._exchanged(i, first, last, size, 2) for i in {first, last})
            )
        saved = at.saved_sum[last + 1] - at.saved_sum[first]
        if self.is_chain:
            ends = [first, last] if first < last else [first]
            inner = at.largest_backward_rest(first + 1, last - 1) if last - first > 1 else 0
            return saved + max(
                inner, 0, *(at.backward_rest[i] - self._exchanged(i, first, last, size, 2) for i in ends)
            )
        return saved + max(
            0,
            *(
                at.backward_rest[i]
                - self._exchanged(i, first, last, size, 2)
                + nbytes(
                    (
                        t
                        for t in self._made
                        if t.differentiable and first <= t.src < i < t.consumers[-1] <= last
                    ),
                    size,
                )
                for i in range(first, last + 1)
            ),
        )

    def _kept_bytes(self, first: int, last: int, size: int) -> int:
        """What a forward leaves for a backward without recompute: saved activations and the pack's input.

        Where saved bytes were not measured, at most what a layer's backward peak has beyond its input and the
        gradient of its output.
        """
        at = self.at(size)
        given = nbytes((t for t in self.entering(first, last) if t.src != BATCH), size)
        if self.saved_is_known:
            return given + at.saved_sum[last + 1] - at.saved_sum[first]
        total = at.backward_rest_sum[last + 1] - at.backward_rest_sum[first]
        # inputs from inside the pack and the gradients of all outputs, layer by layer
        crossing = self._crossing_sum(size)
        inner = crossing[last] - crossing[first]
        outputs = crossing[last + 1] - crossing[first]
        return max(0, given + total - inner - outputs)

    def _crossing_sum_at(self, size: int) -> list[int]:
        """Running sums, layer by layer, of the bytes that each makes for others."""
        made = [0] * self.num_layers
        for tensor in self._made:
            if tensor.differentiable:
                made[tensor.src] += nbytes((tensor,), size)
        return _prefix(made)

    def _inner_sum_at(self, size: int) -> list[int]:
        """Running sums of a chain's tensors by the layer that makes each."""
        return _prefix([nbytes(self._made_by(i), size) for i in range(self.num_layers)])

    def _kept_workspace(self, first: int, last: int, size: int) -> int:
        """Bytes on top of weights, gradients, what was kept and gradients in and out, in a backward without recompute."""
        at = self.at(size)
        if self.saved_is_known:
            saved = at.saved_sum[last + 1] - at.saved_sum[first]
            return self.backward_workspace(first, last, size) - saved
        return at.largest_backward_rest(first, last)

    def _made_by(self, layer: int) -> tuple[Tensor, ...]:
        return tuple(t for t in self._made_in(layer, layer) if t.src == layer)

    def _exchanged(self, layer: int, first: int, last: int, size: int, direction: int) -> int:
        """What a layer's peak holds that the pack exchanges with others, and that is counted there.

        Forward (1): inputs from outside and outputs for outside. Backward (2): inputs from outside and their
        gradients, gradients of outputs for outside.
        """
        given = [t for t in self.entering(first, last) if layer in t.consumers]
        handed = [t for t in self._made_by(layer) if t.consumers[-1] > last]
        if direction == 1:
            return nbytes(given, size) + nbytes(handed, size)
        gradients = [t for t in given if t.differentiable and t.src != BATCH]
        return (
            nbytes(given, size)
            + nbytes(gradients, size)
            + nbytes((t for t in handed if t.differentiable), size)
        )
