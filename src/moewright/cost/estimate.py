"""Expected memory and time of one layout, joined from the parts of this floor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from moewright.cost import memory
from moewright.cost.activations import policy_of
from moewright.cost.collective_bytes import comm_rows
from moewright.cost.collective_time import CollectiveModel
from moewright.cost.constants import NVFP4_CONSTANTS, OFFLOAD_CONSTANTS, Constants
from moewright.cost.head_ops import optimizer_ops
from moewright.cost.layer_time import MicroBatchTime
from moewright.cost.ledger import flop_rows, recomputed_flop_rows, recomputed_logit_rows
from moewright.cost.model_states import BucketSet, stage_bucket_sets
from moewright.cost.op_time import DeviceRates, find_uncovered_rates
from moewright.cost.routed_rows import (
    ExpertRows,
    count_expert_rows,
    is_moe_layer,
    recomputed_layers,
)
from moewright.cost.snapshots import rank_table
from moewright.cost.stage_parts import Array, StageParts, count_parts, list_parts
from moewright.cost.step_time import (
    Pricer,
    RankParameters,
    StepTail,
    StepTime,
    count_owned_parameters,
    list_op_rows,
    model_ops,
    price_model_ops,
    stage_time,
    step_tail,
    step_time,
)
from moewright.cost.symbols import Symbols, build_symbols
from moewright.rules import flops, routing, stages
from moewright.rules.expert_placement import describe_placements
from moewright.rules.legality import check_legality, check_precision, micro_batches
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout
from moewright.spec.ledger import Ledger, MemoryRow, StepPhase, TimeRow
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Assumption, Estimate, TimePart, TimeShare
from moewright.spec.sourced import Sourced, SourceKind
from moewright.spec.units import TERA
from moewright.spec.workload import DocumentMasking, Dtype, Routing, Workload


def estimate(model: ModelSpec, workload: Workload, hardware: Hardware, layout: Layout) -> Estimate:
    """Memory of every pipeline rank and seconds of a step, with every assumption.

    Raises BadInput when the layout is illegal or its world is not the hardware's.
    """
    reasons = check_legality(model, workload, layout)
    if layout.world_size != hardware.count:
        rule = f"the hardware has {hardware.count} devices"
        have = str(hardware.count)
        world = Reason(
            field="layout.world_size", value=str(layout.world_size), rule=rule, nearest=have
        )
        reasons = (world, *reasons)
    reasons = (*check_precision(workload, hardware), *reasons)
    if reasons:
        raise BadInput(*reasons)
    rates = DeviceRates(hardware)
    links = CollectiveModel(hardware, rates.constants)
    size = expected_symbols(model, workload, hardware, layout, rates.constants)
    count = micro_batches(workload, layout)
    sets = stage_bucket_sets(model, workload, layout)
    parts = list_parts(model, layout)
    chunks = stages.pipeline_chunks(model, layout)
    counts = count_parts(model, layout, parts, chunks)
    rank_counts = [
        counts[[chunk.pp_rank == pp_rank for chunk in chunks]] for pp_rank in range(layout.pp)
    ]
    pricer = Pricer(links, size, price_model_ops(rates, links, size, model_ops(size)))
    part_times = pricer.part_times(layout, parts)
    times = tuple(stage_time(part_times, held.sum(axis=0)) for held in rank_counts)
    tails = [
        step_tail(rates, links, workload, size, layout, count_rank_parameters(of_rank))
        for of_rank in sets
    ]
    slowest_tail = max(tails, key=lambda tail: tail.total_s)
    step = step_time(size, part_times, counts, times, slowest_tail)
    held, a_load = _memory(rates.constants, size, parts, sets, rank_counts)
    ledgers = tuple(
        _ledger(
            workload,
            size,
            pp_rank,
            sets[pp_rank],
            held[pp_rank].rows,
            count,
            _phases(step, tails, times, pp_rank, count),
        )
        for pp_rank in range(layout.pp)
    )
    first = count_rank_parameters(sets[0])
    optimizer = optimizer_ops(
        size, numel=first.dense + first.expert, owned_numel=count_owned_parameters(layout, first)
    )
    assumptions = (
        *_assumptions(hardware, rates, size, workload),
        *find_uncovered_rates(rates, (*list_op_rows(size), *optimizer)),
    )
    found = _joined(hardware, rates, size, workload, ledgers, held, step, count, assumptions)
    limit = (
        routing.expected_load_factor(model, workload, layout) + found.margin_bytes / a_load
        if a_load > 0
        else 0.0
    )
    return replace(found, load_limit=max(0.0, limit) if limit < layout.ep else 0.0)


def expected_symbols(
    model: ModelSpec, workload: Workload, hardware: Hardware, layout: Layout, constants: Constants
) -> Symbols:
    """The symbols of a layout, under the expert load that the workload expects."""
    return build_symbols(
        model,
        workload,
        layout,
        device_kind=hardware.device.kind,
        load=routing.expected_load_factor(model, workload, layout),
        router_efficiency=constants["router_efficiency"],
    )


def count_rank_parameters(sets: Sequence[BucketSet]) -> RankParameters:
    """Dense and expert elements of a rank's buckets, and their number."""
    dense = [one for one in sets if one.group == "dp_cp"]
    expert = [one for one in sets if one.group == "edp"]
    return RankParameters(
        dense=sum(one.numel for one in dense),
        expert=sum(one.numel for one in expert),
        dense_calls=max(1, sum(len(one.buckets) for one in dense)),
        expert_calls=max(1, sum(len(one.buckets) for one in expert)),
    )


