"""The part of the expert exchange (dispatch and combine) that other work covers.

The work is that of another micro-batch, or of shared experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moewright.cost.time.gemm_rows import NEVER_DELAYED
from moewright.cost.time.op_time import OpRow, TimedRows
from moewright.spec.hardware import Op
from moewright.spec.layout import Layout, Overlap

# How the names of rows between dispatch and combine begin; the others come before the dispatch.
EXPERT_ROW_NAMES = ("experts", "sort_received")
_PRODUCTS = (Op.GEMM, Op.GROUPED_GEMM)


@dataclass(frozen=True, kw_only=True, slots=True)
class CoveredTime:
    """Seconds of the exchange of one layer, forward and backward, that other work covers."""

    forward_s: float
    backward_s: float


def weight_gradient_s(rows: Iterable[tuple[OpRow, float]]) -> float:
    """Return the seconds of backward rows that weight gradients take where they can be delayed.

    These are half of each product, and the accumulation of the gradients.
    """
    total_s = 0.0
    for row, seconds in rows:
        if row.name.endswith(NEVER_DELAYED):
            continue
        if row.op in _PRODUCTS:
            total_s += seconds / 2
        elif row.name.endswith("gradient_sum"):
            total_s += seconds
    return total_s


def covered_exchange(
    layout: Layout,
    forward: TimedRows,
    backward: TimedRows,
    ep_forward_s: float,
    ep_backward_s: float,
    *,
    delayed_share: float = 1.0,
) -> CoveredTime:
    """Return what the layout's overlap covers of the exchange of a layer with these rows.

    An exchange is half dispatch and half combine. Beside another micro-batch all of it counts as
    covered, because the share that is really hidden is a constant fitted to runs
    (`ep_overlap_hidden`); delayed weight gradients add `delayed_share` of what they would gain in
    the overlap windows.
    """
    if Overlap.EP in layout.overlap:
        if Overlap.WGRAD not in layout.overlap:
            return CoveredTime(forward_s=ep_forward_s, backward_s=ep_backward_s)
        gain = _delay_gain(forward, backward, ep_forward_s / 2, ep_backward_s / 2)
        return CoveredTime(
            forward_s=ep_forward_s + delayed_share * gain.forward_s,
            backward_s=ep_backward_s + delayed_share * gain.backward_s,
        )
    if Overlap.SHARED in layout.overlap:
        return CoveredTime(
            forward_s=min(ep_forward_s, _shared_expert_s(forward)),
            backward_s=min(ep_backward_s, _shared_expert_s(backward)),
        )
    return CoveredTime(forward_s=0.0, backward_s=0.0)


def _shared_expert_s(rows: TimedRows) -> float:
    return sum(seconds for row, seconds in rows if row.name.startswith("shared"))


def _delay_gain(
    forward: TimedRows, backward: TimedRows, exchange_s: float, gradient_exchange_s: float
) -> CoveredTime:
    """Return how much more of the exchange is covered where weight gradients are delayed."""
    before, experts = _split_rows(forward)
    before_backward, experts_backward = _split_rows(backward)
    windows = OverlapWindows(
        before_s=_sum_seconds(before),
        before_backward_s=_sum_seconds(before_backward),
        experts_s=_sum_seconds(experts),
        experts_backward_s=_sum_seconds(experts_backward),
    )
    at_once = windows.cover(exchange_s, gradient_exchange_s, delayed_s=0.0, delayed_experts_s=0.0)
    delayed = windows.cover(
        exchange_s,
        gradient_exchange_s,
        delayed_s=weight_gradient_s(before_backward),
        delayed_experts_s=weight_gradient_s(experts_backward),
    )
    return CoveredTime(
        forward_s=delayed.forward_s - at_once.forward_s,
        backward_s=delayed.backward_s - at_once.backward_s,
    )


def _split_rows(rows: TimedRows) -> tuple[TimedRows, TimedRows]:
    """Return the rows before the dispatch, and those between dispatch and combine."""
    before = [row for row in rows if not row[0].name.startswith(EXPERT_ROW_NAMES)]
    experts = [row for row in rows if row[0].name.startswith(EXPERT_ROW_NAMES)]
    return before, experts


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapWindows:
    """Seconds of a layer's work that an exchange can run beside, forward and backward.

    `before_s` is the work before the dispatch, `experts_s` that between dispatch and combine.
    """

    before_s: float
    before_backward_s: float
    experts_s: float
    experts_backward_s: float

    def cover(
        self, forward_s: float, backward_s: float, *, delayed_s: float, delayed_experts_s: float
    ) -> CoveredTime:
        """Return what is covered where a forward runs beside the backward of another micro-batch.

        Both run layer by layer (docs/formulas.md 11), in three windows:

        - the gradient's combine runs beside the forward work before the dispatch;
        - the dispatch, then the gradient's dispatch, run beside the experts' backward, then their
          forward;
        - the combine runs beside the backward of the work before the dispatch.

        A dispatch or a combine takes `forward_s` forward and `backward_s` backward. Of the backward
        of the work before the dispatch, `delayed_s` are put off into the next window; of the
        experts' backward, the gradient's dispatch does not wait for `delayed_experts_s`.
        """
        experts_ready_s = self.experts_backward_s - delayed_experts_s
        forward_starts_s = max(forward_s, self.experts_backward_s)
        gradient_leaves_s = max(forward_s, experts_ready_s)
        window_s = max(forward_starts_s + self.experts_s, gradient_leaves_s + backward_s)
        shown_s = window_s - self.experts_backward_s - self.experts_s
        covered_dispatch_s = min(forward_s, self.experts_backward_s)
        covered_combine_s = min(forward_s, self.before_backward_s - delayed_s)
        covered_gradient_s = forward_s + backward_s - shown_s - covered_dispatch_s
        return CoveredTime(
            forward_s=covered_dispatch_s + covered_combine_s,
            backward_s=covered_gradient_s + min(backward_s, self.before_s + delayed_s),
        )


def _sum_seconds(rows: TimedRows) -> float:
    return sum(seconds for _, seconds in rows)
