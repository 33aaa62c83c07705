"""What a step would take under a change, from the traces of all ranks of a run on CPUs.

A rank works, begins collectives, and waits: for a collective until the last rank of its group has
begun it and the call has taken its time, behind the call before it on the same link; and for a
message until it was sent. So a change of one rank reaches the others. The replay without a change
has every wait end where it ended: what a call took is read from the waits that it ended.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf, isnan
from statistics import median

from moewright.diagnosis.traces.capture import Capture, KernelKind
from moewright.diagnosis.traces.rank_items import (
    PIPELINE,
    Meeting,
    RankItem,
    list_rank_items,
    time_messages,
)
from moewright.diagnosis.traces.rank_transfers import Transfer, measure_transfers
from moewright.diagnosis.traces.trace_changes import HOST, NETWORK, TraceChange
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import Layout


def can_replay_ranks(captures: Sequence[Capture], layout: Layout) -> bool:
    """Return whether these are the traces of all ranks, each of one thread that computes."""
    ranks = {capture.rank for capture in captures}
    return (
        ranks == set(range(layout.world_size))
        and len(captures) == layout.world_size
        and all(
            capture.device == "CPU" and capture.steps and len(capture.streams) == 1
            for capture in captures
        )
        and len({len(capture.steps) for capture in captures}) == 1
    )


class RankGraph:
    """The work and the waits of all ranks in their marked steps."""

    def __init__(self, captures: Sequence[Capture], layout: Layout) -> None:
        self._captures = sorted(captures, key=lambda capture: capture.rank)
        self._first_s = min(capture.steps[0][0] for capture in self._captures)
        self._items = time_messages(
            [list(list_rank_items(capture, layout)) for capture in self._captures]
        )
        self._transfers = measure_transfers(self._items)

    @property
    def measured_s(self) -> float:
        """The seconds of all steps, from the first rank's begin to the last rank's end."""
        return max(capture.steps[-1][1] for capture in self._captures) - self._first_s

    @property
    def steps(self) -> int:
        """How many steps the traces mark."""
        return len(self._captures[0].steps)

    def time_group(self, group: str) -> float:
        """Return the seconds that a rank's calls over a group took of their link, in all steps."""
        return median(
            sum(transfer.taken_s for meeting, transfer in rank.items() if meeting[0] == group)
            for rank in self._transfers
        )

    def replay(self, change: TraceChange, shares: Mapping[str, float]) -> float:
        """Return the seconds of all steps under a change.

        `shares` are what a collective of a group takes of its time under another degree.

        Raises:
            BadInput: gradients are to be exchanged earlier, and it is not told when they are there.
        """
        if change.has_overlap and all(
            isnan(item.gradients_s) for items in self._items for item in items
        ):
            rule = "is not carried: the traces do not mark when the gradients of a bucket are there"
            nearest = "traces of this version of the engine, without overlap=grad"
            raise BadInput(Reason(field="--what-if overlap", rule=rule, nearest=nearest))
        runs = [
            _RankRun(
                items, transfers, capture.steps, change, shares, capture.steps[0][0] - self._first_s
            )
            for items, transfers, capture in zip(
                self._items, self._transfers, self._captures, strict=True
            )
        ]
        board = _Board()
        while any(not run.is_over for run in runs):
            went_on = [run.advance(board) for run in runs]
            if not any(went_on):
                # Calls that not every rank has in its marked steps wait for nobody.
                board.is_open = True
        return max(run.end_s for run in runs)


class _Board:
    """What ranks have told each other: arrivals at collectives, and messages that were sent."""

    def __init__(self) -> None:
        self.arrivals: dict[Meeting, list[float]] = defaultdict(list)
        self.sent: dict[tuple[int, int, int], float] = {}
        self.is_open = False


