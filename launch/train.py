"""Train a recipe: `accelerate launch launch/train.py RECIPE [section.option=value ...]`."""

from vit_scale.cli import run_main
from vit_scale.commands.train import main

if __name__ == "__main__":
    run_main(main)
