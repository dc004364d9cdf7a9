"""The training loop.

A step takes the global batch in micro-batches, and everything it does is a function of (seed, step). The device is
read at logged steps only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from signal import Signals

from torch import Tensor

from vit_scale.attention_report.periodic import block_metrics
from vit_scale.data.batch import Batch
from vit_scale.errors import UserError
from vit_scale.models.interface import backbone_of
from vit_scale.probe.periodic import KnnProbe
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
    state, plan, terminal = run.state, run.plan, run.record.terminal
    meter = Meter(run)
    first = state.step + 1
    terminal.start(state.step, plan.steps, (*run.task.metrics, *run.task.further_metrics))
    with watch(run) as interrupt, run.record:
        if not state.evaluated and (signal := evaluate_now(run, meter, interrupt)):
            return stop_early(run, signal)
        for batches in meter.timed(run.steps()):
            if plan.is_logged(state.step + 1):
                meter.watch_update()
            parts, norm = take_step(run, batches)
            meter.add(parts, norm)
            terminal.advance(state.step)
            if plan.is_logged(state.step):
                log(run, meter)
            if state.step == first:
                with meter.paused():
                    after_first_step(run, batches[0])
            request = interrupt.agreed()
            state.evaluated = not plan.is_measured(state.step)
            if plan.is_saved(state.step) or request.save or request.signal:
                save(run)
                interrupt.restart_clock()
            if request.signal:
                return stop_early(run, request.signal)
            if not state.evaluated and (signal := evaluate_now(run, meter, interrupt)):
                return stop_early(run, signal)
            if run.is_done():
                break
    return 0


def watch(run: Run) -> Interrupt:
    """Watch for whatever stops `run` or lets it save."""
    terminal, timeout = run.record.terminal, run.config.parallel.timeout_seconds
    return Interrupt(timeout, save_seconds=run.plan.save_seconds, is_closed=lambda: terminal.is_closed)


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
        with run.record.terminal.phase("Comparing the model with timm"):
            outcome = run.check.result(model.num_classes, model.in_chans)
        run.record.terminal.info(f"timm check  {outcome.summary()}")
        timm_check = outcome.to_dict()
    with run.record.terminal.phase("Starting the trackers"):
        run.record.start_trackers(timm_check)
    if run.state.step == 1 and run.record.terminal.enabled and run.config.track.images != "never":
        few = batch.first(SHOWN_IMAGES)
        run.task.show_batch(run.task.inputs(few, step=0), RecordShow(run.record, run.state.model, step=1))


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


def evaluate_now(run: Run, meter: Meter, interrupt: Interrupt) -> Signals | None:
    """Do what is due after this step: an evaluation and k-NN of raw and EMA weights, a look at the attention.

    Returns the signal that interrupted it, if any. A checkpoint was saved before: resuming from it repeats it.
    """
    state = run.state
    run.record.wait_for_trackers()
    with meter.paused():
        try:
            metrics = _measure_all(run, interrupt)
        except Interrupted as stopped:
            return stopped.signal
        _update_best(run, metrics)
        state.evaluated = True
        run.record.terminal.evaluation(state.step, metrics)
        run.record.log(state.step, {"epoch": run.plan.epoch(state.step)} | metrics)
        run.record.write_summary(**run.best_facts())
        run.checkpoints.add_evaluation(state, metrics)
    return None


def _update_best(run: Run, metrics: dict[str, float]) -> None:
    """Keep the result of the first metric if it was measured and is better than all before."""
    state, best_metric = run.state, run.task.metrics[0]
    keys = (f"val/{best_metric.name}", f"val_ema/{best_metric.name}")
    if measured := [metrics[key] for key in keys if key in metrics]:
        best = best_metric.best_of(measured)
        if best_metric.is_better(best, state.best):
            state.best, state.best_step = best, state.step


class Interrupted(Exception):
    """A signal has ended an evaluation, on all ranks after the same batch."""

    def __init__(self, signal: Signals) -> None:
        super().__init__(signal)
        self.signal = signal


def _measure_all(run: Run, interrupt: Interrupt) -> dict[str, float]:
    """Return the metrics of the raw and of the EMA weights; raises `Interrupted`."""
    ema, inspected = run.state.ema, _is_inspected(run)
    batches = _batches_to_measure(run)
    total = batches * (1 if ema is None else 2) if batches is not None else None
    with run.record.terminal.phase("Evaluating, batch", total) as phase:

        def advance() -> None:
            phase.advance()
            if signal := interrupt.agreed().signal:
                raise Interrupted(signal)

        if ema is None:
            return _measure(run, "raw", advance, inspect=inspected)
        metrics = _measure(run, "raw", advance, inspect=False)
        with ema.applied():
            return metrics | _measure(run, "ema", advance, inspect=inspected)


def _due(run: Run) -> tuple[bool, KnnProbe | None]:
    """Return whether an evaluation is due after this step, and the k-NN if it is due."""
    step = run.state.step
    probe = run.loaders.probe if run.plan.is_probed(step) else None
    # A resumed run may have other intervals than the one that left it to do: then it is an evaluation.
    return run.plan.is_evaluated(step) or (probe is None and not run.plan.is_looked_at(step)), probe


def _batches_to_measure(run: Run) -> int | None:
    """Return how many batches are due for one set of weights; None if that is unknown."""
    evaluates, probe = _due(run)
    evaluated = run.loaders.val.count() if evaluates else 0
    return None if evaluated is None else evaluated + (probe.count() if probe else 0)


def _is_inspected(run: Run) -> bool:
    when = run.config.track.images
    # Done, unless this evaluation improves on the best one: then these are shown early, and again at the end.
    return when == "every" or (when == "last" and run.is_done())


def _measure(run: Run, weights: str, advance: Callable[[], None], *, inspect: bool) -> dict[str, float]:
    """Return what is due of the weights that the model has now, by key of metrics.jsonl."""
    evaluates, probe = _due(run)
    metrics = _evaluate(run, weights, advance, inspect=inspect) if evaluates else {}
    if probe is not None:
        metrics |= probe.measure(run.state.model, advance)
    if weights == "ema" or run.state.ema is None:
        metrics |= _look(run, weights, show=evaluates and inspect)
    section = "val" if weights == "raw" else "val_ema"
    return {f"{section}/{name}": value for name, value in metrics.items()}


def _look(run: Run, weights: str, *, show: bool) -> dict[str, float]:
    """Measure the attention if that is due, with `show` also show it; return the metrics that are due."""
    watch, is_due = run.loaders.attention, run.plan.is_looked_at(run.state.step)
    if watch is None or not (show or is_due):
        return {}
    model = run.state.model
    found = watch.try_show(RecordShow(run.record, model, run.state.step, weights)) if show else watch.measure(model)
    return block_metrics(found) if is_due and found is not None else {}


def _evaluate(run: Run, weights: str, advance: Callable[[], None], *, inspect: bool) -> dict[str, float]:
    """Evaluate the weights that the model has now; with `inspect` also show tables and images."""
    evaluator = evaluate(run.task, run.state.model, run.loaders.val, inspect=inspect, advance=advance)
    metrics = evaluator.metrics()
    if inspect:
        evaluator.show(RecordShow(run.record, run.state.model, run.state.step, weights))
    return {metric.name: metrics[metric.name] for metric in run.task.metrics}


def save(run: Run) -> None:
    """Write a checkpoint in the background; every rank must call it."""
    summary = run.record.summary
    meta = {key: summary.get(key) for key in ("versions", "git_commit", "wandb_id", "class_names", "in_chans", "task")}
    meta |= {"config": to_tree(run.config), "plan": asdict(run.plan), "memory_basis": run.memory_basis}
    run.checkpoints.save(run.state, meta)
    if problem := run.checkpoints.problem():
        run.record.terminal.info(f"{problem} Training continues.")


def stop_early(run: Run, signal: Signals) -> int:
    """Stop cleanly after a signal, and print how to resume."""
    run.close()
    # A launcher ends all processes once the first has left; the main one must have finished its checkpoint by then.
    wait_for_all()
    state, terminal = run.state, run.record.terminal
    saved = run.checkpoints.problem() or f"Checkpoint saved to {run.folder}/checkpoints."
    pending = "" if state.evaluated else ", before its evaluation"
    terminal.last_words(f"Received {signal.name}: stopped after step {state.step:,}{pending}. {saved}")
    terminal.last_words("Rerun the same command to resume.")
    if sync := run.record.close():
        terminal.info(f"Upload to W&B so far: {sync}")
    return EXIT_STATUS[signal]
