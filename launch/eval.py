"""Evaluate a run or a model: `python launch/eval.py RUN_OR_WEIGHTS [--data SOURCE] [section.option=value ...]`."""

from vit_scale.cli import run_main
from vit_scale.commands.eval import main

if __name__ == "__main__":
    run_main(main)
