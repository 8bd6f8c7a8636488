"""A training loop of one's own over a schedule.

    with Session("schedule.json", model, optimizer, loss, example=batch) as session:
        for batch in session.batches(loader):
            result = session.step(batch)
            scheduler.step()
            print(result.loss)
        print(session.evaluate(held_out))

`model` and `optimizer` are plain PyTorch: parameter groups and learning-rate schedulers work as ever, and the model's
parameters are the live weights in host memory, to be read between steps and not to be written. A step returns when its
compute is over and its loss known; updates and swaps go on behind it, and `state_dict` waits for them. One process a
device: under torchrun each runs the same script, and rank 0's batches are the ones that count.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from executor.checkpoint import Checkpoints
from executor.hollow import give_memory, is_hollow
from executor.launch import PATIENCE, check_world
from executor.load import as_planned, check_clipping, check_optimizer, cut, cut_for_evaluation
from executor.machine import check_machine
from executor.models import DTYPES
from executor.optimizer import recipe_of
from executor.options import DeviceKind, RunOptions
from executor.prepare import check_checkpoints, prepare, resumed_options
from executor.weights import layer_state
from executor.workload import flat
from planner.contract import store as files
from planner.contract.errors import HarmonyError
from planner.contract.schedule import Schedule

CALLS = ("step", "evaluate", "batches", "wait", "state_dict", "close")

ENDLESS = sys.maxsize
"""Steps of a session: nobody knows how many will come."""


@dataclass(frozen=True)
class StepResult:
    """What a step did. gradient_norm: before clipping; None where nothing is clipped. learning_rates: of each group. is_skipped: a float16
    gradient overflowed, and nothing was stepped."""

    step: int
    loss: float
    gradient_norm: float | None
    learning_rates: tuple[float, ...]
    seconds: float
    is_skipped: bool = False


class Session:
    """Training by a schedule, a step at a time."""

    def __init__(
        self,
        schedule: Schedule | Path | str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[nn.Module, Any], Tensor],
        example: Any,
        *,
        device: DeviceKind = "virtual",
        seed: int = 0,
        clip_norm: float | None = None,
        checkpoint: Path | str | None = None,
        checkpoint_every: int = 0,
        resume: bool = False,
        paced: bool = False,
        metered: bool = True,
        count: Callable[[Any], float] | None = None,
        weights: Path | str | None = None,
    ) -> None:
        """loss(model, batch): the mean over the samples of the batch it is given; it calls the model. count(batch): how
        many items that mean is over where it is not over samples, as tokens that count. example: a batch
        of the planned minibatch, its tensors with samples first. seed: of dropout. checkpoint, checkpoint_every,
        resume: as `harmony-executor run` has them; `done` then says how many steps need no batch any more. paced, metered:
        of virtual devices, as RunOptions has them. weights: a file or folder to start from, as `--weights-in` has it; a
        model built under `executor.hollow.hollow()` or on the meta device then takes no memory beside the store's, and
        ranks other than 0 may build it so in any case.

        Raises HarmonyError where schedule, model, optimizer or machine do not belong together.
        """
        plan = schedule if isinstance(schedule, Schedule) else files.load_schedule(schedule)
        self._plan, self._model, self._optimizer = plan, model, optimizer
        self._example = example
        self._batch: Any = None
        self._steps = self._iterations = self._num_calls = 0
        self._is_open = True
        names = {id(p): name for name, p in model.named_parameters()}
        if device not in ("virtual", "cuda"):
            raise HarmonyError(f"device {device!r}: use virtual or cuda")
        if checkpoint_every < 0 or (checkpoint_every and checkpoint is None):
            raise HarmonyError(
                f"checkpoint_every {checkpoint_every}: 0 or more, and with a checkpoint folder to write to"
            )
        checkpoints = None if checkpoint is None else Checkpoints(Path(checkpoint), checkpoint_every)
        options = RunOptions(
            plan.profile.model.spec or plan.profile.model.name,
            device=device,
            steps=ENDLESS,
            optimizer=type(optimizer).__name__.lower(),
            settings={},
            seed=seed,
            paced=paced,
            metered=metered,
            clip_norm=clip_norm,
            given=recipe_of(optimizer, names),
            checkpoints=checkpoints,
            weights=None if weights is None else Path(weights),
        )
        check_optimizer(plan, options)
        options = as_planned(plan, options)
        check_clipping(plan, options)
        check_machine(plan, device)
        check_checkpoints(options, resume)
        options, resumed = resumed_options(options) if resume else (options, None)
        # steps that an earlier run has done do not end this one
        self._options = replace(options, steps=ENDLESS)
        self._owns_group = _join_group(plan)
        self._rank = dist.get_rank() % plan.configuration.num_devices
        try:
            self._open(loss, count, resumed)
        except BaseException:
            self._leave_group()
            raise

    def _open(
        self,
        loss: Callable[[nn.Module, Any], Tensor],
        count: Callable[[Any], float] | None,
        resumed: Path | None,
    ) -> None:
        model, options = self._model, self._options
        if options.device == "virtual":
            torch.set_num_threads(1)
        dtype = DTYPES.get(options.dtype)
        if dtype is not None:
            model.to(dtype)
        model.train()
        is_hollow = self._give_memory(resumed)
        workload = flat(model, self._draw, loss, dtype=dtype, count=count)
        loaded = cut(workload, options, check=self.is_first and not is_hollow)
        self._ready = prepare(self._plan, options, *loaded, resumed=resumed)
        if self.done:
            self._note_stepped()
        self._ready.rank.start(self._ready.save if self._ready.writer is not None else None)

    def _give_memory(self, resumed: Path | None) -> bool:
        """Whether the model has no weights yet, which is all right where they come from elsewhere."""
        if not is_hollow(self._model):
            return False
        hollow = [name for name, p in self._model.named_parameters() if p.is_meta]
        if self.is_first and self._options.weights is None and resumed is None:
            raise HarmonyError(
                f"parameter {hollow[0] if hollow else 'of the model'} has no values; say weights=FILE, or build the model with them"
            )
        give_memory(self._model)
        return True

    @property
    def done(self) -> int:
        """Steps that are done, those of the resumed run among them."""
        return self._options.done + self._steps

    @property
    def is_first(self) -> bool:
        """Whether this process is the first of its server, the one whose batches count."""
        return self._rank == 0

    @property
    def is_main(self) -> bool:
        """Whether this process is the first of all servers, the one that may print."""
        return dist.get_rank() == 0

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's batches on the first rank of each server, None as often on the others; their loaders are not touched.

        It ends with the shortest loader of all servers.
        """
        batches = iter(loader) if self.is_first else iter(())
        store = self._ready.store
        while True:
            batch = next(batches, _NOTHING)
            if self.is_first:
                # no server goes on where another has no batch left
                have = self._ready.servers.sum(float(batch is not _NOTHING))
                store.has_batch = have == self._ready.servers.num_servers
            self._meet("batches")
            has_batch = store.has_batch
            # nobody overwrites that before all have read it
            self._meet("batches")
            if not has_batch:
                return
            yield batch if self.is_first else None

    def step(self, batch: Any = None) -> StepResult:
        """Train on one minibatch; ranks other than 0 may give None.

        Raises HarmonyError (a batch of another shape), torch.OutOfMemoryError, or Aborted where another rank failed.
        """
        self._check_open()
        self._say("step")
        started, rank, k = time.perf_counter(), self._ready.rank, self._iterations
        settings = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]
        rank.set_group_settings(k, settings)
        try:
            loss = self._run("step", batch)
            norm = rank.wait_for_norm(k)
        except BaseException as error:
            self._fail(error)
            raise
        self._steps += 1
        self._note_stepped()
        rates = tuple(float(group["lr"]) for group in settings)
        is_skipped = self._options.is_scaled and bool(self._ready.store.scaling[2])
        return StepResult(self.done, loss, norm, rates, time.perf_counter() - started, is_skipped)

    def evaluate(self, batch: Any = None) -> float:
        """The loss of one minibatch with the model in evaluation mode; nothing changes. Ranks other than 0 may give None.

        It runs by the same schedule, in the same memory, behind the steps so far. For the mean over a loader:

            losses = [session.evaluate(batch) for batch in session.batches(held_out)]

        Raises what `step` does, and HarmonyError where the model in evaluation mode is cut in another way.
        """
        self._check_open()
        try:
            if self._ready.rank.evaluation is None:
                # the cut is checked with the weights as they are
                self.wait()
                self._ready.rank.evaluation = cut_for_evaluation(
                    self._ready.workload, self._ready.decomposition, self._options, check=self.is_first
                )
                self._meet("evaluate")
            self._say("evaluate")
            return self._run("evaluate", batch)
        except BaseException as error:
            self._fail(error)
            raise

    def _run(self, what: str, batch: Any) -> float:
        """One iteration, and its loss."""
        rank, k = self._ready.rank, self._iterations
        if self.is_first:
            if batch is None:
                raise HarmonyError(f"{what}() without a batch: on rank 0 it needs one")
            rank.iterations.feed(k, self._read(batch), is_evaluation=what == "evaluate")
        asked = "evaluate" if rank.iterations.is_evaluation(k) else "step"
        if what != asked:
            raise HarmonyError(
                f"rank {self._rank} is in {what} where rank 0 is in {asked}: every rank has to make the same calls of the "
                f"session in the same order"
            )
        with _own_random_numbers():
            rank.compute(k)
        self._iterations += 1
        return rank.wait_for_loss(k)

    def wait(self) -> None:
        """Until everything that the steps so far began is over, on all devices. Every rank has to ask."""
        self._check_open()
        self._meet("wait")
        if self._iterations:
            self._ready.rank.poll(lambda: self._ready.rank.is_over(self._iterations - 1))

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the weights and buffers by the model's own names. Every rank has to ask."""
        self.wait()
        self._ready.rank.residents.write_back()
        self._meet("state_dict")
        found: dict[str, Tensor] = {}
        for layer in range(len(self._ready.decomposition.layers)):
            found |= layer_state(self._ready.store, self._ready.decomposition, self._ready.state, layer)
        self._meet("state_dict")
        return {name: found[name] for name in self._model.state_dict() if name in found}

    def close(self) -> None:
        """Wait for all that has begun, save the last checkpoint, and leave the weights in the model."""
        if not self._is_open:
            return
        try:
            self._meet("close")
            self.wait()
            rank = self._ready.rank
            rank.close(self._iterations)
            rank.finish()
            self._meet("close")
            self._save_last()
            self._meet("close")
        except BaseException as error:
            self._fail(error)
            raise
        self._is_open = False
        self._leave()

    def _save_last(self) -> None:
        """What the last step left, unless that is saved already."""
        checkpoints = self._options.checkpoints
        if self._ready.writer is not None and checkpoints is not None and self._steps:
            newest = checkpoints.newest()
            if newest is None or newest.name != checkpoints.name(self.done):
                self._ready.save(self.done)

    def _fail(self, error: BaseException) -> None:
        self._is_open = False
        self._ready.rank.fail(error)
        self._leave()

    def _leave(self) -> None:
        if self._ready.writer is not None:
            self._ready.writer.close()
        self._leave_group()

    def _leave_group(self) -> None:
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def _say(self, what: str) -> None:
        """Tell the other ranks what this one does next."""
        self._num_calls += 1
        self._ready.store.calls[self._rank] = self._num_calls * len(CALLS) + CALLS.index(what)

    def _meet(self, what: str) -> None:
        """Wait for all ranks. Raises HarmonyError where one does something else in its place: it would wait for ever."""
        self._say(what)
        number = self._num_calls

        def are_here() -> bool:
            others = [divmod(word, len(CALLS)) for word in self._ready.store.calls]
            for other, (at, call) in enumerate(others):
                if at == number and CALLS[call] != what:
                    raise HarmonyError(
                        f"rank {self._rank} is in {what} where rank {other} is in {CALLS[call]}: every rank has to make "
                        f"the same calls of the session in the same order"
                    )
            return all(at >= number for at, _ in others)

        self._ready.rank.poll(are_here)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._is_open:
            self._fail(error)

    def _note_stepped(self) -> None:
        """Schedulers look whether the optimizer they belong to has stepped."""
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def _check_open(self) -> None:
        if not self._is_open:
            raise HarmonyError("the session is closed; open another one to go on")

    def _read(self, batch: Any) -> dict[str, Tensor]:
        """A batch as flat tensors, checked against the example."""
        self._batch = batch
        try:
            return self._ready.workload.draw(torch.Generator(), self._plan.configuration.minibatch)
        finally:
            self._batch = None

    def _draw(self, generator: torch.Generator, num_samples: int) -> Any:
        """The step's batch; before the first step samples of the example, as many as asked for."""
        if self._batch is not None:
            return self._batch
        minibatch = self._plan.configuration.minibatch
        chosen = torch.arange(num_samples) % minibatch

        def some(leaf: Any) -> Any:
            is_batched = isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == minibatch
            return leaf[chosen] if is_batched else leaf

        return pytree.tree_map(some, self._example)


_NOTHING = object()


def _join_group(plan: Schedule) -> bool:
    """One process a device, whose group this one joins; whether it made the group. Raises HarmonyError."""
    check_world(plan)
    if dist.is_initialized():
        return False
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=PATIENCE)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return True


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """The schedule seeds each layer; the caller's generator is left as it was."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
