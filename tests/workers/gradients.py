"""Compares losses and gradients of strategies on the same images, and what a non-finite gradient changes.

`gradients.py CASES`: for each {"name", "like", "strategy", "precision", "options": ["a.b=c", ...]} of a JSON list,
every rank prints a line `gradients RANK {...}` with the case and, the last four not if it is `gradient_only`,
    loss, norm       of one step of SGD on random images
    error, worst     relative error of the gradient, and of its worst tensor, compared with the case `like` (rank 0)
    copies           half-precision copies of the weights of linear layers that a forward pass saves, per element
    is_skipped       whether a step with an infinite gradient on the last rank leaves the weights unchanged
    scales           the loss scale before and after that step
    saved            the dtypes of all floating-point tensors that would be saved (rank 0)
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import torch
from torch import Tensor, nn

from vit_scale.data.batch import Batch, DataInfo
from vit_scale.launcher import world_size
from vit_scale.models.interface import full_shape
from vit_scale.recipe import load_recipe
from vit_scale.schedule import make_plan
from vit_scale.strategies.processes import close_processes, restored_process
from vit_scale.strategies.strategy import make_strategy
from vit_scale.tasks.classify.classification import Classification
from vit_scale.train.build_state import build_model, build_state
from vit_scale.train.state import TrainState
from vit_scale.train.update import update

# The momentum of SGD after the first step is the gradient.
OPTIONS = ["optim.name=sgd", "optim.momentum=0.9", "optim.clip_norm=0", "augment.mixup=0", "augment.cutmix=0"]
INFO = DataInfo(images=64, in_chans=3, class_names=tuple("0123456789"))
LOSS = Classification.loss
Named = dict[str, Tensor]


def measure(case: dict[str, Any], gradients: dict[str, Named]) -> tuple[int, dict[str, Any]]:
    """Take two steps; return the rank and the measurements; `gradients` keeps the first of each comparison."""
    config = load_recipe("recipes/debug.yaml", [*OPTIONS, f"parallel.strategy={case['strategy']}", *case["options"]])
    plan = make_plan(config, train_images=64, processes=world_size(), device="cpu")
    strategy = make_strategy(config, plan, case["strategy"], case["precision"])
    task = Classification(config, INFO, plan)
    model, _ = build_model(task, strategy, config)
    state = build_state(model, strategy, config, plan)
    task.to(strategy.device, state.engine.input_dtype)
    seeds = range(strategy.rank * plan.accumulation, (strategy.rank + 1) * plan.accumulation)
    batches = [random_batch(task, plan.micro_batch, model.img_size, seed) for seed in seeds]
    parts, norm = update(task, state, batches, lr=1e-3, seed=0, clip_norm=0.0)
    shards = state.engine.shards
    momentum = shards.optimizer_tensors(owned=True)["momentum_buffer"]
    gradient = {name: tensor.clone() for name, tensor in shards.whole(momentum) if tensor is not None}
    found: dict[str, Any] = {"loss": parts["loss"].item(), "norm": norm.item()}
    found |= errors(gradient, gradients.setdefault(case["like"], gradient))
    if case.get("gradient_only"):
        return strategy.rank, found
    saved = {str(t.dtype) for _, t in state.whole() if t is not None and t.is_floating_point()}
    found |= {"copies": saved_copies(task, state, batches[0]), "saved": sorted(saved)}
    task.predict(model.eval(), batches[0])
    return strategy.rank, found | overflow(task, state, batches, is_last=strategy.rank == world_size() - 1)


def random_batch(task: Classification, images: int, size: tuple[int, int], seed: int) -> Batch:
    """Return images and labels that are a function of `seed`."""
    batch, generator = task.example_batch(images, size), torch.Generator().manual_seed(seed)
    batch.images.random_(0, 256, generator=generator)
    batch.target["label"].random_(0, len(INFO.class_names), generator=generator)
    return batch


def errors(gradient: Named, expected: Named) -> dict[str, float]:
    """Return the relative errors of a gradient; rank 0 alone has it."""
    if not gradient:
        return {}
    wrong = {name: (gradient[name] - expected[name]).norm().item() for name in expected}
    norms = {name: tensor.norm().item() for name, tensor in expected.items()}
    largest = max(norms.values())
    total = torch.tensor(list(wrong.values())).norm() / torch.tensor(list(norms.values())).norm()
    # The bias of keys has no gradient but rounding errors.
    worst = max(wrong[name] / norms[name] for name in expected if norms[name] > 1e-6 * largest)
    return {"error": total.item(), "worst": worst}


def saved_copies(task: Classification, state: TrainState, batch: Batch) -> float:
    """Return the elements of saved half-precision tensors shaped like weights, per element of these weights."""
    linear = [full_shape(m.weight) for m in state.model.modules() if isinstance(m, nn.Linear)]
    shapes = {tuple(shape) for shape in linear} | {tuple(reversed(shape)) for shape in linear}
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.dtype in (torch.bfloat16, torch.float16) and tuple(tensor.shape) in shapes:
            found[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    inputs = task.inputs(batch, 0)
    with state.engine.trying():
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = task.loss(state.engine(*inputs.args), inputs)["loss"]
        state.engine.backward(loss)
    return sum(found.values()) / sum(shape.numel() for shape in linear)


def overflow(task: Classification, state: TrainState, batches: list[Batch], *, is_last: bool) -> dict[str, Any]:
    """Take a step with an infinite loss on the last rank."""
    scale = state.engine.loss_scale
    before = {name: piece.tensor.clone() for name, piece in state.engine.shards.weights(owned=True).items()}
    scales = [scale.numbers()["scale"]] if scale else []
    Classification.loss = lambda *given: {"loss": LOSS(*given)["loss"] * (float("inf") if is_last else 1.0)}
    try:
        state.model.train()
        update(task, state, batches, lr=1e-3, seed=0, clip_norm=0.0)
    finally:
        Classification.loss = LOSS
    after = state.engine.shards.weights(owned=True)
    is_unchanged = all(torch.equal(before[name], piece.tensor) for name, piece in after.items())
    scales += [scale.numbers()["scale"]] if scale else []
    return {"is_skipped": is_unchanged and state.skipped_steps.item() == 1, "scales": scales}


def main() -> None:
    gradients: dict[str, Named] = {}
    for case in json.loads(sys.argv[1]):
        gc.collect()  # DeepSpeed's engines have reference cycles
        with restored_process():
            rank, found = measure(case, gradients)
        sys.stdout.write(f"gradients {rank} {json.dumps(case | found)}\n")
        sys.stdout.flush()
    close_processes()


if __name__ == "__main__":
    main()
