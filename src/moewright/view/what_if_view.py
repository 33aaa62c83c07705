"""What a layout would do with one option of its job changed: devices, network, precision."""

from __future__ import annotations

from dataclasses import dataclass

from moewright.spec.record import Record, Row


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIfPoint:
    """A value in place of the job's own, and what the layout does with it.

    `value` is that of the address. `rule` says why there is no figure, "" where there is one.
    """

    label: str
    value: str
    is_own: bool
    tokens_per_s_per_device: float = 0.0
    step_s: float = 0.0
    peak_bytes: int = 0
    verdict: str = ""
    rule: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIfAxis:
    """The values of one option of the job, in their order; `key` is that of the address."""

    title: str
    key: str
    points: tuple[WhatIfPoint, ...]


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class WhatIfView(Record):
    """A layout around its own point, an option at a time."""

    axes: tuple[WhatIfAxis, ...]

    def title(self) -> str:
        """Return the options."""
        return ", ".join(axis.title for axis in self.axes)

    def to_rows(self) -> list[Row]:
        """Return a row for each value."""
        return [
            {"option": axis.title, "value": point.label, "step_s": point.step_s}
            for axis in self.axes
            for point in axis.points
        ]
