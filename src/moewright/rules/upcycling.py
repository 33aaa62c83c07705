"""Upcycling of a dense model to an MoE model: its shape, and the factors of its MLP weights.

See docs/formulas.md 12. Every MLP that becomes experts is cut along its hidden width into G slices,
and each slice copied E/G times: expert r * G + g is slice g of copy r. The router's rows are equal
within a copy, so a token that chooses one slice of a copy chooses all of it, with equal weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moewright.families.table import find_family, known_families
from moewright.rules.limits.divisibility import divisors, nearest_legal
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec, MoeSpec, RouterSpec
from moewright.spec.upcycling import RouterWeighting, UpcyclingScaling, UpcyclingSpec


def upcycle_model(dense: ModelSpec, spec: UpcyclingSpec) -> ModelSpec:
    """Return the MoE model that a dense one becomes.

    Raises:
        BadInput: It cannot; every Reason names a field of UpcyclingSpec or of the model.
    """
    reasons = tuple(_check_upcycling(dense, spec))
    if reasons:
        raise BadInput(*reasons)
    layers = _moe_layers(dense, spec)
    forms = find_family(dense.family).upcycled
    assert forms is not None  # else there were a reason
    router = RouterSpec(
        top_k=spec.top_k,
        pre_softmax=spec.weighting is RouterWeighting.PRE_SOFTMAX,
        renormalize=spec.weighting is RouterWeighting.POST_SOFTMAX,
    )
    return replace(
        dense,
        name=f"{dense.name}-{spec.experts}e",
        family=forms.in_all_layers if all(layers) else forms.in_some_layers,
        dense_ffn_size=0 if all(layers) else dense.dense_ffn_size,
        moe=MoeSpec(
            experts=spec.experts,
            ffn_size=dense.dense_ffn_size // spec.granularity,
            router=router,
        ),
        moe_layers=layers,
    )


def _moe_layers(dense: ModelSpec, spec: UpcyclingSpec) -> tuple[bool, ...]:
    return tuple(i >= spec.dense_first and i % spec.every == 0 for i in range(dense.layers))


def _check_upcycling(dense: ModelSpec, spec: UpcyclingSpec) -> Iterator[Reason]:
    if dense.moe is not None:
        rule = f"has {dense.moe.experts} experts already; a dense one is needed"
        # The rules below are of the dense MLP, which a model with experts need not have.
        yield Reason(field="model", value=dense.name, rule=rule)
        return
    if find_family(dense.family).upcycled is None:
        names = ", ".join(
            family.model_type for family in known_families().values() if family.upcycled
        )
        rule = f"is of a family without a form with experts; known are {names}"
        yield Reason(field="model", value=dense.family or dense.name, rule=rule)
    elif dense.mlp_bias:
        rule = "biases of an MLP have no place in experts"
        yield Reason(field="model.mlp_bias", value="true", rule=rule, nearest="false")
    lowest = (("experts", 1), ("top_k", 1), ("granularity", 1), ("dense_first", 0), ("every", 1))
    too_small = [(field, least) for field, least in lowest if getattr(spec, field) < least]
    for field, least in too_small:
        value = str(getattr(spec, field))
        yield Reason(field=field, value=value, rule=f"must be at least {least}", nearest=str(least))
    if not too_small:
        yield from _check_counts(dense, spec)


def _check_counts(dense: ModelSpec, spec: UpcyclingSpec) -> Iterator[Reason]:
    slices = spec.granularity
    width = dense.dense_ffn_size
    if width % slices:
        rule = f"must divide the MLP's width {width}"
        near = nearest_legal(slices, divisors(width))
        yield Reason(field="granularity", value=str(slices), rule=rule, nearest=near)
    for field, value in (("experts", spec.experts), ("top_k", spec.top_k)):
        if value % slices:
            rule = f"must be a multiple of granularity {slices}, so that whole MLPs are chosen"
            near = str(max(1, round(value / slices)) * slices)
            yield Reason(field=field, value=str(value), rule=rule, nearest=near)
    if spec.top_k > spec.experts:
        rule = f"must be at most experts {spec.experts}"
        yield Reason(field="top_k", value=str(spec.top_k), rule=rule, nearest=str(spec.experts))
    if not any(_moe_layers(dense, spec)):
        rule = f"leaves none of the {dense.layers} layers to experts"
        yield Reason(field="dense_first", value=str(spec.dense_first), rule=rule, nearest="0")
    if spec.scaling is UpcyclingScaling.EXACT and spec.weighting is RouterWeighting.PRE_SOFTMAX:
        rule = (
            "the chosen experts' share of a softmax over all differs by token: no factor makes up "
            "for it exactly"
        )
        near = f"{RouterWeighting.POST_SOFTMAX}, or --scaling published"
        yield Reason(field="router", value=spec.weighting, rule=rule, nearest=near)
