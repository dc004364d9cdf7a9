"""From a dataset to a recipe: look at data and system, choose a model, measure its speed, and write it down."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from vit_scale.cli import command_line
from vit_scale.config import DataConfig
from vit_scale.cost.hardware import peak
from vit_scale.data.data import Data, open_data
from vit_scale.format import counted, memory_size
from vit_scale.hub import has_weights, is_hub_reachable
from vit_scale.plan.look_at_data import DataFacts, look_at_data
from vit_scale.plan.measure_speed import images_per_second
from vit_scale.plan.suggest import (
    Candidate,
    Choice,
    MachineFacts,
    batch_size,
    choose,
    epochs_for,
    fine_tuned,
    from_scratch,
    in_minutes,
    suggest,
    with_smaller_model,
)
from vit_scale.plan.write_recipe import recipe_text, recipe_tree
from vit_scale.recipe import build_config
from vit_scale.record.terminal import Terminal
from vit_scale.report.model_report import report_on
from vit_scale.strategies.precision import resolve_precision

ASSUMED_MFU = {"cpu": 0.5, "cuda": 0.15}
"""For the first choice of a model; its speed is measured then."""
MIN_SIDE_TO_FINE_TUNE = 24
MAX_MEASURED = 3
SMALLEST_MICRO_BATCH = 4
"""A model that does not fit with as few images is not suggested: `batch.micro: auto` could still train it, slowly."""


@dataclass(frozen=True)
class Suggested:
    """A recipe and what it was made from."""

    text: str
    facts: DataFacts
    machine: MachineFacts
    choices: list[Choice]


def init_recipe(options: Mapping[str, Any], minutes: float, terminal: Terminal) -> Suggested:
    """Return a recipe that trains on the data of these options on this system in about `minutes`.

    Raises `UserError` if the data cannot be opened.
    """
    info = terminal.info
    with terminal.phase("Opening the data") as phase:
        data = open_data(DataConfig(**options), seed=0)
        phase.next("Looking at the images")
        facts = look_at_data(options, data, phase.show)
        phase.next("Measuring this system")
        machine = machine_facts()
    for line in (*data.file_notes, describe_data(facts)):
        info(line)
    info(describe_machine(machine))
    with terminal.phase("Looking for published weights"):
        candidates = available_models(facts)
    if candidates[0].weights is None:
        info("No published weights: neither in the local cache nor is the Hub reachable. Training from scratch.")
    with terminal.phase("Choosing a model"):
        candidates, note = fitting(candidates, facts, machine.memory)
    if note:
        info(note)
    candidate, epochs, batch, speed = _measured_choice(candidates, data, facts, machine, 60 * minutes, terminal)
    choices = suggest(candidate, facts, epochs=epochs, batch=batch, images_per_second=speed, minutes=minutes)
    header = [
        f"Written by vit-scale init for {machine.name}: about {in_minutes(minutes)}.",
        f"Longer: raise schedule.epochs. All options: {command_line('train', '--help')}",
    ]
    return Suggested(recipe_text(choices, header), facts, machine, choices)


def machine_facts() -> MachineFacts:
    """Return the devices, memory and cores of this system."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not torch.cuda.is_available():
        flops = peak(torch.device("cpu")).flops or 1e11
        return MachineFacts("cpu", f"a CPU with {cores} cores", psutil.virtual_memory().available, cores, 1, flops)
    devices, name = torch.cuda.device_count(), torch.cuda.get_device_name(0)
    device = torch.device("cuda", 0)
    flops = devices * (peak(device, resolve_precision("auto", device)).flops or 5e13)
    memory = torch.cuda.get_device_properties(0).total_memory
    return MachineFacts("cuda", f"{devices} x {name}" if devices > 1 else name, memory, cores, devices, flops)


