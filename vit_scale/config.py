"""All options of a run: a tree of dataclasses in which every field has a doc string.

pydantic enforces types and ranges when a tree is built; `vit_scale.recipe` reads recipes and command lines into this
tree and raises `UserError` for invalid values. This module does not import torch, so `--help` is fast.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Strict
from pydantic.dataclasses import dataclass

_TREE = ConfigDict(
    extra="forbid",
    use_attribute_docstrings=True,
    allow_inf_nan=False,
    # `global` is a Python keyword; recipes and command lines use `batch.global`.
    alias_generator=lambda name: name.rstrip("_"),
)

Int = Annotated[int, Strict()]
Number = Annotated[float, Strict()]
Bool = Annotated[bool, Strict()]
Count = Annotated[int, Strict(), Field(ge=1)]
CountOrZero = Annotated[int, Strict(), Field(ge=0)]
Positive = Annotated[float, Strict(), Field(gt=0)]
NotNegative = Annotated[float, Strict(), Field(ge=0)]
Fraction = Annotated[float, Strict(), Field(ge=0, le=1)]
Rate = Annotated[float, Strict(), Field(ge=0, lt=1)]
Auto = Literal["auto"]
Strategy = Literal["ddp", "zero1", "zero2", "zero3"]


@dataclass(config=_TREE, frozen=True, kw_only=True)
class TaskConfig:
    """What is learned."""

    name: Literal["classify", "mae"] = "classify"
    """`classify`: one label per image; `mae`: reconstruct masked patches, without labels (options in `mae`)."""


@dataclass(config=_TREE, frozen=True, kw_only=True)
class ModelConfig:
    """Model architecture. Every field except `name` modifies the variant selected by `name`; null keeps its value."""

    name: str = "vit_small_patch16_224"
    """A variant from vit_scale/models/variants.py, or `timm/<any timm model>`."""
    weights: str | None = None
    """Initial weights: a safetensors file, a run directory, or `timm/<name>` from the Hub."""
    freeze: Literal["none", "all"] | CountOrZero = "none"
    """Train only a part of the model: `all` freezes everything except the head, a number N the patch embedding, tokens,
    position embeddings and the first N blocks (timm models: the first N layers after the stem, as timm groups them).
    Frozen parts run in evaluation mode: no dropout, no stochastic depth, fixed BatchNorm statistics. They have no
    backward pass, gradients, optimizer state, weight decay or EMA. Patch dropout still applies."""
    num_classes: CountOrZero | None = None
    """Number of output classes; null: inferred from the data; 0: no head, the model returns pooled features."""
    in_chans: Count | None = None
    """Number of input channels; null: inferred from the data."""
    img_size: Count | tuple[Count, Count] | None = None
    """Image size in pixels, one number or [height, width]."""
    patch_size: Count | tuple[Count, Count] | None = None
    """Patch size in pixels, one number or [height, width]."""
    embed_dim: Count | None = None
    """Token embedding dimension."""
    depth: Count | None = None
    """Number of transformer blocks."""
    num_heads: Count | None = None
    """Number of attention heads; must divide `embed_dim`."""
    mlp_ratio: Positive | None = None
    """Ratio of MLP hidden dimension to `embed_dim`; SwiGLU uses 2/3 of it to match the parameter count."""
    mlp: Literal["gelu", "swiglu"] | None = None
    """MLP type."""
    drop_path: Rate = 0.0
    """Stochastic depth: drop rate of the last block."""
    drop_path_schedule: Literal["linear", "uniform"] = "linear"
    """Drop rate over depth: increasing linearly from 0 to `drop_path`, or the same in every block."""
    drop_path_mode: Literal["skip", "mask"] = "skip"
    """`skip` computes a residual branch only for the samples that keep it; `mask` computes all samples, then zeroes."""
    dropout: Rate | None = None
    """Dropout rate after the position embedding, on projections and in the MLP."""
    attn_dropout: Rate | None = None
    """Dropout rate on attention weights."""
    patch_dropout: Rate = 0.0
    """Fraction of patch tokens dropped during training."""
    layer_scale: Positive | None = None
    """Initial value of LayerScale; null: the variant's default (none for most variants)."""
    pos_embed: Literal["learned", "learned_2d", "sincos", "rope", "relative", "none"] | None = None
    """Position embedding: learned 1-D, learned row + column, fixed sin-cos 2-D, rotary 2-D, relative bias, none."""
    pool: Literal["cls", "mean", "max", "tokens"] | None = None
    """Input of the head: the class token, the mean or maximum of the patch tokens, or all tokens."""
    class_token: Bool | None = None
    """Prepend a class token to the patch tokens."""
    registers: CountOrZero | None = None
    """Number of register tokens."""
    distilled: Bool | None = None
    """Add a distillation token with a separate head (DeiT)."""
    qk_norm: Bool | None = None
    """Apply LayerNorm to queries and keys."""
    qkv_bias: Bool | None = None
    """Use a bias in the query, key and value projection."""
    bias: Bool | None = None
    """Use a bias in all other linear layers of a block."""
    attention: Literal["full", "window", "dilated", "block", "linear"] = "full"
    """Which patches a patch attends to: `full`: all; `window`: those in its square window; `dilated`: every
    `dilation`-th one per row and column; `block`: those in the same `window` rows; `linear`: all, by random features
    that approximate softmax (FAVOR+). Prefix tokens attend to all tokens and all tokens to them. See
    docs/attention.md."""
    window: Count | None = None
    """`window`: patches per side of a window. `block`: rows of patches per block. `dilated`: patches per side of a
    dilated window; null: as many as the image has."""
    window_shift: Bool = True
    """`window`: shift the windows of every second block by half a window, as in Swin; those at the border are cut."""
    dilation: Annotated[int, Strict(), Field(ge=2)] | None = None
    """`dilated`: distance between the patches of a window along rows and columns."""
    random_features: Count | None = None
    """`linear`: random features per head; more are closer to softmax. null: d ln d for head width d, 266 for 64."""
    global_blocks: tuple[Int, ...] = ()
    """Indices of blocks with full attention although `attention` is another kind; negative: from the end."""
    kernel: Literal["auto", "flash", "efficient", "cudnn", "math", "explicit", "flex"] = "auto"
    """scaled_dot_product_attention kernel; `auto`: the fastest available (on CPU the custom kernel, if compiled);
    `explicit`: plain torch operations in the whole model, which can be differentiated twice; `flex`: FlexAttention for
    `window`, `dilated` and `block`, on GPUs only."""
    init: Literal["trunc_normal", "timm", "jax", "kaiming_patch", "whitened"] = "trunc_normal"
    """Weight initialization: truncated normal 0.02, timm's, JAX's (Xavier), Kaiming for the patch convolution, or, in
    training, a patch convolution that whitens the patches of the training images."""


