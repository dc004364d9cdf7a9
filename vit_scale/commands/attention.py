"""`vit-scale attention` and `launch/attention.py`: look at what a model attends to."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vit_scale.cli import Parser
from vit_scale.errors import UserError

if TYPE_CHECKING:
    from vit_scale.inference.attention_run import Viewer
    from vit_scale.inference.loaded_run import LoadedRun
    from vit_scale.record.terminal import Terminal
    from vit_scale.strategies.processes import Processes

USAGE = "%(prog)s RUN|timm/NAME [RUN ...] [IMAGE ... | --data SOURCE --images N] [section.option=value ...] [options]"
DESCRIPTION = """Look at what a model attends to.

With images (files, directories, quoted glob patterns): a picture per image with the maps of blocks and heads, their
mean and attention rollout, and the same numbers in an .npz file. A map is the attention of the class token if the head
reads one, otherwise the mean over all patches.

Without images, over a dataset (by default the validation images of the run): per block and head the mean attention
distance in pixels, entropy (0 to 1), effective rank and spectrum of the attention matrices, the fraction of attention
on prefix tokens (class token, registers), and the similarity between heads, as plots, a CSV and JSON.

RUN is a run directory of any task (also of a run in progress), a checkpoint directory, or timm/NAME with its published
weights. Several runs are shown side by side, on the images of the first. Files are written to RUN/attention or
RUN/attention-SPLIT; of other models only if --out is set."""
EXAMPLES = """examples:
  python launch/attention.py runs/digits
  python launch/attention.py runs/imagenet cat.jpg dog.jpg --blocks 0,5,11 --heads 0,1,2
  python launch/attention.py runs/scratch runs/mae --images 500       # what did pre-training change?
  python launch/attention.py timm/vit_base_patch16_224 --data data/flowers --out attention
  python launch/attention.py runs/imagenet photos/ model.img_size=448 --out large
  accelerate launch --multi_gpu --num_processes 8 launch/attention.py runs/imagenet --images 5000
