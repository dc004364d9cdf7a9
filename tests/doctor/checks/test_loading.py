"""A loader slower than the devices, and a decoder that is wrong, are found."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest

from vit_scale.cost.hardware import Peak
from vit_scale.doctor.check import Setup
from vit_scale.doctor.checks import loading
from vit_scale.errors import UserError


@pytest.mark.parametrize(("gpus", "status"), [(0, "works"), (1, "works"), (8, "slow")])
def test_loader_slower_than_all_devices_together_is_slow(
    monkeypatch: pytest.MonkeyPatch, setup: Setup, gpus: int, status: str
) -> None:
    monkeypatch.setattr(loading, "training_images_per_second", lambda setup: 1000.0)
    monkeypatch.setattr(loading, "loaded_images_per_second", lambda source, workers, seconds: 1500.0)
    monkeypatch.setattr(loading, "usable_cores", lambda: 1.0)
    found = loading.loader(dataclasses.replace(setup, gpus=gpus))
    assert (found.status, found.numbers["needed"]) == (status, 1000 * max(1, gpus))
    assert ("data.workers" in found.advice) == (status == "slow")


def test_cpu_is_limited_by_its_matmuls(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    monkeypatch.setattr(loading, "peak", lambda device: Peak(276e9, "measured"))
    assert loading.training_images_per_second(setup) == pytest.approx(10, rel=1e-2), "3 x 2 x 4.599 GMACs per image"


def test_images_are_loaded_by_workers() -> None:
    source = loading.JpegSource(loading._photographs(2))
    assert 50_000 < len(source.read(0).image) < 200_000, "like a photograph of ImageNet"
    assert loading.loaded_images_per_second(source, 1, 0.1) > 0


def test_worker_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    class Deadly(loading.JpegSource):
        def read(self, index: int) -> Any:
            os._exit(1)

    monkeypatch.setattr(loading, "training_images_per_second", lambda setup: 1.0)
    with pytest.raises(UserError, match="data-loading worker died"):
        loading.loaded_images_per_second(Deadly(loading._photographs(1)), 1, 0.1)


def test_decoder_that_is_wrong_is_broken(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    assert loading.pixels(setup).status == "works"
    right = loading.open_image

    def negative(data: Any, channels: int) -> Any:
        image = right(data, channels)
        crop = image.crop
        monkeypatch.setattr(type(image), "crop", lambda self, *args: 255 - crop(*args))
        return image

    monkeypatch.setattr(loading, "open_image", negative)
    assert loading.pixels(setup).status == "broken"
