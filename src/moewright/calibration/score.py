"""How well the planner predicts measured runs.

The score has the errors of speeds and peaks, rank correlation and regret of layouts, and verdicts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot, log
from statistics import fmean, median
from types import MappingProxyType

import numpy as np

from moewright.calibration.cells import PeakKind
from moewright.calibration.measured_row import MeasuredRow, RowStatement
from moewright.calibration.software_facts import source_facts
from moewright.calibration.splits import (
    HEAVY_TAILS,
    ChoiceSummary,
    GroupScore,
    Interval,
    Residual,
    SpeedErrors,
    SpeedPair,
    SplitScore,
    Widths,
    covered_share,
    score_choices,
    score_groups,
    speed_errors,
    split_scores,
    widths_without,
)
from moewright.calibration.table import MeasurementTable
from moewright.cost.estimate import estimate
from moewright.spec.hardware import Constant
from moewright.spec.ledger import Component
from moewright.spec.plan import Estimate, Verdict
from moewright.spec.record import Record, Row
from moewright.spec.units import GB

_NOT_ALLOCATED = (Component.FRAGMENTATION, Component.COMMUNICATION)
# Of the logarithm of a peak, besides what an estimate says of the runtime's overhead.
_PEAK_MODEL_SD: Mapping[RowStatement, float] = MappingProxyType(
    {
        RowStatement.COMPLETE: 0.04,
        RowStatement.UNSTATED: 0.10,
        RowStatement.NATURAL: 0.10,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Constants that override those of a row's hardware, and what they predict of a timed row.

    `step_s` is over all readings of the row, and `log_sd` the standard deviation of its logarithm;
    None where the estimate of the row itself says it. `group` tells the rows that were left out
    together, whose intervals are as wide as the residuals of the others ask for; None where nothing
    was left out. A row that is not to be scored has a reason in `skipped`.
    """

    constants: tuple[Constant, ...] = ()
    source: str = "the planner's own constants"
    step_s: float | None = None
    log_sd: float | None = None
    group: Hashable = None
    skipped: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRow:
    """A row of the table with what the planner predicts of it.

    Memory is in the unit that the row prints, else the whole device's in GB. Intervals hold 80 and
    95 % of the measurements; of speeds they are in tokens/s, of peaks in the unit of the peak.
    """

    id: str
    publisher: str = ""
    stated: str = ""
    measured_tokens_per_s_per_gpu: float | None = None
    predicted_tokens_per_s_per_gpu: float | None = None
    measured_peak_memory_gb: float | None = None
    predicted_peak_memory_gb: float | None = None
    verdict: Verdict | None = None
    measured_oom: bool = False
    interval_80: Interval | None = None
    interval_95: Interval | None = None
    peak_interval_80: Interval | None = None
    peak_interval_95: Interval | None = None
    calibration: str = ""
    skipped: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryScore:
    """Errors of peaks over the measured figure, and verdicts.

    Verdicts are counted over rows that ran and over rows stated to run out of memory.
    """

    peaks: int
    median_error: float
    p90_error: float
    coverage_80: float | None
    coverage_95: float | None
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
    choices: ChoiceSummary | None  # None where no job of the table has enough layouts
    memory: MemoryScore
    contradictions: tuple[str, ...]
    lone_devices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Score(Record):
    """The score of a table: its summary, and every row."""

    summary: ScoreSummary
    rows: tuple[ScoredRow, ...]

    def title(self) -> str:
        """Return how many rows are scored, and how far their speeds are off."""
        text = f"{self.summary.scored} of {self.summary.rows} rows are scored"
        speeds = self.summary.all_speeds
        if speeds is None:
            return text
        return (
            f"{text}: error of speeds {speeds.median_error:.1%} median, {speeds.p90_error:.1%} p90"
        )

    def to_rows(self) -> list[Row]:
        """Return every row of the table with what is predicted of it."""
        return [
            {
                "id": row.id,
                "publisher": row.publisher,
                "measured_tokens_per_s_per_gpu": row.measured_tokens_per_s_per_gpu,
                "predicted_tokens_per_s_per_gpu": row.predicted_tokens_per_s_per_gpu,
                "measured_peak_memory_gb": row.measured_peak_memory_gb,
                "predicted_peak_memory_gb": row.predicted_peak_memory_gb,
                "verdict": row.verdict,
                "measured_oom": row.measured_oom,
                "skipped": row.skipped,
            }
            for row in self.rows
        ]


