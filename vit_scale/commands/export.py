"""`vit-scale export` and `launch/export.py`: export a run's model to timm, ONNX, torch.export or the Hub."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vit_scale.cli import Parser
from vit_scale.errors import UserError

if TYPE_CHECKING:
    from vit_scale.export.verify import Exported

USAGE = "%(prog)s RUN --to timm|onnx|torch-export|hub-folder [--out PATH] [--weights ema|raw] [--push REPO]"
DESCRIPTION = """Export a run's model, verify the exported model against the original, and print how to use it.

RUN is a run directory (also of a run in progress), a checkpoint directory, or timm/NAME with its published weights."""
EXAMPLES = """examples:
  python launch/export.py runs/digits --to timm
  python launch/export.py runs/digits --to onnx --out digits.onnx
  python launch/export.py runs/digits --to torch-export
  python launch/export.py runs/digits --to hub-folder --out digits --push me/digits
"""


class Format(NamedTuple):
    """An export format: the function that writes it, and its file name in RUN/export/."""

    module: str
    function: str
    file: str
    suffix: str


FORMATS = {
    "timm": Format("vit_scale.export.timm_weights", "export_timm", "timm.safetensors", ".safetensors"),
    "onnx": Format("vit_scale.export.onnx_file", "export_onnx", "model.onnx", ".onnx"),
    "torch-export": Format("vit_scale.export.torch_export", "export_torch", "model.pt2", ".pt2"),
    "hub-folder": Format("vit_scale.export.hub_folder", "export_hub_folder", "hub", ""),
}


def main(argv: Sequence[str]) -> int:
    """Load the run, export it, verify the export, and print how to use it."""
    args = parse(argv)
    form = FORMATS[args.to]
    from vit_scale.launcher import silence_libraries

    silence_libraries()
    from vit_scale.inference.pretrained import load_target

    run = load_target(args.run, weights=args.weights)
    run = replace(run, model=run.task.exported(run.model))
    api = _check_login(args.push) if args.push else None
    out = Path(args.out) if args.out else (run.folder or Path()) / "export" / form.file
    export: Callable[..., Exported] = getattr(importlib.import_module(form.module), form.function)
    exported = export(run, out, **({"repo": args.push} if args.push else {}))
    print(f"Wrote {exported.path}: {run.config.model.name}, {run.weights}")
    outputs = "logit" if run.model.num_classes else "feature"
    print(f"Verified: {exported.checked}; maximum {outputs} difference {exported.difference:.2g}")
    print(f"\n{exported.usage}")
    if api is not None:
        from vit_scale.export.push import push_folder

        print(f"\nUploaded to {push_folder(api, exported.path, args.push, private=args.private)}")
    return 0


def _check_login(repo: str) -> object:
    from vit_scale.export.push import check_login

    return check_login(repo)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(
        usage=USAGE, description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="run, checkpoint, or timm/NAME")
    add("--to", required=True, choices=FORMATS, help="export format", metavar="FORMAT")
    add("--out", metavar="PATH", help="output file or directory (default: in RUN/export/)")
    add("--weights", choices=("ema", "raw"), help="weights to use: ema (default if available) or raw")
    add("--push", metavar="REPO", help="upload a hub-folder export to this Hub repository, e.g. me/digits")
    add("--private", action="store_true", help="with --push: if the repository is new, make it private")
    args = parser.parse_args(argv)
    if args.push and args.to != "hub-folder":
        raise UserError(f"--push: requires --to hub-folder, not --to {args.to}")
    if args.private and not args.push:
        raise UserError("--private: requires --push REPO")
    _check_out(args)
    return args


def _check_out(args: argparse.Namespace) -> None:
    suffix = FORMATS[args.to].suffix
    if args.out is None:
        return
    path = Path(args.out)
    if suffix and (path.is_dir() or path.suffix != suffix):
        raise UserError(f"--out {path}: {args.to} writes a {suffix} file, e.g. {path.with_suffix(suffix)}")
    if not suffix and path.is_file():
        raise UserError(f"--out {path}: hub-folder writes a directory, but a file with this name exists")
