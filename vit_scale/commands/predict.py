"""`vit-scale predict` and `launch/predict.py`: classify pictures with a run."""

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

USAGE = "%(prog)s RUN IMAGE|FOLDER|GLOB ... [--top N] [--json] [--attention [--out FOLDER]]"
DESCRIPTION = """The most probable classes of pictures.

RUN is the folder of a run (also one still going on) or of a checkpoint, or timm/NAME with its published weights.
Files that cannot be read are named and skipped."""
EXAMPLES = """examples:
  python launch/predict.py runs/digits seven.png
  python launch/predict.py runs/imagenet photos/ 'more/**/*.jpg' --json
  python launch/predict.py runs/imagenet cat.jpg --attention --out attention

exit status: 0 if at least one picture could be read, else 2
"""


def main(argv: Sequence[str]) -> int:
    """Load, predict, print."""
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
    pictures = AttentionFigures(run, _out_folder(args, run)) if args.attention else None
    found = [_handle(each, pictures) for each in predict(run, paths, top=args.top, device=device)]
    if not any(each.classes for each in found):
        raise UserError(f"none of {len(paths)} files could be read as a picture")
    if args.json:
        print(json.dumps([_as_dict(each) for each in found], indent=1))
    else:
        _print_table([each for each in found if each.classes])
    if pictures is not None:
        print(f"wrote {len(pictures.written)} pictures to {pictures.folder}", file=sys.stderr)
    return 0


def _out_folder(args: argparse.Namespace, run: LoadedRun) -> Path:
    return Path(args.out) if args.out else (run.folder or Path()) / "attention"


def _handle(prediction: Prediction, pictures: AttentionFigures | None) -> Prediction:
    """Tell of a bad file, draw a good one; the pixels are not kept, for there may be many files."""
    if prediction.problem:
        print(f"skipped {prediction.path}: {prediction.problem}", file=sys.stderr)
    elif pictures is not None:
        try:
            pictures.write(prediction)
        except OSError as error:
            raise UserError(f"--out {pictures.folder}: cannot be written: {error}") from error
    return replace(prediction, pixels=None)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        usage=USAGE, description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="a run, a checkpoint, or timm/NAME")
    add("images", nargs="+", metavar="IMAGE", help="files, folders (with all below), or patterns in quotes")
    add("--top", type=int, default=5, metavar="N", help="classes for each picture (default: %(default)s)")
    add("--weights", choices=("ema", "raw"), help="averaged (default, where there are such) or raw")
    add("--json", action="store_true", help="print JSON: a list of files with their classes and probabilities")
    add("--attention", action="store_true", help="write a picture of where the model looks for each file")
    add("--out", metavar="FOLDER", help="folder of those pictures (default: RUN/attention)")
    args = parser.parse_intermixed_args(argv)
    if args.top < 1:
        raise UserError("--top counts from 1")
    if args.out and not args.attention:
        raise UserError("--out: only --attention writes pictures")
    return args


def _as_dict(prediction: Prediction) -> dict[str, object]:
    if prediction.problem:
        return {"file": str(prediction.path), "problem": prediction.problem}
    classes = [{"class": c.name, "index": c.index, "probability": c.probability} for c in prediction.classes]
    return {"file": str(prediction.path), "predictions": classes}


def _print_table(predictions: Sequence[Prediction]) -> None:
    """A block for each picture: its best class beside its name, the others below."""
    from vit_scale.format import percent
    from vit_scale.record.terminal import make_console, make_table

    table = make_table("picture", "class", "probability")
    for prediction in predictions:
        for i, found in enumerate(prediction.classes):
            name = "" if i else str(prediction.path)
            last = i == len(prediction.classes) - 1 > 0
            table.add_row(name, found.name, percent(found.probability), end_section=last)
    make_console().print(table)
