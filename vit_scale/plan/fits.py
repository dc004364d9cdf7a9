"""Memory of one device by part under each strategy, what fits, and the micro batch that `auto` would come to.

States are counted in report/memory.py, activations in report/activations.py. Gradients appear in the backward pass as
activations go. So under DDP and ZeRO-1 with one forward pass an update the peak has the larger of the two; with
accumulation, and under ZeRO-2 and -3, which have memory for their share of the gradients from the start, it has both.
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
from vit_scale.strategies.zero_settings import check_offload
from vit_scale.train.micro_batch import DoesNotFit, choose_micro_batch
from vit_scale.train.optim.optimizer import check_optimizer

# What CUDA takes for itself in each process, and NCCL for its channels where there are several processes.
CUDA_CONTEXT = 2**29
NCCL_BUFFERS = 2**29


@dataclass(frozen=True)
class Footprint:
    """Bytes on one device."""

    parts: dict[str, int]
    overlap: int
    """What gradients and activations share, as they are never all there at once."""
    host: int = 0
    """Bytes in the machine's memory for each process: what is offloaded."""

    @property
    def peak(self) -> int:
        return sum(self.parts.values()) - self.overlap


@dataclass(frozen=True)
class MemoryModel:
    """Everything that memory depends on but strategy and micro batch."""

    states: dict[Strategy, dict[str, int]]
    activations: Activations
    machine: Machine
    offload: str

    def footprint(self, strategy: Strategy, micro_batch: int, accumulation: int) -> Footprint:
        """Memory at the peak of an update."""
        states, host = dict(self.states[strategy]), 0
        for part in _offloaded(strategy, self.offload):
            host += states[part]
            states[part] = 0
        kept = micro_batch * sum(self.activations.by_part.values())
        overlap = min(kept, states["gradients"]) if strategy in ("ddp", "zero1") and accumulation == 1 else 0
        parts = {**states, "activations": micro_batch * self.activations.total, "context": self._context()}
        return Footprint(parts, overlap, host)

    def _context(self) -> int:
        if self.machine.device == "cpu":
            return 0
        return CUDA_CONTEXT + (NCCL_BUFFERS if self.machine.devices > 1 else 0)

    def fits(self, strategy: Strategy, micro_batch: int, accumulation: int) -> bool:
        return self.footprint(strategy, micro_batch, accumulation).peak <= self.machine.memory

    def largest_micro_batch(self, strategy: Strategy, plan: Plan, *, even: bool) -> int | None:
        """Of the sizes that a run with `batch.micro: auto` would try, the largest that fits; None: none does."""
        local_batch = plan.global_batch // plan.processes

        def trial(size: int) -> float | None:
            return 1.0 if self.fits(strategy, size, local_batch // size) else None

        try:
            return choose_micro_batch("auto", local_batch, trial, multiple=2 if even else 1)[0]
        except DoesNotFit:
            return None


def memory_model(report: ModelReport, machine: Machine, config: Config) -> MemoryModel:
    """From the counts of `report`, which must be without a batch."""
    return MemoryModel(report.memory, report.activations, machine, config.parallel.offload)


def refusal(config: Config, strategy: Strategy) -> str | None:
    """Why a run would refuse `strategy`, in a few words."""
    try:
        check_optimizer(config.optim.name, strategy)
    except UserError:
        return f"not with {config.optim.name}"
    try:
        check_offload(config.parallel.offload, strategy)
    except UserError:
        return "no offloading"
    return None


def _offloaded(strategy: Strategy, offload: str) -> tuple[str, ...]:
    """Parts that wait in the machine's memory."""
    if strategy == "ddp" or offload == "none":
        return ()
    return ("optimiser", "weights") if offload == "params" and strategy == "zero3" else ("optimiser",)
