"""Importing the package is fast, and its metadata files are consistent."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

# The lowest supported versions and what of them is used. No test installs them: a second environment takes several GB
# and ten minutes. `python tests/floors.py` downloads them and checks that every function and class that vit_scale uses
# exists in their sources.
FLOORS = {
    "torch": ("2.8", "`_has_any_global_hook` and `Store.check`, which 2.7 does not have"),
    "torchvision": ("0.23", "the release for torch 2.8"),
    "timm": ("1.0.15", "`optim.get_optimizer_info`, `models.group_parameters`"),
    "accelerate": ("1.6", "`DistributedDataParallelKwargs`, `DeepSpeedPlugin`, `should_reduce_batch_size`"),
    "deepspeed": ("0.19", "skips steps with non-finite gradients in bf16 at every stage"),
    "transformers": ("4.50", "imported by accelerate before DeepSpeed, never by vit_scale"),
    "datasets": ("3.0", "`exceptions.DatasetNotFoundError`, `distributed.split_dataset_by_node`"),
    "pyarrow": ("15.0", "tables of labels"),
    "huggingface_hub": ("0.26", "`errors`, `get_session`"),
    "wandb": ("0.19", "`Settings`, `plot_table`, `teardown`"),
    "safetensors": ("0.5", "`safe_open`, `SafetensorError`"),
    "numpy": ("1.26", "`numpy.typing`, `lib.stride_tricks.sliding_window_view`"),
    "pillow": ("11", "`ImageOps.exif_transpose(in_place=)`"),
    "simplejpeg": ("1.8", "`decode_jpeg(strict=)`"),
    "PyYAML": ("6.0", "`safe_dump`, `SafeLoader`"),
    "pydantic": ("2.9", "`ConfigDict(use_attribute_docstrings=)` of dataclasses"),
    "psutil": ("5.9", "`Process`, `net_if_addrs`"),
    "packaging": ("23.0", "`requirements.Requirement`"),
    "filelock": ("3.13", "`FileLock`"),
    "tqdm": ("4.66", "bars that are switched off"),
    "rich": ("13.7", "`progress`, `Table.grid`"),
    "scikit-learn": ("1.4", "`load_digits`"),
    "jinja2": ("3.1", "`PackageLoader`, `StrictUndefined`"),
    "matplotlib": ("3.8", "`figure.Figure`"),
    "optuna": ("4.0", "pruners and samplers"),
}

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


def test_lowest_versions_are_those_with_a_reason(root: Path) -> None:
    text = (root / "setup.py").read_text()
    required = text[text.index("REQUIRES = [") : text.index("EXPORT = [")]
    assert dict(re.findall(r'^    "([A-Za-z0-9_-]+)>=([\d.]+)', required, flags=re.MULTILINE)) == {
        name: floor for name, (floor, _) in FLOORS.items()
    }


def test_constraints_are_not_below_the_lowest_versions(root: Path) -> None:
    pins = re.findall(r"^([A-Za-z0-9_-]+)==([\d.]+)", (root / "constraints.txt").read_text(), flags=re.MULTILINE)
    pinned = {name.lower().replace("-", "_"): version for name, version in pins}
    for name, (floor, _) in FLOORS.items():
        found = pinned[name.lower().replace("-", "_")]
        assert [int(n) for n in found.split(".")] >= [int(n) for n in floor.split(".")], name


def test_every_imported_package_is_required(root: Path) -> None:
    """Not only through another one, whose own requirements may change."""
    text = (root / "setup.py").read_text()
    required = {name.lower().replace("-", "_") for name in re.findall(r'"([A-Za-z0-9_-]+)>=[\d.]+', text)}
    modules = {"pil": "pillow", "yaml": "pyyaml", "sklearn": "scikit_learn"}
    imported = set()
    for path in (root / "vit_scale").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {each.name.split(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
    foreign = {name.lower() for name in imported} - {name.lower() for name in sys.stdlib_module_names} - {"vit_scale"}
    assert {modules.get(name, name) for name in foreign} <= required


def test_no_file_contains_a_home_directory(root: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.split()
    home = re.compile(r"(?<![\w.])/(home|root|Users)/\w")
    for name in listed:
        if name.endswith((".py", ".md", ".yaml", ".sh", ".toml", ".txt", "Makefile")):
            assert not home.search((root / name).read_text()), name
