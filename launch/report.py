"""Report the cost of models: `python launch/report.py [NAME or RECIPE ...] [section.option=value ...]`."""

from vit_scale.cli import run_main
from vit_scale.commands.report import main

if __name__ == "__main__":
    run_main(main)
