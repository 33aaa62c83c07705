"""The predicted ledger of one rank and one step, to be compared with what the engine counted."""

from __future__ import annotations

from dataclasses import replace

from moewright.cost.memory.activations import ActivationContext, ledger_saved_rows
from moewright.cost.memory.fsdp_states import flat_bucket_sets, unit_gradient_bytes, unit_state_rows
from moewright.cost.memory.host_memory import hosted_rows
from moewright.cost.memory.model_states import frozen_rows
from moewright.cost.memory.paired_memory import paired_saved_rows
from moewright.cost.memory.peak import sum_memory
from moewright.cost.memory.replicas import replica_rows
from moewright.cost.memory.saved_states import peer_copy_rows, save_copy_rows
from moewright.cost.memory.storages import BytesOfStep, bound_allowance, list_storages
from moewright.cost.routed_rows import ExpertRows, count_expert_rows, rank_chunks, recomputed_layers
from moewright.cost.volumes.collective_bytes import comm_rows
from moewright.rules import grid
from moewright.rules.adapters import MLA_UP_LINEARS, adapted_linears, trains_indexer
from moewright.rules.batch_rampup import workload_at_step
from moewright.rules.context_parallel import cp_factors
from moewright.rules.delayed_scaling import delayed_scaling_rows
from moewright.rules.graph_parts import graph_rows
from moewright.rules.job import Job
from moewright.rules.shapes import flops, fsdp
from moewright.rules.timetable import schedule
from moewright.rules.timetable.paired_passes import can_pair
from moewright.rules.timetable.stages import chunk_layers
from moewright.rules.weight_copies import weight_copy_rows
from moewright.spec.hardware import DeviceKind
from moewright.spec.layout import Layout, Recompute
from moewright.spec.ledger import Component, FlopOp, FlopRow, Ledger, Module, Selection
from moewright.spec.model import AttentionKind, ModelSpec
from moewright.spec.plan import Plan

_MOE_BLOCK = (Module.ROUTER, Module.EXPERTS, Module.SHARED_EXPERTS)


def predict_ledger(plan: Plan, *, rank: int, selection: Selection | None) -> Ledger:
    """Return the memory, collectives and FLOPs of `rank` in one step of a plan.

    Experts get the rows that `selection` recorded, or balanced ones without it. States, collectives
    and FLOPs are exact; memory has states and saved activations but no transients; the time is that
    of the plan's estimate.

    Raises:
        BadInput: the rank is outside the world, or the selection is one of another job.
    """
    workload = plan.workload
    layout = plan.layout
    if selection and selection.is_repeated:  # run again without the budget
        layout = replace(layout, rank_capacity=0.0)
    if selection:
        workload = workload_at_step(workload, selection.step - 1)  # the batch may still grow
        if workload.batch_samples:  # as many sequences as the step's chats filled
            sequences = len(selection.counts) * plan.layout.mbs * plan.layout.dp
            workload = replace(workload, global_batch=sequences)
    ledger = predict_rank_ledger(
        Job(model=plan.model, workload=workload, layout=layout),
        rank=rank,
        selection=selection,
        device=plan.hardware.device.kind,
    )
    for estimated in plan.estimate.ledgers:
        if estimated.pp_rank == ledger.pp_rank:
            return replace(ledger, time=estimated.time)
    return ledger


def predict_rank_ledger(
    job: Job,
    *,
    rank: int,
    selection: Selection | None,
    load: float = 1.0,
    device: DeviceKind = DeviceKind.CPU,
) -> Ledger:
    """Return the ledger of a rank without a plan, and so without time.

    Without a selection experts get `load` times the balanced rows. `device` is what counts.
    """
    micro_batches = job.micro_batches
    pp_rank = grid.coordinate(job.layout, rank, "pp")
    rows = count_expert_rows(job, rank, micro_batches=micro_batches, selection=selection, load=load)
    units = fsdp.fsdp_units(job.model, job.layout, rank)
    flat_sets = flat_bucket_sets(job, rank)
    table = schedule.timetable(job.layout, micro_batches)[pp_rank]
    chunks = rank_chunks(job.model, job.layout, pp_rank)
    context = ActivationContext(job=job)
    has_pairs = can_pair(job.layout, micro_batches) and not job.layout.schedule.splits_backward
    saved = paired_saved_rows if has_pairs else ledger_saved_rows
    hosted = hosted_rows(context, rows, chunks=chunks, table=table)
    copies = weight_copy_rows(job, pp_rank)
    memory = (
        *frozen_rows(job, rank),
        *copies,
        *unit_state_rows(job, rank),
        *replica_rows(job, pp_rank),
        *delayed_scaling_rows(job, pp_rank),
        *graph_rows(job, pp_rank),
        *peer_copy_rows(job, rank),
        *save_copy_rows(job, rank),
        *saved(context, rows, chunks=chunks, table=table),
        *hosted,
    )
    # Of what lies on the host, a CPU holds states where it computes.
    host_bytes = sum(row.bytes for row in hosted)
    is_host = device is DeviceKind.CPU
    if not is_host:
        host_bytes = sum(row.bytes for row in memory if row.component is Component.HOST)
    gradient_bytes = unit_gradient_bytes(job.layout, units, with_host=is_host)
    made = BytesOfStep(
        unit_gradients=gradient_bytes, weight_copies=sum(row.bytes for row in copies)
    )
    return Ledger(
        rank=rank,
        pp_rank=pp_rank,
        memory=sum_memory(memory),
        storages=list_storages(job, memory, host_bytes=host_bytes, made=made),
        allowance=bound_allowance(
            job,
            memory,
            flat_sets,
            units,
            made=made,
            recorded_micro_batches=rows.micro_batches,
            is_repeated=selection is not None and selection.is_repeated,
        ),
        comm=comm_rows(job, rank, rows, flat_sets, units),
        flops=flop_rows(job, pp_rank, rows),
        in_flight=schedule.peak_live_chunks(table),
    )


