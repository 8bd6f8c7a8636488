"""A loop of the user's over a schedule is the same loop in plain PyTorch, bit for bit, on one device and on several."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from executor import reference
from executor.decompose import decompose
from executor.iterations import draw_batch
from executor.options import RunOptions
from executor.profile import measure_profile
from executor.randomness import seed_layer, seeding_hooks
from executor.session import Session, StepResult
from executor.workload import flat
from planner.contract import store
from planner.contract.errors import HarmonyError
from planner.contract.fixed import Fixed
from planner.contract.profile import Profile
from planner.contract.schedule import Schedule
from planner.search import plan_fixed
from tests.executor import looped
from tests.executor.looped import MINIBATCH, loss, make_batches, make_model, make_optimizer, make_scheduler
from tests.executor.test_any_model import each_layer_alone, make_hardware

STEPS = 4
CLIP = 0.5
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def profile() -> Profile:
    workload = flat(make_model().train(), looped.draw, loss)
    return measure_profile(
        workload, f"{looped.__file__}:make", [1, 2], optimizer="adamw", settings={"lr": 1e-2}, repeats=2
    )


def make_schedule(profile: Profile, devices: int = 1, clip: bool = True, resident: bool = False) -> Schedule:
    num_layers = len(profile.layers)
    packs = (1,) * num_layers
    fixed = Fixed(2, 2, packs[1:], packs, reflected=resident, resident=(resident,) * num_layers)
    schedule = plan_fixed(profile, make_hardware(devices), fixed, minibatch=MINIBATCH, clip=clip).schedule
    assert schedule is not None
    return schedule


class Plain:
    """The same loop without a schedule: microbatches of two samples, dropout seeded as replay seeds it."""

    def __init__(self, steps: int, clip: bool = True) -> None:
        model = make_model().train()
        optimizer = make_optimizer(model)
        scheduler = make_scheduler(optimizer)
        entries = decompose(
            flat(model, looped.draw, loss), looped.draw(torch.Generator(), 2), check=False
        ).entries
        torch.set_num_threads(1)
        self.losses, self.norms, self.evaluations = [], [], []
        for step, batch in enumerate(make_batches(steps)):
            parts = []
            for first in range(0, MINIBATCH, 2):
                microbatch = {name: tensor[first : first + 2] for name, tensor in batch.items()}
                with seeding_hooks(model, entries, partial(_seed, step, first)):
                    part = loss(model, microbatch)
                torch.autograd.backward([part], [torch.full_like(part, 2 / MINIBATCH)])
                parts.append(part.item() * (2 / MINIBATCH))
            if clip:
                self.norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            self.losses.append(sum(parts))
            self.evaluations.append(self._evaluate(model))
        self.weights = model.state_dict()

    def _evaluate(self, model: nn.Module) -> float:
        batch, losses = make_batches(1)[0], []
        model.eval()
        with torch.no_grad():
            for first in range(0, MINIBATCH, 2):
                microbatch = {name: tensor[first : first + 2] for name, tensor in batch.items()}
                losses.append(loss(model, microbatch).item() * (2 / MINIBATCH))
        model.train()
        return sum(losses)


def _seed(step: int, first: int, layer: int) -> None:
    seed_layer(0, step, layer, first)


def open_session(profile: Profile, **options: Any) -> Session:
    model = make_model()
    return Session(make_schedule(profile), model, make_optimizer(model), loss, make_batches(1)[0], **options)


def train(session: Session, scheduler: Any, batches: list[dict[str, Tensor]]) -> list[StepResult]:
    results = []
    for batch in session.batches(batches):
        results.append(session.step(batch))
        scheduler.step()
    return results


@pytest.mark.parametrize("resident", [False, True])
def test_a_loop_of_one_s_own_equals_plain_pytorch(profile: Profile, resident: bool) -> None:
    """Parameter groups, a scheduler, clipping; weights in host memory or resident on the device."""
    clip = not resident
    model = make_model()
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer)
    plain = Plain(STEPS, clip)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    schedule = make_schedule(profile, 1, clip, resident)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Session(
            schedule, model, optimizer, loss, make_batches(1)[0], clip_norm=CLIP if clip else None
        ) as session:
            results = train(session, scheduler, make_batches(STEPS))
            assert session.evaluate(make_batches(1)[0]) == plain.evaluations[-1]
            assert session.evaluate(make_batches(1)[0]) == plain.evaluations[-1], "nothing has changed"
            state = session.state_dict()
            assert session.done == STEPS
    assert [result.loss for result in results] == plain.losses
    assert [result.gradient_norm for result in results] == (plain.norms if clip else [None] * STEPS)
    assert [result.learning_rates for result in results] == [
        (1e-2 * 0.5**k, 3e-2 * 0.5**k) for k in range(STEPS)
    ]
    assert state.keys() == plain.weights.keys()
    for name, tensor in plain.weights.items():
        assert torch.equal(state[name], tensor), name
        assert torch.equal(model.state_dict()[name], tensor), f"{name}: the model's own are live"
    assert torch.equal(torch.rand(1), expected), "the caller's random numbers are the caller's"


def test_two_processes_run_the_same_script(profile: Profile, tmp_path: Path) -> None:
    store.save(make_schedule(profile, 2), tmp_path / "s.json")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(looped.__file__), str(tmp_path / "s.json"), str(STEPS), str(tmp_path / "out.json")]
    subprocess.run(
        [*command, *script], check=True, cwd=ROOT, env=_environment(), capture_output=True, timeout=120
    )
    found = json.loads((tmp_path / "out.json").read_text())
    plain = Plain(STEPS)
    assert found["losses"] == plain.losses
    assert found["norms"] == plain.norms
    assert found["evaluations"] == plain.evaluations
    for name, tensor in plain.weights.items():
        assert torch.equal(torch.tensor(found["weights"][name]), tensor), name


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_a_session_resumes(profile: Profile, tmp_path: Path) -> None:
    schedule, batches = make_schedule(profile), make_batches(STEPS)
    plain = Plain(STEPS)
    losses: list[float] = []
    for until in (1, 3, STEPS):
        model = make_model()
        optimizer = make_optimizer(model)
        with Session(
            schedule,
            model,
            optimizer,
            loss,
            batches[0],
            clip_norm=CLIP,
            checkpoint=tmp_path / "c",
            checkpoint_every=1,
            resume=True,
        ) as session:
            scheduler = make_scheduler(optimizer)
            for _ in range(session.done):
                scheduler.step()
            losses += [r.loss for r in train(session, scheduler, batches[session.done : until])]
            assert session.done == until
    assert losses == plain.losses
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in plain.weights.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("a batch of another shape", "batch x is .*, the model was cut and profiled for"),
        ("a batch with a part missing", "batch has the parts"),
    ],
)
def test_a_batch_that_does_not_fit_ends_the_session(profile: Profile, change: str, message: str) -> None:
    model = make_model()
    (batch,) = make_batches(1)
    wrong = {"x": batch["x"]} if "missing" in change else {"x": batch["x"][:, :4], "y": batch["y"]}
    session = Session(make_schedule(profile), model, make_optimizer(model), loss, batch, clip_norm=CLIP)
    with pytest.raises(HarmonyError, match=message), session:
        session.step(wrong)
    with pytest.raises(HarmonyError, match="the session is closed"):
        session.step(batch)
    session.close()
    assert not torch.distributed.is_initialized(), "nothing is left behind"
    assert not [t for t in threading.enumerate() if t.name.startswith("gpu0/")]


class Mine(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: torch.optim.SGD(model.parameters(), lr=1.0), "planned for optimizer 'adamw'"),
        (lambda model: torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]), "that is not the model's"),
        (lambda model: torch.optim.AdamW(model.head.parameters()), "no group of the optimizer has it"),
        (lambda model: Mine(model.parameters()), "torch.optim has no such optimizer|only torch.optim's own"),
    ],
)
def test_an_optimizer_that_does_not_fit_is_refused(profile: Profile, make: Any, message: str) -> None:
    model = make_model()
    with pytest.raises(HarmonyError, match=message):
        Session(make_schedule(profile), model, make(model), loss, make_batches(1)[0], clip_norm=CLIP)
    assert not torch.distributed.is_initialized()


def test_as_many_processes_as_devices(profile: Profile) -> None:
    model = make_model()
    with pytest.raises(HarmonyError, match="uses 2 devices, there are 1 processes; use torchrun"):
        Session(
            make_schedule(profile, 2), model, make_optimizer(model), loss, make_batches(1)[0], clip_norm=CLIP
        )


@pytest.mark.parametrize("clip_norm", [0, -1.0, float("nan"), float("inf"), "1"])
def test_a_norm_that_is_none_is_refused(profile: Profile, clip_norm: Any) -> None:
    with pytest.raises(HarmonyError, match="must be a number, finite and above 0"):
        open_session(profile, clip_norm=clip_norm)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "tpu"}, "device 'tpu': use virtual or cuda"),
        ({"checkpoint_every": 1}, "with a checkpoint folder to write to"),
        ({"checkpoint_every": -1, "checkpoint": "c"}, "0 or more"),
        ({"resume": True}, "from which folder"),
    ],
)
def test_requests_that_make_no_sense_are_refused(profile: Profile, given: Any, message: str) -> None:
    with pytest.raises(HarmonyError, match=message):
        open_session(profile, clip_norm=CLIP, **given)


def test_a_step_needs_a_batch(profile: Profile) -> None:
    session = open_session(profile, clip_norm=CLIP)
    with pytest.raises(HarmonyError, match=r"step\(\) without a batch"), session:
        session.step()


def test_tied_weights_are_one_parameter() -> None:
    spec = "hf:gpt2?n_layer=2&n_embd=16&n_head=2&vocab_size=40&seq=8"
    options = RunOptions(spec, settings={"lr": 1e-2}, paced=False)
    schedule = each_layer_alone(options, 1)
    workload = options.load()
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=1e-2, fused=True)
    batches = [draw_batch(workload, 0, k, MINIBATCH) for k in range(3)]
    with Session(schedule, workload.model, optimizer, workload.loss, batches[0]) as session:
        losses = [session.step(batch).loss for batch in batches]
        state = session.state_dict()
    plain = reference.train(
        options.load(), replace(options, steps=3), schedule.configuration.microbatches.backward
    )
    assert losses == pytest.approx(plain.losses, rel=1e-6)
    assert torch.equal(state["lm_head.weight"], state["transformer.wte.weight"])


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "executor", "run", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=120, check=False
    )


def test_command_line_runs_a_script(profile: Profile, tmp_path: Path) -> None:
    """`harmony-executor run script.py` is what torchrun is, one process a device."""
    plain, file, output = Plain(STEPS), tmp_path / "schedule.json", tmp_path / "result.json"
    store.save(make_schedule(profile, 2), file)
    script = Path(looped.__file__)
    done = run_script(str(script), "--devices", "2", "--", str(file), str(STEPS), str(output))
    assert done.returncode == 0, done.stderr
    assert json.loads(output.read_text())["losses"] == pytest.approx(plain.losses, rel=1e-5)


def test_script_that_fails_or_is_asked_for_what_it_says_itself(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)")
    done = run_script(str(script))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("rank 0 ended with exit status 3; what it printed says why")
    for arguments, message in (
        ((str(script), "--steps", "3"), f"--steps: not with {script}, whose own loop says it"),
        ((str(tmp_path / "none.py"),), f"{tmp_path / 'none.py'}: no such file"),
        (("plan.json", "more"), "more: only with a script; a schedule says it itself"),
        (("plan.json", "--devices", "2"), "--devices: only with a script; a schedule says it itself"),
    ):
        done = run_script(*arguments)
        assert (done.returncode, done.stderr.splitlines()[-1].removeprefix("harmony-executor: ")) == (
            2,
            message,
        )


MISMATCHES = {
    "one stops early": "if rank == 1 and session.done == 2: break",
    "one asks alone": "if rank == 1 and session.done == 2: session.state_dict()",
    "one closes": "if rank == 1 and session.done == 2: session.close()",
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_ranks_that_do_not_do_the_same_are_told_and_end(case: str, profile: Profile, tmp_path: Path) -> None:
    store.save(make_schedule(profile, 2), tmp_path / "s.json")
    (tmp_path / "script.py").write_text(
        f"""
