"""Upcycling: which model of experts a dense one becomes, and what its MLPs are multiplied by
(docs/formulas.md 12).

Every MLP that becomes experts is cut along its hidden width into G slices, and each slice copied
E/G times: expert r * G + g is slice g of copy r. The router's rows are equal within a copy, so a
token that chooses one slice of a copy chooses all of it, with equal weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from moewright.rules.divisibility import divisors, nearest_legal
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec, MoeSpec, RouterSpec

# The family whose config.json says the same model with experts: of all layers, and of some.
_FAMILIES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "llama": ("mixtral", "qwen2_moe"),
        "mistral": ("mixtral", "qwen2_moe"),
        "qwen2": ("qwen2_moe", "qwen2_moe"),
        "qwen3": ("qwen3_moe", "qwen3_moe"),
    }
)


class UpcyclingScaling(StrEnum):
    """Where the factor goes that makes up for G slices sharing the weights of one MLP."""

    EXACT = "exact"  # all of it on the down projection, which is linear: the same function
    # its cube root on gate, up and down each (arXiv 2410.07524): only about the same
    PUBLISHED = "published"


class RouterWeighting(StrEnum):
    """Whether the weights of the chosen experts sum to 1, or are their share of the softmax over
    all."""

    CHOSEN = "post-softmax"
    ALL = "pre-softmax"


@dataclass(frozen=True, kw_only=True, slots=True)
class UpcyclingSpec:
    """E experts, k of them a token, of MLPs cut into `granularity` slices; layer i has them from
    `dense_first` on where `every` divides i.
    """

    experts: int
    top_k: int
    granularity: int = 1
    dense_first: int = 0
    every: int = 1
    scaling: UpcyclingScaling = UpcyclingScaling.EXACT
    weighting: RouterWeighting = RouterWeighting.CHOSEN

    @property
    def copies(self) -> int:
        return self.experts // self.granularity

    @property
    def weight_factors(self) -> tuple[float, float]:
        """What gate and up, and what down, are multiplied by."""
        whole = float(self.granularity)
        if self.weighting is RouterWeighting.ALL:
            whole *= self.experts / self.top_k
        if self.scaling is UpcyclingScaling.EXACT:
            return 1.0, whole
        return whole ** (1 / 3), whole ** (1 / 3)


def upcycle_model(dense: ModelSpec, spec: UpcyclingSpec) -> ModelSpec:
    """The model that a dense one becomes. Raises BadInput with every Reason why it cannot; fields
    as in Upcycling."""
    if reasons := tuple(_reasons(dense, spec)):
        raise BadInput(*reasons)
    layers = _routed(dense, spec)
    router = RouterSpec(
        top_k=spec.top_k,
        pre_softmax=spec.weighting is RouterWeighting.ALL,
        renormalize=spec.weighting is RouterWeighting.CHOSEN,
    )
    return replace(
        dense,
        name=f"{dense.name}-{spec.experts}e",
        family=_FAMILIES[dense.family][not all(layers)],
        dense_ffn_size=0 if all(layers) else dense.dense_ffn_size,
        moe=MoeSpec(
            experts=spec.experts,
            ffn_size=dense.dense_ffn_size // spec.granularity,
            router=router,
        ),
        moe_layers=layers,
    )


def _routed(dense: ModelSpec, choice: UpcyclingSpec) -> tuple[bool, ...]:
    return tuple(i >= choice.dense_first and i % choice.every == 0 for i in range(dense.layers))


def _reasons(dense: ModelSpec, choice: UpcyclingSpec) -> Iterator[Reason]:
    if dense.moe is not None:
        yield Reason(
            field="model",
            value=dense.name,
            rule=f"has {dense.moe.experts} experts already; a dense one is needed",
        )
        return
    if dense.family not in _FAMILIES:
        rule = f"is of a family without a form with experts; known are {', '.join(_FAMILIES)}"
        yield Reason(field="model", value=dense.family or dense.name, rule=rule)
    elif dense.mlp_bias:
        yield Reason(
            field="model.mlp_bias",
            value="true",
            rule="biases of an MLP have no place in experts",
            nearest="false",
        )
    low = (("experts", 1), ("top_k", 1), ("granularity", 1), ("dense_first", 0), ("every", 1))
    small = [(field, least) for field, least in low if getattr(choice, field) < least]
    for field, least in small:
        value = str(getattr(choice, field))
        yield Reason(field=field, value=value, rule=f"must be at least {least}", nearest=str(least))
    if not small:
        yield from _counts(dense, choice)


def _counts(dense: ModelSpec, choice: UpcyclingSpec) -> Iterator[Reason]:
    slices, width = choice.granularity, dense.dense_ffn_size
    if width % slices:
        close = nearest_legal(slices, divisors(width))
        yield Reason(
            field="granularity",
            value=str(slices),
            rule=f"must divide the MLP's width {width}",
            nearest=str(close),
        )
    for field, value in (("experts", choice.experts), ("top_k", choice.top_k)):
        if value % slices:
            rule = f"must be a multiple of granularity {slices}, so that whole MLPs are chosen"
            yield Reason(
                field=field,
                value=str(value),
                rule=rule,
                nearest=str(max(1, round(value / slices)) * slices),
            )
    if choice.top_k > choice.experts:
        rule = f"must be at most experts {choice.experts}"
        yield Reason(field="top_k", value=str(choice.top_k), rule=rule, nearest=str(choice.experts))
    if not any(_routed(dense, choice)):
        rule = f"leaves none of the {dense.layers} layers to experts"
        yield Reason(field="dense_first", value=str(choice.dense_first), rule=rule, nearest="0")
    if choice.scaling is UpcyclingScaling.EXACT and choice.weighting is RouterWeighting.ALL:
        rule = "the chosen experts' share of a softmax over all differs by token: no factor makes up for it exactly"
        yield Reason(
            field="router",
            value=choice.weighting,
            rule=rule,
            nearest=f"{RouterWeighting.CHOSEN}, or --scaling published",
        )
