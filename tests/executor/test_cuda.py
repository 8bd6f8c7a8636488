"""The cuda kind on a real GPU; and what of it can be seen without one."""

from __future__ import annotations

import pytest
import torch

from executor.decompose import decompose
from executor.decompose.move import move_code
from executor.launch import run_schedule
from executor.models import load_workload
from executor.options import RunOptions
from executor.profile import measure_profile
from executor.reference import train
from planner.contract.hardware import DeviceSpec, Hardware, Host, HostLink
from planner.search import plan

MODEL = "hf:gpt2?n_layer=2&n_embd=32&n_head=2&vocab_size=256&seq=16&resid_pdrop=0&embd_pdrop=0&attn_pdrop=0"
SETTINGS = {"lr": 1e-3}


def test_moved_layers_make_their_tensors_on_the_other_device() -> None:
    """GPT-2 makes positions and masks inside; a layer left on the CPU would mix devices."""
    workload = load_workload(MODEL, seed=0)
    decomposition = decompose(workload, workload.draw(torch.Generator().manual_seed(0), 2), check=False)
    meta = torch.device("meta")
    move_code(decomposition, meta)
    first = decomposition.layers[0]
    out = first(
        [decomposition.parameters[name].detach().to(meta) for name in first.parameters],
        [decomposition.buffers[name].to(meta) for name in first.buffers],
        [torch.zeros(3, 16, dtype=torch.int64, device=meta)],
        3,
    )
    assert [tensor.device for tensor in out] == [meta] * len(out)


@pytest.mark.gpu
def test_schedule_on_a_gpu_trains_as_plain_pytorch_on_the_cpu() -> None:
    workload = load_workload(MODEL, seed=0)
    profile = measure_profile(
        workload, MODEL, [1, 2], optimizer="adamw", settings=SETTINGS, repeats=3, device="cuda"
    )
    hardware = Hardware(
        devices=(DeviceSpec("gpu0", 4 << 30),),
        host_links=(HostLink(2e10, 2e10),),
        host=Host(4 << 30, 4 << 30),
    )
    schedule = plan(profile, hardware, minibatch=8, mode="pp", activations="recompute").schedule
    assert schedule is not None
    options = RunOptions(MODEL, device="cuda", steps=3, settings=SETTINGS)
    measured = run_schedule(schedule, options)
    plain = train(load_workload(MODEL, seed=0), options, schedule.configuration.microbatches.backward)
    assert measured.losses == pytest.approx(plain.losses, rel=1e-4)
    assert measured.devices[0].swap_in_bytes == schedule.predicted.devices[0].swap_in_bytes
