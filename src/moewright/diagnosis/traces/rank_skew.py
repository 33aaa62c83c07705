"""Ranks beside each other: who works longest, and how much of communication is waiting for a late
rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moewright.diagnosis.traces.breakdown import Breakdown
from moewright.diagnosis.traces.capture import Capture, Floats
from moewright.diagnosis.traces.comm_classes import CommClass, classify_channels
from moewright.rules.grid import GROUPS, group_ranks
from moewright.spec.hardware import Collective
from moewright.spec.layout import Layout

_Key = tuple[str, tuple[int, ...], Collective | None, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWaiting:
    """Seconds a step that the average rank spends inside collectives of one class before the last
    rank comes: mean over the steps, and their median, which one step that something else held up is
    not in.
    """

    comm: CommClass
    seconds: float
    median_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSkew:
    compute_max_over_mean: float
    slowest_rank: int  # of compute
    waiting: tuple[RankWaiting, ...]


def measure_rank_skew(
    captures: Sequence[Capture], breakdowns: Sequence[Breakdown], layout: Layout | None = None
) -> RankSkew | None:
    """None for one rank. The k-th calls of a group are the same collective; its shortest kernel is
    that of the rank that came last, so what the others take longer is waiting.
    """
    if len(captures) < 2:
        return None
    works = np.array([part.compute_s for part in breakdowns])
    lengths: dict[_Key, list[Floats]] = defaultdict(list)
    classes: dict[_Key, CommClass] = {}
    for capture in captures:
        kernels = capture.kernels
        for place, (channel, classed) in enumerate(
            zip(capture.channels, classify_channels(capture, layout), strict=True)
        ):
            ranks = channel.ranks
            if channel.group in GROUPS and layout is not None and capture.rank < layout.world_size:
                ranks = group_ranks(layout, channel.group, capture.rank)
            key = (channel.group, ranks, channel.op, channel.size)
            if not channel.ranks and not channel.group:
                continue
            mine = kernels.channel_index == place
            lengths[key].append(kernels.end_s[mine] - kernels.start_s[mine])
            classes[key] = classed.comm
    steps = max(1, *(part.steps for part in breakdowns))
    found: dict[CommClass, Floats] = defaultdict(lambda: np.zeros(steps))
    for key, members in lengths.items():
        if len(members) > 1 and len({len(member) for member in members}) == 1:
            table = np.stack(members)
            late = (table - table.min(0)).sum(0) / len(captures)
            whole = (
                len(late) % steps == 0
            )  # as many calls in each step, so that they can be told apart
            found[classes[key]] += late.reshape(steps, -1).sum(1) if whole else late.sum() / steps
    return RankSkew(
        compute_max_over_mean=float(works.max() / works.mean()) if works.mean() > 0 else 1.0,
        slowest_rank=breakdowns[int(works.argmax())].rank,
        waiting=tuple(
            RankWaiting(comm=comm, seconds=float(late.mean()), median_s=float(np.median(late)))
            for comm, late in found.items()
            if late.sum() > 0
        ),
    )
