"""Train the golden runs and record their losses: `make golden`.

A refactor must not change what a run computes. `losses.json` holds the losses, validation metrics and weight checksums
of short runs; tests/golden/test_golden.py trains them again and compares. Record them again only for a deliberate
change, and say in the commit message what changed them.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tests.processes import run_script  # noqa: E402

LOSSES = Path(__file__).with_name("losses.json")

COMMON = ["track.wandb=disabled", "data.workers=0", "run.log_every=1", "run.eval_every=6", "run.save_every=100"]
DIGITS = ["schedule.epochs=null", "schedule.steps=12", "schedule.warmup_epochs=null", "schedule.warmup_steps=3"]
# Everything that draws random numbers or changes the arithmetic of a step.
EVERYTHING = [
    "model.dropout=0.1",
    "model.drop_path=0.3",
    "model.registers=2",
    "model.qk_norm=true",
    "optim.layer_decay=0.8",
    "optim.clip_norm=0.5",
    "augment.repeats=2",
]
# Wide enough that oneDNN and the attention kernel compute it without being forced to.
WIDE = ["model.embed_dim=192", "model.depth=3", "model.num_heads=3", "model.patch_size=1", "batch.micro=16"]
CASES = {
    "debug": ("recipes/debug.yaml", []),
    "digits": ("recipes/digits.yaml", DIGITS),
    "everything_cls": ("recipes/debug.yaml", [*EVERYTHING, "model.pool=cls", "model.patch_dropout=0.25"]),
    "everything_mean": ("recipes/debug.yaml", [*EVERYTHING, "model.pool=mean"]),
    "wide": ("recipes/debug.yaml", [*WIDE, "schedule.steps=6", "schedule.warmup_steps=2", "model.dropout=0.1"]),
}
STRATEGIES = {"single": 1, "ddp": 2, "zero2": 2, "zero3": 2}
KEYS = ("train/loss", "train/grad_norm", "val/loss", "val/top1", "val_ema/loss")


def train_all(folder: Path) -> dict[str, dict[str, Any]]:
    """Train every case with every strategy below `folder`; returns what `losses.json` holds of each."""
    for processes in sorted(set(STRATEGIES.values())):
        strategies = [name for name, needed in STRATEGIES.items() if needed == processes]
        _launch(processes, [_job(folder, case, strategy) for strategy in strategies for case in CASES])
    return {f"{case}/{strategy}": _read(folder / f"{case}-{strategy}") for strategy in STRATEGIES for case in CASES}


def this_machine() -> dict[str, str]:
    """What floating-point results depend on to the last bit."""
    return {
        "cpu": _cpu_model(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "onednn_isa": os.environ.get("ONEDNN_MAX_CPU_ISA", "default"),
        "torch": torch.__version__,
    }


def _job(folder: Path, case: str, strategy: str) -> dict[str, Any]:
    recipe, options = CASES[case]
    chosen = "auto" if strategy == "single" else strategy
    where = [f"run.dir={folder / f'{case}-{strategy}'}", f"parallel.strategy={chosen}"]
    return {"recipe": recipe, "options": [*COMMON, *options, *where]}


def _launch(processes: int, jobs: list[dict[str, Any]]) -> None:
    worker, environment = "tests/workers/train_many.py", {"OMP_NUM_THREADS": "1"}
    done = run_script(worker, json.dumps(jobs), processes=processes, timeout=400, **environment)
    statuses = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("status")]
    if done.returncode or set(statuses) != {"0"}:
        raise RuntimeError(f"a golden run failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def _read(run: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = {key: [line[key] for line in lines if key in line] for key in KEYS}
    crc = {path.stem: _crc(path) for path in sorted(run.glob("model*.safetensors"))}
    return metrics | {"crc32": crc}


def _crc(path: Path) -> int:
    value = 0
    for name, tensor in sorted(load_file(path).items()):
        value = zlib.crc32(tensor.contiguous().view(-1).numpy().tobytes(), zlib.crc32(name.encode(), value))
    return value


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model\t", "model name", "stepping")
    return ", ".join(line.split(":")[1].strip() for line in lines[:12] if line.startswith(wanted))


def main() -> None:
    """Record the losses of the current code."""
    with tempfile.TemporaryDirectory() as folder:
        runs = train_all(Path(folder))
    text = json.dumps({"machine": this_machine(), "runs": runs}, indent=1)
    for gap, closed in ((r",\n {4,}", ", "), (r"\[\n +", "["), (r"\n +\]", "]")):  # a list of losses on one line
        text = re.sub(gap, closed, text)
    LOSSES.write_text(text + "\n")
    print(f"recorded {len(runs)} runs in {LOSSES.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
