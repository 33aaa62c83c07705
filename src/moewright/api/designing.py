"""Designs: which shape of model gives the least loss in the time, with its plan and its serving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from math import log2
from operator import itemgetter
from pathlib import Path
from typing import TypedDict, Unpack

from moewright.api.design_question import DEFAULT_LIKE, DesignQuestion, read_question
from moewright.api.planning import build_objections
from moewright.api.requests import PlanRequest
from moewright.codec import format_layout, write_json, write_text
from moewright.cost.loss_laws import (
    LossPrediction,
    Shape,
    describe_shape,
    find_law,
    predict_losses,
)
from moewright.cost.serving import Serving
from moewright.intake import catalogue
from moewright.intake.hf import build_config
from moewright.rules.job import plan_job
from moewright.rules.limits.engine_limits import unsupported_layout
from moewright.rules.shapes.flops import model_flops_per_token
from moewright.rules.shapes.parameters import count_parameters
from moewright.search.design import (
    DesignedShape,
    TimedShape,
    describe_like,
    estimate_template,
    find_front,
    list_shapes,
    rank_by_flops,
    time_shape,
    train_shape,
)
from moewright.search.search import find_best_plan
from moewright.spec.hardware import Hardware
from moewright.spec.model import ModelSpec
from moewright.spec.options import DesignOptions, WorkloadOptions
from moewright.spec.plan import Plan
from moewright.spec.record import Record, Row, format_json
from moewright.spec.units import DAY_S, format_count, mention
from moewright.spec.workload import Workload

_TIMED_A_SIZE = 3  # shapes that are timed in template layouts, for a factor of two in size
_TRIED_OVER_TIMED = 2  # the others do not fit
_RATE_FACTORS = (1.0, 0.5, 2.0)
_MOST_PLANNED = 24  # twice as many where shapes vary in what no law knows
_PUBLISHED_SHOWN = 4


class DesignChoices(TypedDict, total=False):
    """The keywords of `design` (see DesignOptions)."""

    days: float
    tokens: str
    until: float
    goodput: float
    max_total: str
    max_active: str
    serve: str
    context: int
    batch: int
    served_tokens: str
    attention_kinds: tuple[str, ...]
    kv_heads: tuple[int, ...]
    vocab_sizes: tuple[int, ...]
    shared_experts: tuple[int, ...]
    fit_loss: tuple[Path, ...]
    out: Path


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Design(Record):
    """The answer of `design`: the Pareto front of shapes, and the one of least loss with its plan.

    `tried` counts the shapes, `timed` those that fit among the ones that were estimated in template
    layouts, `planned` those that got a full plan; all that are here have the speed of theirs.
    `level` is what own runs lie above the law whose level is taken. `like` is the loss of the model
    that the shapes were made like, as far as it fits, and `published` are models of about the size
    of the chosen one, trained as it is.
    """

    request: PlanRequest
    options: DesignOptions
    tried: int
    timed: int
    planned: int
    front: tuple[DesignedShape, ...]
    chosen: DesignedShape
    plan: Plan
    serving: Serving
    level: float
    like: DesignedShape | None
    published: tuple[DesignedShape, ...]

    def title(self) -> str:
        """Return the time or the tokens, the hardware, and the size and name of the best shape."""
        hardware = self.request.hardware
        goal = mention("{:g} days", self.options.days) or self.options.tokens
        if self.options.until:
            goal = f"to a loss of {self.options.until:g}"
        shape = self.chosen
        size = f"{format_count(shape.total)} parameters, {format_count(shape.active)} active"
        devices = f"{hardware.count:,} x {hardware.device.name}"
        return f"{goal} on {devices}: {size} ({shape.model.name})"

    def to_rows(self) -> list[Row]:
        """Return a row for each shape of the front, least loss first."""
        return [
            {
                "shape": shape.model.name,
                "total": shape.total,
                "active": shape.active,
                "tokens": shape.tokens,
                "days": shape.days,
                "loss": shape.prediction.loss,
                "low": shape.prediction.low,
                "high": shape.prediction.high,
                "serving_bytes": shape.serving_bytes,
                "life_hours": shape.life_hours,
            }
            for shape in self.front
        ]


def design(
    *,
    on: str | Hardware,
    like: str | Path | ModelSpec = DEFAULT_LIKE,
    seq_len: int | None = None,
    global_batch: int | None = None,
    **choices: Unpack[DesignChoices],
) -> Design:
    """Find the shape of model with the least predicted loss, and what it takes to train and serve.

    Args:
        on: count x device, such as "256xH100".
        like: the model whose family, attention, router and vocabulary the shapes have.
        seq_len: tokens a sequence.
        global_batch: sequences a step.
        **choices: `days`, `tokens` or `until`, and the other options of `moewright design`.

    Raises:
        BadInput: something cannot be used, or no shape fits.

    Example:
        >>> import moewright as mw
        >>> answer = mw.design(on="8xH100", days=7, max_total="8B")
        >>> answer.chosen.total < 8e9
        True
    """
    workload = WorkloadOptions(seq_len=seq_len, global_batch=global_batch)
    return compute_design(on, like, workload, DesignOptions(**choices))


def compute_design(
    on: str | Hardware,
    like: str | Path | ModelSpec,
    workload: WorkloadOptions,
    options: DesignOptions,
    *,
    report_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Design:
    """Return the design for hardware, and write its files where a folder is asked for.

    `report_progress` is called with the full plans that are made, and those that will be.

    Raises:
        BadInput: something cannot be used, or no shape fits.
    """
    question = read_question(on, like, workload, options)
    base, goal, life = question.request.model, question.goal, question.life
    listed = tuple(list_shapes(base, goal, question.axes))
    shapes = [shape for shape in listed if life.can_serve(shape) and question.can_train(shape)]
    if not shapes:
        raise question.describe_misfit(
            "no shape is within the bounds, and can be trained and served"
        )
    timed = _time_best(shapes, question)
    planned_like = _plan_shape(base, base, question)
    reference = _find_reference(question, timed, planned_like)
    scanned = _build_shapes(timed, base, reference, question)
    most = _MOST_PLANNED * min(2, question.axes.count_unknown_to_laws())
    candidates = _pick_candidates(find_front(scanned), _choose_key(options), most)
    # The most: the published ones are found when a shape is chosen.
    total = len(candidates) + _PUBLISHED_SHOWN
    planned: list[PlannedShape] = []
    for done, shape in enumerate(candidates):
        report_progress(done, total)
        full = _plan_shape(shape.model, base, question)
        if full is not None:
            planned.append(full)
    if not planned:
        raise question.describe_misfit("no layout of the best shapes fits surely enough")
    # Anew: by their best layouts shapes train on other numbers of tokens.
    own = _build_shapes([full.timed for full in planned], base, reference, question)
    front = sorted(find_front(own), key=_choose_key(options))
    chosen = front[0]
    published = []
    for done, model in enumerate(_list_published(chosen), len(candidates)):
        report_progress(done, total)
        published += _build_published(_plan_shape(model, model, question), reference, question)
    like_shapes = _build_published(planned_like, reference, question)
    answer = Design(
        request=question.request,
        options=options,
        tried=len(listed),
        timed=len(timed),
        planned=len(planned),
        front=tuple(front),
        chosen=chosen,
        plan=next(full.plan for full in planned if full.plan.model == chosen.model),
        serving=life.serve(chosen.model),
        level=question.level,
        like=next(iter(like_shapes), None),
        published=tuple(published),
    )
    if options.out is not None:
        write_design(answer, options.out)
    return answer


def write_design(answer: Design, folder: Path) -> None:
    """Write config.json, plan.json and job.toml of the chosen shape into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "config.json", format_json(build_config(answer.chosen.model)))
    write_json(folder / "plan.json", answer.plan)
    write_text(folder / "job.toml", _format_job(answer.plan))


