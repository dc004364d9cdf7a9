"""Training like timm's train.py: its loader with prefetcher, Mixup, model, EMA, optimizer and scheduler.

    python benchmarks/timm_train.py --data SOURCE --model vit_cifar_small --size 32 --batch 128 --steps 20
    python benchmarks/timm_train.py --data SOURCE --batch 128 --minutes 25 --evaluations 10

Baseline for train_end_to_end.py, startup.py and time_to_accuracy.py. timm's package does not include its train.py; this
script combines the same components in the same order for DeiT's recipe (random resized crop, `rand-m9-mstd0.5-inc1`,
erasing, MixUp, CutMix, label smoothing, drop path 0.1, EMA, cosine schedule) and prints one line of JSON every
--log-every steps: step, seconds since the start, loss. With --minutes, the schedule reaches zero when the time is over,
and --evaluations evenly spaced evaluations on the validation images print lines with `top1` of the raw and EMA weights.
If a GPU is available, it trains like `train.py --amp --amp-dtype bfloat16`.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

START = time.perf_counter()
TICKS = 10_000
"""Total steps of timm's scheduler, regardless of the number of training steps."""


def main() -> None:
    """Build the loader and train."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", required=True)
    options.add_argument("--model", default="vit_cifar_small")
    options.add_argument("--model-options", type=json.loads, default={}, help="JSON: variant fields to change")
    options.add_argument("--size", type=int, default=32)
    options.add_argument("--batch", type=int, default=128)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--minutes", type=float, help="training time, instead of --steps")
    options.add_argument("--evaluations", type=int, default=0)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--log-every", type=int, default=1)
    options.add_argument("--drop-path", type=float, default=0.1)
    args = options.parse_args()
    loader, mixup = build_loader(args)
    train(args, loader, mixup)


def build_loader(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return timm's loader and Mixup for images read through `datasets`."""
    import torch
    from timm.data import Mixup, create_loader
    from timm_images import TimmImages

    dataset = TimmImages(args.data)
    loader = create_loader(
        dataset,  # type: ignore[arg-type]
        input_size=(3, args.size, args.size),
        batch_size=args.batch,
        is_training=True,
        auto_augment="rand-m9-mstd0.5-inc1",
        re_prob=0.25,
        re_mode="pixel",
        interpolation="random",
        color_jitter=0,
        num_workers=args.workers,
        pin_memory=torch.cuda.is_available(),
        device=device(),
    )
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=dataset.num_classes)
    return loader, mixup


def train(args: argparse.Namespace, loader: Any, mixup: Any) -> None:
    """Run the steps of timm's train_one_epoch, without its printing."""
    import torch
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import ModelEmaV3
    from train_step import build_theirs

    torch.manual_seed(42)
    model = build_theirs(args.model, args.drop_path, num_classes=mixup.num_classes, **args.model_options)
    model = model.to(device()).train()
    autocast = torch.autocast(device().type, torch.bfloat16, enabled=torch.cuda.is_available())
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    ema = ModelEmaV3(model, decay=0.999, use_warmup=True)
    loss_function = SoftTargetCrossEntropy()
    scheduler, _ = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=300, warmup_epochs=5, step_on_epochs=False, updates_per_epoch=TICKS // 300
    )
    evaluated = 0
    for step, (images, labels) in enumerate(loader, start=1):
        images, targets = mixup(images, labels)
        with autocast:
            loss = loss_function(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model, step=step)
        done = progress(step, args)
        scheduler.step_update(round(done * TICKS))
        if step % args.log_every == 0 or done >= 1:
            log(step=step, loss=loss.item())
        if args.evaluations and int(done * args.evaluations) > evaluated:
            evaluated = int(done * args.evaluations)
            log(step=step, top1=accuracy(model, args), ema_top1=accuracy(ema.module, args))
        if done >= 1:
            return


def device() -> Any:
    """Return the GPU if available, otherwise the CPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def progress(step: int, args: argparse.Namespace) -> float:
    """Return the completed fraction of the training, in time or steps."""
    if args.minutes is None:
        return step / args.steps
    return min(1.0, (time.perf_counter() - START) / 60 / args.minutes)


def log(**values: float) -> None:
    print(json.dumps({"seconds": time.perf_counter() - START, **values}), flush=True)


def accuracy(model: Any, args: argparse.Namespace) -> float:
    """Return the accuracy on the validation images, with timm's evaluation loader."""
    import torch
    from timm.data import create_loader
    from timm_images import TimmImages

    loader = create_loader(
        TimmImages(args.data, train=False),  # type: ignore[arg-type]
        input_size=(3, args.size, args.size),
        batch_size=250,
        is_training=False,
        crop_pct=1.0,
        num_workers=args.workers,
        pin_memory=torch.cuda.is_available(),
        device=device(),
    )
    training, correct, images_seen = model.training, 0, 0
    model.eval()
    with torch.no_grad():
        for images, labels in loader:
            correct += int((model(images).argmax(1) == labels).sum())
            images_seen += len(labels)
    model.train(training)
    return correct / images_seen


if __name__ == "__main__":
    main()