"""
IMAGES = 128
"""Images of a dataset that are measured by default."""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line into arguments and option overrides; `targets` are models, `files` are images."""
    parser = Parser(
        usage=USAGE, description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("words", nargs="+", metavar="RUN|IMAGE", help="runs, checkpoints, timm/NAME or weights files, then images")
    add("--data", metavar="SOURCE", help="images other than the run's, as in data.source; they need no labels")
    add("--split", metavar="NAME", help="images to look at: val (default), train, or any split of the dataset")
    add("--images", type=_count, metavar="N", help=f"at most N images of the dataset (default: {IMAGES})")
    add("--blocks", type=_numbers, metavar="I,J", help="blocks to show, from 0, negative from the end (default: all)")
    add("--heads", type=_numbers, metavar="I,J", help="heads to show, from 0 (default: all)")
    add("--spectra", type=_count, metavar="N", help="images with singular values (default: what takes a minute)")
    add("--weights", choices=("ema", "raw"), help="weights of a run to use: ema (default if available) or raw")
    add("--model", metavar="NAME", help="model of a weights file, e.g. vit_small_patch16_224")
    add("--json", metavar="FILE", help="write the numbers of a dataset to this file")
    add("--out", metavar="DIR", help="directory for pictures and numbers")
    args = parser.parse_intermixed_args(_joined(argv))
    overrides = [word for word in args.words if _is_override(word)]
    words = [word for word in args.words if not _is_override(word)]
    if not words:
        parser.error("the following arguments are required: RUN")
    args.targets = [word for i, word in enumerate(words) if i == 0 or _is_model(word)]
    args.files = [word for i, word in enumerate(words) if i > 0 and not _is_model(word)]
    _check(args)
    return args, overrides


def _is_override(word: str) -> bool:
    return re.match(r"[a-z_]+\.[a-z_0-9]+=", word) is not None and not Path(word).exists()


def _is_model(word: str) -> bool:
    path = Path(word)
    is_folder = any((path / name).is_file() for name in ("config.yaml", "meta.json"))
    is_timm = word.startswith("timm/") and not path.exists()
    return is_folder or is_timm or path.suffix == ".safetensors"


def _check(args: argparse.Namespace) -> None:
    for option in ("data", "split", "images", "json", "spectra"):
        if args.files and getattr(args, option) is not None:
            raise UserError(f"--{option}: only for a dataset, not for the images {' '.join(args.files[:3])}")
    if args.json and not Path(args.json).parent.is_dir():
        raise UserError(f"--json {args.json}: directory {Path(args.json).parent} does not exist")


def _joined(argv: Sequence[str]) -> list[str]:
    """Join `--blocks -2,-1` to `--blocks=-2,-1`: argparse would read a value with a minus as an option."""
    words = list(argv)
    for option in ("--blocks", "--heads"):
        if option in words[:-1]:
            i = words.index(option)
            words[i : i + 2] = [f"{option}={words[i + 1]}"]
    return words


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers with commas, such as 3,7,11") from None


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of at least 1")
    return int(text)


def main(argv: Sequence[str]) -> int:
    """Load the models, and look at images or at a dataset."""
    args, overrides = parse(argv)
    from vit_scale.launcher import is_main_process, silence_libraries
    from vit_scale.record.terminal import Terminal

    silence_libraries()
    terminal = Terminal(enabled=is_main_process(), stderr=True)
    with terminal.phase("Loading libraries") as phase:
        from vit_scale.inference.attention_run import Viewer
        from vit_scale.inference.prediction import find_images
        from vit_scale.inference.pretrained import load_target
        from vit_scale.strategies.processes import close_processes, join_processes
        from vit_scale.strategies.rank_failure import errors_of_ranks

        phase.next("Loading the model" if len(args.targets) == 1 else "Loading the models")
        paths = find_images(args.files) if args.files else []
        overrides = [f"run.eval_images={args.images or IMAGES}", *overrides]
        options = {"model": args.model, "weights": args.weights, "overrides": overrides, "encoder": True}
        loaded = [load_target(target, **options) for target in args.targets]
        names = _names(args.targets, loaded)
        viewers = [Viewer(*each, args.blocks, args.heads) for each in zip(names, loaded, strict=True)]
        processes = join_processes()
    with errors_of_ranks():
        if not paths:
            _look_at_data(args, viewers, processes, terminal)
        elif processes.is_main:
            _look_at_images(args, viewers, paths, processes, terminal)
    close_processes()
    return 0


def _names(targets: Sequence[str], loaded: Sequence[LoadedRun]) -> list[str]:
    """Return short names of the models; what was typed if they are equal."""
    paths = [Path(target) for target in targets]
    short = [
        path.resolve().name if path.exists() else each.config.model.name
        for path, each in zip(paths, loaded, strict=True)
    ]
    return short if len(set(short)) == len(short) else list(targets)


def _look_at_data(
    args: argparse.Namespace, viewers: Sequence[Viewer], processes: Processes, terminal: Terminal
) -> None:
    from vit_scale.inference.attention_output import print_statistics, statistics_json, write_statistics
    from vit_scale.inference.attention_run import measure_run, open_images

    first = viewers[0].loaded
    if first.folder is None and args.data is None:
        raise UserError(f"{args.targets[0]}: no images to look at. Name image files, or add --data SOURCE")
    with terminal.phase("Opening the data"):
        data = open_images(first, args.data, args.split)
        others = "".join(f"-{re.sub(r'[^A-Za-z0-9.-]+', '-', each.name)}" for each in viewers[1:])
        source = f"-{re.sub(r'[^A-Za-z0-9.-]+', '-', args.data.strip('/.'))}" if args.data else ""
        split = re.sub(r"[^A-Za-z0-9.-]+", "-", data.split)
        out = _out_dir(args, first, f"attention{others}{source}-{split}")
    for note in data.notes if processes.is_main else ():
        terminal.info(note)
    looked = [measure_run(each, data, processes, terminal, spectra=args.spectra) for each in viewers]
    if not processes.is_main:
        return
    about = {"model": "; ".join(f"{each.loaded.config.model.name}, {each.loaded.weights}" for each in viewers)}
    about["data"] = data.description
    print_statistics(looked, about)
    try:
        if args.json:
            Path(args.json).write_text(statistics_json(looked, about))
            print(f"Wrote {args.json}")
        if out is not None:
            with terminal.phase("Drawing"):
                names = write_statistics(looked, viewers, about, out)
            print(f"Wrote {out}/: {', '.join(names)}")
    except OSError as error:
        raise UserError(f"{args.json or out}: cannot write: {error}") from error


def _look_at_images(
    args: argparse.Namespace, viewers: Sequence[Viewer], paths: Sequence[Path], processes: Processes, terminal: Terminal
) -> None:
    from vit_scale.inference.attention_output import ImageWriter
    from vit_scale.inference.attention_run import view_image

    out = _out_dir(args, viewers[0].loaded, "attention")
    if out is None:
        raise UserError(f"{args.targets[0]}: no directory to write to. Add --out DIR")
    writer = ImageWriter(out)
    with terminal.phase("Drawing, image", len(paths)) as phase:
        for path in paths:
            viewed = [(viewer, view_image(viewer, path, processes.device)) for viewer in viewers]
            readable = [(viewer, image) for viewer, image in viewed if image is not None]
            try:
                if readable:
                    writer.write(readable)
            except OSError as error:
                raise UserError(f"--out {out}: cannot write: {error}") from error
            phase.advance()
    if not writer.written:
        raise UserError(f"none of {len(paths)} files could be read as an image")
    for path in writer.written[:20]:
        print(f"Wrote {path} and {path.with_suffix('.npz').name}")
    if len(writer.written) > 20:
        print(f"and {len(writer.written) - 20:,} more in {out}")


def _out_dir(args: argparse.Namespace, loaded: LoadedRun, name: str) -> Path | None:
    """Return the directory for pictures and numbers: one per dataset, split and comparison."""
    if args.out:
        return Path(args.out)
    if loaded.folder is None:
        return None
    if not os.access(loaded.folder, os.W_OK):
        raise UserError(
            f"{loaded.folder / name}: the run directory is not writable; choose another directory with --out DIR"
        )
    return loaded.folder / name
