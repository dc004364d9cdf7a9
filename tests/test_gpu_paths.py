"""Static checks of what runs on a GPU only: nothing waits for it unseen, and docs/gpus.md lists every such place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
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
    "strategies/zero.py",
    "strategies/zero_forward.py",
    "strategies/zero_shards.py",
    "tasks/task.py",
    "tasks/evaluate.py",
    "tasks/classify/classification.py",
    "tasks/classify/evaluator.py",
    "tasks/classify/loss.py",
    "tasks/classify/class_weights.py",
    "tasks/classify/confusion.py",
    "tasks/classify/calibration.py",
    "data/mixing.py",
    "data/normalize.py",
    "data/progressive.py",
    "data/batch.py",
    "models/vit.py",
    "models/composite.py",
    "models/timm_models.py",
    "models/block.py",
    "models/attention.py",
    "models/cross_attention.py",
    "models/deformable_attention.py",
    "models/sparse_attention.py",
    "models/linear_attention.py",
    "models/layers/mlp.py",
    "models/layers/patch_embed.py",
    "models/layers/pos_embed.py",
    "models/layers/dropout.py",
    "models/layers/drop_path.py",
    "kernels/fast_block.py",
    "kernels/flex.py",
    "kernels/residual.py",
    "gpu.py",
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
    "strategies/zero.py::use_all_threads": "Python numbers, once",
    "tasks/task.py::metrics": "the end of an evaluation",
    "tasks/classify/evaluator.py::metrics": "the end of an evaluation",
    "tasks/classify/evaluator.py::report": "launch/eval.py",
    "tasks/classify/evaluator.py::images": "launch/eval.py",
    "tasks/classify/evaluator.py::_show_figures": "launch/eval.py",
    "tasks/classify/evaluator.py::class_results": "launch/eval.py",
    "tasks/classify/confusion.py::counts": "the end of an evaluation",
    "tasks/classify/confusion.py::confusion_table": "the end of an evaluation",
    "tasks/classify/calibration.py::from_sums": "the end of an evaluation",
    "tasks/classify/class_weights.py::_balanced": "host counts, once",
    "tasks/classify/classification.py::mixed": "positions, which stay on the host",
    "data/batch.py::first": "host tensors, for an image grid",
    "data/normalize.py::__init__": "host tensors, once",
    "models/layers/drop_path.py::draw_kept": "on a CPU only",
    "models/layers/dropout.py::drop_patches": "Python numbers",
    "models/vit.py::layer_id": "Python numbers",
    "gpu.py::wait_for_downloads": "checkpoints",
}


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


def functions(path: Path) -> Iterator[tuple[str, list[ast.AST]]]:
    """Yield the functions of a file with their own nodes; `module` has the rest."""
    tree = parsed(path)
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
    """Whether a node names a GPU, asks for the kind of device, or for something of torch.cuda."""
    if isinstance(node, ast.Constant):
        return node.value in {"cuda", "nccl", "CUDA_VISIBLE_DEVICES"}
    if isinstance(node, ast.Compare):
        return any(isinstance(side, ast.Constant) and side.value == "cpu" for side in [node.left, *node.comparators])
    if isinstance(node, ast.Attribute):
        return is_of_torch_cuda(node) or node.attr in {"is_gpu", "is_cuda"}
    return isinstance(node, ast.Name) and node.id == "is_gpu"


def is_of_torch_cuda(node: ast.Attribute) -> bool:
    """Whether a node is `torch.cuda.<name>`."""
    return isinstance(node.value, ast.Attribute) and ast.unparse(node.value) == "torch.cuda"


def files() -> Iterator[Path]:
    """Yield the files of the library, without the doctor: it reports what it finds on the GPU itself."""
    for file in sorted(LIBRARY.rglob("*.py")):
        if "doctor" not in str(file.relative_to(LIBRARY)):
            yield file


def gpu_places() -> set[str]:
    """Return `vit_scale/file.py::function` for every place that behaves differently with a GPU; also of constants."""
    found = set()
    for file in files():
        for function, nodes in functions(file):
            if function != "module" and any(map(depends_on_gpu, nodes)):
                found.add(f"{file.relative_to(ROOT)}::{function}")
        for node in parsed(file).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and any(map(depends_on_gpu, ast.walk(node))):
                found |= {f"{file.relative_to(ROOT)}::{name}" for name in assigned(node)}
    return found


def assigned(node: ast.Assign | ast.AnnAssign) -> list[str]:
    """Return the names that a statement assigns to."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


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
    defined = set()
    for file in files():
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(f"{file.relative_to(ROOT)}::{node.name}")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                defined |= {f"{file.relative_to(ROOT)}::{name}" for name in assigned(node)}
    assert documented - defined == set()


def test_tests_in_the_docs_exist() -> None:
    """A row names a file, and after it functions of the last one."""
    text, file, named = (ROOT / "docs" / "gpus.md").read_text(), "", []
    for path, function in re.findall(r"`((?:vit_scale|tests)/[\w/]+\.py)?(?:::(\w+))?`", text):
        file = path or file
        if function and file.startswith("tests/"):
            named.append((file, function))
        elif "/test_" in path:
            named.append((path, "test_"))
    assert len(named) > 20
    assert [each for each in named if f"def {each[1]}" not in (ROOT / each[0]).read_text()] == []


OF_TORCH_CUDA = re.compile(r"synchronize|empty_cache|\w*[sS]tream|Event|\w*[gG]raph\w*|\w*memory_\w+|\w*_stats")
OF_TENSORS_AND_STREAMS = {"pin_memory", "is_pinned", "record_stream", "record_event", "wait_event", "wait_stream"}


def test_streams_and_pinned_memory_are_behind_one_seam() -> None:
    """Everything else can be replaced by a stand-in."""
    found = set()
    for file in files():
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Attribute) and (
                node.attr in OF_TENSORS_AND_STREAMS or (is_of_torch_cuda(node) and OF_TORCH_CUDA.fullmatch(node.attr))
            ):
                found.add(f"{file.relative_to(LIBRARY)}: {ast.unparse(node)}")
    assert {place for place in found if not place.startswith("gpu.py")} == set()
    assert len(found) > 5, "those of gpu.py itself"
