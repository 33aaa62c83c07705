"""Errors of predicted speeds over parts of a table, and what choosing by the predictions costs.

Errors of predicted speeds over parts of a table: by what rows state, and by publisher. A mean over
easy rows says little about the hard ones, so a score names all of these.

Tables replayed as choices: what taking the layout that is predicted best would have cost. A search
picks where the model errs on the fast side, so its pick is worse, and further from its prediction,
than rows at large (the winner's curse). Only measured layouts can be picked here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp, expm1, log
from statistics import fmean

import numpy as np

from moewright.calibration.measured_row import MeasuredRow, RowStatement
from moewright.codec import format_layout
from moewright.cost.constants import Constants
from moewright.cost.evidence import (
    JOIN,
    error_covariance,
    expected_optimism,
    list_choices,
    step_bound,
    step_deviation,
    tail_width,
)
from moewright.spec.plan import DEFAULT_RULE
from moewright.spec.units import divide, mention

# Intervals of predictions: how wide they have to be, and how many measurements they cover.
#
# A prediction has a standard deviation of its logarithm. Left-out residuals over these tell how
# many deviations hold 80 and 95 % of the measurements; they have heavier tails than a normal
# variable.

Interval = tuple[float, float]
_FEWEST = 20  # residuals of other groups below which the widths of a Student's t are taken


@dataclass(frozen=True, kw_only=True, slots=True)
class Widths:
    """How many standard deviations on either side hold 80 and 95 % of the measurements."""

    width_80: float
    width_95: float

    def intervals(self, value: float, log_sd: float) -> tuple[Interval, Interval]:
        """Return the 80 and the 95 % interval of a value."""
        narrow, wide = (exp(width * log_sd) for width in (self.width_80, self.width_95))
        return (value / narrow, value * narrow), (value / wide, value * wide)


HEAVY_TAILS = Widths(width_80=tail_width(0.8), width_95=tail_width(0.95))


@dataclass(frozen=True, kw_only=True, slots=True)
class Residual:
    """A residual over its standard deviation, of a row of a group of rows left out together.

    `kind` tells rows apart whose deviations are of other things, such as complete statements and
    those that leave switches open.
    """

    group: Hashable
    score: float
    kind: Hashable = None


def widths_without(residuals: Sequence[Residual], group: Hashable, kind: Hashable = None) -> Widths:
    """Return the widths that the residuals of all other groups ask for.

    They are those of the same kind where there are enough of them. Groups weigh as the square root
    of their rows, since rows of one share their error.
    """
    others = [residual for residual in residuals if residual.group != group]
    alike = [residual for residual in others if residual.kind == kind]
    if len(alike) >= _FEWEST:
        others = alike
    if len(others) < _FEWEST:
        return HEAVY_TAILS
    counts: dict[Hashable, int] = {}
    for residual in others:
        counts[residual.group] = counts.get(residual.group, 0) + 1
    sizes = np.array([abs(residual.score) for residual in others])
    weights = np.array([counts[residual.group] ** -0.5 for residual in others])
    order = np.argsort(sizes)
    reached = np.cumsum(weights[order]) / weights.sum()
    width_80, width_95 = (float(np.interp(share, reached, sizes[order])) for share in (0.8, 0.95))
    return Widths(width_80=width_80, width_95=width_95)


def covered_share(pairs: Sequence[tuple[float, Interval | None]]) -> float | None:
    """Return the share of measurements inside their intervals; None where there are none."""
    inside = [bounds[0] <= value <= bounds[1] for value, bounds in pairs if bounds is not None]
    return float(np.mean(inside)) if inside else None


MIN_LAYOUTS = 3  # of a group whose rank correlation says anything


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedPair:
    """A measured row with the tokens/s/device that are measured and predicted, and intervals."""

    row: MeasuredRow
    measured: float
    predicted: float
    interval_80: Interval | None = None
    interval_95: Interval | None = None


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
    """How well the layouts of one model on one device are ranked.

    `regret` is how much slower the layout predicted best is than the best.
    """

    model: str
    hardware: str
    layouts: int
    rank_correlation: float
    regret: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitScore:
    """The score of a part of the rows: `by` says what tells them apart, `name` which part it is.

    Coverages are the shares of measurements inside their 80 and 95 % intervals. Rank correlation
    and regret are means over the groups of the part. All are None where there is nothing to count.
    """

    by: str
    name: str
    speeds: SpeedErrors
    coverage_80: float | None
    coverage_95: float | None
    groups: int
    rank_correlation: float | None
    regret: float | None


def split_scores(pairs: Sequence[SpeedPair]) -> Iterator[SplitScore]:
    """Yield the scores of MoE and dense rows: of all, by what is stated, and by publisher."""
    for family in ("moe", "dense"):
        own = [pair for pair in pairs if (pair.row.model.moe is not None) == (family == "moe")]
        if not own:
            continue
        yield _score_split(family, "all", own)
        for kind in RowStatement:
            part = [pair for pair in own if pair.row.kind is kind]
            if part:
                yield _score_split(f"{family}, stated", kind.value, part)
        for publisher in sorted({pair.row.publisher for pair in own}):
            part = [pair for pair in own if pair.row.publisher == publisher]
            yield _score_split(f"{family}, publisher", publisher, part)


def _score_split(by: str, name: str, pairs: Sequence[SpeedPair]) -> SplitScore:
    groups = tuple(score_groups(pairs))
    return SplitScore(
        by=by,
        name=name,
        speeds=_errors_of(pairs),
        coverage_80=covered_share([(pair.measured, pair.interval_80) for pair in pairs]),
        coverage_95=covered_share([(pair.measured, pair.interval_95) for pair in pairs]),
        groups=len(groups),
        rank_correlation=fmean(group.rank_correlation for group in groups) if groups else None,
        regret=fmean(group.regret for group in groups) if groups else None,
    )


def speed_errors(pairs: Sequence[SpeedPair]) -> SpeedErrors | None:
    """Return the errors of the rows; None where there are none."""
    return _errors_of(pairs) if pairs else None


def _errors_of(pairs: Sequence[SpeedPair]) -> SpeedErrors:
    ratios = [pair.predicted / pair.measured for pair in pairs]
    errors = np.abs(np.array(ratios) - 1)
    return SpeedErrors(
        rows=len(ratios),
        median_error=float(np.median(errors)),
        mean_error=float(errors.mean()),
        p90_error=float(np.quantile(errors, 0.9)),
        bias=fmean(ratios) - 1,
    )


def score_groups(pairs: Iterable[SpeedPair]) -> Iterator[GroupScore]:
    """Score groups of at least MIN_LAYOUTS layouts.

    Runs of one layout are averaged, whatever their release.
    """
    speeds_by_group: dict[tuple[str, str], dict[object, list[tuple[float, float]]]] = {}
    for pair in pairs:
        speeds = speeds_by_group.setdefault(pair.row.group, {})
        speeds.setdefault(_layout_key(pair.row), []).append((pair.measured, pair.predicted))
    for (model, hardware), speeds in sorted(speeds_by_group.items()):
        if len(speeds) < MIN_LAYOUTS:
            continue
        measured = [fmean(speed for speed, _ in both) for both in speeds.values()]
        expected = [fmean(speed for _, speed in both) for both in speeds.values()]
        picked = measured[max(range(len(expected)), key=expected.__getitem__)]
        yield GroupScore(
            model=model,
            hardware=hardware,
            layouts=len(speeds),
            rank_correlation=rank_correlation(measured, expected),
            regret=1 - picked / max(measured),
        )


def _layout_key(row: MeasuredRow) -> tuple[object, ...]:
    """Return what makes two runs of a group the same."""
    workload = row.workload
    return (
        row.layout,
        workload.precision,
        workload.seq_len,
        workload.global_batch,
        row.model.mtp_layers,
    )


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation, equal values sharing their mean rank.

    It is 0 when one side does not vary.
    """
    a = _ranks(first)
    b = _ranks(second)
    a = a - a.mean()
    b = b - b.mean()
    scale = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return divide(float((a * b).sum()), scale)


