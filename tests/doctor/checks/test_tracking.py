"""A W&B key that is missing or rejected, and services that cannot be reached, are found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import wandb

from vit_scale.doctor.check import Setup
from vit_scale.doctor.checks import tracking


@pytest.fixture
def login(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the client does."""
    monkeypatch.delenv("WANDB_MODE", raising=False)

    def arrange(has_key: bool, server: str | None) -> None:
        def fake(*, prompt: bool, verify: bool) -> bool:
            assert verify
            assert not prompt
            if has_key and server is not None:
                raise wandb.errors.AuthenticationError(server)
            return has_key

        monkeypatch.setattr(wandb, "login", fake)

    return arrange


def test_w_and_b_without_a_key_is_skipped(login: Any, setup: Setup) -> None:
    login(False, "never asked")
    found = tracking.wandb_login(setup)
    assert (found.status, found.advice) == ("skipped", "wandb login")


def test_w_and_b_with_a_key_works(login: Any, setup: Setup) -> None:
    login(True, None)
    assert tracking.wandb_login(setup).status == "works"


@pytest.mark.parametrize(
    ("message", "value"),
    [
        ("Failed to execute API request: the service process is busy and did not respond in time.", "does not answer"),
        ("Failed to authenticate with https://api.wandb.ai: user is not logged in", "key is rejected"),
    ],
)
def test_w_and_b_that_fails_is_broken_but_trains(login: Any, setup: Setup, message: str, value: str) -> None:
    login(True, message)
    found = tracking.wandb_login(setup)
    assert (found.status, found.required) == ("broken", False)
    assert value in found.value


def test_server_that_rejects_the_key_is_recognized(monkeypatch: pytest.MonkeyPatch, setup: Setup, root: Path) -> None:
    sys.path.insert(0, str(root / "tests"))
    from wandb_server import WandbServer

    wandb.teardown()  # The client remembers whether an earlier test of this process was offline.
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with WandbServer("refusing") as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        try:
            found = tracking.wandb_login(setup)
        finally:
            wandb.teardown()
    assert found.status == "broken"
    assert "key is rejected" in found.value
    assert server.environment()["WANDB_API_KEY"] not in str(found)


def test_w_and_b_is_not_asked_in_offline_mode(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert tracking.wandb_login(setup).status == "skipped"


def test_hub_that_does_not_answer_is_broken_but_trains(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert tracking.hub(setup).status == "skipped"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(tracking, "is_hub_reachable", lambda: True)
    assert tracking.hub(setup).status == "works"
    monkeypatch.setattr(tracking, "is_hub_reachable", lambda: False)
    found = tracking.hub(setup)
    assert (found.status, found.required) == ("broken", False)
