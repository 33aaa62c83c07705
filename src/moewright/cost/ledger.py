"""The predicted ledger of one rank and one training step, to be held against what the engine
counted."""

from __future__ import annotations

from dataclasses import replace

from moewright.cost.activations import ActivationContext, ledger_saved_rows
from moewright.cost.collective_bytes import comm_rows
from moewright.cost.model_states import bucket_sets, fsdp_rows, state_rows
from moewright.cost.replicas import replica_rows
from moewright.cost.routed_rows import ExpertRows, count_expert_rows, rank_chunks, recomputed_layers
from moewright.rules import flops, fsdp, grid, schedule
from moewright.rules.batch_rampup import workload_at_step
from moewright.rules.context_parallel import cp_factors
from moewright.rules.legality import micro_batches
from moewright.rules.stages import chunk_layers
from moewright.spec.layout import Layout, Recompute
from moewright.spec.ledger import Component, FlopOp, FlopRow, Ledger, MemoryRow, Module, Selection
from moewright.spec.model import AttentionKind, ModelSpec
from moewright.spec.plan import Plan
from moewright.spec.workload import Workload

_MOE_BLOCK = (Module.ROUTER, Module.EXPERTS, Module.SHARED_EXPERTS)


def predict_ledger(plan: Plan, *, rank: int, selection: Selection | None) -> Ledger:
    """Memory (states and saved activations), collectives and FLOPs of `rank` in one step.

    Experts get the rows that `selection` recorded, or balanced ones without it. States, collectives
    and FLOPs are exact; memory holds no transients; the time is that of the plan's estimate. Raises
    BadInput for a rank outside the world or a selection of another job.
    """
    workload = (
        workload_at_step(plan.workload, selection.step - 1) if selection else plan.workload
    )  # while batches grow
    found = predict_rank_ledger(plan.model, workload, plan.layout, rank=rank, selection=selection)
    expected = next((one for one in plan.estimate.ledgers if one.pp_rank == found.pp_rank), None)
    return replace(found, time=expected.time) if expected else found


def predict_rank_ledger(
    model: ModelSpec,
    workload: Workload,
    layout: Layout,
    *,
    rank: int,
    selection: Selection | None,
    load: float = 1.0,
) -> Ledger:
    """`predict` from its parts. Without a selection experts get `load` times the balanced rows."""
    pp_rank = grid.coordinate(layout, rank, "pp")
    count = micro_batches(workload, layout)
    rows = count_expert_rows(
        model, workload, layout, rank, micro_batches=count, selection=selection, load=load
    )
    units = fsdp.fsdp_units(model, layout, rank)
    flat = fsdp.flat_buffer_layout(layout)
    sets = [
        one
        for one in bucket_sets(model, workload, flat, rank)
        if not fsdp.is_fsdp_sharded(layout, one.group)
    ]
    table = schedule.timetable(layout, count)[pp_rank]
    chunks = rank_chunks(model, layout, pp_rank)
    context = ActivationContext(
        model=model, workload=workload, layout=layout, is_fused=False, input_ratio=None
    )
    memory = (
        *state_rows(workload, flat, sets),
        *replica_rows(model, workload, layout, pp_rank),
        *fsdp_rows(
            workload, layout, units
        ),  # of the same module where a part of it is cut and a part is not
        *ledger_saved_rows(context, rows, chunks=chunks, table=table),
    )
    held: dict[tuple[Component, Module], int] = {}
    for row in memory:
        held[row.component, row.module] = held.get((row.component, row.module), 0) + row.bytes
    return Ledger(
        rank=rank,
        pp_rank=pp_rank,
        memory=tuple(
            MemoryRow(component=component, module=module, bytes=nbytes)
            for (component, module), nbytes in sorted(held.items())
        ),
        comm=comm_rows(model, workload, layout, rank, rows, sets, units),
        flops=flop_rows(model, workload, layout, pp_rank, rows),
        in_flight=schedule.peak_live_chunks(table),
    )


