"""Classify images with a run: `python launch/predict.py RUN IMAGE|DIR|GLOB ...`."""

from vit_scale.cli import run_main
from vit_scale.commands.predict import main

if __name__ == "__main__":
    run_main(main)
