"""Every option, once: a tree of dataclasses with a doc string for each field.

Types and ranges are enforced by pydantic when a tree is built; `vit_scale.recipe` reads recipes and command lines
into this tree and turns what does not fit into a `UserError`. Nothing here imports torch, so `--help` is quick.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Strict
from pydantic.dataclasses import dataclass

_TREE = ConfigDict(
    extra="forbid",
    use_attribute_docstrings=True,
    allow_inf_nan=False,
    # `global` is a keyword in Python; recipes and command lines say `batch.global`.
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
class ModelConfig:
    """What is trained. Every field but `name` changes the variant that `name` picks; null keeps the variant's own."""

    name: str = "vit_small_patch16_224"
    """A variant of vit_scale/models/variants.py, or `timm/<any timm model>`."""
    weights: str | None = None
    """Start from these weights: a safetensors file, a run's folder, or `timm/<name>` from the hub."""
    num_classes: CountOrZero | None = None
    """Classes of the head; null: as many as the data has; 0: no head, the model returns pooled features."""
    in_chans: Count | None = None
    """Channels of an image; null: as many as the data has."""
    img_size: Count | tuple[Count, Count] | None = None
    """Image size in pixels, one number or [height, width]."""
    patch_size: Count | tuple[Count, Count] | None = None
    """Patch size in pixels, one number or [height, width]."""
    embed_dim: Count | None = None
    """Width of a token."""
    depth: Count | None = None
    """Number of transformer blocks."""
    num_heads: Count | None = None
    """Attention heads; must divide the width."""
    mlp_ratio: Positive | None = None
    """Hidden width of the MLP over the token width; SwiGLU takes two thirds of it, for as many parameters."""
    mlp: Literal["gelu", "swiglu"] | None = None
    """Kind of MLP."""
    drop_path: Rate = 0.0
    """Stochastic depth: the rate of the last block."""
    drop_path_schedule: Literal["linear", "uniform"] = "linear"
    """Rate over depth: rising from 0 to `drop_path`, or the same in every block."""
    drop_path_mode: Literal["skip", "mask"] = "skip"
    """`skip` computes a residual branch only for the samples that keep it; `mask` computes all, then zeroes."""
    dropout: Rate | None = None
    """Dropout after the position embedding, on projections and in the MLP."""
    attn_dropout: Rate | None = None
    """Dropout on attention weights."""
    patch_dropout: Rate = 0.0
    """Share of patch tokens left out in training."""
    layer_scale: Positive | None = None
    """Initial value of LayerScale; null: the variant's own, for most none."""
    pos_embed: Literal["learned", "learned_2d", "sincos", "rope", "relative", "none"] | None = None
    """Position embedding: learned 1-D, learned row + column, fixed sin-cos 2-D, rotary 2-D, relative bias, none."""
    pool: Literal["cls", "mean", "max", "tokens"] | None = None
    """What the head sees: the class token, the mean or the maximum of patch tokens, or every token."""
    class_token: Bool | None = None
    """A class token in front of the patches."""
    registers: CountOrZero | None = None
    """Register tokens."""
    distilled: Bool | None = None
    """A distillation token with a head of its own (DeiT)."""
    qk_norm: Bool | None = None
    """LayerNorm on queries and keys."""
    qkv_bias: Bool | None = None
    """Bias of the query, key and value projection."""
    bias: Bool | None = None
    """Bias of all other linear layers of a block."""
    kernel: Literal["auto", "flash", "efficient", "cudnn", "math", "explicit"] = "auto"
    """Attention kernel of scaled_dot_product_attention; `auto`: the fastest, on a CPU a custom one if it was built;
    `explicit`: plain torch operations in the whole model, which can be differentiated twice."""
    init: Literal["trunc_normal", "timm", "jax", "kaiming_patch", "whitened"] = "trunc_normal"
    """Initialization: truncated normal 0.02, timm's, JAX's (xavier), Kaiming for the patch convolution, or, in
    training, a patch convolution that whitens the patches of the training images."""