def flop_rows(
    model: ModelSpec, workload: Workload, layout: Layout, pp_rank: int, rows: ExpertRows
) -> tuple[FlopRow, ...]:
    """FLOPs that the rank dispatches in a step: forward, backward, and what recompute replays."""
    share = _share(model, workload, layout, pp_rank, rows)
    sums: dict[tuple[FlopOp, Module], int] = {}
    trained = flops.train_flop_rows(model, layout, share, seq_len=workload.seq_len)
    again = _share(model, workload, layout, pp_rank, rows, replayed=True)
    for row in (
        *trained,
        *recomputed_flop_rows(model, workload, layout, again),
        *recomputed_logit_rows(model, layout, share),
    ):
        sums[row.op, row.module] = sums.get((row.op, row.module), 0) + row.flops
    return tuple(
        FlopRow(op=op, module=module, flops=value)
        for (op, module), value in sorted(sums.items())
        if value
    )


def _share(
    model: ModelSpec,
    workload: Workload,
    layout: Layout,
    pp_rank: int,
    rows: ExpertRows,
    *,
    replayed: bool = False,
) -> flops.RankShare:
    """What the rank works on, or the layers of it that recompute touches."""
    chunks = rank_chunks(model, layout, pp_rank)
    layers = recomputed_layers(model, layout, chunks) if replayed else None
    mine = [
        layer
        for chunk in chunks
        for layer in chunk_layers(model, chunk)
        if layers is None or layer in layers
    ]
    sequences = len(rows.rows) * layout.mbs
    expected = flops.expected_attended(
        workload.seq_len,
        workload.data.attended_share,
        sequences * cp_factors(layout)[0] / layout.cp,
    )
    return flops.RankShare(
        layers=tuple(layer for layer in mine if layer < model.layers),
        tokens=sequences * workload.seq_len // layout.cp,
        routed_rows=rows.total if layers is None else rows.count_rows(layers),
        head=any(chunk.has_loss for chunk in chunks),
        mtp=sum(layer > model.layers for layer in mine),
        attended=rows.attended_pairs or expected,
        attended_windowed=rows.windowed_pairs,
        mtp_rows=rows.count_rows({layer for layer in mine if layer > model.layers}),
    )


def recomputed_flop_rows(
    model: ModelSpec, workload: Workload, layout: Layout, share: flops.RankShare
) -> tuple[FlopRow, ...]:
    """Forward FLOPs of layers that the recompute choices run a second time in backward."""
    chosen, spec = layout.recompute, model.attention
    work = [
        one
        for one in flops.forward_flops(model, layout, share, seq_len=workload.seq_len)
        if one.module is not Module.HEAD and (Recompute.FULL in chosen or _replays(one, chosen))
    ]
    if Recompute.MLA_UP_PROJ in chosen and spec.kind is AttentionKind.MLA:
        up = (spec.q_lora_rank or model.hidden_size) * spec.q_width
        up += spec.kv_lora_rank * spec.heads * (spec.qk_nope_head_dim + spec.v_head_dim)
        of_layer = 2 * share.tokens * up // layout.tp
        for layers, depth in ((len(share.layers), False), (share.mtp, True)):
            again = flops.ForwardFlops(
                op=FlopOp.GEMM, module=Module.ATTENTION, flops=of_layer * layers, in_mtp=depth
            )
            work.append(again)
    return flops.sum_flops(work)


def recomputed_logit_rows(
    model: ModelSpec, layout: Layout, share: flops.RankShare
) -> tuple[FlopRow, ...]:
    """FLOPs of the logits that backward makes again."""
    return flops.sum_flops(
        [flops.head_flops(model, layout, share)] if Recompute.LOSS in layout.recompute else []
    )


def _replays(work: flops.ForwardFlops, chosen: tuple[Recompute, ...]) -> bool:
    return (
        (Recompute.MOE in chosen and work.module in _MOE_BLOCK)
        or (Recompute.SHARED_EXPERTS in chosen and work.module is Module.SHARED_EXPERTS)
        or (Recompute.MLP in chosen and work.module is Module.DENSE_MLP)
        or (Recompute.CORE_ATTN in chosen and work.op is FlopOp.ATTENTION)
    )
