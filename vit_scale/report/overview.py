"""Overview table with one line per model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vit_scale.config import Strategy
from vit_scale.cost.count import CLOSED_FORM
from vit_scale.cost.strategy_names import LABELS, STRATEGIES
from vit_scale.format import giga, significant
from vit_scale.record.terminal import make_table
from vit_scale.report.model_report import ModelReport

WIDE = 119
"""Terminal width required for the full table; it is split in two in narrower terminals."""


@dataclass(frozen=True)
class Column:
    """A heading, printed with one word per line, and the function that fills its cells."""

    heading: str
    cell: Callable[[ModelReport], str]


def _gibibytes(strategy: Strategy) -> Callable[[ModelReport], str]:
    return lambda report: significant(report.memory_total(strategy) / 2**30, 3)


def _model(report: ModelReport) -> str:
    name = report.model if report.count.method == CLOSED_FORM else f"{report.model} *"
    return name if report.recipe is None else f"{report.recipe}\n  {name}"


MODEL = Column("model", _model)
PARAMS = Column("parameters", lambda r: f"{r.count.params:,}")
COMPUTE = [
    Column("torch- vision GMACs", lambda r: giga(r.count.macs)),
    Column("timm csv GMACs", lambda r: giga(r.count.macs_timm_csv)),
    Column("torch GFLOPs", lambda r: giga(r.count.flops)),
    Column("attn %", lambda r: f"{100 * r.count.attention_fraction:.0f}"),
    Column("nominal GFLOPs", lambda r: giga(r.count.nominal_train_flops_per_image)),
    Column("actual GFLOPs", lambda r: giga(r.train_flops)),
]
MEMORY = [
    Column("acts MiB", lambda r: significant(r.activations.total / 2**20, 3)),
    Column("DDP GiB", _gibibytes("ddp")),
    *(Column(f"{LABELS[strategy]} GiB", _gibibytes(strategy)) for strategy in STRATEGIES[1:]),
]


def print_overview(reports: Sequence[ModelReport], console: Console) -> None:
    """Print the table and its legend; in a narrow terminal, compute first and memory below."""
    if console.width >= WIDE:
        console.print(_table(reports, [MODEL, PARAMS, *COMPUTE, *MEMORY]))
    else:
        console.print(_table(reports, [MODEL, PARAMS, *COMPUTE[:-2], COMPUTE[-1]]), "")
        console.print(_table(reports, [MODEL, *MEMORY]))
    console.print()
    for line in legend(reports):
        console.print(Text(line, style="dim"))


def _table(reports: Sequence[ModelReport], columns: Sequence[Column]) -> Table:
    table = make_table(*("\n".join(column.heading.split()) for column in columns), gap=1)
    for report in reports:
        table.add_row(*(column.cell(report) for column in columns))
    return table


def legend(reports: Sequence[ModelReport]) -> list[str]:
    """Explain the columns and the assumptions behind the numbers for training."""
    traced = any(report.count.method != CLOSED_FORM for report in reports)
    return [
        "Forward pass per image in the three common conventions: torchvision, MACs of matmuls; timm csv, the same plus "
        "5 per LayerNorm element; torch (and open_clip), 2 x MACs. attn: percentage of MACs in attention.",
        "MACs are computed in closed form" + (", * traced on the meta device." if traced else "."),
        "Training per image: nominal, 3 x forward by convention; actual, with stochastic depth, patch dropout and "
        "recomputation.",
        "acts: activations per image. DDP, ZeRO: weights, gradients, optimizer, EMA and buffers per GPU, for",
        *(f"  {assumed}" for assumed in dict.fromkeys(report.assumed.describe() for report in reports)),
    ]
