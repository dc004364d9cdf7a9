"""The training loop.

An update takes the global batch in micro batches, and everything it does is a function of (seed, step). The device is
asked for numbers at logged steps only.
"""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from dataclasses import asdict
from signal import Signals

import torch

from vit_scale.data.loading.loaders import Batch
from vit_scale.errors import UserError
from vit_scale.recipe import to_tree
from vit_scale.strategies.guarded_step import apply_update
from vit_scale.strategies.norms import weight_norm
from vit_scale.tasks.classify.analysis import Inspection
from vit_scale.tasks.classify.loss import classification_loss
from vit_scale.tasks.evaluate import evaluate
from vit_scale.train.build import Run
from vit_scale.train.meter import Meter
from vit_scale.train.optim.optimizer import set_learning_rate
from vit_scale.train.show import show_batch, show_inspection
from vit_scale.train.signals import EXIT_STATUS, Interrupt


def train(run: Run) -> int:
    """Train `run` to its end or to a signal; returns the exit status."""
    state, options = run.state, run.config.run
    meter = Meter(run)
    first = state.step + 1
    run.screen.start(state.step)
    with Interrupt(run.config.parallel.timeout_seconds) as interrupt, run.record or nullcontext():
        for batches in meter.timed(run.updates()):
            if is_logged(run, state.step + 1):
                meter.watch_update()
            loss, norm = update(run, batches)
            state.step += 1
            meter.add(loss, norm)
            run.screen.advance(state.step)
            last = state.step == run.plan.steps
            if last or state.step % options.log_every == 0:
                log(run, meter)
            if state.step == first:
                with meter.paused():
                    tell_of_start(run, batches[0])
            improved = (last or state.step % options.eval_every == 0) and evaluate_now(run, meter)
            signal = interrupt.agreed()
            if last or signal or improved or state.step % options.save_every == 0:
                save(run)
            if signal and not last:
                return stop_early(run, signal)
    return 0


def tell_of_start(run: Run, batch: Batch) -> None:
    """What the first update of a start need not wait for: how the model compares with timm's, which the trackers that
    then begin hear of first, and a picture of the batch.
    """
    if run.check is not None and run.record is not None:
        outcome = run.check.result(run.state.model.num_classes, run.state.model.in_chans)
        run.screen.say(f"timm       {outcome.summary()}")
        run.record.start_trackers(outcome.to_dict())
    if run.state.step == 1:
        show_batch(run, *prepare(run, batch, step=0))


def is_logged(run: Run, step: int) -> bool:
    """Whether the numbers of update `step` are read."""
    options = run.config.run
    return step == run.plan.steps or step % options.log_every == 0 or step % options.eval_every == 0


