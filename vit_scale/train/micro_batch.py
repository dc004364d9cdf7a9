"""How many images fit into a forward pass, and of those sizes the fastest: found by trying on the device itself."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import torch
import torch.distributed as dist

from vit_scale.config import Config
from vit_scale.cost.activations import Precision, vit_activations
from vit_scale.models.interface import ImageModel

Trial = Callable[[int], float | None]
"""Images per second at a micro batch, or None where it does not fit."""

# Of two sizes that differ by less the larger one is taken: it accumulates less often.
AS_FAST = 0.97
# Weights are there when sizes are tried; gradients come with the trial; two moments and the EMA come later.
BYTES_TO_COME = 12


def choose_micro_batch(asked: int | str, local_batch: int, trial: Trial, *, even: bool) -> tuple[int, str | None]:
    """The micro batch, and a line for the user where it is not what was asked for.

    `auto` tries the divisors of `local_batch` upwards until one does not fit, and takes the fastest. A number is
    tried, and halved until it fits. With `even` only even sizes are tried, as mixing pairs neighbours.
    """
    sizes = [s for s in range(1, local_batch + 1) if local_batch % s == 0 and (not even or s % 2 == 0)] or [local_batch]
    if isinstance(asked, int):
        return _largest_that_fits(asked, sizes, trial)
    speeds: dict[int, float] = {}
    for size in _at_least_doubling(sizes):
        speed = trial(size)
        if speed is None:
            break
        speeds[size] = speed
    if not speeds:
        raise MemoryError(f"not even {sizes[0]} images fit into a forward pass")
    fastest = max(speeds.values())
    return max(size for size, speed in speeds.items() if speed >= AS_FAST * fastest), None


def _largest_that_fits(asked: int, sizes: list[int], trial: Trial) -> tuple[int, str | None]:
    for size in sorted({asked, *(s for s in sizes if s <= asked // 2)}, reverse=True):
        if trial(size) is not None:
            note = f"batch.micro = {asked} does not fit into memory: {size} is used, with more accumulation."
            return size, note if size < asked else None
    raise MemoryError(f"not even {sizes[0]} images fit into a forward pass")


def _at_least_doubling(sizes: list[int]) -> list[int]:
    chosen: list[int] = []
    for size in sizes:
        if not chosen or size >= 2 * chosen[-1] or size == sizes[-1]:
            chosen.append(size)
    return chosen


def trial_on_device(model: ImageModel, device: torch.device, precision: str, *, repeats: int = 3) -> Trial:
    """A trial that runs forward and backward passes of `model` on `device`, with room held for what comes later."""

    def trial(size: int) -> float | None:
        from accelerate.utils.memory import should_reduce_batch_size

        buffers = [b.clone() for b in model.buffers()]
        try:
            return _images_per_second(model, size, device, precision, repeats)
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            return None
        finally:
            model.zero_grad(set_to_none=True)
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
            if device.type == "cuda":
                torch.cuda.empty_cache()

    return trial


def _images_per_second(model: ImageModel, size: int, device: torch.device, precision: str, repeats: int) -> float:
    params = sum(p.numel() for p in model.parameters())
    held = torch.empty(BYTES_TO_COME * params, dtype=torch.uint8, device=device)
    images = torch.zeros(size, model.in_chans, *model.img_size, device=device)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        with torch.autocast(device.type, dtype=half, enabled=half is not None):
            outputs = model(images)
        outputs.float().sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    del held
    return size / best


def surely_fits_in_host_memory(config: Config, model: ImageModel, size: int, precision: Precision) -> bool:
    """Whether the activations of `size` images need less than half of the memory that is free, by the closed form."""
    variant = getattr(model, "variant", None)
    if variant is None:  # timm's models are not counted here
        return True
    kept = vit_activations(
        variant, precision=precision, activation_checkpointing=config.parallel.activation_checkpointing
    )
    return size * kept.total < 0.5 * psutil.virtual_memory().available


def smallest_of_all(size: int, device: torch.device) -> int:
    """The smallest `size` over all processes: a process with less memory decides."""
    if not dist.is_initialized():
        return size
    agreed = torch.tensor([size], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return int(agreed.item())
