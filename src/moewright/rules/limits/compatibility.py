"""Memory, overlap, graph and dispatcher choices that exclude each other or would have no effect.

See docs/formulas.md 5 and 6. A choice without effect is refused, not ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from math import ceil

from moewright.rules.context_parallel import cp_factors
from moewright.rules.expert_load import expected_load, has_natural_load
from moewright.rules.job import Job
from moewright.rules.routing import counts_copies
from moewright.rules.saved.saved_tensor import activation_offloads
from moewright.spec.choices import Payload
from moewright.spec.errors import Reason
from moewright.spec.layout import (
    DEFAULT_LAYOUT,
    CapacityFill,
    CpComm,
    CudaGraphScope,
    DispatcherKind,
    Layout,
    Offload,
    Overlap,
    Recompute,
    Schedule,
)
from moewright.spec.model import AttentionKind, ModelSpec
from moewright.spec.workload import RouterAssignment, RouterForce

_EXPERT_OFFLOADS = (Offload.EXPERT_FC1, Offload.MOE_ACT)
_STATIC_DISPATCHERS = " or ".join(kind for kind in DispatcherKind if kind.facts.has_static_shapes)
_ROUTER_GRAPHS = (CudaGraphScope.MOE_ROUTER, CudaGraphScope.MOE_PREPROCESS)


def has_experts(model: ModelSpec) -> bool:
    """Return whether any layer of the model has experts."""
    return model.moe is not None and model.moe_layer_count > 0


def check_compatibility(job: Job) -> Iterator[Reason]:
    """Yield every broken rule. Degrees are not checked beyond being 1 or more."""
    yield from _check_recompute(job.model, job.layout)
    yield from _check_offload(job.model, job.layout)
    yield from _check_overlap(job.layout)
    if Overlap.EP in job.layout.overlap:
        yield from _check_ep_overlap(job.layout)
    if Overlap.SHARED in job.layout.overlap:
        yield from _check_shared_overlap(job.model, job.layout)
    yield from _check_graphs(job.model, job.layout)
    yield from _check_exchanges(job.model, job.layout)
    yield from _check_assignment(job)
    yield from _check_capacity_fill(job.layout)
    yield from _check_rank_capacity(job)


def _without(
    field: str, chosen: tuple[StrEnum, ...], dropped: Iterable[StrEnum], rule: str
) -> Reason:
    """Return a Reason whose nearest legal value is the choice without the `dropped` items."""
    out = set(dropped)
    nearest = "+".join(item for item in chosen if item not in out) or "none"
    return Reason(field=f"layout.{field}", value="+".join(chosen), rule=rule, nearest=nearest)


def _check_recompute(model: ModelSpec, layout: Layout) -> Iterator[Reason]:
    chosen = layout.recompute
    # The loss is the head's, outside of the layers that full recompute repeats.
    modules = [item for item in chosen if item not in (Recompute.FULL, Recompute.LOSS)]
    if Recompute.FULL in chosen and modules:
        rule = "full recomputes every module and cannot be combined with others"
        yield _without("recompute", chosen, modules, rule)
    for name, usual in (("recompute_block", 0), ("recompute_span", 1)):
        value = getattr(layout, name)
        if value != usual and Recompute.FULL not in chosen:
            rule = "chooses layers of full recompute, which recompute does not ask for"
            yield Reason(field=f"layout.{name}", value=str(value), rule=rule, nearest=str(usual))
    if Recompute.FULL in chosen and layout.recompute_block and layout.recompute_span > 1:
        yield Reason(
            field="layout.recompute",
            value=f"block{layout.recompute_block}+uniform{layout.recompute_span}",
            rule="block and uniform exclude each other",
            nearest=f"block{layout.recompute_block}",
        )
    has_shared = model.moe is not None and model.moe.shared_ffn_size > 0
    needs = {
        Recompute.MOE: ("a model with experts", has_experts(model)),
        Recompute.MOE_ACT: ("a model with experts", has_experts(model)),
        Recompute.MLP: ("a layer with a dense MLP", model.dense_layer_count > 0),
        Recompute.SHARED_EXPERTS: ("a shared expert", has_shared),
        Recompute.MLA_UP_PROJ: (
            "multi-latent attention",
            model.attention.kind is AttentionKind.MLA,
        ),
    }
    for module in chosen:
        needed, is_met = needs.get(module, ("", True))
        if not is_met:
            yield _without("recompute", chosen, [module], f"{module} needs {needed}")


def _check_offload(model: ModelSpec, layout: Layout) -> Iterator[Reason]:
    chosen = layout.offload
    activations = activation_offloads(chosen)
    experts = [item for item in chosen if item in _EXPERT_OFFLOADS]
    if activations and Recompute.FULL in layout.recompute:
        rule = "full recompute keeps no activation that could be offloaded"
        yield _without("offload", chosen, activations, rule)
    elif experts and Recompute.MOE in layout.recompute:
        rule = "nothing inside a recomputed moe can be offloaded"
        yield _without("offload", chosen, experts, rule)
    if experts and not has_experts(model):
        yield _without("offload", chosen, experts, "the model has no experts")
    for name in ("offload_fraction", "offload_layers"):
        fraction = getattr(layout, name)
        if not 0 < fraction <= 1:
            rule = "is a fraction above 0, at most 1"
            yield Reason(field=f"layout.{name}", value=f"{fraction}", rule=rule, nearest="1")
    if layout.offload_layers < 1 and not activations:
        yield Reason(
            field="layout.offload_layers",
            value=f"{layout.offload_layers}",
            rule="a fraction of the layers needs activations to offload",
            nearest="1",
        )
    yield from _check_offload_chunks(layout, has_activations=bool(activations))
    if Offload.ATTN_PROJ in chosen and Offload.CORE_ATTN not in chosen:
        rule = "attn_proj is offloaded only together with core_attn"
        yield _without("offload", chosen, [Offload.ATTN_PROJ], rule)


def _check_offload_chunks(layout: Layout, *, has_activations: bool) -> Iterator[Reason]:
    chunks = layout.offload_chunks
    if (0 < chunks <= layout.vpp and has_activations) or chunks == 0:
        return
    rule = "chunks need activations to offload"
    nearest = 0
    if has_activations:
        rule = f"is a number of the vpp={layout.vpp} chunks of a rank, or 0 for all"
        nearest = max(0, min(chunks, layout.vpp))
    yield Reason(field="layout.offload_chunks", value=str(chunks), rule=rule, nearest=str(nearest))


def _check_overlap(layout: Layout) -> Iterator[Reason]:
    chosen = layout.overlap
    if not chosen:
        return
    rules = (
        (Overlap.PARAM, Overlap.GRAD not in chosen, "param needs grad"),
        (Overlap.PARAM, layout.zero == 0, "zero=0 gathers no parameters"),
        (
            Overlap.TP,
            not (layout.sp and layout.tp > 1),
            "tp needs tp > 1 with sequence parallelism",
        ),
        (
            Overlap.P2P,
            not (layout.pp > 1 and layout.vpp > 1),
            "p2p needs pp > 1 with vpp > 1: 1f1b waits for every message",
        ),
        (
            Overlap.WGRAD,
            Overlap.EP not in chosen,
            "wgrad needs ep: delayed weight gradients hide its exchanges",
        ),
        (
            Overlap.WGRAD,
            layout.schedule.splits_backward,
            f"{layout.schedule} has rows of its own for weight gradients",
        ),
    )
    for item, is_broken, rule in rules:
        if item in chosen and is_broken:
            yield _without("overlap", chosen, [item], rule)


def _check_ep_overlap(layout: Layout) -> Iterator[Reason]:
    rules = (
        (layout.ep == 1, "ep needs ep > 1"),
        (
            layout.dispatcher.facts.payload is Payload.TOKENS,
            "ep needs an all-to-all dispatcher",
        ),
        (layout.pp > 1 and layout.vpp == 1, "ep with pp > 1 needs vpp > 1"),
        (
            layout.schedule in (Schedule.ZBV, Schedule.V_HALF, Schedule.V_MIN),
            f"{layout.schedule} runs no forward beside a backward",
        ),
        (
            layout.schedule is Schedule.GIS,
            "gis holds too few micro-batches: a forward that ends with a backward reaches the next "
            "rank late, which makes steps three tenths longer",
        ),
        (layout.zero == 3 and layout.vpp > 1, "ep with zero=3 needs vpp=1"),
    )
    for is_broken, rule in rules:
        if is_broken:
            yield _without("overlap", layout.overlap, [Overlap.EP], rule)


def _check_shared_overlap(model: ModelSpec, layout: Layout) -> Iterator[Reason]:
    has_shared = has_experts(model) and model.moe is not None and model.moe.shared_ffn_size > 0
    rules = (
        (not has_shared, "shared needs a shared expert"),
        (layout.ep == 1, "shared needs ep > 1"),
        (
            layout.dispatcher.facts.payload is Payload.TOKENS,
            "shared needs an all-to-all dispatcher",
        ),
        (
            Overlap.EP in layout.overlap,
            "shared cannot be combined with ep, which runs another micro-batch at that time",
        ),
        (
            Recompute.SHARED_EXPERTS in layout.recompute,
            "shared cannot be combined with recompute=shared_experts",
        ),
    )
    for is_broken, rule in rules:
        if is_broken:
            yield _without("overlap", layout.overlap, [Overlap.SHARED], rule)


def _check_graphs(model: ModelSpec, layout: Layout) -> Iterator[Reason]:
    chosen = layout.graphs
    if not chosen:
        return
    is_full = CudaGraphScope.FULL in chosen
    router_parts = [part for part in chosen if part in _ROUTER_GRAPHS]
    if is_full and len(chosen) > 1:
        rule = "full captures the whole iteration and cannot be combined with others"
        yield Reason(field="layout.graphs", value="+".join(chosen), rule=rule, nearest="full")
    if CudaGraphScope.MOE_PREPROCESS in chosen and CudaGraphScope.MOE_ROUTER not in chosen:
        rule = "moe_preprocess needs moe_router"
        yield _without("graphs", chosen, [CudaGraphScope.MOE_PREPROCESS], rule)
    if CudaGraphScope.MAMBA in chosen and model.recurrent is None:
        rule = "mamba needs layers that carry a state along the sequence"
        yield _without("graphs", chosen, [CudaGraphScope.MAMBA], rule)
    if router_parts and not has_experts(model):
        yield _without("graphs", chosen, router_parts, "the model has no experts")
    if not is_full and Recompute.FULL in layout.recompute:
        yield _without(
            "graphs", chosen, chosen, "full recompute can only be combined with graphs=full"
        )
    if router_parts and Recompute.MOE in layout.recompute:
        rule = "a recomputed moe cannot lie half inside a graph"
        yield _without("graphs", chosen, router_parts, rule)
    ep_overlap = Overlap.EP in layout.overlap
    if ep_overlap and not is_full and layout.zero == 3:
        rule = "overlap=ep with zero=3 gathers weights between the parts of a layer"
        yield _without("graphs", chosen, chosen, rule)
    delays_wgrad = Overlap.WGRAD in layout.overlap and Overlap.GRAD in layout.overlap
    if CudaGraphScope.ATTN in chosen and delays_wgrad and model.attention.qkv_bias:
        rule = "overlap=grad+wgrad leaves biases of attention out of a graph"
        yield _without("graphs", chosen, [CudaGraphScope.ATTN], rule)
    # A rank with all experts computes the same number of rows whatever the router chooses.
    has_all_experts = layout.ep == 1
    has_budget = layout.capacity > 0 or layout.rank_capacity > 0
    is_static = has_all_experts or has_budget or layout.dispatcher.facts.has_static_shapes
    if is_full and has_experts(model) and not is_static:
        rule = (
            "full needs static shapes: ep=1, a rank_capacity, a capacity, or the "
            f"{_STATIC_DISPATCHERS} dispatcher with its budget per rank"
        )
        yield _without("graphs", chosen, chosen, rule)


def _check_exchanges(model: ModelSpec, layout: Layout) -> Iterator[Reason]:
    """Yield broken rules of dispatchers and of attention's exchange under context parallelism."""
    if has_experts(model) and counts_copies(layout) and layout.ep * layout.etp == 1:
        yield Reason(
            field="layout.dispatcher",
            value=layout.dispatcher,
            rule="needs etp * ep > 1",
            nearest=DEFAULT_LAYOUT.dispatcher,
        )
    rule = _broken_cp_rule(model, layout)
    if rule:
        yield Reason(field="layout.cp_comm", value=layout.cp_comm, rule=rule, nearest=CpComm.P2P)


