"""The micro-batch: the fastest size that fits, halved rather than failing, and found without a trace."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import vit_scale
from tests.processes import run_script
from vit_scale import gpu
from vit_scale.data.batch import Batch
from vit_scale.data.progressive import Progressive
from vit_scale.errors import UserError
from vit_scale.recipe import load_recipe
from vit_scale.schedule import Plan
from vit_scale.strategies.replicated import PlainEngine
from vit_scale.tasks.task import Inputs
from vit_scale.train import build
from vit_scale.train.micro_batch import choose_micro_batch, memory_basis, recorded_micro_batch, trial_on_engine

STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]


def memory_of(limit: int, speed=lambda size: float(size)):  # type: ignore[no-untyped-def]
    tried: list[int] = []

    def trial(size: int) -> float | None:
        tried.append(size)
        return speed(size) if size <= limit else None

    return trial, tried


def test_auto_picks_the_largest_that_fits_if_larger_is_faster() -> None:
    trial, tried = memory_of(100)
    assert choose_micro_batch("auto", 256, trial, multiple=1) == (64, None)
    assert tried == [1, 2, 4, 8, 16, 32, 64, 128]


def test_auto_picks_the_fastest_that_fits() -> None:
    trial, _ = memory_of(1000, speed=lambda size: 100 - abs(size - 32))
    assert choose_micro_batch("auto", 256, trial, multiple=1) == (32, None)


def test_auto_prefers_the_largest_of_equally_fast_sizes() -> None:
    trial, _ = memory_of(1000, speed=lambda size: 100.0)
    assert choose_micro_batch("auto", 96, trial, multiple=1) == (96, None)


def test_sizes_divide_the_batch_and_are_multiples() -> None:
    trial, tried = memory_of(1000)
    choose_micro_batch("auto", 210, trial, multiple=2)
    assert all(210 % size == 0 and size % 2 == 0 for size in tried)


def test_number_that_does_not_fit_is_halved_with_a_message() -> None:
    trial, _ = memory_of(20)
    size, message = choose_micro_batch(64, 128, trial, multiple=1)
    assert size == 16
    assert message == "batch.micro = 64 does not fit in memory: using 16 with more accumulation steps."


def test_number_that_fits_is_used() -> None:
    trial, tried = memory_of(64)
    assert choose_micro_batch(64, 128, trial, multiple=1) == (64, None)
    assert tried == [64]


@pytest.mark.parametrize("requested", ["auto", 8])
def test_model_that_does_not_fit_is_reported_with_remedies(requested: int | str) -> None:
    trial, _ = memory_of(0)
    with pytest.raises(UserError, match=r"micro-batch of 1 does not fit in memory.\n.*activation_checkpointing"):
        choose_micro_batch(requested, 8, trial, multiple=1)


class TwoOutputs:
    """A task whose model returns a tuple, and whose loss draws random numbers."""

    progressive = Progressive((), steps=0)

    def example_batch(self, images: int, size: tuple[int, int]) -> Batch:
        return Batch(torch.zeros(images, 3, *size, dtype=torch.uint8), {}, torch.arange(images))

    def before_update(self, *_: object) -> None:
        pass

    def inputs(self, batch: Batch, step: int) -> Inputs:
        return Inputs((batch.images.float(),), {})

    def loss(self, outputs: Any, inputs: Inputs) -> dict[str, torch.Tensor]:
        return {"loss": (outputs[0] + outputs[1] + torch.randn(3)).square().mean()}


@pytest.fixture
def engine() -> PlainEngine:
    """A model with batch norm, whose buffers a forward pass changes, after one step of its optimizer."""
    model = vit_scale.create_model("timm/resnet10t", num_classes=3, img_size=32)
    model.register_forward_hook(lambda module, args, output: (output, output * 2))
    engine = PlainEngine(model, torch.optim.AdamW(model.parameters()))
    model(torch.ones(2, 3, 32, 32))[0].sum().backward()
    engine.step(clip_norm=1.0)
    return engine


def test_trial_changes_nothing(engine: PlainEngine) -> None:
    before = copy.deepcopy((dict(engine.model.state_dict()), engine.optimizer.state_dict()["state"]))
    draws = torch.get_rng_state()
    assert trial_on_engine(engine, TwoOutputs(), repeats=1)(2) > 0  # type: ignore[arg-type,operator]
    after = (dict(engine.model.state_dict()), engine.optimizer.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert all(p.grad is None for p in engine.model.parameters())
    assert torch.equal(torch.get_rng_state(), draws)


@pytest.mark.parametrize(
    "error", [RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), MemoryError()]
)
def test_trial_reports_out_of_memory(engine: PlainEngine, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(TwoOutputs, "loss", fail)
    assert trial_on_engine(engine, TwoOutputs())(2) is None  # type: ignore[arg-type]


def test_other_errors_of_a_trial_are_raised(engine: PlainEngine) -> None:
    task = SimpleNamespace(example_batch=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trial_on_engine(engine, task)(2)  # type: ignore[arg-type]


def test_trial_has_the_largest_images_of_progressive_resizing(
    engine: PlainEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    task = TwoOutputs()
    task.progressive = Progressive([(0.0, 16), (0.5, 32)], steps=10)
    monkeypatch.setattr(task, "before_update", lambda batches, step, forward: steps.append(step), raising=False)
    inputs = task.inputs
    monkeypatch.setattr(task, "inputs", lambda batch, step: (steps.append(step), inputs(batch, step))[1], raising=False)
    trial_on_engine(engine, task, repeats=1)(2)  # type: ignore[arg-type]
    assert steps == [5, 5]


def test_memory_of_future_optimizer_state_is_reserved() -> None:
    model = torch.nn.Linear(10, 10, bias=False)
    engine = PlainEngine(model, torch.optim.AdamW(model.parameters()))
    assert engine.future_bytes() == 2 * 4 * 100
    model(torch.ones(1, 10)).sum().backward()
    engine.step(clip_norm=1.0)
    assert engine.future_bytes() == 0


CHANGES = {
    "parallel.activation_checkpointing": "full",
    "parallel.compile": True,
    "parallel.offload": "optimizer",
    "parallel.tf32": False,
    "model.kernel": "math",
    "ema.decay": 0.0,
    "batch.global": 16,
}


@pytest.fixture(scope="module")
def saved(trained_run: Path) -> tuple[Path, Any]:
    """A checkpoint, and the plan of its run."""
    checkpoint = max((trained_run / "checkpoints").iterdir())
    return checkpoint, Plan(**json.loads((checkpoint / "meta.json").read_text())["plan"])


def basis_of(plan: Plan, name: str = "single", device: str = "cpu", precision: str = "fp32", **options: object) -> dict:
    config = load_recipe("recipes/debug.yaml", [f"{key}={value}" for key, value in options.items()])
    plan = dataclasses.replace(plan, global_batch=config.batch.global_)
    strategy = SimpleNamespace(name=name, device=torch.device(device))
    return memory_basis(config, plan, strategy, precision)  # type: ignore[arg-type]


def test_micro_batch_is_kept_on_resume_if_nothing_changed(saved: tuple[Path, Plan]) -> None:
    checkpoint, plan = saved
    assert recorded_micro_batch(checkpoint, basis_of(plan)) == plan.micro_batch
    assert recorded_micro_batch(None, basis_of(plan)) is None


@pytest.mark.parametrize(("option", "value"), CHANGES.items())
def test_micro_batch_is_chosen_anew_if_memory_may_differ(saved: tuple[Path, Plan], option: str, value: object) -> None:
    checkpoint, plan = saved
    assert recorded_micro_batch(checkpoint, basis_of(plan, **{option: value})) is None


def test_micro_batch_is_chosen_anew_for_another_gpu_strategy_precision_or_number_of_processes(
    saved: tuple[Path, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, plan = saved
    monkeypatch.setattr(gpu, "describe", lambda device: "NVIDIA L4, 24.0 GB" if device.type == "cuda" else "cpu")
    others = [{"device": "cuda"}, {"name": "zero3"}, {"precision": "bf16"}]
    found = [basis_of(plan, **other) for other in others] + [basis_of(dataclasses.replace(plan, processes=2))]
    assert [recorded_micro_batch(checkpoint, basis) for basis in found] == [None] * 4


@pytest.mark.parametrize("mode", ["full", "none"])
def test_trials_run_with_activation_checkpointing_and_compiled_blocks(mode: str, fresh_accelerate: None) -> None:
    """Otherwise activation checkpointing would never allow a larger micro-batch."""
    options = [f"parallel.activation_checkpointing={mode}", "parallel.compile=true", "track.wandb=disabled"]
    config = load_recipe("recipes/debug.yaml", [*options, "data.workers=0"])
    tried = []

    def resolve(config, plan, task, engine, precision):  # type: ignore[no-untyped-def]
        compiled = all(block._compiled_call_impl is not None for block in engine.model.blocks)
        tried.append((engine.model.activation_checkpointing, compiled))
        raise UserError("enough")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "resolve_micro_batch", resolve)
        with pytest.raises(UserError, match="enough"):
            build.build_run(config, "recipes/debug.yaml")
    assert tried == [(mode, True)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Per strategy a run with micro-batches of 4, and one whose 8 do not fit on one of two ranks."""
    top = tmp_path_factory.mktemp("sizes")
    common = ["track.wandb=disabled", "data.workers=0", "schedule.steps=4", "run.eval_every=4", "model.dropout=0.1"]

    def job(strategy: str, name: str, micro: int, **faults: int) -> dict:
        options = [f"parallel.strategy={strategy}", f"batch.micro={micro}", f"run.dir={top / strategy}-{name}"]
        return {"recipe": "recipes/debug.yaml", "options": [*common, *options], **faults}

    jobs = [job(s, "plain", 4) for s in STRATEGIES] + [job(s, "tried", 8, too_large=8) for s in STRATEGIES]
    done = run_script("tests/workers/train_many.py", json.dumps(jobs), processes=2)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return top, done.stdout


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trials_of_all_ranks_leave_no_trace_in_the_run(runs: tuple[Path, str], strategy: str) -> None:
    assert runs[1].count("batch.micro = 8 does not fit in memory: using 4") == len(STRATEGIES), runs[1][-3000:]
    for name in ("model.safetensors", "model_ema.safetensors"):
        plain, tried = (load_file(runs[0] / f"{strategy}-{kind}" / name) for kind in ("plain", "tried"))
        torch.testing.assert_close(tried, plain, rtol=0, atol=0)
