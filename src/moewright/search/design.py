"""Which shape of model to train: shapes, their speed in template layouts, and the Pareto front.

Speed decides with the law: a shape whose matrices are slow sees fewer tokens. All shapes are first
timed by their FLOPs at the utilization of one of them; those with the least losses are then
estimated in a few template layouts, and the best gets a full search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moewright.codec import parse_layout
from moewright.cost.estimate import estimate
from moewright.cost.loss_laws import LossPrediction, describe_shape, predict_losses
from moewright.rules.job import Job
from moewright.rules.limits.legality import check_legality
from moewright.rules.shapes.flops import model_flops_per_token
from moewright.rules.shapes.parameters import count_parameters
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Hardware
from moewright.spec.model import ModelSpec
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


@dataclass(frozen=True, kw_only=True, slots=True)
class DesignGoal:
    """The time or the tokens of a training, and what a shape must not exceed; 0: no limit."""

    seconds: float = 0.0  # of steps
    goodput: float = 1.0  # share of the calendar that is steps
    tokens: float = 0.0
    most_total: float = 0.0  # parameters
    most_active: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DesignedShape:
    """A shape with its best template layout, and the loss of the tokens that it sees."""

    model: ModelSpec
    total: int
    active: int
    layout: str
    tokens_per_s: float
    tokens: float
    days: float
    prediction: LossPrediction


def list_shapes(base: ModelSpec, goal: DesignGoal) -> Iterator[ModelSpec]:
    """Yield models like `base` of other width, depth, experts, experts a token and their width."""
    moe = base.moe
    if moe is None:
        return
    per_width = base.attention.heads / base.hidden_size
    for width in WIDTHS:
        heads = max(1, round(per_width * width / base.attention.kv_heads))
        attention = replace(base.attention, heads=heads * base.attention.kv_heads)
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
                        if _is_allowed(shape, goal):
                            yield shape


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
    shapes: Sequence[ModelSpec], workload: Workload, goal: DesignGoal, flops_per_s: float
) -> list[tuple[ModelSpec, float]]:
    """Return the shapes with the tokens that they see at one rate of model FLOPs, best loss first.

    The interval of losses is not needed: the mean over the laws orders them.
    """
    tokens = [goal.tokens or _count_tokens(shape, workload, goal, flops_per_s) for shape in shapes]
    described = [describe_shape(shape, count) for shape, count in zip(shapes, tokens, strict=True)]
    middle = described[len(described) // 2]
    losses = [prediction.loss for prediction in predict_losses(described, middle)]
    order = sorted(range(len(shapes)), key=losses.__getitem__)
    return [(shapes[place], tokens[place]) for place in order]


def _count_tokens(
    shape: ModelSpec, workload: Workload, goal: DesignGoal, flops_per_s: float
) -> float:
    return goal.seconds * flops_per_s / model_flops_per_token(shape, workload.seq_len)


def time_shapes(
    shapes: Sequence[ModelSpec], workload: Workload, hardware: Hardware, goal: DesignGoal
) -> Iterator[tuple[ModelSpec, str, float, float]]:
    """Yield each shape that fits with its layout, tokens a second, and the tokens that it sees."""
    for shape in shapes:
        fastest = estimate_template(shape, workload, hardware)
        if fastest is None:
            continue
        layout, estimated = fastest
        tokens_per_s = workload.tokens_per_step / estimated.step_s
        yield shape, layout, tokens_per_s, goal.tokens or goal.seconds * tokens_per_s


def find_front(shapes: Sequence[DesignedShape]) -> list[DesignedShape]:
    """Return the shapes that none other beats in loss, days, and total and active parameters."""
    return [
        shape
        for shape in shapes
        if not any(_dominates(other, shape) for other in shapes if other is not shape)
    ]


def _dominates(other: DesignedShape, shape: DesignedShape) -> bool:
    figures = (shape.prediction.loss, shape.days, shape.total, shape.active)
    other_figures = (other.prediction.loss, other.days, other.total, other.active)
    no_worse = all(first <= second for first, second in zip(other_figures, figures, strict=True))
    return no_worse and other_figures != figures
