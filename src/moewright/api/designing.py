"""Designs: which shape of model gives the least loss in the time, with its plan and its serving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil, log2
from operator import itemgetter
from pathlib import Path
from typing import TypedDict, Unpack

from moewright.api.planning import find_best
from moewright.api.requests import PlanRequest, read_hardware, read_plan_request
from moewright.codec import format_layout, read_run, write_json, write_text
from moewright.codec.numbers import parse_count
from moewright.cost.loss_laws import (
    LEVEL_LAW,
    TOKENS_RANGE,
    LossPrediction,
    Shape,
    describe_shape,
    find_law,
    find_reference,
    fit_level,
    predict_losses,
)
from moewright.cost.serving import Serving, estimate_serving
from moewright.intake import catalogue
from moewright.intake.hf import build_config
from moewright.rules.limits.engine_limits import unsupported_layout
from moewright.rules.shapes.flops import model_flops_per_token
from moewright.rules.shapes.parameters import count_parameters
from moewright.search.design import (
    DesignedShape,
    DesignGoal,
    ShapeAxes,
    describe_like,
    estimate_template,
    find_front,
    list_shapes,
    rank_by_flops,
    time_shapes,
)
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.model import AttentionKind, ModelSpec
from moewright.spec.options import DesignOptions, WorkloadOptions
from moewright.spec.plan import Plan
from moewright.spec.record import Record, Row, format_json
from moewright.spec.units import mention
from moewright.spec.workload import Workload

DEFAULT_LIKE = "Qwen3-30B-A3B"
_DAY_S = 86400.0
_HOUR_S = 3600.0
_TIMED_A_SIZE = 4  # shapes that are estimated in template layouts, for a factor of two in size
_PUBLISHED_SHOWN = 4
_MOST_LOSS = 20.0  # nats; that of a vocabulary that nobody has
_VOCABULARIES = (256, 2**20)
_MOST_SHARED = 16
_SERVING_SHARE = 0.9  # of a device's memory that weights and caches may take


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

    `chosen` is of its full plan, the others of template layouts. `tried` counts the shapes, `timed`
    those that fit among the ones that were estimated. `level` is what own runs lie above the law
    whose level is taken. `like` is the loss of the model that the shapes were made like, as far as
    it fits, and `published` are models of about the size of the chosen one, trained as it is.
    """

    request: PlanRequest
    options: DesignOptions
    tried: int
    timed: int
    front: tuple[DesignedShape, ...]
    chosen: DesignedShape
    plan: Plan
    serving: Serving
    level: float
    like: DesignedShape | None
    published: tuple[DesignedShape, ...]

    def title(self) -> str:
        """Return the hardware, the time or the tokens, and the shape of least loss."""
        hardware = self.request.hardware
        goal = mention("{:g} days", self.options.days) or self.options.tokens
        if self.options.until:
            goal = f"to a loss of {self.options.until:g}"
        return f"{goal} on {hardware.count:,} x {hardware.device.name}: {self.chosen.model.name}"

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
) -> Design:
    """Return the design for hardware, and write its files where a folder is asked for.

    Raises:
        BadInput: something cannot be used, or no shape fits.
    """
    goal = _read_goal(options)
    level = fit_own_level(options.fit_loss)
    request = read_plan_request(like, on, workload)
    if request.model.moe is None:
        rule = f"{request.model.name} has no experts"
        raise BadInput(Reason(field="--like", value=str(like), rule=rule, nearest=DEFAULT_LIKE))
    if options.until:
        goal = replace(goal, reference=_find_until(request.model, options.until, level))
    life = _read_life(request, options)
    axes = _read_axes(options, request.model)
    listed = list_shapes(request.model, goal, axes)
    shapes = [shape for shape in listed if life.can_serve(shape)]
    if not shapes:
        raise _nothing_fits(request, "no shape is within the bounds and can be served")
    timed = _time_best(shapes, request, goal, axes)
    like_timed = _time_published([request.model], request, goal)
    described = [describe_like(shape, request.model, tokens) for shape, _, _, tokens in timed]
    described_like = [describe_shape(shape, tokens) for shape, _, _, tokens in like_timed]
    reference = goal.reference or next(chain(described_like, described))
    losses = predict_losses([*described, *described_like], reference, level)
    designed = [
        _build_shape(row, prediction, goal, life)
        for row, prediction in zip([*timed, *like_timed], losses, strict=True)
    ]
    own, like_shapes = designed[: len(timed)], designed[len(timed) :]
    best = min(own, key=_choose_key(options))
    plan = find_best(replace(request, model=best.model))
    if plan is None:
        raise _nothing_fits(request, "no layout of the best shape fits surely enough")
    chosen = _replan(best, plan, request.model, goal, life, (reference, level))
    rest = [shape for shape in own if shape is not best]
    front = sorted(find_front([chosen, *rest]), key=_choose_key(options))
    answer = Design(
        request=request,
        options=options,
        tried=len(shapes),
        timed=len(timed),
        front=tuple(front),
        chosen=chosen,
        plan=plan,
        serving=life.serve(chosen.model),
        level=level,
        like=next(iter(like_shapes), None),
        published=_design_published(chosen, request, goal, life, (reference, level)),
    )
    if options.out is not None:
        write_design(answer, options.out)
    return answer


