"""Processor cores for a rank: those of the NUMA node that its GPU is attached to.

A rank whose threads run on the other socket starts kernels later and copies through the link
between sockets; page-locked memory lies where the thread that first writes it runs.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from moewright.engine.run.sysfs import SYSFS, pci_address, read_line


def bind_to_gpu(device: torch.device) -> None:
    """Let this process run on the cores of its GPU's NUMA node alone.

    Nothing changes where the node is not known, or where a launcher has chosen cores already
    (numactl, Slurm, torchrun --numa-binding): fewer than the machine has.
    """
    cores = find_near_cores(SYSFS, pci_address(device), os.sched_getaffinity(0))
    if cores:
        os.sched_setaffinity(0, cores)


def find_near_cores(sysfs: Path, pci_address: str, allowed: set[int]) -> set[int]:
    """Return the cores of the NUMA node of a PCI device; empty where nothing is to be chosen.

    `allowed` are the cores that this process may use.
    """
    online = parse_core_list(read_line(sysfs / "devices/system/cpu/online"))
    node = read_line(sysfs / "bus/pci/devices" / pci_address / "numa_node")
    if allowed != online or not node.isdigit():  # -1: the firmware does not say
        return set()
    cores = parse_core_list(read_line(sysfs / f"devices/system/node/node{node}/cpulist"))
    return cores & allowed if cores != online else set()


def parse_core_list(text: str) -> set[int]:
    """Parse a list of cores as the Linux kernel prints it: "0-3,8-11"."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores
