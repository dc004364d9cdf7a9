"""The code paths of a GPU, executed on tensors without values, and the order of copies and waits (docs/gpus.md)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))  # as for tests/workers
from gpu_stand_in import CUDA, GpuStandIn, HostWaits, LateCopies, gpu_stand_in  # type: ignore[import-not-found]

from vit_scale import gpu
from vit_scale.checkpoints.host_copies import HostCopies
from vit_scale.cost.meta import twin
from vit_scale.data.batch import Batch, DataInfo
from vit_scale.data.loading.batches import WorkerBatch
from vit_scale.recipe import load_recipe
from vit_scale.schedule import make_plan
from vit_scale.strategies.ema import Ema
from vit_scale.strategies.guarded_step import guarded_step
from vit_scale.strategies.replicated import PlainEngine
from vit_scale.tasks.classify.classification import Classification
from vit_scale.tasks.evaluate import evaluate
from vit_scale.tasks.task import Means
from vit_scale.train.meter import Meter, memory
from vit_scale.train.micro_batch import trial_on_engine
from vit_scale.train.optim.optimizer import build_optimizer
from vit_scale.train.state import TrainState
from vit_scale.train.update import update

IMAGES, CHANNELS, SIDE, CLASSES = 16, 3, 8, 10


class AutocastEngine(PlainEngine):
    """As accelerate wraps a model in half precision: autocast, outputs in fp32, and in fp16 a loss scaler."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, half: torch.dtype) -> None:
        super().__init__(model, optimizer)
        self.half = half
        self.scaler = torch.amp.GradScaler("cuda") if half == torch.float16 else None

    def __call__(self, *args: Tensor) -> Any:
        with torch.autocast("cuda", self.half):
            return self.model(*args).float()

    def backward(self, loss: Tensor) -> None:
        super().backward(loss if self.scaler is None else self.scaler.scale(loss))

    def step(self, clip_norm: float) -> Tensor:
        return guarded_step(self.optimizer, clip_norm, self.scaler)


class OnGpu(NamedTuple):
    """A task and its state on the stand-in."""

    device: GpuStandIn
    task: Classification
    state: TrainState

    def batch(self) -> Batch:
        """A batch as the loader yields it: in pinned memory."""
        pixels = torch.zeros(IMAGES, CHANNELS, SIDE, SIDE, dtype=torch.uint8)
        numbers = torch.arange(IMAGES)
        target = {"label": self.device.pin(numbers % CLASSES)}
        return Batch(self.device.pin(pixels), target, self.device.pin(numbers))

    def update(self) -> tuple[dict[str, Tensor], Tensor]:
        found = update(self.task, self.state, [self.batch(), self.batch()], lr=0.1, seed=0, clip_norm=1.0)
        self.state.step += 1
        return found


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., OnGpu]]:
    """Build the debug recipe, with other options, on the stand-in."""
    device = gpu_stand_in(monkeypatch)

    def build(*options: str, half: torch.dtype | None = None) -> OnGpu:
        config = load_recipe("recipes/debug.yaml", list(options))
        info = DataInfo(64, CHANNELS, tuple("abcdefghij"))
        plan = make_plan(config, train_images=64, processes=1, device="cuda")
        task = Classification(config, info, plan)
        task.plan = plan
        model = task.build()
        if config.augment.progressive:
            model.allow_any_size()
        device.__enter__()
        model = twin(model, device="cuda").train()
        model.set_activation_checkpointing(config.parallel.activation_checkpointing)
        optimizer = build_optimizer(model, config.optim)
        engine = PlainEngine(model, optimizer) if half is None else AutocastEngine(model, optimizer, half)
        engine.set_micro_batch(plan)
        counters = [torch.zeros((), device=CUDA) for _ in range(2)]
        state = TrainState(engine, skipped_steps=counters[0], consecutive_skipped_steps=counters[1])
        state.ema = Ema(engine.shards, 0.9, warmup=True)
        task.to(CUDA, torch.float32)
        return OnGpu(device, task, state)

    yield build
    device.__exit__(None, None, None)


def meter_of(on_gpu: OnGpu) -> Meter:
    cost = SimpleNamespace(flops=lambda side: 1.0, mfu=lambda flops, seconds: None)
    plan = SimpleNamespace(global_batch=2 * IMAGES, epoch=lambda step: 0.0)
    run = SimpleNamespace(device=CUDA, state=on_gpu.state, task=on_gpu.task, cost=cost, plan=plan, lr_at=lambda step: 0)
    return Meter(run)  # type: ignore[arg-type]


