"""Training as timm's train.py does it: its loader with a prefetcher, Mixup, model, EMA, optimiser and scheduler.

    python benchmarks/timm_train.py --data FOLDER --model vit_cifar_small --size 32 --batch 128 --steps 20

The peer of train_end_to_end.py and startup.py. timm's package does not contain its train.py; this puts the same parts
together in the same order for DeiT's recipe (random resized crop, `rand-m9-mstd0.5-inc1`, erasing, MixUp, CutMix, label
smoothing, drop path 0.1, EMA) and prints a line of JSON for each update: its number, seconds since the start, loss.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

START = time.perf_counter()


def main() -> None:
    """Parse, build, train."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", required=True)
    options.add_argument("--model", default="vit_cifar_small")
    options.add_argument("--size", type=int, default=32)
    options.add_argument("--batch", type=int, default=128)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--drop-path", type=float, default=0.1)
    args = options.parse_args()
    loader, mixup = build_loader(args)
    train(args, loader, mixup)


def build_loader(args: argparse.Namespace) -> tuple[Any, Any]:
    """timm's loader and its Mixup, of the images in a folder that `datasets` reads."""
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
        pin_memory=False,
        device=torch.device("cpu"),
    )
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=dataset.num_classes)
    return loader, mixup


def train(args: argparse.Namespace, loader: Any, mixup: Any) -> None:
    """The updates of timm's train_one_epoch, without its printing."""
    import torch
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import ModelEmaV3
    from train_step import build_theirs

    torch.manual_seed(42)
    model = build_theirs(args.model, args.drop_path, num_classes=mixup.num_classes).train()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    ema = ModelEmaV3(model, decay=0.999)
    loss_function = SoftTargetCrossEntropy()
    scheduler, _ = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=300, warmup_epochs=5, step_on_epochs=False, updates_per_epoch=100
    )
    for update, (images, labels) in enumerate(loader):
        images, targets = mixup(images, labels)
        loss = loss_function(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model, step=update)
        scheduler.step_update(update)
        passed = time.perf_counter() - START
        print(json.dumps({"step": update + 1, "seconds": passed, "loss": loss.item()}), flush=True)
        if update + 1 == args.steps:
            return


if __name__ == "__main__":
    main()
