"""Loading weights: those that fit are loaded, positions are resampled, the rest is reported, no code is executed."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vit_scale.errors import UserError
from vit_scale.models import create_model
from vit_scale.models.timm_models import create_counterpart
from vit_scale.models.weights.load import load_weights


def save(model: nn.Module, path: Path) -> Path:
    save_file(model.state_dict(), path)
    return path


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return save(create_model("vit_mu"), tmp_path / "model.safetensors")


def test_weights_of_the_same_model_are_loaded_unchanged(weights: Path) -> None:
    model = create_model("vit_mu", weights=str(weights))
    report = load_weights(model, weights)
    assert sorted(report.kept) == sorted(model.state_dict())
    assert (report.resized, report.skipped, report.initialized) == ({}, {}, {})
    other = create_model("vit_mu", weights=str(weights))
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model.eval()(x), other.eval()(x))


def test_timms_weights_give_timms_logits(tmp_path: Path) -> None:
    ours = create_model("vit_mu")
    timms = create_counterpart(ours.variant)
    load_weights(ours, save(timms, tmp_path / "timm.safetensors"))
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours.eval()(x), timms.eval()(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{}, {"distilled": True}, {"registers": 3}], ids=str)
@pytest.mark.parametrize("size", [(64, 64), (16, 48)])
def test_positions_are_resampled_as_in_timm_and_prefix_tokens_are_not(
    tmp_path: Path, options: dict[str, object], size: tuple[int, int]
) -> None:
    from timm.layers import resample_abs_pos_embed

    torch.manual_seed(0)
    old = create_model("vit_mu", **options)
    model = create_model("vit_mu", img_size=size, **options)
    report = load_weights(model, save(old, tmp_path / "w.safetensors"))
    prefix = model.num_prefix_tokens
    expected = resample_abs_pos_embed(old.pos_embed, [size[0] // 8, size[1] // 8], num_prefix_tokens=prefix)
    torch.testing.assert_close(model.pos_embed, expected)
    assert torch.equal(model.pos_embed[:, :prefix], old.pos_embed[:, :prefix])
    assert list(report.resized) == ["pos_embed"]


def test_rectangular_positions_are_resampled_by_proportion_or_by_the_grid_given(tmp_path: Path) -> None:
    old = create_model("vit_mu", img_size=(16, 40))
    path = save(old, tmp_path / "w.safetensors")
    load_weights(create_model("vit_mu", img_size=(32, 80)), path)
    with pytest.raises(UserError, match="grid"):
        load_weights(create_model("vit_mu", img_size=32), path)
    report = load_weights(create_model("vit_mu", img_size=32), path, grid=(2, 5))
    assert "pos_embed" in report.resized


@pytest.mark.parametrize("kernel", ["kernel: auto", "attention: auto"], ids=["today", "earlier version"])
def test_grid_comes_from_the_options_of_the_run(tmp_path: Path, kernel: str) -> None:
    """Eight patches and a class token are nine positions, which look like a 3x3 grid without the run's options."""
    from timm.layers import resample_abs_pos_embed

    old = create_model("vit_mu", img_size=(16, 32))
    save(old, tmp_path / "model.safetensors")
    options = f"model: {{name: vit_mu, img_size: [16, 32], {kernel}}}\ndata: {{source: synthetic}}\n"
    (tmp_path / "config.yaml").write_text(options)
    model = create_model("vit_mu", img_size=32)
    load_weights(model, tmp_path)
    torch.testing.assert_close(model.pos_embed, resample_abs_pos_embed(old.pos_embed, [4, 4], old_size=[2, 4]))
    upright = create_model("vit_mu", img_size=(32, 16))
    load_weights(upright, tmp_path)
    torch.testing.assert_close(upright.pos_embed, resample_abs_pos_embed(old.pos_embed, [4, 2], old_size=[2, 4]))


def test_weights_with_a_class_token_load_into_a_model_without_one(weights: Path) -> None:
    report = load_weights(create_model("vit_mu", pool="mean", class_token=False), weights)
    assert set(report.skipped) == {"cls_token", "norm.weight", "norm.bias"}
    assert set(report.initialized) == {"fc_norm.weight", "fc_norm.bias"}
    assert list(report.resized) == ["pos_embed"]


def test_position_of_the_class_token_is_added_to_it_if_the_model_has_none(tmp_path: Path) -> None:
    from dataclasses import replace

    from vit_scale.models.vit import VisionTransformer

    torch.manual_seed(0)
    old = create_model("vit_mu").eval()
    model = VisionTransformer(replace(old.variant, embed_prefix=False)).eval()
    report = load_weights(model, save(old, tmp_path / "w.safetensors"))
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model(x), old(x), atol=1e-6, rtol=1e-5)
    assert set(report.resized) == {"pos_embed", "cls_token"}
    back = create_model("vit_mu").eval()
    load_weights(back, save(model, tmp_path / "back.safetensors"))
    torch.testing.assert_close(back(x), old(x), atol=1e-6, rtol=1e-5)


