"""Print and write the results of launch/probe.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from vit_scale.format import percent
from vit_scale.inference.probe_run import BlockResult, Judgement, ProbeData, describe_grid
from vit_scale.probe.linear import HELD_OUT
from vit_scale.record.terminal import make_console, make_table


def print_judgement(judgement: Judgement, about: dict[str, str]) -> None:
    """Print what was judged, a row per block, and how the linear probe was selected."""
    console = make_console()
    rows = {**about, "features": judgement.features, **_notes(judgement)}
    width = max(map(len, rows))
    for name, value in rows.items():
        console.print(f"{name:<{width}}  {value}", soft_wrap=True)
    ks = list(judgement.blocks[0].knn)
    has_probe = judgement.blocks[0].linear is not None
    headings = ["linear\nprobe", "lr", "weight\ndecay", "held\nout"] if has_probe else []  # for 80 columns
    table = make_table("features of", *(f"{k}-NN" for k in ks), *headings)
    for block in judgement.blocks:
        table.add_row(block.name, *(percent(block.knn[k]) for k in ks), *_linear_cells(block))
    console.print("\nTop-1 accuracy", style="bold", soft_wrap=True)
    console.print(table)


def _linear_cells(block: BlockResult) -> list[str]:
    if block.linear is None or block.linear_top1 is None:
        return []
    lr, decay = block.linear.setting
    return [percent(block.linear_top1), f"{lr:g}", f"{decay:g}", percent(block.linear.held_out)]


def _notes(judgement: Judgement) -> dict[str, str]:
    notes = {"chance": f"{percent(judgement.chance)} (always the most frequent training class)"}
    skipped = ", ".join(map(str, judgement.skipped_k))
    left_out = "an image is never its own neighbor" if judgement.leave_one_out else ""
    too_few = f"k = {skipped} skipped: only {judgement.train_images:,} training images" if skipped else ""
    if left_out or too_few:
        notes["k-NN"] = "; ".join(filter(None, (left_out, too_few)))
    notes["linear probe"] = (
        "skipped: these are its training images"
        if judgement.leave_one_out
        else f"best of {describe_grid()} on {percent(HELD_OUT, 0)} of the training images, then trained on all of them"
    )
    edges = [block.name for block in judgement.blocks if block.linear and block.linear.is_at_the_edge()]
    if edges:
        notes["linear probe"] += f"; learning rate at the edge of the grid for {', '.join(edges)}"
    return notes


def judgement_json(judgement: Judgement, about: dict[str, str]) -> str:
    """Return all numbers as JSON; accuracies are fractions of 1."""
    blocks = []
    for block in judgement.blocks:
        entry: dict[str, object] = {"name": block.name}
        entry |= {f"knn{k}_top1": accuracy for k, accuracy in block.knn.items()}
        if block.linear is not None:
            entry |= {"linear_top1": block.linear_top1, **block.linear.setting._asdict()}
            entry["held_out_top1"] = block.linear.held_out
            entry["grid"] = [{**s._asdict(), "held_out_top1": top1} for s, top1 in block.linear.grid.items()]
        blocks.append(entry)
    numbers = {
        "features": judgement.features,
        "train_images": judgement.train_images,
        "images": judgement.images,
        "chance": judgement.chance,
        "leave_one_out": judgement.leave_one_out,
        "skipped_k": judgement.skipped_k,
    }
    return json.dumps({**about, **numbers, "blocks": blocks}, indent=1) + "\n"


def write_judgement(
    judgement: Judgement,
    about: dict[str, str],
    data: ProbeData,
    folder: Path,
    *,
    seed: int,
    advance: Callable[[], None] = lambda: None,
) -> list[str]:
    """Write metrics.json and a picture of the features of each block; returns their names."""
    from vit_scale.probe.projection import projection_figure

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.json").write_text(judgement_json(judgement, about))
    names = ["metrics.json"]
    for block in judgement.blocks:
        title = f"{block.name}, {judgement.features}"
        queries = judgement.queries
        figure = projection_figure(
            queries.features[block.name], queries.labels, data.class_names, title=title, seed=seed
        )
        names.append(f"features-{block.name.replace(' ', '-')}.png")
        figure.savefig(folder / names[-1], dpi=110, facecolor="white")
        advance()
    return names
