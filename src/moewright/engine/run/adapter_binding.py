"""InfiniBand and RoCE adapters for NCCL: those nearest to a machine's GPUs, without the others.

NCCL itself pairs each GPU with the adapter on the shortest PCI path. Left alone it also takes
adapters of the storage or management network, which may not reach the other machines at all. All
ranks of a machine name the same adapters: NCCL numbers them in every process and lets a rank send
through another rank's adapter, so a list of its own for each rank breaks its rings
(github.com/NVIDIA/nccl/issues/1478). Adapters of other kinds (EFA) are chosen by their plugins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from moewright.engine.run.env import find_adapter_setting, set_adapters

# Processor cores for a rank: those of the NUMA node that its GPU is attached to.
#
# A rank whose threads run on the other socket starts kernels later and copies through the link
# between sockets; page-locked memory lies where the thread that first writes it runs.


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


# What the Linux kernel says of this machine's devices under /sys.

SYSFS = Path("/sys")


def pci_address(device: torch.device) -> str:
    """Return the address of a GPU on the PCI bus, as the kernel writes it: "0000:1b:00.0"."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch types not all of them
    return (
        f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
        f"{properties.pci_device_id:02x}.0"
    )


def read_line(path: Path) -> str:
    """Return a file of one line; nothing where there is no such file."""
    with suppress(OSError):
        return path.read_text(encoding="ascii").strip()
    return ""


DEVICE_FILES = Path("/dev/infiniband")
# NCCL's own list of what it opens; "Unspecified" is that of EFA.
_LINK_LAYERS = ("InfiniBand", "Ethernet")
# The folders of a host bridge and of what is below it, under /sys/devices.
_PCI_FOLDER = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class PciDistance(IntEnum):
    """How far two PCI devices are apart, named as by `nvidia-smi topo -m`."""

    PIX = 0  # below one switch
    PXB = 1  # below several switches of one root port
    PHB = 2  # below one host bridge
    NODE = 3  # of one NUMA node
    SYS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class PciPlace:
    """The place of a device in the PCI tree: bridges from the host bridge to it, and NUMA node."""

    path: tuple[str, ...]
    numa_node: str

    def distance(self, other: PciPlace) -> tuple[PciDistance, int]:
        """Return the kind of distance, and how many bridges lie between the two devices."""
        shared = 0
        for own, others in zip(self.path, other.path, strict=False):
            if own != others:
                break
            shared += 1
        # Each path ends with the device itself.
        below = [len(place.path) - shared - 1 for place in (self, other)]
        bridges = sum(below)
        if shared > 1:  # the host bridge, and a root port
            return (PciDistance.PIX if max(below) <= 1 else PciDistance.PXB), bridges
        if shared:
            return PciDistance.PHB, bridges
        if self.numa_node.isdigit() and self.numa_node == other.numa_node:
            return PciDistance.NODE, 0
        return PciDistance.SYS, 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """An adapter that NCCL can open, and the rate of its fastest port in Gb/s."""

    name: str
    place: PciPlace
    rate: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterChoice:
    """The adapters for NCCL, none where the choice is left to it, and the reason in a sentence."""

    names: tuple[str, ...] = ()
    sentence: str


def bind_adapters(local_ranks: int) -> str:
    """Name to NCCL the adapters nearest to the GPUs of this machine's ranks; say what was done.

    To be called by every rank of a job on several machines, before the first communicator.
    """
    setting = find_adapter_setting()
    if setting:
        return f"adapters are chosen by {setting}"
    gpus = [pci_address(torch.device("cuda", index)) for index in range(local_ranks)]
    choice = choose_adapters(SYSFS, gpus, DEVICE_FILES)
    if choice.names:
        set_adapters(choice.names)
    return choice.sentence


def choose_adapters(sysfs: Path, gpus: Sequence[str], device_files: Path) -> AdapterChoice:
    """Choose for GPUs at these PCI addresses, from what the kernel says of adapters.

    Nothing is chosen where leaving the others out could cost bandwidth: where one of them is
    faster, or where fewer adapters are near than there are GPUs.
    """
    adapters = find_adapters(sysfs, device_files)
    if not adapters:
        return AdapterChoice(sentence="no active InfiniBand or RoCE adapter: NCCL chooses")
    nearest: dict[str, Adapter] = {}
    kinds = set()
    for address in gpus:
        place = _find_place(sysfs / "bus/pci/devices" / address)
        distances = {adapter.name: place.distance(adapter.place) for adapter in adapters}
        least = min(distances.values())
        near = [adapter for adapter in adapters if distances[adapter.name] == least]
        fastest = max(adapter.rate for adapter in near)
        nearest |= {adapter.name: adapter for adapter in near if adapter.rate == fastest}
        kinds.add(least[0])
    chosen = [adapter for adapter in adapters if adapter.name in nearest]
    others = [adapter for adapter in adapters if adapter.name not in nearest]
    names = " ".join(adapter.name for adapter in chosen)
    near_kinds = "/".join(kind.name for kind in sorted(kinds))
    facts = f"nearest to {len(gpus)} GPUs ({near_kinds}): {names}"
    rates = {adapter.rate for adapter in chosen}
    if len({*rates, *(other.rate for other in others if other.rate > min(rates))}) > 1:
        return AdapterChoice(sentence=f"adapters {facts}, of other rates: NCCL chooses")
    if others and len(chosen) < len(gpus):
        return AdapterChoice(sentence=f"adapters {facts}, fewer than GPUs: NCCL chooses")
    left_out = " ".join(other.name for other in others) or "none"
    return AdapterChoice(
        names=tuple(adapter.name for adapter in chosen),
        sentence=f"NCCL_IB_HCA set to the adapters {facts}; left out: {left_out}",
    )


def find_adapters(sysfs: Path, device_files: Path) -> list[Adapter]:
    """Return the adapters with an active port that this process may open, in the order of names.

    A container often sees adapters of its machine that it may not open.
    """
    adapters = []
    for folder in sorted((sysfs / "class/infiniband").glob("*")):
        rate = max((_read_rate(port) for port in (folder / "ports").glob("*")), default=0.0)
        files = [device_files / verbs.name for verbs in folder.glob("device/infiniband_verbs/*")]
        if rate and any(os.access(file, os.R_OK | os.W_OK) for file in files):
            place = _find_place(folder / "device")
            adapters.append(Adapter(name=folder.name, place=place, rate=rate))
    return adapters


def _read_rate(port: Path) -> float:
    """Return the Gb/s of a port, of which the kernel says "400 Gb/sec (4X NDR)"; 0 if inactive."""
    is_active = read_line(port / "state").endswith("ACTIVE")
    if not is_active or read_line(port / "link_layer") not in _LINK_LAYERS:
        return 0.0
    return float(read_line(port / "rate").partition(" ")[0] or 0)


def _find_place(folder: Path) -> PciPlace:
    """Return the place of the device whose folder under /sys, or a link to it, this is."""
    parts = folder.resolve().parts
    path = tuple(part for part in parts if _PCI_FOLDER.fullmatch(part))
    return PciPlace(path=path, numa_node=read_line(folder / "numa_node"))
