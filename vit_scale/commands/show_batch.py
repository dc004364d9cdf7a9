"""`vit-scale batch` and `launch/show_batch.py`: a picture of what the model receives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vit_scale.cli import Parser
from vit_scale.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Read the recipe, draw, write."""
    parser = Parser(
        usage="%(prog)s RECIPE [section.option=value ...] [--out FILE] [--step N] [--count N]",
        description="Write a PNG grid of a training batch as the model receives it, with labels and mixing weights.",
    )
    parser.add_argument("recipe", help="a YAML file, such as recipes/digits.yaml")
    parser.add_argument("--out", default="batch.png", help="file to write (default: %(default)s)")
    parser.add_argument("--step", type=int, default=0, help="step whose batch is shown (default: %(default)s)")
    parser.add_argument("--count", type=int, default=16, help="images at most (default: %(default)s)")
    args, overrides = parser.parse_known_args(argv)
    if args.step < 0 or args.count < 1:
        raise UserError("--step counts from 0, --count from 1")
    out = Path(args.out)
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}")

    from vit_scale.recipe import load_recipe
    from vit_scale.train.preview import preview

    picture = preview(load_recipe(args.recipe, overrides), args.step, args.count)
    try:
        picture.save(out)
    except (OSError, ValueError) as error:
        raise UserError(f"--out {out}: cannot be written: {error}") from error
    print(f"wrote {out}")
    return 0