def _memory(
    constants: Constants,
    size: Symbols,
    parts: StageParts,
    sets: Sequence[Sequence[BucketSet]],
    rank_counts: Sequence[Array],
) -> tuple[tuple[memory.RankMemory, ...], float]:
    """Return the peak of every pipeline rank, and how the highest grows with the expert load.

    That is in bytes for each time the even rows more, on the hottest expert rank.
    """
    model, layout = size.model, size.layout
    steady = memory.steady_micro_batches(layout, size.m)
    tables = [rank_table(layout, steady, pp_rank) for pp_rank in range(layout.pp)]

    def peak(pp_rank: int, taken: memory.ModelMemory) -> memory.RankMemory:
        return memory.rank_memory(
            taken, pp_rank, sets[pp_rank], counts=rank_counts[pp_rank], table=tables[pp_rank]
        )

    policies = policy_of(layout)
    taken = memory.model_memory(constants, size, parts, policies)
    peaks = tuple(peak(pp_rank, taken) for pp_rank in range(layout.pp))
    if model.moe is None or layout.ep == 1:
        return peaks, 0.0
    fullest = max(range(layout.pp), key=lambda pp_rank: peaks[pp_rank].peak_bytes)
    load = routing.expected_load_factor(model, size.workload, layout) + 1
    hotter = replace(size, R=routing.routed_rows(model, size.workload, layout, load))
    taken = memory.model_memory(constants, hotter, parts, policies)
    return peaks, float(peak(fullest, taken).peak_bytes - peaks[fullest].peak_bytes)


def _expected_rows(
    size: Symbols, workload: Workload, pp_rank: int, count: int, *, load: float
) -> ExpertRows:
    rank = pp_rank * size.layout.world_size // size.layout.pp
    return count_expert_rows(
        size.model, workload, size.layout, rank, micro_batches=count, selection=None, load=load
    )


def _ledger(
    workload: Workload,
    size: Symbols,
    pp_rank: int,
    sets: Sequence[BucketSet],
    held: tuple[MemoryRow, ...],
    count: int,
    time: tuple[TimeRow, ...],
) -> Ledger:
    rank = pp_rank * size.layout.world_size // size.layout.pp
    load = routing.expected_load_factor(size.model, workload, size.layout)
    rows = _expected_rows(size, workload, pp_rank, count, load=load)
    notes = (
        ()
        if size.is_fused
        else (
            "CPU: no allowance for allocator, context or communicators; the interpreter's own memory is not counted",
        )
    )
    return Ledger(
        rank=rank,
        pp_rank=pp_rank,
        memory=held,
        comm=comm_rows(size.model, workload, size.layout, rank, rows, sets),
        flops=flop_rows(size.model, workload, size.layout, pp_rank, rows),
        time=time,
        notes=notes,
    )


