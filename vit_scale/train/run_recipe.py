"""Train a recipe from start to end."""

from __future__ import annotations

import gc
import sys

from vit_scale.config import Config
from vit_scale.cost.background_check import CheckAside
from vit_scale.kernels.malloc import keep_freed_memory
from vit_scale.launcher import is_main_process


def run_recipe(config: Config, recipe: str) -> int:
    """Train `config`, which was read from `recipe`, from start to end; returns the exit status."""
    from vit_scale.launcher import silence_libraries

    silence_libraries()
    keep_freed_memory()  # On a CPU every step would else fault in the pages of its activations anew.
    gc.disable()  # Until all is imported and built, of which nothing is garbage: a tenth of the start.
    # Beside the import of torch. Where that is over, a fork would take its threads' locks along and save no time.
    check = CheckAside(config.model, aside="torch" not in sys.modules) if is_main_process() else None
    from vit_scale.checkpoints.run_lock import release
    from vit_scale.strategies.processes import init_group_after_restart
    from vit_scale.strategies.rank_failure import RANK_FAILURE_EXIT_CODE, is_rank_failure, report_rank_failure
    from vit_scale.train.build import build_run
    from vit_scale.train.finish import finish
    from vit_scale.train.loop import train
    from vit_scale.train.open_run import RunFinished

    run = None
    try:
        init_group_after_restart(config.parallel.timeout_seconds)
        run = build_run(config, recipe, check)
        gc.enable()
        if run.device.type == "cpu":
            keep_freed_memory(of_any_size=True)
        status = train(run)
        if status == 0:
            finish(run)
        return status
    except RunFinished as message:
        if is_main_process():
            print(message)
        return 0
    except RuntimeError as error:
        if not is_rank_failure(error):
            raise
        if run is not None:
            run.checkpoints.abandon()
        report_rank_failure(error, run.folder if run else None, config.parallel.timeout_seconds)
        return RANK_FAILURE_EXIT_CODE
    finally:
        gc.enable()
        if run is not None:
            run.close()
            release(run.folder)