@dataclass(config=_TREE, frozen=True, kw_only=True)
class DataConfig:
    """Dataset and data loading."""

    source: str = "embedded:digits"
    """Hub dataset ID; directory with one subdirectory of images per class (optionally inside `train` and `val`), with
    parquet files, or written by `save_to_disk`; `embedded:digits`; or `synthetic`."""
    labels: str | None = None
    """Table with a row per image of a directory: a csv, tsv, jsonl or parquet file with columns of files and labels,
    and optionally `split`; relative to `source` or to the working directory. null: `metadata.csv` (or .jsonl, .parquet)
    if present, otherwise classes are directories."""
    class_level: Count | None = None
    """Directory level that names the class of an image, below `source` or the split; null: 1, the top one, unless in
    doubt."""
    name: str | None = None
    """Configuration name of the Hub dataset, if it has several."""
    train_split: str = "train"
    """Training split; slices such as `train[:10%]` or `train[:100]+train[200:]` mean what they mean in `datasets`."""
    val_split: str | None = None
    """Evaluation split; null: `validation`, `val` or `test` if present, otherwise held out from the training split.
    `val`, `valid`, `validation` and `dev` in any case name the same split."""
    val_fraction: Annotated[float, Strict(), Field(gt=0, lt=1)] = 0.1
    """Fraction of each class to hold out if there is no validation split."""
    image_column: str | None = None
    """Image column; null: the column with the Image feature; in `data.labels`, the column of file names."""
    label_column: str | None = None
    """Label column; null: the column with the ClassLabel feature, or an integer or text column with a typical name."""
    balance: Bool = False
    """Draw all classes equally often: each image of a small class several times per epoch, a large class in part. The
    length of an epoch does not change. Not available for streams."""
    streaming: Bool = False
    """Stream a Hub dataset during training instead of downloading it first."""
    on_error: Literal["raise", "skip"] = "raise"
    """On a corrupt image: raise an error that names it, or substitute another image deterministically and count it; on
    a row of `data.labels` without its file: raise an error, or skip it and count it."""
    cache: Literal["none", "decoded"] = "none"
    """`decoded`: cache all training images, decoded once at `cache_size`, in a memory-mapped file."""
    cache_dir: str | None = None
    """Directory of the decoded cache; null: `vit_scale` in the user cache directory."""
    cache_size: Count | None = None
    """Shorter side of a decoded image; null: 1.15x the model's image size, never upscaled."""
    workers: CountOrZero | Auto = "auto"
    """Data-loading workers per training process; `auto`: based on CPU cores and data source."""
    mean: tuple[Number, ...] | Literal["auto", "imagenet", "inception", "cifar10", "none"] = "auto"
    """Per-channel mean for normalization in 0..1, or a preset name; `auto`: the model's."""
    std: tuple[Positive, ...] | Literal["auto", "imagenet", "inception", "cifar10", "none"] = "auto"
    """Per-channel standard deviation for normalization in 0..1, or a preset name; `auto`: the model's."""
    synthetic_images: Count = 1024
    """`synthetic`: number of images."""
    synthetic_classes: Count = 1000
    """`synthetic`: number of classes."""
    synthetic_size: Count = 224
    """`synthetic`: image height and width."""
    synthetic_chans: Count = 3
    """`synthetic`: number of channels."""