def _format_job(plan: Plan) -> str:
    """Return the job of a plan; a layout that this engine does not run is left to its planner."""
    workload = plan.workload
    layout: tuple[str, ...] = ()
    if not any(unsupported_layout(plan_job(plan))):
        layout = ("[layout]", f'text = "{format_layout(plan.layout)}"', "")
    lines = (
        "[model]",
        'config = "config.json"',
        "",
        *layout,
        "[train]",
        f"nproc = {plan.hardware.count}",
        f'hardware = "{plan.hardware.name}"',
        f"seq_len = {workload.seq_len}",
        f"global_batch = {workload.global_batch}",
        f'precision = "{workload.precision.value}"',
    )
    return "\n".join(lines) + "\n"


def _choose_key(options: DesignOptions) -> Callable[[DesignedShape], float]:
    """Return what the chosen shape has least of."""
    if not options.until:
        return lambda shape: shape.prediction.loss
    if options.served_tokens:
        return lambda shape: shape.life_hours
    return lambda shape: shape.days


def _time_best(shapes: Sequence[ModelSpec], question: DesignQuestion) -> list[TimedShape]:
    """Return the shapes of least loss of each size, timed in template layouts.

    They are ranked at the rate of model FLOPs of one shape, at half of it and at twice, between
    which shapes differ; a size is a factor of two in total parameters. Where variants are alike to
    the laws, more of a size are timed.
    """
    request, goal = question.request, question.goal
    workload, hardware = request.workload, request.hardware
    rate = _find_rate(shapes, workload, hardware)
    if rate is None:
        raise question.describe_misfit("no shape fits in a template layout")
    timed_a_size = _TIMED_A_SIZE * question.axes.count_unknown_to_laws()
    timed: dict[str, TimedShape | None] = {}
    for factor in _RATE_FACTORS:
        ranked = rank_by_flops(shapes, workload, goal, request.model, factor * rate)
        sizes: dict[int, list[ModelSpec]] = {}
        for shape in ranked:
            sizes.setdefault(_size_class(count_parameters(shape).total), []).append(shape)
        for group in sizes.values():
            fitting = 0
            for shape in group[: _TRIED_OVER_TIMED * timed_a_size]:
                # At several rates mostly the same shapes come first.
                if shape.name not in timed:
                    timed[shape.name] = time_shape(shape, workload, hardware, goal, request.model)
                fitting += timed[shape.name] is not None
                if fitting == timed_a_size:
                    break
    fitting_shapes = [shape for shape in timed.values() if shape is not None]
    if not fitting_shapes:
        raise question.describe_misfit("no shape of least loss fits in a template layout")
    return fitting_shapes