def available_models(facts: DataFacts) -> list[Candidate]:
    """Return models to choose from, the largest first: published ones if their weights can be had."""
    if min(facts.size) >= MIN_SIDE_TO_FINE_TUNE:
        online = is_hub_reachable()
        published = [model for model in fine_tuned() if online or (model.weights and has_weights(model.weights))]
        if published:
            return published
    return list(from_scratch(facts))


def fitting(candidates: list[Candidate], facts: DataFacts, memory: int) -> tuple[list[Candidate], str | None]:
    """Return the models whose training fits in `memory` bytes per device, and a line about larger ones.

    The smallest model remains in any case.
    """
    needed = {index: training_memory(candidate, facts) for index, candidate in enumerate(candidates)}
    fit = [candidate for index, candidate in enumerate(candidates) if needed[index] <= memory]
    if len(fit) == len(candidates):
        return candidates, None
    names = dict.fromkeys(candidate.model["name"] for candidate in candidates if candidate not in fit)
    note = f"Too large for {memory_size(memory)} of memory: {', '.join(names)}."
    return fit or candidates[-1:], note


def training_memory(candidate: Candidate, facts: DataFacts) -> int:
    """Return the bytes that a training step of `candidate` needs with the smallest micro-batch."""
    model = {**candidate.model, "num_classes": facts.classes, "in_chans": facts.channels}
    report = report_on(build_config({"model": model, "schedule": {"steps": 1}, "ema": {"decay": 0.99}}))
    return sum(report.memory["ddp"].values()) + SMALLEST_MICRO_BATCH * report.activations.total


def describe_data(facts: DataFacts) -> str:
    """Return a line about the data."""
    sizes = facts.class_sizes
    smallest, largest = min(sizes, key=lambda name: sizes[name]), max(sizes, key=lambda name: sizes[name])
    color = {1: "grayscale", 3: "color"}.get(facts.channels, f"{facts.channels} channels")
    return (
        f"  {facts.train_images:,} training and {counted(facts.val_images, 'validation image')} of "
        f"{counted(facts.classes, 'class', 'classes')}, "
        f"{color}, about {facts.size[0]} x {facts.size[1]} pixels; "
        f"smallest class {smallest} ({sizes[smallest]:,}), largest {largest} ({sizes[largest]:,})"
    )


def describe_machine(machine: MachineFacts) -> str:
    """Return a line about the system."""
    return f"  {machine.name}, {memory_size(machine.memory)} of memory, {machine.flops / 1e9:,.0f} GFLOP/s"


def _measured_choice(
    candidates: list[Candidate],
    data: Data,
    facts: DataFacts,
    machine: MachineFacts,
    seconds: float,
    terminal: Terminal,
) -> tuple[Candidate, float, int, float]:
    """Return the model, epochs, batch size and images per second of the largest model that fits in `seconds`."""
    flops = ASSUMED_MFU[machine.device] * machine.flops
    candidate = choose(candidates, facts, seconds, flops)
    for _ in range(MAX_MEASURED):
        expected = max(0.01, 0.85 * seconds * flops / (6 * candidate.macs) / facts.train_images)
        batch = batch_size(candidate, facts, min(expected, epochs_for(candidate, facts, seconds, 1e9)))
        terminal.info(f"Measuring {candidate.model['name']} at {candidate.img_size} pixels on this system ...")
        trial = suggest(candidate, facts, epochs=1, batch=batch, images_per_second=1, minutes=1)
        with terminal.phase("Training for some seconds"):
            speed = machine.devices * images_per_second(build_config(recipe_tree(trial)), data)
        epochs = epochs_for(candidate, facts, seconds, speed)
        terminal.info(f"  {speed:,.0f} images/s: {epochs:.2g} epochs in {in_minutes(seconds / 60)}")
        smaller = with_smaller_model(candidates, candidate)
        if epochs >= 1 or smaller is candidate:
            break
        candidate = smaller
    return candidate, epochs, batch_size(candidate, facts, epochs), speed
