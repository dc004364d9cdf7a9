"""`vit-scale doctor` and `launch/doctor.py`: check whether training can be trusted on this machine."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from vit_scale.cli import Parser
from vit_scale.errors import UserError
from vit_scale.launcher import world_size

DESCRIPTION = """Check whether training can be trusted on this machine, and how fast it is: packages, GPUs, attention
kernels, precisions, matmul and memory speed, communication, data loading, disks, W&B, launcher and network; then ten
steps under every strategy and precision, compared with fp32 on one process, and resumed. Takes about two minutes.

Start it directly, not through a launcher: it starts one process per GPU itself, or two if there is none."""
EXAMPLES = """examples:
  python launch/doctor.py
  python launch/doctor.py --quick
  python launch/doctor.py --only communication training
  python launch/doctor.py --json report.json

groups for --only:
{groups}

exit code: 0 if training can be trusted here, even if something is slow; 1 if something is broken that training relies
on; 2 for invalid arguments. docs/doctor.md explains every check.
"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    from vit_scale.doctor.check import GROUPS

    groups = "\n".join(f"  {name:<14}{what}" for name, what in GROUPS.items())
    parser = Parser(
        usage="%(prog)s [--quick] [--only NAME ...] [--json [FILE]] [--dir DIR]",
        description=DESCRIPTION,
        epilog=EXAMPLES.format(groups=groups),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="small measurements, fp32 only, no compilation, no launcher, no ZeRO")
    add("--only", nargs="+", default=[], metavar="NAME", help="groups of checks, or names of checks as in the table")
    add("--json", nargs="?", const="-", metavar="FILE", help="write a report for a bug report; default: to stdout")
    add(
        "--dir",
        default=".",
        help="directory that runs are written to, whose disk is checked (default: the current one)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run the checks, print the table, and return whether training can be trusted."""
    args = parse(argv)
    if world_size() > 1:
        raise UserError("Start the doctor without a launcher: it starts its processes itself.")
    if not Path(args.dir).is_dir():
        raise UserError(f"--dir {args.dir}: no such directory")
    if args.json not in (None, "-") and not Path(args.json).parent.is_dir():
        raise UserError(f"--json {args.json}: directory {Path(args.json).parent} does not exist")
    # Child processes end with this one.
    signal.signal(signal.SIGTERM, _stop)
    return run(args)


def run(args: argparse.Namespace) -> int:
    """Run the checks and show them."""
    from vit_scale.doctor.check import Setup
    from vit_scale.doctor.isolation import count_gpus
    from vit_scale.doctor.progress import Progress
    from vit_scale.doctor.report import exit_status, print_report, to_json
    from vit_scale.doctor.run import all_probes, check_names, run_doctor, scratch_directory, select
    from vit_scale.record.terminal import make_console

    started = time.monotonic()
    check_names(args.only)
    with scratch_directory() as scratch, Progress() as progress:
        gpus = count_gpus(progress)
        probes = select(all_probes(gpus, quick=args.quick), args.only)
        progress.expect(len(probes))
        setup = Setup(scratch, run_dir=str(Path(args.dir).resolve()), gpus=gpus, quick=args.quick)
        checks = run_doctor(probes, setup, progress)
    report = to_json(checks, setup, seconds=time.monotonic() - started)
    if args.json == "-":
        print(report)
        return exit_status(checks)
    print_report(checks, make_console())
    if args.json is not None:
        Path(args.json).write_text(report + "\n", encoding="utf-8")
        print(f"Wrote {args.json}")
    return exit_status(checks)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
