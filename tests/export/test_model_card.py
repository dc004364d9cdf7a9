"""The model card: results and summary come from the task of the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import vit_scale
from vit_scale.export.model_card import model_card
from vit_scale.export.timm_weights import to_timm
from vit_scale.inference.loaded_run import LoadedRun
from vit_scale.tasks.classify.classification import Classification
from vit_scale.tasks.task import Card, Metric


class Depth(Classification):
    """A classifier with the card and the metrics of another task."""

    name = "depth"
    metrics = (Metric("rmse", "RMSE", higher=False, percent=False, title="Depth RMSE"),)

    def card(self) -> Card:
        return Card("depth-estimation", "(metric depth)", "rmse")


@pytest.fixture
def run(trained_run: Path) -> LoadedRun:
    return vit_scale.load_run(trained_run)


def test_card_of_a_classifier_has_accuracy_as_percentages(run: LoadedRun, trained_run: Path) -> None:
    summary = json.loads((trained_run / "summary.json").read_text())
    card, top1 = model_card(run, to_timm(run)), f"{100 * summary['val_ema/top1']:.2f}%"
    assert f"`vit_mu`, trained with vit_scale on embedded:digits (10 classes). Top-1 accuracy: {top1}." in card
    assert f"| Top-1 accuracy, EMA weights | {top1} |" in card
    assert f"| Loss, raw weights | {summary['val/loss']:.4f} |" in card
    assert 'print(model.pretrained_cfg["label_names"][probabilities.argmax()])' in card
    result = yaml.safe_load(card.split("---")[1])["model-index"][0]["results"][0]["metrics"]
    value = round(100 * summary["val_ema/top1"], 3)
    assert result == [{"type": "accuracy", "value": value, "name": "Top-1 accuracy (%)"}]


def test_card_of_raw_weights_has_their_result(trained_run: Path) -> None:
    run = vit_scale.load_run(trained_run, weights="raw")
    run = replace(run, record={"val/top1": 0.25, "val_ema/top1": 0.75})
    assert "Top-1 accuracy: 25.00%." in model_card(run, to_timm(run))


def test_card_of_an_earlier_version_has_the_metrics_of_classification(run: LoadedRun) -> None:
    """Its summary does not describe the task."""
    old = replace(run, record={key: value for key, value in run.record.items() if key not in ("task", "in_chans")})
    assert model_card(old, to_timm(old)) == model_card(run, to_timm(run))


def test_card_of_another_task_has_its_tag_sentence_and_metrics(run: LoadedRun) -> None:
    run = replace(run, task=Depth(run.task.config, run.task.info), record={"val_ema/rmse": 0.25, "step": 12})
    card = model_card(run, to_timm(run))
    header = yaml.safe_load(card.split("---")[1])
    assert header["pipeline_tag"] == "depth-estimation"
    result = header["model-index"][0]["results"][0]
    assert result["task"] == {"type": "depth-estimation"}
    assert result["metrics"] == [{"type": "rmse", "value": 0.25, "name": "Depth RMSE"}]
    assert "on embedded:digits (metric depth). Depth RMSE: 0.2500." in card
    assert "On the validation images at step 12:" in card
    assert "| Depth RMSE, EMA weights | 0.2500 |" in card
    assert "accuracy" not in card
    assert 'timm.create_model("local-dir:path/to/this/directory", pretrained=True)' in card
    assert "softmax" not in card
    assert "label_names" not in card


def test_card_of_a_run_without_evaluation_has_no_results(run: LoadedRun) -> None:
    run = replace(run, record={})
    card = model_card(run, to_timm(run))
    assert "model-index" not in card
    assert "Not evaluated yet." in card
