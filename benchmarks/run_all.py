"""Runs the benchmarks one after another and writes docs/benchmarks.md: machine, versions, date, figures, limits.

    python benchmarks/run_all.py [--data PHOTOGRAPHS] [--small SMALL_IMAGES] [--only train_step ...] [--output FILE]

`make bench` runs it; `make bench DATA=FOLDER SMALL=FOLDER` on images of your own, which any data.source may be. Without
them, images are cut from scikit-learn's photographs. time_to_accuracy.py, which takes an hour, is not among them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from programs import ROOT
from side_by_side import Row, number, sides_in_words

HERE = Path(__file__).parent
ABOUT = {
    "train_step": "A training step: our model beside timm's",
    "attention": "The attention kernel for CPUs beside torch's",
    "train_end_to_end": "Whole training, images to updates, beside a loop built as timm's train.py is",
    "input_pipeline": "The input pipeline beside timm's loader and Hugging Face's `with_transform`",
    "loop_overhead": "The training loop beside bare forward, backward and step",
    "memory": "Peak memory beside timm's, and measured beside predicted under each strategy",
    "checkpoint": "Saving beside a synchronous `torch.save` of the same state",
    "startup": "From the command to the first update, beside timm's way of starting",
    "scaling": "Two processes beside one, at equal threads for each",
}


def main() -> None:
    """Parse, run, write."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", help="photographs, used at 224 px")
    options.add_argument("--small", help="small images, such as CIFAR-10, used at 32 px")
    options.add_argument("--only", nargs="+", choices=list(ABOUT), default=list(ABOUT), metavar="NAME")
    options.add_argument("--output", type=Path, default=ROOT / "docs/benchmarks.md")
    args = options.parse_args()
    start = time.perf_counter()
    reports: dict[str, dict[str, Any]] = {}
    for name in args.only:
        reports[name] = run(name, arguments(name, args))
        minutes = (time.perf_counter() - start) / 60
        args.output.write_text(page(reports, args, minutes))  # After each, so that what was measured is kept.
    print(f"Written to {args.output} after {minutes:.0f} minutes.")


def arguments(name: str, args: argparse.Namespace) -> list[str]:
    """The images that a benchmark is to use, in its own options."""
    photographs, small = ["--data", args.data] if args.data else [], ["--small", args.small] if args.small else []
    if name == "train_end_to_end":
        return photographs + small
    if name == "input_pipeline":
        folders = [folder for folder in (args.data, args.small) if folder]
        return ["--data", *folders] if folders else []
    return ["--data", args.small] if name == "startup" and args.small else []


def run(name: str, extra: list[str]) -> dict[str, Any]:
    """Run a benchmark; shows its rows as they come."""
    print(f"== benchmarks/{name}.py", flush=True)
    start = time.perf_counter()
    command = [sys.executable, str(HERE / f"{name}.py"), *extra, "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    report = json.loads(done.stdout)
    for row in map(as_row, report["rows"]):
        print(f"   {row.case}: {row.ratio:.2f} ({row.low:.2f} to {row.high:.2f})  {row.goal_in_words()}", flush=True)
    return report | {"seconds": time.perf_counter() - start}


def as_row(found: dict[str, Any]) -> Row:
    return Row(**{key: value for key, value in found.items() if key != "reached"})


# -------------------------------------------------------------------------------------------------------------- page


def page(reports: dict[str, dict[str, Any]], args: argparse.Namespace, minutes: float) -> str:
    """docs/benchmarks.md."""
    machine = next(iter(reports.values()))["machine"]
    images = ", ".join(f"{kind} {Path(folder).name}" for kind, folder in _images(args)) or "of scikit-learn"
    head = [
        "# Benchmarks",
        "",
        "Written by `make bench`. Each script in benchmarks/ measures both sides in turn in one run. Figures are",
        "medians over rounds; the ratio is ours to the peer's within a round, and its quartiles tell the spread. In",
        "brackets stands the share of the peak (MFU): of a matrix product measured in the same run.",
        "",
        *goals(reports),
        "",
        f"- Machine: {machine}",
        f"- Date: {datetime.date.today().isoformat()}, {minutes:.0f} minutes in all",
        f"- Images: {images}",
        "- `--device cuda` is for running the same scripts on a GPU; all rows here are from the machine above",
    ]
    return "\n".join([*head, *(line for name, report in reports.items() for line in section(name, report)), ""])


def goals(reports: dict[str, dict[str, Any]]) -> list[str]:
    """How many goals are reached, and which are not."""
    rows = [as_row(found) for report in reports.values() for found in report["rows"] if found["goal"] is not None]
    missed = [row for row in rows if not row.reached]
    if not missed:
        return [f"**All {len(rows)} goals reached.**"]
    told = [f"- {row.case}: {row.ratio:.2f}, {row.goal_in_words()}" for row in missed]
    return [f"**{len(rows) - len(missed)} of {len(rows)} goals reached.**", "", *told]


def _images(args: argparse.Namespace) -> list[tuple[str, str]]:
    return [(kind, folder) for kind, folder in (("photographs", args.data), ("small", args.small)) if folder]


def section(name: str, report: dict[str, Any]) -> list[str]:
    """Heading, table, limits and notes of a benchmark."""
    rows = [as_row(found) for found in report["rows"]]
    lines = ["", f"## {ABOUT[name]}", f"`python benchmarks/{name}.py`, {report['seconds'] / 60:.1f} minutes.", ""]
    lines += ["| | ours | peer | | ratio | quartiles | goal |", "| --- | --- | --- | --- | --- | --- | --- |"]
    lines += [f"| {' | '.join(cells(row))} |" for row in rows]
    details = [f"- {row.case}: {more(row)}" for row in rows if row.more]
    lines += ["", *details] if details else []
    limits = list(dict.fromkeys(row.limit for row in rows if row.limit))
    lines += ["", *(f"What sets the limit: {limit}." for limit in limits)]
    return lines + [f"\n{note}." for note in report["notes"]]


def cells(row: Row) -> list[str]:
    quartiles = f"{row.low:.2f} to {row.high:.2f}"
    return [row.case, *sides_in_words(row), row.unit, f"{row.ratio:.2f}", quartiles, row.goal_in_words()]


def more(row: Row) -> str:
    return ", ".join(f"{number(value)} {name}" for name, value in row.more.items())


if __name__ == "__main__":
    main()
