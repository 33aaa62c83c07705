"""A design as a page draws it: its answer, and the figures of shapes for a chart."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from moewright.report.document import Document
from moewright.spec.record import Record, Row


class ShapeRole(StrEnum):
    """What a shape is in a design."""

    CHOSEN = "chosen"
    FRONT = "front"
    PUBLISHED = "published"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapePoint:
    """A shape of a design, with the loss that it is predicted to train to."""

    role: ShapeRole
    name: str
    total: int
    active: int
    tokens: float
    days: float
    loss: float
    interval: tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class DesignView(Record):
    """The answer of a design, and its shapes beside published models of about the same size."""

    document: Document
    points: tuple[ShapePoint, ...]

    def title(self) -> str:
        """Return the heading of the answer."""
        return str(self.document.heading)

    def to_rows(self) -> list[Row]:
        """Return a row for each shape."""
        return [
            {"role": point.role.value, "name": point.name, "total": point.total, "loss": point.loss}
            for point in self.points
        ]
