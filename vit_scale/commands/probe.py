"""`vit-scale probe` and `launch/probe.py`: judge frozen features by k-NN and a linear probe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vit_scale.cli import Parser
from vit_scale.errors import UserError

if TYPE_CHECKING:
    from vit_scale.inference.loaded_run import LoadedRun
    from vit_scale.inference.probe_run import Judgement, ProbeData
    from vit_scale.record.terminal import Terminal

USAGE = "%(prog)s RUN_OR_WEIGHTS [--data SOURCE] [--split NAME] [section.option=value ...] [options]"
DESCRIPTION = """Judge the features of a frozen model without training it: k-nearest-neighbor classification by cosine
similarity, and a linear probe.

Features of labeled training and validation images are computed once, with the evaluation transform: the class token,
the mean of the patch tokens, or both, after any block; of networks other than ViTs, their pooled features. The learning
rate and weight decay of the linear probe are selected on held-out training images, never on the validation images.

RUN_OR_WEIGHTS is a run directory of any task (also of a run in progress), a checkpoint directory, timm/NAME with its
published weights, or a weights file with --model, with or without a classifier. Numbers and a picture of the features
are written to RUN/probe-SPLIT/; of other models only if --out is set."""
EXAMPLES = """examples:
  python launch/probe.py runs/digits
  python launch/probe.py runs/mae --data data/cifar10 --blocks 3,7,11 --features both
  python launch/probe.py timm/vit_base_patch16_224.mae --data data/flowers --out probe-flowers
  python launch/probe.py encoder.safetensors --model vit_small_patch16_224 --data data/flowers --json probe.json
  python launch/probe.py runs/mae --split train --images 5000     # k-NN among training images, leaving one out
  accelerate launch --multi_gpu --num_processes 8 launch/probe.py runs/mae
"""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line into arguments and option overrides."""
    parser = Parser(
        usage=USAGE, description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("target", metavar="RUN_OR_WEIGHTS", help="run, checkpoint, timm/NAME, or weights file")
    add("--data", metavar="SOURCE", help="labeled images other than the run's, as in data.source")
    add("--split", metavar="NAME", help="images to classify: val (default), train, or any split of the dataset")
    add("--images", type=_count, metavar="N", help="at most N training and N other images, spread over the classes")
    add("--blocks", type=_numbers, metavar="I,J", help="blocks, from 0, negative from the end (default: the last)")
    add(
        "--features",
        choices=("cls", "mean", "both"),
        help="class token, mean of the patch tokens, or both (default: what the model's head reads)",
    )
    add("--k", type=_counts, metavar="K,L", help="neighbors (default: 10,20,100,200, those that fit the data)")
    add("--weights", choices=("ema", "raw"), help="weights of a run to use: ema (default if available) or raw")
    add("--model", metavar="NAME", help="model of a weights file, e.g. vit_small_patch16_224 or timm/resnet18")
    add("--json", metavar="FILE", help="write the numbers to this file")
    add("--out", metavar="DIR", help="directory for numbers and pictures (default: RUN/probe-SPLIT)")
    args, overrides = parser.parse_known_args(_joined(argv))
    if args.json and not Path(args.json).parent.is_dir():
        raise UserError(f"--json {args.json}: directory {Path(args.json).parent} does not exist")
    return args, overrides


def _joined(argv: Sequence[str]) -> list[str]:
    """Join `--blocks -2,-1` to `--blocks=-2,-1`: argparse would read a value with a minus as an option."""
    words = list(argv)
    for i in range(len(words) - 1):
        if words[i] == "--blocks" and not words[i + 1].startswith("--"):
            words[i : i + 2] = [f"--blocks={words[i + 1]}"]
            break
    return words


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers with commas, such as 3,7,11") from None


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of at least 1")
    return int(text)


def main(argv: Sequence[str]) -> int:
    """Compute features on all processes, judge them, print and write the results on the main process."""
    args, overrides = parse(argv)
    from vit_scale.launcher import is_main_process, silence_libraries
    from vit_scale.record.terminal import Terminal

    silence_libraries()
    terminal = Terminal(enabled=is_main_process(), stderr=True)
    with terminal.phase("Loading libraries") as phase:
        from vit_scale.inference.output_dir import output_dir
        from vit_scale.inference.pretrained import load_target
        from vit_scale.inference.probe_run import open_probe_data, probe_run
        from vit_scale.probe.features import FeatureModel
        from vit_scale.strategies.processes import close_processes, join_processes
        from vit_scale.strategies.rank_failure import errors_of_ranks

        phase.next("Loading the model")
        loaded = load_target(args.target, model=args.model, weights=args.weights, overrides=overrides, encoder=True)
        if loaded.folder is None and args.data is None:
            raise UserError(f"{args.target}: no data to judge features with. Add --data SOURCE")
        extract = FeatureModel(loaded.model, args.blocks, args.features, name=loaded.config.model.name)
        phase.next("Opening the data")
        data = open_probe_data(loaded, args.data, args.split, args.images)
        out = output_dir("probe", loaded, out=args.out, source=args.data, split=data.split)
        phase.next("Connecting the processes")
        processes = join_processes()
    for note in data.notes if processes.is_main else ():
        terminal.info(note)
    with errors_of_ranks():
        judgement = probe_run(loaded, data, extract, args.k, processes, terminal)
    if judgement is not None:
        _report(args, loaded, data, judgement, out, terminal)
    close_processes()
    return 0


def _report(
    args: argparse.Namespace,
    loaded: LoadedRun,
    data: ProbeData,
    judgement: Judgement,
    out: Path | None,
    terminal: Terminal,
) -> None:
    """Print the results and write the requested files."""
    from vit_scale.inference.probe_report import judgement_json, print_judgement, write_judgement

    about = {"model": f"{loaded.config.model.name}, {loaded.weights}", "data": data.description}
    print_judgement(judgement, about)
    try:
        if args.json:
            Path(args.json).write_text(judgement_json(judgement, about))
            print(f"Wrote {args.json}")
        if out is not None:
            with terminal.phase("Drawing the features", len(judgement.blocks)) as phase:
                seed = loaded.config.run.seed
                names = write_judgement(judgement, about, data, out, seed=seed, advance=phase.advance)
            print(f"Wrote {out}/: {', '.join(names)}")
    except OSError as error:
        raise UserError(f"{args.json or out}: cannot write: {error}") from error
