"""Run a hyperparameter sweep locally: `python launch/sweep.py SWEEP [section.option=value ...] [--count N]`."""

from vit_scale.cli import run_main
from vit_scale.commands.sweep import main

if __name__ == "__main__":
    run_main(main)