def update(run: Run, batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    """One update of the weights from the micro batches of this process; returns loss and gradient norm."""
    state, config = run.state, run.config
    seed_everything(config.run.seed, state.step, run.accelerator.process_index)
    set_learning_rate(state.optimizer, run.lr.at(state.step))
    loss_sum = torch.zeros((), device=run.device)
    for batch in batches:
        images, targets = prepare(run, batch, state.step)
        with run.accelerator.accumulate(state.wrapped):
            loss = classification_loss(config.optim.loss, state.wrapped(images), targets)
            run.accelerator.backward(loss)
        loss_sum += loss.detach()
    norm = apply_update(state, run.accelerator, config.optim.clip_norm)
    if state.ema is not None:
        state.ema.update(state.step)
    return loss_sum / len(batches), norm


def prepare(run: Run, batch: Batch, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised, mixed images at the size of the step, counted from 0, and soft targets, on the device."""
    images = run.normalize(batch.images.to(run.device, non_blocking=True))
    labels = batch.labels.to(run.device, non_blocking=True)
    offset = int(batch.positions[0]) % run.plan.global_batch
    images, targets = run.mixing(images, labels, step=step, offset=offset)
    return run.progressive(images, step).to(run.state.input_dtype), targets


def seed_everything(seed: int, step: int, rank: int) -> None:
    """Make the draws of dropout and stochastic depth a function of (seed, step, process)."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=7).digest()
    torch.manual_seed(int.from_bytes(digest, "little"))


def log(run: Run, meter: Meter) -> None:
    """Read the device, record, and stop a run that has gone bad."""
    if not meter.steps:
        return
    metrics = meter.read()
    run.screen.progress(run.state.step, metrics)
    if run.record is not None:
        run.record.log(run.state.step, metrics)
    if int(run.state.bad_in_a_row.item()) >= run.config.run.max_skipped_steps:
        raise gone_bad(run, meter, metrics)


def gone_bad(run: Run, meter: Meter, metrics: dict[str, float]) -> UserError:
    """What is known of a run whose updates are not finite any more; all processes must call it."""
    last, bad = run.state.step, int(run.state.bad_in_a_row.item())
    finite = "none" if meter.finite_norm is None else f"{meter.finite_norm.item():.3g}"
    return UserError(
        f"Loss or gradient was not finite in {bad} updates in a row, steps {last - bad + 1:,} to {last:,}: learning "
        f"rate {metrics['train/lr']:.2e}, gradient norm {metrics['train/grad_norm']} (last finite one {finite}), "
        f"weight norm {weight_norm(run.state.shards, run.device):.4g}.\n"
        f"Weights are those before it began; last checkpoint from then: {run.checkpoints.good or 'none'}.\n"
        "Go on from there by run.resume in another run.dir, with a lower optim.lr, more warm-up or precision=fp32."
    )


def evaluate_now(run: Run, meter: Meter) -> bool:
    """Evaluate raw and averaged weights; True where this is the best so far."""
    state = run.state
    log(run, meter)
    if run.record is not None:
        run.record.wait_for_trackers()
    if state.ema is None:
        metrics = {f"val/{k}": v for k, v in inspect(run, "raw").items()}
    else:
        raw = evaluate(state.model, run.eval_loader, run.inputs, run.device)
        with state.ema.applied():
            averaged = inspect(run, "ema")
        metrics = {f"val/{k}": v for k, v in raw.items()} | {f"val_ema/{k}": v for k, v in averaged.items()}
    best = max(metrics["val/top1"], metrics.get("val_ema/top1", 0.0))
    improved = best > state.best_top1
    if improved:
        state.best_top1, state.best_step = best, state.step
    run.screen.evaluation(state.step, metrics)
    if run.record is not None:
        run.record.log(state.step, {"epoch": run.plan.epoch(state.step)} | metrics)
        run.record.write_summary(**{"best/val/top1": state.best_top1, "best/step": state.best_step})
    meter.restart()
    return improved


def inspect(run: Run, weights: str) -> dict[str, float]:
    """Evaluate the weights that the model has now and, where `track.images` says so, show what they do."""
    wanted = run.config.track.images
    last = run.state.step == run.plan.steps
    inspection = Inspection(run.state.model.num_classes) if wanted == "every" or (wanted == "last" and last) else None
    metrics = evaluate(run.state.model, run.eval_loader, run.inputs, run.device, inspection)
    if inspection is not None:
        show_inspection(run, inspection, weights)
    return metrics


def save(run: Run) -> None:
    """Write a checkpoint in the background; all processes take part."""
    summary = run.record.summary if run.record is not None else {}
    meta = {key: summary.get(key) for key in ("versions", "git_commit", "wandb_id", "class_names")}
    run.checkpoints.save(run.state, meta | {"config": to_tree(run.config), "plan": asdict(run.plan)})
    if problem := run.checkpoints.problem():
        run.screen.say(f"{problem} Training goes on.")


def stop_early(run: Run, signal: Signals) -> int:
    """End cleanly after a signal, with the way to go on."""
    run.close()
    # A launcher ends all processes once the first has left; the main one must have finished its checkpoint by then.
    run.accelerator.wait_for_everyone()
    run.screen.say(f"Stopped by {signal.name} after step {run.state.step:,}.")
    run.screen.say(run.checkpoints.problem() or f"Saved in {run.folder}/checkpoints.")
    run.screen.say("The same command goes on from there.")
    if run.record is not None and (sync := run.record.close()):
        run.screen.say(f"So far for W&B: {sync}")
    return EXIT_STATUS[signal]
