"""Memory per device by part under each strategy, whether it fits, and the micro-batch size that `auto` would choose.

States are counted in cost/memory.py, activations in cost/activations.py. In the backward pass, gradients are allocated
as activations are freed. So on one device without gradient accumulation, the peak includes the larger of the two; with
accumulation it includes both, and so it does under DDP and ZeRO-2 and -3, which allocate the memory for gradients once.
Without accumulation, ZeRO-1 reduces gradients during the backward pass and keeps its shard, as ZeRO-2 does. DDP
accumulates gradients outside its buckets. DeepSpeed's optimizer copies its shard of the gradients in its step, when
activations and buckets are freed. An optimizer without a fused kernel needs copies in its step
(strategies/guarded_step.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from vit_scale.config import Config
from vit_scale.cost.activations import Activations
from vit_scale.cost.memory import Strategy
from vit_scale.errors import UserError
from vit_scale.plan.machine import Machine
from vit_scale.report.model_report import ModelReport
from vit_scale.schedule import Plan
from vit_scale.strategies.zero_settings import check_compile, check_offload
from vit_scale.train.micro_batch import DoesNotFit, choose_micro_batch
from vit_scale.train.optim.optimizer import check_optimizer

# Memory used by CUDA in each process, and by NCCL if there are several processes.
CUDA_CONTEXT = 2**29
NCCL_BUFFERS = 2**29


@dataclass(frozen=True)
class Footprint:
    """Bytes per device."""

    parts: dict[str, int]
    overlap: int
    """Bytes of parts that never exist simultaneously, such as gradients and activations."""
    host: int = 0
    """Bytes of host memory per process, for offloaded states."""

    @property
    def peak(self) -> int:
        return sum(self.parts.values()) - self.overlap


@dataclass(frozen=True)
class MemoryModel:
    """Everything that memory depends on except strategy and micro-batch size."""

    states: dict[Strategy, dict[str, int]]
    activations: Activations
    machine: Machine
    offload: str
    undoes_steps: bool = False
    """Whether DDP and a single process copy weights and optimizer state in each step, to undo it."""

    def footprint(self, strategy: Strategy, micro_batch: int, accumulation: int) -> Footprint:
        """Return the peak memory of a step."""
        states, host = dict(self.states[strategy]), 0
        for part in _offloaded(strategy, self.offload):
            host += states[part]
            states[part] = 0
        if strategy == "zero1" and accumulation == 1:
            states["gradients"] = self.states["zero2"]["gradients"]
        saved = micro_batch * sum(self.activations.by_part.values())
        has_buckets = strategy == "ddp" and self.machine.devices > 1
        if has_buckets and accumulation > 1:
            states["buffers"] += states["gradients"]
        parts = {**states, "activations": micro_batch * self.activations.total, "context": self._context()}
        overlap = 0
        if strategy == "ddp" and not has_buckets and accumulation == 1:
            overlap = min(saved, states["gradients"])
        elif strategy != "ddp" and states["optimizer"]:
            gradient_copy = self.states["zero2"]["gradients"]
            overlap = min(gradient_copy, parts["buffers"] + parts["activations"])
        if self.undoes_steps and strategy == "ddp":
            copies = states["gradients"] + states["optimizer"]  # Weights in fp32 are as large as gradients.
            parts["undo"] = max(0, copies - parts["activations"])  # Activations are freed by then.
        return Footprint(parts, overlap, host)

    def _context(self) -> int:
        if self.machine.device == "cpu":
            return 0
        return CUDA_CONTEXT + (NCCL_BUFFERS if self.machine.devices > 1 else 0)

    def fits(self, strategy: Strategy, micro_batch: int, accumulation: int) -> bool:
        return self.footprint(strategy, micro_batch, accumulation).peak <= self.machine.memory

    def largest_micro_batch(self, strategy: Strategy, plan: Plan, *, multiple: int) -> int | None:
        """Return the largest size that fits among those tried with `batch.micro: auto`, or None."""
        local_batch = plan.global_batch // plan.processes

        def trial(size: int) -> float | None:
            return 1.0 if self.fits(strategy, size, local_batch // size) else None

        try:
            return choose_micro_batch("auto", local_batch, trial, multiple=multiple)[0]
        except DoesNotFit:
            return None


def memory_model(report: ModelReport, machine: Machine, config: Config) -> MemoryModel:
    """Build the memory model from `report`, which must not include a batch."""
    has_loss_scaler = machine.precision(config.parallel.precision) == "fp16"
    undoes_steps = machine.device == "cuda" and config.optim.name != "adamw" and not has_loss_scaler
    return MemoryModel(report.memory, report.activations, machine, config.parallel.offload, undoes_steps)


def unsupported_reason(config: Config, strategy: Strategy) -> str | None:
    """Return a short reason why `strategy` is not supported with these options, or None if it is."""
    try:
        check_optimizer(config.optim.name, strategy)
    except UserError:
        return f"no {config.optim.name}"
    try:
        check_offload(config.parallel.offload, strategy)
    except UserError:
        return "no offload"
    try:
        check_compile(config.parallel.compile, strategy)
    except UserError:
        return "no compile"
    return None


def _offloaded(strategy: Strategy, offload: str) -> tuple[str, ...]:
    """Parts offloaded to host memory."""
    if strategy == "ddp" or offload == "none":
        return ()
    return ("optimizer", "weights") if offload == "params" and strategy == "zero3" else ("optimizer",)
