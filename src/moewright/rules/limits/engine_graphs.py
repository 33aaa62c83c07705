"""Which steps, and which parts of layers, the engine captures in graphs."""

from __future__ import annotations

from collections.abc import Iterator

from moewright.rules.job import Job
from moewright.rules.routing import counts_copies
from moewright.spec.choices import Payload
from moewright.spec.errors import Reason
from moewright.spec.layout import (
    DEFAULT_LAYOUT,
    CapacityFill,
    CudaGraphScope,
    Layout,
    Offload,
    Overlap,
    Recompute,
    Schedule,
)
from moewright.spec.workload import (
    DocumentMasking,
    Dtype,
    RouterAssignment,
    RouterForce,
    Task,
)

# A field, its value, whether the engine refuses it in a graph, and what it takes.
_Choice = tuple[str, object, bool, str]

_MIXERS = frozenset((CudaGraphScope.ATTN, CudaGraphScope.MAMBA))
_MIXER_OFFLOADS = frozenset(
    (Offload.ATTN_NORM, Offload.QKV_LINEAR, Offload.CORE_ATTN, Offload.ATTN_PROJ)
)


def check_graphs(job: Job) -> Iterator[Reason]:
    """Yield what keeps the engine from capturing the graphs that a layout asks for.

    A graph repeats the same operations on the same tensors: the host may read no size, and nothing
    but the tokens may change from step to step. A graph of a part of a layer asks that of the part
    alone.
    """
    graphs = job.layout.graphs
    if not graphs:
        return
    rule = (
        "the engine captures steps of computation and collectives that differ in their tokens "
        "alone: not with graphs=full"
    )
    choices = (*_layout_choices(job), *_workload_choices(job))
    if CudaGraphScope.FULL not in graphs:
        yield from _check_scopes(job)
        rule = (
            "the engine captures parts of layers whose work differs in its tokens alone, forward "
            f"and backward: not with graphs={'+'.join(graphs)}"
        )
        choices = (*_part_choices(job), *_mixer_choices(job), *_router_choices(job))
    for field, value, is_refused, nearest in choices:
        if is_refused:
            yield Reason(field=field, value=str(value), rule=rule, nearest=nearest)


def _check_scopes(job: Job) -> Iterator[Reason]:
    """Yield the parts of layers that the engine does not capture at all, or not of this model."""
    layout = job.layout
    graphs = layout.graphs
    model = job.model
    value = "+".join(graphs)
    is_direct = layout.dispatcher.facts.payload is Payload.ROWS and not layout.rank_capacity
    is_partial = layout.capacity > 0 and layout.capacity_fill is not CapacityFill.PADDED
    if CudaGraphScope.MOE_PREPROCESS in graphs and (not is_direct or is_partial):
        rule = (
            "the engine captures how rows of a plain all-to-all are mapped, where all slots have "
            "rows or capacities are padded"
        )
        nearest = "+".join(part for part in graphs if part is not CudaGraphScope.MOE_PREPROCESS)
        yield Reason(field="layout.graphs", value=value, rule=rule, nearest=nearest or "none")
    if model.residual_streams > 1 or model.attention.indexer is not None:
        rule = (
            "the engine captures parts that take and give one hidden state: not beside parallel "
            "streams, nor where keys are chosen for other layers"
        )
        yield Reason(field="layout.graphs", value=value, rule=rule, nearest="none")


def _part_choices(job: Job) -> Iterator[_Choice]:
    """Yield what goes with no graph of a part of a layer."""
    layout = job.layout
    outside = [kept for kept in layout.offload if kept not in _captured_offloads(layout)]
    captured = [kept for kept in layout.offload if kept not in outside]
    precision = job.workload.precision
    task = job.workload.fine_tuning.task
    # Until weight gradients are computed, a slot would be held that is free without graphs.
    whole = Schedule.INTERLEAVED if layout.vpp > 1 else Schedule.ONE_F_ONE_B
    yield "layout.schedule", layout.schedule, layout.schedule.splits_backward, whole
    # Gathered weights lie elsewhere each time, and gradients in shards.
    yield "layout.zero", layout.zero, layout.zero >= 2, "1"
    # A graph holds what it keeps and what it hands on, wherever copies of it lie.
    yield "layout.offload", "+".join(captured), bool(captured), "+".join(outside) or "none"
    # Scales of the steps before, and rounding that a step's number seeds.
    is_wide = precision in (Dtype.BF16, Dtype.FP32)
    yield "train.precision", precision, not is_wide, Dtype.BF16
    # Chats fill micro-batches unevenly: which tokens count is a number of the host.
    yield "train.task", task, task is not Task.PRETRAIN, Task.PRETRAIN


