"""Importing the package is fast, and its metadata files are consistent."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ["timm", "datasets", "deepspeed", "wandb", "transformers", "accelerate", "sklearn", "torchvision"]


def modules_after(code: str) -> set[str]:
    code += "\nimport sys; print(' '.join(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_importing_the_package_loads_neither_torch_nor_heavier_packages() -> None:
    assert modules_after("import vit_scale").isdisjoint([*HEAVY, "torch"])


def test_creating_a_model_loads_no_heavy_package_except_torch() -> None:
    loaded = modules_after("import vit_scale; vit_scale.create_model('vit_mu')")
    assert "torch" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_public_names_exist_and_unknown_names_raise() -> None:
    import vit_scale

    for name in vit_scale.__all__:
        assert getattr(vit_scale, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = vit_scale.nothing


def test_version_matches_setup(root: Path) -> None:
    import vit_scale

    assert f'version="{vit_scale.__version__}"' in (root / "setup.py").read_text()


def test_constraints_pin_every_requirement(root: Path) -> None:
    required = re.findall(r'^    "([A-Za-z_-]+)[><=;]', (root / "setup.py").read_text(), flags=re.MULTILINE)
    pinned = {line.split("==")[0].lower().replace("-", "_") for line in (root / "constraints.txt").read_text().split()}
    missing = {name for name in required if name.lower().replace("-", "_") not in pinned}
    assert required
    assert not missing


def test_no_file_contains_a_home_directory(root: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.split()
    home = re.compile(r"(?<![\w.])/(home|root|Users)/\w")
    for name in listed:
        if name.endswith((".py", ".md", ".yaml", ".sh", ".toml", ".txt", "Makefile")):
            assert not home.search((root / name).read_text()), name
