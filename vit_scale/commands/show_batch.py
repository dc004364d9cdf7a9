"""`vit-scale batch` and `launch/show_batch.py`: save a training batch as an image grid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vit_scale.cli import Parser
from vit_scale.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Read the recipe and write the image grid."""
    parser = Parser(
        usage="%(prog)s RECIPE [section.option=value ...] [--out FILE] [--step N] [--count N]",
        description="Save a training batch as seen by the model as a PNG grid, with labels and mixing coefficients.",
    )
    parser.add_argument("recipe", help="YAML file, e.g. recipes/digits.yaml")
    parser.add_argument("--out", default="batch.png", help="output file (default: %(default)s)")
    parser.add_argument("--step", type=int, default=0, help="training step of the batch (default: %(default)s)")
    parser.add_argument("--count", type=int, default=16, help="maximum number of images (default: %(default)s)")
    args, overrides = parser.parse_known_args(argv)
    if args.step < 0 or args.count < 1:
        raise UserError("--step must be at least 0 and --count at least 1")
    out = Path(args.out)
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: directory {out.parent} does not exist")

    from vit_scale.recipe import load_recipe
    from vit_scale.train.preview import preview

    grid = preview(load_recipe(args.recipe, overrides), args.step, args.count)
    try:
        grid.save(out)
    except (OSError, ValueError) as error:
        raise UserError(f"--out {out}: cannot write: {error}") from error
    print(f"Wrote {out}")
    return 0