def fit_own_level(runs: Sequence[Path]) -> float:
    """Return what the last held-out losses of runs lie above the law, 0 without runs.

    Raises:
        BadInput: a folder is no run, or its run was never evaluated.
    """
    points: list[tuple[Shape, float]] = []
    for folder in runs:
        record = read_run(folder)
        if not record.evals:
            rule = "has no held-out loss"
            raise BadInput(Reason(field="--fit-loss", value=str(folder), rule=rule))
        last = record.evals[-1]
        tokens = sum(step.tokens for step in record.steps if step.step <= last.step)
        points.append((describe_shape(record.plan.model, tokens), last.heldout_loss))
    return fit_level(points) if points else 0.0


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
    if not any(unsupported_layout(plan.layout, model=plan.model, workload=workload)):
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


def _read_goal(options: DesignOptions) -> DesignGoal:
    if sum(map(bool, (options.days, options.tokens, options.until))) != 1:
        rule = "is needed, or --tokens or --until in its place"
        raise BadInput(Reason(field="--days", rule=rule, nearest="--days 30"))
    if options.days and not 0 < options.days < 10_000:
        rule = "must be above 0, and below 10000"
        raise BadInput(Reason(field="--days", value=f"{options.days:g}", rule=rule, nearest="30"))
    if options.until and not 0 < options.until < _MOST_LOSS:
        value = f"{options.until:g}"
        rule = f"must be above 0, and below {_MOST_LOSS:g} nats"
        raise BadInput(Reason(field="--until", value=value, rule=rule, nearest="2"))
    if not 0 < options.goodput <= 1:
        rule = "must be above 0, and at most 1"
        value = f"{options.goodput:g}"
        raise BadInput(Reason(field="--goodput", value=value, rule=rule, nearest="0.95"))
    for name, count in (("--batch", options.batch), ("--context", options.context)):
        if count < 1:
            raise BadInput(Reason(field=name, value=str(count), rule="must be 1 or more"))
    counts = {
        field: parse_count(text, field) if text else 0
        for field, text in (
            ("--tokens", options.tokens),
            ("--max-total", options.max_total),
            ("--max-active", options.max_active),
        )
    }
    return DesignGoal(
        seconds=options.days * _DAY_S * options.goodput,
        goodput=options.goodput,
        tokens=float(counts["--tokens"]),
        most_total=float(counts["--max-total"]),
        most_active=float(counts["--max-active"]),
    )


def _read_axes(options: DesignOptions, base: ModelSpec) -> ShapeAxes:
    """Return what is varied beside width, depth and routed experts.

    Raises:
        BadInput: a value that the model of --like cannot have.
    """
    kinds = tuple(dict.fromkeys(_read_kind(text, base) for text in options.attention_kinds))
    if options.kv_heads and base.attention.kind is not AttentionKind.GQA:
        rule = f"{base.name} has no groups of heads"
        raise BadInput(Reason(field="--kv-heads", rule=rule, nearest=f"--like {DEFAULT_LIKE}"))
    if options.kv_heads and kinds and AttentionKind.GQA not in kinds:
        rule = "counts only with gqa among --attention-kinds"
        raise BadInput(Reason(field="--kv-heads", rule=rule, nearest="--attention-kinds gqa mla"))
    if any(options.shared_experts) and not (base.moe and base.moe.shared_ffn_size):
        rule = f"{base.name} has no shared experts, nor has a model of its family"
        nearest = "--like DeepSeek-V2-Lite"
        raise BadInput(Reason(field="--shared-experts", rule=rule, nearest=nearest))
    for field, counts, (least, most) in (
        ("--kv-heads", options.kv_heads, (1, base.attention.heads)),
        ("--vocab-sizes", options.vocab_sizes, _VOCABULARIES),
        ("--shared-experts", options.shared_experts, (0, _MOST_SHARED)),
    ):
        for count in counts:
            if not least <= count <= most:
                near = str(min(max(count, least), most))
                rule = f"must be in {least}..{most}"
                raise BadInput(Reason(field=field, value=str(count), rule=rule, nearest=near))
    return ShapeAxes(
        attention=kinds,
        kv_heads=tuple(dict.fromkeys(options.kv_heads)),
        vocab_sizes=tuple(dict.fromkeys(options.vocab_sizes)),
        shared_experts=tuple(dict.fromkeys(options.shared_experts)),
    )


