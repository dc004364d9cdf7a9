"""What all entry points share: parsing, and telling the user's mistakes apart from crashes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from vit_scale.errors import UserError
from vit_scale.launcher import adopt_launcher


def run_main(main: Callable[[Sequence[str]], int]) -> None:
    """Run `main(argv)` and exit with its status; a `UserError` is a message on stderr and status 2."""
    adopt_launcher()
    try:
        status = main(sys.argv[1:])
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        status = 130
    except BrokenPipeError:  # `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    sys.exit(status)


class Parser(argparse.ArgumentParser):
    """argparse, whose errors are `UserError`s."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message}\n{self.format_usage().strip()}")
