"""How much of the expert exchange has work to run beside it: that of another micro-batch, or of
shared experts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moewright.cost.op_time import OpRow
from moewright.spec.hardware import Op
from moewright.spec.layout import Layout, Overlap

TimedRows = Sequence[tuple[OpRow, float]]

# Rows between dispatch and combine; the others come before the dispatch.
EXPERT_ROW_NAMES = ("experts", "sort_received")
# A product of the backward whose weight gradient is never put off.
NEVER_DELAYED = "at_once"
# The seconds of gradients with respect to weights: half of each product of the backward, and their
# sums.
_PRODUCTS = (Op.GEMM, Op.GROUPED_GEMM)


@dataclass(frozen=True, kw_only=True, slots=True)
class CoveredTime:
    """Seconds of the exchange of one layer, forward and backward, that work covers."""

    forward_s: float
    backward_s: float


def weight_gradient_s(rows: Iterable[tuple[OpRow, float]]) -> float:
    """Seconds of the backward rows that weight gradients take where they may come later: half of
    each product, and their accumulation.
    """
    total = 0.0
    for row, seconds in rows:
        if row.name.endswith(NEVER_DELAYED):
            continue
        if row.op in _PRODUCTS:
            total += seconds / 2
        elif row.name.endswith("gradient_sum"):
            total += seconds
    return total


def covered_exchange(
    layout: Layout, forward: TimedRows, backward: TimedRows, ep_forward: float, ep_backward: float
) -> CoveredTime:
    """By the overlap that the layout chooses; an exchange is half dispatch and half combine.

    Beside another micro-batch all of an exchange counts as covered, as the share of it that hides
    is fitted to runs; delayed weight gradients add to that what they change in the windows.
    """
    if Overlap.EP in layout.overlap:
        gained = CoveredTime(forward_s=0.0, backward_s=0.0)
        if Overlap.WGRAD in layout.overlap:
            gained = _gained(forward, backward, ep_forward / 2, ep_backward / 2)
        return CoveredTime(
            forward_s=ep_forward + gained.forward_s, backward_s=ep_backward + gained.backward_s
        )
    if Overlap.SHARED in layout.overlap:
        shared = [
            sum(s for row, s in rows if row.name.startswith("shared"))
            for rows in (forward, backward)
        ]
        return CoveredTime(
            forward_s=min(ep_forward, shared[0]), backward_s=min(ep_backward, shared[1])
        )
    return CoveredTime(forward_s=0.0, backward_s=0.0)


def _gained(forward: TimedRows, backward: TimedRows, there: float, back: float) -> CoveredTime:
    """What more is covered with weight gradients delayed."""
    before, before_back, experts, experts_back = (
        [
            (row, seconds)
            for row, seconds in rows
            if row.name.startswith(EXPERT_ROW_NAMES) == between
        ]
        for between in (False, True)
        for rows in (forward, backward)
    )
    windows = OverlapWindows(
        before_s=_sum(before),
        before_backward_s=_sum(before_back),
        experts_s=_sum(experts),
        experts_backward_s=_sum(experts_back),
    )
    soon = windows.cover(there, back, delayed_s=0.0, delayed_experts_s=0.0)
    later = windows.cover(
        there,
        back,
        delayed_s=weight_gradient_s(before_back),
        delayed_experts_s=weight_gradient_s(experts_back),
    )
    return CoveredTime(
        forward_s=later.forward_s - soon.forward_s, backward_s=later.backward_s - soon.backward_s
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapWindows:
    """Seconds of a layer's work before the dispatch and between dispatch and combine, and of their
    backward."""

    before_s: float
    before_backward_s: float
    experts_s: float
    experts_backward_s: float

    def cover(
        self, forward_s: float, backward_s: float, *, delayed_s: float, delayed_experts_s: float
    ) -> CoveredTime:
        """A forward beside the backward of another micro-batch, layer by layer (docs/formulas.md
        11). The gradient's combine runs beside `ahead`; dispatch, then the gradient's dispatch
        beside the experts' backward, then their forward; combine beside `ahead_back`. A dispatch or
        a combine takes `there` forward and `back` backward.

        Of `ahead_back`, `late` seconds are put off into the next window; of the experts' backward
        the gradient's dispatch does not wait for `late_experts`.
        """
        dispatched = min(forward_s, self.experts_backward_s)
        begins, leaves = (
            max(forward_s, self.experts_backward_s),
            max(forward_s, self.experts_backward_s - delayed_experts_s),
        )
        shown = (
            max(begins + self.experts_s, leaves + backward_s)
            - self.experts_backward_s
            - self.experts_s
        )
        return CoveredTime(
            forward_s=dispatched + min(forward_s, self.before_backward_s - delayed_s),
            backward_s=forward_s
            + backward_s
            - shown
            - dispatched
            + min(backward_s, self.before_s + delayed_s),
        )


def _sum(rows: TimedRows) -> float:
    return sum(seconds for _, seconds in rows)
