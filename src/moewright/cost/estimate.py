"""Expected memory and time of one layout, joined from the parts of this floor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from moewright.cost import memory
from moewright.cost.collective_bytes import comm_rows
from moewright.cost.collective_time import Links
from moewright.cost.constants import OF_NVFP4, OF_OFFLOAD, Constants
from moewright.cost.head_ops import optimizer_ops
from moewright.cost.layer_time import Times
from moewright.cost.ledger import flop_rows, loss_rows, replayed_rows
from moewright.cost.model_states import BucketSet, stage_sets
from moewright.cost.op_time import Rates, misses
from moewright.cost.routed_rows import Routed, is_moe, rank_chunks, replayed_layers, routed
from moewright.cost.step_time import (
    Pricer,
    Share,
    Step,
    Tail,
    all_rows,
    owned_by,
    price_work,
    stage_times,
    step_time,
    tail,
    work_of,
)
from moewright.cost.symbols import Sizes, sizes
from moewright.rules import flops, routing, schedule, stages
from moewright.rules.expert_placement import even_loads
from moewright.rules.legality import illegal, micro_batches, unmultiplied
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout
from moewright.spec.ledger import Ledger, MemoryRow, Phase, TimeRow
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Assumption, Estimate, TimePart, TimeShare
from moewright.spec.sourced import Sourced, SourceKind
from moewright.spec.units import TERA
from moewright.spec.workload import Documents, Dtype, Routing, Workload


def estimate(model: ModelSpec, workload: Workload, hardware: Hardware, layout: Layout) -> Estimate:
    """Memory of every pipeline rank and seconds of a step, with every assumption.

    Raises BadInput when the layout is illegal or its world is not the hardware's.
    """
    reasons = illegal(model, workload, layout)
    if layout.world_size != hardware.count:
        rule = f"the hardware has {hardware.count} devices"
        have = str(hardware.count)
        world = Reason(
            field="layout.world_size", value=str(layout.world_size), rule=rule, nearest=have
        )
        reasons = (world, *reasons)
    reasons = (*unmultiplied(workload, hardware), *reasons)
    if reasons:
        raise BadInput(*reasons)
    rates = Rates(hardware)
    links = Links(hardware, rates.constants)
    size = size_of(model, workload, hardware, layout, rates.constants)
    count = micro_batches(workload, layout)
    sets = stage_sets(model, workload, layout)
    pieces = Pricer(links, size, price_work(rates, links, size, work_of(size))).pieces(layout)
    chunks = stages.chunks(model, layout)
    times = stage_times(size, pieces, chunks, layout.pp)
    tails = [tail(rates, links, workload, size, layout, held_share(of_rank)) for of_rank in sets]
    step = step_time(size, pieces, chunks, times, max(tails, key=lambda one: one.total_s))
    held, a_load = _memory(workload, rates.constants, size, sets, count)
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
    first = held_share(sets[0])
    optimizer = optimizer_ops(size, held=first.dense + first.expert, owned=owned_by(layout, first))
    assumptions = (
        *_assumptions(hardware, rates, size, workload),
        *misses(rates, (*all_rows(size), *optimizer)),
    )
    found = _joined(hardware, rates, size, workload, ledgers, held, step, count, assumptions)
    limit = (
        routing.expected_load(model, workload, layout) + found.margin_bytes / a_load
        if a_load > 0
        else 0.0
    )
    return replace(found, load_limit=max(0.0, limit) if limit < layout.ep else 0.0)


def size_of(
    model: ModelSpec, workload: Workload, hardware: Hardware, layout: Layout, constants: Constants
) -> Sizes:
    """The symbols of a layout, under the expert load that the workload expects."""
    return sizes(
        model,
        workload,
        layout,
        kind=hardware.device.kind,
        load=routing.expected_load(model, workload, layout),
        router_share=constants["router_efficiency"],
    )


def held_share(sets: Sequence[BucketSet]) -> Share:
    """Dense and expert elements of a rank's buckets, and their number."""
    dense = [one for one in sets if one.group == "dp_cp"]
    expert = [one for one in sets if one.group == "edp"]
    return Share(
        dense=sum(one.numel for one in dense),
        expert=sum(one.numel for one in expert),
        dense_calls=max(1, sum(len(one.buckets) for one in dense)),
        expert_calls=max(1, sum(len(one.buckets) for one in expert)),
    )


def _memory(
    workload: Workload,
    constants: Constants,
    size: Sizes,
    sets: Sequence[Sequence[BucketSet]],
    count: int,
) -> tuple[tuple[memory.Held, ...], float]:
    """Peak of every pipeline rank, and how much the highest grows with the rows of the hottest
    expert rank: bytes for each time the even ones more."""
    layout = size.layout
    enough = memory.enough_micro_batches(layout, count)
    table = schedule.timetable(layout, enough)

    def held(pp_rank: int, size: Sizes, load: float) -> memory.Held:
        return memory.held(
            workload,
            constants,
            size,
            rows=_expected_rows(size, workload, pp_rank, enough, load=load),
            sets=sets[pp_rank],
            chunks=rank_chunks(size.model, layout, pp_rank),
            table=table[pp_rank],
        )

    load = routing.expected_load(size.model, workload, layout)
    found = tuple(held(pp_rank, size, load) for pp_rank in range(layout.pp))
    if size.model.moe is None or layout.ep == 1:
        return found, 0.0
    fullest = max(range(layout.pp), key=lambda pp_rank: found[pp_rank].peak_bytes)
    hotter = replace(size, R=routing.routed_rows(size.model, workload, layout, load + 1))
    return found, float(held(fullest, hotter, load + 1).peak_bytes - found[fullest].peak_bytes)