Interpolation = Literal["bicubic", "bilinear", "random"]


@dataclass(config=_TREE, frozen=True, kw_only=True)
class AugmentConfig:
    """Data augmentation, MixUp and CutMix, and evaluation preprocessing."""

    crop: Literal["random_resized", "random", "none"] = "random_resized"
    """Random resized crop; resize, pad and crop at a random position; or resize and center crop."""
    crop_scale: tuple[Fraction, Fraction] = (0.08, 1.0)
    """Random resized crop: range of the crop area as a fraction of the image area."""
    crop_ratio: tuple[Positive, Positive] = (0.75, 1.3333)
    """Random resized crop: range of the aspect ratio (width / height)."""
    crop_padding: CountOrZero = 4
    """Padding in pixels before a `random` crop."""
    crop_border: Literal["reflect", "black"] = "reflect"
    """Padding mode of a `random` crop: reflect the image, or black."""
    interpolation: Interpolation = "random"
    """Training interpolation; `random` picks bicubic or bilinear per image."""
    hflip: Fraction = 0.5
    """Probability of a horizontal flip."""
    vflip: Fraction = 0.0
    """Probability of a vertical flip."""
    color_jitter: NotNegative = 0.0
    """Strength of brightness, contrast and saturation changes."""
    three_augment: Bool = False
    """3-Augment (DeiT III): one of grayscale, solarize and blur per image."""
    rand_augment: str = ""
    """RandAugment as a timm config string, e.g. `rand-m9-mstd0.5-inc1`; empty: off."""
    rand_layers: Count = 2
    """RandAugment: operations per image (used if `rand_magnitude` is set)."""
    rand_magnitude: Annotated[float, Strict(), Field(ge=0, le=10)] | None = None
    """RandAugment: magnitude from 0 to 10; null: off, or as set by `rand_augment`."""
    rand_magnitude_std: NotNegative = 0.0
    """RandAugment: standard deviation of the magnitude."""
    rand_increasing: Bool = True
    """RandAugment: use operations whose severity increases with the magnitude."""
    erase: Fraction = 0.0
    """Probability of random erasing."""
    erase_mode: Literal["pixel", "color", "black"] = "pixel"
    """Fill of the erased box: per-pixel noise, one random color, or black."""
    mixup: NotNegative = 0.0
    """MixUp alpha; 0: off."""
    cutmix: NotNegative = 0.0
    """CutMix alpha; 0: off."""
    mix_prob: Fraction = 1.0
    """Probability of mixing a batch (or pair, or image)."""
    mix_switch_prob: Fraction = 0.5
    """Probability of CutMix instead of MixUp if both are enabled."""
    mix_mode: Literal["batch", "pair", "elem"] = "batch"
    """One mixing coefficient per batch, per pair of images, or per image."""
    mix_patches: Bool = False
    """MixUp swaps whole patches instead of blending pixels."""
    progressive: tuple[tuple[Rate, Count], ...] = ()
    """Progressive resizing: pairs of (fraction of the run at which a phase starts, image size), e.g.
    [[0, 16], [0.5, 24], [0.8, 32]]; images are downscaled on the model's device. Empty: full size throughout."""
    no_mix_epochs: NotNegative = 0.0
    """Disable MixUp and CutMix for the last N epochs."""
    label_smoothing: Rate = 0.0
    """Label smoothing."""
    repeats: Count = 1
    """Repeated augmentation: copies of each image per batch, augmented independently (DeiT: 3)."""
    eval_crop: Annotated[float, Strict(), Field(gt=0, le=1)] = 0.875
    """Evaluation: ratio of image size to resized shorter side, before the center crop."""
    eval_interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """Evaluation interpolation."""


