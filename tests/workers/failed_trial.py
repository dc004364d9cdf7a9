"""Trains the task of tests/tasks/patch_pixels.py after trials of the micro-batch that run out of memory.

Usage: failed_trial.py loss|block RUN_DIR [section.option=value ...]: the trial of 16 images fails in the loss, or in
the forward pass of the last block. Prints `gathered N` then: how many parameters ZeRO-3 has left with full values.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import vit_scale
from vit_scale.models.block import Block
from vit_scale.train import micro_batch

sys.path.insert(0, str(Path(__file__).parents[1] / "tasks"))
from patch_pixels import RECIPE, PatchPixels

LOSS, FORWARD, SPEED = PatchPixels.loss, Block.forward, micro_batch._images_per_second


def failing_loss(task: PatchPixels, outputs: Any, inputs: Any) -> Any:
    if len(outputs) == 16:
        raise MemoryError
    return LOSS(task, outputs, inputs)


def failing_forward(block: Block, tokens: Any, *rest: Any) -> Any:
    if len(tokens) == 16 and block.training and block.drop_path1.rate > 0:
        raise MemoryError
    return FORWARD(block, tokens, *rest)


def images_per_second(engine: Any, *options: Any) -> float:
    try:
        return SPEED(engine, *options)
    except MemoryError:
        states = [parameter.ds_status.name for parameter in engine.model.parameters()]
        print(f"gathered {len(states) - states.count('NOT_AVAILABLE')}", flush=True)
        raise


if __name__ == "__main__":
    where, folder, *options = sys.argv[1:]
    if where == "loss":
        PatchPixels.loss = failing_loss  # type: ignore[method-assign]
    else:
        Block.forward = failing_forward  # type: ignore[method-assign]
    micro_batch._images_per_second = images_per_second
    micro_batch.fits_in_host_memory = lambda *_: False
    vit_scale.train(RECIPE, [f"run.dir={folder}", *options], task=PatchPixels)
