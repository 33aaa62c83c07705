"""The memory of a node's host: the part of one rank, and whether what ranks keep there fits.

Offloaded states and activations and the copies of asynchronous checkpoints lie there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from moewright.cost.constants import Constants
from moewright.spec.hardware import Hardware
from moewright.spec.ledger import Component, MemoryRow
from moewright.spec.plan import Verdict

# The rest is for the operating system, the trainer's processes and what they read.
USABLE_SHARE = 0.9
_FIT_PROBABILITIES = {Verdict.FITS: 1.0, Verdict.UNCERTAIN: 0.5, Verdict.OOM: 0.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """The most that a rank keeps in host memory, its part of that, and the verdict.

    A `capacity_bytes` of 0 means that nobody says how much there is.
    """

    bytes: int
    capacity_bytes: int
    verdict: Verdict

    @property
    def fit_probability(self) -> float:
        """The probability that the hosts hold it."""
        return _FIT_PROBABILITIES[self.verdict]

    def join(self, of_device: Verdict) -> Verdict:
        """Return the worse of this verdict and that on the device's memory."""
        order = list(_FIT_PROBABILITIES)
        return max(self.verdict, of_device, key=order.index)


def judge_host_memory(
    hardware: Hardware, constants: Constants, ranks: Sequence[Iterable[MemoryRow]]
) -> HostMemory:
    """Judge what ranks keep in host memory, as if all of a node held as much as the fullest."""
    nbytes = max(
        sum(row.bytes for row in rows if row.component is Component.HOST) for rows in ranks
    )
    capacity = host_capacity(hardware, constants)
    verdict = Verdict.OOM
    if nbytes <= USABLE_SHARE * capacity:
        verdict = Verdict.FITS
    elif nbytes <= capacity:
        verdict = Verdict.UNCERTAIN
    known_bytes = 0 if capacity == inf else round(capacity)
    return HostMemory(bytes=nbytes, capacity_bytes=known_bytes, verdict=verdict)


def host_capacity(hardware: Hardware, constants: Constants) -> float:
    """Return the bytes of host memory for each rank of a node; infinite where nobody says."""
    node_bytes = constants["host_memory_bytes"]
    if not node_bytes:
        return inf
    return node_bytes / min(hardware.count, hardware.fabric.devices_per_node)
