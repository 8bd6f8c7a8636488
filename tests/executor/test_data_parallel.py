"""Replicas: shares of a gradient meet at its owner, are added in one order, and train as one device would."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from executor.handlers import check_reductions
from executor.launch import run_schedule
from executor.options import RunOptions
from executor.p2p import Peers
from executor.profile import measure_profile
from executor.reference import PlainResult, train
from executor.servers import Servers
from executor.streams import CHUNK, VirtualDevice
from planner.contract.errors import HarmonyError
from planner.contract.fixed import Fixed
from planner.contract.hardware import DeviceSpec, Hardware, Host, HostLink
from planner.contract.precedence import Graph
from planner.contract.rules import Rules
from planner.contract.schedule import Schedule, parse_program
from planner.contract.trace import Trace
from planner.search import plan_fixed

LR = 1e-3
STEPS = 3
GPT = "hf:gpt2?n_layer=3&n_embd=32&n_head=2&vocab_size=64&n_positions=16&seq=8&tie_word_embeddings={}"
MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(3), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def draw(generator, num_samples):
    return {name: torch.randn(num_samples, 3, 8, generator=generator) for name in "xy"}


def loss(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def make():
    return Net().train(), draw, loss
"""


@pytest.fixture(scope="module")
def norms(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("replicas") / "norms.py"
    path.write_text(MODEL)
    return f"{path}:make"


def make_schedule(spec: str, fixed: Fixed, devices: int, minibatch: int = 8) -> Schedule:
    torch.set_num_threads(1)
    options = make_options(spec)
    profile = measure_profile(
        options.load(), spec, [1, 2], optimizer="adamw", settings=options.settings, repeats=2
    )
    hardware = Hardware(
        tuple(DeviceSpec(f"v{d}", 64 << 20) for d in range(devices)),
        (HostLink(1e9, 1e9),),
        Host(1 << 34, 1 << 34),
        peer_bytes_per_second=1e9,
    )
    schedule = plan_fixed(profile, hardware, fixed, minibatch=minibatch).schedule
    assert schedule is not None
    return schedule


def make_options(spec: str) -> RunOptions:
    return RunOptions(spec, steps=STEPS, settings={"lr": LR}, paced=False)


def trained(schedule: Schedule, spec: str, folder: Path) -> tuple[Trace, PlainResult, dict[str, Tensor]]:
    options = make_options(spec)
    trace = run_schedule(schedule, options, weights_out=folder / "weights.safetensors")
    plain = train(options.load(), options, schedule.configuration.microbatches.backward)
    return trace, plain, load_file(folder / "weights.safetensors")


def check_equals(trace: Trace, plain: PlainResult, weights: dict[str, Tensor]) -> None:
    """Up to the order of additions: a replica's gradients are summed before they meet the other's."""
    assert trace.losses == pytest.approx(plain.losses, rel=1e-6)
    assert len(set(trace.losses)) == STEPS
    for name, parameter in plain.parameters.items():
        assert (weights[name] - parameter).abs().max() <= 0.01 * LR * STEPS, name


@pytest.mark.parametrize("tied", ["false", "true"])
def test_two_replicas_of_gpt2_train_as_plain_pytorch(tied: str, tmp_path: Path) -> None:
    """Each device owns every other pack; under ties the gradients of an owner's other use come from the other owner."""
    spec = GPT.format(tied)
    schedule = make_schedule(spec, Fixed(2, 2, (2, 2), (2, 2, 2), replicas=2), 2)
    assert schedule.configuration.mode == "dp"
    trace, plain, weights = trained(schedule, spec, tmp_path)
    check_equals(trace, plain, weights)
    for device, predicted in zip(trace.devices, schedule.predicted.devices, strict=True):
        assert device.peak_bytes <= predicted.peak_bytes
        assert device.swap_out_bytes == predicted.swap_out_bytes


def test_replicas_keep_and_offload_activations_and_have_the_first_ones_statistics(
    norms: str, tmp_path: Path
) -> None:
    """An uneven minibatch: shares of the loss are shares of samples, not of replicas."""
    fixed = Fixed(2, 2, (2, 2), (2, 2, 2), replicas=2, reflected=True, kept=(1, 1, 0), offloaded=(1, 0, 0))
    schedule = make_schedule(norms, fixed, 2, minibatch=7)
    trace, plain, weights = trained(schedule, norms, tmp_path)
    check_equals(trace, plain, weights)
    (first, end), *_ = schedule.configuration.replicas
    mine = [s for s in schedule.configuration.microbatches.forward if first <= s[0] < end]
    assert 0 < len(mine) < len(schedule.configuration.microbatches.forward)
    counts = {int(weights[name]) for name in weights if name.endswith("num_batches_tracked")}
    assert counts == {STEPS * len(mine)}
    assert any(span.action.startswith("out:AF") and span.nbytes > 0 for span in trace.spans)


@pytest.mark.slow
def test_two_replicas_of_a_pipeline_train_as_plain_pytorch(norms: str, tmp_path: Path) -> None:
    """Hybrid: sends within a replica and reductions between replicas at a time."""
    schedule = make_schedule(norms, Fixed(2, 2, (2, 2), (2, 2, 2), replicas=2), 4)
    assert schedule.configuration.mode == "hybrid"
    check_equals(*trained(schedule, norms, tmp_path))


class _Wire:
    """Stands in for torch.distributed: what each source sends arrives in chunks."""

    def __init__(self, shares: dict[int, Tensor]) -> None:
        self.bytes = {source: share.view(torch.uint8) for source, share in shares.items()}
        self.position = dict.fromkeys(shares, 0)

    def recv(self, target: Tensor, src: int, group: object) -> None:
        start = self.position[src]
        target.copy_(self.bytes[src][start : start + len(target)])
        self.position[src] = start + len(target)


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_shares_are_added_in_replica_order_whoever_owns_the_sum(
    owner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1e8 + 1 - 1e8 is 0 or 1 by the order: three replicas must not get another sum than any other owner's."""
    numel = CHUNK // 4 + 128
    shares = {r: torch.full((numel,), v) for r, v in enumerate((1e8, 1.0, -1e8))}
    expected = shares[0] + shares[1] + shares[2]
    monkeypatch.setattr(dist, "new_group", lambda ranks, backend: tuple(ranks))
    monkeypatch.setattr(dist, "recv", _Wire(shares).recv)
    hardware = Hardware((DeviceSpec("v0", 1 << 20),), (HostLink(1e9, 1e9),), Host(1 << 30, 1 << 30))
    device = VirtualDevice(0, hardware, 1, None, paced=False)
    peers = Peers([], [(r, owner) for r in shares if r != owner], "gloo", Servers())
    own = shares[owner].clone()
    peers.add_shares(own, device, owner, [0, 1, 2])
    assert torch.equal(own, expected)


def test_replicas_that_reduce_in_different_orders_are_refused(norms: str) -> None:
    schedule = make_schedule(norms, Fixed(2, 2, (2, 2), (2, 2, 2), replicas=2), 2)
    streams = []
    for stream in schedule.programs.train:
        actions = list(stream.actions)
        if stream.stream == "reduce":
            _, second, third = (i for i, text in enumerate(actions) if text.startswith("reduce:"))
            later = actions[third:] if stream.device == 1 else []
            actions = actions[second:third] + later + actions[:second] + actions[third + len(later) :]
        streams.append(msgspec.structs.replace(stream, actions=tuple(actions)))
    options = make_options(norms)
    profile = measure_profile(
        options.load(), norms, [2], optimizer="adamw", settings=options.settings, repeats=2
    )
    rules = Rules(profile, schedule.configuration)
    check_reductions(Graph(parse_program(schedule.programs.train), rules))
    with pytest.raises(
        HarmonyError, match=r"gpu1/reduce: pack 0 is number 1, on gpu0/reduce pack 2 is"
    ) as caught:
        check_reductions(Graph(parse_program(tuple(streams)), rules))
    assert "\n" not in str(caught.value)
