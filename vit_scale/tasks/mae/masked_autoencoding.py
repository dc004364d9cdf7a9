"""Masked autoencoder (He et al. 2021, arXiv:2111.06377): reconstruct masked patches from the others.

Shapes: B batch, C channels, H W pixels, G patches, K kept patches, P numbers in a patch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from vit_scale import gpu
from vit_scale.config import Config
from vit_scale.cost.training import CostPart
from vit_scale.data.batch import Batch, DataInfo
from vit_scale.data.targets import NoTarget
from vit_scale.errors import UserError
from vit_scale.models import construct_from_config
from vit_scale.models.create import check_kernel
from vit_scale.models.decoders.mae import MaeDecoder, MaskedAutoencoder, decoder_variant
from vit_scale.models.interface import backbone_of
from vit_scale.models.variants import TIMM_PREFIX, Variant, is_grouped, resolve_variant
from vit_scale.models.weights.init import Editing, init_weights
from vit_scale.schedule import Plan
from vit_scale.tasks.mae.patches import (
    EVALUATION,
    TRAINING,
    count_kept,
    kept_patches,
    masked_patches,
    patch_statistics,
    to_patches,
)
from vit_scale.tasks.mae.reconstruction import ReconstructionEvaluator, masked_batch_grid
from vit_scale.tasks.task import Card, Inputs, Metric, Show, Task


class MaskedAutoencoding(Task):
    """Needs no labels. The encoder computes the patches that are not masked, a small decoder predicts the pixels."""

    name = "mae"
    commands = ("eval", "probe", "finetune")
    metrics = (Metric("loss", "loss", higher=False, percent=False, title="Reconstruction loss"),)
    target = NoTarget()

    def __init__(self, config: Config, info: DataInfo, plan: Plan | None = None) -> None:
        _check_options(config)
        super().__init__(config, info, plan)
        model = replace(config.model, in_chans=self.in_chans, num_classes=0)
        self.variant = resolve_variant(model)
        self.decoder = _decoder_variant(config, self.variant)
        self.grid, self.patch_size = self.variant.grid, self.variant.patch_size
        _check_masks(config, self.variant)

    def build(self) -> nn.Module:
        # The decoder reads all tokens after the last norm, whatever is pooled later.
        model = replace(self.config.model, pool="tokens", num_classes=0)
        check_kernel(model, self.decoder)
        backbone = construct_from_config(model, num_classes=0, in_chans=self.in_chans)
        mae = self.config.mae
        decoder = MaeDecoder(self.decoder, self.variant.embed_dim, mae.mask_ratio, kernel=model.kernel)
        return MaskedAutoencoder(backbone, decoder)

    def init_weights(self, model: nn.Module, editing: Editing) -> None:
        super().init_weights(model, editing)
        init_weights(model.decoder, self.config.model.init, editing)  # type: ignore[arg-type]

    def inputs(self, batch: Batch, step: int) -> Inputs:
        return self._masked(self.progressive(self.normalized(batch), step), batch.positions, TRAINING)

    def loss(self, outputs: Tensor, inputs: Inputs) -> dict[str, Tensor]:
        return {"loss": self.losses(outputs, inputs).mean()}

    def losses(self, outputs: Tensor, inputs: Inputs) -> Tensor:
        """Return the mean squared error of the masked patches of each image, [B]."""
        pixels_BGP, masked_BG = inputs.rest["pixels"], inputs.rest["masked"]
        if self.config.mae.norm_pixels:
            mean, std = patch_statistics(pixels_BGP)
            pixels_BGP = (pixels_BGP - mean) / std
        error_BG = (outputs.float() - pixels_BGP).square().mean(-1)
        # Not a mean over selected patches, whose number the host would have to wait for; all images mask equally many.
        return (error_BG * masked_BG).sum(1) / masked_BG.sum(1)

    def predict(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Inputs]:
        """Return the predicted pixels, and the inputs with their masks, which depend on (seed, index of the image)."""
        inputs = self._masked(self.normalized(batch), batch.positions, EVALUATION)
        return model(*inputs.args), inputs

    def evaluator(self, *, inspect: bool) -> ReconstructionEvaluator:
        return ReconstructionEvaluator(self, inspect=inspect)

    def cost_parts(self, model: nn.Module) -> list[CostPart]:
        encoder = CostPart("encoder", backbone_of(model), tokens=1 - self.config.mae.mask_ratio)
        return [encoder, CostPart("decoder", model.decoder)]  # type: ignore[arg-type]

    def exported(self, model: nn.Module) -> Any:
        """Return the encoder, which pools its tokens by `model.pool`, after its last norm."""
        encoder = backbone_of(model)
        encoder.variant = replace(encoder.variant, pool=self.variant.pool, fc_norm=False)
        return encoder

    def show_batch(self, inputs: Inputs, out: Show) -> None:
        out.image(
            "batch",
            lambda: masked_batch_grid(self, inputs),
            title="Training batch",
            caption="images after augmentation, and the patches that the encoder receives",
        )

    def card(self) -> Card:
        return Card("image-feature-extraction", "(the encoder of a masked autoencoder, without labels)", "mse")

    def header(self) -> dict[str, str]:
        mae, patches = self.config.mae, self.grid[0] * self.grid[1]
        masked = patches - count_kept(patches, mae.mask_ratio)
        normalized = ", normalized per patch" if mae.norm_pixels else ""
        return {
            "masked": f"{masked:,} of {patches:,} patches; predicts their pixels{normalized}",
            "decoder": f"{mae.decoder_depth} blocks, dimension {mae.decoder_dim}, {mae.decoder_heads} heads",
        }

    def _masked(self, images: Tensor, positions: Tensor, stream: int) -> Inputs:
        pixels = to_patches(images, self.patch_size)
        patches = pixels.shape[1]  # fewer than the model's while images are smaller (augment.progressive)
        kept = count_kept(patches, self.config.mae.mask_ratio)
        keep = gpu.upload(kept_patches(self.config.run.seed, positions, patches, kept, stream=stream), self.device)
        return Inputs((images.to(self.dtype), keep), {"pixels": pixels, "masked": masked_patches(keep, patches)})


def _decoder_variant(config: Config, encoder: Variant) -> Variant:
    mae = config.mae
    if mae.decoder_dim % mae.decoder_heads:
        raise UserError(f"mae.decoder_heads = {mae.decoder_heads} does not divide mae.decoder_dim = {mae.decoder_dim}.")
    if mae.decoder_dim % 4:
        raise UserError(
            f"mae.decoder_dim = {mae.decoder_dim}: must be a multiple of 4, for its fixed sin-cos positions."
        )
    return decoder_variant(encoder, dim=mae.decoder_dim, depth=mae.decoder_depth, heads=mae.decoder_heads)


def _check_options(config: Config) -> None:
    """Raise `UserError` for options that need labels or another model; they would silently do nothing."""
    model, augment = config.model, config.augment
    if model.name.startswith(TIMM_PREFIX):
        raise UserError(
            f"model.name = {model.name}: task.name = mae needs a Vision Transformer that can skip patches; "
            "use one from vit_scale/models/variants.py, e.g. vit_base_patch16_224"
        )
    if model.num_classes:
        raise UserError(
            f"model.num_classes = {model.num_classes}: task.name = mae trains no head; fine-tune with classes later"
        )
    if is_grouped(resolve_variant(model)):
        raise UserError(
            f"model.attention = {model.attention} and task.name = mae exclude each other: the encoder computes only "
            "the patches that are not masked, and groups of patches need all. Use model.attention=full or linear."
        )
    if model.patch_dropout:
        raise UserError(
            f"model.patch_dropout = {model.patch_dropout}: has no meaning for task.name = mae, where mae.mask_ratio "
            "says what is masked; set model.patch_dropout=0"
        )
    off: dict[str, tuple[Any, str]] = {
        "model.distilled": (model.distilled, "false"),
        "augment.mixup": (augment.mixup, "0"),
        "augment.cutmix": (augment.cutmix, "0"),
        "augment.label_smoothing": (augment.label_smoothing, "0"),
        "augment.no_mix_epochs": (augment.no_mix_epochs, "0"),
        "optim.class_weights": (config.optim.class_weights, "null"),
    }
    found = {key: (value, neutral) for key, (value, neutral) in off.items() if value}
    if found:
        named = ", ".join(f"{key} = {value}" for key, (value, _) in found.items())
        neutral = " ".join(f"{key}={neutral}" for key, (_, neutral) in found.items())
        raise UserError(f"{named}: has no meaning for task.name = mae, which learns without labels; set {neutral}")
    if config.optim.loss != "cross_entropy":
        raise UserError(f"optim.loss = {config.optim.loss}: task.name = mae has a loss of its own, over pixels")


def _check_masks(config: Config, variant: Variant) -> None:
    """Raise `UserError` if no patch is masked or none is left, in any phase of `augment.progressive`."""
    if variant.distilled:
        raise UserError(f"model.name = {config.model.name}: task.name = mae has no use for a distillation token")
    ratio, patch = config.mae.mask_ratio, variant.patch_size
    grids = [variant.grid, *((side // patch[0], side // patch[1]) for _, side in config.augment.progressive)]
    for rows, columns in grids:
        kept = count_kept(rows * columns, ratio)
        if not 0 < kept < rows * columns:
            which = "leaves none" if kept == 0 else "masks none"
            raise UserError(
                f"mae.mask_ratio = {ratio:g}: {which} of {rows} x {columns} patches; at least one must be masked and "
                "one left. Change it, or use smaller patches."
            )
    if config.mae.norm_pixels and patch[0] * patch[1] * variant.in_chans == 1:
        raise UserError("mae.norm_pixels = true: a patch of one number has no variance; set mae.norm_pixels=false")
