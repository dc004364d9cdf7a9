"""Counts match published numbers and torch's counter, and counting does not modify the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vit_scale.config import ModelConfig
from vit_scale.cost.count import CLOSED_FORM, TRACED, ModelCount, count_model
from vit_scale.cost.meta import build_on_meta
from vit_scale.cost.timm_check import build_for_counting
from vit_scale.cost.trace import trace
from vit_scale.models import create_model

# timm model -> parameters, GMACs of matmuls, GMACs in timm's csv file; 1000 classes.
PUBLISHED = {
    "vit_tiny_patch16_224": (5_717_416, "1.2537", "1.26"),
    "vit_small_patch32_224": (22_878_952, "1.1429", "1.15"),
    "vit_small_patch16_224": (22_050_664, "4.5989", "4.61"),
    "vit_small_patch16_384": (22_196_584, "15.4904", "15.52"),
    "vit_base_patch32_224": (88_224_232, "4.4092", "4.41"),
    "vit_base_patch16_224": (86_567_656, "17.5638", "17.58"),
    "vit_base_patch16_384": (86_859_496, "55.4844", "55.54"),
    "vit_large_patch16_224": (304_326_632, "61.5547", "61.60"),
    "vit_large_patch14_224": (304_203_752, "81.0130", "81.08"),
    "vit_huge_patch14_224": (632_045_800, "167.2951", "167.40"),
    "vit_giant_patch14_224": (1_012_611_432, "267.0315", "267.18"),
    "deit3_small_patch16_224": (22_059_496, "4.5989", "4.61"),
    "deit3_base_patch16_224": (86_585_320, "17.5638", "17.58"),
    "deit3_large_patch16_224": (304_374_760, "61.5547", "61.60"),
}
CIFAR_PARAMS = {
    "vit_cifar_small": 5_362_762,
    "vit_cifar_base": 21_342_346,
    "vit_cifar_large": 75_722_250,
    "vit_cifar_512x6": 19_028_490,
}
OPTIONS: list[dict] = [
    {},
    {"layer_scale": 1e-5},
    {"dropout": 0.1},
    {"qk_norm": True},
    {"mlp": "swiglu"},
    {"registers": 4},
    {"distilled": True},
    {"pool": "mean"},
    {"pool": "max"},
    {"pool": "tokens"},
    {"pos_embed": "rope"},
    {"pos_embed": "relative"},
    {"pos_embed": "learned_2d"},
    {"img_size": (48, 80)},
    {"in_chans": 1},
    {"patch_dropout": 0.5},
    {"patch_dropout": 0.5, "pool": "tokens"},
    {"drop_path": 0.5},
    {"drop_path": 0.5, "layer_scale": 1e-5},
    {"drop_path": 0.3, "drop_path_schedule": "uniform"},
    {"drop_path": 0.5, "drop_path_mode": "mask"},
    {"freeze": 0},
    {"freeze": 1, "drop_path": 0.5},
    {"freeze": 2},
    {"freeze": "all", "pool": "mean", "drop_path": 0.5},
]
KINDS: list[dict] = [
    {"attention": "window", "window": 2},
    {"attention": "window", "window": 4, "pool": "mean", "registers": 2, "class_token": False},
    {"attention": "window", "window": 4, "window_shift": False, "global_blocks": (0,), "pool": "mean", "qk_norm": True},
    {"attention": "window", "window": 8, "pool": "mean"},
    {"attention": "dilated", "dilation": 2, "drop_path": 0.5},
    {"attention": "dilated", "dilation": 2, "window": 2, "pos_embed": "relative"},
    {"attention": "block", "window": 2, "img_size": (64, 48), "pos_embed": "rope"},
    {"attention": "linear"},
    {"attention": "linear", "random_features": 8, "patch_dropout": 0.5, "pool": "mean"},
    {"attention": "linear", "global_blocks": (-1,), "drop_path": 0.5, "freeze": 1},
]
OPTIONS += [{"img_size": 64, **options} for options in KINDS]


def count(name: str, **options: object) -> ModelCount:
    return count_model(build_for_counting(ModelConfig(name=name, **options)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_match_published_numbers(name: str) -> None:
    params, macs, macs_timm_csv = PUBLISHED[name]
    counted = count(name)
    assert counted.params == params
    assert f"{counted.macs / 1e9:.4f}" == macs
    assert f"{counted.macs_timm_csv / 1e9:.2f}" == macs_timm_csv
    assert counted.flops == 2 * counted.macs


@pytest.mark.parametrize("name", CIFAR_PARAMS)
def test_parameter_counts_of_cifar_variants(name: str) -> None:
    assert count(name).params == CIFAR_PARAMS[name]


def test_macs_of_the_small_cifar_variant() -> None:
    assert round(count("vit_cifar_small").macs / 1e6) == 365


def test_giant_is_counted_on_the_meta_device() -> None:
    assert all(p.is_meta for p in build_for_counting(ModelConfig(name="vit_giant_patch14_224")).parameters())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_closed_form_equals_traced_forward_pass(options: dict) -> None:
    model = build_on_meta(lambda: create_model("vit_mu", **options))
    counted = count_model(model)
    traced = trace(model, model.img_size, model.in_chans)
    assert counted.method == CLOSED_FORM
    assert counted.macs_by_part == dict(traced.macs)
    assert counted.norm_elements == traced.norm_elements
    assert counted.params == sum(p.numel() for p in model.parameters())
    assert counted.params_by_part["other"] == 0


class NoModuleTracker:
    """In place of torch's, whose global hooks prevent shortcuts."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_actual_flops_equal_torch_counter_in_a_training_step(options: dict, checkpointing: str) -> None:
    batch = 8
    model = build_on_meta(lambda: create_model("vit_mu", depth=3, **options)).train()
    model.set_activation_checkpointing(checkpointing)
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = NoModuleTracker()
    with counter:
        model(torch.empty(batch, model.in_chans, *model.img_size, device="meta")).sum().backward()
    cost = {name: value for name, value in options.items() if "drop_path" in name or name == "patch_dropout"}
    per_image = count_model(model).train_flops_per_image(activation_checkpointing=checkpointing, batch=batch, **cost)
    assert per_image * batch == counter.get_total_flops()


