"""`vit-scale show` and `launch/show_run.py`: write an HTML page about one run, or several side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from vit_scale.cli import Parser
from vit_scale.errors import UserError

USAGE = "%(prog)s RUN [RUN ...] [--out FILE]"
DESCRIPTION = """Write an HTML page with the curves, images and options of one run, or several side by side.
The file is self-contained: it needs no network.

RUN is a run directory, or a recipe, which means its latest run (options such as run.dir=... may follow)."""
EXAMPLES = """examples:
  python launch/show_run.py runs/digits
  python launch/show_run.py recipes/digits.yaml
  python launch/show_run.py runs/digits runs/digits-2 --out compare.html
"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; `runs` are directories and recipes, `overrides` recipe options as `a.b=value`."""
    parser = Parser(
        usage=USAGE, description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory or recipe")
    parser.add_argument(
        "--out", help="output file (default: page.html in the run directory; ./runs.html for several runs)"
    )
    args, rest = parser.parse_known_intermixed_args(argv)
    args.overrides = [word for word in args.runs if _is_option(word)] + rest
    args.runs = [word for word in args.runs if not _is_option(word)]
    if not args.runs:
        parser.error("no run given")
    return args


def _is_option(word: str) -> bool:
    return "=" in word and not Path(word).exists()


def main(argv: Sequence[str]) -> int:
    """Find and read the runs, and write the page."""
    args = parse(argv)
    from vit_scale.page.page import write_page
    from vit_scale.page.runs import find_folders, read_runs

    folders = find_folders(args.runs, args.overrides)
    out = Path(args.out) if args.out else folders[0] / "page.html" if len(folders) == 1 else Path("runs.html")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: directory {out.parent} does not exist")
    if out.is_dir():
        raise UserError(f"--out {out}: is a directory; name a file, e.g. {out / 'page.html'}")
    write_page(read_runs(folders), out)
    print(f"Wrote {out}. Open it in a browser.")
    return 0
