"""Which shape of model to train: shapes, their speed in template layouts, and the Pareto front.

Speed decides with the law: a shape whose matrices are slow sees fewer tokens. All shapes are first
timed by their FLOPs at the utilization of one of them; those with the least losses are then
estimated in a few template layouts, and their Pareto front gets full plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from moewright.codec import parse_layout
from moewright.cost.estimate import estimate
from moewright.cost.loss_laws import (
    LossPrediction,
    Shape,
    describe_shape,
    find_tokens,
    predict_losses,
)
from moewright.rules.job import Job
from moewright.rules.limits.legality import check_legality
from moewright.rules.shapes.flops import model_flops_per_token
from moewright.rules.shapes.parameters import count_parameters
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Hardware
from moewright.spec.model import AttentionKind, AttentionSpec, ModelSpec, QkNorm, ScoreFunction
from moewright.spec.plan import Estimate
from moewright.spec.workload import Workload

WIDTHS = tuple(range(1024, 8193, 512))
ASPECTS = (40, 64)  # width over depth
EXPERTS = (32, 64, 128, 256, 512)
CHOSEN = (4, 8)
ACTIVE_WIDTHS = (2, 3)  # of a token's experts, over the width of the model
_TILE = 128  # widths of experts are multiples, as products are tiled
_TEMPLATES = (
    "ep8,mbs1",
    "ep8,mbs1,recompute=full",
    "ep8,pp2,mbs1,recompute=select",
    "ep8,pp4,mbs1,recompute=select",
    "ep8,pp8,mbs1,recompute=full",
)
_FIT = 0.9
# Ranks of latent attention over the width of a head (DeepSeek-V2, arXiv 2405.04434, 3.1.2): of keys
# and values, and of queries; the queries of narrow models have none (DeepSeek-V2-Lite).
_KV_RANK = 4
_QUERY_RANK = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class DesignGoal:
    """The time, the tokens or the loss of a training, and what a shape must not exceed.

    Zeros are no goals and no limits. Tokens are those of every shape; with a loss each shape sees
    as many as it needs for that of the reference.
    """

    seconds: float = 0.0  # of steps
    goodput: float = 1.0  # share of the calendar that is steps
    tokens: float = 0.0
    reference: Shape | None = None  # whose loss is the goal

    def count_tokens(self, shape: Shape, tokens_per_s: float) -> float | None:
        """Return the tokens that a shape sees at a speed, None where it never has the loss."""
        if self.reference is None:
            return self.tokens or self.seconds * tokens_per_s
        trained = find_tokens(shape, self.reference)
        return None if trained is None else trained.tokens

    most_total: float = 0.0  # parameters
    most_active: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeAxes:
    """What shapes vary besides width, depth and routed experts; an empty axis stays as it is.

    No loss law knows attention or vocabulary: shapes that differ in them alone have one loss after
    as many tokens (`describe_like`).
    """

    attention: tuple[AttentionKind, ...] = ()
    kv_heads: tuple[int, ...] = ()  # of GQA
    vocab_sizes: tuple[int, ...] = ()
    shared_experts: tuple[int, ...] = ()  # each as wide as a routed one

    def vary(self, shape: ModelSpec) -> Iterator[ModelSpec]:
        """Yield the variants of a shape, each with what is varied in its name."""
        vocab_sizes = self.vocab_sizes or (shape.vocab_size,)
        for variant, vocab_size in product(self._vary_attention(shape), vocab_sizes):
            name = variant.name + f"-v{vocab_size}" * bool(self.vocab_sizes)
            variant = replace(variant, name=name, vocab_size=vocab_size)
            if not self.shared_experts or variant.moe is None:
                yield variant
                continue
            for count in self.shared_experts:
                moe = replace(variant.moe, shared_ffn_size=count * variant.moe.ffn_size)
                yield replace(variant, name=f"{name}-s{count}", moe=moe)

    def _vary_attention(self, shape: ModelSpec) -> Iterator[ModelSpec]:
        own = shape.attention
        for kind in self.attention or (own.kind,):
            name = shape.name + f"-{kind.value}" * bool(self.attention)
            if kind is not own.kind:
                yield replace(_make_latent(shape), name=name)
            elif self.kv_heads:
                for count in self.kv_heads:
                    grouped = _group_heads(own, count)
                    yield replace(shape, name=f"{name}-kv{count}", attention=grouped)
            else:
                yield replace(shape, name=name)

    def count_unknown_to_laws(self) -> int:
        """Count the variants of a shape that loss laws do not tell apart, at most."""
        attention = max(1, len(self.attention)) - 1 + max(1, len(self.kv_heads))
        return attention * max(1, len(self.vocab_sizes))


def _group_heads(attention: AttentionSpec, kv_heads: int) -> AttentionSpec:
    """Return attention with about as many heads in groups of so many keys and values."""
    groups = max(1, round(attention.heads / kv_heads))
    return replace(attention, heads=groups * kv_heads, kv_heads=kv_heads)


def _make_latent(shape: ModelSpec) -> ModelSpec:
    """Return the shape with latent attention of as many heads, in DeepSeek-V2's proportions.

    It is of the family with latent attention whose router scores as the shape's, and chooses as
    that family does: DeepSeek-V2's never divides the probabilities by their sum.
    """
    attention = shape.attention
    width = attention.head_dim
    query_rank = _QUERY_RANK * width
    latent = AttentionSpec(
        kind=AttentionKind.MLA,
        heads=attention.heads,
        kv_heads=attention.heads,
        head_dim=width + width // 2,
        v_head_dim=width,
        qk_norm=QkNorm.NONE,
        q_lora_rank=query_rank if shape.hidden_size > 2 * query_rank else 0,
        kv_lora_rank=_KV_RANK * width,
        qk_nope_head_dim=width,
        qk_rope_head_dim=width // 2,
        rope=replace(attention.rope, interleaved=True),
    )
    moe = shape.moe
    if moe is not None and moe.router.score is ScoreFunction.SIGMOID:
        return replace(shape, family="deepseek_v3", attention=latent)
    if moe is not None:
        router = replace(moe.router, renormalize=False, pre_softmax=True)
        moe = replace(moe, router=router)
    return replace(shape, family="deepseek_v2", attention=latent, moe=moe)


@dataclass(frozen=True, kw_only=True, slots=True)
class DesignedShape:
    """A shape with its best layout, and the loss of the tokens that it sees.

    `serving_bytes` are weights and caches where it is served, `life_hours` the device-hours of its
    training and of decoding the tokens that it serves in its life.
    """

    model: ModelSpec
    total: int
    active: int
    layout: str
    tokens_per_s: float
    tokens: float
    days: float
    prediction: LossPrediction
    serving_bytes: int
    life_hours: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedShape:
    """A shape with a layout, its speed in it, and the tokens that it sees."""

    model: ModelSpec
    layout: str
    tokens_per_s: float
    tokens: float


def describe_like(model: ModelSpec, base: ModelSpec, tokens: float) -> Shape:
    """Describe a model to the loss laws: with the attention and the vocabulary of `base`.

    No law says how the loss depends on them, and as parameters they would count like any others.
    """
    attention = _scale_attention(base, model.hidden_size)
    return describe_shape(replace(model, attention=attention, vocab_size=base.vocab_size), tokens)


def _scale_attention(base: ModelSpec, width: int) -> AttentionSpec:
    """Return the attention of `base` with heads in proportion to the width."""
    attention = base.attention
    per_width = attention.heads / base.hidden_size
    groups = max(1, round(per_width * width / attention.kv_heads))
    return replace(attention, heads=groups * attention.kv_heads)


def list_shapes(base: ModelSpec, goal: DesignGoal, axes: ShapeAxes) -> Iterator[ModelSpec]:
    """Yield models like `base` of other width, depth, experts, experts a token and their width.

    `axes` has what else is varied.

    Widths are those of today's models, and in proportion smaller of a base that is smaller.
    """
    moe = base.moe
    if moe is None:
        return
    scale = min(1.0, base.hidden_size / WIDTHS[0])
    for full_width in WIDTHS:
        width = round(full_width * scale)
        attention = _scale_attention(base, width)
        for aspect in ASPECTS:
            layers = max(8, 4 * round(width / aspect / 4))
            for experts in EXPERTS:
                for top_k in CHOSEN:
                    for active_width in ACTIVE_WIDTHS:
                        ffn = max(_TILE, _TILE * round(active_width * width / top_k / _TILE))
                        shape = replace(
                            base,
                            name=f"h{width}-l{layers}-e{experts}-k{top_k}-f{ffn}",
                            hidden_size=width,
                            layers=layers,
                            attention=attention,
                            moe=replace(
                                moe,
                                experts=experts,
                                ffn_size=ffn,
                                shared_ffn_size=ffn if moe.shared_ffn_size else 0,
                                router=replace(moe.router, top_k=top_k),
                            ),
                            moe_layers=(True,) * layers,
                        )
                        yield from (
                            variant for variant in axes.vary(shape) if _is_allowed(variant, goal)
                        )


def _is_allowed(shape: ModelSpec, goal: DesignGoal) -> bool:
    counts = count_parameters(shape)
    total = goal.most_total or float("inf")
    active = goal.most_active or float("inf")
    return counts.total <= total and counts.active <= active


def estimate_template(
    model: ModelSpec, workload: Workload, hardware: Hardware
) -> tuple[str, Estimate] | None:
    """Return the fastest template layout that fits surely enough, None where none does."""
    best: tuple[str, Estimate] | None = None
    for text in _TEMPLATES:
        try:
            layout = parse_layout(text, world_size=hardware.count)
        except BadInput:
            continue
        if any(check_legality(Job(model=model, workload=workload, layout=layout))):
            continue
        estimated = estimate(model, workload, hardware, layout)
        is_faster = best is None or estimated.step_s < best[1].step_s
        if estimated.fit_probability >= _FIT and is_faster:
            best = text, estimated
    return best


def rank_by_flops(
    shapes: Sequence[ModelSpec],
    workload: Workload,
    goal: DesignGoal,
    base: ModelSpec,
    flops_per_s: float,
) -> list[ModelSpec]:
    """Return the shapes at one rate of model FLOPs, best loss first, or least FLOPs to the loss.

    The interval of losses is not needed: the mean over the laws orders them. Shapes that never have
    the loss are left out.
    """
    speeds = [flops_per_s / model_flops_per_token(shape, workload.seq_len) for shape in shapes]
    counts = [
        # Of one token: the goal says how many there are to be.
        goal.count_tokens(describe_like(shape, base, 1.0), speed)
        for shape, speed in zip(shapes, speeds, strict=True)
    ]
    able = [
        (shape, tokens, tokens / speed)
        for shape, tokens, speed in zip(shapes, counts, speeds, strict=True)
        if tokens is not None
    ]
    if not able:
        return []
    if goal.reference is not None:
        keys = [seconds for _, _, seconds in able]
    else:
        described = [describe_like(shape, base, tokens) for shape, tokens, _ in able]
        # Any reference orders them alike: it moves all predictions by the same amount.
        middle = described[len(described) // 2]
        keys = [prediction.loss for prediction in predict_losses(described, middle)]
    return [able[place][0] for place in sorted(range(len(able)), key=keys.__getitem__)]


def time_shape(
    shape: ModelSpec, workload: Workload, hardware: Hardware, goal: DesignGoal, base: ModelSpec
) -> TimedShape | None:
    """Return a shape timed in its best template layout.

    It is None where none fits or it never has the loss of the goal. The laws take its attention and
    its vocabulary for those of `base`.
    """
    fastest = estimate_template(shape, workload, hardware)
    if fastest is None:
        return None
    layout, estimated = fastest
    return train_shape(shape, layout, workload.tokens_per_step / estimated.step_s, goal, base)


def train_shape(
    shape: ModelSpec, layout: str, tokens_per_s: float, goal: DesignGoal, base: ModelSpec
) -> TimedShape | None:
    """Return a shape at a speed with the tokens that it sees; None where it never has the loss.

    The laws take its attention and its vocabulary for those of `base`.
    """
    tokens = goal.count_tokens(describe_like(shape, base, 1.0), tokens_per_s)
    if tokens is None:
        return None
    return TimedShape(model=shape, layout=layout, tokens_per_s=tokens_per_s, tokens=tokens)


def find_front(shapes: Sequence[DesignedShape]) -> list[DesignedShape]:
    """Return the shapes that none other beats in all of their figures.

    They are loss, days, total and active parameters, memory of serving and hours of a life.
    """
    return [
        shape
        for shape in shapes
        if not any(_dominates(other, shape) for other in shapes if other is not shape)
    ]


def _dominates(other: DesignedShape, shape: DesignedShape) -> bool:
    figures, other_figures = map(_list_figures, (shape, other))
    no_worse = all(first <= second for first, second in zip(other_figures, figures, strict=True))
    return no_worse and other_figures != figures


def _list_figures(shape: DesignedShape) -> tuple[float, ...]:
    loss = round(shape.prediction.loss, 6)  # equal where a loss is the goal
    sizes = (shape.total, shape.active, shape.serving_bytes)
    return (loss, shape.days, *sizes, shape.life_hours)
