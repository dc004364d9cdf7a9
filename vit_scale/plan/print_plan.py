"""Print a plan to the terminal."""

from __future__ import annotations

import sys
from math import ceil

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vit_scale.config import Strategy
from vit_scale.cost.strategy_names import LABELS, format_strategy
from vit_scale.format import long_duration, memory_size, percent, significant
from vit_scale.plan.data_size import DataSize
from vit_scale.plan.lr_plot import BLOCKS, plot_learning_rate
from vit_scale.plan.run_plan import RunPlan, sharding
from vit_scale.record.header import format_model, format_schedule, option_rows
from vit_scale.record.terminal import make_console, make_table

_FOUND = {
    "counted": "; counted",
    "dataset card": "; from the dataset card",
    "--images": "; number of images from --images",
    "unknown": "; not on this system",
}
"""How the size of the data was found, unless it is obvious."""


def print_plan(run: RunPlan) -> None:
    """Print the complete plan, about 40 lines."""
    console = make_console()
    title = f"Plan for {run.recipe} on {run.machine.describe()} (dry run: nothing is trained or written)"
    console.print(Text(title, "bold"), soft_wrap=True)
    _print_rows(console, _rows(run))
    console.print(Text("\nLearning rate", "bold"))
    for line in plot_learning_rate(run.lr, _blocks()):
        console.print(line, soft_wrap=True)
    console.print("", _memory(run), "", _strategies(run), "")
    _print_rows(console, _cost(run))
    if run.deepspeed:
        settings = f"DeepSpeed config: {_format_deepspeed(run.deepspeed)} (full config: --json)"
        console.print(Text(settings, "dim"), soft_wrap=True)


def _print_rows(console: Console, rows: dict[str, str]) -> None:
    width = max(map(len, rows))
    for name, value in rows.items():
        console.print(Text.assemble((f"{name:<{width}}", "dim"), f"  {value}"), soft_wrap=True)


def _blocks() -> str:
    """Return eighths of a block, or `#` if the terminal cannot display them."""
    try:
        BLOCKS.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return " #"
    return BLOCKS


def _rows(run: RunPlan) -> dict[str, str]:
    config, plan = run.config, run.plan
    auto = ", auto: largest that fits" if config.batch.micro == "auto" and run.machine.device == "cuda" else ""
    rows = {
        "model": format_model(config.model.name, run.report.count),
        "attention": "" if run.report.attention is None else run.report.attention.describe(),
        "timm check": run.timm.summary(),
        "weights": f"{config.model.weights} (not read in a dry run)" if config.model.weights else "",
        "data": f"{config.data.source} ({_format_data(run.data)})",
        **option_rows(config),
        "class weights": _class_weights(config.optim.class_weights),
        **_teacher(run),
        "batch size": plan.format_batch_size() + auto,
        "schedule": format_schedule(plan),
        "lr": f"initial {run.lr.at(0):.2e}, peak {run.lr.peak:.2e}, final {run.lr.at(plan.steps - 1):.2e}",
        "precision": run.precision,
        "strategy": format_strategy(run.strategy, config.parallel.offload),
        "note": run.note or "",
    }
    return {name: value for name, value in rows.items() if value}


def _teacher(run: RunPlan) -> dict[str, str]:
    """Return a row for each frozen model that runs next to the trained one."""
    name = str(run.config.distill.teacher)
    frozen = [part for part in run.report.cost_parts if not part.backward]
    return {part.label: f"{format_model(name, part.count)}, forward pass only" for part in frozen}


def _class_weights(weights: str | tuple[float, ...] | None) -> str:
    return f"{min(weights):g} to {max(weights):g}" if isinstance(weights, tuple) else weights or ""


def _format_data(data: DataSize) -> str:
    """`1,281,167 training images, 50,000 validation images, 1,000 classes; from the dataset card`."""
    images = f"{data.images:,} training images" if data.images else "an unknown number of training images"
    val = f", {data.val_images:,} validation images" if data.val_images else ""
    size = f", about {memory_size(data.stored_bytes)}" if data.stored_bytes else ""
    found = _FOUND.get(data.found, "")
    classes = f", {data.classes:,} classes" if data.classes else ""
    return f"{images}{val}{classes}{size}{found}"


