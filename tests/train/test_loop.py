"""The training loop asks a GPU for numbers at logged steps only, and its first update waits for nothing else."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import vit_scale
from vit_scale.data.loading.loaders import Batch
from vit_scale.data.mixing import Mixing
from vit_scale.data.normalize import Normalize
from vit_scale.data.progressive import Progressive
from vit_scale.recipe import load_recipe
from vit_scale.strategies.ema import Ema
from vit_scale.strategies.shards import Replicated
from vit_scale.train import meter as meters
from vit_scale.train.loop import Meter, update
from vit_scale.train.optim.optimizer import build_optimizer
from vit_scale.train.state import TrainState


def to_fake_gpu(module: nn.Module) -> None:
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                    table[name] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty


def test_update_on_a_gpu_never_asks_it_for_a_number(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have a device and no content: to read one, as a host synchronisation would, is an error.

    Without a GPU there is no backward pass on one, so gradients are set by hand.
    """
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    config = load_recipe(str(root / "recipes/debug.yaml"), [])
    model = vit_scale.create_model("vit_mu", img_size=8, patch_size=2, in_chans=1, drop_path=0.3, dropout=0.1)
    mixing = Mixing(config.augment, num_classes=10, global_batch=32, seed=0, patch_size=model.patch_size)
    normalize = Normalize((0.5,), (0.5,))

    def backward(loss: torch.Tensor) -> None:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)

    with FakeTensorMode(allow_non_fake_inputs=True):
        to_fake_gpu(model)
        to_fake_gpu(normalize)
        optimizer = build_optimizer(model, config.optim)
        shards = Replicated(model, optimizer, rank=0, world=1)
        state = TrainState(model, model, optimizer, shards, Ema(shards, 0.9, warmup=True))
        state.bad_steps, state.bad_in_a_row = (torch.zeros((), device="cuda") for _ in range(2))
        accelerator = SimpleNamespace(
            scaler=None,
            distributed_type=SimpleNamespace(value="NO"),
            process_index=0,
            backward=backward,
            accumulate=lambda model: contextlib.nullcontext(),
        )
        run = SimpleNamespace(
            state=state,
            config=config,
            accelerator=accelerator,
            device=torch.device("cuda"),
            normalize=normalize,
            image_buffer=None,
            mixing=mixing,
            progressive=Progressive((), 3),
            flops_of=lambda step: 0.0,
            plan=SimpleNamespace(global_batch=32),
            lr=SimpleNamespace(at=lambda step: 1e-3),
        )
        meter = Meter(run)  # type: ignore[arg-type]
        for step in range(3):
            state.step = step
            images, labels = torch.zeros(16, 1, 8, 8, dtype=torch.uint8), torch.zeros(16, dtype=torch.int64)
            batches = [Batch(images, labels, np.arange(16) + start) for start in (0, 16)]  # type: ignore[arg-type]
            meter.add(*update(run, batches))  # type: ignore[arg-type]
    assert meter.steps == 3
    assert meter.norm is not None
    assert meter.norm.device.type == "cuda"


FIRST_UPDATE = """
import os, sys
from vit_scale.recipe import load_recipe
from vit_scale.train.run_recipe import run_recipe
from vit_scale.train import loop

def stop(run, batch):
    assert run.state.step == 1
    print("loaded:", *(name for name in ("timm", "wandb", "torch._dynamo") if name in sys.modules), flush=True)
    os._exit(0)

assert callable(loop.tell_of_start)
loop.tell_of_start = stop
run_recipe(load_recipe("recipes/debug.yaml", sys.argv[1:]), "recipes/debug.yaml")
"""


def test_the_first_update_waits_for_neither_timm_nor_trackers_nor_the_compiler(root: Path, tmp_path: Path) -> None:
    options = ["track.wandb=offline", "data.workers=0", f"run.dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-c", FIRST_UPDATE, *options],
        cwd=root, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_what_is_done_while_the_meter_pauses_takes_no_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 25.0])
    monkeypatch.setattr(meters, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    meter = Meter(SimpleNamespace(), since=5.0)  # type: ignore[arg-type]
    with meter.paused():
        pass
    assert meter.since == 20.0
