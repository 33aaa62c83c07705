"""How well the planner predicts measured runs.

The score has the errors of speeds and peaks, rank correlation and regret of layouts, and verdicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from moewright.calibration.cells import PeakKind
from moewright.calibration.measured_row import MeasuredRow
from moewright.calibration.software_facts import source_facts
from moewright.calibration.splits import (
    GroupScore,
    SpeedErrors,
    SpeedPair,
    SplitScore,
    score_groups,
    speed_errors,
    split_scores,
)
from moewright.calibration.table import MeasurementTable
from moewright.cost.estimate import estimate
from moewright.spec.hardware import Constant
from moewright.spec.ledger import Component
from moewright.spec.plan import Estimate, Verdict
from moewright.spec.units import GB

_NOT_ALLOCATED = (Component.FRAGMENTATION, Component.COMMUNICATION)


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Constants that override those of a row's hardware, and where they come from."""

    constants: tuple[Constant, ...] = ()
    source: str = "the planner's own constants"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRow:
    """A row of the table with what the planner predicts of it.

    Memory is in the unit that the row prints, else the whole device's in GB.
    """

    id: str
    measured_tokens_per_s_per_gpu: float | None = None
    predicted_tokens_per_s_per_gpu: float | None = None
    measured_peak_memory_gb: float | None = None
    predicted_peak_memory_gb: float | None = None
    verdict: Verdict | None = None
    measured_oom: bool = False
    calibration: str = ""
    skipped: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryScore:
    """Errors of peaks over the measured figure, and verdicts.

    Verdicts are counted over rows that ran and over rows stated to run out of memory.
    """

    peaks: int
    median_error: float
    ran: int
    ran_fits: int
    ran_uncertain: int
    out_of_memory: int
    out_of_memory_fits: int
    out_of_memory_uncertain: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreSummary:
    """The score over all rows; a measurement under two ids counts once.

    `complete_speeds` are of the rows whose source states all that decides the speed, and so are
    the groups; `splits` are over all timed rows.
    """

    rows: int
    scored: int
    skipped: int
    all_speeds: SpeedErrors | None
    complete_speeds: SpeedErrors | None
    mean_rank_correlation: float | None
    worst_regret: float | None
    groups: tuple[GroupScore, ...]
    splits: tuple[SplitScore, ...]
    memory: MemoryScore
    contradictions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The score of a table: its summary, and every row."""

    summary: ScoreSummary
    rows: tuple[ScoredRow, ...]


def score_table(
    table: MeasurementTable,
    calibrate: Callable[[MeasuredRow], Calibration] = lambda _: Calibration(),
) -> Score:
    """Predict every row of the table, in its order, under its calibration."""
    skipped = {row.id: ScoredRow(id=row.id, skipped=row.reason) for row in table.skipped}
    predicted = {row.id: _score_row(row, calibrate(row)) for row in table.rows}
    scored = {**skipped, **predicted}
    rows = tuple(scored[row_id] for row_id in dict.fromkeys(table.order))
    return Score(summary=_summarise(table, predicted), rows=rows)


def _score_row(row: MeasuredRow, calibration: Calibration) -> ScoredRow:
    hardware = replace(row.hardware, constants=(*row.hardware.constants, *calibration.constants))
    prediction = estimate(row.model, row.workload, hardware, row.layout)
    at_peak = prediction
    if row.peak_workload != row.workload:
        at_peak = estimate(row.model, row.peak_workload, hardware, row.layout)
    notes = [calibration.source, *row.notes]
    if row.unstated:
        notes.append(f"not stated, taken at the default: {', '.join(row.unstated)}")
    if row.duplicate_of:
        notes.append(f"the same measurement as {row.duplicate_of}")
    verdict = at_peak.verdict
    may_recompute = "recompute_granularity" in row.unstated
    if verdict is Verdict.OOM and may_recompute and not row.oom:
        verdict = Verdict.UNCERTAIN
        notes.append("does not fit without recompute, which may have been on")
    if row.assumed_least:
        least = f"at the least that its source leaves open: {', '.join(row.assumed_least)}"
        if verdict is Verdict.FITS:
            verdict = Verdict.UNCERTAIN
            notes.append(f"would fit {least}")
        else:
            notes.append(f"does not fit even {least}")
    return ScoredRow(
        id=row.id,
        measured_tokens_per_s_per_gpu=row.speed.tokens_per_s_per_device if row.speed else None,
        predicted_tokens_per_s_per_gpu=prediction.tokens_per_s_per_device,
        measured_peak_memory_gb=row.peak.value if row.peak else None,
        predicted_peak_memory_gb=predict_peak(row, at_peak),
        verdict=verdict,
        measured_oom=row.oom,
        calibration="; ".join(notes),
    )


def predict_peak(row: MeasuredRow, prediction: Estimate) -> float:
    """Return the predicted peak of what the row measured, in its unit.

    Without a measured peak it is the whole device's, in GB.
    """
    if row.peak is None:
        return prediction.peak_bytes / GB
    kind = row.peak.kind
    left_out: tuple[Component, ...] = ()
    if kind is PeakKind.RESERVED:
        left_out = (Component.COMMUNICATION,)
    elif kind is not PeakKind.DEVICE:
        left_out = _NOT_ALLOCATED
    rank = -1 if kind is PeakKind.LAST_RANK else prediction.peak_rank
    rows = prediction.ledgers[rank].device_rows
    counted_bytes = float(sum(memory.bytes for memory in rows if memory.component not in left_out))
    if kind is PeakKind.DEVICE:
        counted_bytes += source_facts().device_monitor.extra_bytes
    return counted_bytes / row.peak.unit_bytes


def _summarise(table: MeasurementTable, predicted: dict[str, ScoredRow]) -> ScoreSummary:
    once = [row for row in table.rows if not row.duplicate_of]
    pairs = list(_pair_speeds(once, predicted))
    complete = [pair for pair in pairs if pair.row.is_complete]
    groups = tuple(score_groups(complete))
    mean_rank_correlation = None
    if groups:
        mean_rank_correlation = fmean(group.rank_correlation for group in groups)
    return ScoreSummary(
        rows=len(table.order),
        scored=len(table.rows),
        skipped=len(table.skipped),
        all_speeds=speed_errors(pairs),
        complete_speeds=speed_errors(complete),
        mean_rank_correlation=mean_rank_correlation,
        worst_regret=max((group.regret for group in groups), default=None),
        groups=groups,
        splits=tuple(split_scores(pairs)),
        memory=_score_memory([predicted[row.id] for row in once]),
        contradictions=table.contradictions,
    )


def _pair_speeds(
    rows: Sequence[MeasuredRow], predicted: Mapping[str, ScoredRow]
) -> Iterator[SpeedPair]:
    """Yield the rows that have both speeds."""
    for row in rows:
        scored = predicted[row.id]
        measured = scored.measured_tokens_per_s_per_gpu
        expected = scored.predicted_tokens_per_s_per_gpu
        if measured and expected:
            yield SpeedPair(row=row, measured=measured, predicted=expected)


def _score_memory(rows: Sequence[ScoredRow]) -> MemoryScore:
    errors = [
        abs(row.predicted_peak_memory_gb / row.measured_peak_memory_gb - 1)
        for row in rows
        if row.measured_peak_memory_gb and row.predicted_peak_memory_gb and not row.measured_oom
    ]
    verdicts_ran = [row.verdict for row in rows if not row.measured_oom]
    verdicts_oom = [row.verdict for row in rows if row.measured_oom]
    return MemoryScore(
        peaks=len(errors),
        median_error=median(errors) if errors else 0.0,
        ran=len(verdicts_ran),
        ran_fits=verdicts_ran.count(Verdict.FITS),
        ran_uncertain=verdicts_ran.count(Verdict.UNCERTAIN),
        out_of_memory=len(verdicts_oom),
        out_of_memory_fits=verdicts_oom.count(Verdict.FITS),
        out_of_memory_uncertain=verdicts_oom.count(Verdict.UNCERTAIN),
    )