def _read_kind(text: str, base: ModelSpec) -> AttentionKind:
    """Return a kind of attention: that of the model, or latent attention in place of GQA."""
    own = base.attention.kind
    kinds = [own]
    if own is AttentionKind.GQA:
        kinds.append(AttentionKind.MLA)
    for kind in kinds:
        if text == kind.value:
            return kind
    rule = f"must be {' or '.join(kind.value for kind in kinds)} with --like {base.name}"
    raise BadInput(Reason(field="--attention-kinds", value=text, rule=rule, nearest=own.value))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Life:
    """How a model is trained and served: by what devices, how many sequences, how many tokens."""

    training: Hardware
    serving: Hardware | None  # None: as many of the training's devices as it needs
    batch: int
    context: int
    tokens: float  # that are decoded

    def serve(self, model: ModelSpec) -> Serving:
        """Return the serving of a model on its devices, or on as few as hold it."""
        hardware = self.serving or replace(self.training, count=1)
        served = estimate_serving(model, hardware, batch=self.batch, context=self.context)
        if self.serving is not None:
            return served
        count = max(1, ceil(served.memory_bytes / _serving_room(hardware)))
        hardware = replace(hardware, count=count)
        return estimate_serving(model, hardware, batch=self.batch, context=self.context)

    def can_serve(self, model: ModelSpec) -> bool:
        """Return whether a model fits where it is to be served."""
        if self.serving is None:
            return True
        return self.serve(model).memory_bytes <= _serving_room(self.serving)

    def count_hours(self, training_days: float, served: Serving) -> float:
        """Return the device-hours of training and of decoding the tokens."""
        decoding_s = self.tokens / served.tokens_per_s * served.devices
        return training_days * 24 * self.training.count + decoding_s / _HOUR_S


def _read_life(request: PlanRequest, options: DesignOptions) -> _Life:
    tokens = options.served_tokens
    return _Life(
        training=request.hardware,
        serving=read_hardware(options.serve) if options.serve else None,
        batch=options.batch,
        context=options.context,
        tokens=float(parse_count(tokens, "--served-tokens")) if tokens else 0.0,
    )


def _serving_room(hardware: Hardware) -> float:
    return _SERVING_SHARE * hardware.count * hardware.device.memory_bytes.value


def _find_until(model: ModelSpec, loss: float, level: float) -> Shape:
    """Return the model of --like with the tokens that give it the loss."""
    shape = describe_shape(model, 1.0)
    reference = find_reference(shape, loss, level)
    if reference is None:
        least = find_law(LEVEL_LAW).predict(replace(shape, tokens=TOKENS_RANGE[1])) + level
        rule = f"{model.name} never has it by the law whose level is taken"
        nearest = f"{ceil(least * 100) / 100:g}"
        raise BadInput(Reason(field="--until", value=f"{loss:g}", rule=rule, nearest=nearest))
    return reference


def _choose_key(options: DesignOptions) -> Callable[[DesignedShape], float]:
    """Return what the chosen shape has least of."""
    if not options.until:
        return lambda shape: shape.prediction.loss
    if options.served_tokens:
        return lambda shape: shape.life_hours
    return lambda shape: shape.days


TimedShape = tuple[ModelSpec, str, float, float]


def _time_best(
    shapes: Sequence[ModelSpec], request: PlanRequest, goal: DesignGoal, axes: ShapeAxes
) -> list[TimedShape]:
    """Return the shapes of least loss of each size, timed in template layouts.

    They are ranked at the rate of model FLOPs of one shape; a size is a factor of two in total
    parameters. Where variants are alike to the laws, more of a size are timed.
    """
    workload, hardware = request.workload, request.hardware
    rate = _find_rate(shapes, workload, hardware)
    if rate is None:
        raise _nothing_fits(request, "no shape fits in a template layout")
    ranked = rank_by_flops(shapes, workload, goal, request.model, rate)
    timed_a_size = _TIMED_A_SIZE * axes.count_unknown_to_laws()
    sizes: dict[int, list[ModelSpec]] = {}
    for shape in ranked:
        sizes.setdefault(count_parameters(shape).total.bit_length(), []).append(shape)
    kept = [shape for group in sizes.values() for shape in group[:timed_a_size]]
    timed = list(time_shapes(kept, workload, hardware, goal, request.model))
    if not timed:
        raise _nothing_fits(request, "no shape of least loss fits in a template layout")
    return timed