def flop_rows(job: Job, pp_rank: int, rows: ExpertRows) -> tuple[FlopRow, ...]:
    """Return the FLOPs of a rank in a step: forward, backward, and what recompute repeats."""
    chunks = rank_chunks(job.model, job.layout, pp_rank)
    has_loss = any(chunk.has_loss for chunk in chunks)
    layers = [layer for chunk in chunks for layer in chunk_layers(job.model, chunk)]
    repeated = recomputed_layers(job.model, job.layout, chunks)
    repeated_layers = [layer for layer in layers if layer in repeated]
    share = _rank_share(job, layers, rows, has_loss=has_loss)
    repeated_share = _rank_share(job, repeated_layers, rows, has_loss=has_loss)
    sums: dict[tuple[FlopOp, Module], int] = {}
    for row in (
        *flops.train_flop_rows(job.model, job.layout, share, seq_len=job.workload.seq_len),
        *recomputed_flop_rows(job, repeated_share),
        *recomputed_logit_rows(job.model, job.layout, share),
    ):
        key = row.op, row.module
        sums[key] = sums.get(key, 0) + row.flops
    return tuple(
        FlopRow(op=op, module=module, flops=value)
        for (op, module), value in sorted(sums.items())
        if value
    )


def _rank_share(
    job: Job, layers: list[int], rows: ExpertRows, *, has_loss: bool
) -> flops.RankShare:
    """Return what a rank works on in these of its layers."""
    workload, layout = job.workload, job.layout
    sequences = rows.micro_batches * layout.mbs
    head_ranks, _ = cp_factors(layout)
    expected_attended = flops.expected_attended(
        workload.seq_len, workload.data.attended_share, sequences * head_ranks / layout.cp
    )
    main_layers = tuple(layer for layer in layers if layer < job.model.layers)
    mtp_layers = {layer for layer in layers if layer > job.model.layers}
    return flops.RankShare(
        layers=main_layers,
        tokens=sequences * workload.seq_len // layout.cp,
        routed_rows=rows.count_rows(layers),
        head=has_loss,
        mtp=len(mtp_layers),
        # Counted by the run where documents bound attention, else expected.
        attended=rows.attended_pairs or expected_attended,
        attended_windowed=rows.windowed_pairs,
        mtp_rows=rows.count_rows(mtp_layers),
        fine_tuning=workload.fine_tuning,
        trains_indexer=trains_indexer(workload),
    )


def recomputed_flop_rows(job: Job, share: flops.RankShare) -> tuple[FlopRow, ...]:
    """Return the forward FLOPs that the recompute choices repeat in backward."""
    choices = job.layout.recompute
    spec = job.model.attention
    repeated = [
        work
        for work in flops.forward_flops(job.model, job.layout, share, seq_len=job.workload.seq_len)
        if _is_repeated(work, choices)
    ]
    if Recompute.MLA_UP_PROJ in choices and spec.kind is AttentionKind.MLA:
        # A part of the attention's projections, which forward_flops does not list by itself.
        up_numel = (spec.q_lora_rank or job.model.hidden_size) * spec.q_width
        up_numel += spec.kv_lora_rank * spec.heads * (spec.qk_nope_head_dim + spec.v_head_dim)
        layer_flops = 2 * share.tokens * up_numel // job.layout.tp
        adapters_flops = sum(
            2 * flops.adapter_macs(linear, job.layout, share)
            for layer in share.layers
            for linear in adapted_linears(job.model, share.fine_tuning, layer)
            if linear.name in MLA_UP_LINEARS
        )
        repeated.append(
            flops.ForwardFlops(op=FlopOp.GEMM, module=Module.ATTENTION, flops=adapters_flops)
        )
        for layers, in_mtp in ((len(share.layers), False), (share.mtp, True)):
            repeated.append(
                flops.ForwardFlops(
                    op=FlopOp.GEMM,
                    module=Module.ATTENTION,
                    flops=layer_flops * layers,
                    in_mtp=in_mtp,
                )
            )
    return flops.sum_flops(repeated)


def recomputed_logit_rows(
    model: ModelSpec, layout: Layout, share: flops.RankShare
) -> tuple[FlopRow, ...]:
    """Return the FLOPs of the logits that backward makes again under recompute=loss."""
    if Recompute.LOSS not in layout.recompute:
        return ()
    return flops.sum_flops([flops.logit_flops(model, layout, share)])


def _is_repeated(work: flops.ForwardFlops, choices: tuple[Recompute, ...]) -> bool:
    # Full recompute repeats layers; the logits are repeated under recompute=loss alone.
    if work.module is Module.HEAD:
        return False
    return (
        Recompute.FULL in choices
        or (Recompute.MOE in choices and work.module in _MOE_BLOCK)
        or (Recompute.SHARED_EXPERTS in choices and work.module is Module.SHARED_EXPERTS)
        or (Recompute.MLP in choices and work.module is Module.DENSE_MLP)
        or (Recompute.CORE_ATTN in choices and work.op is FlopOp.ATTENTION)
    )
