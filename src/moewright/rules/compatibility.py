"""Memory, overlap, graph and dispatcher choices that cannot stand together, or would have nothing
to act on (docs/formulas.md 5 and 6). A request without effect is refused, not ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum

from moewright.rules.context_parallel import cp_factors
from moewright.spec.errors import Reason
from moewright.spec.layout import (
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
from moewright.spec.workload import Dtype, RouterAssignment, RouterForce, Workload

_EXPERT_OFFLOADS = (Offload.EXPERT_FC1, Offload.MOE_ACT)
_ROUTER_GRAPHS = (CudaGraphScope.MOE_ROUTER, CudaGraphScope.MOE_PREPROCESS)


def has_experts(model: ModelSpec) -> bool:
    return model.moe is not None and model.moe_layer_count > 0


def check_compatibility(model: ModelSpec, workload: Workload, layout: Layout) -> Iterator[Reason]:
    """Every such rule that is broken. Degrees are not looked at beyond being 1 or more."""
    yield from _recompute(model, layout)
    yield from _offload(model, layout)
    yield from _overlap(layout)
    if Overlap.EP in layout.overlap:
        yield from _ep_overlap(model, workload, layout)
    if Overlap.SHARED in layout.overlap:
        yield from _shared_overlap(model, layout)
    yield from _graphs(model, layout)
    yield from _exchange(model, layout)
    yield from _assignment(model, workload, layout)
    yield from _padding(layout)


def _drop(field: str, chosen: tuple[StrEnum, ...], dropped: Iterable[StrEnum], rule: str) -> Reason:
    """A Reason whose nearest legal value is the choice without the `dropped` items."""
    out = set(dropped)
    nearest = "+".join(item for item in chosen if item not in out) or "none"
    return Reason(field=f"layout.{field}", value="+".join(chosen), rule=rule, nearest=nearest)


def _recompute(model: ModelSpec, layout: Layout) -> Iterator[Reason]:
    chosen = layout.recompute
    inside = [item for item in chosen if item not in (Recompute.FULL, Recompute.LOSS)]
    if Recompute.FULL in chosen and inside:
        yield _drop("recompute", chosen, inside, "full replays every module and stands alone")
    if Recompute.FULL in chosen and layout.recompute_block and layout.recompute_span > 1:
        value, rule = (
            f"block{layout.recompute_block}+uniform{layout.recompute_span}",
            "block and uniform exclude each other",
        )
        yield Reason(
            field="layout.recompute",
            value=value,
            rule=rule,
            nearest=f"block{layout.recompute_block}",
        )
    idle = {
        Recompute.MOE: ("a model with experts", has_experts(model)),
        Recompute.MOE_ACT: ("a model with experts", has_experts(model)),
        Recompute.MLP: ("a layer with a dense MLP", model.moe_layer_count < model.layers),
        Recompute.SHARED_EXPERTS: (
            "a shared expert",
            model.moe is not None and model.moe.shared_ffn_size > 0,
        ),
        Recompute.MLA_UP_PROJ: (
            "multi-latent attention",
            model.attention.kind is AttentionKind.MLA,
        ),
    }
    for module in chosen:
        needed, there = idle.get(module, ("", True))
        if not there:
            yield _drop("recompute", chosen, [module], f"{module} needs {needed}")


def _offload(model: ModelSpec, layout: Layout) -> Iterator[Reason]:
    chosen = layout.offload
    activations = [item for item in chosen if item is not Offload.OPTIMIZER]
    experts = [item for item in chosen if item in _EXPERT_OFFLOADS]
    if activations and Recompute.FULL in layout.recompute:
        yield _drop(
            "offload",
            chosen,
            activations,
            "full recompute keeps no activation that could be offloaded",
        )
    elif experts and Recompute.MOE in layout.recompute:
        yield _drop("offload", chosen, experts, "nothing inside a recomputed moe can be offloaded")
    if experts and not has_experts(model):
        yield _drop("offload", chosen, experts, "the model has no experts")
    if Offload.ATTN_PROJ in chosen and Offload.CORE_ATTN not in chosen:
        yield _drop(
            "offload",
            chosen,
            [Offload.ATTN_PROJ],
            "attn_proj is offloaded only together with core_attn",
        )


def _overlap(layout: Layout) -> Iterator[Reason]:
    chosen = layout.overlap
    if Overlap.PARAM in chosen and Overlap.GRAD not in chosen:
        yield _drop("overlap", chosen, [Overlap.PARAM], "param needs grad")
    if Overlap.PARAM in chosen and layout.zero == 0:
        yield _drop("overlap", chosen, [Overlap.PARAM], "zero=0 gathers no parameters")
    if Overlap.TP in chosen and not (layout.sp and layout.tp > 1):
        yield _drop("overlap", chosen, [Overlap.TP], "tp needs tp > 1 with sequence parallelism")
    if Overlap.P2P in chosen and not (layout.pp > 1 and layout.vpp > 1):
        yield _drop(
            "overlap",
            chosen,
            [Overlap.P2P],
            "p2p needs pp > 1 with vpp > 1: 1f1b waits for every message",
        )
    if Overlap.WGRAD in chosen and Overlap.EP not in chosen:
        yield _drop(
            "overlap",
            chosen,
            [Overlap.WGRAD],
            "wgrad needs ep, whose exchanges it makes room beside",
        )
    if Overlap.WGRAD in chosen and layout.schedule.splits_backward:
        rule = f"{layout.schedule} has rows of its own for weight gradients"
        yield _drop("overlap", chosen, [Overlap.WGRAD], rule)


def _ep_overlap(model: ModelSpec, workload: Workload, layout: Layout) -> Iterator[Reason]:
    def refuse(rule: str) -> Reason:
        return _drop("overlap", layout.overlap, [Overlap.EP], rule)

    if layout.ep == 1:
        yield refuse("ep needs ep > 1")
    if layout.dispatcher is DispatcherKind.ALL_GATHER:
        yield refuse("ep needs an all-to-all dispatcher")
    if layout.pp > 1 and layout.vpp == 1:
        yield refuse("ep with pp > 1 needs vpp > 1")
    if layout.schedule is Schedule.ZBV:
        yield refuse("zbv runs no forward beside a backward")
    replayed = [item for item in layout.recompute if item in (Recompute.FULL, Recompute.MOE)]
    if replayed:
        yield refuse(f"ep cannot stand with recompute={replayed[0]}")
    if workload.precision is Dtype.FP32:
        yield refuse("ep needs bf16 or fp16 compute")
    if model.mtp_layers > 1:
        yield refuse("ep takes at most one MTP layer")


def _shared_overlap(model: ModelSpec, layout: Layout) -> Iterator[Reason]:
    rules = (
        (
            "shared needs a shared expert",
            not has_experts(model) or model.moe is None or not model.moe.shared_ffn_size,
        ),
        ("shared needs ep > 1", layout.ep == 1),
        ("shared needs an all-to-all dispatcher", layout.dispatcher is DispatcherKind.ALL_GATHER),
        (
            "shared cannot stand with ep, which runs another micro-batch there",
            Overlap.EP in layout.overlap,
        ),
        (
            "shared cannot stand with recompute=shared_experts",
            Recompute.SHARED_EXPERTS in layout.recompute,
        ),
    )
    for rule, broken in rules:
        if broken:
            yield _drop("overlap", layout.overlap, [Overlap.SHARED], rule)


def _graphs(model: ModelSpec, layout: Layout) -> Iterator[Reason]:
    chosen = layout.graphs
    if not chosen:
        return
    routed = [part for part in chosen if part in _ROUTER_GRAPHS]
    if CudaGraphScope.FULL in chosen and len(chosen) > 1:
        rule = "full captures the whole iteration and stands alone"
        yield Reason(field="layout.graphs", value="+".join(chosen), rule=rule, nearest="full")
    if CudaGraphScope.MOE_PREPROCESS in chosen and CudaGraphScope.MOE_ROUTER not in chosen:
        yield _drop(
            "graphs", chosen, [CudaGraphScope.MOE_PREPROCESS], "moe_preprocess needs moe_router"
        )
    if routed and not has_experts(model):
        yield _drop("graphs", chosen, routed, "the model has no experts")
    if CudaGraphScope.FULL not in chosen and Recompute.FULL in layout.recompute:
        yield _drop("graphs", chosen, chosen, "full recompute goes only with graphs=full")
    if routed and Recompute.MOE in layout.recompute:
        yield _drop("graphs", chosen, routed, "a recomputed moe cannot lie half inside a graph")
    static = layout.capacity > 0 or layout.dispatcher is DispatcherKind.HYBRIDEP
    if CudaGraphScope.FULL in chosen and has_experts(model) and not static:
        rule = "full needs static shapes: a capacity, or the hybridep dispatcher with its budget per rank"
        yield _drop("graphs", chosen, chosen, rule)


def _exchange(model: ModelSpec, layout: Layout) -> Iterator[Reason]:
    """Dispatchers, and the ways attention exchanges keys and values under context parallelism."""
    direct = (DispatcherKind.ALL_TO_ALL, DispatcherKind.ALL_GATHER)
    if has_experts(model) and layout.dispatcher not in direct and layout.ep * layout.etp == 1:
        rule = "needs etp * ep > 1"
        yield Reason(
            field="layout.dispatcher",
            value=layout.dispatcher,
            rule=rule,
            nearest=DispatcherKind.ALL_TO_ALL,
        )
    if layout.cp_comm is CpComm.P2P:
        return
    rule, apart = "", cp_factors(layout)[0]
    heads, kv_heads = (
        model.attention.heads // layout.tp,
        max(1, model.attention.kv_heads // layout.tp),
    )
    if layout.cp == 1:
        rule = "needs cp > 1"
    elif layout.cp_comm is CpComm.A2A_P2P and apart == 1:
        rule = f"cp={layout.cp} has no divisor from 2 to 8 that is not above its square root"
    elif heads % apart or (kv_heads % apart and apart % kv_heads):
        rule = f"{apart} ranks exchange heads: must divide the {heads} heads a rank has, and divide its {kv_heads} kv "
        rule += "heads or be a multiple of them"
    if rule:
        yield Reason(field="layout.cp_comm", value=layout.cp_comm, rule=rule, nearest=CpComm.P2P)


def _padding(layout: Layout) -> Iterator[Reason]:
    """Rows padded to a capacity need one, and rows that travel by expert."""
    if layout.capacity_fill is CapacityFill.USED:
        return
    value, rule = layout.capacity_fill, ""
    if not layout.capacity:
        rule = "needs a capacity"
    elif layout.dispatcher not in (DispatcherKind.ALL_TO_ALL, DispatcherKind.HYBRIDEP):
        rule = f"does not go with dispatcher={layout.dispatcher}, which moves no row an expert"
    if rule:
        yield Reason(
            field="layout.capacity_fill", value=value, rule=rule, nearest=CapacityFill.USED
        )


def _assignment(model: ModelSpec, workload: Workload, layout: Layout) -> Iterator[Reason]:
    """Sinkhorn routing evens the load itself: nothing else that chooses, evens or cuts goes with
    it."""
    training, loss = workload.router, workload.loss
    if training.assignment is not RouterAssignment.SINKHORN:
        if training.sinkhorn_iterations:
            rule, given = "counts for assignment=sinkhorn alone", str(training.sinkhorn_iterations)
            yield Reason(field="workload.sinkhorn_iterations", value=given, rule=rule, nearest="0")
        return
    router = model.moe.router if model.moe else None
    others: tuple[tuple[str, object, object], ...] = (
        ("workload.aux_coeff", loss.aux_coeff, 0.0),
        ("workload.seq_aux_coeff", loss.seq_aux_coeff, 0.0),
        ("workload.global_aux_coeff", loss.global_aux_coeff, 0.0),
        ("workload.force", training.force, RouterForce.NONE),
        ("layout.capacity", layout.capacity, 0.0),
        ("model.moe.router.selection_bias", bool(router and router.selection_bias), False),
        (
            "model.moe.router.top_groups",
            router.top_groups if router else 1,
            router.groups if router else 1,
        ),
    )
    for field, value, only in others:
        if value != only:
            near = f"{only:g}" if isinstance(only, float) else str(only)
            yield Reason(
                field=field,
                value=str(value),
                rule="does not go with assignment=sinkhorn",
                nearest=near,
            )
