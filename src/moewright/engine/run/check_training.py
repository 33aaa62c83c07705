"""Training in a layout beside training in one process: the same job, a few steps, all compared.

Compared are losses, auxiliary losses and gradient norms of every step, the gradients of the first,
and how far every weight has moved after the last. What the two may differ by is measured: one
process trains again from weights that are off by a unit in the last place of their format, and its
distance from itself says what rounding does to each figure. In formats of 16 bits or fewer all runs
take the experts that the first one chose, for rounding would choose others.

What every layout does wrong alike shows in fp32, in one process. It trains once more with each
micro-batch twice in a row: losses and gradients are means over targets and micro-batches, so that
nothing may change, and a division that is left out does. It trains with another value of each
setting (engine.run.checked_settings): something must change, or the setting is lost on its way.
And its losses must fall along each gradient as that says (engine.run.loss_slopes), and its
weights must go where AdamW as it is written takes them (engine.run.checked_update). The layout
trains once more, and is saved, built anew and restored after its first step.

Rounding is across a gradient, and a fault is often along it: one expert's that is too small, a
reduction that leaves a part out. So the size of each gradient's part along the reference is
compared too, of each expert by itself: of n errors about 1/sqrt(n) of their size is left there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import NormalDist, fmean, median

import torch

from moewright.codec import parse_layout
from moewright.engine.data.preflight import check_data
from moewright.engine.run.checked_runs import CheckedJob, CheckedRuns, FailedRun, TrainedSteps
from moewright.engine.run.checked_settings import list_settings
from moewright.engine.run.checked_update import repeats_update
from moewright.engine.run.loss_slopes import Deviation
from moewright.engine.run.worker import ExitCode
from moewright.rules.job import Job
from moewright.rules.limits.engine_limits import require_runnable
from moewright.rules.shapes.param import name_in_layer
from moewright.spec.errors import BadInput, Reason
from moewright.spec.training_check import (
    CheckedRun,
    ComparedKind,
    SettingLine,
    TrainingCheck,
    TrainingLine,
)
from moewright.spec.workload import Dtype, Objective, RoutesSpec, Workload

# How often the distance that rounding makes may be exceeded: a layout rounds in other places, and
# a few distances of one process say only roughly how large theirs are.
_TIMES_ROUNDING = 6.0
# In 8 and 4 bits the formats of products round far more than all else, and the most that a layout
# does is to round every operand anew. Two roundings of a number are apart by a sixth of its squared
# step. Of the noisy runs it is a twenty-fifth where a unit of bf16 moves weights over the edges of
# steps, and nearly a sixth behind the first products, whose errors move all that follows: 1.25
# times their distance is the most measured, of six layouts and formats. The distance of a tensor,
# of many numbers, hardly varies.
_TIMES_IN_NARROW = {ComparedKind.GRADIENT: 2.5, ComparedKind.WEIGHT: 2.5}
# How often sizes of gradients may say what is not, all of a comparison together. They are means of
# many errors, and so nearly normal; the root mean square of the larger of two is 1.28 deviations.
_FALSE_ALARMS = 1e-3
_LARGER_OF_TWO = 1.28
_NOISE_SEEDS = (1, 2)
# In fp32 sums of another order differ by more than a unit of the weights makes them: the least
# bounds, as the proofs of layouts have them.
_LEAST_OF_TENSORS = 3e-5
_LEAST_OF_FIGURES = 1e-5
# A unit in the last place over the number, by the format in which weights are stored.
_UNITS = {Dtype.FP32: 2.0**-23, Dtype.FP16: 2.0**-10, Dtype.BF16: 2.0**-7}
# The slope of a loss along a gradient: what halving the moves changes is more than is left of it.
_LEAST_OF_SLOPES = 1e-3
_TIMES_OF_SLOPES = 2.0
_FIGURES = (ComparedKind.LOSS, ComparedKind.AUX_LOSS, ComparedKind.NORM)
# Parameters that have an expert in each row of their first dim.
_EXPERTS = "moe.experts."

_FigureKey = tuple[ComparedKind, str]
_Figures = dict[_FigureKey, torch.Tensor]


def check_training(job: Job, folder: Path, *, steps: int) -> TrainingCheck | ExitCode:
    """Train a job in its layout and in one process, and return how they compare.

    What the runs leave goes to `folder`. An exit code is returned where a rank failed.

    Raises:
        BadInput: the job cannot be trained, or no one process computes the same.
    """
    _refuse_layout_dependent(job)
    require_runnable(job)
    fingerprint = check_data(job.model, job.workload)
    # With the same micro-batches, because balance losses are those of a micro-batch.
    alone = replace(job, layout=parse_layout(f"mbs{job.layout.mbs}", world_size=1))
    require_runnable(alone)
    runs = CheckedRuns(folder=folder, steps=steps, data=fingerprint)
    routes = folder / "routes"
    shutil.rmtree(routes, ignore_errors=True)
    try:
        return _check(job, alone, runs, routes)
    except FailedRun as failure:
        return failure.code
    finally:
        shutil.rmtree(routes, ignore_errors=True)


def _check(job: Job, alone: Job, runs: CheckedRuns, routes: Path) -> TrainingCheck:
    """Train all runs of a check and compare them."""
    precision = job.workload.precision
    is_exact = precision is Dtype.FP32
    recorded, replayed = RoutesSpec(), RoutesSpec()
    if job.model.moe is not None:
        recorded = RoutesSpec(record_routes=str(routes))
        replayed = RoutesSpec(replay_routes=str(routes))
    # In fp32 all runs choose the same experts of their own accord, but for weights that are moved;
    # a graph reads no file.
    chosen = RoutesSpec() if is_exact or job.layout.graphs else replayed
    repeats = is_exact and repeats_update(job.workload)
    reference = runs.train(CheckedJob(job=alone, routes=recorded, repeats_updates=repeats))
    unit = _UNITS[precision.wide]
    noisy = [
        runs.train(CheckedJob(job=alone, noise=unit, seed=seed, routes=chosen))
        for seed in _NOISE_SEEDS
    ]
    allowed = _bound_figures(reference, noisy, is_narrow=precision.is_narrow)
    trained = runs.train(CheckedJob(job=job, routes=chosen))
    lines = [*_compare(CheckedRun.LAYOUT, allowed, trained)]
    clip = job.workload.optimizer.clip_norm
    clipped_steps = sum(0 < clip < norm for _, _, norm in reference.figures)
    settings: list[SettingLine] = []
    if is_exact:
        if _is_mean_over_micro_batches(job.workload):
            doubled = runs.train(CheckedJob(job=alone, copies=2))
            lines += _compare(CheckedRun.DOUBLED, allowed, doubled)
        if runs.steps > 1:
            restarted = runs.train(CheckedJob(job=job, restarts=True))
            lines += _compare(CheckedRun.RESTARTED, allowed, restarted)
        moved = runs.train(CheckedJob(job=alone, measures_slopes=True, routes=replayed))
        lines += map(_judge_slope, moved.slopes)
        lines += map(_judge_update, reference.updates)
        changed = list_settings(alone, steps=runs.steps, clipped_steps=clipped_steps)
        settings = [
            _count_changes(
                name, list(_compare(CheckedRun.LAYOUT, allowed, runs.train(CheckedJob(job=other))))
            )
            for name, other in changed.items()
        ]
    return TrainingCheck(
        precision=precision,
        steps=runs.steps,
        clipped_steps=clipped_steps,
        lines=tuple(lines),
        settings=tuple(settings),
    )


def _judge_slope(slope: Deviation) -> TrainingLine:
    bound = max(_LEAST_OF_SLOPES, _TIMES_OF_SLOPES * slope.rounding)
    return _judge(slope, bound, CheckedRun.MOVED, ComparedKind.SLOPE)


def _judge_update(update: Deviation) -> TrainingLine:
    bound = max(_LEAST_OF_TENSORS, _TIMES_ROUNDING * update.rounding)
    return _judge(update, bound, CheckedRun.WRITTEN, ComparedKind.WEIGHT)


def _judge(figure: Deviation, bound: float, run: CheckedRun, kind: ComparedKind) -> TrainingLine:
    return TrainingLine(
        run=run,
        kind=kind,
        name=figure.name,
        difference=figure.difference,
        rounding=figure.rounding,
        bound=bound,
        holds=figure.difference <= bound,
    )


def _count_changes(name: str, lines: Sequence[TrainingLine]) -> SettingLine:
    return SettingLine(
        name=name, compared=len(lines), changed=sum(not line.holds for line in lines)
    )


def _refuse_layout_dependent(job: Job) -> None:
    """Raise BadInput for what one process computes otherwise, or what is not compared."""
    layout, workload = job.layout, job.workload
    if layout.capacity:
        rule = "drops rows by the tokens of a rank: no one process computes the same"
        field, value, nearest = "layout.capacity", f"{layout.capacity:g}", "0"
    elif workload.loss.objective is Objective.DPO:
        rule = "verify compares training on tokens, not on pairs of answers"
        field, value, nearest = "train.objective", Objective.DPO.value, "a job of tokens"
    else:
        return
    raise BadInput(Reason(field=field, value=value, rule=rule, nearest=nearest))


def _is_mean_over_micro_batches(workload: Workload) -> bool:
    """Tell whether losses are means over micro-batches, whatever their order and number.

    A loss with the counts of the batch so far depends on the order, noise on a token's number.
    """
    is_steady = not workload.ramp.ramp_start and not workload.batch_samples
    return is_steady and not workload.loss.global_aux_coeff and not workload.router.jitter_eps


@dataclass(frozen=True, kw_only=True, slots=True)
class _Allowed:
    """What one process computes for a figure, how far rounding moves it, and how far it may be."""

    reference: torch.Tensor
    rounding: float
    bound: float


def _bound_figures(
    reference: TrainedSteps, noisy: Sequence[TrainedSteps], *, is_narrow: bool
) -> dict[_FigureKey, _Allowed]:
    """Return what is allowed for each figure, of which one kind has one least bound.

    A kind of few figures says more of what rounding does than any of its figures alone.
    """
    references = _list_figures(reference)
    others = [_list_figures(run) for run in noisy]
    rounding = {
        key: max(_measure(key, other[key], value) for other in others)
        for key, value in references.items()
    }
    typical = _find_typical(references, others, rounding)
    times_by_kind = _choose_times(references) if is_narrow else {}
    allowed = {}
    for key, value in references.items():
        kind, _ = key
        least = _LEAST_OF_FIGURES if kind in _FIGURES else _LEAST_OF_TENSORS
        times = times_by_kind.get(kind, _TIMES_ROUNDING)
        bound = max(least, times * max(rounding[key], typical[key]))
        allowed[key] = _Allowed(reference=value, rounding=rounding[key], bound=bound)
    return allowed


def _compare(
    run: CheckedRun, allowed: Mapping[_FigureKey, _Allowed], trained: TrainedSteps
) -> Iterator[TrainingLine]:
    """Yield a line for each figure."""
    own = _list_figures(trained)
    for key, figure in allowed.items():
        kind, name = key
        difference = _measure(key, own[key], figure.reference) if key in own else float("inf")
        deviation = Deviation(name=name, difference=difference, rounding=figure.rounding)
        yield _judge(deviation, figure.bound, run, kind)


def _choose_times(references: _Figures) -> dict[ComparedKind, float]:
    """Return how often the distance that rounding makes may be exceeded in 8 and 4 bits."""
    sizes = sum(kind is ComparedKind.GRADIENT_SIZE for kind, _ in references)
    # On both sides, and shared by all sizes, so that all together are wrong no more often.
    deviations = NormalDist().inv_cdf(1 - _FALSE_ALARMS / 2 / max(1, sizes))
    return {**_TIMES_IN_NARROW, ComparedKind.GRADIENT_SIZE: deviations / _LARGER_OF_TWO}


def _find_typical(
    references: _Figures, others: Sequence[_Figures], rounding: Mapping[_FigureKey, float]
) -> dict[_FigureKey, float]:
    """Return what rounding does to each figure by what it does to all of its kind.

    Of the sizes of gradients, it is a share of how far rounding moves the gradient itself.
    """
    apart = {
        key: max(_distance(other[key], value) for other in others)
        for key, value in references.items()
        if key[0] is ComparedKind.GRADIENT_SIZE
    }
    squares = [(rounding[key] / distance) ** 2 for key, distance in apart.items() if distance]
    share = sqrt(fmean(squares)) if squares else 0.0
    by_kind: dict[ComparedKind, list[float]] = {}
    for (kind, _), size in rounding.items():
        by_kind.setdefault(kind, []).append(size)
    medians = {kind: median(sizes) for kind, sizes in by_kind.items()}
    return {key: share * apart[key] if key in apart else medians[key[0]] for key in references}


def _list_figures(run: TrainedSteps) -> _Figures:
    figures = {
        (kind, str(step)): torch.tensor(value, dtype=torch.float64)
        for step, values in enumerate(run.figures, 1)
        for kind, value in zip(_FIGURES, values, strict=True)
    }
    tensors = {
        (kind, name): tensor
        for kind, group in (
            (ComparedKind.GRADIENT, run.gradients),
            (ComparedKind.GRADIENT_SIZE, dict(_split_experts(run.gradients))),
            (ComparedKind.WEIGHT, run.moved),
        )
        for name, tensor in group.items()
    }
    return figures | tensors


def _split_experts(gradients: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the gradient of each parameter, that of experts by expert."""
    for name, gradient in gradients.items():
        if name_in_layer(name).startswith(_EXPERTS) and gradient.dim() > 1:
            for expert, part in enumerate(gradient):
                yield f"{name}[{expert}]", part
        else:
            yield name, gradient


def _measure(key: _FigureKey, value: torch.Tensor, reference: torch.Tensor) -> float:
    if key[0] is ComparedKind.GRADIENT_SIZE:
        return _distance_along(value, reference)
    return _distance(value, reference)


def _distance_along(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return how far a tensor's part along its reference is from that, over the size of that."""
    own, other = value.double().flatten(), reference.double().flatten()
    square = float(other @ other)
    if square == 0:
        return _distance(value, reference)
    return abs(float(own @ other) / square - 1)


def _distance(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return how far a tensor is from its reference, over the size of that."""
    scale = float(reference.double().norm())
    difference = float((value.double() - reference.double()).norm())
    if scale == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / scale
