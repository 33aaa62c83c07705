"""Cores near a GPU, in a made-up /sys of two sockets."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moewright.engine.run import adapter_binding
from moewright.engine.run.adapter_binding import bind_to_gpu, find_near_cores, parse_core_list

EVERY_CORE = set(range(16))


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two nodes of eight cores with their threads, and a GPU at each; a third names no node."""
    files = {
        "devices/system/cpu/online": "0-15",
        "devices/system/node/node0/cpulist": "0-3,8-11",
        "devices/system/node/node1/cpulist": "4-7,12-15",
        "bus/pci/devices/0000:1b:00.0/numa_node": "0",
        "bus/pci/devices/0000:9a:00.0/numa_node": "1",
        "bus/pci/devices/0000:ff:00.0/numa_node": "-1",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="ascii")
    return tmp_path


@pytest.mark.parametrize(("text", "cores"), [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set())])
def test_lists_of_cores(text: str, cores: set[int]) -> None:
    assert parse_core_list(text) == cores


def test_a_gpu_has_the_cores_of_its_own_socket(sysfs: Path) -> None:
    assert find_near_cores(sysfs, "0000:1b:00.0", EVERY_CORE) == {0, 1, 2, 3, 8, 9, 10, 11}
    assert find_near_cores(sysfs, "0000:9a:00.0", EVERY_CORE) == {4, 5, 6, 7, 12, 13, 14, 15}


def test_nothing_is_chosen_where_a_launcher_has_or_nobody_knows(sysfs: Path) -> None:
    assert find_near_cores(sysfs, "0000:9a:00.0", {0, 1, 2, 3}) == set()
    assert find_near_cores(sysfs, "0000:ff:00.0", EVERY_CORE) == set()
    assert find_near_cores(sysfs, "0000:77:00.0", EVERY_CORE) == set()
    (sysfs / "devices/system/node/node1/cpulist").write_text("0-15\n")
    assert find_near_cores(sysfs, "0000:9a:00.0", EVERY_CORE) == set()


def test_a_rank_is_bound_by_the_address_of_its_gpu(
    sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[set[int]] = []
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9A, pci_device_id=0)
    monkeypatch.setattr(adapter_binding, "SYSFS", sysfs)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: EVERY_CORE)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    bind_to_gpu(torch.device("cuda", 1))
    assert bound == [{4, 5, 6, 7, 12, 13, 14, 15}]
