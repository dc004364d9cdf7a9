"""DeepSpeed settings: from the recipe, with additions of the launcher; and offload, on two processes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.processes import run_script
from vit_scale.config import Config
from vit_scale.cost.memory import ZERO3_LIVE, ZERO_BUCKET, zero_bucket
from vit_scale.errors import UserError
from vit_scale.recipe import load_recipe
from vit_scale.schedule import Plan
from vit_scale.strategies.strategy import make_strategy, override_warning, resolve_strategy
from vit_scale.strategies.zero import use_all_threads
from vit_scale.strategies.zero_settings import check_compile, check_engine, deepspeed_settings, launcher_settings

PLAN = Plan(
    train_images=1000,
    steps=10,
    warmup_steps=0,
    global_batch=32,
    micro_batch=8,
    accumulation=2,
    processes=2,
    eval_batch=8,
)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`accelerate launch --use_deepspeed --deepspeed_config_file FILE`."""
    path = tmp_path / "deepspeed.json"
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    return path


def config_of(root: Path, *options: str) -> Config:
    return load_recipe(str(root / "recipes/debug.yaml"), ["batch.micro=8", "optim.clip_norm=0.5", *options])


# ------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_settings_are_derived_from_the_recipe(root: Path, stage: int) -> None:
    settings = deepspeed_settings(config_of(root), PLAN, f"zero{stage}", "bf16", params=1000)
    assert settings["train_batch_size"] == 32
    assert settings["train_micro_batch_size_per_gpu"] == 8
    assert settings["gradient_accumulation_steps"] == 2
    assert settings["gradient_clipping"] == 0.5
    assert settings["zero_optimization"]["stage"] == stage


def test_deepspeed_accumulates_and_reduces_in_fp32_whatever_the_launcher_requests(root: Path, file: Path) -> None:
    half = {name: {"enabled": True} for name in ("bf16", "fp16", "torch_autocast")}
    file.write_text(json.dumps(half | {"data_types": {"grad_accum_dtype": "bf16"}}))
    settings = deepspeed_settings(config_of(root), PLAN, "zero2", "bf16")
    assert not any(settings[name]["enabled"] for name in half), "half precision is autocast"
    assert settings["data_types"]["grad_accum_dtype"] == "fp32"
    assert "communication_data_type" not in settings, "DeepSpeed's default is the dtype of the weights"


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (999, 1000),  # no larger than the model, and even
        (3_000_001, 1_000_000),
        (22_050_664, 5_512_666),  # four buckets, of which three are reduced during the backward pass
        (10**10, ZERO_BUCKET),
    ],
)
def test_most_of_the_gradient_is_reduced_during_the_backward_pass(root: Path, params: int, expected: int) -> None:
    zero = deepspeed_settings(config_of(root), PLAN, "zero2", "bf16", params=params)["zero_optimization"]
    assert zero["overlap_comm"]
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == expected
    assert all(zero_bucket(p) % 2 == 0 for p in range(5_000_001, 5_000_009))


def test_zero3_frees_gathered_weights(root: Path) -> None:
    zero = deepspeed_settings(config_of(root), PLAN, "zero3", "bf16", params=10**9)["zero_optimization"]
    assert zero["stage3_max_live_parameters"] == zero["stage3_max_reuse_distance"] == ZERO3_LIVE
    assert zero["stage3_prefetch_bucket_size"] < ZERO3_LIVE


@pytest.mark.parametrize(
    ("strategy", "offload", "parts"),
    [
        ("zero1", "none", set()),
        ("zero2", "optimizer", {"offload_optimizer"}),
        ("zero3", "params", {"offload_optimizer", "offload_param"}),
    ],
)
def test_offload_is_an_option(root: Path, strategy: str, offload: str, parts: set[str]) -> None:
    settings = deepspeed_settings(config_of(root, f"parallel.offload={offload}"), PLAN, strategy, "bf16")
    zero = settings["zero_optimization"]
    assert {key for key in zero if key.startswith("offload")} == parts
    assert all(zero[part]["device"] == "cpu" for part in parts)


