"""Launcher settings, variables and interfaces that slow training down or break it are found."""

from __future__ import annotations

import dataclasses
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vit_scale.doctor.check import Setup
from vit_scale.doctor.checks import network


@pytest.fixture
def accelerate_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The configuration file of accelerate; it does not exist yet."""
    from accelerate.commands.config import config_args

    path = tmp_path / "default_config.yaml"
    for name in ("default_config_file", "default_yaml_config_file"):
        monkeypatch.setattr(config_args, name, str(path))
    return path


def test_launcher_configured_for_another_machine_is_slow(setup: Setup, accelerate_config: Path) -> None:
    assert network.launcher(setup).status == "works"
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nuse_cpu: false\nnum_processes: 4\n"
    accelerate_config.write_text(f"{text}num_machines: 1\nmixed_precision: 'no'\n")
    found = network.launcher(dataclasses.replace(setup, gpus=8))
    assert (found.status, found.value) == ("slow", "accelerate is configured for 4 processes, but there are 8 GPUs")
    assert network.launcher(dataclasses.replace(setup, gpus=4)).status == "works"


def test_launcher_configuration_that_cannot_be_read_is_broken(setup: Setup, accelerate_config: Path) -> None:
    accelerate_config.write_text("num_processes: [")
    assert network.launcher(setup).status == "broken"


def test_more_processes_than_cores_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "usable_cores", lambda: 2.0)
    assert network._launcher_problem({"num_processes": 64}, 0) == (
        "accelerate is configured for 64 processes, but there are 2 cores"
    )
    assert network._launcher_problem({"num_processes": 64, "num_machines": 8}, 8) is None
    assert "use_cpu" in (network._launcher_problem({"num_processes": 8, "use_cpu": True}, 8) or "")


@pytest.mark.parametrize("variable", network.SLOWING)
def test_debugging_variables_are_slow(monkeypatch: pytest.MonkeyPatch, setup: Setup, variable: str) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert network.environment(setup).status == "works"
    monkeypatch.setenv(variable, network.SLOWING[variable])
    found = network.environment(setup)
    assert found.status == "slow"
    assert variable in found.value


def test_number_of_threads_is_checked(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    monkeypatch.setattr(network, "usable_cores", lambda: 8.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert network.environment(setup).value == "OMP_NUM_THREADS=1 with 8 cores"
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert network.environment(setup).status == "works"
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert network.environment(setup).status == "broken"


def test_few_open_files_are_broken(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    monkeypatch.setattr(network, "_open_files", lambda: 256)
    found = network.environment(setup)
    assert found.status == "broken"
    assert "ulimit -n" in found.advice


@pytest.mark.parametrize("variable", network.INTERFACE_VARIABLES)
def test_interface_that_does_not_exist_is_broken(monkeypatch: pytest.MonkeyPatch, setup: Setup, variable: str) -> None:
    monkeypatch.setenv(variable, "nosuch0")
    found = network.interfaces(setup)
    assert (found.status, found.required) == ("broken", True)
    assert found.value == f"{variable}=nosuch0: no such interface is up"


@pytest.mark.parametrize(
    ("variable", "value", "found"),
    [
        ("GLOO_SOCKET_IFNAME", "ib0", True),
        ("GLOO_SOCKET_IFNAME", "ib0,eth0", True),
        ("GLOO_SOCKET_IFNAME", "ib0,ib7", False),  # gloo needs each of them
        ("GLOO_SOCKET_IFNAME", "ib", False),
        ("NCCL_SOCKET_IFNAME", "ib", True),
        ("NCCL_SOCKET_IFNAME", "bond,ib", True),
        ("NCCL_SOCKET_IFNAME", "=ib", False),
        ("NCCL_SOCKET_IFNAME", "=ib0", True),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", True),  # there is none to avoid
        ("NCCL_SOCKET_IFNAME", "^=docker0", True),
        ("NCCL_SOCKET_IFNAME", "^ib,eth,lo", False),
    ],
)
def test_lists_of_interfaces_are_read_as_gloo_and_nccl_read_them(variable: str, value: str, found: bool) -> None:
    assert network.finds_interface(variable, value, {"lo", "ib0", "eth0"}) == found


def test_host_name_on_loopback_is_explained(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    for variable in network.INTERFACE_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    state = {name: SimpleNamespace(isup=True) for name in ("lo", "ib0")}
    addresses = {
        "lo": [SimpleNamespace(family=socket.AF_INET, address="127.0.0.1")],
        "ib0": [SimpleNamespace(family=socket.AF_INET, address="10.0.0.7")],
    }
    monkeypatch.setattr(network.psutil, "net_if_stats", lambda: state)
    monkeypatch.setattr(network.psutil, "net_if_addrs", lambda: addresses)
    for address, advice in (("127.0.1.1", "GLOO_SOCKET_IFNAME=ib0"), ("10.0.0.7", "")):
        info = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, info=info: info)
        found = network.interfaces(setup)
        assert found.status == "works"
        assert (advice in found.advice) if advice else not found.advice
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")  # the beginning of a name
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert network.interfaces(setup).value == "interfaces ib0; GLOO_SOCKET_IFNAME=ib0"


def test_unknown_host_name_counts_as_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    assert network.is_loopback_only()


def python_that(commands: str, folder: Path) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{commands}\n")
    path.chmod(0o755)
    return str(path)


def test_launcher_that_fails_is_broken(monkeypatch: pytest.MonkeyPatch, setup: Setup, tmp_path: Path) -> None:
    setup = dataclasses.replace(setup, quick=False)
    script = python_that("echo 'RuntimeError: operator torchvision::nms does not exist' >&2; exit 1", tmp_path)
    monkeypatch.setattr(sys, "executable", script)
    found = network.accelerate_launch(setup)
    assert found.status == "broken"
    assert found.value == "fails with status 1: RuntimeError: operator torchvision::nms does not exist"


def test_launcher_that_hangs_is_broken(monkeypatch: pytest.MonkeyPatch, setup: Setup, tmp_path: Path) -> None:
    setup = dataclasses.replace(setup, quick=False)
    monkeypatch.setattr(sys, "executable", python_that("sleep 100", tmp_path))
    monkeypatch.setattr(network, "LAUNCH_TIMEOUT", 0.5)
    found = network.accelerate_launch(setup)
    assert (found.status, found.value) == ("broken", "no answer within 0.5 s")
