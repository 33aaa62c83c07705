"""Tables replayed as choices: what taking the layout that is predicted best would have cost.

A search picks where the model errs on the fast side, so its pick is worse, and further from its
prediction, than rows at large (the winner's curse). Only measured layouts can be picked here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from moewright.calibration.measured_row import MeasuredRow
from moewright.calibration.splits import SpeedPair
from moewright.codec import format_layout
from moewright.cost.constants import Constants
from moewright.cost.evidence import (
    MeasuredChoices,
    count_missing,
    list_choices,
    step_bound,
    step_deviation,
)
from moewright.spec.plan import RankingRule

MIN_CHOICES = 5  # layouts of one job that make a choice


@dataclass(frozen=True, kw_only=True, slots=True)
class Pick:
    """The layout that a ranking picks.

    `regret` is the share of the best measured speed that the pick loses, `error` its predicted over
    its measured speed less 1.
    """

    layout: str
    regret: float
    error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceScore:
    """The picks among the measured layouts of one job.

    `by_prediction` is the one predicted fastest, `by_bound` the one whose speed, undershot in one
    of ten cases, is highest (RankingRule).
    """

    job: str
    layouts: int
    by_prediction: Pick
    by_bound: Pick


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceSummary:
    """The choices of a table, with their means; errors are absolute."""

    jobs: tuple[ChoiceScore, ...]
    regret_by_prediction: float
    regret_by_bound: float
    error_by_prediction: float
    error_by_bound: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Option:
    """A layout of a job: speeds are means over its runs."""

    layout: str
    measured: float
    predicted: float
    bound: float


def score_choices(pairs: Sequence[SpeedPair]) -> ChoiceSummary | None:
    """Replay every job of at least MIN_CHOICES layouts; None where there is none."""
    jobs = tuple(_replay_jobs(pairs))
    if not jobs:
        return None
    return ChoiceSummary(
        jobs=jobs,
        regret_by_prediction=fmean(job.by_prediction.regret for job in jobs),
        regret_by_bound=fmean(job.by_bound.regret for job in jobs),
        error_by_prediction=fmean(abs(job.by_prediction.error) for job in jobs),
        error_by_bound=fmean(abs(job.by_bound.error) for job in jobs),
    )


def _replay_jobs(pairs: Sequence[SpeedPair]) -> Iterator[ChoiceScore]:
    by_job: dict[str, dict[str, list[SpeedPair]]] = {}
    for pair in pairs:
        layouts = by_job.setdefault(_describe_job(pair), {})
        layouts.setdefault(format_layout(pair.row.layout), []).append(pair)
    for job, layouts in sorted(by_job.items()):
        if len(layouts) < MIN_CHOICES:
            continue
        # What the job's own rows measured is not known when it is planned.
        others = count_choices(pair.row for pair in pairs if _describe_job(pair) != job)
        options = [_join_runs(layout, runs, others) for layout, runs in layouts.items()]
        yield ChoiceScore(
            job=job,
            layouts=len(options),
            by_prediction=_judge(max(options, key=lambda option: option.predicted), options),
            by_bound=_judge(max(options, key=lambda option: option.bound), options),
        )


def count_choices(rows: Iterable[MeasuredRow]) -> MeasuredChoices:
    """Count the runs by the choices that they made."""
    counts = Counter(frozenset(list_choices(row.job, row.hardware)) for row in rows)
    return MeasuredChoices(runs=tuple(counts.items()))


def _describe_job(pair: SpeedPair) -> str:
    """Return what the layouts of a choice have in common."""
    row = pair.row
    workload = row.workload
    mtp = f", {row.model.mtp_layers} MTP" if row.model.mtp_layers else ""
    return (
        f"{row.model.name}, {row.model.layers} layers{mtp} on {row.hardware.count} x "
        f"{row.hardware.name}, {workload.precision.value}, sequence {workload.seq_len}, "
        f"global batch {workload.global_batch}"
    )


def _join_runs(layout: str, runs: Sequence[SpeedPair], others: MeasuredChoices) -> _Option:
    row = runs[0].row
    choices = list_choices(row.job, row.hardware)
    missing = count_missing(others.support(choices))
    deviation = float(step_deviation(Constants(row.hardware), *missing))
    predicted = fmean(run.predicted for run in runs)
    return _Option(
        layout=layout,
        measured=fmean(run.measured for run in runs),
        predicted=predicted,
        bound=predicted / float(step_bound(1.0, deviation, RankingRule().risk)),
    )


def _judge(pick: _Option, options: Iterable[_Option]) -> Pick:
    best = max(option.measured for option in options)
    return Pick(
        layout=pick.layout,
        regret=1 - pick.measured / best,
        error=pick.predicted / pick.measured - 1,
    )
