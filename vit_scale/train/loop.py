"""The training loop.

An update takes the global batch in micro batches, and everything it does is a function of (seed, step). The device is
asked for numbers at logged steps only.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from signal import Signals

import torch
import torch.distributed as dist

from vit_scale.data.loading import Batch
from vit_scale.errors import UserError
from vit_scale.recipe import to_tree
from vit_scale.train.evaluate import evaluate
from vit_scale.train.interrupt import EXIT_STATUS, Interrupt
from vit_scale.train.loss import classification_loss
from vit_scale.train.optim import set_learning_rate
from vit_scale.train.run import Run
from vit_scale.train.update import apply_update


def train(run: Run) -> int:
    """Train `run` to its end or to a signal; returns the exit status."""
    state, options = run.state, run.config.run
    meter = Meter(run)
    run.screen.start(state.step)
    with Interrupt(run.config.parallel.timeout_seconds) as interrupt:
        for batches in meter.timed(run.updates()):
            loss, norm = update(run, batches)
            state.step += 1
            meter.add(loss, norm)
            run.screen.advance(state.step)
            last = state.step == run.plan.steps
            if last or state.step % options.log_every == 0:
                log(run, meter)
            improved = (last or state.step % options.eval_every == 0) and evaluate_now(run, meter)
            signal = interrupt.agreed()
            if last or signal or improved or state.step % options.save_every == 0:
                save(run)
            if signal and not last:
                return stop_early(run, signal)
    return 0


def update(run: Run, batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    """One update of the weights from the micro batches of this process; returns loss and gradient norm."""
    state, config = run.state, run.config
    seed_everything(config.run.seed, state.step, run.accelerator.process_index)
    set_learning_rate(state.optimizer, run.lr.at(state.step))
    loss_sum = torch.zeros((), device=run.device)
    for batch in batches:
        images, targets = prepare(run, batch)
        with run.accelerator.accumulate(state.wrapped):
            loss = classification_loss(config.optim.loss, state.wrapped(images), targets)
            run.accelerator.backward(loss)
        loss_sum += loss.detach()
    norm = apply_update(state, run.accelerator, config.optim.clip_norm)
    if state.ema is not None:
        state.ema.update(state.step)
    return loss_sum / len(batches), norm


def prepare(run: Run, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised, mixed images and soft targets, on the device."""
    images = run.normalize(batch.images.to(run.device, non_blocking=True))
    labels = batch.labels.to(run.device, non_blocking=True)
    offset = int(batch.positions[0]) % run.plan.global_batch
    images, targets = run.mixing(images, labels, step=run.state.step, offset=offset)
    return images.to(run.state.input_dtype), targets


def seed_everything(seed: int, step: int, rank: int) -> None:
    """Make the draws of dropout and stochastic depth a function of (seed, step, process)."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=7).digest()
    torch.manual_seed(int.from_bytes(digest, "little"))


@dataclass
class Meter:
    """Sums since the last logged step; they stay on the device until `read`."""

    run: Run
    steps: int = 0
    waited: float = 0.0
    since: float = field(default_factory=time.perf_counter)
    loss_sum: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    finite_norm: torch.Tensor | None = None
    """The last gradient norm that was a number."""

    def timed(self, updates: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        """`updates`, with the time spent waiting for them counted."""
        while True:
            start = time.perf_counter()
            try:
                batches = next(updates)
            except StopIteration:
                return
            self.waited += time.perf_counter() - start
            yield batches

    def add(self, loss: torch.Tensor, norm: torch.Tensor) -> None:
        self.loss_sum = loss if self.loss_sum is None else self.loss_sum + loss
        self.norm = norm
        before = norm if self.finite_norm is None else self.finite_norm
        self.finite_norm = torch.where(norm.isfinite(), norm, before)
        self.steps += 1

    def read(self) -> dict[str, float]:
        """The metrics since the last call, over all processes; then start anew."""
        run = self.run
        assert self.loss_sum is not None
        assert self.norm is not None
        loss = self.loss_sum / self.steps
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        seconds = time.perf_counter() - self.since
        images_per_second = self.steps * run.plan.global_batch / seconds
        metrics = {
            "epoch": run.plan.epoch(run.state.step),
            "train/loss": loss.item(),
            "train/lr": run.lr.at(run.state.step - 1),
            "train/grad_norm": self.norm.item(),
            "train/bad_steps": run.state.bad_steps.item(),
            "speed/images_per_second": images_per_second,
            "speed/data_wait": self.waited / seconds,
        }
        if run.peak.flops:
            spent = images_per_second * run.description.train_flops_per_image
            metrics["speed/mfu"] = spent / (run.peak.flops * run.plan.processes)
        self.restart()
        return metrics

    def restart(self) -> None:
        """Forget what was summed; evaluation calls it so that its time is not training time."""
        self.steps, self.waited, self.since = 0, 0.0, time.perf_counter()
        self.loss_sum = self.norm = None


def log(run: Run, meter: Meter) -> None:
    """Read the device, record, and stop a run that has gone bad."""
    if not meter.steps:
        return
    metrics = meter.read()
    run.screen.progress(run.state.step, metrics)
    if run.record is not None:
        run.record.log(run.state.step, metrics)
    if int(run.state.bad_in_a_row.item()) >= run.config.run.max_bad_steps:
        raise gone_bad(run, meter, metrics)


def gone_bad(run: Run, meter: Meter, metrics: dict[str, float]) -> UserError:
    """What is known of a run whose updates are not finite any more; all processes must call it."""
    last, bad = run.state.step, int(run.state.bad_in_a_row.item())
    finite = "none" if meter.finite_norm is None else f"{meter.finite_norm.item():.3g}"
    return UserError(
        f"Loss or gradient was not finite in {bad} updates in a row, steps {last - bad + 1:,} to {last:,}: learning "
        f"rate {metrics['train/lr']:.2e}, gradient norm {metrics['train/grad_norm']} (last finite one {finite}), "
        f"weight norm {weight_norm(run):.4g}.\n"
        f"Weights are those before it began; last checkpoint from then: {run.checkpoints.good or 'none'}.\n"
        "Go on from there by run.resume in another run.dir, with a lower optim.lr, more warm-up or precision=fp32."
    )


def weight_norm(run: Run) -> float:
    """The norm of all trained weights; all processes must call it."""
    squares = torch.zeros((), dtype=torch.float64, device=run.device)
    for piece in run.state.shards.weights(owned=True).values():
        squares += piece.tensor.double().square().sum().to(run.device)
    if dist.is_initialized():
        dist.all_reduce(squares)
    return squares.sqrt().item()


def evaluate_now(run: Run, meter: Meter) -> bool:
    """Evaluate raw and averaged weights; True where this is the best so far."""
    state = run.state
    log(run, meter)
    metrics = {f"val/{k}": v for k, v in evaluate(state.model, run.eval_loader, run.inputs, run.device).items()}
    if state.ema is not None:
        with state.ema.applied():
            averaged = evaluate(state.model, run.eval_loader, run.inputs, run.device)
        metrics |= {f"val_ema/{k}": v for k, v in averaged.items()}
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
    if run.record is not None:
        run.record.close()
    return EXIT_STATUS[signal]
