"""Check whether training can be trusted on this machine: `python launch/doctor.py [--quick] [--json FILE]`."""

from vit_scale.cli import run_main
from vit_scale.commands.doctor import main

if __name__ == "__main__":
    run_main(main)