@pytest.mark.parametrize(("strategy", "offload"), [("ddp", "optimizer"), ("single", "params"), ("zero2", "params")])
def test_unsupported_offload_is_rejected(root: Path, strategy: str, offload: str) -> None:
    with pytest.raises(UserError, match=r"parallel\.offload.*zero3"):
        make_strategy(config_of(root, f"parallel.offload={offload}"), PLAN, strategy, "fp32")


def test_compiling_under_zero3_is_rejected_in_one_line(root: Path) -> None:
    config = config_of(root, "parallel.compile=true")
    with pytest.raises(UserError, match=r"^parallel\.compile = true: .*zero3.*zero2$"):
        make_strategy(config, PLAN, "zero3", "fp32")
    check_compile(compile_blocks=True, strategy="zero2")


def test_engine_that_does_not_match_is_rejected_by_name(root: Path) -> None:
    engine = SimpleNamespace(
        train_batch_size=lambda: 32,
        train_micro_batch_size_per_gpu=lambda: 8,
        gradient_accumulation_steps=lambda: 4,
        gradient_clipping=lambda: 1.0,
    )
    with pytest.raises(UserError, match=r"accumulation = 2, but 4 .* optim\.clip_norm = 0\.5, but 1\.0"):
        check_engine(engine, config_of(root), PLAN)


@pytest.mark.parametrize(
    ("processes", "cores", "omp_threads", "threads"),
    [
        (8, [range(96)] * 8, "1", [12]),  # torchrun sets it
        (8, [range(12 * i, 12 * i + 12) for i in range(8)], None, [12]),  # srun: each task has cores of its own
        (8, [range(96)] * 8, "4", []),  # the user's choice
        (1, [range(96)], "1", []),
        (128, [range(96)] * 128, "1", [1]),
    ],
    ids=["torchrun", "srun", "chosen", "alone", "crowded"],
)
def test_offloaded_optimizer_uses_all_cores_of_the_node(
    processes: int, cores: list[range], omp_threads: str | None, threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if omp_threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", omp_threads)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(processes))

    def gather(everyone: list, own: tuple) -> None:
        everyone[:] = [(own[0], set(theirs)) for theirs in cores]

    used: list[int] = []
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(cores[0]))
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    monkeypatch.setattr("torch.set_num_threads", used.append)
    use_all_threads()
    assert used == threads


# ------------------------------------------------------------------------------------------------------- launcher


def test_launcher_flags_are_used_if_the_recipe_says_auto(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert resolve_strategy("auto") == ("zero2", None), "accelerate's default"
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu")
    assert resolve_strategy("auto") == ("zero3", None)
    settings = deepspeed_settings(config_of(root), PLAN, "zero3", "bf16")
    assert settings["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert override_warning(config_of(root), PLAN, "zero3", "fp32") is None
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "0")
    assert resolve_strategy("auto") == ("single", None)


def test_launcher_file_is_used_except_for_recipe_settings(root: Path, file: Path) -> None:
    zero = {"stage": 3, "reduce_bucket_size": 77, "overlap_comm": False, "stage3_prefetch_bucket_size": "auto"}
    others = {
        "train_batch_size": 64,
        "gradient_clipping": "auto",
        "bf16": {"enabled": True},
        "wall_clock_breakdown": True,
    }
    file.write_text(json.dumps({"zero_optimization": zero, "optimizer": {"type": "AdamW"}, **others}))
    assert resolve_strategy("auto")[0] == "zero3"
    settings = deepspeed_settings(config_of(root), PLAN, "zero3", "bf16")
    assert settings["zero_optimization"]["reduce_bucket_size"] == 77
    assert settings["zero_optimization"]["overlap_comm"] is False
    assert settings["wall_clock_breakdown"] is True
    assert settings["train_batch_size"] == 32
    assert settings["gradient_clipping"] == 0.5
    assert not settings["bf16"]["enabled"]
    assert "optimizer" not in settings
    assert '"auto"' not in json.dumps(settings)


def test_one_line_lists_overridden_settings(root: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(json.dumps({"train_batch_size": 64, "gradient_clipping": 0.5, "zero_optimization": {"stage": 2}}))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    note = override_warning(config_of(root), PLAN, "zero2", "fp32")
    assert note == (
        "Launcher settings overridden by the recipe: train_batch_size = 64 (recipe: 32), "
        "mixed_precision = fp16 (recipe: fp32)."
    )
    file.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert override_warning(config_of(root), PLAN, "zero2", "bf16") is None, "launcher and recipe agree"
    note = override_warning(config_of(root), PLAN, "zero2", "fp32")
    assert note is not None
    assert "bf16.enabled = True (recipe: False)" in note
    strategy, note = resolve_strategy("zero1")
    assert strategy == "zero1"
    assert note == "Launcher strategy zero2 is overridden by the recipe: parallel.strategy=zero1."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "Cannot read"),
        ("{", "Cannot read"),
        ("[]", "must be a JSON object"),
        ('{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}', "nvme"),
    ],
)
def test_unusable_launcher_file_is_reported(file: Path, content: str | None, message: str) -> None:
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=message):
        launcher_settings()


