"""Everything known about a run before it starts, as plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

from vit_scale.config import BatchConfig, Config, Strategy
from vit_scale.cost.activations import Precision
from vit_scale.cost.communication import Communication, communication
from vit_scale.cost.strategy_names import STRATEGIES
from vit_scale.cost.timm_check import TimmCheck, check_against_timm
from vit_scale.plan.data_size import DataSize, data_size
from vit_scale.plan.fits import Footprint, memory_model, unsupported_reason
from vit_scale.plan.machine import Machine
from vit_scale.plan.run_cost import Cost, run_cost
from vit_scale.report.model_report import ModelReport, report_on
from vit_scale.schedule import LearningRate, Plan, learning_rate, make_plan, scaling_note
from vit_scale.strategies.strategy import deepspeed_settings, resolve_strategy
from vit_scale.strategies.zero_settings import check_compile, check_offload
from vit_scale.train.optim.optimizer import check_optimizer


@dataclass(frozen=True)
class Option:
    """One strategy at the plan's micro-batch size."""

    footprint: Footprint
    fits: bool
    largest_micro_batch: int | None
    """None: even the smallest does not fit."""
    communication: Communication
    unsupported: str | None
    """Why the strategy is not supported with these options."""


@dataclass(frozen=True)
class RunPlan:
    """Plan of a recipe on given devices."""

    config: Config
    recipe: str
    machine: Machine
    data: DataSize
    report: ModelReport
    timm: TimmCheck
    plan: Plan
    lr: LearningRate
    precision: Precision
    strategy: str
    note: str | None
    """Message about the launcher's strategy, if it differs from the recipe's, and about options that were scaled."""
    options: dict[Strategy, Option]
    cost: Cost
    deepspeed: dict[str, Any] | None
    """DeepSpeed config, with ZeRO."""

    @property
    def chosen(self) -> Option:
        return self.options[sharding(self.strategy)]

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain numbers, strings, lists and mappings, with units in the names."""
        plan, cost = self.plan, self.cost
        return {
            "recipe": self.recipe,
            "machine": dataclasses.asdict(self.machine),
            "model": self.config.model.name,
            "params": self.report.count.params,
            "params_trained": self.report.count.trained_params,
            "macs": self.report.count.macs,
            "timm_check": {"equal": self.timm.equal, "summary": self.timm.summary()},
            "data": self.data._asdict(),
            "batch": {
                "global": plan.global_batch,
                "processes": plan.processes,
                "accumulation": plan.accumulation,
                "micro": plan.micro_batch,
            },
            "steps": plan.steps,
            "epochs": plan.epoch(plan.steps),
            "warmup_steps": plan.warmup_steps,
            "lr": {"first": self.lr.at(0), "peak": self.lr.peak, "last": self.lr.at(plan.steps - 1)},
            "precision": self.precision,
            "strategy": self.strategy,
            "strategies": {name: _option_to_dict(option) for name, option in self.options.items()},
            "cost": dataclasses.asdict(cost),
            "deepspeed": self.deepspeed,
        }


def sharding(strategy: str) -> Strategy:
    """Return how states are sharded: a single process is DDP without communication."""
    return "ddp" if strategy == "single" else cast(Strategy, strategy)


def make_run_plan(
    config: Config, recipe: str, machine: Machine, *, mfu: float | None = None, images: int | None = None
) -> RunPlan:
    """Plan a recipe on given devices; raises `UserError` if a run would reject it."""
    strategy, note = resolve_strategy(config.parallel.strategy)
    if strategy == "single" and machine.devices > 1:
        strategy = "ddp"
    check_optimizer(config.optim.name, strategy)
    check_offload(config.parallel.offload, strategy)
    check_compile(config.parallel.compile, strategy)
    data = data_size(config, images)
    precision = machine.precision(config.parallel.precision)
    config = _resolve_options(config, data, precision)
    # The report excludes activations: the micro-batch size is determined from it.
    report = report_on(
        dataclasses.replace(config, batch=BatchConfig()), gpus=machine.devices, on_cpu=machine.device == "cpu"
    )
    sizes: dict[str, Any] = {"train_images": data.images, "processes": machine.devices, "device": machine.device}
    plan = make_plan(config, **sizes, multiple=report.multiple)
    plan, options = _strategies(config, plan, report, machine, precision, sharding(strategy))
    count = report.count
    zero = strategy.startswith("zero")
    return RunPlan(
        config=config,
        recipe=recipe,
        machine=machine,
        data=data,
        report=report,
        timm=check_against_timm(config.model),
        plan=plan,
        lr=learning_rate(config, plan),
        precision=precision,
        strategy=strategy,
        note=" ".join(filter(None, [note, scaling_note(config, plan)])) or None,
        options=options,
        cost=run_cost(config, report, plan, machine, precision, mfu),
        deepspeed=deepspeed_settings(config, plan, strategy, precision, params=count.trained_params) if zero else None,
    )


def _strategies(
    config: Config, plan: Plan, report: ModelReport, machine: Machine, precision: Precision, chosen: Strategy
) -> tuple[Plan, dict[Strategy, Option]]:
    """Return the plan with the micro-batch size resolved for the selected strategy, and all strategies at that size."""
    memory = memory_model(report, machine, config)
    multiple = report.multiple
    largest = {strategy: memory.largest_micro_batch(strategy, plan, multiple=multiple) for strategy in STRATEGIES}
    if config.batch.micro == "auto" and machine.device == "cuda":
        local_batch = plan.global_batch // plan.processes
        smallest = multiple if local_batch % multiple == 0 else 1
        plan = plan.with_micro_batch(largest[chosen] or smallest)
    batch = (plan.micro_batch, plan.accumulation)
    options = {
        strategy: Option(
            footprint=memory.footprint(strategy, *batch),
            fits=memory.fits(strategy, *batch),
            largest_micro_batch=largest[strategy],
            communication=communication(
                strategy,
                params=report.count.params,
                frozen=report.count.frozen_params,
                processes=plan.processes,
                accumulation=plan.accumulation,
                precision=precision,
            ),
            unsupported=unsupported_reason(config, strategy),
        )
        for strategy in STRATEGIES
    }
    return plan, options


def _resolve_options(config: Config, data: DataSize, precision: Precision) -> Config:
    """Fill in the options that are determined by the data and the device."""
    model = dataclasses.replace(config.model, num_classes=data.classes, in_chans=data.channels)
    return dataclasses.replace(config, model=model, parallel=dataclasses.replace(config.parallel, precision=precision))


def _option_to_dict(option: Option) -> dict[str, Any]:
    return {
        "memory_bytes": option.footprint.parts,
        "memory_bytes_overlap": option.footprint.overlap,
        "memory_bytes_peak": option.footprint.peak,
        "host_memory_bytes": option.footprint.host,
        "fits": option.fits,
        "largest_micro_batch": option.largest_micro_batch,
        "sent_bytes_per_step": option.communication.sent,
        "sent_formula": option.communication.formula,
        "unsupported": option.unsupported,
    }
