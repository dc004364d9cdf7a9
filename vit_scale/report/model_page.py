"""Detailed report on one model."""

from __future__ import annotations

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from vit_scale.cost.strategy_names import LABELS, STRATEGIES
from vit_scale.format import giga, image_size, memory_size, percent, significant
from vit_scale.record.terminal import make_table
from vit_scale.report.model_report import ModelReport

# Label -> parameter part, MAC part.
_PARTS = {
    "patch embedding": ("patch", "patch"),
    "tokens": ("tokens", ""),
    "position embedding": ("position", ""),
    "attention projections": ("attention", "attention_projections"),
    "attention matmuls": ("", "attention_matmuls"),
    "MLP": ("mlp", "mlp"),
    "norms": ("norms", ""),
    "LayerScale": ("layer_scale", ""),
    "head": ("head", "head"),
    "other": ("other", "other"),
}
WIDE = 110
"""Terminal width required to print two tables side by side."""


def print_page(report: ModelReport, console: Console) -> None:
    """Print parameters and MACs by part, training FLOPs, activations, and memory under each strategy."""
    patch = "" if report.patch_size is None else f", {image_size(report.patch_size)} patches"
    about = f"{image_size(report.image_size)} pixels{patch}, {report.classes:,} classes"
    title = report.model if report.recipe is None else f"{report.recipe}: {report.model}"
    console.print(Text.assemble((title, "bold"), f"  {about}\n"))
    left, right = _parts(report), Group(_forward(report), "", _training(report))
    if console.width >= WIDE:
        grid = Table.grid(padding=(0, 4))
        grid.add_row(left, right)
        console.print(grid)
    else:
        console.print(left, "", right)
    if report.attention is not None:
        console.print(Text(f"\nattention: {report.attention.describe()}"))
    console.print("", _activations(report), "", _memory(report), "")


def _parts(report: ModelReport) -> Table:
    count = report.count
    table = make_table("by part", "parameters", "%", "GMACs", "%")
    for label, (param_part, mac_part) in _PARTS.items():
        params, macs = count.params_by_part.get(param_part, 0), count.macs_by_part.get(mac_part, 0)
        if params or macs:
            table.add_row(label, *_amount(params, count.params, f"{params:,}"), *_amount(macs, count.macs, giga(macs)))
    table.add_row("total", f"{count.params:,}", "", giga(count.macs), "", style="bold")
    return table


def _amount(value: int, total: int, text: str) -> tuple[str, str]:
    return (text, f"{100 * value / total:.1f}") if value else ("", "")


def _forward(report: ModelReport) -> Table:
    count = report.count
    table = make_table("forward pass per image", "")
    table.add_row("MACs of matmuls (torchvision)", f"{giga(count.macs)} GMACs")
    table.add_row("plus 5 per LayerNorm element (timm csv)", f"{giga(count.macs_timm_csv)} GMACs")
    table.add_row("2 x MACs (torch, open_clip)", f"{giga(count.flops)} GFLOPs")
    table.add_row("attention", percent(count.attention_fraction, 1))
    table.add_row("attention matmuls without projections", percent(count.quadratic_fraction, 1))
    table.add_row("method", count.method)
    return table


def _training(report: ModelReport) -> Table:
    frozen = {part.label: report.train_flops_by_part[part.label] for part in report.cost_parts if not part.backward}
    nominal, batch = report.count.nominal_train_flops_per_image, report.assumed.batch
    actual = report.train_flops - sum(frozen.values())
    table = make_table("training per image", "")
    table.add_row("nominal (3 x forward)", f"{giga(nominal)} GFLOPs")
    table.add_row("actual", f"{giga(actual)} GFLOPs")
    for part, flops in report.train_flops_by_part.items() if len(report.train_flops_by_part) > 1 else ():
        table.add_row(f"  {part}", f"{giga(flops)} GFLOPs")
    table.add_row("actual / nominal", percent(actual / nominal, 1))
    for label, flops in frozen.items():
        table.add_row(f"{label} (1 x forward), in addition", f"{giga(flops)} GFLOPs")
    if batch:
        table.add_row(f"actual per {batch} images", f"{significant(report.train_flops * batch / 1e12)} TFLOPs")
    return table


def _activations(report: ModelReport) -> Table:
    acts = report.activations
    parts = {part.replace("_", " "): size for part, size in acts.by_part.items() if size}
    if acts.recomputed:
        parts["recomputed block"] = acts.recomputed
    table = make_table("activations", *parts, "total")
    table.add_row(f"per image, {report.assumed.precision}", *map(memory_size, parts.values()), memory_size(acts.total))
    return table


def _memory(report: ModelReport) -> Table:
    parts = list(report.memory["ddp"])
    table = make_table("memory per GPU", *parts, "total")
    for strategy in STRATEGIES:
        sizes = [memory_size(report.memory[strategy][part]) for part in parts]
        table.add_row(LABELS[strategy], *sizes, memory_size(report.memory_total(strategy)))
    table.caption = report.assumed.describe()
    table.caption_justify = "left"
    return table