def _phases(
    step: StepTime,
    tails: Sequence[StepTail],
    times: Sequence[MicroBatchTime],
    pp_rank: int,
    count: int,
) -> tuple[TimeRow, ...]:
    """The step of one pipeline rank by phase; what it waits for others is OTHER."""
    last, stage = tails[pp_rank], times[pp_rank]
    own = {
        StepPhase.FORWARD: count * stage.forward_s,
        StepPhase.BACKWARD: count * (stage.total_s - stage.forward_s),
        StepPhase.GRAD_REDUCE: last.reduce_s,
        StepPhase.OPTIMIZER: last.optimizer_s,
        StepPhase.PARAM_GATHER: last.gather_s,
    }
    own[StepPhase.OTHER] = step.step_s - sum(own.values())
    return tuple(
        TimeRow(phase=phase, seconds=seconds)
        for phase, seconds in sorted(own.items())
        if seconds > 0
    )


def _joined(
    hardware: Hardware,
    rates: DeviceRates,
    size: Symbols,
    workload: Workload,
    ledgers: tuple[Ledger, ...],
    held: Sequence[memory.RankMemory],
    step: StepTime,
    count: int,
    assumptions: tuple[Assumption, ...],
) -> Estimate:
    layout, devices = size.layout, size.layout.world_size
    peak_rank = max(range(layout.pp), key=lambda pp_rank: held[pp_rank].peak_bytes)
    peak = held[peak_rank]
    capacity = round(hardware.device.memory_bytes.value)
    largest = max(peak.rows, key=lambda row: row.bytes)
    per_token = flops.model_flops_per_token(
        size.model, workload.seq_len, attended_share=size.attended_share
    )
    model_flops = per_token * workload.tokens_per_step
    per_device = model_flops / step.step_s / devices
    replayed = _replayed_flops(size, workload)
    peak_flops = rates.peak_flops(workload.precision)
    return Estimate(
        ledgers=ledgers,
        peak_rank=peak_rank,
        peak_bytes=peak.peak_bytes,
        capacity_bytes=capacity,
        verdict=memory.memory_verdict(capacity - peak.peak_bytes, peak.sd_bytes),
        margin_bytes=capacity - peak.peak_bytes,
        peak_sd_bytes=round(peak.sd_bytes),
        largest=f"{largest.component} of {largest.module}",
        step_s=step.step_s,
        step_sd=rates.constants["step_time_sd"],
        shares=tuple(
            TimeShare(
                part=part, seconds=step.exposed.get(part, 0.0), hidden_s=step.hidden.get(part, 0.0)
            )
            for part in TimePart
            if part in step.exposed or step.hidden.get(part)
        ),
        micro_batches=count,
        bubble_fraction=step.exposed.get(TimePart.BUBBLE, 0.0) / step.step_s,
        tokens_per_s_per_device=workload.tokens_per_step / step.step_s / devices,
        model_flops_per_step=float(model_flops),
        tflops_per_device=per_device / TERA,
        mfu=per_device / peak_flops,
        hfu=per_device / peak_flops * (1 + replayed / model_flops),
        assumptions=assumptions,
    )