@dataclass(config=_TREE, frozen=True, kw_only=True)
class DataConfig:
    """Where images come from and how they are read."""

    source: str = "embedded:digits"
    """Hub id, folder of images by class, of parquet files or of `save_to_disk`, `embedded:digits`, `synthetic`."""
    name: str | None = None
    """Configuration of the hub dataset, where it has several."""
    train_split: str = "train"
    """Split to train on; slices such as `train[:10%]` are understood."""
    val_split: str | None = None
    """Split to evaluate on; null: `validation`, `val` or `test`, else a hold-out of the training split."""
    val_fraction: Annotated[float, Strict(), Field(gt=0, lt=1)] = 0.1
    """Share of each class held out where there is no validation split."""
    image_column: str | None = None
    """Column of the images; null: the one with the image feature."""
    label_column: str | None = None
    """Column of the labels; null: the one with the class-label feature, or the integer one named like a label."""
    streaming: Bool = False
    """Read a hub dataset while training instead of downloading it first."""
    on_error: Literal["raise", "skip"] = "raise"
    """A broken image: stop and name it, or take a deterministic substitute and count."""
    cache: Literal["none", "decoded"] = "none"
    """`decoded` keeps a memory-mapped copy of all training images, decoded once at `cache_size`."""
    cache_dir: str | None = None
    """Folder of the decoded copy; null: `vit_scale` in the user's cache folder."""
    cache_size: Count | None = None
    """Shorter side of a decoded image; null: 1.15 of the model's image size, never enlarged."""
    workers: CountOrZero | Auto = "auto"
    """Loading processes for each training process; `auto`: by cores and the kind of data."""
    mean: tuple[Number, ...] | Literal["auto", "imagenet", "inception", "cifar10", "none"] = "auto"
    """Mean for each channel in 0..1, or a name; `auto`: the model's own."""
    std: tuple[Positive, ...] | Literal["auto", "imagenet", "inception", "cifar10", "none"] = "auto"
    """Standard deviation for each channel in 0..1, or a name; `auto`: the model's own."""
    synthetic_images: Count = 1024
    """Images of the `synthetic` source."""
    synthetic_classes: Count = 1000
    """Classes of the `synthetic` source."""
    synthetic_size: Count = 224
    """Height and width of a `synthetic` image."""
    synthetic_chans: Count = 3
    """Channels of a `synthetic` image."""


Interpolation = Literal["bicubic", "bilinear", "random"]


@dataclass(config=_TREE, frozen=True, kw_only=True)
class AugmentConfig:
    """What happens to an image between the file and the model."""

    crop: Literal["random_resized", "random", "none"] = "random_resized"
    """Random crop of random size; resize, pad and crop at a random place; or resize and crop the centre."""
    crop_scale: tuple[Fraction, Fraction] = (0.08, 1.0)
    """Share of the area that a random resized crop takes."""
    crop_ratio: tuple[Positive, Positive] = (0.75, 1.3333)
    """Width over height of a random resized crop."""
    crop_padding: CountOrZero = 4
    """Pixels of border that are added before a `random` crop."""
    crop_border: Literal["reflect", "black"] = "reflect"
    """What that border shows: the image mirrored, or black."""
    interpolation: Interpolation = "random"
    """Resampling in training; `random` picks bicubic or bilinear for each image."""
    hflip: Fraction = 0.5
    """Probability of a left-right flip."""
    vflip: Fraction = 0.0
    """Probability of an upside-down flip."""
    color_jitter: NotNegative = 0.0
    """Strength of brightness, contrast and saturation changes."""
    three_augment: Bool = False
    """3-Augment of DeiT III: one of grayscale, solarize, blur for each image."""
    rand_augment: str = ""
    """RandAugment as timm's spec string, such as `rand-m9-mstd0.5-inc1`; empty: off."""
    rand_layers: Count = 2
    """RandAugment by fields: operations for each image (used when `rand_magnitude` is set)."""
    rand_magnitude: Annotated[float, Strict(), Field(ge=0, le=10)] | None = None
    """RandAugment by fields: strength from 0 to 10; null: off, or by `rand_augment`."""
    rand_magnitude_std: NotNegative = 0.0
    """RandAugment by fields: standard deviation of the strength."""
    rand_increasing: Bool = True
    """RandAugment by fields: operations whose strength rises with the magnitude."""
    erase: Fraction = 0.0
    """Probability of random erasing."""
    erase_mode: Literal["pixel", "color", "black"] = "pixel"
    """Fill of the erased box: noise for each pixel, one random colour, or black."""
    mixup: NotNegative = 0.0
    """Alpha of MixUp; 0: off."""
    cutmix: NotNegative = 0.0
    """Alpha of CutMix; 0: off."""
    mix_prob: Fraction = 1.0
    """Probability that a batch (or pair, or image) is mixed at all."""
    mix_switch_prob: Fraction = 0.5
    """Probability of CutMix over MixUp when both are on."""
    mix_mode: Literal["batch", "pair", "elem"] = "batch"
    """One mixing weight for each batch, pair of images, or image."""
    mix_patches: Bool = False
    """MixUp that swaps whole patches instead of blending pixels."""
    progressive: tuple[tuple[Rate, Count], ...] = ()
    """Smaller images at first: pairs of the share of the run at which a phase begins and its image size, such as
    [[0, 16], [0.5, 24], [0.8, 32]]; images are shrunk where the model is. Empty: the model's size throughout."""
    mix_off_epochs: NotNegative = 0.0
    """No mixing in this many last epochs."""
    label_smoothing: Rate = 0.0
    """Share of the target spread over all classes."""
    repeats: Count = 1
    """Repeated augmentation: copies of an image in a batch, each augmented on its own (DeiT: 3)."""
    eval_crop: Annotated[float, Strict(), Field(gt=0, le=1)] = 0.875
    """Evaluation: image size over the size the shorter side is resized to, before the centre crop."""
    eval_interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """Resampling in evaluation."""