def test_fsdp_launcher_is_rejected_unless_the_recipe_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match=r"FSDP.*\n.*zero3"):
        resolve_strategy("auto")
    assert (
        resolve_strategy("zero2")[1] == "Launcher strategy FSDP is overridden by the recipe: parallel.strategy=zero2."
    )


# ----------------------------------------------------------------------------------------------- two processes

OFFLOADS = ["zero2 optimizer", "zero3 params"]


@pytest.fixture(scope="module")
def offloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DDP, and each kind of offload complete and interrupted, in one launch without compiled extensions."""
    top = tmp_path_factory.mktemp("offload")
    common = ["track.wandb=disabled", "data.workers=0", "schedule.steps=8", "batch.micro=8", "run.eval_every=8"]

    def job(folder: str, strategy: str, offload: str = "none", signal_at: int | None = None) -> dict:
        chosen = [f"parallel.strategy={strategy}", f"parallel.offload={offload}", f"run.dir={top / folder}"]
        return {"recipe": "recipes/debug.yaml", "options": [*common, *chosen], "signal_at": signal_at}

    jobs = [job("ddp", "ddp")]
    for name in OFFLOADS:
        jobs += [job(name, *name.split()), job(f"{name} resumed", *name.split(), signal_at=2)]
        jobs += [job(f"{name} resumed", *name.split())]
    environment = {"TORCH_EXTENSIONS_DIR": str(top / "compiled")}
    done = run_script("tests/workers/train_many.py", json.dumps(jobs), processes=2, **environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    interrupted = re.findall(r"status \d \d 138\n", done.stdout)
    assert len(interrupted) == 2 * len(OFFLOADS), "each kind was interrupted, on both processes"
    return top


def assert_same_weights(ours: Path, theirs: Path, tolerance: float) -> None:
    for name in ("model", "model_ema"):
        mine, other = (load_file(folder / f"{name}.safetensors") for folder in (ours, theirs))
        torch.testing.assert_close(mine, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", OFFLOADS)
def test_offload_does_not_change_the_weights(offloaded: Path, name: str) -> None:
    assert_same_weights(offloaded / name, offloaded / "ddp", 1e-6)


@pytest.mark.parametrize("name", OFFLOADS)
def test_resume_of_an_offloaded_run_is_bit_identical(offloaded: Path, name: str) -> None:
    assert_same_weights(offloaded / f"{name} resumed", offloaded / name, 0.0)


def test_deepspeed_compiles_nothing_on_a_cpu(offloaded: Path) -> None:
    assert not (offloaded / "compiled").exists()
