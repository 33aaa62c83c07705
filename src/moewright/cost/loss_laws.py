"""Published laws of the training loss of models with experts, and what they say of a shape.

Every law was fitted to another corpus and another tokenizer, so that their levels cannot be
compared: a shape is predicted by how far its loss lies from that of a reference shape, by each law,
and the level is that of one law or of the user's own runs. How far the laws lie apart is the
interval.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log, log2, log10
from pathlib import Path
from statistics import fmean
from types import MappingProxyType

from moewright.rules.shapes.parameters import count_parameters
from moewright.spec.model import ModelSpec

_DATA = Path(__file__).parent / "data" / "loss_laws.toml"
LEVEL_LAW = "joint"  # whose level is taken
DENSE_LAW = "dense"
TOKENS_RANGE = (1e6, 1e15)  # in which a loss is looked for
_TOKENS_PRECISION = 1e-6  # of their logarithm

Coefficients = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What laws ask of a model and its training.

    `expansion` is the parameters of all experts over those of a token's, `granularity` the
    parameters of a dense MLP four times as wide as the model over those of an expert.
    """

    total: float  # parameters
    active: float
    tokens: float
    expansion: float
    granularity: float
    leverage_granularity: float  # twice the width of the model over that of an expert
    active_experts: float  # shared ones too
    shared_share: float  # of the active experts' parameters

    @property
    def activation(self) -> float:
        """The share of experts that a token activates."""
        return 1 / self.expansion

    @property
    def sparsity(self) -> float:
        """The share of experts that a token does not activate."""
        return 1 - self.activation

    @property
    def flops(self) -> float:
        """Six FLOPs an active parameter and token."""
        return 6 * self.active * self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class LossLaw:
    """A law with its source, what its runs covered, and the deviation of its fit in nats."""

    name: str
    form: str
    source: str
    notes: str
    error: float
    range: Mapping[str, tuple[float, float]]
    coefficients: Coefficients

    def predict(self, shape: Shape) -> float:
        """Return the loss in nats a token."""
        return _FORMS[self.form](self.coefficients, shape)

    def list_outside(self, shape: Shape) -> list[str]:
        """List the quantities of a shape that lie outside what the runs of the law covered."""
        return [
            name
            for name, (low, high) in self.range.items()
            # A quantity at the edge of a range is inside, whatever its rounding.
            if not low <= getattr(shape, name) * (1 + 1e-9) <= high * (1 + 2e-9)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossPrediction:
    """A loss with the interval that the laws span, and how many laws cover the shape."""

    loss: float
    low: float
    high: float
    by_law: tuple[tuple[str, float], ...]
    outside: tuple[str, ...]  # laws that do not cover the shape, with what lies outside


def describe_shape(model: ModelSpec, tokens: float) -> Shape:
    """Describe a model that is trained on so many tokens."""
    counts = count_parameters(model)
    moe = model.moe
    if moe is None:
        return Shape(
            total=counts.total,
            active=counts.active,
            tokens=tokens,
            expansion=1.0,
            granularity=1.0,
            leverage_granularity=2.0,
            active_experts=1.0,
            shared_share=0.0,
        )
    matrices = model.ffn_matrices
    routed = moe.router.top_k * moe.ffn_size
    active = routed + moe.shared_ffn_size
    return Shape(
        total=counts.total,
        active=counts.active,
        tokens=tokens,
        expansion=(moe.experts * moe.ffn_size + moe.shared_ffn_size) / active,
        # Two matrices of h x 4 h over the `matrices` of h x ffn that an expert has.
        granularity=8 * model.hidden_size / (matrices * moe.ffn_size),
        leverage_granularity=2 * model.hidden_size / moe.ffn_size,
        active_experts=active / moe.ffn_size,
        shared_share=moe.shared_ffn_size / active,
    )


def joint_coefficients(law: LossLaw, experts: float) -> tuple[float, float, float, float]:
    """Return m, mu, n, nu of the joint law for a number of experts, as its table 4 prints them."""
    values = law.coefficients
    # Experts saturate: between e_start for one expert and e_max for many (Clark et al. 2022).
    start = 1 / (1 / values["e_start"] - 1 / values["e_max"])
    effective = 1 / (1 / (experts - 1 + start) + 1 / values["e_max"])
    return (
        values["a"] * effective ** values["delta"],
        values["alpha"] + values["gamma"] * log(effective),
        values["b"] * effective ** values["omega"],
        values["beta"] + values["zeta"] * log(effective),
    )


def efficiency_leverage(
    values: Coefficients, activation: float, granularity: float, flops: float
) -> float:
    """Return how many times its compute a dense model needs for the same loss."""
    start = 1 / (1 / values["a_start"] - 1 / values["a_max"])
    saturated = 1 / (1 / (activation + start) + 1 / values["a_max"])
    power = values["a"] + values["d"] * log10(flops)
    finer = log2(granularity)
    leverage: float = saturated ** (power + values["gamma"] * finer**2 + values["beta"] * finer)
    return leverage


def _joint(values: Coefficients, shape: Shape) -> float:
    law = find_law("joint")
    m, mu, n, nu = joint_coefficients(law, shape.expansion)
    loss: float = m * shape.active**mu + n * shape.tokens**nu + values["c"]
    return loss


def _granularity(values: Coefficients, shape: Shape) -> float:
    finer = values["g"] / shape.granularity ** values["gamma"] + values["a"]
    size = finer / shape.total ** values["alpha"]
    loss: float = values["c"] + size + values["b"] / shape.tokens ** values["beta"]
    return loss


def _sparsity(values: Coefficients, shape: Shape) -> float:
    dense = shape.activation
    loss: float = (
        values["a"] / shape.total ** values["alpha"]
        + values["b"] / shape.tokens ** values["beta"]
        + values["c"] / dense ** values["lambda"]
        + values["d"] / (dense ** values["delta"] * shape.total ** values["gamma"])
        + values["e"]
    )
    return loss


def _leverage(values: Coefficients, shape: Shape) -> float:
    leverage = efficiency_leverage(
        values, shape.activation, shape.leverage_granularity, shape.flops
    )
    size = values["dense_a"] / (leverage * shape.active) ** values["dense_alpha"]
    data = values["dense_b"] / shape.tokens ** values["dense_beta"]
    loss: float = values["dense_e"] + size + data
    return loss


def _five_factors(values: Coefficients, shape: Shape) -> float:
    experts, shared = shape.active_experts, shape.shared_share
    structure = values["e"] * experts + values["f"] / experts
    structure += values["m"] * shared**2 + values["n"] * shared
    total, active = shape.total ** values["alpha"], shape.active ** values["alpha"]
    coupling = 1 / total + values["k"] / active + values["h"] * shape.active / shape.total
    data = values["b"] / shape.tokens ** values["beta"]
    sizes = values["a"] / total + values["c"] / active
    loss: float = structure * coupling + sizes + data + values["epsilon"]
    return loss


def _dense(values: Coefficients, shape: Shape) -> float:
    size = values["a"] / shape.active ** values["alpha"]
    loss: float = values["e"] + size + values["b"] / shape.tokens ** values["beta"]
    return loss


_FORMS: Mapping[str, Callable[[Coefficients, Shape], float]] = MappingProxyType(
    {
        "joint": _joint,
        "granularity": _granularity,
        "sparsity": _sparsity,
        "leverage": _leverage,
        "five_factors": _five_factors,
        "dense": _dense,
    }
)


@cache
def read_laws() -> tuple[LossLaw, ...]:
    """Read the laws, in the order of the file."""
    data = tomllib.loads(_DATA.read_text(encoding="utf-8"))
    return tuple(
        LossLaw(
            **{name: row[name] for name in ("name", "form", "source", "notes", "error")},
            range={name: (low, high) for name, (low, high) in row["range"].items()},
            coefficients=row["coefficients"],
        )
        for row in data["law"]
    )


def find_law(name: str) -> LossLaw:
    """Return a law by its name."""
    return next(law for law in read_laws() if law.name == name)


def fit_level(runs: Iterable[tuple[Shape, float]], name: str = LEVEL_LAW) -> float:
    """Return what the losses of one's own runs lie above a law, in the mean.

    It moves the level of predictions to the runs' corpus and tokenizer; exponents stay the law's.
    """
    law = find_law(name)
    return fmean(loss - law.predict(shape) for shape, loss in runs)


def find_reference(shape: Shape, loss: float, level: float = 0.0) -> Shape | None:
    """Return the shape with tokens for a loss by the level's law, None where it never has it."""
    law = find_law(LEVEL_LAW)
    return _find_tokens(shape, lambda trained: law.predict(trained) + level - loss)


def find_tokens(shape: Shape, reference: Shape) -> Shape | None:
    """Return the shape with the tokens that give it the reference's loss, None where none do.

    The mean over the laws decides, as in `predict_losses`.
    """
    laws = [law for law in read_laws() if law.name != DENSE_LAW]
    wanted = fmean(law.predict(reference) for law in laws)
    return _find_tokens(shape, lambda trained: fmean(law.predict(trained) for law in laws) - wanted)


def _find_tokens(shape: Shape, excess: Callable[[Shape], float]) -> Shape | None:
    """Return the shape with the tokens at which a loss, which falls with them, has no excess."""
    # Bisection in the logarithm: the range spans nine decades.
    low, high = map(log, TOKENS_RANGE)
    if excess(replace(shape, tokens=exp(high))) > 0:
        return None
    while high - low > _TOKENS_PRECISION:
        middle = (low + high) / 2
        if excess(replace(shape, tokens=exp(middle))) > 0:
            low = middle
        else:
            high = middle
    return replace(shape, tokens=exp(high))


def predict_losses(
    shapes: Sequence[Shape], reference: Shape, level: float = 0.0
) -> list[LossPrediction]:
    """Predict the losses of shapes with experts, by their distance from a reference shape.

    Shapes that are equal to the reference have the loss of the level's law. The interval is the
    range over the laws, widened by the error of the level's law.
    """
    laws = [law for law in read_laws() if law.name != DENSE_LAW]
    base = find_law(LEVEL_LAW)
    start = base.predict(reference) + level
    at_reference = [law.predict(reference) for law in laws]
    predictions = []
    for shape in shapes:
        changes = [law.predict(shape) - loss for law, loss in zip(laws, at_reference, strict=True)]
        outside = [(law.name, law.list_outside(shape)) for law in laws]
        predictions.append(
            LossPrediction(
                loss=start + fmean(changes),
                low=start + min(changes) - base.error,
                high=start + max(changes) + base.error,
                by_law=tuple(
                    (law.name, start + change) for law, change in zip(laws, changes, strict=True)
                ),
                outside=tuple(f"{name} ({', '.join(what)})" for name, what in outside if what),
            )
        )
    return predictions
