"""Judge frozen features by k-NN and a linear probe: `python launch/probe.py RUN|timm/NAME|FILE [--data SOURCE]`."""

from vit_scale.cli import run_main
from vit_scale.commands.probe import main

if __name__ == "__main__":
    run_main(main)