def _replayed_flops(size: Symbols, workload: Workload) -> int:
    """FLOPs that recompute adds to a step over all ranks, the router's left out."""
    model = size.model
    moe_layers = model.moe_layer_count + (model.mtp_layers if model.moe_layers[-1] else 0)
    top_k = model.moe.router.top_k if model.moe else 0
    whole = flops.RankShare(
        layers=tuple(range(model.layers)),
        tokens=workload.tokens_per_step,
        routed_rows=workload.tokens_per_step * top_k * moe_layers,
        head=True,
        mtp=model.mtp_layers,
        attended=flops.expected_attended(
            workload.seq_len, size.attended_share, workload.global_batch
        ),
    )
    one = Layout(world_size=1, recompute=size.layout.recompute)
    logits = recomputed_logit_rows(model, one, whole)
    if size.layout.recompute_block:
        chunks = stages.pipeline_chunks(model, size.layout)
        layers = recomputed_layers(model, size.layout, chunks)
        moe_layers = sum(is_moe_layer(model, layer) for layer in layers)
        whole = replace(
            whole,
            layers=tuple(layer for layer in layers if layer < model.layers),
            routed_rows=workload.tokens_per_step * top_k * moe_layers,
            mtp=sum(layer > model.layers for layer in layers),
        )
    return flops.total_model_flops((*logits, *recomputed_flop_rows(model, workload, one, whole)))


def _assumptions(
    hardware: Hardware, rates: DeviceRates, size: Symbols, workload: Workload
) -> Iterator[Assumption]:
    """Facts and constants behind an estimate, and what the workload is taken to do."""
    device, fabric, layout = hardware.device, hardware.fabric, size.layout
    load = routing.expected_load_factor(size.model, workload, layout)
    yield Assumption(
        name="expert_load",
        value=f"{load:.4g} x the mean on the hottest rank",
        kind=SourceKind.MEASURED if workload.routing is Routing.MEASURED else SourceKind.ASSUMED,
        source=f"workload.routing={workload.routing}",
    )
    if workload.load_histogram and size.model.moe and layout.ep > 1:
        yield Assumption(
            name="expert_placement",
            value=f"hottest rank {describe_placements(workload, layout.ep)}",
            kind=SourceKind.MEASURED,
            source="workload.load_histogram: rules.placement",
        )
    if workload.data.documents is not DocumentMasking.JOINED:
        share, source = (
            workload.data.attended_share,
            "data.attended_share, measured where the files are at hand",
        )
        kind = SourceKind.MEASURED if share < 1 else SourceKind.ASSUMED
        yield Assumption(
            name="documents", value=f"leave {share:.4g} of attention", kind=kind, source=source
        )
    if layout.offload:
        source = "copies of activations hide under as much compute as there is; the optimizer runs on the host"
        part = (
            ""
            if layout.offload_fraction == 1
            else f" ({layout.offload_fraction:.0%} of the optimizer)"
        )
        yield Assumption(
            name="offload",
            value="+".join(layout.offload) + part,
            kind=SourceKind.ASSUMED,
            source=source,
        )
    facts = [
        ("memory_bytes", device.memory_bytes),
        ("memory_Bps", device.memory_Bps),
        *((f"peak_{peak.dtype}", peak.rate) for peak in device.peaks),
        ("domain_Bps", fabric.domain_Bps),
        ("network_Bps", fabric.network_Bps),
        ("domain_latency_s", fabric.domain_latency_s),
        ("network_latency_s", fabric.network_latency_s),
        *(
            (constant.name, constant.value)
            for constant in rates.constants.list_all()
            if rates.uses_constant(constant.name)
            and (layout.offload or constant.name not in OFFLOAD_CONSTANTS)
            if size.dtype is Dtype.NVFP4 or constant.name not in NVFP4_CONSTANTS
        ),
    ]
    for name, value in facts:
        yield _assumption(name, value)
    for rate in device.rates:
        points = rate.curve.points
        value_text = f"{points[0][1]:.4g} to {points[-1][1]:.4g} over {len(points)} points"
        yield Assumption(
            name=f"rate {rate.op} {rate.dtype}",
            value=value_text,
            kind=rate.curve.kind,
            source=rate.curve.source,
        )
    for time in fabric.times:
        yield Assumption(
            name=f"time {time.op} over {time.group_size}",
            value=f"{len(time.curve.points)} points",
            kind=time.curve.kind,
            source=time.curve.source,
        )


def _assumption(name: str, value: Sourced) -> Assumption:
    return Assumption(name=name, value=f"{value.value:.6g}", kind=value.kind, source=value.source)
