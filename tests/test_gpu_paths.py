"""Static checks of what runs on a GPU only: nothing waits for it unseen, and docs/gpus.md lists every such place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "vit_scale"

# What a step runs, from its batches to the counters of the loop.
HOT_PATH = [
    "train/loop.py",
    "train/update.py",
    "train/state.py",
    "train/meter.py",
    "train/optim",
    "strategies/replicated.py",
    "strategies/guarded_step.py",
    "strategies/ema.py",
    "strategies/norms.py",
    "strategies/shards.py",
    "tasks/task.py",
    "tasks/evaluate.py",
    "tasks/classify/classification.py",
    "tasks/classify/evaluator.py",
    "tasks/classify/loss.py",
    "tasks/classify/confusion.py",
    "tasks/classify/calibration.py",
    "data/mixing.py",
    "data/normalize.py",
    "data/progressive.py",
    "data/batch.py",
    "models/vit.py",
    "models/block.py",
    "models/attention.py",
    "models/mlp.py",
    "models/patch_embed.py",
    "models/pos_embed.py",
    "models/dropout.py",
    "models/drop_path.py",
    "kernels/fast_block.py",
    "kernels/residual.py",
]
READS = {
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "argwhere",
    "masked_select",
    "unique",
    "is_nonzero",
    "synchronize",
}
CASTS = {"bool", "float", "int"}
# Functions that read tensors, and why the device does not wait for them between two logged steps.
ALLOWED = {
    "train/loop.py::log": "logged steps",
    "train/loop.py::divergence_error": "the end of a run",
    "train/meter.py::read": "logged steps",
    "train/meter.py::_read_device": "logged steps, the one synchronization",
    "train/state.py::numbers": "checkpoints",
    "strategies/norms.py::weight_norm": "the end of a run",
    "tasks/task.py::metrics": "the end of an evaluation",
    "tasks/classify/evaluator.py::metrics": "the end of an evaluation",
    "tasks/classify/evaluator.py::report": "launch/eval.py",
    "tasks/classify/evaluator.py::images": "launch/eval.py",
    "tasks/classify/evaluator.py::_show_figures": "launch/eval.py",
    "tasks/classify/evaluator.py::class_results": "launch/eval.py",
    "tasks/classify/confusion.py::counts": "the end of an evaluation",
    "tasks/classify/confusion.py::confusion_table": "the end of an evaluation",
    "tasks/classify/calibration.py::from_sums": "the end of an evaluation",
    "tasks/classify/classification.py::inputs": "positions, which stay on the host",
    "data/batch.py::first": "host tensors, for an image grid",
    "data/normalize.py::__init__": "host tensors, once",
    "models/drop_path.py::draw_kept": "on a CPU only",
    "models/dropout.py::drop_patches": "Python numbers",
    "models/vit.py::layer_id": "Python numbers",
}


def functions(path: Path) -> Iterator[tuple[str, list[ast.AST]]]:
    """Yield the functions of a file with their own nodes; `module` has the rest."""
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    owners: dict[ast.AST, str] = {}

    def visit(node: ast.AST, owner: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = child.name if isinstance(child, kinds) else owner
            owners[child] = owner if isinstance(child, kinds) else name
            visit(child, name)

    visit(tree, "module")
    found: dict[str, list[ast.AST]] = {}
    for node, owner in owners.items():
        found.setdefault(owner, []).append(node)
    yield from found.items()


def reads(node: ast.AST) -> bool:
    """Whether a node may read a tensor on the host."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):
        return node.func.attr in READS and not node.args
    return isinstance(node.func, ast.Name) and node.func.id in CASTS and not isinstance(node.args[0], ast.Constant)


def test_nothing_reads_the_device_between_two_logged_steps() -> None:
    found = set()
    for place in HOT_PATH:
        path = LIBRARY / place
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            for function, nodes in functions(file):
                if any(map(reads, nodes)):
                    found.add(f"{file.relative_to(LIBRARY)}::{function}")
    assert found - ALLOWED.keys() == set(), "new reads of tensors"
    assert ALLOWED.keys() - found == set(), "no longer there"


def depends_on_gpu(node: ast.AST) -> bool:
    """Whether a node asks for the kind of device, or for something of torch.cuda."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        names = {side.value for side in sides if isinstance(side, ast.Constant)}
        return bool(names & {"cuda", "cpu"})
    if isinstance(node, ast.Attribute):
        text = ast.unparse(node)
        return text.startswith("torch.cuda.") or text == "gpu.is_gpu"
    return False


def gpu_places() -> set[str]:
    """Return `vit_scale/file.py::function` for every place that behaves differently with a GPU."""
    found = set()
    for file in sorted(LIBRARY.rglob("*.py")):
        if "doctor" in str(file.relative_to(LIBRARY)):
            continue  # It reports what it finds on the GPU itself.
        for function, nodes in functions(file):
            if any(map(depends_on_gpu, nodes)):
                found.add(f"{file.relative_to(ROOT)}::{function}")
    return found


@pytest.fixture(scope="module")
def documented() -> set[str]:
    text = (ROOT / "docs" / "gpus.md").read_text()
    places = set()
    file = ""
    for path, function in re.findall(r"`((?:vit_scale|tests)/[\w/]+\.py)?(?:::(\w+))?`", text):
        file = path or file
        if function and file.startswith("vit_scale/"):
            places.add(f"{file}::{function}")
    return places


def test_docs_list_every_place_that_depends_on_a_gpu(documented: set[str]) -> None:
    assert gpu_places() - documented == set(), "add these to docs/gpus.md, and how they were checked"


def test_places_in_the_docs_exist(documented: set[str]) -> None:
    defined = {
        f"{file.relative_to(ROOT)}::{node.name}"
        for file in LIBRARY.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assert documented - defined == set()
