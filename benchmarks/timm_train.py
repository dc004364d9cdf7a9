"""Training as timm's train.py does it: its loader with a prefetcher, Mixup, model, EMA, optimizer and scheduler.

    python benchmarks/timm_train.py --data FOLDER --model vit_cifar_small --size 32 --batch 128 --steps 20
    python benchmarks/timm_train.py --data FOLDER --batch 128 --minutes 25 --evaluations 10

The peer of train_end_to_end.py, startup.py and time_to_accuracy.py. timm's package does not contain its train.py; this
puts the same parts together in the same order for DeiT's recipe (random resized crop, `rand-m9-mstd0.5-inc1`, erasing,
MixUp, CutMix, label smoothing, drop path 0.1, EMA, cosine schedule) and prints a line of JSON for each update, or for
every --log-every of them: its number, seconds since the start, loss. With --minutes the schedule reaches zero when they
are over, and so many evaluations of the validation images, spread evenly, print lines with `top1` of the weights and of
their average. On a GPU, where there is one, it trains as `train.py --amp --amp-dtype bfloat16` does.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

START = time.perf_counter()
TICKS = 10_000
"""Updates of timm's scheduler from beginning to end, whatever the number of the model's."""


def main() -> None:
    """Parse, build, train."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", required=True)
    options.add_argument("--model", default="vit_cifar_small")
    options.add_argument("--model-options", type=json.loads, default={}, help="JSON: fields of the variant to change")
    options.add_argument("--size", type=int, default=32)
    options.add_argument("--batch", type=int, default=128)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--minutes", type=float, help="instead of steps")
    options.add_argument("--evaluations", type=int, default=0)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--log-every", type=int, default=1)
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
        pin_memory=torch.cuda.is_available(),
        device=device(),
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
    for update, (images, labels) in enumerate(loader, start=1):
        images, targets = mixup(images, labels)
        with autocast:
            loss = loss_function(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model, step=update)
        done = progress(update, args)
        scheduler.step_update(round(done * TICKS))
        if update % args.log_every == 0 or done >= 1:
            say(step=update, loss=loss.item())
        if args.evaluations and int(done * args.evaluations) > evaluated:
            evaluated = int(done * args.evaluations)
            say(step=update, top1=accuracy(model, args), ema_top1=accuracy(ema.module, args))
        if done >= 1:
            return


def device() -> Any:
    """A GPU where there is one."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def progress(update: int, args: argparse.Namespace) -> float:
    """The share of the training that is over: of its time, or of its updates."""
    if args.minutes is None:
        return update / args.steps
    return min(1.0, (time.perf_counter() - START) / 60 / args.minutes)


def say(**values: float) -> None:
    print(json.dumps({"seconds": time.perf_counter() - START, **values}), flush=True)


def accuracy(model: Any, args: argparse.Namespace) -> float:
    """Share of the validation images that are classified rightly, by timm's loader for evaluation."""
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
    training, right, images_seen = model.training, 0, 0
    model.eval()
    with torch.no_grad():
        for images, labels in loader:
            right += int((model(images).argmax(1) == labels).sum())
            images_seen += len(labels)
    model.train(training)
    return right / images_seen


if __name__ == "__main__":
    main()
