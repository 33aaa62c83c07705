"""How well the planner predicts measured runs: error, rank correlation, regret, memory,
verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import numpy as np

from moewright.calibration.table import MeasuredRow, MeasurementTable, PeakKind
from moewright.cost.estimate import estimate
from moewright.spec.hardware import Constant
from moewright.spec.ledger import Component
from moewright.spec.plan import Estimate, Verdict
from moewright.spec.units import GB

MIN_LAYOUTS = 3  # of a group whose rank correlation says anything
_NOT_ALLOCATED = (Component.FRAGMENTATION, Component.COMMUNICATION)


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Constants for one row that win over its hardware's own, and where they come from."""

    constants: tuple[Constant, ...] = ()
    source: str = "the planner's own constants"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRow:
    """A row of the table and what the planner says of it; memory in the unit the row prints (else
    GB, whole device)."""

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
class SpeedErrors:
    """Errors of predicted tokens/s over some rows, as shares of the measured figure."""

    rows: int
    median_error: float
    mean_error: float
    p90_error: float
    bias: float  # mean of predicted / measured - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupScore:
    """Layouts of one model on one device. `regret`: how much slower the layout predicted best is
    than the best."""

    model: str
    hardware: str
    layouts: int
    rank_correlation: float
    regret: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryScore:
    """Peaks, as errors over the measured figure, and verdicts: over rows that ran and rows stated
    out of memory."""

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
    """`complete`: rows whose source states all that decides the speed; a measurement under two ids
    counts once."""

    rows: int
    scored: int
    skipped: int
    all_speeds: SpeedErrors | None
    complete_speeds: SpeedErrors | None
    mean_rank_correlation: float | None
    worst_regret: float | None
    groups: tuple[GroupScore, ...]
    memory: MemoryScore
    contradictions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    summary: ScoreSummary
    rows: tuple[ScoredRow, ...]


def score_table(
    table: MeasurementTable,
    calibrate: Callable[[MeasuredRow], Calibration] = lambda _: Calibration(),
) -> Score:
    """Every row of the table, in its order, predicted under its calibration."""
    skipped = {row.id: ScoredRow(id=row.id, skipped=row.reason) for row in table.skipped}
    predicted = {row.id: _predicted(row, calibrate(row)) for row in table.rows}
    rows = tuple({**skipped, **predicted}[row_id] for row_id in dict.fromkeys(table.order))
    return Score(summary=_summary(table, predicted), rows=rows)


def _predicted(row: MeasuredRow, calibration: Calibration) -> ScoredRow:
    hardware = replace(row.hardware, constants=(*row.hardware.constants, *calibration.constants))
    found = estimate(row.model, row.workload, hardware, row.layout)
    said = [calibration.source, *row.notes]
    if row.unstated:
        said.append(f"not stated, taken at the default: {', '.join(row.unstated)}")
    if row.duplicate_of:
        said.append(f"the same measurement as {row.duplicate_of}")
    verdict = found.verdict
    if verdict is Verdict.OOM and "recompute_granularity" in row.unstated and not row.oom:
        verdict = Verdict.UNCERTAIN
        said.append("does not fit without recompute, which may have been on")
    if verdict is Verdict.FITS and row.assumed_least:
        verdict = Verdict.UNCERTAIN
        said.append(
            f"would fit at the least that its source leaves open: {', '.join(row.assumed_least)}"
        )
    elif row.assumed_least:
        said.append(
            f"does not fit even at the least that its source leaves open: {', '.join(row.assumed_least)}"
        )
    return ScoredRow(
        id=row.id,
        measured_tokens_per_s_per_gpu=row.speed.tokens_per_s_per_device if row.speed else None,
        predicted_tokens_per_s_per_gpu=found.tokens_per_s_per_device,
        measured_peak_memory_gb=row.peak.value if row.peak else None,
        predicted_peak_memory_gb=predict_peak(row, found),
        verdict=verdict,
        measured_oom=row.oom,
        calibration="; ".join(said),
    )


def predict_peak(row: MeasuredRow, predicted: Estimate) -> float:
    """The predicted peak of what the row measured, in its unit; without a measured peak, the whole
    device in GB."""
    if row.peak is None:
        return predicted.peak_bytes / GB
    kind = row.peak.kind
    beyond: tuple[Component, ...] = ()
    if kind is PeakKind.RESERVED:
        beyond = (Component.COMMUNICATION,)
    elif kind is not PeakKind.DEVICE:
        beyond = _NOT_ALLOCATED
    ledger = predicted.ledgers[-1 if kind is PeakKind.LAST_RANK else predicted.peak_rank]
    return (
        sum(one.bytes for one in ledger.device_rows if one.component not in beyond)
        / row.peak.unit_bytes
    )


