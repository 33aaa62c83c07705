"""Plans side by side: one line about each, or their parts in columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moewright.codec import format_layout
from moewright.codec.layout_words import describe_layout
from moewright.spec.errors import BadInput, Reason
from moewright.spec.plan import Estimate, Plan
from moewright.spec.record import Record, Row
from moewright.spec.units import GIB


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PlanComparison(Record):
    """Plans side by side: time by part and memory by component, a column each."""

    plans: tuple[Plan, ...]

    def title(self) -> str:
        """Return the layout of each plan, and what the table shows."""
        layouts = [
            f"plan {number}: {describe_layout(plan.layout).sentence}\n"
            f"  {format_layout(plan.layout)}"
            for number, plan in enumerate(self.plans, 1)
        ]
        return "\n".join((*layouts, "seconds by part, GiB by component"))

    def to_rows(self) -> list[Row]:
        """Return a row for each part of the step and each component of memory."""
        estimates = [plan.estimate for plan in self.plans]
        step_s = [estimate.step_s for estimate in estimates]
        peaks = [estimate.peak_bytes / GIB for estimate in estimates]
        verdicts = [estimate.verdict.value for estimate in estimates]
        parts = [{share.part: share.seconds for share in item.shares} for item in estimates]
        components = [_component_bytes(estimate) for estimate in estimates]
        rows = [_build_row("step, s", step_s)]
        # Plans need not have the same parts: those of any, in the order of the first.
        for part in dict.fromkeys(part for shares in parts for part in shares):
            rows.append(_build_row(f"{part}, s", [shares.get(part, 0.0) for shares in parts]))
        rows.append(_build_row("peak, GiB", peaks))
        for component in dict.fromkeys(name for sizes in components for name in sizes):
            sizes_gib = [sizes.get(component, 0) / GIB for sizes in components]
            rows.append(_build_row(f"{component}, GiB", sizes_gib))
        rows.append(_build_row("verdict", verdicts))
        return rows


def _build_row(quantity: str, values: Sequence[object]) -> Row:
    """Return the row of one quantity, with a column for each plan."""
    columns = {f"plan {number}": value for number, value in enumerate(values, 1)}
    return {"quantity": quantity} | columns


def _component_bytes(estimate: Estimate) -> dict[str, int]:
    """Return the bytes of the fullest pipeline rank by component."""
    totals: dict[str, int] = {}
    for ledger in estimate.ledgers:
        if ledger.pp_rank == estimate.peak_rank:
            for row in ledger.memory:
                totals[row.component] = totals.get(row.component, 0) + row.bytes
    return totals


def summarize_plan(plan: Plan) -> Row:
    """Return one line about a plan: layout, step, speed, memory, verdict."""
    estimate = plan.estimate
    return {
        "layout": format_layout(plan.layout),
        "step_s": estimate.step_s,
        "tokens_per_s_per_device": estimate.tokens_per_s_per_device,
        "tflops_per_device": estimate.tflops_per_device,
        "mfu": estimate.mfu,
        "peak_GiB": estimate.peak_bytes / GIB,
        "margin_GiB": estimate.margin_bytes / GIB,
        "verdict": estimate.verdict.value,
    }


def compare(*plans: Plan) -> PlanComparison:
    """Put plans side by side: time by part, memory by component, verdict.

    Example:
        >>> import moewright as mw
        >>> a = mw.estimate("Qwen3-30B-A3B", "ep8", on="8xH100")
        >>> b = mw.estimate("Qwen3-30B-A3B", "tp2,ep8", on="8xH100")
        >>> mw.compare(a, b).to_rows()[0]["quantity"]
        'step, s'
    """
    if not plans:
        raise BadInput(Reason(field="plans", rule="at least one plan is needed"))
    return PlanComparison(plans=plans)