def _broken_cp_rule(model: ModelSpec, layout: Layout) -> str:
    """Return why attention cannot exchange as `cp_comm` says; "" where it can."""
    if layout.cp_comm is CpComm.P2P:
        return ""
    if layout.cp == 1:
        return "needs cp > 1"
    a2a_ranks = cp_factors(layout)[0]
    if layout.cp_comm is CpComm.A2A_P2P and a2a_ranks == 1:
        return f"cp={layout.cp} has no divisor from 2 to 8 that is not above its square root"
    heads = model.attention.heads // layout.tp
    # More TP ranks than key heads hold one head each.
    kv_heads = max(1, model.attention.kv_heads // layout.tp)
    if heads % a2a_ranks or (kv_heads % a2a_ranks and a2a_ranks % kv_heads):
        return (
            f"{a2a_ranks} ranks exchange heads: must divide the {heads} heads a rank has, and "
            f"divide its {kv_heads} kv heads or be a multiple of them"
        )
    return ""


def _check_capacity_fill(layout: Layout) -> Iterator[Reason]:
    """Yield why rows are not padded to a capacity.

    Padding needs a capacity, and a dispatcher that moves rows by expert.
    """
    if layout.capacity_fill is CapacityFill.USED:
        return
    if not layout.capacity:
        rule = "needs a capacity"
    elif not layout.dispatcher.facts.pads_rows:
        rule = f"does not go with dispatcher={layout.dispatcher}, which moves no row an expert"
    else:
        return
    yield Reason(
        field="layout.capacity_fill",
        value=layout.capacity_fill,
        rule=rule,
        nearest=CapacityFill.USED,
    )


def _check_rank_capacity(job: Job) -> Iterator[Reason]:
    """Yield why rows are not padded to a budget of a rank, or why that would hold too few."""
    layout = job.layout
    if not layout.rank_capacity:
        return
    name = "rank_capacity"
    nearest = "0"
    if layout.capacity:
        rule = "drops no row: not with a capacity, which does"
    elif not layout.dispatcher.facts.pads_rows:
        rule = f"does not go with dispatcher={layout.dispatcher}, whose copies it does not count"
    else:
        # What routers usually do is no reason to refuse: a budget below it costs steps again.
        is_stated = not has_natural_load(job.workload)
        load = 1.0
        if is_stated:
            load = max(1.0, expected_load(job).step)
        if layout.rank_capacity >= load:
            return
        # Rounded up: a shorter number below the load would be refused again.
        nearest = f"{ceil(100 * load) / 100:g}"
        rule = (
            f"holds fewer rows than the job expects at its hottest rank ({load:.2f} of the mean): "
            "every step would be run twice"
        )
    value = f"{layout.rank_capacity:g}"
    yield Reason(field=f"layout.{name}", value=value, rule=rule, nearest=nearest)


def _check_assignment(job: Job) -> Iterator[Reason]:
    """Yield what does not go with Sinkhorn routing, which evens out the load itself.

    Nothing else may choose experts, even out their load or cut it off.
    """
    training = job.workload.router
    loss = job.workload.loss
    if training.assignment is not RouterAssignment.SINKHORN:
        if training.sinkhorn_iterations:
            yield Reason(
                field="workload.sinkhorn_iterations",
                value=str(training.sinkhorn_iterations),
                rule="counts for assignment=sinkhorn alone",
                nearest="0",
            )
        return
    required: list[tuple[str, object, object]] = [
        ("workload.aux_coeff", loss.aux_coeff, 0.0),
        ("workload.seq_aux_coeff", loss.seq_aux_coeff, 0.0),
        ("workload.global_aux_coeff", loss.global_aux_coeff, 0.0),
        ("workload.force", training.force, RouterForce.NONE),
        ("layout.capacity", job.layout.capacity, 0.0),
    ]
    if job.model.moe is not None:
        router = job.model.moe.router
        required += [
            ("model.moe.router.selection_bias", router.selection_bias, False),
            ("model.moe.router.top_groups", router.top_groups, router.groups),
        ]
    for field, value, only in required:
        if value != only:
            yield Reason(
                field=field,
                value=str(value),
                rule="does not go with assignment=sinkhorn",
                nearest=f"{only:g}" if isinstance(only, float) else str(only),
            )
