"""`vit-scale predict` and `launch/predict.py`: classify images with a run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vit_scale.cli import Parser
from vit_scale.errors import UserError

if TYPE_CHECKING:
    from vit_scale.inference.attention_figures import AttentionFigures
    from vit_scale.inference.loaded_run import LoadedRun
    from vit_scale.inference.prediction import Prediction

USAGE = "%(prog)s RUN IMAGE|DIR|GLOB ... [--top N] [--json] [--attention [--out DIR]]"
DESCRIPTION = """Print the most probable classes of images.

RUN is a run directory (also of a run in progress), a checkpoint directory, or timm/NAME with its published weights.
Unreadable files are reported and skipped."""
EXAMPLES = """examples:
  python launch/predict.py runs/digits seven.png
  python launch/predict.py runs/imagenet photos/ 'more/**/*.jpg' --json
  python launch/predict.py runs/imagenet cat.jpg --attention --out attention

exit code: 0 if at least one image could be read, otherwise 2
"""


def main(argv: Sequence[str]) -> int:
    """Load the run, classify the images, print the predictions."""
    args = parse(argv)
    from vit_scale.launcher import silence_libraries

    silence_libraries()
    import torch

    from vit_scale.inference.attention_figures import AttentionFigures
    from vit_scale.inference.prediction import find_images, predict
    from vit_scale.inference.pretrained import load_target

    paths = find_images(args.images)
    run = load_target(args.run, weights=args.weights)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    figures = AttentionFigures(run, _out_dir(args, run)) if args.attention else None
    predictions = [_handle(each, figures) for each in predict(run, paths, top=args.top, device=device)]
    if not any(each.classes for each in predictions):
        raise UserError(f"none of {len(paths)} files could be read as an image")
    if args.json:
        print(json.dumps([_as_dict(each) for each in predictions], indent=1))
    else:
        _print_table([each for each in predictions if each.classes])
    if figures is not None:
        print(f"Wrote {len(figures.written)} figures to {figures.folder}", file=sys.stderr)
    return 0


def _out_dir(args: argparse.Namespace, run: LoadedRun) -> Path:
    return Path(args.out) if args.out else (run.folder or Path()) / "attention"


def _handle(prediction: Prediction, figures: AttentionFigures | None) -> Prediction:
    """Report an unreadable file or draw its attention; drop the pixels, since there may be many files."""
    if prediction.problem:
        print(f"Skipped {prediction.path}: {prediction.problem}", file=sys.stderr)
    elif figures is not None:
        try:
            figures.write(prediction)
        except OSError as error:
            raise UserError(f"--out {figures.folder}: cannot write: {error}") from error
    return replace(prediction, pixels=None)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(
        usage=USAGE, description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="run, checkpoint, or timm/NAME")
    add("images", nargs="+", metavar="IMAGE", help="files, directories (recursive), or quoted glob patterns")
    add("--top", type=int, default=5, metavar="N", help="classes per image (default: %(default)s)")
    add("--weights", choices=("ema", "raw"), help="weights to use: ema (default if available) or raw")
    add("--json", action="store_true", help="print a JSON list of files with their classes and probabilities")
    add("--attention", action="store_true", help="write an attention map per file")
    add("--out", metavar="DIR", help="directory for attention maps (default: RUN/attention)")
    args = parser.parse_intermixed_args(argv)
    if args.top < 1:
        raise UserError("--top: must be at least 1")
    if args.out and not args.attention:
        raise UserError("--out: requires --attention")
    return args


def _as_dict(prediction: Prediction) -> dict[str, object]:
    if prediction.problem:
        return {"file": str(prediction.path), "problem": prediction.problem}
    classes = [{"class": c.name, "index": c.index, "probability": c.probability} for c in prediction.classes]
    return {"file": str(prediction.path), "predictions": classes}


def _print_table(predictions: Sequence[Prediction]) -> None:
    """Print a block per image: the top class next to the file name, the others below."""
    from vit_scale.format import percent
    from vit_scale.record.terminal import make_console, make_table

    table = make_table("image", "class", "probability")
    for prediction in predictions:
        for i, found in enumerate(prediction.classes):
            name = "" if i else str(prediction.path)
            last = i == len(prediction.classes) - 1 > 0
            table.add_row(name, found.name, percent(found.probability), end_section=last)
    make_console().print(table)