def _memory(run: RunPlan) -> Table:
    """Memory by part under the selected strategy."""
    footprint = run.chosen.footprint
    parts = {part: size for part, size in footprint.parts.items() if size}
    name = _strategy_name(run, sharding(run.strategy))
    overlap = {"overlap": f"-{memory_size(footprint.overlap)}"} if footprint.overlap else {}
    table = make_table(f"memory per {_device(run)}", *parts, *overlap, "peak")
    table.add_row(
        f"{name}, {run.plan.micro_batch} images",
        *map(memory_size, parts.values()),
        *overlap.values(),
        memory_size(footprint.peak),
    )
    if footprint.host:
        table.caption = f"plus {memory_size(footprint.host)} of host memory per process"
        table.caption_justify = "left"
    return table


def _device(run: RunPlan) -> str:
    return run.machine.kind if run.machine.device == "cuda" else "process"


def _strategy_name(run: RunPlan, strategy: Strategy) -> str:
    return "single process" if run.machine.devices == 1 and strategy == "ddp" else LABELS[strategy]


def _strategies(run: RunPlan) -> Table:
    """Memory and communication of each strategy; the selected one is marked."""
    limit = f"limit {memory_size(run.machine.memory)}"
    table = make_table("strategy", "memory", limit, "max micro-batch", "sent per step", "collectives")
    table.columns[-1].justify = "left"
    if run.plan.processes > 1:
        trained = ", T of them trained" if run.report.count.frozen_params else ""
        table.caption = (
            f"Bytes sent by each of N processes per step with A accumulation steps, for P parameters{trained}."
        )
    table.caption_justify = "left"
    for strategy, option in run.options.items():
        mark = "> " if strategy == sharding(run.strategy) else "  "
        fits = option.unsupported or ("fits" if option.fits else "does NOT fit")
        sent = memory_size(option.communication.sent) if option.communication.sent else "nothing"
        collectives = option.communication.formula if option.communication.sent else ""
        largest = "none" if option.largest_micro_batch is None else f"{option.largest_micro_batch:,}"
        table.add_row(
            mark + _strategy_name(run, strategy), memory_size(option.footprint.peak), fits, largest, sent, collectives
        )
    return table


def _compute_by_part(run: RunPlan) -> dict[str, str]:
    """Return how the FLOPs are divided between the parts of the task, if it has several."""
    flops, frozen = run.report.train_flops_by_part, run.cost.frozen_flops_per_image
    total = sum(flops.values())
    shares = [
        f"{part} {significant(each / 1e9)} GFLOPs ({percent(each / total, 0)}{', forward only' * (part in frozen)})"
        for part, each in flops.items()
    ]
    return {"of which": ", ".join(shares)} if len(shares) > 1 else {}


def _cost(run: RunPlan) -> dict[str, str]:
    cost, machine = run.cost, run.machine
    rows = {
        "compute": f"{cost.flops:.3g} FLOPs = {significant(cost.flops_per_image / 1e9)} GFLOPs "
        f"(forward and backward) x {cost.images:,} images",
        **_compute_by_part(run),
        "MFU": f"{cost.mfu:.2f} ({cost.mfu_source})",
    }
    if cost.seconds is None or cost.images_per_second is None or cost.device_hours is None:
        return rows | {"time": f"unknown: peak FLOP/s of {machine.kind} {machine.source}"}
    unit = "GPU" if machine.device == "cuda" else "process"
    peak = machine.peak_at(run.precision, tf32=run.config.parallel.tf32) or 0.0
    speed = f"{machine.devices:,} x {significant(peak / 1e12, 3)} TFLOP/s ({machine.source}) x {cost.mfu:.2f}"
    each = significant(cost.images_per_second / machine.devices, 3)
    count = ceil(cost.loading_cores or 0)
    cores = f", about {count} CPU core{'s' * (count > 1)} each" if machine.device == "cuda" else ""
    hours = f"{significant(cost.device_hours, 3)} {unit}-hours"
    return rows | {
        "throughput": f"{significant(cost.images_per_second, 3)} images/s = {speed} / FLOPs per image",
        "data loading": f"{each} images/s per {unit} required{cores}",
        "time": f"{long_duration(cost.seconds)}, {hours}; excludes evaluation and checkpointing",
    }


def _format_deepspeed(settings: dict[str, object]) -> str:
    zero = settings["zero_optimization"]
    assert isinstance(zero, dict)
    bucket = zero.get("reduce_bucket_size", 0)
    return (
        f"stage {zero['stage']}, micro-batch {settings['train_micro_batch_size_per_gpu']}, accumulation steps "
        f"{settings['gradient_accumulation_steps']}, clipping {settings['gradient_clipping']:g}, bucket size {bucket:,}"
    )
