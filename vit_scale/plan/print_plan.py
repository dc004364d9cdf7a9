"""A plan on the terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vit_scale.config import Strategy
from vit_scale.cost.strategy_names import LABELS, format_strategy
from vit_scale.format import duration, memory_size, significant
from vit_scale.plan.lr_plot import BLOCKS, plot_learning_rate
from vit_scale.plan.run_plan import RunPlan, sharding
from vit_scale.record.header import format_batch_size, format_model, format_schedule
from vit_scale.record.terminal import make_console, make_table


def print_plan(run: RunPlan) -> None:
    """All of it, on a screen or two."""
    console = make_console()
    title = f"Plan of {run.recipe} on {run.machine.in_words()} (nothing is read or written)"
    console.print(Text(title, "bold"), soft_wrap=True)
    _print_rows(console, _rows(run))
    console.print(Text("\nLearning rate", "bold"))
    for line in plot_learning_rate(run.lr, _blocks()):
        console.print(line, soft_wrap=True)
    console.print("", _memory(run), "", _strategies(run), "")
    _print_rows(console, _cost(run))
    if run.deepspeed:
        settings = f"DeepSpeed's settings: {_deepspeed_in_words(run.deepspeed)} (all of them: --json)"
        console.print(Text(settings, "dim"), soft_wrap=True)


def _print_rows(console: Console, rows: dict[str, str]) -> None:
    width = max(map(len, rows))
    for name, value in rows.items():
        console.print(Text.assemble((f"{name:<{width}}", "dim"), f"  {value}"), soft_wrap=True)


def _blocks() -> str:
    """Eighths of a block, or `#` on a terminal that cannot show them."""
    try:
        BLOCKS.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return " #"
    return BLOCKS


def _rows(run: RunPlan) -> dict[str, str]:
    config, plan = run.config, run.plan
    known = f"{run.data.images:,} training images" if run.data.images else "an unknown number of training images"
    auto = " (auto: the largest that fits)" if config.batch.micro == "auto" and run.machine.device == "cuda" else ""
    rows = {
        "model": format_model(config.model.name, run.report.count),
        "timm": run.timm.summary(),
        "weights": f"{config.model.weights} (not looked at here)" if config.model.weights else "",
        "data": f"{config.data.source}: {known}, {run.data.classes:,} classes",
        "batch": format_batch_size(plan) + auto,
        "length": format_schedule(plan),
        "lr": f"{run.lr.at(0):.2e} at first, {run.lr.peak:.2e} at the peak, {run.lr.at(plan.steps - 1):.2e} at last",
        "precision": run.precision,
        "strategy": format_strategy(run.strategy, config.parallel.offload),
        "note": run.note or "",
    }
    return {name: value for name, value in rows.items() if value}


def _memory(run: RunPlan) -> Table:
    """By part, under the chosen strategy."""
    footprint = run.chosen.footprint
    parts = {part: size for part, size in footprint.parts.items() if size}
    name = _strategy_name(run, sharding(run.strategy))
    shared = {"never at once": f"-{memory_size(footprint.overlap)}"} if footprint.overlap else {}
    table = make_table(f"memory of {_each(run)}", *parts, *shared, "at the peak")
    table.add_row(
        f"{name}, {run.plan.micro_batch} images",
        *map(memory_size, parts.values()),
        *shared.values(),
        memory_size(footprint.peak),
    )
    if footprint.host:
        table.caption = f"and {memory_size(footprint.host)} of the machine's memory for each process"
        table.caption_justify = "left"
    return table


def _each(run: RunPlan) -> str:
    machine = run.machine
    return f"each {machine.kind}" if machine.device == "cuda" and machine.devices > 1 else machine.kind


def _strategy_name(run: RunPlan, strategy: Strategy) -> str:
    return "one process" if run.machine.devices == 1 and strategy == "ddp" else LABELS[strategy]


def _strategies(run: RunPlan) -> Table:
    """What each strategy needs and sends; the chosen one is marked."""
    room = f"of {memory_size(run.machine.memory)}"
    table = make_table("strategy", "memory", room, "micro batch up to", "sent", "as")
    table.columns[-1].justify = "left"
    if run.plan.processes > 1:
        table.caption = "Sent by each of N processes in an update of A forward passes, for P parameters."
    table.caption_justify = "left"
    for strategy, option in run.options.items():
        mark = "> " if strategy == sharding(run.strategy) else "  "
        fits = option.refused or ("fits" if option.fits else "does NOT fit")
        sent = memory_size(option.communication.sent) if option.communication.sent else "nothing"
        how = option.communication.formula if option.communication.sent else ""
        largest = "none" if option.largest_micro_batch is None else f"{option.largest_micro_batch:,}"
        table.add_row(
            mark + _strategy_name(run, strategy), memory_size(option.footprint.peak), fits, largest, sent, how
        )
    return table


def _cost(run: RunPlan) -> dict[str, str]:
    cost, machine = run.cost, run.machine
    rows = {
        "work": f"{cost.flops:.3g} FLOP = {significant(cost.flops_per_image / 1e9)} GFLOP (forward and backward) x "
        f"{cost.images:,} images",
        "MFU": f"{cost.mfu:.2f}, {cost.mfu_source}",
    }
    if cost.seconds is None or cost.images_per_second is None or cost.device_hours is None:
        return rows | {"time": f"not known: the peak of {machine.kind} is {machine.source}"}
    unit = "GPU" if machine.device == "cuda" else "process"
    peak = machine.peak_at(run.precision) or 0.0
    speed = f"{machine.devices:,} x {significant(peak / 1e12, 3)} TFLOP/s ({machine.source}) x {cost.mfu:.2f}"
    each = significant(cost.images_per_second / machine.devices, 3)
    hours = f"{significant(cost.device_hours, 3)} {unit}-hours"
    return rows | {
        "speed": f"{significant(cost.images_per_second, 3)} images/s = {speed} / work of an image",
        "input": f"images must arrive at {each}/s for each {unit}",
        "time": f"{_long_duration(cost.seconds)}, {hours}; evaluating and saving come on top",
    }


def _long_duration(seconds: float) -> str:
    """`9h 20m`, or in days from two of them on."""
    days = seconds / 86400
    return f"{significant(days, 3)} days" if days >= 2 else duration(seconds)


def _deepspeed_in_words(settings: dict[str, object]) -> str:
    zero = settings["zero_optimization"]
    assert isinstance(zero, dict)
    bucket = zero.get("reduce_bucket_size", 0)
    return (
        f"stage {zero['stage']}, micro batch {settings['train_micro_batch_size_per_gpu']}, accumulation "
        f"{settings['gradient_accumulation_steps']}, clipping {settings['gradient_clipping']:g}, buckets of {bucket:,}"
    )
