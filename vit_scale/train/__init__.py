"""The training loop and what it stands on: plan, optimiser, schedules, EMA, checkpoints, strategies, tracking."""

from __future__ import annotations

from vit_scale.config import Config


def run_recipe(config: Config, recipe: str) -> int:
    """Train `config`, which was read from `recipe`, from start to end; returns the exit status."""
    from vit_scale.train.quiet import quiet_libraries

    quiet_libraries()
    from vit_scale.train.finish import finish
    from vit_scale.train.loop import train
    from vit_scale.train.run import RunFinished, build_run

    try:
        run = build_run(config, recipe)
    except RunFinished as message:
        print(message)
        return 0
    status = train(run)
    if status == 0:
        finish(run)
    return status


def close_processes() -> None:
    """Leave the process group, if there is one, so that no process warns of the others' end."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
