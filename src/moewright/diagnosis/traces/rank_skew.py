"""Comparison of ranks: which one computes longest, and how long they wait for each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moewright.diagnosis.traces.breakdown import Breakdown
from moewright.diagnosis.traces.capture import Capture, CommChannel, Floats
from moewright.diagnosis.traces.comm_classes import CommClass, classify_channels
from moewright.diagnosis.traces.gaps import IdleCause
from moewright.rules.grid import GROUPS, group_ranks
from moewright.spec.hardware import Collective
from moewright.spec.layout import Layout
from moewright.spec.units import divide

# Means over the ranks of a trace: exposed communication of a class, idle time of a cause.


@dataclass(frozen=True, kw_only=True, slots=True)
class ExposedComm:
    """Seconds a step of one class of communication, means over the ranks.

    `waiting_s` is the part of `exposed_s` that is waiting for the last rank.
    """

    busy_s: float
    exposed_s: float
    waiting_s: float
    calls: float
    evidence: tuple[str, ...]

    @property
    def own_s(self) -> float:
        """Return the exposed seconds with all ranks present."""
        return self.exposed_s - self.waiting_s


def measure_comm(
    breakdowns: Sequence[Breakdown], skew: RankSkew | None, comm: CommClass
) -> ExposedComm:
    """Return the exposed seconds of one class of communication, and how much of them is waiting."""
    times = [time for breakdown in breakdowns for time in breakdown.comm_times if time.comm is comm]
    ranks = len(breakdowns)
    exposed_s = sum(time.exposed_s for time in times) / ranks
    waiting_s = 0.0
    for waiting in skew.waiting if skew else ():
        if waiting.comm is comm:
            waiting_s = min(exposed_s, waiting.seconds)
    return ExposedComm(
        busy_s=sum(time.busy_s for time in times) / ranks,
        exposed_s=exposed_s,
        waiting_s=waiting_s,
        calls=sum(time.calls for time in times) / ranks,
        evidence=tuple(dict.fromkeys(text for time in times for text in time.evidence)),
    )


def mean_idle_s(breakdowns: Sequence[Breakdown], cause: IdleCause) -> float:
    """Return the idle seconds a step of one cause, mean over the ranks."""
    total_s = sum(
        seconds
        for breakdown in breakdowns
        for idle_cause, seconds in breakdown.idle_times
        if idle_cause is cause
    )
    return total_s / len(breakdowns)


_GroupKey = tuple[str, tuple[int, ...], Collective | None, int]
# Ends of one collective differ over the ranks by no more, less the difference of their clocks.
_SAME_END_S = 3e-5
_SAME_SHARE = 0.8  # of the calls whose ends must agree
_MIN_CALLS = 5  # fewer agree by chance


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
    """The lengths and ends of one rank's calls over a group; a `key` of None: of which is unknown.

    `op` and `kernel` say what they are.
    """

    key: _GroupKey | None
    op: Collective | None
    kernel: str
    comm: CommClass
    lengths_s: Floats
    ends_s: Floats


def measure_rank_skew(
    captures: Sequence[Capture], breakdowns: Sequence[Breakdown], layout: Layout | None = None
) -> RankSkew | None:
    """Compare the ranks of a job; None for one rank.

    The k-th calls of a group are the same collective. Its shortest kernel is that of the rank that
    came last, so what the others take longer is waiting. Where the groups are not recorded, ranks
    with as many calls whose ends agree are a group.
    """
    if len(captures) < 2:
        return None
    compute_s = np.array([breakdown.compute_s for breakdown in breakdowns])
    steps = max(1, *(breakdown.steps for breakdown in breakdowns))
    waiting_s = _waiting_seconds(captures, layout, steps)
    mean_s = compute_s.mean()
    return RankSkew(
        compute_max_over_mean=divide(float(compute_s.max()), float(mean_s), otherwise=1.0),
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
    unnamed: dict[tuple[Collective | None, str, int], list[_RankCalls]] = defaultdict(list)
    for capture in captures:
        for calls in _calls_of_rank(capture, layout):
            if calls.key is None:
                unnamed[calls.op, calls.kernel, len(calls.lengths_s)].append(calls)
                continue
            lengths_s[calls.key].append(calls.lengths_s)
            classes[calls.key] = calls.comm
    for candidates in unnamed.values():
        for number, group in enumerate(_group_by_ends(candidates)):
            name = f"unnamed {number} of {group[0].kernel}"
            unnamed_key: _GroupKey = (name, (), group[0].op, len(group))
            lengths_s[unnamed_key] = [calls.lengths_s for calls in group]
            classes[unnamed_key] = group[0].comm
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


def _group_by_ends(candidates: Sequence[_RankCalls]) -> Iterator[list[_RankCalls]]:
    """Yield groups of ranks whose calls end together, once their clocks are set alike."""
    remaining = list(candidates)
    while remaining:
        first = remaining[0]
        group = [calls for calls in remaining if _end_together(first, calls)] or [first]
        remaining = [calls for calls in remaining if all(calls is not other for other in group)]
        if len(group) > 1:
            yield group


def _end_together(first: _RankCalls, other: _RankCalls) -> bool:
    if len(first.ends_s) < _MIN_CALLS:
        return False
    apart_s = other.ends_s - first.ends_s
    near = np.abs(apart_s - np.median(apart_s)) <= _SAME_END_S
    return bool(near.mean() >= _SAME_SHARE)


def _calls_of_rank(capture: Capture, layout: Layout | None) -> Iterator[_RankCalls]:
    """Yield the calls of each channel."""
    kernels = capture.kernels
    classes = classify_channels(capture, layout)
    for index, channel in enumerate(capture.channels):
        is_named = bool(channel.ranks or channel.group)
        ranks = _ranks_of_channel(channel, capture.rank, layout)
        in_channel = kernels.channel_index == index
        yield _RankCalls(
            key=(channel.group, ranks, channel.op, channel.size) if is_named else None,
            op=channel.op,
            kernel=channel.kernel,
            comm=classes[index].comm,
            lengths_s=kernels.end_s[in_channel] - kernels.start_s[in_channel],
            ends_s=kernels.end_s[in_channel],
        )


def _ranks_of_channel(channel: CommChannel, rank: int, layout: Layout | None) -> tuple[int, ...]:
    if channel.group in GROUPS and layout is not None and rank < layout.world_size:
        return group_ranks(layout, channel.group, rank)
    return channel.ranks
