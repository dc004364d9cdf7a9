"""Choose the micro-batch: the fastest size that fits in memory, tried on the engine itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from vit_scale import gpu
from vit_scale.checkpoints.find import read_meta
from vit_scale.config import Config
from vit_scale.cost.activations import Precision
from vit_scale.cost.training import CostPart, training_activations
from vit_scale.errors import UserError
from vit_scale.models.interface import backbone_of
from vit_scale.recipe import to_tree
from vit_scale.schedule import Plan
from vit_scale.strategies.strategy import Engine, Strategy
from vit_scale.tasks.task import Task

Trial = Callable[[int], float | None]
"""Return images per second with a micro-batch size, or None if it does not fit."""

# Pick the largest size within 3% of the fastest: it needs fewer accumulation steps.
SPEED_TOLERANCE = 0.97


class DoesNotFit(UserError):
    """Not even the smallest micro-batch fits in memory."""

    def __init__(self, size: int) -> None:
        super().__init__(
            f"batch.micro: a micro-batch of {size} does not fit in memory.\n"
            "Try parallel.activation_checkpointing=full, parallel.precision=bf16, parallel.strategy=zero3 "
            "(with parallel.offload=optimizer if needed), or a smaller model or model.img_size."
        )


def resolve_micro_batch(
    config: Config, plan: Plan, task: Task, engine: Engine, precision: Precision
) -> tuple[Plan, str | None]:
    """Return `plan` with the micro-batch to use, and a message if it is smaller than requested; all ranks must call it.

    On a CPU all sizes are about equally fast, so `auto` uses the plan's, and nothing is tried if it certainly fits.
    """
    on_cpu = engine.device.type == "cpu"
    if on_cpu and fits_in_host_memory(config, task.cost_parts(engine.model), plan.micro_batch, precision):
        return plan, None
    requested = plan.micro_batch if on_cpu else config.batch.micro
    trial = trial_on_engine(engine, task)
    local_batch = plan.global_batch // plan.processes
    micro_batch, message = choose_micro_batch(requested, local_batch, trial, multiple=task.multiple)
    plan = plan.with_micro_batch(micro_batch)
    engine.set_micro_batch(plan)
    return plan, message


def memory_basis(config: Config, plan: Plan, strategy: Strategy, precision: Precision) -> dict[str, Any]:
    """Return everything that decides which micro-batch fits: a resumed run may have other options."""
    tree = to_tree(config)
    parallel = tree["parallel"] | {"strategy": strategy.name, "precision": precision}
    del parallel["timeout_seconds"]
    return {
        "model": tree["model"],
        "progressive": tree["augment"]["progressive"],
        "optimizer": config.optim.name,
        "ema": config.ema.decay > 0,
        "parallel": parallel,
        "global_batch": plan.global_batch,
        "processes": plan.processes,
        "device": gpu.describe(strategy.device),
    }


def recorded_micro_batch(checkpoint: Path | None, basis: dict[str, Any]) -> int | None:
    """Return the micro-batch that `auto` chose when `checkpoint` was saved; None if its basis was another one."""
    meta = {} if checkpoint is None else read_meta(checkpoint)
    # As it would be recorded: JSON has no tuples.
    same = meta.get("memory_basis") == json.loads(json.dumps(basis))
    return meta["plan"]["micro_batch"] if same else None


def choose_micro_batch(
    requested: int | str, local_batch: int, trial: Trial, *, multiple: int
) -> tuple[int, str | None]:
    """Return the micro-batch, and a message if it is smaller than requested; raise `DoesNotFit` if none fits.

    `auto` tries increasing divisors of `local_batch` until one does not fit, and picks the fastest. A number is tried
    and halved until it fits. Sizes are multiples of `multiple` if possible.
    """
    divisors = [size for size in range(1, local_batch + 1) if local_batch % size == 0]
    sizes = [size for size in divisors if size % multiple == 0] or [local_batch]
    if isinstance(requested, int):
        return _largest_fitting(requested, sizes, trial)
    speeds: dict[int, float] = {}
    for size in _doubling_sizes(sizes):
        speed = trial(size)
        if speed is None:
            break
        speeds[size] = speed
    if not speeds:
        raise DoesNotFit(sizes[0])
    fastest = max(speeds.values())
    return max(size for size, speed in speeds.items() if speed >= SPEED_TOLERANCE * fastest), None


def _largest_fitting(requested: int, sizes: list[int], trial: Trial) -> tuple[int, str | None]:
    for size in sorted({requested, *(s for s in sizes if s <= requested // 2)}, reverse=True):
        if trial(size) is not None:
            message = f"batch.micro = {requested} does not fit in memory: using {size} with more accumulation steps."
            return size, message if size < requested else None
    raise DoesNotFit(sizes[0])


def _doubling_sizes(sizes: list[int]) -> list[int]:
    """Return sizes that at least double, and the largest."""
    chosen: list[int] = []
    for size in sizes:
        if not chosen or size >= 2 * chosen[-1] or size == sizes[-1]:
            chosen.append(size)
    return chosen


def trial_on_engine(engine: Engine, task: Task, *, repeats: int = 3) -> Trial:
    """Return a trial that runs forward and backward passes with the loss of `task`; all ranks must call it.

    Memory of state that the first step allocates is reserved meanwhile. A trial leaves no gradient and changes neither
    weights, buffers, optimizer state nor random numbers. It fits only if it fits on every rank. Images have the largest
    size of `augment.progressive`.

    Under ZeRO, ranks communicate during a pass: if one alone runs out of memory in the middle, the others wait for it
    until parallel.timeout_seconds.
    """

    def trial(size: int) -> float | None:
        from accelerate.utils.memory import should_reduce_batch_size

        speed = 0.0
        try:
            with _unchanged(engine):
                speed = _images_per_second(engine, task, size, repeats)
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and not should_reduce_batch_size(error):
                raise
        gpu.release_cached_memory(engine.device)
        return min_over_ranks(speed, engine.device) or None

    return trial


@contextmanager
def _unchanged(engine: Engine) -> Iterator[None]:
    """Restore buffers and random number generators."""
    devices = [engine.device] if gpu.is_gpu(engine.device) else []
    buffers = [(buffer, buffer.clone()) for buffer in engine.model.buffers()]
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def _images_per_second(engine: Engine, task: Task, size: int, repeats: int) -> float:
    reserved = torch.empty(engine.future_bytes(), dtype=torch.uint8, device=engine.device)
    batch = task.example_batch(size, backbone_of(engine.model).img_size)
    step = task.progressive.largest_step()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        with engine.trying():
            task.before_update([batch], step, engine)
            inputs = task.inputs(batch, step)
            engine.backward(task.loss(engine(*inputs.args), inputs)["loss"])
        gpu.synchronize(engine.device)
        best = min(best, time.perf_counter() - start)
    del reserved
    return size / best


def fits_in_host_memory(config: Config, parts: list[CostPart], size: int, precision: Precision) -> bool:
    """Return whether the activations of `size` images need less than half of the free memory, by the closed form."""
    if any(part.backward and not hasattr(part.module, "variant") for part in parts):
        return True  # activations of timm models are not counted
    per_image = training_activations(parts, config, precision, on_cpu=True)
    return size * per_image.total < 0.5 * psutil.virtual_memory().available


def min_over_ranks(value: float, device: torch.device) -> float:
    """Return the smallest `value` of all ranks."""
    if not dist.is_initialized():
        return value
    agreed = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return agreed.item()
