"""`vit-scale report` and `launch/report.py`: report parameters, MACs and memory of models."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vit_scale.cli import Parser
from vit_scale.errors import UserError

if TYPE_CHECKING:
    from vit_scale.report.model_report import ModelReport
    from vit_scale.report.request import Request

USAGE = "%(prog)s [NAME or RECIPE ...] [section.option=value ...] [options]"
DESCRIPTION = """Report parameters, MACs and memory of models, without allocating weights.

NAME is a variant (vit_base_patch16_224) or any timm model (timm/resnet50); RECIPE is a YAML file.
Default: every variant. Recipe options may follow, e.g. model.drop_path=0.4."""
EXAMPLES = """examples:
  python launch/report.py
  python launch/report.py vit_large_patch16_224 --gpus 16 --batch 128
  python launch/report.py vit_large_patch16_224 model.drop_path=0.4 parallel.activation_checkpointing=full
  python launch/report.py recipes/digits.yaml timm/convnext_tiny --format markdown
  python launch/report.py --check

exit code: 0; 1 if --check finds a difference; 2 for invalid arguments
"""
MAX_DETAILED = 3
"""Up to this many models are reported in detail by default."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; `models` are names and recipes, `overrides` recipe options as `a.b=value`."""
    parser = Parser(
        usage=USAGE, description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("models", nargs="*", metavar="NAME or RECIPE", help="models to report on; default: every variant")
    add("--image-size", type=_size, metavar="PIXELS", help="one number, or HEIGHTxWIDTH")
    add("--patch-size", type=_size, metavar="PIXELS", help="one number, or HEIGHTxWIDTH")
    add("--classes", type=_count, metavar="N", help="number of classes")
    add("--batch", type=_count, metavar="N", help="batch size per GPU; adds activations to the memory")
    add("--gpus", type=_count, default=8, metavar="N", help="number of GPUs (default: %(default)s)")
    add(
        "--precision",
        choices=("bf16", "fp16", "fp32"),
        help="training precision (default: the recipe's, otherwise bf16)",
    )
    add("--format", choices=("table", "json", "csv", "markdown"), default="table", help="default: %(default)s")
    add("--detail", action="store_true", help=f"report each model in detail; default for up to {MAX_DETAILED} models")
    add("--check", action="store_true", help="compare each model with timm instead: parameters, shapes per stage, MACs")
    args, rest = parser.parse_known_intermixed_args(argv)
    args.overrides = [model for model in args.models if "=" in model] + rest + _flags_as_overrides(args)
    args.models = [model for model in args.models if "=" not in model]
    return args


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return int(text)


def _size(text: str) -> list[int]:
    sides = [_count(side) for side in text.split("x")]
    if len(sides) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} must be one number or HEIGHTxWIDTH")
    return sides * 2 if len(sides) == 1 else sides


def _flags_as_overrides(args: argparse.Namespace) -> list[str]:
    flags = {
        "model.img_size": args.image_size,
        "model.patch_size": args.patch_size,
        "model.num_classes": args.classes,
        "parallel.precision": args.precision,
    }
    return [f"{option}={value}" for option, value in flags.items() if value is not None]


def main(argv: Sequence[str]) -> int:
    """Report on the requested models, or compare them with timm."""
    args = parse(argv)
    from vit_scale.report.request import load_requests

    requests = load_requests(args.models, args.overrides)
    return check(args, requests) if args.check else report(args, requests)


def report(args: argparse.Namespace, requests: Sequence[Request]) -> int:
    """Print the numbers for every model."""
    from vit_scale.record.terminal import make_console
    from vit_scale.report.model_page import print_page
    from vit_scale.report.model_report import report_on
    from vit_scale.report.overview import print_overview
    from vit_scale.report.request import for_each
    from vit_scale.report.writers import WRITERS

    def work(request: Request) -> ModelReport:
        return report_on(request.config, gpus=args.gpus, batch=args.batch, recipe=request.recipe)

    reports = for_each(requests, work, skip_incompatible=not args.models)
    if args.format != "table":
        print(WRITERS[args.format](reports))
    elif args.detail or 0 < len(args.models) <= MAX_DETAILED:
        for each in reports:
            print_page(each, make_console())
    else:
        print_overview(reports, make_console())
    return 0


def check(args: argparse.Namespace, requests: Sequence[Request]) -> int:
    """Print how every model compares with timm; returns 1 if any differs."""
    from vit_scale.cost.timm_check import check_against_timm
    from vit_scale.report.check_table import checks_to_json, print_checks
    from vit_scale.report.request import for_each

    if args.format not in ("table", "json"):
        raise UserError(f"--format {args.format}: --check supports only table and json")
    checks = for_each(requests, lambda r: check_against_timm(r.config.model), skip_incompatible=not args.models)
    if args.format == "json":
        print(checks_to_json(checks))
    else:
        print_checks(checks)
    return 1 if any(check.differences for check in checks) else 0
