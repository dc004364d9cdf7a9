"""`vit-scale eval` and `launch/eval.py`: accuracy, confusion and calibration of a run or of a model by name."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vit_scale.cli import Parser
from vit_scale.errors import UserError

if TYPE_CHECKING:
    from vit_scale.inference.eval_data import EvalData
    from vit_scale.inference.eval_report import Evaluation
    from vit_scale.inference.loaded_run import LoadedRun

USAGE = "%(prog)s RUN_OR_WEIGHTS [--data SOURCE] [--split NAME] [section.option=value ...] [options]"
DESCRIPTION = """Top-1, top-5, loss, a row for each class, confusion matrix and calibration error.

RUN_OR_WEIGHTS is the folder of a run (also one still going on) or of a checkpoint, timm/NAME with its published
weights, or a file of weights with --model. Timm's models see images as timm's validate.py shows them. The pictures and
tables of a run are written to RUN/eval-SPLIT/; those of other models only where --out says."""
EXAMPLES = """examples:
  python launch/eval.py runs/digits
  python launch/eval.py runs/imagenet --data data/imagenet-v2 --weights raw augment.eval_crop=1.0
  python launch/eval.py timm/resnet18 --data data/imagenet/val --json resnet18.json
  python launch/eval.py weights.safetensors --model timm/resnet18 --data data/imagenet/val
  accelerate launch --multi_gpu --num_processes 8 launch/eval.py runs/imagenet
"""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments, and the overrides of options."""
    parser = Parser(
        usage=USAGE, description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("target", metavar="RUN_OR_WEIGHTS", help="a run, a checkpoint, timm/NAME, or a file of weights")
    add("--data", metavar="SOURCE", help="other images than the run's, as data.source; a lone folder is taken whole")
    add("--split", metavar="NAME", help="val (default), train, or any split of the data")
    add("--weights", choices=("ema", "raw"), help="of a run: averaged (default, where there are such) or raw")
    add("--model", metavar="NAME", help="the model of a file of weights, such as timm/resnet18")
    add("--match-by-index", action="store_true", help="match the classes of data and model by number, not by name")
    add("--json", metavar="FILE", help="write the figures to this file")
    add("--out", metavar="FOLDER", help="write pictures and tables here (default: RUN/eval-SPLIT)")
    args, overrides = parser.parse_known_args(argv)
    for path in (Path(p) for p in (args.json,) if p):
        if not path.parent.is_dir():
            raise UserError(f"--json {path}: there is no folder {path.parent}")
    return args, overrides


def main(argv: Sequence[str]) -> int:
    """Load, evaluate on all processes, print and write on the main one."""
    args, overrides = parse(argv)
    from vit_scale.launcher import silence_libraries

    silence_libraries()
    from vit_scale.inference.eval_data import fit_classes, open_eval_data
    from vit_scale.inference.evaluate_run import evaluate_run
    from vit_scale.inference.pretrained import load_target
    from vit_scale.strategies.processes import close_processes, join_processes

    loaded = load_target(args.target, model=args.model, weights=args.weights, overrides=overrides)
    if loaded.folder is None and args.data is None:
        raise UserError(f"{args.target}: evaluate it on which images? Add --data SOURCE")
    data = open_eval_data(loaded.config, args.data, args.split)
    loaded, relabel = fit_classes(loaded, data, match_by_index=args.match_by_index)
    out = _out_folder(args, loaded, data)
    processes = join_processes()
    try:
        evaluation = evaluate_run(loaded, data, relabel, processes)
    except UserError as error:
        if not processes.is_main:  # Only this process has met the broken image.
            print(f"error: {error}", file=sys.stderr)
        raise
    if processes.is_main:
        _tell(args, loaded, data, evaluation, out)
    close_processes()
    return 0


def _out_folder(args: argparse.Namespace, loaded: LoadedRun, data: EvalData) -> Path | None:
    """Where pictures and tables go; one folder for each kind of images, so that none overwrites another's."""
    if args.out:
        return Path(args.out)
    if loaded.folder is None:
        return None
    of_data = f"{re.sub(r'[^A-Za-z0-9.-]+', '-', args.data.strip('/.'))}-" if args.data else ""
    folder = loaded.folder / f"eval-{of_data}{re.sub(r'[^A-Za-z0-9.-]+', '-', data.split)}"
    if not os.access(loaded.folder, os.W_OK):
        raise UserError(f"{folder}: the run's folder cannot be written to; choose another with --out FOLDER")
    return folder


def _tell(
    args: argparse.Namespace, loaded: LoadedRun, data: EvalData, evaluation: Evaluation, out: Path | None
) -> None:
    """Print the results, and write what was asked for."""
    from vit_scale.inference.eval_report import print_evaluation, to_json, write_files

    about = {
        "model": f"{loaded.config.model.name}, {loaded.weights}",
        "data": f"{data.description}, {evaluation.images:,} images",
    }
    print_evaluation(evaluation, about)
    try:
        if args.json:
            Path(args.json).write_text(to_json(evaluation, about))
            print(f"wrote {args.json}")
        if out is not None:
            print(f"wrote {out}/: {', '.join(write_files(evaluation, about, out))}")
    except OSError as error:
        raise UserError(f"{args.json or out}: cannot be written: {error}") from error
