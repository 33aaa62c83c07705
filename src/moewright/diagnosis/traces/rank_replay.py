"""What a step would take under a change, from the traces of all ranks of a run on CPUs.

A rank works, and it waits: at a collective until the last rank of its group has come and the call
has taken its time, and for a message until it was sent. So a change of one rank reaches the others.
The replay without a change has every wait end where it ended: whether a wait depended on others,
and what the call took after the last of them, is read from the times of the trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from moewright.diagnosis.traces.capture import Capture, KernelKind
from moewright.diagnosis.traces.trace_changes import HOST, NETWORK, TraceChange
from moewright.rules.grid import group_ranks
from moewright.spec.layout import Layout
from moewright.spec.ledger import StepPhase

_PIPELINE = "pp"
_GRADIENTS = ("dp_cp", "edp")
_CLOCK_S = 1e-4  # a thread notices the end of a call so much later
_KINDS = tuple(KernelKind)

Meeting = tuple[str, tuple[int, ...], int]  # a group's name, its ranks, the number of the call


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankItem:
    """A piece of a rank's step: host work before it, then an operation or a wait."""

    start_s: float
    end_s: float
    kind: KernelKind
    group: str = ""
    meeting: Meeting | None = None
    sender: tuple[int, int, int] | None = None  # who sends to whom, and the number of the message
    sends: tuple[tuple[int, int, int], ...] = ()
    backward: tuple[float, float, float] | None = None  # that it could run beside: from, to, share


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
        self._layout = layout
        self._captures = sorted(captures, key=lambda capture: capture.rank)
        self._first_s = min(capture.steps[0][0] for capture in self._captures)
        self._items = [list(self._list_items(capture)) for capture in self._captures]
        self._arrivals = self._find_arrivals()
        self._sent = {
            key: item.start_s for items in self._items for item in items for key in item.sends
        }
        self._message_s = self._measure_messages()

    @property
    def measured_s(self) -> float:
        """The seconds of all steps, from the first rank's begin to the last rank's end."""
        return max(capture.steps[-1][1] for capture in self._captures) - self._first_s

    @property
    def steps(self) -> int:
        """How many steps the traces mark."""
        return len(self._captures[0].steps)

    def _list_items(self, capture: Capture) -> Iterator[_RankItem]:
        """Yield the operations and waits of a rank's steps, those inside of others left out."""
        first_s, last_s = capture.steps[0][0], capture.steps[-1][1]
        table = capture.kernels
        counts: dict[str, int] = defaultdict(int)
        sent: dict[int, int] = defaultdict(int)
        received: dict[int, int] = defaultdict(int)
        messages = [item for item in capture.messages if first_s <= item.moment_s < last_s]
        free_s = first_s
        rows = [
            row
            for row in range(len(table.start_s))
            if first_s <= table.start_s[row] and table.end_s[row] <= last_s
        ]
        reductions = self._find_reductions(capture, rows)
        for row in rows:
            start_s, end_s = float(table.start_s[row]), float(table.end_s[row])
            if start_s < free_s:
                continue
            free_s = end_s
            kind = _KINDS[int(table.kind_index[row])]
            if kind is not KernelKind.COMMUNICATION:
                yield _RankItem(start_s=start_s, end_s=end_s, kind=kind)
                continue
            group = capture.channels[int(table.channel_index[row])].group
            ranks = group_ranks(self._layout, group, capture.rank)
            if group != _PIPELINE:
                meeting = (group, ranks, counts[group])
                counts[group] += 1
                yield _RankItem(
                    start_s=start_s,
                    end_s=end_s,
                    kind=kind,
                    group=group,
                    meeting=meeting,
                    backward=reductions.get(row),
                )
                continue
            sends, sender = [], None
            for message in list(messages):
                peer = ranks[message.peer] if message.peer < len(ranks) else -1
                if message.is_send and start_s <= message.moment_s <= end_s:
                    sends.append((capture.rank, peer, sent[peer]))
                    sent[peer] += 1
                    messages.remove(message)
                elif not message.is_send and message.moment_s <= end_s + _CLOCK_S:
                    sender = (peer, capture.rank, received[peer])
                    received[peer] += 1
                    messages.remove(message)
            yield _RankItem(
                start_s=start_s,
                end_s=end_s,
                kind=kind,
                group=group,
                sender=sender,
                sends=tuple(sends),
            )

    def _find_reductions(
        self, capture: Capture, rows: Sequence[int]
    ) -> dict[int, tuple[float, float, float]]:
        """Return the waits for gradients after each step's last backward, and where it lay.

        The buckets of a group are ready one after the other while the backward runs: the n-th of m
        has seen the share n / m of it. The last of each group is ready at its end.
        """
        ranges = capture.host_ranges
        table = capture.kernels
        answer: dict[int, tuple[float, float, float]] = {}
        if ranges is None or StepPhase.BACKWARD.value not in ranges.names:
            return answer
        backward = ranges.names.index(StepPhase.BACKWARD.value)
        spans = [
            (float(start), float(end))
            for name, start, end in zip(
                ranges.name_index, ranges.start_s, ranges.end_s, strict=True
            )
            if name == backward
        ]
        for begin_s, end_s in capture.steps:
            inside = [span for span in spans if begin_s <= span[0] < end_s]
            if not inside:
                continue
            last = inside[-1]
            waits: dict[str, list[int]] = defaultdict(list)
            for row in rows:
                if last[1] <= table.start_s[row] < end_s and table.channel_index[row] >= 0:
                    waits[capture.channels[int(table.channel_index[row])].group].append(row)
            for group in _GRADIENTS:
                for number, row in enumerate(waits[group]):
                    answer[row] = (*last, (number + 1) / len(waits[group]))
        return answer

    def _find_arrivals(self) -> dict[Meeting, float]:
        """Return when the last rank came to each collective that all of its group came to."""
        came: dict[Meeting, list[float]] = defaultdict(list)
        for items in self._items:
            for item in items:
                if item.meeting is not None:
                    came[item.meeting].append(item.start_s)
        return {
            meeting: max(times) for meeting, times in came.items() if len(times) == len(meeting[1])
        }

    def replay(self, change: TraceChange, shares: Mapping[str, float]) -> float:
        """Return the seconds of all steps under a change.

        `shares` are what a collective of a group takes of its time under another degree.
        """
        runs = [
            _RankRun(items, capture, self, change, shares, capture.steps[0][0] - self._first_s)
            for items, capture in zip(self._items, self._captures, strict=True)
        ]
        board = _Board()
        while any(not run.is_over for run in runs):
            went_on = [run.advance(board) for run in runs]
            if not any(went_on):
                # Calls that not every rank has in its marked steps wait for nobody.
                board.is_open = True
        return max(run.end_s for run in runs)

    def last_arrival(self, meeting: Meeting) -> float | None:
        """Return when the last rank had come to a collective; None: it is not known."""
        return self._arrivals.get(meeting)

    def time_message(self, item: _RankItem) -> float | None:
        """Return what the message took that an item waits for; None: nobody sent it in the steps.

        Of one that was there already it is only known that it took less; it takes what others do.
        """
        sent_s = None if item.sender is None else self._sent.get(item.sender)
        if sent_s is None or item.end_s < sent_s:
            return None
        if item.end_s - item.start_s > _CLOCK_S:
            return item.end_s - sent_s
        return min(item.end_s - sent_s, self._message_s)

    def _measure_messages(self) -> float:
        """Return the median of what messages took that somebody waited for; 0: of none."""
        taken = [
            item.end_s - self._sent[item.sender]
            for items in self._items
            for item in items
            if item.sender in self._sent and item.end_s - item.start_s > _CLOCK_S
        ]
        return median(taken or [0.0])


