"""Look at what a model attends to: `python launch/attention.py RUN|timm/NAME [IMAGE ... | --data SOURCE]`."""

from vit_scale.cli import run_main
from vit_scale.commands.attention import main

if __name__ == "__main__":
    run_main(main)
