"""The training loop.

A step takes the global batch in micro-batches, and everything it does is a function of (seed, step). The device is
read at logged steps only.
"""

from __future__ import annotations

from dataclasses import asdict
from signal import Signals

from torch import Tensor

from vit_scale.data.batch import Batch
from vit_scale.errors import UserError
from vit_scale.models.interface import backbone_of
from vit_scale.recipe import to_tree
from vit_scale.record.record import RecordShow
from vit_scale.strategies.norms import weight_norm
from vit_scale.strategies.processes import wait_for_all
from vit_scale.tasks.evaluate import evaluate
from vit_scale.train.meter import Meter
from vit_scale.train.run import Run
from vit_scale.train.signals import EXIT_STATUS, Interrupt
from vit_scale.train.update import update

SHOWN_IMAGES = 16
"""Images of the first batch that a run shows."""


def train(run: Run) -> int:
    """Train `run` to its end or to a signal; returns the exit status."""
    state, options = run.state, run.config.run
    meter = Meter(run)
    first = state.step + 1
    run.record.terminal.start(state.step)
    with Interrupt(run.config.parallel.timeout_seconds) as interrupt, run.record:
        for batches in meter.timed(run.steps()):
            if is_logged(run, state.step + 1):
                meter.watch_update()
            parts, norm = take_step(run, batches)
            meter.add(parts, norm)
            run.record.terminal.advance(state.step)
            last = state.step == run.plan.steps
            if last or state.step % options.log_every == 0:
                log(run, meter)
            if state.step == first:
                with meter.paused():
                    after_first_step(run, batches[0])
            improved = (last or state.step % options.eval_every == 0) and evaluate_now(run, meter)
            signal = interrupt.agreed()
            if last or signal or improved or state.step % options.save_every == 0:
                save(run)
            if signal and not last:
                return stop_early(run, signal)
    return 0


def take_step(run: Run, batches: list[Batch]) -> tuple[dict[str, Tensor], Tensor]:
    """Take the next step of a run; return the parts of the loss and the gradient norm, on the device."""
    state, config = run.state, run.config
    lr, seed, clip_norm = run.lr_at(state.step), config.run.seed, config.optim.clip_norm
    parts, norm = update(run.task, state, batches, lr=lr, seed=seed, clip_norm=clip_norm)
    state.step += 1
    return parts, norm


def after_first_step(run: Run, batch: Batch) -> None:
    """Do what the first step of a launch need not wait for: the check against timm, trackers, an image grid."""
    timm_check = None
    if run.check is not None:
        model = backbone_of(run.state.model)
        outcome = run.check.result(model.num_classes, model.in_chans)
        run.record.terminal.info(f"timm check  {outcome.summary()}")
        timm_check = outcome.to_dict()
    run.record.start_trackers(timm_check)
    if run.state.step == 1 and run.record.terminal.enabled and run.config.track.images != "never":
        few = batch.first(SHOWN_IMAGES)
        run.task.show_batch(run.task.inputs(few, step=0), RecordShow(run.record, run.state.model, step=1))


def is_logged(run: Run, step: int) -> bool:
    """Return whether the metrics of `step` are read from the device."""
    options = run.config.run
    return step == run.plan.steps or step % options.log_every == 0 or step % options.eval_every == 0


def log(run: Run, meter: Meter) -> None:
    """Read the device, record the metrics, and stop a run that has diverged."""
    if not meter.steps:
        return
    metrics = meter.read()
    run.record.terminal.progress(run.state.step, metrics)
    run.record.log(run.state.step, metrics)
    if int(run.state.consecutive_skipped_steps.item()) >= run.config.run.max_skipped_steps:
        raise divergence_error(run, meter, metrics)


def divergence_error(run: Run, meter: Meter, metrics: dict[str, float]) -> UserError:
    """Describe a run whose steps are not finite any more; every rank must call it."""
    last, skipped = run.state.step, int(run.state.consecutive_skipped_steps.item())
    first = last - skipped + 1
    finite = "none" if meter.finite_norm is None else f"{meter.finite_norm.item():.3g}"
    return UserError(
        f"Training diverged: non-finite loss or gradient for {skipped} consecutive steps ({first:,}-{last:,}): "
        f"learning rate {metrics['train/lr']:.2e}, gradient norm {metrics['train/grad_norm']} (last finite: {finite}), "
        f"weight norm {weight_norm(run.state.engine.shards, run.device):.4g}.\n"
        f"The weights are unchanged since before step {first:,}; last checkpoint from before it: "
        f"{run.checkpoints.good or 'none'}.\n"
        "To recover, set run.resume to it with a new run.dir, and try a lower optim.lr, a longer warmup or "
        "parallel.precision=fp32."
    )


def evaluate_now(run: Run, meter: Meter) -> bool:
    """Evaluate raw and EMA weights; returns whether this is the best result so far."""
    state, best_metric = run.state, run.task.metrics[0]
    log(run, meter)
    run.record.wait_for_trackers()
    if state.ema is None:
        metrics = _evaluate(run, "raw", inspect=_is_inspected(run))
    else:
        metrics = _evaluate(run, "raw", inspect=False)
        with state.ema.applied():
            metrics |= _evaluate(run, "ema", inspect=_is_inspected(run))
    keys = (f"val/{best_metric.name}", f"val_ema/{best_metric.name}")
    best = best_metric.best_of([metrics[key] for key in keys if key in metrics])
    improved = best_metric.is_better(best, state.best)
    if improved:
        state.best, state.best_step = best, state.step
    run.record.terminal.evaluation(state.step, metrics)
    run.record.log(state.step, {"epoch": run.plan.epoch(state.step)} | metrics)
    run.record.write_summary(**{f"best/val/{best_metric.name}": state.best, "best/step": state.best_step})
    meter.restart()
    return improved


def _is_inspected(run: Run) -> bool:
    when = run.config.track.images
    return when == "every" or (when == "last" and run.state.step == run.plan.steps)


def _evaluate(run: Run, weights: str, *, inspect: bool) -> dict[str, float]:
    """Evaluate the weights that the model has now; with `inspect` also show tables and images."""
    evaluator = evaluate(run.task, run.state.model, run.loaders.val, inspect=inspect)
    metrics = evaluator.metrics()
    if inspect:
        evaluator.show(RecordShow(run.record, run.state.model, run.state.step, weights))
    section = "val" if weights == "raw" else "val_ema"
    return {f"{section}/{metric.name}": metrics[metric.name] for metric in run.task.metrics}


def save(run: Run) -> None:
    """Write a checkpoint in the background; every rank must call it."""
    summary = run.record.summary
    meta = {key: summary.get(key) for key in ("versions", "git_commit", "wandb_id", "class_names", "in_chans", "task")}
    run.checkpoints.save(run.state, meta | {"config": to_tree(run.config), "plan": asdict(run.plan)})
    if problem := run.checkpoints.problem():
        run.record.terminal.info(f"{problem} Training continues.")


def stop_early(run: Run, signal: Signals) -> int:
    """Stop cleanly after a signal, and print how to resume."""
    run.close()
    # A launcher ends all processes once the first has left; the main one must have finished its checkpoint by then.
    wait_for_all()
    saved = run.checkpoints.problem() or f"Checkpoint saved to {run.folder}/checkpoints."
    run.record.terminal.info(f"Received {signal.name}: stopped after step {run.state.step:,}. {saved}")
    run.record.terminal.info("Rerun the same command to resume.")
    if sync := run.record.close():
        run.record.terminal.info(f"Upload to W&B so far: {sync}")
    return EXIT_STATUS[signal]
