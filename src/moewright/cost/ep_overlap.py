"""How much of the expert exchange has work to run beside it: that of another micro-batch, or of
shared experts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moewright.cost.op_time import OpRow
from moewright.spec.hardware import Op
from moewright.spec.layout import Layout, Overlap

Seconds = Sequence[tuple[OpRow, float]]

# Rows between dispatch and combine; the others come before the dispatch.
BETWEEN = ("experts", "sort_received")
# A product of the backward whose weight gradient is never put off.
AT_ONCE = "at_once"
# The seconds of gradients with respect to weights: half of each product of the backward, and their
# sums.
_PRODUCTS = (Op.GEMM, Op.GROUPED_GEMM)


@dataclass(frozen=True, kw_only=True, slots=True)
class Covered:
    """Seconds of the exchange of one layer, forward and backward, that work covers."""

    forward: float
    backward: float


def weights_s(rows: Iterable[tuple[OpRow, float]]) -> float:
    """Seconds of the backward rows that weight gradients take where they may come later: half of
    each product, and their accumulation.
    """
    total = 0.0
    for row, seconds in rows:
        if row.name.endswith(AT_ONCE):
            continue
        if row.op in _PRODUCTS:
            total += seconds / 2
        elif row.name.endswith("gradient_sum"):
            total += seconds
    return total


def covered(
    layout: Layout, forward: Seconds, backward: Seconds, ep_forward: float, ep_backward: float
) -> Covered:
    """By the overlap that the layout chooses; an exchange is half dispatch and half combine.

    Beside another micro-batch all of an exchange counts as covered, as the share of it that hides
    is fitted to runs; delayed weight gradients add to that what they change in the windows.
    """
    if Overlap.EP in layout.overlap:
        gained = Covered(forward=0.0, backward=0.0)
        if Overlap.WGRAD in layout.overlap:
            gained = _gained(forward, backward, ep_forward / 2, ep_backward / 2)
        return Covered(forward=ep_forward + gained.forward, backward=ep_backward + gained.backward)
    if Overlap.SHARED in layout.overlap:
        shared = [
            sum(s for row, s in rows if row.name.startswith("shared"))
            for rows in (forward, backward)
        ]
        return Covered(forward=min(ep_forward, shared[0]), backward=min(ep_backward, shared[1]))
    return Covered(forward=0.0, backward=0.0)


def _gained(forward: Seconds, backward: Seconds, there: float, back: float) -> Covered:
    """What more is covered with weight gradients delayed."""
    before, before_back, experts, experts_back = (
        [(row, seconds) for row, seconds in rows if row.name.startswith(BETWEEN) == between]
        for between in (False, True)
        for rows in (forward, backward)
    )
    windows = Windows(
        ahead=_sum(before),
        ahead_back=_sum(before_back),
        work=_sum(experts),
        work_back=_sum(experts_back),
    )
    soon = windows.cover(there, back, late=0.0, late_experts=0.0)
    later = windows.cover(
        there, back, late=weights_s(before_back), late_experts=weights_s(experts_back)
    )
    return Covered(forward=later.forward - soon.forward, backward=later.backward - soon.backward)


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """Seconds of a layer's work before the dispatch and between dispatch and combine, and of their
    backward."""

    ahead: float
    ahead_back: float
    work: float
    work_back: float

    def cover(self, there: float, back: float, *, late: float, late_experts: float) -> Covered:
        """A forward beside the backward of another micro-batch, layer by layer (docs/formulas.md
        11). The gradient's combine runs beside `ahead`; dispatch, then the gradient's dispatch
        beside the experts' backward, then their forward; combine beside `ahead_back`. A dispatch or
        a combine takes `there` forward and `back` backward.

        Of `ahead_back`, `late` seconds are put off into the next window; of the experts' backward
        the gradient's dispatch does not wait for `late_experts`.
        """
        dispatched = min(there, self.work_back)
        begins, leaves = max(there, self.work_back), max(there, self.work_back - late_experts)
        shown = max(begins + self.work, leaves + back) - self.work_back - self.work
        return Covered(
            forward=dispatched + min(there, self.ahead_back - late),
            backward=there + back - shown - dispatched + min(back, self.ahead + late),
        )


def _sum(rows: Seconds) -> float:
    return sum(seconds for _, seconds in rows)
