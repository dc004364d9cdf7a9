"""Package versions and the commit of the code, on which a result depends besides its options."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

PACKAGES = ("vit_scale", "torch", "torchvision", "timm", "accelerate", "deepspeed", "datasets", "wandb")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """Return the commit of the running code, with `-dirty` if files were changed; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