def test_head_for_other_classes_is_initialized_and_reported(weights: Path, capsys: pytest.CaptureFixture) -> None:
    torch.manual_seed(1)
    fresh = create_model("vit_mu", num_classes=3)
    torch.manual_seed(1)
    model = create_model("vit_mu", num_classes=3, weights=str(weights))
    assert torch.equal(model.head.weight, fresh.head.weight)
    assert not torch.equal(model.blocks[0].attn.qkv.weight, fresh.blocks[0].attn.qkv.weight)
    printed = capsys.readouterr().out
    assert "left as initialized: head.weight (the weights have 10 classes, the model 3)" in printed
    assert "tensors kept" in printed


def test_patch_kernels_are_resized_so_that_a_resized_image_gives_the_same_tokens(weights: Path) -> None:
    model = create_model("vit_mu", img_size=64, patch_size=16)
    report = load_weights(model, weights)
    old = create_model("vit_mu", weights=str(weights))
    assert "patch_embed.proj.weight" in report.resized
    small = torch.randn(1, 3, 32, 32)
    # Enlarged patch by patch, like the kernel; bicubic resizing across patches would mix neighbors.
    patches = small.unfold(2, 8, 8).unfold(3, 8, 8).reshape(1, 48, 8, 8)
    large = nn.functional.interpolate(patches, size=(16, 16), mode="bicubic", antialias=True)
    large = large.reshape(1, 3, 4, 4, 16, 16).permute(0, 1, 2, 4, 3, 5).reshape(1, 3, 64, 64)
    torch.testing.assert_close(model.patch_embed(large), old.patch_embed(small), atol=1e-4, rtol=1e-3)


def test_channels_are_summed_to_one_and_repeated_to_many(weights: Path) -> None:
    old = create_model("vit_mu", weights=str(weights))
    grey = torch.randn(1, 1, 32, 32)
    one = create_model("vit_mu", in_chans=1, weights=str(weights))
    torch.testing.assert_close(one.patch_embed(grey), old.patch_embed(grey.expand(-1, 3, -1, -1)))
    six = create_model("vit_mu", in_chans=6, weights=str(weights))
    torch.testing.assert_close(six.patch_embed(grey.expand(-1, 6, -1, -1)), old.patch_embed(grey.expand(-1, 3, -1, -1)))


@pytest.mark.parametrize("kind", ["learned_2d", "relative", "sincos"])
def test_other_positions_are_resampled_too(tmp_path: Path, kind: str) -> None:
    old = create_model("vit_mu", pos_embed=kind)
    report = load_weights(create_model("vit_mu", pos_embed=kind, img_size=64), save(old, tmp_path / "w.safetensors"))
    assert report.resized
    assert (report.initialized, report.skipped) == ({}, {})


def test_relative_bias_is_resampled_by_offset(tmp_path: Path) -> None:
    old = create_model("vit_mu", pos_embed="relative")
    for block in old.blocks:
        nn.init.constant_(block.attn.rel_pos.relative_position_bias_table, 0.7)
    model = create_model("vit_mu", pos_embed="relative", img_size=64)
    load_weights(model, save(old, tmp_path / "w.safetensors"))
    torch.testing.assert_close(model.blocks[0].attn.rel_pos(), torch.full((1, 2, 65, 65), 0.7))


def test_missing_and_unexpected_weights_are_reported(weights: Path) -> None:
    report = load_weights(create_model("vit_mu", layer_scale=0.1, pos_embed="rope"), weights)
    assert "blocks.0.ls1.gamma" in report.initialized
    assert "pos_embed" in report.skipped
    assert "skipped: pos_embed" in report.summary()
    assert "left as initialized: blocks.0.ls1.gamma" in report.summary()


def test_weights_of_another_architecture_are_rejected(weights: Path) -> None:
    with pytest.raises(UserError, match=r"another architecture"):
        load_weights(create_model("vit_mu", embed_dim=48), weights)


def test_weights_with_nothing_in_common_are_rejected(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="no tensor fits"):
        load_weights(create_model("vit_mu"), tmp_path / "w.safetensors")


def test_ema_weights_of_a_run_are_loaded_if_available(tmp_path: Path) -> None:
    model, average = create_model("vit_mu"), create_model("vit_mu")
    save(model, tmp_path / "model.safetensors")
    found = create_model("vit_mu", weights=str(tmp_path))
    assert torch.equal(found.head.weight, model.head.weight)
    save(average, tmp_path / "model_ema.safetensors")
    found = create_model("vit_mu", weights=str(tmp_path))
    assert torch.equal(found.head.weight, average.head.weight)


def test_torch_files_are_loaded_without_prefixes_of_wrappers(tmp_path: Path) -> None:
    old = create_model("deit3_small_patch16_224", depth=1, embed_dim=32, num_heads=2)
    renamed = {f"module._orig_mod.{k}": v for k, v in old.state_dict().items()}
    renamed = {k.replace(".ls1.gamma", ".gamma_1").replace(".ls2.gamma", ".gamma_2"): v for k, v in renamed.items()}
    torch.save({"epoch": 3, "model": renamed}, tmp_path / "w.pth")
    model = create_model("deit3_small_patch16_224", depth=1, embed_dim=32, num_heads=2)
    report = load_weights(model, tmp_path / "w.pth")
    assert len(report.kept) == len(old.state_dict())


