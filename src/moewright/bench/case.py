"""A case of work that is measured: one point of a curve of the hardware file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch
import torch.distributed as dist

from moewright.spec.hardware import Collective, Op
from moewright.spec.workload import Dtype

Call = Callable[[], object]


class Probe(StrEnum):
    """A quantity that is measured besides the rates and collectives of the hardware file."""

    # x: bytes read and written; y: bytes/s.
    COPY = "copy"
    # x: which of tiny_steps.TINY_SHAPES, from 1; y: steps/s.
    STEP = "step"
    # x: the round of pairing_rounds, from 1; y: bytes/s each way.
    LINK = "link"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchContext:
    """The device and the process groups that a rank measures on.

    `groups` holds its block of each size smaller than the world; None is the whole world.
    """

    device: torch.device
    rank: int = 0
    groups: Mapping[int, dist.ProcessGroup | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One point of a curve at `x`, with what sets its call up on a rank.

    `work` is what one call does, in the unit of the curve's y times seconds. It is 0 for a call
    that does next to nothing: its time is the launch, which is in every call of the curve.

    `ranks` is the size of a collective's group. The world splits into groups of so many neighbours,
    which all communicate at the same time.
    """

    op: Op | Collective | Probe
    dtype: Dtype
    x: float
    work: float
    setup: Callable[[BenchContext], Call]
    ranks: int = 1
    input_sets: int = 1  # sets of inputs, which the calls take in turn
    time_slices: int = 1  # slices of time that the case may take

    @property
    def curve_key(self) -> tuple[Op | Collective | Probe, Dtype, int]:
        return self.op, self.dtype, self.ranks

    @property
    def is_communication(self) -> bool:
        """True for a case that communicates, and so is timed by the wall clock."""
        return isinstance(self.op, Collective) or self.op is Probe.LINK


def draw_normal(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Draw a tensor from the normal distribution in fp32, then round it to `dtype`."""
    return torch.randn(*shape, dtype=torch.float32, device=device).to(dtype)
