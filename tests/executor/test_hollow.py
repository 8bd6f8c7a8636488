"""Models without memory: cut as with it, filled layer by layer, whole in memory once (cases 26 and 34)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from executor.hollow import give_memory, hollow, is_hollow
from executor.load import load, load_structure
from executor.options import RunOptions
from executor.session import Session
from planner.contract.errors import HarmonyError
from planner.contract.profile import model_hash
from tests.executor import looped, networks
from tests.executor.looped import loss, make_model, make_optimizer
from tests.executor.schedules import make_schedule
from tests.executor.test_any_model import SPECS

MIXTURE = f"{Path(networks.__file__)}:mixture"


@pytest.mark.parametrize("name", SPECS)
def test_model_without_memory_has_the_same_layers(name: str) -> None:
    options = RunOptions(SPECS[name])
    whole, structured = load(options, check=False), load_structure(options)
    assert model_hash(whole[2]) == model_hash(structured[2])
    assert whole[1].structure_hash == structured[1].structure_hash
    assert whole[1].aliases == structured[1].aliases
    for buffer, tensor in whole[1].buffers.items():
        if buffer.endswith(("._u", "._v")):  # made of weights, which are not there: the store has them
            continue
        assert torch.equal(structured[1].buffers[buffer], tensor), buffer


def test_parameters_have_no_memory_and_stay_tied() -> None:
    shared = nn.Parameter(torch.ones(3, 3))

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
            self.first.weight = shared
            self.last.weight = shared
            self.last.bias.requires_grad_(False)
            self.register_buffer("scale", torch.full((2,), 4.0))

    with hollow():
        model = Tied()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert is_hollow(model)
    assert give_memory(model) == {"first.weight", "first.bias", "last.weight", "last.bias"}
    assert model.first.weight is model.last.weight
    assert not model.last.bias.requires_grad
    assert model.get_buffer("scale").tolist() == [4.0, 4.0]
    assert not is_hollow(model)
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_model_on_the_meta_device_needs_its_computed_buffers() -> None:
    config = AutoConfig.for_model("llama", num_hidden_layers=1, hidden_size=16, num_attention_heads=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with pytest.raises(
        HarmonyError, match=r"buffer .*inv_freq is on the meta device .* build the model under"
    ):
        give_memory(model)


def test_fake_model_gets_memory() -> None:
    with torch._subclasses.FakeTensorMode():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert "0.weight" in give_memory(model)
    assert type(model[0].weight.data) is Tensor
    assert model(torch.ones(2, 4)).shape == (2, 4)


def test_session_of_a_model_without_memory_starts_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file(make_model().state_dict(), str(file))
    options = RunOptions(f"{looped.__file__}:make", settings={"lr": 1e-2})
    schedule = make_schedule(options, 1)
    batch = looped.draw(torch.Generator().manual_seed(1), 8)
    found = []
    for is_whole in (True, False):
        if is_whole:
            model = make_model()
        else:
            with hollow():
                model = make_model()
        weights = None if is_whole else file
        with Session(schedule, model, make_optimizer(model), loss, batch, weights=weights) as session:
            session.step(batch)
            found.append(session.state_dict())
    assert all(torch.equal(found[1][name], tensor) for name, tensor in found[0].items())
    with hollow():
        model = make_model()
    with pytest.raises(HarmonyError, match=r"parameter blocks.0.0.weight has no values; say weights=FILE"):
        Session(schedule, model, make_optimizer(model), loss, batch)


SCRIPT = """
import json, resource, sys, threading, time
from pathlib import Path

import psutil
import torch

from executor.decompose import Decomposition
from executor.load import load, load_structure
from executor.options import RunOptions

def peak(load):
    process, most, is_over = psutil.Process(), [0], threading.Event()
    before = process.memory_info().rss
    def watch():
        while not is_over.is_set():
            most[0] = max(most[0], process.memory_info().rss - before)
            time.sleep(0.002)
    thread = threading.Thread(target=watch)
    thread.start()
    loaded = load()
    is_over.set()
    thread.join()
    return most[0], sum(p.nbytes for p in loaded[1].parameters.values())

options = RunOptions(sys.argv[1])
load_structure(RunOptions(sys.argv[2]))
print(json.dumps([peak(lambda: load_structure(options)), peak(lambda: load(options, check=False))]))
"""


def test_only_one_process_has_the_weights() -> None:
    """A model of 400 MB is cut in a process that takes a small part of that."""
    small = "hf:gpt2?n_layer=2&n_embd=16&n_head=2&vocab_size=40&seq=8"
    large = "hf:gpt2?n_layer=8&n_embd=1024&n_head=2&vocab_size=400&seq=8"
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, large, small], capture_output=True, text=True, check=True, timeout=300
    )
    (hollow_peak, nbytes), (whole_peak, _) = json.loads(run.stdout.splitlines()[-1])
    assert nbytes > 400e6
    assert whole_peak > nbytes
    assert hollow_peak < 0.2 * nbytes