def _expected_rows(
    size: Sizes, workload: Workload, pp_rank: int, count: int, *, load: float
) -> Routed:
    rank = pp_rank * size.layout.world_size // size.layout.pp
    return routed(
        size.model, workload, size.layout, rank, micro_batches=count, selection=None, load=load
    )


def _ledger(
    workload: Workload,
    size: Sizes,
    pp_rank: int,
    sets: Sequence[BucketSet],
    held: tuple[MemoryRow, ...],
    count: int,
    time: tuple[TimeRow, ...],
) -> Ledger:
    rank = pp_rank * size.layout.world_size // size.layout.pp
    load = routing.expected_load(size.model, workload, size.layout)
    rows = _expected_rows(size, workload, pp_rank, count, load=load)
    notes = (
        ()
        if size.fused
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
    step: Step, tails: Sequence[Tail], times: Sequence[Times], pp_rank: int, count: int
) -> tuple[TimeRow, ...]:
    """The step of one pipeline rank by phase; what it waits for others is OTHER."""
    last, stage = tails[pp_rank], times[pp_rank]
    own = {
        Phase.FORWARD: count * stage.forward_s,
        Phase.BACKWARD: count * (stage.total_s - stage.forward_s),
        Phase.GRAD_REDUCE: last.reduce_s,
        Phase.OPTIMIZER: last.optimizer_s,
        Phase.PARAM_GATHER: last.gather_s,
    }
    own[Phase.OTHER] = step.step_s - sum(own.values())
    return tuple(
        TimeRow(phase=phase, seconds=seconds)
        for phase, seconds in sorted(own.items())
        if seconds > 0
    )


def _joined(
    hardware: Hardware,
    rates: Rates,
    size: Sizes,
    workload: Workload,
    ledgers: tuple[Ledger, ...],
    held: Sequence[memory.Held],
    step: Step,
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
    peak_flops = rates.peak(workload.precision)
    return Estimate(
        ledgers=ledgers,
        peak_rank=peak_rank,
        peak_bytes=peak.peak_bytes,
        capacity_bytes=capacity,
        verdict=memory.verdict(capacity - peak.peak_bytes, peak.spread_bytes),
        margin_bytes=capacity - peak.peak_bytes,
        peak_sd_bytes=round(peak.spread_bytes),
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


def _replayed_flops(size: Sizes, workload: Workload) -> int:
    """FLOPs that recompute adds to a step over all ranks, the router's left out."""
    model = size.model
    moe_layers = model.moe_layer_count + (model.mtp_layers if model.moe_layers[-1] else 0)
    top_k = model.moe.router.top_k if model.moe else 0
    whole = flops.Share(
        layers=tuple(range(model.layers)),
        tokens=workload.tokens_per_step,
        routed_rows=workload.tokens_per_step * top_k * moe_layers,
        head=True,
        mtp=model.mtp_layers,
        attended=flops.expected_pairs(workload.seq_len, size.attended_share, workload.global_batch),
    )
    one = Layout(world_size=1, recompute=size.layout.recompute)
    logits = loss_rows(model, one, whole)
    if size.layout.recompute_block:
        chunks = stages.chunks(model, size.layout)
        layers = replayed_layers(model, size.layout, chunks)
        moe_layers = sum(is_moe(model, layer) for layer in layers)
        whole = replace(
            whole,
            layers=tuple(layer for layer in layers if layer < model.layers),
            routed_rows=workload.tokens_per_step * top_k * moe_layers,
            mtp=sum(layer > model.layers for layer in layers),
        )
    return flops.total_model_flops((*logits, *replayed_rows(model, workload, one, whole)))


def _assumptions(
    hardware: Hardware, rates: Rates, size: Sizes, workload: Workload
) -> Iterator[Assumption]:
    """Facts and constants behind an estimate, and what the workload is taken to do."""
    device, fabric, layout = hardware.device, hardware.fabric, size.layout
    load = routing.expected_load(size.model, workload, layout)
    yield Assumption(
        name="expert_load",
        value=f"{load:.4g} x the mean on the hottest rank",
        kind=SourceKind.MEASURED if workload.routing is Routing.MEASURED else SourceKind.ASSUMED,
        source=f"workload.routing={workload.routing}",
    )
    if workload.load_histogram and size.model.moe and layout.ep > 1:
        yield Assumption(
            name="expert_placement",
            value=f"hottest rank {even_loads(workload, layout.ep)}",
            kind=SourceKind.MEASURED,
            source="workload.load_histogram: rules.placement",
        )
    if workload.data.documents is not Documents.JOINED:
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
            for constant in rates.constants.listed()
            if rates.uses(constant.name) and (layout.offload or constant.name not in OF_OFFLOAD)
            if size.dtype is Dtype.NVFP4 or constant.name not in OF_NVFP4
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
