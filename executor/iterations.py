"""What each iteration is: which step of training, or an evaluation; with which batch; and whether it is saved.

    rank 0    batch k ─► half k % 2 of the store, once iteration k - 2 is over everywhere; then num_batches = k + 1
    others    wait for num_batches > k before they look at half k % 2
    saver     what a step left, once it is over everywhere, while the next one runs

Training goes on behind an evaluation as behind any iteration: it takes its turn in the streams' order.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from executor.options import RunOptions
from executor.randomness import mixed_seed
from executor.workload import Workload
from planner.contract.trace import Evaluation

if TYPE_CHECKING:
    from executor.replay import Rank

Save = Callable[[int, Callable[[int], None]], None]
"""save(steps, on_layer): write a checkpoint; on_layer(layer) once this layer and all later ones are on disk."""

BATCH_STREAM = 1 << 20
"""A layer number that no model has: the batches' own place among the seeds."""
EVALUATION_STREAM = BATCH_STREAM + 1
"""That of the batches of evaluations."""
TRAINING = -1
WAIT_SECONDS = 0.1


def sequence(options: RunOptions) -> list[int]:
    """What follows what in a run: TRAINING, or the number of an evaluation's batch."""
    found = []
    for step in range(options.done + 1, options.done + options.steps + 1):
        found.append(TRAINING)
        if options.evaluate_every and step % options.evaluate_every == 0:
            found += range(options.evaluate_batches)
    return found