import os
from executor.iterations import draw_batch
from executor.session import Session
from tests.executor.looped import *

rank = int(os.environ["RANK"])
model = make_model()
batches = make_batches(6)
with Session("s.json", model, make_optimizer(model), loss, batches[0], clip_norm=0.5) as session:
    for batch in session.batches(batches):
        session.step(batch)
        {MISMATCHES[case]}
"""
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "script.py",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=_environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert "every rank has to make the same calls of the session in the same order" in done.stderr


@pytest.mark.slow
def test_a_thousand_steps_leave_memory_and_files_as_they_were(profile: Profile, tmp_path: Path) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    batches = make_batches(10)
    process, resident = psutil.Process(), []
    files = process.num_fds()
    with Session(make_schedule(profile), model, optimizer, loss, batches[0], clip_norm=CLIP) as session:
        allocated = []
        for k in range(1000):
            session.step(batches[k % 10])
            allocated.append(session._ready.rank.memory.pool.reserved_bytes)
            if k % 100 == 99:
                gc.collect()
                resident.append(process.memory_info().rss)
        assert len(set(allocated[10:])) == 1, "device memory is reserved once"
    assert all(later <= 1.01 * resident[0] for later in resident), [b - a for a, b in pairwise(resident)]
    assert process.num_fds() <= files + 1
