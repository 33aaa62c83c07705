"""A budget as pages show it: devices against step time, days and money."""

from __future__ import annotations

from dataclasses import dataclass

from moewright.spec.record import Record, Row


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetPoint:
    """What the tokens take on so many devices; `cost` is 0 without a price.

    `ramp_days` are those of the steps whose batch is below the full one.
    """

    devices: int
    layout: str
    words: str
    step_s: float
    steps: int
    days: float
    days_80: tuple[float, float]
    device_hours: float
    ramp_days: float
    cost: float


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class BudgetView(Record):
    """The points of a budget so far; `price` is the user's, so that costs are assumed.

    `fewest` is the smallest number of devices on which a layout fits as surely as a plan asks for,
    0 while that is not known and -1 where none is up to the largest number that was tried.
    """

    model: str
    device: str
    tokens: int
    tokens_per_step: int
    first_tokens: int  # of the first step, where the batch grows
    price: float
    points: tuple[BudgetPoint, ...]
    without_layout: tuple[int, ...]
    fewest: int
    is_final: bool

    def title(self) -> str:
        """Return model and tokens."""
        return f"{self.model} on {self.tokens:,} tokens"

    def to_rows(self) -> list[Row]:
        """Return a row for each number of devices."""
        return [
            {"devices": point.devices, "days": point.days, "step_s": point.step_s}
            for point in self.points
        ]