@dataclass(config=_TREE, frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and loss."""

    name: str = "adamw"
    """`adamw`, `lamb`, `sgd`, `muon`, or any timm optimizer."""
    lr: Positive = 1e-3
    """Peak learning rate."""
    adamw_lr: Positive | None = None
    """`muon`: peak learning rate of the parameters that AdamW optimizes (all except block matrices); null: `lr`."""
    weight_decay: NotNegative = 0.05
    """Decoupled weight decay; not applied to biases, norms, LayerScale, tokens and position embeddings."""
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    """Adam betas: decay rates of the first and second moments."""
    eps: Positive = 1e-8
    """Term added to the denominator for numerical stability."""
    momentum: Rate = 0.9
    """Momentum of `sgd` and `muon`."""
    clip_norm: NotNegative = 1.0
    """Maximum gradient norm; 0: no clipping."""
    layer_decay: Annotated[float, Strict(), Field(gt=0, le=1)] = 1.0
    """Layer-wise learning rate decay: ratio of a layer's learning rate to the next layer's; 1: off."""
    loss: Literal["cross_entropy", "binary"] = "cross_entropy"
    """Cross entropy, or binary cross entropy per class (DeiT III)."""
    class_weights: Literal["balanced"] | tuple[Positive, ...] | None = None
    """Weight of each class in the loss: a list in class order, or `balanced`: images / (classes x images of the class).
    Weights w are scaled to mean 1 over the training images as they are drawn. With target probabilities y (after
    mixing and smoothing), the loss of an image is -sum_c w_c y_c log p_c; for `binary`, its mean over classes times
    sum_c w_c y_c. It is averaged over images. Metrics are not weighted. Null: all classes count the same."""


@dataclass(config=_TREE, frozen=True, kw_only=True)
class ScheduleConfig:
    """Training length and learning-rate schedule."""

    steps: Count | None = None
    """Training length in optimizer steps. Set one of `steps` and `epochs`; the command line replaces the recipe's."""
    epochs: Positive | None = None
    """Training length in epochs."""
    warmup_steps: CountOrZero | None = None
    """Linear warmup of the learning rate, in steps."""
    warmup_epochs: NotNegative | None = None
    """Linear warmup of the learning rate, in epochs. Set at most one of `warmup_steps` and `warmup_epochs`."""
    shape: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning-rate decay after warmup."""
    final_lr: NotNegative = 0.0
    """Learning rate at the end of training."""


@dataclass(config=_TREE, frozen=True, kw_only=True)
class BatchConfig:
    """Batch sizes. The number of gradient accumulation steps is derived."""

    global_: Count = 1024
    """Global batch size: images per optimizer step, over all processes."""
    micro: Count | Auto = "auto"
    """Batch size per device (micro-batch)."""
    eval: Count | Auto = "auto"
    """Evaluation batch size per device."""


@dataclass(config=_TREE, frozen=True, kw_only=True)
class EmaConfig:
    """Exponential moving average (EMA) of the weights."""

    decay: Rate = 0.0
    """EMA decay per step; 0: no EMA."""
    warmup: Bool = True
    """Increase the decay with the step, so that the random initialization does not dominate short runs."""


@dataclass(config=_TREE, frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism, precision and compilation."""

    strategy: Auto | Strategy = "auto"
    """Parallelism strategy; `auto`: the launcher's."""
    offload: Literal["none", "optimizer", "params"] = "none"
    """ZeRO offload to host memory: optimizer state (any stage), or optimizer state and parameters (`zero3`)."""
    timeout_seconds: Count = 600
    """Timeout for collectives: a rank that waits longer for another rank fails, and the run ends."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """`auto`: bf16 if the hardware supports it, fp16 on older GPUs, fp32 on CPU."""
    compile: Bool = False
    """Compile each block with torch.compile; not supported by `zero3`."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass: `selective`: every second block; `full`: all blocks."""
    tf32: Bool = True
    """Use TF32 matmuls on GPUs that support them."""
    deterministic: Bool = False
    """Use deterministic kernels only."""


@dataclass(config=_TREE, frozen=True, kw_only=True)
class RunConfig:
    """Run directory, checkpointing, evaluation and logging."""

    dir: str | None = None
    """Run directory; null: `runs/<recipe name>`, or `runs/sweeps/<sweep>/<run>` under a W&B agent."""
    seed: CountOrZero = 0
    """Random seed."""
    resume: str = "auto"
    """`auto`: resume from the latest valid checkpoint, if any; `never`: start from scratch; a name from
    `--list-checkpoints`, such as `step-00001000`: roll the run back to it, once; or the path of a checkpoint or run."""
    save_every: Count | Auto = "auto"
    """Steps between checkpoints, in addition to one before each evaluation; `auto`: at least every 10 minutes."""
    eval_every: Count | Auto = "auto"
    """Steps between evaluations; `auto`: about 10 per run. The last step is always evaluated."""
    eval_images: Count | None = None
    """Evaluate at most this many validation images during training: always the same, spread over the classes, or the
    first ones of a stream; null: all. launch/eval.py evaluates all of them unless this option is passed to it."""
    probe_every: Count | None = None
    """Steps between k-NN classifications of validation images by their nearest training images, logged as
    `val/knn_top1`: whether a task without labels learns features. At most 10,000 images of each, always the same,
    spread over the classes; the data needs labels. The last step is always measured. null: off."""
    patience: Count | None = None
    """Stop early after this many evaluations in a row without a new best value of the task's first metric; null: never.
    The learning-rate schedule is not shortened. A larger value continues a run that stopped early."""
    log_every: Count | Auto = "auto"
    """Steps between entries in metrics.jsonl; `auto`: about 100 per run. The last step is always logged."""
    keep: Count = 2
    """Number of latest checkpoints to keep, in addition to the best."""
    max_skipped_steps: Count = 50
    """Stop after this many consecutive steps with a non-finite loss or gradient."""


@dataclass(config=_TREE, frozen=True, kw_only=True)
class TrackConfig:
    """Experiment tracking. metrics.jsonl and summary.json are always written."""

    wandb: Literal["auto", "offline", "online", "disabled"] = "auto"
    """`auto`: online if logged in, offline otherwise. Falls back to offline if the server is unreachable."""
    project: str = "vit_scale"
    """W&B project."""
    entity: str | None = None
    """W&B user or team; null: the account's default."""
    name: str | None = None
    """W&B run name; null: the name of the run directory."""
    group: str | None = None
    """W&B group."""
    tags: tuple[str, ...] = ()
    """W&B tags."""
    artifact: Bool = False
    """Upload the final weights as a W&B artifact."""
    trackers: tuple[str, ...] = ()
    """Additional trackers for the same metrics, by their names in accelerate: `tensorboard`, `mlflow`, ..."""
    images: Literal["last", "every", "never"] = "last"
    """When to log misclassified images, confusion matrix and attention maps: last evaluation, every one, or never."""
    attention_every: Count | None = None
    """Steps between measurements of the attention distance and entropy of each block, of EMA weights if there are any,
    on 16 validation images. The last step is always measured. null: off."""


@dataclass(config=_TREE, frozen=True, kw_only=True)
class Length:
    """Training length that other options were written for: in steps or in epochs."""

    steps: Positive | None = None
    epochs: Positive | None = None


@dataclass(config=_TREE, frozen=True, kw_only=True)
class DistillConfig:
    """Distillation: with a teacher, `task.name=classify` learns from its outputs."""

    teacher: str | None = None
    """Teacher, with the student's classes: `timm/<name>` from the Hub, a run or checkpoint directory, or a weights file
    of `teacher_model`; null: no distillation."""
    teacher_model: str | None = None
    """Model of a weights file: `timm/<name>` or a variant; null: the student's architecture."""
    kind: Literal["hard", "soft", "kl"] = "hard"
    """`hard`: cross entropy with the teacher's class; `soft`: T^2 x KL divergence from the teacher's probabilities,
    averaged over images; `kl`: the same without labels."""
    alpha: Fraction = 0.5
    """Weight of the teacher's loss; the labels' loss has 1 - alpha. Not used by `kl`."""
    temperature: Positive = 1.0
    """Temperature T of `soft` and `kl`."""
    features: tuple[tuple[CountOrZero, CountOrZero], ...] = ()
    """Pairs of (block of the student, block of a ViT teacher), numbered from 0: match the teacher's patch tokens
    through a learned projection. Empty: off."""
    features_weight: NotNegative = 1.0
    """Weight of the feature loss."""
    cache: Bool = False
    """Compute the teacher's logits once per training image, before training, and keep them in `data.cache_dir`; needs
    images without random augmentation or mixing (`augment.crop=none`)."""


@dataclass(config=_TREE, frozen=True, kw_only=True)
class MaeConfig:
    """Masked autoencoder pre-training (`task.name=mae`)."""

    mask_ratio: Annotated[float, Strict(), Field(gt=0, lt=1)] = 0.75
    """Fraction of the patches that the encoder does not see."""
    norm_pixels: Bool = True
    """Normalize the target by the mean and variance of each patch."""
    decoder_dim: Count = 512
    """Token dimension of the decoder."""
    decoder_depth: Count = 8
    """Number of decoder blocks."""
    decoder_heads: Count = 16
    """Number of attention heads of the decoder; must divide `decoder_dim`."""


def _section(section: type) -> object:
    return Field(default_factory=section)


@dataclass(config=_TREE, frozen=True, kw_only=True)
class Config:
    """All options of a run."""

    task: TaskConfig = _section(TaskConfig)  # type: ignore[assignment]
    """What is learned."""
    model: ModelConfig = _section(ModelConfig)  # type: ignore[assignment]
    """Model architecture."""
    data: DataConfig = _section(DataConfig)  # type: ignore[assignment]
    """Dataset and data loading."""
    augment: AugmentConfig = _section(AugmentConfig)  # type: ignore[assignment]
    """Data augmentation."""
    optim: OptimConfig = _section(OptimConfig)  # type: ignore[assignment]
    """Optimizer and loss."""
    schedule: ScheduleConfig = _section(ScheduleConfig)  # type: ignore[assignment]
    """Training length and learning-rate schedule."""
    batch: BatchConfig = _section(BatchConfig)  # type: ignore[assignment]
    """Batch sizes."""
    ema: EmaConfig = _section(EmaConfig)  # type: ignore[assignment]
    """EMA of the weights."""
    parallel: ParallelConfig = _section(ParallelConfig)  # type: ignore[assignment]
    """Parallelism and precision."""
    run: RunConfig = _section(RunConfig)  # type: ignore[assignment]
    """Run directory, checkpointing, evaluation and logging."""
    track: TrackConfig = _section(TrackConfig)  # type: ignore[assignment]
    """Experiment tracking."""
    distill: DistillConfig = _section(DistillConfig)  # type: ignore[assignment]
    """Distillation."""
    mae: MaeConfig = _section(MaeConfig)  # type: ignore[assignment]
    """Masked autoencoder pre-training."""
    written_for: dict[str, Length] = Field(default_factory=dict, exclude=True)
    """Not an option: the length that options in `SCALED` were set for, if a later layer sets the length."""


TASK_SECTIONS = {"distill": "classify", "mae": "mae"}
"""Sections of options of one task, and that task."""

SCALED = ("schedule.warmup_steps", "schedule.warmup_epochs", "augment.no_mix_epochs")
"""Options that are scaled with the training length if a later layer sets one that they do not fit."""

ALTERNATIVES: tuple[tuple[str, str], ...] = (
    ("schedule.steps", "schedule.epochs"),
    ("schedule.warmup_steps", "schedule.warmup_epochs"),
    ("augment.rand_augment", "augment.rand_magnitude"),
)
"""Pairs of options of which at most one may be set; the one that a later layer sets replaces the other."""


RENAMED = {
    "augment.mix_off_epochs": "augment.no_mix_epochs",
    "optim.other_lr": "optim.adamw_lr",
    "run.max_bad_steps": "run.max_skipped_steps",
    "track.pictures": "track.images",
}
"""Option names of earlier versions and their current names. Run directories still contain them, recipes may not."""

RENAMED_VALUES = {
    "model.attention": ("model.kernel", ("auto", "flash", "efficient", "cudnn", "math", "explicit")),
}
"""Names that mean something else today: with these values they are an earlier name of another option."""


def current_name(option: str, value: Any) -> str:
    """Return today's name of an option that an earlier version recorded with this value."""
    name, values = RENAMED_VALUES.get(option, (option, ()))
    return name if value in values else RENAMED.get(option, option)


def with_current_names(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the recorded options of a run (section -> option -> value) under their current names."""
    renamed: dict[str, Any] = {}
    for section, options in tree.items():
        if isinstance(options, dict):
            current = {name: current_name(f"{section}.{name}", value) for name, value in options.items()}
            options = {current[name].removeprefix(f"{section}."): value for name, value in options.items()}
        renamed[section] = options
    return renamed
