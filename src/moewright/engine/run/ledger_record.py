"""The ledger of a run: what each rank counted on one step, and the routing that explains it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moewright.engine.comm import collectives
from moewright.engine.kernels.fused.compiled import describe_compilation
from moewright.engine.kernels.matmul import has_native_bf16
from moewright.engine.observe.record import write_ledger
from moewright.engine.run.step import StepResult
from moewright.engine.run.train_state import TrainState
from moewright.engine.run.worker import RankContext
from moewright.engine.runtime import Runtime
from moewright.rules.grid import coordinate, stage_index
from moewright.rules.routing import counts_copies, dispatch_nodes
from moewright.spec.ledger import Selection
from moewright.spec.workload import DocumentMasking, Dtype, FusedKernels


def record_ledger(
    state: TrainState,
    run_dir: Path,
    step: int,
    result: StepResult,
    context: RankContext,
    *,
    slots: tuple[tuple[int, ...], ...] = (),
) -> None:
    """Write what this rank counted on this step.

    Rank 0 also writes the selection that explains the routed rows of all ranks, with the experts in
    the `slots` of each layer, where they were moved. Every rank of the world calls this.
    """
    runtime = state.runtime
    selection = _gather_selection(runtime, step, result, context.world_size)
    selection = replace(selection, slots=slots)
    ledger = runtime.counters.build_ledger(
        rank=context.rank,
        pp_rank=runtime.mesh.coordinate("pp"),
        state=state.memory_rows(),
        time=result.phases,
        notes=(*_describe_repeat(result), *_describe_differences(runtime)),
    )
    write_ledger(run_dir, ledger, selection if context.rank == 0 else None)


def _gather_selection(
    runtime: Runtime, step: int, result: StepResult, world_size: int
) -> Selection:
    layout = runtime.mesh.layout
    # [pipeline rank, rank of its stage, micro-batch, layer, expert]; a layer's counts are 0 on all
    # stages but its own, so their sum over the pipeline is that layer's count.
    shape = (layout.pp, world_size // layout.pp, *result.backward.expert_counts.shape)
    by_rank = torch.tensor(collectives.gather_json(result.backward.expert_counts.tolist()))
    ranks = sorted(
        range(world_size),
        key=lambda rank: (coordinate(layout, rank, "pp"), stage_index(layout, rank)),
    )
    gathered = by_rank[ranks].view(shape)
    counts = gathered.sum(0).permute(1, 2, 0, 3)  # [micro-batch, layer, source rank, expert]
    # Experts come first, then copies by rank, then copies by node.
    experts = runtime.model.expert_count
    copies_end = experts + layout.ep
    copies: Any = ()
    if counts_copies(layout):
        copies = _to_tuples(counts[..., experts:copies_end].tolist())
    nodes: Any = ()
    if dispatch_nodes(layout):
        nodes = _to_tuples(counts[..., copies_end:].tolist())
    attended: tuple[Any, ...] = ()
    near: tuple[Any, ...] = ()
    if runtime.workload.data.documents is not DocumentMasking.JOINED:
        attended = tuple(collectives.gather_json(result.backward.attended_pairs))
        if runtime.model.max_window:
            near = tuple(collectives.gather_json(result.backward.window_pairs))
    return Selection(
        step=step,
        counts=_to_tuples(counts[..., :experts].tolist()),
        copies=copies,
        nodes=nodes,
        attended=attended,
        near=near,
        is_repeated=result.backward.is_repeated,
    )


def _describe_repeat(result: StepResult) -> tuple[str, ...]:
    if not result.backward.is_repeated:
        return ()
    return (
        "some rank had more rows than its rank_capacity: the step was run again with all rows, and "
        "what is counted is the second run",
    )


def _to_tuples(value: Any) -> Any:
    """Turn nested lists into nested tuples."""
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value


def _describe_differences(runtime: Runtime) -> tuple[str, ...]:
    """Return notes on what was compiled, and where this CPU computes otherwise than CUDA does."""
    notes: tuple[str, ...] = ()
    if runtime.workload.fused_kernels is FusedKernels.COMPILED:
        notes = (describe_compilation(),)
    precision = runtime.workload.precision
    if runtime.device.type != "cpu" or (precision is not Dtype.FP16 and has_native_bf16()):
        return notes
    missing = Dtype.FP16 if precision is Dtype.FP16 else Dtype.BF16
    return (
        *notes,
        f"this CPU has no {missing} dot product: GEMM operands are widened to fp32 while they "
        "multiply, not kept",
    )