OPTIONS = [
    "",
    "optim.name=sgd optim.clip_norm=0",
    "optim.name=lamb",
    "optim.name=lion",
    "optim.name=muon",
    "augment.mix_patches=true augment.cutmix=0",
    "augment.mixup=0 augment.cutmix=0",
    "augment.progressive=[[0,4],[0.5,8]] model.pos_embed=learned",
    "model.kernel=explicit model.dropout=0.1 model.patch_dropout=0.3",
    "model.drop_path_mode=mask parallel.activation_checkpointing=full",
    "model.pos_embed=rope model.qk_norm=true model.mlp=swiglu",
    "model.pos_embed=relative model.pool=mean",
    "optim.loss=binary augment.label_smoothing=0",
    "model.name=timm/resnet10t model.img_size=null model.patch_size=null model.layer_scale=null model.drop_path=0",
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_never_waits_for_the_gpu_between_two_logged_steps(options: str, on_gpu: Callable[..., OnGpu]) -> None:
    run = on_gpu(*options.split())
    meter = meter_of(run)
    shapes = {name: p.shape for name, p in run.state.model.named_parameters()}
    with run.device.watching():
        for _ in range(3):
            meter.watch_update()
            parts, norm = run.update()
            meter.add(parts, norm)
    for tensor in (*parts.values(), norm, run.state.skipped_steps, run.state.consecutive_skipped_steps):
        assert (tensor.device, tensor.dtype, tensor.shape) == (CUDA, torch.float32, ())
    for name, p in run.state.model.named_parameters():
        assert (p.device, p.shape, p.grad) == (CUDA, shapes[name], None)
    for entries in run.state.engine.optimizer.state.values():
        assert all(value.device == CUDA for value in entries.values() if isinstance(value, Tensor) and value.ndim)
    assert all(piece.tensor.device == CUDA for piece in run.state.ema.pieces().values())
    with pytest.raises(HostWaits, match="reads the device"), run.device.watching():
        meter.read()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", ["none", "full"])
def test_half_precision_training_never_waits_for_the_gpu(
    half: torch.dtype, mode: str, on_gpu: Callable[..., OnGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    run = on_gpu(f"parallel.activation_checkpointing={mode}", half=half)
    with run.device.watching():
        for _ in range(2):
            parts, norm = run.update()
    assert (norm.dtype, parts["loss"].dtype) == (torch.float32, torch.float32)
    assert all(p.dtype == torch.float32 for p in run.state.model.parameters())


def test_evaluation_waits_for_the_gpu_once(on_gpu: Callable[..., OnGpu]) -> None:
    run = on_gpu()
    with run.device.watching():
        evaluator = evaluate(run.task, run.state.model, [run.batch() for _ in range(3)])
        means = Means(lambda outputs, batch: {"mean": outputs.mean(1)}, CUDA)
        means.add(torch.zeros(IMAGES, CLASSES, device=CUDA), run.batch())
        for each in (evaluator, means):
            with pytest.raises(HostWaits, match="_local_scalar_dense reads the device|a copy to the host"):
                each.metrics()


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x.sum()),
    "cpu": lambda x: x.cpu(),
    "copy to host": lambda x: torch.empty(4).copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "upload from unpinned memory": lambda x: torch.ones(4).to(CUDA, non_blocking=True),
}


@pytest.mark.parametrize("name", WAITS)
def test_stand_in_reports_what_makes_the_host_wait(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu_stand_in(monkeypatch) as device:
        x = torch.zeros(4, device=CUDA)
        with device.watching(), pytest.raises(HostWaits):
            WAITS[name](x)
        with device.watching():
            gpu.upload(torch.ones(4), CUDA)
            assert (x + 1).device == CUDA


def test_loader_pins_every_array_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Tensor] = []
    monkeypatch.setattr(gpu, "pin", lambda tensor: (pinned.append(tensor), tensor.clone())[1])
    target = {"label": np.arange(4)}
    made = WorkerBatch(
        0, 0, np.arange(4), [], target, blocks={"images": torch.zeros(4, 3, 2, 2), "mask": torch.ones(4)}
    )
    batch = made.pin_memory().to_batch()
    assert len(pinned) == 4
    assert torch.equal(batch.target["label"], torch.arange(4))
    assert torch.equal(batch.positions, torch.arange(4))


# ------------------------------------------------------------------------------------------------ copies and waits


def test_copies_for_a_checkpoint_are_complete_when_training_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, weights = HostCopies(), {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.float64)}
    late = LateCopies(monkeypatch)
    for step in range(2):  # the second time into the same memory
        taken = copies.take("model", [*weights.items(), ("on another rank", None)])
        expected = {name: tensor.clone() for name, tensor in weights.items()}
        for tensor in weights.values():
            tensor.add_(1)  # the next step
        torch.testing.assert_close(taken, expected, rtol=0, atol=0)
        assert late.log == ["copy", "copy", "wait"] * (step + 1)


def test_copies_are_complete_even_if_host_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of those that were started must not be freed or overwritten before."""
    late = LateCopies(monkeypatch)
    buffer = gpu.host_buffer

    def short(like: Tensor) -> Tensor:
        if like.numel() > 2:
            raise RuntimeError("out of memory")
        return buffer(like)

    monkeypatch.setattr(gpu, "host_buffer", short)
    with pytest.raises(MemoryError, match="out of memory"):
        HostCopies().take("model", [("small", torch.ones(2)), ("large", torch.ones(3)), ("last", torch.ones(1))])
    assert late.log == ["copy", "wait"]


def test_trial_reads_the_clock_after_the_gpu_is_done_and_frees_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(gpu, "synchronize", lambda device: log.append("synchronize"))
    monkeypatch.setattr(gpu, "release_cached_memory", lambda device: log.append("release"))
    model = nn.Linear(2, 2)
    model.img_size = (1, 1)  # type: ignore[assignment]
    engine = PlainEngine(model, torch.optim.SGD(model.parameters()))
    task = SimpleNamespace(
        example_batch=lambda size, side: None,
        progressive=SimpleNamespace(largest_step=lambda: 0),
        before_update=lambda *_: log.append("start"),
        inputs=lambda batch, step: SimpleNamespace(args=(torch.ones(1, 2),)),
        loss=lambda outputs, inputs: {"loss": outputs.sum()},
    )
    assert trial_on_engine(engine, task, repeats=2)(1)  # type: ignore[arg-type]
    assert log == ["start", "synchronize", "start", "synchronize", "release"]


def test_reported_memory_excludes_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = [70e9]
    monkeypatch.setattr(gpu, "reset_peak_memory", lambda device: peaks.append(20e9))
    monkeypatch.setattr(gpu, "peak_memory", lambda device: peaks[-1])
    Meter(SimpleNamespace(device=CUDA))  # type: ignore[arg-type]
    assert memory(CUDA) == {"memory/device_gb": 20.0}
