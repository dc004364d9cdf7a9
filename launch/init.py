"""Write a recipe for a dataset: `python launch/init.py FOLDER [--out RECIPE.yaml] [--minutes 10]`."""

from vit_scale.cli import run_main
from vit_scale.commands.init import main

if __name__ == "__main__":
    run_main(main)
