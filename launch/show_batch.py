"""Save a training batch as an image grid: `python launch/show_batch.py RECIPE [section.option=value ...]`."""

from vit_scale.cli import run_main
from vit_scale.commands.show_batch import main

if __name__ == "__main__":
    run_main(main)
