"""When the last gradient of a bucket is in, so that it can be reduced while backward goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence


class GradReadyTracker:
    """Calls `full` with the number of each bucket, in the order given, once every gradient of it
    has come.

    How often a gradient comes in a step depends on the timetable (micro-batches, chunks that share
    a table) and not on the data, so it is taken from the step before, as DDP does with a static
    graph; the first step therefore overlaps nothing. The order is the same on all ranks, because
    they have to meet in the collectives: a bucket that is full waits for those before it.
    """

    def __init__(
        self, buckets: Sequence[tuple[int, Sequence[str]]], on_bucket_ready: Callable[[int], None]
    ) -> None:
        self._buckets, self._full = tuple(buckets), on_bucket_ready
        self._place = {name: place for place, (_, names) in enumerate(buckets) for name in names}
        self._micro_batches = 1
        self._came: Counter[str] = Counter()
        self._expected: dict[str, int] = {}
        self._lacking: list[int] = []
        self._next = 0

    def begin_step(self, micro_batches: int) -> None:
        """Start a step of so many micro-batches."""
        self._expected = {
            name: times * micro_batches // self._micro_batches
            for name, times in self._came.items()
            if times % self._micro_batches == 0
        }
        self._micro_batches = micro_batches
        self._came = Counter()
        self._lacking = [len(names) for _, names in self._buckets]
        self._next = 0

    def mark_ready(self, name: str) -> None:
        """One gradient of the parameter was added. Raises RuntimeError if its bucket is gone
        already."""
        place = self._place[name]
        if place < self._next:
            raise RuntimeError(
                f"a gradient of {name} came after its bucket was reduced: run without overlap=grad"
            )
        self._came[name] += 1
        if self._came[name] == self._expected.get(name):
            self._lacking[place] -= 1
            while self._next < len(self._buckets) and not self._lacking[self._next]:
                self._send()

    def flush(self) -> None:
        """All gradients are in: the buckets that are left."""
        while self._next < len(self._buckets):
            self._send()

    def _send(self) -> None:
        number, _ = self._buckets[self._next]
        self._next += 1
        self._full(number)