def _mixer_choices(job: Job) -> Iterator[_Choice]:
    """Yield what goes with no graph of attention or of a recurrence."""
    if not _MIXERS & set(job.layout.graphs):
        return
    documents = job.workload.data.documents
    # Documents are cut elsewhere in each micro-batch.
    is_bounded = documents is not DocumentMasking.JOINED
    yield "data.documents", documents, is_bounded, DocumentMasking.JOINED


def _captured_offloads(layout: Layout) -> frozenset[Offload]:
    """Return the activations that lie in graphs of a layout."""
    captured = {Offload.MLP_NORM}  # the output of a mixer, the input of a router
    if _MIXERS & set(layout.graphs):
        captured |= _MIXER_OFFLOADS
    return frozenset(captured)


def _router_choices(job: Job) -> Iterator[_Choice]:
    """Yield what goes with no graph of a router."""
    layout = job.layout
    if CudaGraphScope.MOE_ROUTER not in layout.graphs:
        return
    router = job.workload.router
    recomputes = Recompute.LAYERNORM in layout.recompute
    others = [part for part in layout.recompute if part is not Recompute.LAYERNORM]
    # The norm's output leaves the graph, which holds it anyway.
    yield "layout.recompute", Recompute.LAYERNORM, recomputes, "+".join(others) or "none"
    yield from _routing_choices(job)
    # Drawn on the host.
    yield "train.force", router.force, router.force is RouterForce.SKEWED, RouterForce.NONE


def _layout_choices(job: Job) -> Iterator[_Choice]:
    layout = job.layout
    is_even = job.workload.router.force is RouterForce.BALANCED and not layout.capacity
    is_fixed = job.model.moe is None or layout.has_fixed_rows or is_even
    overlaps = "+".join(overlap for overlap in layout.overlap if overlap is not Overlap.SHARED)
    offloads = "+".join(kept for kept in layout.offload if kept is not Offload.OPTIMIZER)
    yield "layout.rank_capacity", 0, not is_fixed, "2"
    yield "layout.dispatcher", layout.dispatcher, counts_copies(layout), DEFAULT_LAYOUT.dispatcher
    yield "layout.pp", layout.pp, layout.pp > 1, "1"
    yield "layout.zero", layout.zero, layout.zero >= 2, "1"
    yield "layout.spare", layout.spare, layout.spare > 0, "0"
    yield "layout.overlap", overlaps, bool(overlaps), "none"
    yield "layout.offload", offloads, bool(offloads), "none"


def _workload_choices(job: Job) -> Iterator[_Choice]:
    workload = job.workload
    router = workload.router
    task = workload.fine_tuning.task
    documents = workload.data.documents
    precision = workload.precision
    is_wide = precision in (Dtype.BF16, Dtype.FP32)
    yield "train.precision", precision, not is_wide, Dtype.BF16
    yield "train.force", router.force, router.force is RouterForce.SKEWED, RouterForce.NONE
    yield from _routing_choices(job)
    yield "train.task", task, task is not Task.PRETRAIN, Task.PRETRAIN
    frozen = "+".join(workload.fine_tuning.freeze)
    yield "train.freeze", frozen, bool(frozen), "[]"
    is_bounded = documents is not DocumentMasking.JOINED
    yield "data.documents", documents, is_bounded, DocumentMasking.JOINED


def _routing_choices(job: Job) -> Iterator[_Choice]:
    """Yield the ways to choose experts for which the host reads or draws numbers."""
    router = job.workload.router
    yield "train.jitter_eps", router.jitter_eps, router.jitter_eps > 0, "0"
    is_sinkhorn = router.assignment is RouterAssignment.SINKHORN
    yield "train.assignment", router.assignment, is_sinkhorn, RouterAssignment.TOP_K
    for key in ("record_routes", "replay_routes"):
        folder = getattr(job.workload.routes, key)
        yield f"train.{key}", folder, bool(folder), "no routes"