def _size_class(total: int) -> int:
    """Return the number of a size: a factor of two in total parameters."""
    return total.bit_length()


def _find_rate(shapes: Sequence[ModelSpec], workload: Workload, hardware: Hardware) -> float | None:
    """Return the model FLOPs a second of a shape that fits: the middle one by size, or smaller."""
    ordered = sorted(shapes, key=lambda shape: count_parameters(shape).total)
    place = len(ordered) // 2
    while True:
        shape = ordered[place]
        fastest = estimate_template(shape, workload, hardware)
        if fastest is not None:
            tokens_per_s = workload.tokens_per_step / fastest[1].step_s
            return tokens_per_s * model_flops_per_token(shape, workload.seq_len)
        if place == 0:
            return None
        place //= 2


def _pick_candidates(
    front: Sequence[DesignedShape], key: Callable[[DesignedShape], float], most: int
) -> list[DesignedShape]:
    """Return the shapes that get a full plan: the best of each size, then the second of each.

    Sizes are those by which shapes were timed.
    """
    sizes: dict[int, list[DesignedShape]] = {}
    for shape in sorted(front, key=key):
        sizes.setdefault(_size_class(shape.total), []).append(shape)
    rounds = chain.from_iterable(zip_longest(*sizes.values()))
    return [shape for shape in rounds if shape is not None][:most]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedShape:
    """A model with its best plan, and the speed and the tokens that follow from it."""

    plan: Plan
    timed: TimedShape