class _RankRun:
    """The walk of one rank through its items, on the clock of the changed step."""

    def __init__(
        self,
        items: Sequence[RankItem],
        transfers: Mapping[Meeting, Transfer],
        steps: Sequence[tuple[float, float]],
        change: TraceChange,
        shares: Mapping[str, float],
        start_s: float,
    ) -> None:
        self._items = items
        self._transfers = transfers
        self._change = change
        self._shares = shares
        self._steps = steps
        self._next = 0
        self._now_s = start_s
        self._was_s = steps[0][0]
        self._arrived = False
        self._clock: list[tuple[float, float]] = [(self._was_s, start_s)]
        self._own: dict[Meeting, float] = {}  # when this rank began each call
        self._done: dict[Meeting, float] = {}
        self._reduced_s = 0.0  # when the latest bucket could be reduced

    @property
    def is_over(self) -> bool:
        return self._next == len(self._items)

    @property
    def end_s(self) -> float:
        """When the rank's last step is over."""
        return self._now_s + self._scale_host(self._was_s, self._steps[-1][1])

    def advance(self, board: _Board) -> bool:
        """Go on until another rank must come first; return whether anything was done."""
        begin = self._next
        arrived = self._arrived
        while not self.is_over and self._pass(self._items[self._next], board):
            self._next += 1
            self._arrived = False
        return self._next != begin or arrived != self._arrived

    def _pass(self, item: RankItem, board: _Board) -> bool:
        if not self._arrived:
            self._now_s += self._scale_host(self._was_s, item.start_s)
            self._was_s = item.start_s
            self._clock.append((self._was_s, self._now_s))
            self._arrived = True
            if item.is_begin and item.meeting is not None:
                self._own[item.meeting] = self._ready_s(item)
                board.arrivals[item.meeting].append(self._own[item.meeting])
            for key in item.sends:
                board.sent[key] = self._now_s
        end_s = self._now_s if item.is_begin else self._end_of(item, board)
        if end_s is None:
            return False
        self._now_s, self._was_s = end_s, item.end_s
        self._clock.append((self._was_s, self._now_s))
        return True

    def _end_of(self, item: RankItem, board: _Board) -> float | None:
        """Return when an item is over; None: others must come first."""
        length_s = item.end_s - item.start_s
        speeds = self._change.speeds
        if item.kind is not KernelKind.COMMUNICATION:
            return self._now_s + length_s / speeds.get(item.kind.value, 1.0)
        speed = speeds.get(NETWORK, 1.0)
        if item.group == PIPELINE:
            if item.message_s is None or item.sender is None:
                return self._now_s + length_s / speed
            if item.sender not in board.sent and not board.is_open:
                return None
            come_s = board.sent.get(item.sender, self._now_s) + item.message_s / speed
            return max(self._now_s, come_s)
        share = self._shares.get(item.group, 1.0)
        if share == 0.0:  # a group of one rank
            return self._now_s
        if item.meeting is None or item.meeting not in self._transfers:
            return self._now_s + share * length_s / speed  # nobody else was waited for
        done_s = self._finish(item.meeting, board)
        if done_s is None:
            return None
        transfer = self._transfers[item.meeting]
        if transfer.is_awaited:
            return max(self._now_s, done_s + transfer.after_s)
        return max(self._now_s + transfer.after_s, done_s)

    def _finish(self, meeting: Meeting, board: _Board) -> float | None:
        """Return when a call is over on this rank, behind those before it; None: not known yet."""
        if meeting in self._done:
            return self._done[meeting]
        waiting = [meeting]
        while (behind := self._transfers[waiting[-1]].behind) is not None:
            if behind in self._done:
                break
            waiting.append(behind)
        for call in reversed(waiting):
            transfer = self._transfers[call]
            share = self._shares.get(call[0], 1.0)
            arrivals = board.arrivals[call] if share else [self._own[call]]
            if len(arrivals) < len(call[1]) and share and not board.is_open:
                return None
            begin_s = max(arrivals)
            if transfer.behind is not None:
                begin_s = max(begin_s, self._done[transfer.behind])
            taken_s = share * transfer.taken_s / self._change.speeds.get(NETWORK, 1.0)
            self._done[call] = begin_s + taken_s
        return self._done[meeting]

    def _ready_s(self, item: RankItem) -> float:
        """Return when a collective can begin: where the rank is, or once its gradients are there.

        Buckets are reduced in one order: one that is ready waits for those before it.
        """
        if not self._change.has_overlap or isnan(item.gradients_s):
            return self._now_s
        self._reduced_s = max(self._reduced_s, self._time_of(item.gradients_s))
        return min(self._now_s, self._reduced_s)

    def _time_of(self, moment_s: float) -> float:
        """Return the changed clock at a moment of the trace that has passed."""
        place = bisect_right(self._clock, (moment_s, inf))
        before_s, now_s = self._clock[max(0, place - 1)]
        if place == len(self._clock):
            return now_s
        after_s, next_s = self._clock[place]
        return now_s + (moment_s - before_s) / (after_s - before_s) * (next_s - now_s)

    def _scale_host(self, begin_s: float, end_s: float) -> float:
        """Return what host work between two moments takes."""
        length_s = max(0.0, end_s - begin_s)
        if self._change.has_graphs and any(
            first_s <= begin_s and end_s <= last_s for first_s, last_s in self._steps
        ):
            return 0.0
        return length_s / self._change.speeds.get(HOST, 1.0)
