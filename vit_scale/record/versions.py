"""What a result depends on besides its options: versions of packages, and the commit of the code."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

PACKAGES = ("vit_scale", "torch", "torchvision", "timm", "accelerate", "deepspeed", "datasets", "wandb")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """The commit of the code that runs, with `-dirty` where files were changed; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
