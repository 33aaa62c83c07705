"""The moment when the last gradient of a bucket is ready, so that it is reduced under backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence


class GradReadyTracker:
    """A tracker that calls `on_bucket_ready` with the number of each bucket, in the order given.

    It does so once every gradient of the bucket is ready. How often a gradient comes in a step
    depends on the timetable (micro-batches, chunks that share a table) and not on the data, so it
    is taken from the step before, as DDP does with a static graph; the first step therefore
    overlaps nothing. The order is the same on all ranks, because they have to meet in the
    collectives: a bucket that is ready waits for those before it.
    """

    def __init__(
        self,
        buckets: Sequence[tuple[int, Sequence[str]]],
        on_bucket_ready: Callable[[int], None],
    ) -> None:
        self._buckets = tuple(buckets)
        self._on_bucket_ready = on_bucket_ready
        self._position = {
            name: position for position, (_, names) in enumerate(buckets) for name in names
        }
        self._micro_batches = 1
        self._ready_counts: Counter[str] = Counter()
        self._expected_counts: dict[str, int] = {}
        self._missing: list[int] = []  # gradients that each bucket still waits for
        self._next = 0

    def begin_step(self, micro_batches: int) -> None:
        """Start a step of so many micro-batches."""
        # The counts of the step before, scaled to so many micro-batches. A parameter whose count
        # cannot be scaled has no expected count, and its bucket waits for `flush`.
        self._expected_counts = {
            name: count * micro_batches // self._micro_batches
            for name, count in self._ready_counts.items()
            if count % self._micro_batches == 0
        }
        self._micro_batches = micro_batches
        self._ready_counts = Counter()
        self._missing = [len(names) for _, names in self._buckets]
        self._next = 0

    def mark_ready(self, name: str) -> None:
        """Note that one gradient of a parameter was added.

        Raises:
            RuntimeError: if its bucket is reduced already.
        """
        position = self._position[name]
        if position < self._next:
            raise RuntimeError(
                f"a gradient of {name} came after its bucket was reduced: run without overlap=grad"
            )
        self._ready_counts[name] += 1
        if self._ready_counts[name] == self._expected_counts.get(name):
            self._missing[position] -= 1
            while self._next < len(self._buckets) and not self._missing[self._next]:
                self._report_next()

    def flush(self) -> None:
        """Report the buckets that are left: all gradients are ready."""
        while self._next < len(self._buckets):
            self._report_next()

    def _report_next(self) -> None:
        number, _ = self._buckets[self._next]
        self._next += 1
        self._on_bucket_ready(number)
