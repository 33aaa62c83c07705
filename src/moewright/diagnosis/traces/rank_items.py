"""What a rank of a CPU's run did in its marked steps: operations, begins of collectives, waits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, nan
from statistics import median

from moewright.diagnosis.traces.capture import Capture, KernelKind
from moewright.rules.grid import group_ranks
from moewright.spec.layout import Layout

PIPELINE = "pp"
CLOCK_S = 1e-4  # a thread notices the end of a call so much later
_KINDS = tuple(KernelKind)

Meeting = tuple[str, tuple[int, ...], int]  # a group's name, its ranks, the number of the call


@dataclass(frozen=True, kw_only=True, slots=True)
class RankItem:
    """A piece of a rank's step: host work before it, then an operation, a begin or a wait.

    A begin takes no time; `gradients_s` is when what it sums was there, NaN where that is not told.
    """

    start_s: float
    end_s: float
    kind: KernelKind
    group: str = ""
    meeting: Meeting | None = None
    is_begin: bool = False
    gradients_s: float = nan
    sender: tuple[int, int, int] | None = None  # who sends to whom, and the number of the message
    sends: tuple[tuple[int, int, int], ...] = ()
    message_s: float | None = None  # what the message took; None: nobody sent it in the steps


def list_rank_items(capture: Capture, layout: Layout) -> Iterator[RankItem]:
    """Yield what a rank did in its steps, in order, what lies inside of other items left out.

    A collective whose begin is not marked begins where it is waited for.
    """
    first_s, last_s = capture.steps[0][0], capture.steps[-1][1]
    begins = [
        RankItem(
            start_s=call.begin_s,
            end_s=call.begin_s,
            kind=KernelKind.COMMUNICATION,
            group=call.group,
            is_begin=True,
            gradients_s=call.gradients_s,
        )
        for call in capture.calls
        if first_s <= call.begin_s < last_s
    ]
    begun = {(call.group, call.wait_s): call.begin_s for call in capture.calls}
    rows = []
    for item in _list_rows(capture, layout):
        is_collective = item.kind is KernelKind.COMMUNICATION and item.group != PIPELINE
        if is_collective and (item.group, item.start_s) not in begun:
            begun[item.group, item.start_s] = item.start_s
            begins.append(replace(item, end_s=item.start_s, is_begin=True))
        rows.append(item)
    meetings = _number_meetings(layout, capture.rank, begins)
    free_s = first_s
    for item in sorted((*begins, *rows), key=lambda item: (item.start_s, not item.is_begin)):
        if item.is_begin:
            moment_s = max(item.start_s, free_s)
            meeting = meetings[item.group, item.start_s]
            yield replace(item, start_s=moment_s, end_s=moment_s, meeting=meeting)
            continue
        if item.start_s < free_s:
            continue
        free_s = item.end_s
        begin_s = begun.get((item.group, item.start_s), nan)
        yield replace(item, meeting=meetings.get((item.group, begin_s)))


def _number_meetings(
    layout: Layout, rank: int, begins: Sequence[RankItem]
) -> dict[tuple[str, float], Meeting]:
    """Return the calls by their group and begin; ranks begin those of a group in one order."""
    counts: dict[str, int] = defaultdict(int)
    meetings = {}
    for item in sorted(begins, key=lambda item: item.start_s):
        ranks = group_ranks(layout, item.group, rank)
        meetings[item.group, item.start_s] = (item.group, ranks, counts[item.group])
        counts[item.group] += 1
    return meetings


def _list_rows(capture: Capture, layout: Layout) -> Iterator[RankItem]:
    """Yield the operations and waits of a rank's steps, those inside of others left out."""
    first_s, last_s = capture.steps[0][0], capture.steps[-1][1]
    table = capture.kernels
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    messages = [item for item in capture.messages if first_s <= item.moment_s < last_s]
    free_s = first_s
    for row in range(len(table.start_s)):
        start_s, end_s = float(table.start_s[row]), float(table.end_s[row])
        if start_s < free_s or end_s > last_s:
            continue
        free_s = end_s
        kind = _KINDS[int(table.kind_index[row])]
        if kind is not KernelKind.COMMUNICATION:
            yield RankItem(start_s=start_s, end_s=end_s, kind=kind)
            continue
        group = capture.channels[int(table.channel_index[row])].group
        item = RankItem(start_s=start_s, end_s=end_s, kind=kind, group=group)
        if group != PIPELINE:
            yield item
            continue
        ranks = group_ranks(layout, group, capture.rank)
        sends, sender = [], None
        for message in list(messages):
            peer = ranks[message.peer] if message.peer < len(ranks) else -1
            if message.is_send and start_s <= message.moment_s <= end_s:
                sends.append((capture.rank, peer, sent[peer]))
                sent[peer] += 1
                messages.remove(message)
            elif not message.is_send and message.moment_s <= end_s + CLOCK_S:
                sender = (peer, capture.rank, received[peer])
                received[peer] += 1
                messages.remove(message)
        yield replace(item, sender=sender, sends=tuple(sends))


def time_messages(items: Sequence[Sequence[RankItem]]) -> list[list[RankItem]]:
    """Return the items with what the message took that each waits for.

    Of one that was there already it is only known that it took less; it takes what others do.
    """
    sent = {key: item.start_s for rank in items for item in rank for key in item.sends}
    waited = [
        item.end_s - sent[item.sender]
        for rank in items
        for item in rank
        if item.sender in sent and item.end_s - item.start_s > CLOCK_S
    ]
    usual_s = median(waited or [0.0])
    answer = []
    for rank in items:
        timed = []
        for item in rank:
            taken_s = nan if item.sender is None else item.end_s - sent.get(item.sender, inf)
            if taken_s >= 0 and item.end_s - item.start_s <= CLOCK_S:
                taken_s = min(taken_s, usual_s)
            timed.append(replace(item, message_s=taken_s if taken_s >= 0 else None))
        answer.append(timed)
    return answer
