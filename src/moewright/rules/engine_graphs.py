"""Which steps the engine captures in a graph."""

from __future__ import annotations

from collections.abc import Iterator

from moewright.rules.job import Job
from moewright.spec.errors import Reason
from moewright.spec.layout import CpComm, CudaGraphScope, DispatcherKind, Offload, Overlap
from moewright.spec.workload import (
    DocumentMasking,
    Dtype,
    RouterAssignment,
    RouterForce,
    Task,
)

# A field, its value, whether the engine refuses it in a graph, and what it takes.
_Choice = tuple[str, object, bool, str]


def check_graphs(job: Job) -> Iterator[Reason]:
    """Yield what keeps the engine from capturing the graphs that a layout asks for.

    A graph repeats the same operations on the same tensors: the host may read no size, and nothing
    but the tokens may change from step to step.
    """
    graphs = job.layout.graphs
    if not graphs:
        return
    if CudaGraphScope.FULL not in graphs:
        rule = (
            "the engine captures whole steps: what a part of a layer keeps for backward lies in "
            "stores that a graph of the part would not fill"
        )
        yield Reason(field="layout.graphs", value="+".join(graphs), rule=rule, nearest="full")
        return
    rule = (
        "the engine captures steps of computation and collectives that differ in their tokens "
        "alone: not with graphs=full"
    )
    for field, value, is_refused, nearest in (*_layout_choices(job), *_workload_choices(job)):
        if is_refused:
            yield Reason(field=field, value=str(value), rule=rule, nearest=nearest)


def _layout_choices(job: Job) -> Iterator[_Choice]:
    layout = job.layout
    is_direct = layout.dispatcher in (DispatcherKind.ALL_TO_ALL, DispatcherKind.ALL_GATHER)
    is_even = job.workload.router.force is RouterForce.BALANCED and not layout.capacity
    is_fixed = job.model.moe is None or layout.has_fixed_rows or is_even
    overlaps = "+".join(overlap for overlap in layout.overlap if overlap is not Overlap.SHARED)
    offloads = "+".join(kept for kept in layout.offload if kept is not Offload.OPTIMIZER)
    yield "layout.rank_capacity", 0, not is_fixed, "2"
    yield "layout.dispatcher", layout.dispatcher, not is_direct, DispatcherKind.ALL_TO_ALL
    yield "layout.pp", layout.pp, layout.pp > 1, "1"
    sends = layout.cp > 1 and layout.cp_comm in (CpComm.P2P, CpComm.A2A_P2P)
    yield "layout.cp_comm", layout.cp_comm, sends, CpComm.ALL_GATHER
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
    yield "train.jitter_eps", router.jitter_eps, router.jitter_eps > 0, "0"
    yield "train.force", router.force, router.force is RouterForce.SKEWED, RouterForce.NONE
    is_sinkhorn = router.assignment is RouterAssignment.SINKHORN
    yield "train.assignment", router.assignment, is_sinkhorn, RouterAssignment.TOP_K
    yield "train.task", task, task is not Task.PRETRAIN, Task.PRETRAIN
    frozen = "+".join(workload.fine_tuning.freeze)
    yield "train.freeze", frozen, bool(frozen), "[]"
    for key in ("record_routes", "replay_routes"):
        folder = getattr(workload.routes, key)
        yield f"train.{key}", folder, bool(folder), "no routes"
    is_bounded = documents is not DocumentMasking.JOINED
    yield "data.documents", documents, is_bounded, DocumentMasking.JOINED
