"""Features of a frozen model: one vector per image from the tokens of a block, or what the head of a network receives.

Shapes: B batch, N tokens, D token width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vit_scale.data.batch import Batch
from vit_scale.errors import UserError
from vit_scale.models.attention_weights import evaluation_mode
from vit_scale.tasks.evaluate import share_running_statistics

Pooling = Literal["cls", "mean", "both"]


class FeatureModel:
    """Maps normalized images to one feature vector per image and chosen block.

    Tokens of a block pass the last norm of the model; features are then the class token, the mean of the patch tokens
    (no class, distillation or register token), or both, one after the other. Of a network that is no ViT they are what
    its head receives.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[int] | None = None, pooling: Pooling | None = None, *, name: str = ""
    ) -> None:
        """`blocks`: indices from 0, negative from the end; None: the last. `pooling`: None: as the head pools.

        `name`: of the model, in errors. Raises `UserError` for a block or a token that the model does not have.
        """
        self.model, name = model, name or type(model).__name__
        self.depth = _depth(model)
        if self.depth is None and (blocks is not None or pooling is not None):
            option = "--blocks" if blocks is not None else "--features"
            raise UserError(f"{option}: {name} is no ViT with blocks of tokens; omit it to use its pooled features")
        self.pooling = _default_pooling(model) if pooling is None else pooling
        if self.depth is not None and self.pooling != "mean" and not _has_class_token(model):
            raise UserError(f"--features {self.pooling}: {name} has no class token; use --features mean")
        self.blocks = _block_indices(blocks, self.depth, name)

    @property
    def names(self) -> list[str]:
        """Name of each feature: `block 11`, or `pooled`."""
        return ["pooled"] if self.depth is None else [f"block {index}" for index in self.blocks]

    @property
    def description(self) -> str:
        """What the features are, for people."""
        if self.depth is None:
            return "pooled features"
        return {
            "cls": "class token",
            "mean": "mean of the patch tokens",
            "both": "class token and mean of the patch tokens",
        }[self.pooling]

    @torch.no_grad()
    def __call__(self, x_BCHW: Tensor) -> list[Tensor]:
        """Return the features [B, D] of each block; every rank must call it, with the model in evaluation mode."""
        model: Any = self.model
        if self.depth is None:
            return [_flat(model.forward_head(model.forward_features(x_BCHW), pre_logits=True)).float()]
        found: dict[int, Tensor] = {}
        with _recording(self.model, self.blocks, found):
            # All of the model: under ZeRO-3 its own parameters are gathered only then.
            self.model(x_BCHW)
        return [self._pool(found[index]).float() for index in self.blocks]

    def _pool(self, x_BND: Tensor) -> Tensor:
        """Return the features of tokens after the last norm; a model that pools first normalizes here."""
        norm: Any = getattr(self.model, "fc_norm", None) or nn.Identity()
        parts = []
        if self.pooling != "mean":
            parts.append(norm(x_BND[:, 0]))
        if self.pooling != "cls":
            parts.append(norm(x_BND[:, int(self.model.num_prefix_tokens) :].mean(1)))  # type: ignore[arg-type]
        return torch.cat(parts, dim=1)


@contextmanager
def _recording(model: Any, blocks: Sequence[int], found: dict[int, Tensor]) -> Iterator[None]:
    """Record the tokens after each of `blocks`, past the last norm, in the forward pass inside this context."""
    last = len(model.blocks) - 1

    def record(index: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tokens = output[0] if isinstance(output, tuple) else output
            found[index] = tokens if index == last else model.norm(tokens)

        return hook

    handles = [
        (model.norm if index == last else model.blocks[index]).register_forward_hook(record(index)) for index in blocks
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _depth(model: Any) -> int | None:
    """Return the number of blocks of a ViT, ours or timm's; None for a network of another kind."""
    blocks = getattr(model, "blocks", None)
    is_vit = isinstance(blocks, nn.ModuleList | nn.Sequential) and hasattr(model, "num_prefix_tokens")
    return len(blocks) if is_vit and hasattr(model, "norm") and blocks is not None else None


def _has_class_token(model: nn.Module) -> bool:
    return isinstance(getattr(model, "cls_token", None), Tensor)


def _default_pooling(model: nn.Module) -> Pooling:
    pool = getattr(getattr(model, "variant", None), "pool", None) or getattr(model, "global_pool", "")
    return "cls" if pool in ("cls", "token") and _has_class_token(model) else "mean"


def _block_indices(blocks: Sequence[int] | None, depth: int | None, name: str) -> list[int]:
    if depth is None:
        return []
    wanted = [-1] if blocks is None else blocks
    for index in wanted:
        if not -depth <= index < depth:
            raise UserError(f"--blocks {index}: {name} has blocks 0 to {depth - 1} (negative: from the end)")
    return list(dict.fromkeys(index % depth for index in wanted))


def _flat(features: Tensor) -> Tensor:
    """Average what is left of the places in the image, of a network whose head does that itself."""
    if features.ndim == 4:
        return features.mean((2, 3))
    return features.mean(1) if features.ndim == 3 else features


@dataclass
class FeatureSet:
    """Features and labels of labeled images, in the order of their source; on the CPU of rank 0, else empty."""

    features: dict[str, Tensor]
    """float32 [images, D] by name."""
    labels: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    indices: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """Index of each image in its source: some could not be read."""

    def __len__(self) -> int:
        return len(self.labels)


def compute_features(
    extract: FeatureModel,
    batches: Any,
    prepare: Callable[[Batch], Tensor],
    device: torch.device,
    *,
    advance: Callable[[], None] = lambda: None,
) -> FeatureSet:
    """Compute the features of labeled evaluation batches once; every rank must call it, with its share of them.

    `prepare` maps a batch to the model's input; `advance` is called after each batch and may raise. Features do not
    depend on the number of ranks: rank 0 gets them in the order of the source.
    """
    share_running_statistics(extract.model)
    rows: list[Tensor] = []
    numbers: list[Tensor] = []
    sizes: list[int] = []
    with evaluation_mode(extract.model), torch.no_grad():
        for batch in batches:
            found = extract(prepare(batch))
            sizes = [each.shape[1] for each in found]
            rows += _gathered(torch.cat(found, dim=1))
            numbers += _gathered(torch.stack([batch.target["label"], batch.positions], dim=1).to(device))
            advance()
    if not rows:
        return FeatureSet({})
    labels, indices = torch.cat(numbers).unbind(1)
    real = indices >= 0
    features = torch.cat(rows)[real].split(sizes, dim=1)
    named = {name: part.contiguous() for name, part in zip(extract.names, features, strict=True)}
    return FeatureSet(named, labels[real].contiguous(), indices[real].contiguous())


def _gathered(rows: Tensor) -> list[Tensor]:
    """Return the equally many rows of every rank, in order, on the CPU of rank 0; nothing on other ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [rows.cpu()]
    is_main = dist.get_rank() == 0
    found = [torch.empty_like(rows) for _ in range(dist.get_world_size())] if is_main else None
    dist.gather(rows.contiguous(), found)
    return [each.cpu() for each in found or ()]