@dataclass(config=_TREE, frozen=True, kw_only=True)
class OptimConfig:
    """How weights change."""

    name: str = "adamw"
    """`adamw`, `lamb`, `sgd`, `muon`, or any optimiser of timm by name."""
    lr: Positive = 1e-3
    """Peak learning rate."""
    other_lr: Positive | None = None
    """`muon`: peak learning rate of all that is no matrix of a block; null: the same."""
    weight_decay: NotNegative = 0.05
    """Decoupled weight decay; biases, norms, LayerScale, tokens and position embeddings have none."""
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    momentum: Rate = 0.9
    """Momentum of `sgd` and `muon`."""
    clip_norm: NotNegative = 1.0
    """Largest norm of the gradient; 0: off."""
    layer_decay: Annotated[float, Strict(), Field(gt=0, le=1)] = 1.0
    """Learning rate of a layer over that of the next one; 1: the same for all."""
    loss: Literal["cross_entropy", "binary"] = "cross_entropy"
    """Cross entropy, or binary cross entropy for each class (DeiT III)."""


@dataclass(config=_TREE, frozen=True, kw_only=True)
class ScheduleConfig:
    """How long, and the learning rate over time."""

    steps: Count | None = None
    """Length in updates. Exactly one of `steps` and `epochs` is given."""
    epochs: Positive | None = None
    """Length in passes over the training images."""
    warmup_steps: CountOrZero | None = None
    """Updates over which the learning rate rises to its peak."""
    warmup_epochs: NotNegative | None = None
    """The same in epochs. At most one of the two is given."""
    shape: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning rate after warm-up."""
    final_lr: NotNegative = 0.0
    """Learning rate at the end."""


@dataclass(config=_TREE, frozen=True, kw_only=True)
class BatchConfig:
    """How many images. The global batch is the unit; accumulation is derived."""

    global_: Count = 1024
    """Images for each update, over all processes."""
    micro: Count | Auto = "auto"
    """Images for each forward pass of a process."""
    eval: Count | Auto = "auto"
    """Images for each forward pass in evaluation."""


@dataclass(config=_TREE, frozen=True, kw_only=True)
class EmaConfig:
    """The moving average of the weights."""

    decay: Rate = 0.0
    """Share of the average that stays at each update; 0: no average is kept."""
    warmup: Bool = True
    """Let the decay rise with the step, so that a short run is not held back by its random start."""


@dataclass(config=_TREE, frozen=True, kw_only=True)
class ParallelConfig:
    """How the work is spread and in what precision it is done."""

    strategy: Auto | Strategy = "auto"
    """`auto` follows the launcher."""
    offload: Literal["none", "optimizer", "params"] = "none"
    """ZeRO: keep in host memory the optimiser's state (any stage), or that and the weights (`zero3`)."""
    timeout_seconds: Count = 600
    """A process that waits this long for another gives up, and the run ends."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """`auto`: bf16 where the hardware has it, fp16 on older GPUs, fp32 on a CPU."""
    compile: Bool = False
    """Compile each block with torch.compile."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass: of every second block, or of all."""
    tf32: Bool = True
    """TF32 matrix products on GPUs that have them."""
    deterministic: Bool = False
    """Only kernels that give the same bits every time."""