def _find_rate(shapes: Sequence[ModelSpec], workload: Workload, hardware: Hardware) -> float | None:
    """Return the model FLOPs a second of a shape that fits, the middle one by size first."""
    ordered = sorted(shapes, key=lambda shape: count_parameters(shape).total)
    for shape in reversed(ordered[: len(ordered) // 2 + 1]):
        fastest = estimate_template(shape, workload, hardware)
        if fastest is not None:
            tokens_per_s = workload.tokens_per_step / fastest[1].step_s
            return tokens_per_s * model_flops_per_token(shape, workload.seq_len)
    return None


def _build_shape(
    timed: TimedShape, prediction: LossPrediction, goal: DesignGoal, life: _Life
) -> DesignedShape:
    model, layout, tokens_per_s, tokens = timed
    counts = count_parameters(model)
    days = tokens / tokens_per_s / _DAY_S / goal.goodput
    served = life.serve(model)
    return DesignedShape(
        model=model,
        total=counts.total,
        active=counts.active,
        layout=layout,
        tokens_per_s=tokens_per_s,
        tokens=tokens,
        days=days,
        prediction=prediction,
        serving_bytes=served.memory_bytes,
        life_hours=life.count_hours(days, served),
    )


def _replan(
    best: DesignedShape,
    plan: Plan,
    base: ModelSpec,
    goal: DesignGoal,
    life: _Life,
    reference_level: tuple[Shape, float],
) -> DesignedShape:
    """Return the shape with the speed of its full plan, and the tokens and loss that follow."""
    tokens_per_s = plan.workload.tokens_per_step / plan.estimate.step_s
    shape = describe_like(best.model, base, best.tokens)
    tokens = goal.count_tokens(shape, tokens_per_s) or best.tokens
    reference, level = reference_level
    (prediction,) = predict_losses([replace(shape, tokens=tokens)], reference, level)
    timed = (best.model, format_layout(plan.layout), tokens_per_s, tokens)
    return _build_shape(timed, prediction, goal, life)


def _time_published(
    models: Sequence[ModelSpec], request: PlanRequest, goal: DesignGoal
) -> list[TimedShape]:
    """Return models that fit, timed in template layouts, each to the laws as it is."""
    workload, hardware = request.workload, request.hardware
    return [
        timed for model in models for timed in time_shapes([model], workload, hardware, goal, model)
    ]


def _design_published(
    chosen: DesignedShape,
    request: PlanRequest,
    goal: DesignGoal,
    life: _Life,
    reference_level: tuple[Shape, float],
) -> tuple[DesignedShape, ...]:
    """Return published models of about the chosen size in template layouts, the nearest first."""
    reference, level = reference_level
    timed = _time_published(_list_published(chosen), request, goal)
    described = [describe_shape(model, tokens) for model, _, _, tokens in timed]
    losses = predict_losses(described, reference, level)
    return tuple(
        _build_shape(row, loss, goal, life) for row, loss in zip(timed, losses, strict=True)
    )


def _list_published(chosen: DesignedShape) -> list[ModelSpec]:
    """Return models of the catalogue within a factor of two in total parameters, nearest first."""
    near: dict[tuple[int, int], tuple[float, ModelSpec]] = {}
    for model in map(catalogue.model, catalogue.model_names()):
        counts = count_parameters(model)
        distance = abs(log2(counts.total / chosen.total))
        if model.moe is not None and distance <= 1:
            distance += abs(log2(counts.active / chosen.active))
            near.setdefault((counts.total, counts.active), (distance, model))
    return [model for _, model in sorted(near.values(), key=itemgetter(0))[:_PUBLISHED_SHOWN]]


def _nothing_fits(request: PlanRequest, rule: str) -> BadInput:
    value = f"{request.hardware.count}x{request.hardware.name}"
    return BadInput(Reason(field="--on", value=value, rule=rule, nearest="more devices"))


def describe_level(level: float) -> str:
    """Say whose level the losses have."""
    law = find_law("joint")
    if level:
        return f"Losses have the level of your runs: {level:+.3f} nats on the {law.name} law."
    return f"Losses have the level of {law.source.split(',')[0]} ({law.notes})."
