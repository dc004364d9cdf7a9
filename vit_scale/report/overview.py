"""One line for each model."""

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
"""Columns of text that the whole table needs; a narrower terminal gets it in two."""


@dataclass(frozen=True)
class Column:
    """A heading of one or more words, one below the other, and what stands under it."""

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
    Column("torch- vision GMAC", lambda r: giga(r.count.macs)),
    Column("timm csv GMAC", lambda r: giga(r.count.macs_timm_csv)),
    Column("torch GFLOP", lambda r: giga(r.count.flops)),
    Column("attn %", lambda r: f"{100 * r.count.attention_fraction:.0f}"),
    Column("train GFLOP", lambda r: giga(r.count.nominal_train_flops_per_image)),
    Column("spent GFLOP", lambda r: giga(r.train_flops)),
]
MEMORY = [
    Column("acts MiB", lambda r: significant(r.activations.total / 2**20, 3)),
    Column("DDP GiB", _gibibytes("ddp")),
    *(Column(f"{LABELS[strategy]} GiB", _gibibytes(strategy)) for strategy in STRATEGIES[1:]),
]


def print_overview(reports: Sequence[ModelReport], console: Console) -> None:
    """The table and what its columns mean; in a narrow terminal, compute first and memory below."""
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
    """What the columns mean, and what the figures for training rest on."""
    traced = any(report.count.method != CLOSED_FORM for report in reports)
    return [
        "Forward pass of one image, in the three conventions in print: torchvision, MACs of matrix products; timm csv, "
        "the same and 5 for each LayerNorm element; torch (and open_clip), 2 x MACs. attn: share of attention.",
        "MACs are counted by closed form" + (", * traced on the meta device." if traced else "."),
        "train: training on one image, 3 x forward by convention; spent: after stochastic depth, patch dropout and "
        "recomputation.",
        "acts: activations of one image. DDP, ZeRO: weights, gradients, optimizer, EMA and buffers on each GPU, for",
        *(f"  {words}" for words in dict.fromkeys(report.assumed.in_words() for report in reports)),
    ]
