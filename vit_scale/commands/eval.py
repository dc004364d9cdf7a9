"""`vit-scale eval` and `launch/eval.py`: compute the metrics of a run or named model."""

from __future__ import annotations

import argparse
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
DESCRIPTION = """Compute the metrics of a run's task. For classification: top-1, top-5 (of more than five classes), loss
and calibration error, with tables and figures of the results per class, the confusion matrix, misclassified images and
attention maps.

RUN_OR_WEIGHTS is a run directory (also of a run in progress), a checkpoint directory, timm/NAME with its published
weights, or a weights file with --model. timm models are evaluated with the preprocessing of timm's validate.py. Figures
and tables of a run are written to RUN/eval-SPLIT/; of other models only if --out is set."""
EXAMPLES = """examples:
  python launch/eval.py runs/digits
  python launch/eval.py runs/imagenet --data data/imagenet-v2 --weights raw augment.eval_crop=1.0
  python launch/eval.py timm/resnet18 --data data/imagenet/val --json resnet18.json
  python launch/eval.py weights.safetensors --model timm/resnet18 --data data/imagenet/val
  accelerate launch --multi_gpu --num_processes 8 launch/eval.py runs/imagenet
"""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line into arguments and option overrides."""
    parser = Parser(
        usage=USAGE, description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("target", metavar="RUN_OR_WEIGHTS", help="run, checkpoint, timm/NAME, or weights file")
    add(
        "--data",
        metavar="SOURCE",
        help="images other than the run's, as in data.source; a directory without splits is used in full",
    )
    add("--split", metavar="NAME", help="val (default), train, or any split of the dataset")
    add("--weights", choices=("ema", "raw"), help="weights of a run to use: ema (default if available) or raw")
    add("--model", metavar="NAME", help="model of a weights file, e.g. timm/resnet18")
    add("--match-by-index", action="store_true", help="match classes of data and model by index instead of name")
    add("--json", metavar="FILE", help="write the metrics to this file")
    add("--out", metavar="DIR", help="directory for figures and tables (default: RUN/eval-SPLIT)")
    args, overrides = parser.parse_known_args(argv)
    for path in (Path(p) for p in (args.json,) if p):
        if not path.parent.is_dir():
            raise UserError(f"--json {path}: directory {path.parent} does not exist")
    return args, overrides


def main(argv: Sequence[str]) -> int:
    """Load the model, evaluate on all processes, print and write the results on the main process."""
    args, overrides = parse(argv)
    from vit_scale.launcher import is_main_process, silence_libraries
    from vit_scale.record.terminal import Terminal

    silence_libraries()
    terminal = Terminal(enabled=is_main_process(), stderr=True)
    with terminal.phase("Loading libraries") as phase:
        from vit_scale.inference.eval_data import fit_classes, open_eval_data
        from vit_scale.inference.evaluate_run import evaluate_run
        from vit_scale.inference.output_dir import output_dir
        from vit_scale.inference.pretrained import load_target
        from vit_scale.strategies.processes import close_processes, join_processes
        from vit_scale.strategies.rank_failure import errors_of_ranks

        phase.next("Loading the model")
        overrides = ["run.eval_images=null", *overrides]  # The cap of the run is for evaluations during training.
        loaded = load_target(args.target, model=args.model, weights=args.weights, overrides=overrides)
        if loaded.folder is None and args.data is None:
            raise UserError(f"{args.target}: no data to evaluate on. Add --data SOURCE")
        phase.next("Opening the data")
        data = open_eval_data(loaded, args.data, args.split)
        loaded, relabel = fit_classes(loaded, data, match_by_index=args.match_by_index)
        out = output_dir("eval", loaded, out=args.out, source=args.data, split=data.split)
        phase.next("Connecting the processes")
        processes = join_processes()
    for note in data.notes if processes.is_main else ():
        terminal.info(note)
    with errors_of_ranks():
        evaluation = evaluate_run(loaded, data, relabel, processes, terminal)
    if processes.is_main:
        _report(args, loaded, data, evaluation, out)
    close_processes()
    return 0


def _report(
    args: argparse.Namespace, loaded: LoadedRun, data: EvalData, evaluation: Evaluation, out: Path | None
) -> None:
    """Print the results and write the requested files."""
    from vit_scale.inference.eval_report import print_evaluation, to_json, write_files

    about = {
        "model": f"{loaded.config.model.name}, {loaded.weights}",
        "data": f"{data.description}, {evaluation.images:,} images",
    }
    print_evaluation(evaluation, about)
    try:
        if args.json:
            Path(args.json).write_text(to_json(evaluation, about))
            print(f"Wrote {args.json}")
        if out is not None:
            print(f"Wrote {out}/: {', '.join(write_files(evaluation, about, out))}")
    except OSError as error:
        raise UserError(f"{args.json or out}: cannot write: {error}") from error
