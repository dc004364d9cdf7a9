"""Slurm variables are translated to the ones torch reads."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from vit_scale import launcher
from vit_scale.launcher import first_host, gloo_interface, slurm_variables

TASK = {
    "SLURM_PROCID": "13",
    "SLURM_LOCALID": "5",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
}


def test_srun_task_gets_rank_and_world_size() -> None:
    assert slurm_variables(TASK) == {
        "RANK": "13",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "5",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "24567",
    }


def test_task_with_one_visible_gpu_uses_local_rank_0() -> None:
    assert slurm_variables(TASK | {"CUDA_VISIBLE_DEVICES": "5"})["LOCAL_RANK"] == "0"
    assert slurm_variables(TASK | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"})["LOCAL_RANK"] == "5"


def test_existing_rank_takes_precedence_over_srun() -> None:
    assert slurm_variables(TASK | {"RANK": "3", "WORLD_SIZE": "4"}) == {}


def test_gpus_are_hidden_from_a_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `accelerate launch --cpu` starts it, before torch is imported."""
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "0,1"})
    launcher.adopt_launcher()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    os.environ["ACCELERATE_USE_CPU"] = "true"
    launcher.adopt_launcher()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_shell_inside_an_allocation_is_a_single_process() -> None:
    assert slurm_variables({"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "1"}) == {}
    assert slurm_variables(TASK | {"SLURM_STEP_NUM_TASKS": "1"}) == {}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("a1,a2", "a1"),
        ("rack[2,4]-n.cluster", "rack2-n.cluster"),
        ("dgx-a100-[001-128]", "dgx-a100-001"),
    ],
)
def test_first_host_of_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


TWO_NODES = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "gpu07"}


@pytest.fixture
def debian(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """A node whose host name is a loopback address; the routes may be changed."""
    routes: dict[str, str | None] = {"gpu07": "10.0.0.8", "192.0.2.1": "192.168.1.8"}
    addresses = {"lo": "127.0.0.1", "eth0": "192.168.1.8", "ib0": "10.0.0.8"}
    found = {name: [SimpleNamespace(address=address)] for name, address in addresses.items()}
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(launcher, "_address_towards", routes.get)
    return routes


def test_gloo_uses_the_interface_with_the_route_to_node_0(debian: dict[str, str | None]) -> None:
    assert gloo_interface(TWO_NODES) == "ib0"


@pytest.mark.parametrize("route", ["127.0.0.1", None])
def test_node_0_uses_the_interface_with_the_default_route(debian: dict[str, str | None], route: str | None) -> None:
    debian["gpu07"] = route
    assert gloo_interface(TWO_NODES) == "eth0"


def test_interface_is_left_alone_where_gloo_finds_it(
    debian: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gloo_interface(TWO_NODES | {"GLOO_SOCKET_IFNAME": "ib1"}) is None
    assert gloo_interface(TWO_NODES | {"WORLD_SIZE": "8"}) is None, "one node"
    assert gloo_interface({}) is None
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.8")
    assert gloo_interface(TWO_NODES) is None
