"""Comparison of ranks: which one computes longest, and how long they wait for each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moewright.diagnosis.traces.breakdown import Breakdown
from moewright.diagnosis.traces.capture import Capture, CommChannel, Floats
from moewright.diagnosis.traces.comm_classes import CommClass, classify_channels
from moewright.rules.grid import GROUPS, group_ranks
from moewright.spec.hardware import Collective
from moewright.spec.layout import Layout

_GroupKey = tuple[str, tuple[int, ...], Collective | None, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWaiting:
    """Seconds a step that the average rank waits inside collectives of one class for the last rank.

    `seconds` is the mean over the steps; `median_s` is their median, which a single disturbed step
    does not move.
    """

    comm: CommClass
    seconds: float
    median_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSkew:
    """How unevenly ranks compute, and how long they wait for each other."""

    compute_max_over_mean: float
    slowest_rank: int  # of compute
    waiting: tuple[RankWaiting, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankCalls:
    """The lengths of one rank's calls over a group."""

    key: _GroupKey
    comm: CommClass
    lengths_s: Floats


def measure_rank_skew(
    captures: Sequence[Capture], breakdowns: Sequence[Breakdown], layout: Layout | None = None
) -> RankSkew | None:
    """Compare the ranks of a job; None for one rank.

    The k-th calls of a group are the same collective. Its shortest kernel is that of the rank that
    came last, so what the others take longer is waiting.
    """
    if len(captures) < 2:
        return None
    compute_s = np.array([breakdown.compute_s for breakdown in breakdowns])
    steps = max(1, *(breakdown.steps for breakdown in breakdowns))
    waiting_s = _waiting_seconds(captures, layout, steps)
    mean_s = compute_s.mean()
    return RankSkew(
        compute_max_over_mean=float(compute_s.max() / mean_s) if mean_s > 0 else 1.0,
        slowest_rank=breakdowns[int(compute_s.argmax())].rank,
        waiting=tuple(
            RankWaiting(comm=comm, seconds=float(late.mean()), median_s=float(np.median(late)))
            for comm, late in waiting_s.items()
            if late.sum() > 0
        ),
    )


def _waiting_seconds(
    captures: Sequence[Capture], layout: Layout | None, steps: int
) -> dict[CommClass, Floats]:
    """Return the seconds that the average rank waits, by class: arrays [steps]."""
    lengths_s: dict[_GroupKey, list[Floats]] = defaultdict(list)
    classes: dict[_GroupKey, CommClass] = {}
    for capture in captures:
        for calls in _calls_of_rank(capture, layout):
            lengths_s[calls.key].append(calls.lengths_s)
            classes[calls.key] = calls.comm
    waiting_s: dict[CommClass, Floats] = defaultdict(lambda: np.zeros(steps))
    for key, members in lengths_s.items():
        has_all_calls = len({len(member) for member in members}) == 1
        if len(members) < 2 or not has_all_calls:
            continue
        table = np.stack(members)
        late = (table - table.min(0)).sum(0) / len(captures)
        # Calls are recorded in order: as many in each step can be assigned to their steps.
        if len(late) % steps == 0:
            waiting_s[classes[key]] += late.reshape(steps, -1).sum(1)
        else:
            waiting_s[classes[key]] += late.sum() / steps
    return waiting_s


def _calls_of_rank(capture: Capture, layout: Layout | None) -> Iterator[_RankCalls]:
    """Yield the calls of each channel whose ranks or group name are recorded."""
    kernels = capture.kernels
    classes = classify_channels(capture, layout)
    for index, channel in enumerate(capture.channels):
        if not channel.ranks and not channel.group:
            continue
        ranks = _ranks_of_channel(channel, capture.rank, layout)
        in_channel = kernels.channel_index == index
        yield _RankCalls(
            key=(channel.group, ranks, channel.op, channel.size),
            comm=classes[index].comm,
            lengths_s=kernels.end_s[in_channel] - kernels.start_s[in_channel],
        )


def _ranks_of_channel(channel: CommChannel, rank: int, layout: Layout | None) -> tuple[int, ...]:
    if channel.group in GROUPS and layout is not None and rank < layout.world_size:
        return group_ranks(layout, channel.group, rank)
    return channel.ranks
