"""What a design is asked for: its goal, what it varies, and the life of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from moewright.api.requests import PlanRequest, read_hardware, read_plan_request
from moewright.codec import read_run
from moewright.codec.numbers import parse_count
from moewright.cost.loss_laws import (
    LEVEL_LAW,
    TOKENS_RANGE,
    Shape,
    describe_shape,
    find_law,
    find_reference,
    fit_level,
)
from moewright.cost.memory.model_states import least_state_bytes
from moewright.cost.serving import Serving, estimate_serving
from moewright.search.design import DesignGoal, ShapeAxes
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.model import AttentionKind, ModelSpec
from moewright.spec.options import DesignOptions, WorkloadOptions
from moewright.spec.units import DAY_S, HOUR_S

DEFAULT_LIKE = "Qwen3-30B-A3B"
_MOST_LOSS = 20.0  # nats; that of a vocabulary that nobody has
_VOCABULARIES = (256, 2**20)
_MOST_SHARED = 16
_SERVING_SHARE = 0.9  # of a device's memory that weights and caches may take


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """How a model is trained and served: by what devices, how many sequences, how many tokens."""

    training: Hardware
    serving: Hardware | None  # None: as many of the training's devices as it needs
    batch: int
    context: int
    tokens: float  # that are decoded

    def serve(self, model: ModelSpec) -> Serving:
        """Return the serving of a model on its devices, or on as few as hold it."""
        # One device at first: how much is held does not depend on how many hold it.
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
        return training_days * 24 * self.training.count + decoding_s / HOUR_S


@dataclass(frozen=True, kw_only=True, slots=True)
class DesignQuestion:
    """What is asked of a design.

    `level` is what own runs lie above the law whose level is taken.
    """

    request: PlanRequest
    options: DesignOptions
    goal: DesignGoal
    axes: ShapeAxes
    life: Life
    level: float

    def can_train(self, model: ModelSpec) -> bool:
        """Return whether all devices together hold the states of a model's training."""
        hardware = self.request.hardware
        capacity = hardware.count * hardware.device.memory_bytes.value
        return least_state_bytes(model, self.request.workload) <= capacity

    def describe_misfit(self, rule: str) -> BadInput:
        """Return the refusal of devices on which nothing fits."""
        hardware = self.request.hardware
        value = f"{hardware.count}x{hardware.name}"
        return BadInput(Reason(field="--on", value=value, rule=rule, nearest="more devices"))


def read_question(
    on: str | Hardware,
    like: str | Path | ModelSpec,
    workload: WorkloadOptions,
    options: DesignOptions,
) -> DesignQuestion:
    """Read what a design is asked for.

    Raises:
        BadInput: something cannot be used.
    """
    goal = _read_goal(options)
    level = fit_own_level(options.fit_loss)
    request = read_plan_request(like, on, workload)
    if request.model.moe is None:
        rule = f"{request.model.name} has no experts"
        raise BadInput(Reason(field="--like", value=str(like), rule=rule, nearest=DEFAULT_LIKE))
    if options.until:
        goal = replace(goal, reference=_find_until(request.model, options.until, level))
    return DesignQuestion(
        request=request,
        options=options,
        goal=goal,
        axes=_read_axes(options, request.model),
        life=_read_life(request, options),
        level=level,
    )


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
        # The run may have gone on behind its last evaluation.
        tokens = sum(step.tokens for step in record.steps if step.step <= last.step)
        points.append((describe_shape(record.plan.model, tokens), last.heldout_loss))
    return fit_level(points) if points else 0.0


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
        seconds=options.days * DAY_S * options.goodput,
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


def _read_life(request: PlanRequest, options: DesignOptions) -> Life:
    tokens = options.served_tokens
    return Life(
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
        # Rounded up: below the least there are no tokens that give it.
        nearest = f"{ceil(least * 100) / 100:g}"
        raise BadInput(Reason(field="--until", value=f"{loss:g}", rule=rule, nearest=nearest))
    return reference