def _summary(table: MeasurementTable, predicted: dict[str, ScoredRow]) -> ScoreSummary:
    once = [row for row in table.rows if not row.duplicate_of]
    full = [row for row in once if row.is_complete]
    groups = tuple(_groups(full, predicted))
    return ScoreSummary(
        rows=len(table.order),
        scored=len(table.rows),
        skipped=len(table.skipped),
        all_speeds=_speeds(predicted[row.id] for row in once),
        complete_speeds=_speeds(predicted[row.id] for row in full),
        mean_rank_correlation=fmean(one.rank_correlation for one in groups) if groups else None,
        worst_regret=max((one.regret for one in groups), default=None),
        groups=groups,
        memory=_memory([predicted[row.id] for row in once]),
        contradictions=table.contradictions,
    )


def _speeds(rows: Iterable[ScoredRow]) -> SpeedErrors | None:
    ratios = [
        row.predicted_tokens_per_s_per_gpu / row.measured_tokens_per_s_per_gpu
        for row in rows
        if row.measured_tokens_per_s_per_gpu and row.predicted_tokens_per_s_per_gpu
    ]
    if not ratios:
        return None
    errors = np.abs(np.array(ratios) - 1)
    return SpeedErrors(
        rows=len(ratios),
        median_error=float(np.median(errors)),
        mean_error=float(errors.mean()),
        p90_error=float(np.quantile(errors, 0.9)),
        bias=fmean(ratios) - 1,
    )


def _groups(rows: Sequence[MeasuredRow], predicted: dict[str, ScoredRow]) -> Iterable[GroupScore]:
    """Groups of at least three layouts; runs of one layout are averaged, whatever their release."""
    by_group: dict[tuple[str, str], dict[object, list[tuple[float, float]]]] = {}
    for row in rows:
        one = predicted[row.id]
        if one.measured_tokens_per_s_per_gpu and one.predicted_tokens_per_s_per_gpu:
            work = row.workload
            layout = (
                row.layout,
                work.precision,
                work.seq_len,
                work.global_batch,
                row.model.mtp_layers,
            )
            pair = one.measured_tokens_per_s_per_gpu, one.predicted_tokens_per_s_per_gpu
            by_group.setdefault(row.group, {}).setdefault(layout, []).append(pair)
    for (model, hardware), layouts in sorted(by_group.items()):
        if len(layouts) < MIN_LAYOUTS:
            continue
        measured = [fmean(m for m, _ in pairs) for pairs in layouts.values()]
        expected = [fmean(p for _, p in pairs) for pairs in layouts.values()]
        picked = measured[max(range(len(expected)), key=expected.__getitem__)]
        yield GroupScore(
            model=model,
            hardware=hardware,
            layouts=len(layouts),
            rank_correlation=rank_correlation(measured, expected),
            regret=1 - picked / max(measured),
        )


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: the correlation of ranks, equal values sharing their mean rank; 0 when one side
    does not vary."""
    a, b = _ranks(first), _ranks(second)
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / scale if scale else 0.0


def _ranks(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    array = np.array(values)
    _, place, counts = np.unique(array, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: np.ndarray[tuple[int], np.dtype[np.float64]] = (last - (counts - 1) / 2)[place]
    return ranks


def _memory(rows: Sequence[ScoredRow]) -> MemoryScore:
    errors = [
        abs(row.predicted_peak_memory_gb / row.measured_peak_memory_gb - 1)
        for row in rows
        if row.measured_peak_memory_gb and row.predicted_peak_memory_gb and not row.measured_oom
    ]
    ran = [row.verdict for row in rows if not row.measured_oom]
    out = [row.verdict for row in rows if row.measured_oom]
    return MemoryScore(
        peaks=len(errors),
        median_error=median(errors) if errors else 0.0,
        ran=len(ran),
        ran_fits=ran.count(Verdict.FITS),
        ran_uncertain=ran.count(Verdict.UNCERTAIN),
        out_of_memory=len(out),
        out_of_memory_fits=out.count(Verdict.FITS),
        out_of_memory_uncertain=out.count(Verdict.UNCERTAIN),
    )
