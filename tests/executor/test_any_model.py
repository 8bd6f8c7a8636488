"""Models of every kind: profiled, planned, run with each layer swapped by itself, equal to plain PyTorch.

On one device bit for bit, but for parameters that several layers use (their gradients are added in another order)
and for an LSTM; on two devices as close as that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from executor.decompose import Decomposition
from executor.decompose.buffers import kept
from executor.host import HostStore, create_memory, plan_store
from executor.iterations import EVALUATION_STREAM, draw_batch
from executor.launch import run_schedule
from executor.load import cut_for_evaluation, load
from executor.models import load_workload
from executor.options import RunOptions
from executor.profile import measure_profile
from executor.reference import PlainResult, train
from executor.replay import Rank
from executor.structure import layer_places
from executor.weights import fill
from executor.workload import Workload
from planner.contract.fixed import Fixed
from planner.contract.hardware import DeviceSpec, Hardware, Host, HostLink
from planner.contract.precedence import Graph
from planner.contract.profile import Profile
from planner.contract.rules import Rules
from planner.contract.schedule import Samples, Schedule, parse_program
from planner.contract.trace import Evaluation
from planner.contract.verify import verify
from planner.search import plan_fixed

HERE = Path(__file__).parent
LR = 1e-3
STEPS = 3
MINIBATCH = 4
TRANSFORMER = "num_hidden_layers=2&hidden_size=16&intermediate_size=24&num_attention_heads=2"
TEXT = f"{TRANSFORMER}&vocab_size=40&seq=8"
GPT2 = "hf:gpt2?n_layer=2&n_embd=16&n_head=2&vocab_size=40&seq=8"
# sdpa under export differs from sdpa outside by rounding; see design notes in decompose
LLAMA = f"{TEXT}&num_key_value_heads=2&attn_implementation=eager"

SPECS = {
    "gpt2": GPT2,
    "bert for classification": f"hf:bert?{TEXT}&task=classification&num_labels=3",
    "bert for pre-training": f"hf:bert?{TEXT}&task=pretraining",
    "llama": f"hf:llama?{LLAMA}",
    "t5": "hf:t5?num_layers=2&d_model=16&d_kv=8&d_ff=24&num_heads=2&vocab_size=40&seq=8",
    "vit": f"hf:vit?{TRANSFORMER}&image_size=8&patch_size=4&num_labels=4",
    "resnet": "hf:resnet?embedding_size=8&hidden_sizes=8,16&depths=2,2&layer_type=basic&image=32&num_labels=4",
    "unet": f"{HERE}/networks.py:unet",
    "sequential": f"{HERE}/networks.py:sequential",
    "lstm": f"{HERE}/networks.py:lstm",
    "mixtral": f"hf:mixtral?{LLAMA}&num_local_experts=4",
    "mixtral by data": f"hf:mixtral?{LLAMA}&num_local_experts=4&experts_implementation=eager",
    "albert, shared weights": f"hf:albert?{TEXT}&embedding_size=8",
    "gpt2 with lora": f"{GPT2}&lora=4",
    "under autocast": f"{HERE}/networks.py:autocast",
    "experts by data": f"{HERE}/networks.py:mixture",
    "states in layers": f"{HERE}/networks.py:damped",
}


def make_options(spec: str) -> RunOptions:
    return RunOptions(spec, steps=STEPS, settings={"lr": LR, "weight_decay": 0.1}, paced=False)


def make_hardware(devices: int) -> Hardware:
    return Hardware(
        tuple(DeviceSpec(f"v{d}", 64 << 20) for d in range(devices)),
        (HostLink(1e9, 1e9),),
        Host(1 << 34, 1 << 34),
        peer_bytes_per_second=1e9,
    )


def profiled(options: RunOptions) -> Profile:
    torch.set_num_threads(1)
    return measure_profile(
        options.load(),
        options.model,
        [1, 2],
        optimizer=options.optimizer,
        settings=options.settings,
        repeats=2,
    )


def each_layer_alone(options: RunOptions, devices: int) -> Schedule:
    """A verified schedule of packs of one layer."""
    profile = profiled(options)
    is_by_data = options.model in (SPECS["mixtral by data"], SPECS["experts by data"])
    assert profile.model.cut_by == ("tape" if is_by_data else "export")
    num_layers = len(profile.layers)
    assert num_layers >= 3
    fixed = Fixed(2, 2, (1,) * (num_layers - 1), (1,) * num_layers)
    schedule = plan_fixed(profile, make_hardware(devices), fixed, minibatch=MINIBATCH).schedule
    assert schedule is not None
    verify(schedule, profile, schedule.hardware)
    return schedule


def run_here(
    schedule: Schedule, options: RunOptions, evaluations: list[Evaluation] | None = None
) -> tuple[list[float], dict[str, Tensor], Decomposition]:
    """Losses, weights and buffers after a run on one device, in this process; evaluations: takes what these said."""
    workload, decomposition, profile = load(options, check=False)
    rules = Rules(profile, schedule.configuration)
    graph = Graph(parse_program(schedule.programs.train), rules)
    places = layer_places(decomposition, options.recipe)
    layout = plan_store(rules, decomposition, len(graph.actions))
    store = HostStore(create_memory(layout.total), layout, rules, decomposition, places)
    fill(store, decomposition)
    losses: list[float] = []
    rank = Rank(0, graph, schedule.hardware, workload, decomposition, places, store, options)
    if options.evaluate_every:
        rank.evaluation = cut_for_evaluation(workload, decomposition, options, check=True)
    note = None if evaluations is None else evaluations.append
    rank.run(lambda iteration, loss, seconds: losses.append(loss), on_evaluation=note)
    weights: dict[str, Tensor] = {}
    for i in range(len(decomposition.layers)):
        weights = store.weights(i) | store.buffers(i) | weights
    return losses, weights, decomposition


def check_equals(
    losses: Any, weights: dict[str, Tensor], plain: PlainResult, inexact: Callable[[str], bool], rel: float
) -> None:
    """inexact: parameters whose gradients are added in another order."""
    assert losses == (pytest.approx(plain.losses, rel=rel) if rel else list(plain.losses))
    assert len(set(losses)) == STEPS, "every step must change the loss"
    for name, parameter in plain.parameters.items():
        if name not in weights:  # an alias of another
            continue
        if inexact(name):
            assert (weights[name] - parameter).abs().max() <= 0.01 * LR * STEPS, name
        else:
            assert torch.equal(weights[name], parameter), name


@pytest.mark.parametrize("name", SPECS)
def test_model_trains_bit_for_bit_with_each_layer_swapped_by_itself(name: str) -> None:
    """Evaluations between the steps change nothing, and say what the plain model says in evaluation mode."""
    options = replace(make_options(SPECS[name]), evaluate_every=1, evaluate_batches=2)
    schedule = each_layer_alone(options, 1)
    evaluations: list[Evaluation] = []
    losses, weights, decomposition = run_here(schedule, options, evaluations)
    workload = options.load()
    before = {n: p.detach().clone() for n, p in workload.model.named_parameters()}
    plain = train(workload, options, schedule.configuration.microbatches.backward)
    trained = [n for n, p in workload.model.named_parameters() if p.requires_grad]
    # no token may choose an expert
    assert all(not torch.equal(plain.parameters[n], before[n]) or "experts" in n for n in trained)
    # an exported LSTM is its matrix products and gates; outside it is one fused operation that rounds differently
    is_inexact = name == "lstm" or any(decomposition.parameters[n].requires_grad for n in decomposition.ties)
    check_equals(losses, weights, plain, lambda n: is_inexact, 1e-6 if is_inexact else 0)
    for buffer_name, buffer in workload.model.named_buffers():
        if buffer_name in weights:
            torch.testing.assert_close(weights[buffer_name], buffer, rtol=1e-6 if is_inexact else 0, atol=0)
    expected = plain_evaluation(workload, options, schedule.configuration.microbatches.backward)
    assert [e.iterations for e in evaluations] == list(range(1, STEPS + 1))
    assert evaluations[-1].loss == (pytest.approx(expected, rel=1e-6) if is_inexact else expected)


def plain_evaluation(workload: Workload, options: RunOptions, microbatches: tuple[Samples, ...]) -> float:
    """The mean loss over the batches of an evaluation, microbatch by microbatch."""
    losses = []
    workload.model.eval()
    for number in range(options.evaluate_batches):
        batch = draw_batch(workload, options.seed, number, MINIBATCH, EVALUATION_STREAM)
        shares = workload.shares(batch, microbatches)
        parts = []
        for samples in microbatches:
            # an evaluation leaves buffers as they were
            with torch.no_grad(), kept(workload.model):
                parts.append(workload.loss(workload.model, workload.samples(batch, *samples)).item())
        losses.append(sum(part * share for part, share in zip(parts, shares, strict=True)))
    return sum(losses) / len(losses)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_model_trains_bit_for_bit_in_bfloat16(name: str) -> None:
    options = replace(make_options(SPECS[name]), dtype="bfloat16")
    schedule = each_layer_alone(options, 1)
    losses, weights, decomposition = run_here(schedule, options)
    plain = train(options.load(), options, schedule.configuration.microbatches.backward)
    is_inexact = name == "lstm" or any(decomposition.parameters[n].requires_grad for n in decomposition.ties)
    if not is_inexact:
        assert losses == list(plain.losses)
        assert all(torch.equal(weights[n], p) for n, p in plain.parameters.items() if n in weights)
    assert losses == pytest.approx(plain.losses, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_model_trains_as_plain_pytorch_on_two_devices(name: str, tmp_path: Path) -> None:
    options = replace(make_options(SPECS[name]), evaluate_every=2)
    schedule = each_layer_alone(options, 2)
    assert schedule.configuration.mode == "pp"
    trace = run_schedule(schedule, options, weights_out=tmp_path / "weights.safetensors")
    plain = train(options.load(), options, schedule.configuration.microbatches.backward)
    weights = load_file(tmp_path / "weights.safetensors")
    check_equals(trace.losses, weights, plain, lambda n: True, 1e-5)


def test_t5_s_encoder_output_is_used_by_every_block_of_the_decoder() -> None:
    _, decomposition, _ = load(make_options(SPECS["t5"]), check=False)
    names = [layer.name for layer in decomposition.layers]
    encoded = names.index("encoder.final_layer_norm")
    decoder = [i for i, n in enumerate(names) if n.startswith("decoder.block.")]
    consumers = {b.consumers for key, b in decomposition.boundaries.items() if key[0] == encoded}
    assert tuple(decoder) in consumers


def test_lora_trains_its_adapters_only() -> None:
    """Case 9: what is frozen is swapped in, and has no gradient and no state."""
    _, decomposition, profile = load(make_options(SPECS["gpt2 with lora"]), check=False)
    trained = [n for n, p in decomposition.parameters.items() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    frozen = [layer for layer in profile.layers if not layer.gradient_bytes]
    assert frozen
    assert all(layer.optimizer_state_bytes == 0 for layer in frozen)


def test_shared_weights_are_a_layer_for_each_use_with_one_owner() -> None:
    _, decomposition, profile = load(make_options(SPECS["albert, shared weights"]), check=False)
    uses = [i for i, layer in enumerate(decomposition.layers) if "albert_layer_groups" in layer.name]
    assert len(uses) == 2
    first, second = (profile.layers[i] for i in uses)
    assert first.weight_bytes == second.weight_bytes > 0
    assert first.optimizer_state_bytes > 0
    assert second.optimizer_state_bytes == 0


def test_tasks_of_a_model_type_are_named_where_another_is_asked_for() -> None:
    with pytest.raises(
        Exception, match=r"there is no task 'image' for it; tasks: causal, masked, pretraining"
    ):
        load_workload(f"hf:bert?{TEXT}&task=image", seed=0)