class _Board:
    """What ranks have told each other: arrivals at collectives, and messages that were sent."""

    def __init__(self) -> None:
        self.arrivals: dict[Meeting, list[float]] = defaultdict(list)
        self.ends: dict[Meeting, float] = {}
        self.sent: dict[tuple[int, int, int], float] = {}
        self.is_open = False


class _RankRun:
    """The walk of one rank through its items, on the clock of the changed step."""

    def __init__(
        self,
        items: Sequence[_RankItem],
        capture: Capture,
        graph: RankGraph,
        change: TraceChange,
        shares: Mapping[str, float],
        start_s: float,
    ) -> None:
        self._items = items
        self._graph = graph
        self._change = change
        self._shares = shares
        self._steps = capture.steps
        self._next = 0
        self._now_s = start_s
        self._was_s = capture.steps[0][0]
        self._arrived = False
        self._link_s = 0.0  # when the exchange of gradients beside a backward is over
        self._clock: list[tuple[float, float]] = [(self._was_s, start_s)]

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

    def _pass(self, item: _RankItem, board: _Board) -> bool:
        if not self._arrived:
            self._now_s += self._scale_host(self._was_s, item.start_s)
            self._was_s = item.start_s
            self._arrived = True
            if item.meeting is not None:
                board.arrivals[item.meeting].append(self._ready_s(item))
            for key in item.sends:
                board.sent[key] = self._now_s
        end_s = self._end_of(item, board)
        if end_s is None:
            return False
        self._now_s, self._was_s = end_s, item.end_s
        self._clock.append((self._was_s, self._now_s))
        return True

    def _end_of(self, item: _RankItem, board: _Board) -> float | None:
        """Return when an item is over; None: others must come first."""
        length_s = item.end_s - item.start_s
        speeds = self._change.speeds
        if item.kind is not KernelKind.COMMUNICATION:
            return self._now_s + length_s / speeds.get(item.kind.value, 1.0)
        speed = speeds.get(NETWORK, 1.0)
        share = self._shares.get(item.group, 1.0)
        if item.sender is not None:
            taken_s = self._graph.time_message(item)
            if taken_s is None:
                return self._now_s + length_s / speed
            if item.sender not in board.sent and not board.is_open:
                return None
            come_s = board.sent.get(item.sender, self._now_s) + taken_s / speed
            return max(self._now_s, come_s)
        last_s = None if item.meeting is None else self._graph.last_arrival(item.meeting)
        if last_s is None or item.meeting is None or item.end_s < last_s - _CLOCK_S:
            return self._now_s + share * length_s / speed  # nobody else was waited for
        arrivals = board.arrivals[item.meeting]
        if len(arrivals) < len(item.meeting[1]) and not board.is_open:
            return None
        taken_s = share * max(0.0, item.end_s - last_s) / speed
        if self._change.has_overlap and item.backward is not None:
            self._link_s = max(self._link_s, max(arrivals)) + taken_s
            return max(self._now_s, self._link_s)
        if share == 0.0:  # a group of one rank
            return self._now_s
        return max(self._now_s, max(arrivals) + taken_s)

    def _ready_s(self, item: _RankItem) -> float:
        """Return when a collective can begin: where the rank is, or inside of its last backward."""
        if not (self._change.has_overlap and item.backward is not None):
            return self._now_s
        begin_s, end_s, share = item.backward
        return self._time_of(begin_s + share * (end_s - begin_s))

    def _time_of(self, moment_s: float) -> float:
        """Return the changed clock at a moment of the trace that has passed."""
        before = self._clock[0]
        for was_s, now_s in reversed(self._clock):
            if was_s <= moment_s:
                before = (was_s, now_s)
                break
        return before[1] + moment_s - before[0]

    def _scale_host(self, begin_s: float, end_s: float) -> float:
        """Return what host work between two moments takes."""
        length_s = max(0.0, end_s - begin_s)
        if self._change.has_graphs and any(
            first_s <= begin_s and end_s <= last_s for first_s, last_s in self._steps
        ):
            return 0.0
        return length_s / self._change.speeds.get(HOST, 1.0)