class Malicious:
    """Writes a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.write_text, (self.path, "run"))


def test_malicious_pickle_is_rejected_and_not_executed(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    torch.save({"model": Malicious(trace)}, tmp_path / "zip.pth")
    (tmp_path / "bare.bin").write_bytes(pickle.dumps(Malicious(trace), protocol=2))
    for name in ("zip.pth", "bare.bin"):
        with pytest.raises(UserError, match="would run code"):
            load_weights(create_model("vit_mu"), tmp_path / name)
    assert not trace.exists()


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", b"\xff" * 64])
def test_corrupt_file_is_reported(tmp_path: Path, content: bytes) -> None:
    for name in ("w.safetensors", "w.pth"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match="model.weights"):
            load_weights(create_model("vit_mu"), tmp_path / name)


def test_missing_file_and_unfinished_run_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="file or directory not found"):
        load_weights(create_model("vit_mu"), tmp_path / "nothing.safetensors")
    with pytest.raises(UserError, match="has the run finished"):
        load_weights(create_model("vit_mu"), tmp_path)


def test_unreachable_hub_is_reported_with_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    def offline(*args: object, **options: object) -> None:
        raise OSError("no route to host")

    model = create_model("vit_mu")
    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(UserError, match="no route to host.*\n.*download"):
        load_weights(model, "timm/vit_tiny_patch16_224")
    with pytest.raises(UserError, match="model.name"):
        load_weights(model, "timm/no_such_model")


def test_hub_weights_load_by_name_into_our_model_and_into_timms(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm is patched to read from memory instead of the network."""
    import timm

    real, asked = timm.create_model, []

    def answer(name: str, pretrained: bool = False, **options: object) -> nn.Module:
        asked.append((name, pretrained))
        torch.manual_seed(7)
        return real(name, pretrained=False, **options)

    monkeypatch.setattr(timm, "create_model", answer)
    model = create_model("vit_tiny_patch16_224", weights="timm/vit_tiny_patch16_224.augreg_in21k", img_size=64)
    torch.manual_seed(7)
    expected = real("vit_tiny_patch16_224.augreg_in21k").state_dict()
    assert torch.equal(model.blocks[0].attn.qkv.weight, expected["blocks.0.attn.qkv.weight"])
    model = create_model("timm/vit_tiny_patch16_224", num_classes=3)
    report = load_weights(model, "timm/vit_tiny_patch16_224")
    assert set(report.initialized) == {"head.weight", "head.bias"}
    assert asked == [
        ("vit_tiny_patch16_224.augreg_in21k", True),
        ("vit_tiny_patch16_224", False),
        ("vit_tiny_patch16_224", True),
    ]


def test_timm_model_loads_a_file_with_other_classes(tmp_path: Path) -> None:
    old = create_model("timm/vit_tiny_patch16_224", img_size=32, num_classes=5)
    model = create_model("timm/vit_tiny_patch16_224", img_size=64, num_classes=3)
    report = load_weights(model, save(old, tmp_path / "w.safetensors"))
    assert list(report.resized) == ["pos_embed"]
    assert set(report.initialized) == {"head.weight", "head.bias"}


def test_head_of_hub_weights_is_loaded_only_with_the_published_number_of_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """timm creates a new head if the classes differ, which must not be treated as published. No network."""
    import timm

    real = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **options: real(name, **options))
    source = "timm/vit_tiny_patch16_224.augreg_in21k"
    options = {"img_size": 32}
    other = load_weights(create_model("timm/vit_tiny_patch16_224", num_classes=1000, **options), source)
    assert set(other.initialized) == {"head.weight", "head.bias"}
    same = load_weights(create_model("timm/vit_tiny_patch16_224", num_classes=21843, **options), source)
    assert same.initialized == {}


def test_ema_weights_of_a_checkpoint_are_loaded(trained_run: Path) -> None:
    from safetensors.torch import load_file

    model = create_model("vit_mu", img_size=8, patch_size=2, in_chans=1, layer_scale=1e-4)
    load_weights(model, trained_run / "checkpoints" / "step-00000012")
    assert torch.equal(model.head.weight, load_file(trained_run / "model_ema.safetensors")["head.weight"])


def test_timm_weights_are_loaded_from_the_local_cache_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through timm and huggingface_hub, with a cache as after a download."""
    import huggingface_hub
    import timm

    torch.manual_seed(3)
    published = timm.create_model("test_vit")
    repository = tmp_path / "models--timm--test_vit.r160_in1k"
    commit = "0" * 40
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    save(published, repository / "snapshots" / commit / "model.safetensors")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("vit_scale.models.weights.read.is_hub_reachable", lambda: False)
    model = create_model("timm/test_vit", weights="timm/test_vit.r160_in1k", num_classes=1000)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in published.state_dict().items())
    few = create_model("timm/test_vit", num_classes=3)
    assert set(load_weights(few, "timm/test_vit.r160_in1k").initialized) == {"head.weight", "head.bias"}
