"""Write the page of a run, or of several side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from vit_scale.cli import Parser
from vit_scale.errors import UserError

USAGE = "%(prog)s RUN [RUN ...] [--out FILE]"
DESCRIPTION = """Write one HTML page with the curves, pictures and options of a run, or of several side by side.
Everything is in the file: it can be opened without a network, mailed and kept.

RUN is a run's folder, or a recipe, which means its newest run (options such as run.dir=... may follow)."""
EXAMPLES = """examples:
  python launch/show_run.py runs/digits
  python launch/show_run.py recipes/digits.yaml
  python launch/show_run.py runs/digits runs/digits-2 --out compare.html
"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; `runs` are folders and recipes, `overrides` options of recipes as `a.b=value`."""
    parser = Parser(
        usage=USAGE, description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, or a recipe")
    parser.add_argument("--out", help="file to write (default: page.html in the run's folder; of several, ./runs.html)")
    args, rest = parser.parse_known_intermixed_args(argv)
    args.overrides = [word for word in args.runs if _is_option(word)] + rest
    args.runs = [word for word in args.runs if not _is_option(word)]
    if not args.runs:
        parser.error("which run?")
    return args


def _is_option(word: str) -> bool:
    return "=" in word and not Path(word).exists()


def main(argv: Sequence[str]) -> int:
    """Find the runs, read them, write."""
    args = parse(argv)
    from vit_scale.page.page import write_page
    from vit_scale.page.runs import find_folders, read_runs

    folders = find_folders(args.runs, args.overrides)
    out = Path(args.out) if args.out else folders[0] / "page.html" if len(folders) == 1 else Path("runs.html")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}")
    if out.is_dir():
        raise UserError(f"--out {out}: is a folder; name a file, such as {out / 'page.html'}")
    write_page(read_runs(folders), out)
    print(f"wrote {out}: open it in a browser")
    return 0