def test_window_of_the_whole_image_costs_as_much_as_full_attention() -> None:
    options = {"name": "vit_mu", "attention": "window", "window": 4}
    assert count(**options).macs_by_part == count("vit_mu").macs_by_part
    assert count(**options).at_size(64).macs < count("vit_mu").at_size(64).macs


def test_attention_in_windows_grows_linearly_with_the_image() -> None:
    counted = count("vit_mu", attention="window", window=4, window_shift=False, class_token=False, pool="mean")
    small, large = (counted.at_size(side).macs_by_part["attention_matmuls"] for side in (32, 128))
    assert large == 16 * small


def test_stochastic_depth_saves_its_mean_rate_of_the_blocks() -> None:
    counted = count_model(build_on_meta(lambda: create_model("vit_base_patch16_224", pool="mean")))
    blocks = counted.macs - counted.macs_by_part["patch"] - counted.macs_by_part["head"]
    saved = counted.train_flops_per_image() - counted.train_flops_per_image(drop_path=0.4)
    assert saved == pytest.approx(6 * 0.2 * blocks, rel=1e-6)
    assert counted.train_flops_per_image(drop_path=0.4, drop_path_mode="mask") == counted.train_flops_per_image()


def test_nominal_training_is_three_times_forward() -> None:
    counted = count_model(build_on_meta(lambda: create_model("vit_base_patch16_224", pool="mean")))
    assert counted.nominal_train_flops_per_image == 6 * counted.macs
    assert counted.train_flops_per_image() == pytest.approx(6 * counted.macs, rel=0.01)


def test_last_block_computes_little_more_than_keys_and_values_if_head_reads_one_token() -> None:
    counted = count("vit_base_patch16_224")
    blocks = counted.macs - counted.macs_by_part["patch"] - counted.macs_by_part["head"]
    keys_and_values = 2 * 197 * 768**2
    saved = 1 - counted.train_flops_per_image() / counted.nominal_train_flops_per_image
    assert saved == pytest.approx((blocks / 12 - keys_and_values) / counted.macs, abs=0.005)


@pytest.mark.parametrize(
    ("name", "params", "giga_macs"), [("timm/resnet50", 25_557_032, 4.09), ("timm/convnext_tiny", 28_589_128, 4.46)]
)
def test_any_timm_model_is_counted(name: str, params: int, giga_macs: float) -> None:
    counted = count(name)
    assert counted.params == params
    assert round(counted.macs / 1e9, 2) == giga_macs
    assert counted.method == TRACED
    assert counted.train_flops_per_image(drop_path=0.4) == counted.nominal_train_flops_per_image


@pytest.mark.parametrize("freeze", [3, "all"])
def test_frozen_layers_of_timm_models_cost_a_forward_pass(freeze: int | str) -> None:
    model = build_on_meta(lambda: create_model("timm/vit_tiny_patch16_224", freeze=freeze)).train()
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(2, 3, 224, 224, device="meta")).sum().backward()
    counted = count_model(model)
    assert 2 * counted.train_flops_per_image() == pytest.approx(counter.get_total_flops(), rel=1e-3)
    assert counted.trained_params == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "pvt_v2_b1", "mobilevitv2_100", "efficientformer_l1"])
def test_trace_agrees_with_torch_counter(name: str) -> None:
    model = build_on_meta(lambda: create_model(f"timm/{name}"))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, 3, *model.img_size, device="meta"))
    assert 2 * trace(model, model.img_size, 3).macs.total() == counter.get_total_flops()


def test_attention_fraction_grows_with_the_number_of_tokens() -> None:
    low, high = count("vit_base_patch16_224"), count("vit_base_patch16_384")
    assert 0 < low.quadratic_fraction < low.attention_fraction < high.attention_fraction < 1
    assert low.quadratic_fraction < high.quadratic_fraction


@pytest.mark.parametrize("name", ["vit_mu", "timm/test_vit"])
def test_counting_does_not_modify_the_model(name: str) -> None:
    model = create_model(name).train()
    ran = []
    handles = [module.register_forward_hook(lambda *_: ran.append(1)) for module in model.modules()]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    versions = [p._version for p in model.parameters()]
    first = count_model(model)
    assert first == count_model(model)
    assert not ran
    assert model.training
    assert versions == [p._version for p in model.parameters()]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(len(module._forward_hooks) == 1 and not module._forward_pre_hooks for module in model.modules())
    assert len(handles) == len(list(model.modules()))


@pytest.mark.parametrize("name", ["vit_mu", "timm/test_vit"])
def test_wrapped_model_has_the_count_of_the_inner_model(name: str) -> None:
    model = create_model(name)
    assert count_model(torch.compile(model)) == count_model(model)
    assert count_model(nn.DataParallel(model)) == count_model(model)


def test_partitioned_parameters_count_in_full() -> None:
    model, whole = create_model("timm/test_vit"), count_model(create_model("timm/test_vit"))
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape  # as ZeRO-3 does
        parameter.data = torch.empty(0)
    assert count_model(model) == whole