def _plan_shape(model: ModelSpec, base: ModelSpec, question: DesignQuestion) -> PlannedShape | None:
    """Return a model with its best plan, None where none fits or it never has the loss.

    The laws take its attention and its vocabulary for those of `base`.
    """
    request = question.request
    plan = find_best_plan(
        model, request.workload, request.hardware, allowed=build_objections(request)
    )
    if plan is None:
        return None
    tokens_per_s = plan.workload.tokens_per_step / plan.estimate.step_s
    timed = train_shape(model, format_layout(plan.layout), tokens_per_s, question.goal, base)
    return None if timed is None else PlannedShape(plan=plan, timed=timed)


def _find_reference(
    question: DesignQuestion, timed: Sequence[TimedShape], like: PlannedShape | None
) -> Shape:
    """Return the shape from which losses are counted: that of the goal, or of the model of --like.

    Where that model does not fit it is the best shape that does.
    """
    if question.goal.reference is not None:
        return question.goal.reference
    if like is not None:
        return describe_shape(like.timed.model, like.timed.tokens)
    return describe_like(timed[0].model, question.request.model, timed[0].tokens)


def _build_shapes(
    rows: Sequence[TimedShape], base: ModelSpec, reference: Shape, question: DesignQuestion
) -> list[DesignedShape]:
    described = [describe_like(row.model, base, row.tokens) for row in rows]
    losses = predict_losses(described, reference, question.level)
    return [_build_shape(row, loss, question) for row, loss in zip(rows, losses, strict=True)]


def _build_published(
    planned: PlannedShape | None, reference: Shape, question: DesignQuestion
) -> list[DesignedShape]:
    """Return a published model as a shape, which the laws see as it is; none where none fits."""
    if planned is None:
        return []
    return _build_shapes([planned.timed], planned.timed.model, reference, question)


def _build_shape(
    timed: TimedShape, prediction: LossPrediction, question: DesignQuestion
) -> DesignedShape:
    counts = count_parameters(timed.model)
    days = timed.tokens / timed.tokens_per_s / DAY_S / question.goal.goodput
    served = question.life.serve(timed.model)
    return DesignedShape(
        model=timed.model,
        total=counts.total,
        active=counts.active,
        layout=timed.layout,
        tokens_per_s=timed.tokens_per_s,
        tokens=timed.tokens,
        days=days,
        prediction=prediction,
        serving_bytes=served.memory_bytes,
        life_hours=question.life.count_hours(days, served),
    )


def _list_published(chosen: DesignedShape) -> list[ModelSpec]:
    """Return models of the catalogue within a factor of two in total parameters, nearest first."""
    near: dict[tuple[int, int], tuple[float, ModelSpec]] = {}
    for model in map(catalogue.model, catalogue.model_names()):
        counts = count_parameters(model)
        distance = abs(log2(counts.total / chosen.total))
        if model.moe is not None and distance <= 1:
            distance += abs(log2(counts.active / chosen.active))
            # A shape that has two names is shown once.
            near.setdefault((counts.total, counts.active), (distance, model))
    return [model for _, model in sorted(near.values(), key=itemgetter(0))[:_PUBLISHED_SHOWN]]


def describe_level(level: float) -> str:
    """Say whose level the losses have."""
    law = find_law("joint")
    if level:
        return f"Losses have the level of your runs: {level:+.3f} nats on the {law.name} law."
    return f"Losses have the level of {law.source.split(',')[0]} ({law.notes})."