def score_table(
    table: MeasurementTable,
    calibrate: Callable[[MeasuredRow], Calibration] = lambda _: Calibration(),
) -> Score:
    """Predict every row of the table, in its order, under its calibration."""
    skipped = {row.id: ScoredRow(id=row.id, skipped=row.reason) for row in table.skipped}
    calibrations = {row.id: calibrate(row) for row in table.rows}
    for row in table.rows:
        if calibrations[row.id].skipped:
            skipped[row.id] = ScoredRow(id=row.id, skipped=calibrations[row.id].skipped)
    used = [row for row in table.rows if row.id not in skipped]
    points = [_predict(row, calibrations[row.id]) for row in used]
    predicted = {row.id: row for row in _add_intervals(points)}
    scored = {**skipped, **predicted}
    rows = tuple(scored[row_id] for row_id in dict.fromkeys(table.order))
    return Score(summary=_summarise(table, used, predicted), rows=rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class _PredictedRow:
    """A row with its predictions, before it has intervals.

    `kind` says what its source states, and whether its model has experts.
    """

    scored: ScoredRow
    group: Hashable
    kind: Hashable
    log_sd: float
    peak_log_sd: float


def _add_intervals(points: Sequence[_PredictedRow]) -> Iterator[ScoredRow]:
    """Yield the rows with intervals, as wide as residuals of other groups ask for."""
    speeds = [residual for point in points for residual in _speed_residuals(point)]
    peaks = [residual for point in points for residual in _peak_residuals(point)]
    widths: dict[Hashable, tuple[Widths, Widths]] = {}
    for point in points:
        key = point.group, point.kind
        if point.group is None:
            widths[key] = HEAVY_TAILS, HEAVY_TAILS
        elif key not in widths:
            widths[key] = (
                widths_without(speeds, point.group, point.kind),
                widths_without(peaks, point.group),
            )
        scored = point.scored
        speed_widths, peak_widths = widths[key]
        tokens = scored.predicted_tokens_per_s_per_gpu or 0.0
        peak = scored.predicted_peak_memory_gb or 0.0
        interval_80, interval_95 = speed_widths.intervals(tokens, point.log_sd)
        peak_interval_80, peak_interval_95 = peak_widths.intervals(peak, point.peak_log_sd)
        yield replace(
            scored,
            interval_80=interval_80,
            interval_95=interval_95,
            peak_interval_80=peak_interval_80,
            peak_interval_95=peak_interval_95,
        )


def _speed_residuals(point: _PredictedRow) -> Iterator[Residual]:
    measured = point.scored.measured_tokens_per_s_per_gpu
    predicted = point.scored.predicted_tokens_per_s_per_gpu
    if measured and predicted:
        score = log(predicted / measured) / point.log_sd
        yield Residual(group=point.group, score=score, kind=point.kind)


def _peak_residuals(point: _PredictedRow) -> Iterator[Residual]:
    measured = point.scored.measured_peak_memory_gb
    predicted = point.scored.predicted_peak_memory_gb
    if measured and predicted and not point.scored.measured_oom:
        yield Residual(group=point.group, score=log(predicted / measured) / point.peak_log_sd)


def _predict(row: MeasuredRow, calibration: Calibration) -> _PredictedRow:
    hardware = replace(row.hardware, constants=(*row.hardware.constants, *calibration.constants))
    prediction = estimate(row.model, row.workload, hardware, row.layout)
    tokens_per_s = prediction.tokens_per_s_per_device
    if calibration.step_s is not None:
        # The speed of the estimate, at the step over all readings.
        tokens_per_s *= prediction.step_s / calibration.step_s
    return _PredictedRow(
        scored=_score_row(row, calibration, prediction, tokens_per_s),
        group=calibration.group,
        kind=(row.kind, row.model.moe is not None),
        log_sd=calibration.log_sd or prediction.step_sd,
        peak_log_sd=_peak_log_sd(row, prediction),
    )


def _peak_log_sd(row: MeasuredRow, prediction: Estimate) -> float:
    """Return the standard deviation of the logarithm of a predicted peak."""
    spreads = [_PEAK_MODEL_SD[row.kind], prediction.peak_sd_bytes / prediction.peak_bytes]
    if row.peak is not None and row.peak.kind is PeakKind.DEVICE:
        spreads.append(source_facts().device_monitor.extra_bytes_sd / prediction.peak_bytes)
    return hypot(*spreads)


def _may_fit(row: MeasuredRow, prediction: Estimate) -> bool:
    """Return whether a run that ran may have fitted, though its prediction is over the capacity.

    Cells that it leaves open may have saved memory, whatever their reading says. Where the load of
    its experts alone is open, that is one standard deviation. A row out of memory is read at the
    least that it leaves open instead.
    """
    if row.kind is RowStatement.COMPLETE or row.oom:
        return False
    if set(row.unstated) - {"expert_load"}:
        return True
    spread_bytes = _peak_log_sd(row, prediction) * prediction.peak_bytes
    return -prediction.margin_bytes < spread_bytes


def _score_row(
    row: MeasuredRow, calibration: Calibration, at_peak: Estimate, tokens_per_s: float
) -> ScoredRow:
    notes = [calibration.source, *row.notes]
    if row.unstated:
        readings = f", {len(row.readings)} readings" if len(row.readings) > 1 else ""
        notes.append(f"not stated, inferred: {', '.join(row.unstated)}{readings}")
    if row.duplicate_of:
        notes.append(f"the same measurement as {row.duplicate_of}")
    verdict = at_peak.verdict
    may_recompute = "recompute_granularity" in row.unstated
    if verdict is Verdict.OOM and may_recompute and not row.oom:
        verdict = Verdict.UNCERTAIN
        notes.append("does not fit without recompute, which may have been on")
    elif verdict is Verdict.OOM and _may_fit(row, at_peak):
        verdict = Verdict.UNCERTAIN
        notes.append("over the capacity, which what the row leaves open may change")
    if row.assumed_least:
        least = f"at the least that its source leaves open: {', '.join(row.assumed_least)}"
        if verdict is Verdict.FITS:
            verdict = Verdict.UNCERTAIN
            notes.append(f"would fit {least}")
        else:
            notes.append(f"does not fit even {least}")
    return ScoredRow(
        id=row.id,
        publisher=row.publisher,
        stated=row.kind.value,
        measured_tokens_per_s_per_gpu=row.speed.tokens_per_s_per_device if row.speed else None,
        predicted_tokens_per_s_per_gpu=tokens_per_s,
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


def _summarise(
    table: MeasurementTable, used: Sequence[MeasuredRow], predicted: Mapping[str, ScoredRow]
) -> ScoreSummary:
    once = [row for row in used if not row.duplicate_of]
    pairs = list(_pair_speeds(once, predicted))
    complete = [pair for pair in pairs if pair.row.is_complete]
    groups = tuple(score_groups(complete))
    mean_rank_correlation = None
    if groups:
        mean_rank_correlation = fmean(group.rank_correlation for group in groups)
    return ScoreSummary(
        rows=len(table.order),
        scored=len(used),
        skipped=len(table.order) - len(used),
        all_speeds=speed_errors(pairs),
        complete_speeds=speed_errors(complete),
        mean_rank_correlation=mean_rank_correlation,
        worst_regret=max((group.regret for group in groups), default=None),
        groups=groups,
        splits=tuple(split_scores(pairs)),
        choices=score_choices(pairs),
        memory=_score_memory([predicted[row.id] for row in once]),
        contradictions=table.contradictions,
        lone_devices=table.lone_devices,
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
            yield SpeedPair(
                row=row,
                measured=measured,
                predicted=expected,
                interval_80=scored.interval_80,
                interval_95=scored.interval_95,
            )


def _score_memory(rows: Sequence[ScoredRow]) -> MemoryScore:
    peaks = [
        row
        for row in rows
        if row.measured_peak_memory_gb and row.predicted_peak_memory_gb and not row.measured_oom
    ]
    errors = [
        abs((row.predicted_peak_memory_gb or 0.0) / (row.measured_peak_memory_gb or 1.0) - 1)
        for row in peaks
    ]
    verdicts_ran = [row.verdict for row in rows if not row.measured_oom]
    verdicts_oom = [row.verdict for row in rows if row.measured_oom]
    return MemoryScore(
        peaks=len(errors),
        median_error=median(errors or [0.0]),
        p90_error=float(np.quantile(errors or [0.0], 0.9)),
        coverage_80=covered_share(
            [(row.measured_peak_memory_gb or 0.0, row.peak_interval_80) for row in peaks]
        ),
        coverage_95=covered_share(
            [(row.measured_peak_memory_gb or 0.0, row.peak_interval_95) for row in peaks]
        ),
        ran=len(verdicts_ran),
        ran_fits=verdicts_ran.count(Verdict.FITS),
        ran_uncertain=verdicts_ran.count(Verdict.UNCERTAIN),
        out_of_memory=len(verdicts_oom),
        out_of_memory_fits=verdicts_oom.count(Verdict.FITS),
        out_of_memory_uncertain=verdicts_oom.count(Verdict.UNCERTAIN),
    )