def count(options: RunOptions) -> int:
    """How many iterations a run has."""
    every, ended = options.evaluate_every, options.done + options.steps
    return options.steps + (
        (ended // every - options.done // every) * options.evaluate_batches if every else 0
    )


def last_of_training(options: RunOptions, number: int) -> Container[int]:
    """The last so many iterations that train."""
    if not options.evaluate_every:
        return range(options.steps - number, options.steps)
    return frozenset([k for k, what in enumerate(sequence(options)) if what == TRAINING][-number:])


class Iterations:
    """The iterations of one rank's run. On rank 0: evaluations holds the results so far."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._store = rank.store
        self._num_steps = 0
        self._to_save: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self.evaluations: list[Evaluation] = []

    # ---- what an iteration is

    def wait_for_batch(self, iteration: int) -> None:
        """Until the batch of an iteration is in the store."""
        self._rank.poll(lambda: self._store.num_batches > iteration)

    def step(self, iteration: int) -> int:
        """How many steps of training this run has made before an iteration; asked while it goes on."""
        self.wait_for_batch(iteration)
        return self._store.steps[iteration % 2]

    def is_evaluation(self, iteration: int) -> bool:
        """Whether an iteration only evaluates; asked while it goes on."""
        self.wait_for_batch(iteration)
        return bool(self._store.evaluations[iteration % 2])

    # ---- on rank 0: batches

    def feed(self, iteration: int, batch: dict[str, torch.Tensor], *, is_evaluation: bool = False) -> None:
        """Put a batch into its half of the store, once the iteration that has it is over everywhere."""
        rank, store, half = self._rank, self._store, iteration % 2
        if iteration >= 2:
            rank.poll(lambda: rank.is_over(iteration - 2))
        minibatch = rank.rules.configuration.minibatch
        for name in store.layout.batch[0]:
            store.batch(iteration, name, 0, minibatch).copy_(batch[name])
        shares = rank.workload.shares(batch, rank.rules.backward_samples, rank.servers.sum)
        store.shares[half] = torch.tensor(shares, dtype=torch.float64)
        store.steps[half], store.evaluations[half] = self._num_steps, int(is_evaluation)
        store.num_batches = iteration + 1
        if not is_evaluation:
            self._num_steps += 1
            if self._num_steps < self._rank.options.steps and self._is_due(self._num_steps):
                self._to_save.put((self._num_steps, iteration))

    def draw(
        self,
        on_iteration: Callable[[int, float, float], None] | None,
        on_evaluation: Callable[[Evaluation], None] | None,
        held_out: Workload | None,
    ) -> None:
        """Draw and feed the batches of a whole run, and report what is over. held_out: what evaluations draw from."""
        rank, options = self._rank, self._rank.options
        configuration, plan = rank.rules.configuration, sequence(options)
        last, step = time.perf_counter(), options.done
        found: list[tuple[float, float]] = []
        for k in range(len(plan) + 2):
            ended = k - 2
            if ended >= 0:
                rank.poll(lambda ended=ended: rank.is_over(ended))  # type: ignore[misc]
                now = time.perf_counter()
                loss, seconds, last = rank.servers.sum(self.loss(ended)), now - last, now
                if plan[ended] == TRAINING:
                    step += 1
                    if on_iteration is not None:
                        on_iteration(step - 1, loss, seconds)
                else:
                    found.append((loss, seconds))
                    if plan[ended] == options.evaluate_batches - 1:
                        self.evaluations.append(_evaluation(step, found))
                        if on_evaluation is not None:
                            on_evaluation(self.evaluations[-1])
                        found = []
            if k < len(plan):
                is_evaluation = plan[k] != TRAINING
                if is_evaluation:
                    source, number, stream = held_out or rank.workload, plan[k], EVALUATION_STREAM
                else:
                    source, number, stream = rank.workload, options.done + self._num_steps, BATCH_STREAM
                batch = draw_batch(source, options.seed, number, configuration.samples, stream)
                own = source.samples(batch, rank.first_sample, rank.first_sample + configuration.minibatch)
                self.feed(k, own, is_evaluation=is_evaluation)
        self._to_save.put(None)

    def loss(self, iteration: int) -> float:
        """The minibatch's loss of one of the last two iterations; of several servers, this one's part of it."""
        half = iteration % 2
        return minibatch_loss(self._store.losses[half].tolist(), self._store.shares[half].tolist())

    # ---- on rank 0: checkpoints

    def save(self, save: Save) -> None:
        """Save what a step left once it is over everywhere, the last layer first, while the next one runs."""
        rank = self._rank
        while True:
            try:
                due = self._to_save.get(timeout=WAIT_SECONDS)
            except queue.Empty:
                rank.check()
                continue
            if due is None:
                return
            steps, iteration = due
            rank.poll(lambda iteration=iteration: rank.is_over(iteration))  # type: ignore[misc]
            save(self._rank.options.done + steps, partial(self._note_saved, steps))

    def _note_saved(self, steps: int, layer: int) -> None:
        self._store.num_saved = self._saved(steps, layer)

    def wait_until_saved(self, layer: int, iteration: int) -> None:
        """Until this layer and all later ones, as the step before left them, are in the checkpoint that is due."""
        steps = self.step(iteration)
        if self._is_due(steps):
            self._rank.poll(lambda: self._store.num_saved >= self._saved(steps, layer))

    def _is_due(self, steps: int) -> bool:
        # the first server saves
        checkpoints = None if self._rank.servers.server else self._rank.options.checkpoints
        return checkpoints is not None and steps > 0 and checkpoints.is_due(self._rank.options.done + steps)

    def _saved(self, steps: int, layer: int) -> int:
        num_layers = len(self._rank.decomposition.layers)
        return steps * num_layers + num_layers - layer


def _evaluation(steps: int, found: Sequence[tuple[float, float]]) -> Evaluation:
    losses, seconds = zip(*found, strict=True)
    return Evaluation(steps, sum(losses) / len(losses), len(losses), sum(seconds))


def minibatch_loss(losses: Sequence[float], shares: Sequence[float]) -> float:
    """The loss of the minibatch from its microbatches'. One that counts nothing is a mean over nothing."""
    return sum(loss * share for loss, share in zip(losses, shares, strict=True) if share)


def draw_batch(
    workload: Workload, seed: int, number: int, minibatch: int, stream: int = BATCH_STREAM
) -> dict[str, torch.Tensor]:
    """The batch of a step of training, or of those of EVALUATION_STREAM, whatever was drawn before."""
    return workload.draw(torch.Generator().manual_seed(mixed_seed(seed, number, stream, 0)), minibatch)
