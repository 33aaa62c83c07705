"""A watched run as a page draws it: its state, and the latest steps beside the plan's band."""

from __future__ import annotations

from dataclasses import dataclass

from moewright.diagnosis.run_watch import RunWatch
from moewright.report.document import Document
from moewright.spec.record import Record, Row


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class WatchView(Record):
    """The state of a run: as a terminal tells it, and the record that it is told of."""

    document: Document
    watch: RunWatch

    def title(self) -> str:
        """Return the step, the speed, and how many alarms there are."""
        return self.watch.title()

    def to_rows(self) -> list[Row]:
        """Return a row for each alarm."""
        return self.watch.to_rows()