def _ranks(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    array = np.array(values)
    _, index, counts = np.unique(array, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    # The mean of the places that equal values take.
    ranks: np.ndarray[tuple[int], np.dtype[np.float64]] = (last - (counts - 1) / 2)[index]
    return ranks


MIN_CHOICES = 5  # layouts of one job that make a choice
_MIN_PICKED_FROM = 2  # layouts of one job whose pick tells of a bias


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
class PickBias:
    """How far predictions of picks are off, in the mean over jobs of two measured layouts or more.

    All are predicted over measured speeds less 1, by means of logarithms: `error` of the pick,
    `job_error` of all layouts of its job, and `expected` what a search says a pick from so many is
    off by (cost.evidence.expected_optimism). The pick's own bias is the error over that of its job.
    """

    name: str
    jobs: int
    error: float
    job_error: float
    expected: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceSummary:
    """The choices of a table, with their means; errors are absolute."""

    jobs: tuple[ChoiceScore, ...]
    regret_by_prediction: float
    regret_by_bound: float
    error_by_prediction: float
    error_by_bound: float
    biases: tuple[PickBias, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Option:
    """A layout of a job: speeds are means over its runs, `log_error` is that of its prediction.

    `unproven` are its choices, and pairs of them, that no run of another job made.
    """

    layout: str
    row: MeasuredRow
    choices: tuple[str, ...]
    unproven: tuple[str, ...]
    measured: float
    predicted: float
    bound: float

    @property
    def log_error(self) -> float:
        return log(self.predicted / self.measured)


def score_choices(pairs: Sequence[SpeedPair]) -> ChoiceSummary | None:
    """Replay every job of at least MIN_CHOICES layouts; None where there is none."""
    replayed = _list_options(pairs)
    jobs = tuple(
        ChoiceScore(
            job=job,
            layouts=len(options),
            by_prediction=_judge(max(options, key=lambda option: option.predicted), options),
            by_bound=_judge(max(options, key=lambda option: option.bound), options),
        )
        for job, options in replayed.items()
        if len(options) >= MIN_CHOICES
    )
    if not jobs:
        return None
    return ChoiceSummary(
        jobs=jobs,
        regret_by_prediction=fmean(job.by_prediction.regret for job in jobs),
        regret_by_bound=fmean(job.by_bound.regret for job in jobs),
        error_by_prediction=fmean(abs(job.by_prediction.error) for job in jobs),
        error_by_bound=fmean(abs(job.by_bound.error) for job in jobs),
        biases=tuple(_measure_biases(list(replayed.values()))),
    )


def _list_options(pairs: Sequence[SpeedPair]) -> dict[str, list[_Option]]:
    """Return the layouts of each job, sorted by job."""
    made = _MadeChoices([pair.row for pair in pairs])
    by_job: dict[str, dict[str, list[int]]] = {}
    for place, pair in enumerate(pairs):
        layouts = by_job.setdefault(_describe_job(pair), {})
        layouts.setdefault(format_layout(pair.row.layout), []).append(place)
    options = {}
    for job, layouts in sorted(by_job.items()):
        # What the job's own rows measured is not known when it is planned.
        own = [place for places in layouts.values() for place in places]
        unproven = made.list_unproven([places[0] for places in layouts.values()], own)
        options[job] = [
            _join_runs(layout, [pairs[place] for place in places], made.rows[places[0]], missing)
            for (layout, places), missing in zip(layouts.items(), unproven, strict=True)
        ]
    return options


class _MadeChoices:
    """The choices of measured rows, and which of a row's no row outside its job made."""

    def __init__(self, rows: Sequence[MeasuredRow]) -> None:
        self.rows = [list_choices(row.job, row.hardware) for row in rows]
        self._names = sorted({name for names in self.rows for name in names})
        made = [[name in set(names) for name in self._names] for names in self.rows]
        self._made = np.array(made, dtype=float).reshape(len(self.rows), len(self._names))
        self._counts = self._made.T @ self._made

    def list_unproven(self, places: Sequence[int], own: Sequence[int]) -> Iterator[tuple[str, ...]]:
        """Yield the choices and pairs of rows that none but their `own` rows made."""
        counts = self._counts - self._made[own].T @ self._made[own]
        has_run = counts.diagonal() > 0
        for place in places:
            chosen = np.flatnonzero(self._made[place])
            missing = [self._names[name] for name in chosen if not has_run[name]]
            pairs = [
                f"{self._names[first]}{JOIN}{self._names[second]}"
                for first, second in combinations(chosen, 2)
                if has_run[first] and has_run[second] and not counts[first, second]
            ]
            yield (*missing, *pairs)


def _measure_biases(replayed: Sequence[Sequence[_Option]]) -> Iterator[PickBias]:
    """Yield the bias of picks among MoE layouts, among dense ones, and among all."""
    jobs = [options for options in replayed if len(options) >= _MIN_PICKED_FROM]
    of_moe = [options for options in jobs if options[0].row.model.moe is not None]
    of_dense = [options for options in jobs if options[0].row.model.moe is None]
    for name, part in (("moe", of_moe), ("dense", of_dense), ("all", jobs)):
        if part:
            picks = [max(options, key=lambda option: option.predicted) for options in part]
            job_errors = [fmean(option.log_error for option in options) for options in part]
            yield PickBias(
                name=name,
                jobs=len(part),
                error=expm1(fmean(pick.log_error for pick in picks)),
                job_error=expm1(fmean(job_errors)),
                expected=expm1(fmean(_expect_optimism(options) for options in part)),
            )


def _expect_optimism(options: Sequence[_Option]) -> float:
    covariance = error_covariance(
        [option.choices for option in options],
        [option.unproven for option in options],
        Constants(options[0].row.hardware),
    )
    # Seconds a token: optimism is that of a step.
    return expected_optimism([1 / option.predicted for option in options], covariance)


def _describe_job(pair: SpeedPair) -> str:
    """Return what the layouts of a choice have in common."""
    row = pair.row
    workload = row.workload
    mtp = mention(", {} MTP", row.model.mtp_layers)
    return (
        f"{row.model.name}, {row.model.layers} layers{mtp} on {row.hardware.count} x "
        f"{row.hardware.name}, {workload.precision.value}, sequence {workload.seq_len}, "
        f"global batch {workload.global_batch}"
    )


def _join_runs(
    layout: str, runs: Sequence[SpeedPair], choices: tuple[str, ...], unproven: tuple[str, ...]
) -> _Option:
    row = runs[0].row
    pairs = sum(JOIN in name for name in unproven)
    missing = (len(unproven) - pairs, pairs)
    deviation = float(step_deviation(Constants(row.hardware), *missing))
    predicted = fmean(run.predicted for run in runs)
    return _Option(
        layout=layout,
        row=row,
        choices=choices,
        unproven=unproven,
        measured=fmean(run.measured for run in runs),
        predicted=predicted,
        bound=predicted / float(step_bound(1.0, deviation, DEFAULT_RULE.risk)),
    )


def _judge(pick: _Option, options: Iterable[_Option]) -> Pick:
    best = max(option.measured for option in options)
    return Pick(
        layout=pick.layout,
        regret=1 - pick.measured / best,
        error=pick.predicted / pick.measured - 1,
    )
