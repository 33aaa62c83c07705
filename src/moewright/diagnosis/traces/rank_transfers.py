"""What collectives took on each rank of a CPU's run, from the waits that they ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median

from moewright.diagnosis.traces.rank_items import CLOCK_S, Meeting, RankItem

_GRADIENTS = ("dp_cp", "edp")  # which share a link


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """What a collective took on a rank, behind which call of its link (None: behind none).

    `is_awaited`: the rank was kept waiting, and went on `after_s` behind its end. Where all was
    there already the wait itself took so long.
    """

    taken_s: float
    behind: Meeting | None
    is_awaited: bool
    after_s: float


@dataclass(slots=True)
class _SeenTimes:
    """What calls took whose waits blocked: the least of each over its ranks, and all of a group.

    `most` holds those of a group behind calls of which it is not known when they were over, so that
    they may have taken less.
    """

    of_call: dict[Meeting, float] = field(default_factory=dict)
    of_group: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    most: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, meeting: Meeting, taken_s: float, *, is_exact: bool) -> None:
        if is_exact:
            self.of_call[meeting] = min(self.of_call.get(meeting, inf), taken_s)
            self.of_group[meeting[0]].append(taken_s)
        else:
            self.most[meeting[0]].append(taken_s)

    def guess(self, meeting: Meeting) -> float:
        """Return what a call took that nobody on this rank waited for."""
        group = meeting[0]
        if group in self.of_group:
            usual_s = median(self.of_group[group])
        else:
            usual_s = min(self.most.get(group) or [0.0])
        return max(0.0, self.of_call.get(meeting, usual_s))


def measure_transfers(items: Sequence[Sequence[RankItem]]) -> list[Mapping[Meeting, Transfer]]:
    """Return what each collective took on each rank that waited for it.

    A wait that did not block tells only that the call took less: it takes what it took on a rank
    that did wait, else what others of its group do. A call that not all of its group began in the
    steps, or that ended for some before others came, is left out.
    """
    came: dict[Meeting, list[float]] = defaultdict(list)
    for rank in items:
        for item in rank:
            if item.is_begin and item.meeting is not None:
                came[item.meeting].append(item.start_s)
    arrivals = {
        meeting: max(times) for meeting, times in came.items() if len(times) == len(meeting[1])
    }
    seen = _SeenTimes()
    for rank in items:
        for call in _walk_calls(rank, arrivals, _SeenTimes()):
            if call.transfer.is_awaited:
                seen.add(call.meeting, call.transfer.taken_s, is_exact=call.is_exact)
    return [
        {call.meeting: call.transfer for call in _walk_calls(rank, arrivals, seen)}
        for rank in items
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _WalkedCall:
    """A call on a rank; `is_exact`: it is known when those before it were over."""

    meeting: Meeting
    transfer: Transfer
    is_exact: bool


def _walk_calls(
    items: Sequence[RankItem], arrivals: Mapping[Meeting, float], seen: _SeenTimes
) -> Iterator[_WalkedCall]:
    """Yield a rank's calls in the order of their begins.

    Calls of a link follow each other: one is over before those that were begun later. So a wait
    that began behind the end of a later call's has kept nobody, however long it was.
    """
    latest: dict[str, _LinkEnd] = {}
    for meeting, wait, by_s in _bound_ends(items, arrivals):
        last_s = arrivals[meeting]
        before = latest.get(_link_of(meeting), _NO_CALL)
        if by_s < before.end_s - CLOCK_S:
            before = _NO_CALL
        free_s = max(last_s, before.end_s)
        is_awaited = by_s > wait.start_s and (
            wait.end_s - wait.start_s > CLOCK_S or last_s > wait.start_s
        )
        taken_s = by_s - free_s
        if not is_awaited:
            taken_s = min(max(0.0, min(by_s, wait.start_s) - free_s), seen.guess(meeting))
        end_s = free_s + taken_s
        yield _WalkedCall(
            meeting=meeting,
            transfer=Transfer(
                taken_s=taken_s,
                behind=before.meeting,
                is_awaited=is_awaited,
                after_s=wait.end_s - end_s if is_awaited else wait.end_s - wait.start_s,
            ),
            is_exact=is_awaited and before.most_s <= max(last_s, before.end_s),
        )
        most_s = end_s if is_awaited else max(end_s, min(by_s, wait.start_s))
        latest[_link_of(meeting)] = _LinkEnd(meeting=meeting, end_s=end_s, most_s=most_s)


def _bound_ends(
    items: Sequence[RankItem], arrivals: Mapping[Meeting, float]
) -> list[tuple[Meeting, RankItem, float]]:
    """Return the calls that were waited for, in the order of begins, and when each was over.

    That is when its wait was over at the latest, or that of a later call of its link.
    """
    waits: dict[Meeting, RankItem] = {}
    for item in items:
        if item.meeting is not None and not item.is_begin:
            waits.setdefault(item.meeting, item)
    begun = [item.meeting for item in items if item.is_begin and item.meeting in waits]
    ends_s: dict[str, float] = {}
    answer = []
    for meeting in reversed(begun):
        if meeting is None or waits[meeting].end_s < arrivals.get(meeting, inf) - CLOCK_S:
            continue
        link = _link_of(meeting)
        end_s = min(waits[meeting].end_s, ends_s.get(link, inf))
        if end_s < arrivals[meeting]:
            end_s = waits[meeting].end_s
        ends_s[link] = end_s
        answer.append((meeting, waits[meeting], end_s))
    return answer[::-1]


def _link_of(meeting: Meeting) -> str:
    return _GRADIENTS[0] if meeting[0] in _GRADIENTS else meeting[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class _LinkEnd:
    """The last call of a link, when it was over, and when at the latest."""

    meeting: Meeting | None
    end_s: float
    most_s: float


_NO_CALL = _LinkEnd(meeting=None, end_s=-inf, most_s=-inf)
