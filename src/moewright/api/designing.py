"""Designs: which shape of model gives the least loss in the time, with its plan and its serving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict, Unpack

from moewright.api.planning import find_best
from moewright.api.requests import PlanRequest, read_hardware, read_plan_request
from moewright.codec import format_layout, read_run, write_json, write_text
from moewright.codec.numbers import parse_count
from moewright.cost.loss_laws import (
    LossPrediction,
    Shape,
    describe_shape,
    find_law,
    fit_level,
    predict_losses,
)
from moewright.cost.serving import Serving, estimate_serving
from moewright.intake.hf import build_config
from moewright.rules.shapes.flops import model_flops_per_token
from moewright.rules.shapes.parameters import count_parameters
from moewright.search.design import (
    DesignedShape,
    DesignGoal,
    estimate_template,
    find_front,
    list_shapes,
    rank_by_flops,
    time_shapes,
)
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.model import ModelSpec
from moewright.spec.options import DesignOptions, WorkloadOptions
from moewright.spec.plan import Plan
from moewright.spec.record import Record, Row, format_json
from moewright.spec.workload import Workload

DEFAULT_LIKE = "Qwen3-30B-A3B"
_DAY_S = 86400.0
_TIMED_A_SIZE = 4  # shapes that are estimated in template layouts, for a factor of two in size
_SERVING_SHARE = 0.9  # of a device's memory that weights and caches may take


class DesignChoices(TypedDict, total=False):
    """The keywords of `design` (see DesignOptions)."""

    days: float
    tokens: str
    goodput: float
    max_total: str
    max_active: str
    serve: str
    context: int
    batch: int
    fit_loss: tuple[Path, ...]
    out: Path


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Design(Record):
    """The answer of `design`: the Pareto front of shapes, and the one of least loss with its plan.

    `chosen` is of its full plan, the others of template layouts. `tried` counts the shapes, `timed`
    those that fit among the ones that were estimated. `level` is what own runs lie above the law
    whose level is taken. `like` is the loss of the model that the shapes were made like, as far as
    it fits.
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

    def title(self) -> str:
        """Return the hardware, the time or the tokens, and the shape of least loss."""
        hardware = self.request.hardware
        goal = f"{self.options.days:g} days" if self.options.days else self.options.tokens
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
        **choices: `days` or `tokens`, and the other options of `moewright design`.

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
    serving = read_hardware(options.serve) if options.serve else None
    level = fit_own_level(options.fit_loss)
    request = read_plan_request(like, on, workload)
    if request.model.moe is None:
        rule = f"{request.model.name} has no experts"
        raise BadInput(Reason(field="--like", value=str(like), rule=rule, nearest=DEFAULT_LIKE))
    shapes = [
        shape
        for shape in list_shapes(request.model, goal)
        if serving is None or _can_serve(shape, serving, options)
    ]
    if not shapes:
        raise _nothing_fits(request, "no shape is within the bounds and can be served")
    timed = _time_best(shapes, request, goal)
    like_timed = list(time_shapes([request.model], request.workload, request.hardware, goal))
    described = [describe_shape(shape, tokens) for shape, _, _, tokens in timed]
    described_like = [describe_shape(shape, tokens) for shape, _, _, tokens in like_timed]
    reference = described_like[0] if described_like else described[0]
    losses = predict_losses([*described, *described_like], reference, level)
    designed = [
        _build_shape(row, prediction, goal)
        for row, prediction in zip([*timed, *like_timed], losses, strict=True)
    ]
    own, like_shapes = designed[: len(timed)], designed[len(timed) :]
    best = min(own, key=lambda shape: shape.prediction.loss)
    plan = find_best(replace(request, model=best.model))
    if plan is None:
        raise _nothing_fits(request, "no layout of the best shape fits surely enough")
    chosen = _replan(best, plan, goal, reference, level)
    rest = [shape for shape in own if shape is not best]
    front = sorted(find_front([chosen, *rest]), key=lambda shape: shape.prediction.loss)
    answer = Design(
        request=request,
        options=options,
        tried=len(shapes),
        timed=len(timed),
        front=tuple(front),
        chosen=chosen,
        plan=plan,
        serving=estimate_serving(
            chosen.model,
            serving or replace(request.hardware, count=_fewest_devices(chosen, request, options)),
            batch=options.batch,
            context=options.context,
        ),
        level=level,
        like=like_shapes[0] if like_shapes else None,
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
    workload = plan.workload
    lines = (
        "[model]",
        'config = "config.json"',
        "",
        "[layout]",
        f'text = "{format_layout(plan.layout)}"',
        "",
        "[train]",
        f"nproc = {plan.hardware.count}",
        f'hardware = "{plan.hardware.name}"',
        f"seq_len = {workload.seq_len}",
        f"global_batch = {workload.global_batch}",
        f'precision = "{workload.precision.value}"',
    )
    return "\n".join(lines) + "\n"


def _read_goal(options: DesignOptions) -> DesignGoal:
    if bool(options.days) == bool(options.tokens):
        rule = "is needed, or --tokens in its place"
        raise BadInput(Reason(field="--days", rule=rule, nearest="--days 30"))
    if options.days and not 0 < options.days < 10_000:
        rule = "must be above 0, and below 10000"
        raise BadInput(Reason(field="--days", value=f"{options.days:g}", rule=rule, nearest="30"))
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


def _can_serve(shape: ModelSpec, hardware: Hardware, options: DesignOptions) -> bool:
    served = estimate_serving(shape, hardware, batch=options.batch, context=options.context)
    room = _SERVING_SHARE * hardware.count * hardware.device.memory_bytes.value
    return served.memory_bytes <= room


def _fewest_devices(chosen: DesignedShape, request: PlanRequest, options: DesignOptions) -> int:
    single = replace(request.hardware, count=1)
    served = estimate_serving(chosen.model, single, batch=options.batch, context=options.context)
    room = _SERVING_SHARE * request.hardware.device.memory_bytes.value
    return max(1, -int(-served.memory_bytes // room))


TimedShape = tuple[ModelSpec, str, float, float]


def _time_best(
    shapes: Sequence[ModelSpec], request: PlanRequest, goal: DesignGoal
) -> list[TimedShape]:
    """Return the shapes of least loss of each size, timed in template layouts.

    They are ranked at the rate of model FLOPs of one shape; a size is a factor of two in total
    parameters.
    """
    workload, hardware = request.workload, request.hardware
    rate = _find_rate(shapes, workload, hardware)
    if rate is None:
        raise _nothing_fits(request, "no shape fits in a template layout")
    ranked = rank_by_flops(shapes, workload, goal, rate)
    sizes: dict[int, list[ModelSpec]] = {}
    for shape, _ in ranked:
        sizes.setdefault(count_parameters(shape).total.bit_length(), []).append(shape)
    kept = [shape for group in sizes.values() for shape in group[:_TIMED_A_SIZE]]
    timed = list(time_shapes(kept, workload, hardware, goal))
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


def _build_shape(timed: TimedShape, prediction: LossPrediction, goal: DesignGoal) -> DesignedShape:
    model, layout, tokens_per_s, tokens = timed
    counts = count_parameters(model)
    return DesignedShape(
        model=model,
        total=counts.total,
        active=counts.active,
        layout=layout,
        tokens_per_s=tokens_per_s,
        tokens=tokens,
        days=tokens / tokens_per_s / _DAY_S / goal.goodput,
        prediction=prediction,
    )


def _replan(
    best: DesignedShape, plan: Plan, goal: DesignGoal, reference: Shape, level: float
) -> DesignedShape:
    """Return the shape with the speed of its full plan, and the tokens and loss that follow."""
    tokens_per_s = plan.workload.tokens_per_step / plan.estimate.step_s
    tokens = goal.tokens or goal.seconds * tokens_per_s
    (prediction,) = predict_losses([describe_shape(best.model, tokens)], reference, level)
    return replace(
        best,
        layout=format_layout(plan.layout),
        tokens_per_s=tokens_per_s,
        tokens=tokens,
        days=tokens / tokens_per_s / _DAY_S / goal.goodput,
        prediction=prediction,
    )


def _nothing_fits(request: PlanRequest, rule: str) -> BadInput:
    value = f"{request.hardware.count}x{request.hardware.name}"
    return BadInput(Reason(field="--on", value=value, rule=rule, nearest="more devices"))


def describe_level(level: float) -> str:
    """Say whose level the losses have."""
    law = find_law("joint")
    if level:
        return f"Losses have the level of your runs: {level:+.3f} nats on the {law.name} law."
    return f"Losses have the level of {law.source.split(',')[0]} ({law.notes})."
