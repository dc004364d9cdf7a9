"""Write an HTML page about one or more runs: `python launch/show_run.py RUN [RUN ...] [--out FILE]`."""

from vit_scale.cli import run_main
from vit_scale.commands.show_run import main

if __name__ == "__main__":
    run_main(main)
