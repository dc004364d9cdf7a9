"""Measures the memory of building and saving a model on each rank.

`sharded_memory.py CASES`: for each {"model": label, "strategy": name, "options": ["a.b=c", ...]} of a JSON list, every
rank prints a line `memory RANK {...}` with
    params, largest      parameters of the model and of its largest tensor
    build, save          peak bytes while it is built, and while all full tensors are gathered
    place                peak bytes while a model that each rank has constructed is moved to the device
    start                peak bytes while it is wrapped with AdamW and an EMA, and a micro-batch of two images is tried
    held                 parameters that the rank keeps
    checksum             of the gathered initial weights (rank 0 only)
"""

from __future__ import annotations

import json
import sys
import zlib
from typing import Any

from torch import nn

from vit_scale.cost.measured import peak_bytes
from vit_scale.data.batch import DataInfo
from vit_scale.launcher import world_size
from vit_scale.models.interface import full_shape
from vit_scale.recipe import load_recipe
from vit_scale.schedule import make_plan
from vit_scale.strategies.processes import close_processes, restored_process
from vit_scale.strategies.strategy import make_strategy
from vit_scale.tasks.classify.classification import Classification
from vit_scale.train.build_state import build_model, build_state
from vit_scale.train.micro_batch import trial_on_engine
from vit_scale.train.state import TrainState

INFO = DataInfo(images=64, in_chans=1, class_names=tuple("0123456789"))


def measure(strategy: str, options: list[str]) -> tuple[int, dict[str, Any]]:
    """Build a model and gather its weights; return the rank and the measurements."""
    config = load_recipe("recipes/debug.yaml", [f"parallel.strategy={strategy}", "ema.decay=0.9", *options])
    plan = make_plan(config, train_images=64, processes=world_size(), device="cpu")
    made = make_strategy(config, plan, strategy, "fp32")
    task = Classification(config, INFO, plan)
    models: list[nn.Module] = []
    states: list[TrainState] = []

    def build() -> nn.Module:
        model, _ = build_model(task, made, config)
        made.place(model)
        models.append(model)
        return model

    def start() -> TrainState:
        states.append(build_state(models[0], made, config, plan))
        task.to(made.device, states[0].engine.input_dtype)
        trial_on_engine(states[0].engine, task, repeats=1)(2)
        return states[0]

    # What gloo's threads free is seen late, and who waits for whom decides how much that is: the smaller of two tries.
    build_peak = min(peak_bytes(build) for _ in range(2))
    constructed = task.build()
    place_peak = peak_bytes(lambda: made.place(constructed))
    sizes = [full_shape(p).numel() for p in models[0].parameters()]
    held = sum(getattr(p, "ds_tensor", p).numel() for p in models[0].parameters())
    start_peak = peak_bytes(start)
    state = states[0]
    checksum = 0
    for name, tensor in sorted(state.whole()):
        if tensor is not None:
            checksum = zlib.crc32(tensor.contiguous().numpy().tobytes(), zlib.crc32(name.encode(), checksum))

    def save() -> None:
        for _ in state.whole():
            pass
        for _ in state.whole_ema():
            pass

    save_peak = min(peak_bytes(save) for _ in range(2))
    found = {"params": sum(sizes), "largest": max(sizes), "held": held, "checksum": checksum}
    return made.rank, found | {"build": build_peak, "place": place_peak, "start": start_peak, "save": save_peak}


def main() -> None:
    for case in json.loads(sys.argv[1]):
        with restored_process():
            rank, found = measure(case["strategy"], case["options"])
        sys.stdout.write(f"memory {rank} {json.dumps(case | found)}\n")
        sys.stdout.flush()
    close_processes()


if __name__ == "__main__":
    main()
