"""What the Linux kernel says of this machine's devices under /sys."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

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