@dataclass(config=_TREE, frozen=True, kw_only=True)
class RunConfig:
    """Where a run lives, and when it saves, evaluates and speaks."""

    dir: str | None = None
    """Folder of the run; null: `runs/<name of the recipe>`, under a W&B agent `runs/sweeps/<sweep>/<run>`."""
    seed: CountOrZero = 0
    """Everything random follows from it."""
    resume: str = "auto"
    """`auto`: go on if there is something to go on from; `never`; or the path of a checkpoint."""
    save_every: Count = 1000
    """Steps between checkpoints."""
    eval_every: Count = 1000
    """Steps between evaluations."""
    log_every: Count = 50
    """Steps between lines of metrics.jsonl."""
    keep: Count = 2
    """Newest checkpoints that are kept, besides the best."""
    max_bad_steps: Count = 50
    """Stop after this many updates in a row with a loss or gradient that is not finite."""


@dataclass(config=_TREE, frozen=True, kw_only=True)
class TrackConfig:
    """Who is told. metrics.jsonl and summary.json are always written."""

    wandb: Literal["auto", "offline", "online", "disabled"] = "auto"
    """`auto`: online when logged in, else offline. A server that cannot be reached: offline, too."""
    project: str = "vit_scale"
    """W&B project."""
    entity: str | None = None
    """W&B user or team; null: the default of the account."""
    name: str | None = None
    """Name of the W&B run; null: the name of the run's folder."""
    group: str | None = None
    """W&B group."""
    tags: tuple[str, ...] = ()
    """W&B tags."""
    artifact: Bool = False
    """Upload the final weights to W&B as an artifact."""
    trackers: tuple[str, ...] = ()
    """Others that are told the same metrics, by accelerate's names: `tensorboard`, `mlflow`, ..."""
    pictures: Literal["last", "every", "never"] = "last"
    """Mistakes, confusions and attention maps: of the last evaluation, of every one, or none at all."""


def _section(section: type) -> object:
    return Field(default_factory=section)


@dataclass(config=_TREE, frozen=True, kw_only=True)
class Config:
    """All options of a run."""

    model: ModelConfig = _section(ModelConfig)  # type: ignore[assignment]
    """What is trained."""
    data: DataConfig = _section(DataConfig)  # type: ignore[assignment]
    """Where images come from."""
    augment: AugmentConfig = _section(AugmentConfig)  # type: ignore[assignment]
    """What happens to images."""
    optim: OptimConfig = _section(OptimConfig)  # type: ignore[assignment]
    """How weights change."""
    schedule: ScheduleConfig = _section(ScheduleConfig)  # type: ignore[assignment]
    """How long."""
    batch: BatchConfig = _section(BatchConfig)  # type: ignore[assignment]
    """How many images at a time."""
    ema: EmaConfig = _section(EmaConfig)  # type: ignore[assignment]
    """The moving average of the weights."""
    parallel: ParallelConfig = _section(ParallelConfig)  # type: ignore[assignment]
    """How the work is spread."""
    run: RunConfig = _section(RunConfig)  # type: ignore[assignment]
    """Where the run lives."""
    track: TrackConfig = _section(TrackConfig)  # type: ignore[assignment]
    """Who is told."""


RENAMED = {"model.attention": "model.kernel"}
"""Options of earlier versions and their names today. Run directories still contain them, recipes may not."""


def with_current_names(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a run (section -> option -> value) under the names that they have today."""
    for old, new in RENAMED.items():
        section, name = old.split(".")
        new_section, new_name = new.split(".")
        options = tree.get(section)
        if isinstance(options, dict) and name in options:
            others = {key: value for key, value in options.items() if key != name}
            tree = tree | {section: others}
            tree = tree | {new_section: {new_name: options[name]} | tree.get(new_section, {})}
    return tree
