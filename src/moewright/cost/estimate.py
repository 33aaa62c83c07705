"""Expected memory and time of one layout, joined from the parts of this floor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import hypot, log

from moewright.cost.constants import (
    EAGER_CONSTANTS,
    EFA_CONSTANTS,
    LOAD_SCALE,
    LORA_CONSTANTS,
    NVFP4_CONSTANTS,
    OFFLOAD_CONSTANTS,
)
from moewright.cost.evidence import (
    count_missing,
    fit_probability,
    job_factor,
    judge_evidence,
    peak_interval,
    step_deviation,
    step_interval,
)
from moewright.cost.ledger import flop_rows, recomputed_flop_rows, recomputed_logit_rows
from moewright.cost.memory.estimate_memory import (
    expected_symbols,
    peak_growth,
    rank_peaks,
    refuse_illegal_job,
    split_by_rank,
)
from moewright.cost.memory.host_memory import judge_host_memory
from moewright.cost.memory.model_states import BucketSet, stage_bucket_sets
from moewright.cost.memory.peak import RankMemory, memory_verdict
from moewright.cost.routed_rows import (
    count_expert_rows,
    recomputed_layers,
)
from moewright.cost.stage_parts import count_parts, list_parts
from moewright.cost.step_spread import estimate_spread
from moewright.cost.symbols import Symbols
from moewright.cost.time.collective_time import CollectiveModel
from moewright.cost.time.head_ops import optimizer_ops
from moewright.cost.time.layer_time import MicroBatchTime
from moewright.cost.time.muon import muon_ops
from moewright.cost.time.op_time import DeviceRates, find_uncovered_rates
from moewright.cost.time.step_tail import (
    RankParameters,
    StepTail,
    count_owned_parameters,
    step_tail,
)
from moewright.cost.time.step_time import (
    Pricer,
    StepTime,
    list_op_rows,
    model_ops,
    price_model_ops,
    stage_time,
    step_time,
)
from moewright.cost.time.topology import NO_CROSSING
from moewright.cost.volumes.collective_bytes import comm_rows
from moewright.rules import grid
from moewright.rules.expert_load import (
    TAIL_DEVIATIONS,
    RankLoad,
    expected_load,
    expected_repeats,
    has_natural_load,
    step_rows,
)
from moewright.rules.expert_placement import describe_placements
from moewright.rules.job import Job
from moewright.rules.limits.legality import describe_untimed
from moewright.rules.shapes import flops
from moewright.rules.timetable import stages
from moewright.spec.hardware import Hardware, NetworkKind
from moewright.spec.layout import Layout
from moewright.spec.ledger import Component, Ledger, MemoryRow, StepPhase, TimeRow
from moewright.spec.model import ModelSpec
from moewright.spec.plan import Assumption, Estimate, Imbalance, TimePart, TimeShare
from moewright.spec.units import (
    TERA,
    Sourced,
    SourceKind,
    divide,
    format_given,
    format_seconds,
    mention,
)
from moewright.spec.workload import DocumentMasking, Dtype, Fusion, Routing, Workload


def estimate(model: ModelSpec, workload: Workload, hardware: Hardware, layout: Layout) -> Estimate:
    """Estimate the memory of every pipeline rank and the seconds of a step, with every assumption.

    Raises:
        BadInput: The layout is illegal or its world is not the hardware's.
    """
    job = Job(model=model, workload=workload, layout=layout)
    refuse_illegal_job(job, hardware)
    rates = DeviceRates(hardware)
    collectives = CollectiveModel(hardware, rates.constants)
    sym = expected_symbols(job, hardware, rates.constants)
    sets = stage_bucket_sets(job)
    parts = list_parts(model, layout, workload.trainer)
    chunks = stages.pipeline_chunks(model, layout)
    counts = count_parts(model, layout, parts, chunks)
    rank_counts = split_by_rank(layout, chunks, counts)
    priced = price_model_ops(rates, collectives, sym, model_ops(sym))
    pricer = Pricer(collectives, sym, priced)
    part_times = pricer.part_times(layout, parts)
    times = tuple(stage_time(part_times, counts.sum(axis=0)) for counts in rank_counts)
    rank_parameters = [count_rank_parameters(rank_sets) for rank_sets in sets]
    tails = [step_tail(rates, collectives, sym, parameters) for parameters in rank_parameters]
    factor = job_factor(job, hardware)
    step = step_time(sym, part_times, counts, times, tails).scale(factor)
    peaks = rank_peaks(range(layout.pp), rates.constants, sym, parts, sets, rank_counts)
    ledgers = tuple(
        _ledger(sym, pp_rank, sets[pp_rank], peaks[pp_rank].rows, phases)
        for pp_rank, phases in enumerate(_phases(sym, step, tails, times, factor))
    )
    assumptions = (
        *_assumptions(hardware, rates, sym),
        *_rate_assumptions(rates, sym, rank_parameters[0]),
        *_own_run_assumptions(hardware, factor),
    )
    joined = _join(hardware, rates, sym, ledgers, peaks, step, assumptions)
    # After the join: the spread is worked out from the shares of the step.
    joined = replace(joined, spread=estimate_spread(hardware.fabric, collectives, layout, joined))
    bytes_per_load = peak_growth(rates.constants, sym, parts, sets, rank_counts, peaks)
    joined = replace(joined, load_limit=_load_limit(sym, joined.margin_bytes, bytes_per_load))
    load = expected_load(job, scale=rates.constants[LOAD_SCALE])
    # Under even routing there is no second price to compare with.
    if load == RankLoad():
        return joined
    even = replace(sym, R=job.routed_rows())
    even_times = _price_experts(rates, collectives, pricer, even).part_times(layout, parts)
    even_stages = tuple(stage_time(even_times, count.sum(axis=0)) for count in rank_counts)
    even_step = step_time(even, even_times, counts, even_stages, tails).scale(factor)
    return _add_imbalance(joined, sym, load, even_step.step_s, bytes_per_load)


def _price_experts(
    rates: DeviceRates, collectives: CollectiveModel, pricer: Pricer, sym: Symbols
) -> Pricer:
    """Return the prices under another load of the experts; an eager stack shares none of them."""
    if sym.is_fused:
        return pricer.with_experts(rates, sym)
    return Pricer(collectives, sym, price_model_ops(rates, collectives, sym, model_ops(sym)))


def _add_imbalance(
    joined: Estimate, sym: Symbols, load: RankLoad, even_step_s: float, bytes_per_load: float
) -> Estimate:
    """Return the estimate with what uneven routing costs, and intervals with its spread.

    Seconds are linear in the rows of the hottest rank, bytes in its load.
    """
    even_rows = sym.job.routed_rows()
    step_s = joined.step_s
    step_p90_s = step_s
    # A capacity may leave both loads with the same rows: then no line runs through two points.
    if even_rows != sym.R:
        tail_rows = step_rows(sym.job, load.step_p90, load.within)
        further = (tail_rows - sym.R) / (sym.R - even_rows)
        step_p90_s += further * (step_s - even_step_s)
    growth_bytes = bytes_per_load * (load.peak_p90 - load.peak)
    routing_sd = log(max(step_p90_s / step_s, 1.0)) / TAIL_DEVIATIONS
    # Errors of the model and of the routing are independent.
    step_sd = hypot(joined.step_sd, routing_sd)
    peak_sd = hypot(joined.peak_sd_bytes, growth_bytes / TAIL_DEVIATIONS)
    peak_bytes = joined.peak_bytes
    return replace(
        joined,
        step_interval_80=step_interval(step_s, step_sd, 0.8),
        step_interval_95=step_interval(step_s, step_sd, 0.95),
        peak_interval_80=peak_interval(peak_bytes, peak_sd, 0.8),
        peak_interval_95=peak_interval(peak_bytes, peak_sd, 0.95),
        imbalance=Imbalance(
            load=sym.R / even_rows,
            peak_load=load.peak,
            even_step_s=even_step_s,
            cost=step_s / even_step_s - 1,
            step_p90_s=step_p90_s,
            peak_p90_bytes=round(peak_bytes + growth_bytes),
        ),
    )


def _rate_assumptions(
    rates: DeviceRates, sym: Symbols, parameters: RankParameters
) -> Iterator[Assumption]:
    """Yield the stand-ins for rates that the hardware file does not have."""
    owned_dense, owned_expert = count_owned_parameters(sym.layout, parameters)
    optimizer = (
        *optimizer_ops(
            sym,
            numel=parameters.dense + parameters.expert,
            owned_numel=owned_dense + owned_expert,
        ),
        *muon_ops(sym, owned_dense=owned_dense, owned_expert=owned_expert),
    )
    yield from find_uncovered_rates(rates, (*list_op_rows(sym), *optimizer))


def _own_run_assumptions(hardware: Hardware, factor: float) -> Iterator[Assumption]:
    """Yield what own runs say of the step, where the hardware has any."""
    if hardware.own_runs:
        yield Assumption(
            name="own_runs",
            value=f"{100 * (factor - 1):+.1f} % of the step",
            kind=SourceKind.FITTED,
            source=f"{len(hardware.own_runs)} own runs, by the choices that this one shares",
        )


def _load_limit(sym: Symbols, margin_bytes: int, bytes_per_load: float) -> float:
    """Return the load of the hottest rank over the mean that fills the device; 0 for none."""
    if bytes_per_load <= 0:
        return 0.0
    load = expected_load(sym.job).peak
    limit = load + margin_bytes / bytes_per_load
    # No rank gets more than all rows, ep times the mean: a larger limit is none.
    if limit < sym.layout.ep:
        return max(0.0, limit)
    return 0.0


_CPU_NOTE = (
    "CPU: no allowance for allocator, context or communicators; "
    "the interpreter's own memory is not counted"
)


def count_rank_parameters(sets: Sequence[BucketSet]) -> RankParameters:
    """Count the dense and expert elements of a rank's buckets, and the buckets."""
    dense = [bucket_set for bucket_set in sets if bucket_set.group == "dp_cp"]
    expert = [bucket_set for bucket_set in sets if bucket_set.group == "edp"]
    return RankParameters(
        dense=sum(bucket_set.numel for bucket_set in dense),
        expert=sum(bucket_set.numel for bucket_set in expert),
        # At least one: the bytes of all calls are divided by them.
        dense_calls=max(1, sum(len(bucket_set.buckets) for bucket_set in dense)),
        expert_calls=max(1, sum(len(bucket_set.buckets) for bucket_set in expert)),
    )


def _ledger(
    sym: Symbols,
    pp_rank: int,
    sets: Sequence[BucketSet],
    memory_rows: tuple[MemoryRow, ...],
    phases: tuple[TimeRow, ...],
) -> Ledger:
    """Return the ledger of the first rank of a pipeline stage, under the expected expert load."""
    # Ranks of a stage differ in what routers decide, which is not known: the first stands for all.
    rank = grid.stage_rank(sym.layout, pp_rank)
    even_rows = sym.job.routed_rows()
    rows = count_expert_rows(
        sym.job,
        rank,
        micro_batches=sym.m,
        selection=None,
        load=divide(sym.R, even_rows, otherwise=1.0),
    )
    return Ledger(
        rank=rank,
        pp_rank=pp_rank,
        memory=memory_rows,
        comm=comm_rows(sym.job, rank, rows, sets),
        flops=flop_rows(sym.job, pp_rank, rows),
        time=phases,
        notes=() if sym.is_fused else (_CPU_NOTE,),
    )


def _phases(
    sym: Symbols,
    step: StepTime,
    tails: Sequence[StepTail],
    times: Sequence[MicroBatchTime],
    factor: float,
) -> Iterator[tuple[TimeRow, ...]]:
    """Yield the step of each pipeline rank by phase; its waits for other ranks are OTHER.

    All of a rank's seconds are `factor` times as long, as those of `step` are already.
    """
    for tail, stage in zip(tails, times, strict=True):
        unscaled = {
            StepPhase.FORWARD: sym.m * stage.forward_s,
            StepPhase.BACKWARD: sym.m * (stage.total_s - stage.forward_s),
            **tail.by_phase(),
        }
        seconds = {phase: factor * phase_s for phase, phase_s in unscaled.items()}
        # Phases of a rank sum to the step, as those of a measured one do.
        seconds[StepPhase.OTHER] = step.step_s - sum(seconds.values())
        yield tuple(
            TimeRow(phase=phase, seconds=phase_s)
            for phase, phase_s in sorted(seconds.items())
            if phase_s > 0
        )


def _join(
    hardware: Hardware,
    rates: DeviceRates,
    sym: Symbols,
    ledgers: tuple[Ledger, ...],
    peaks: Sequence[RankMemory],
    step: StepTime,
    assumptions: tuple[Assumption, ...],
) -> Estimate:
    """Join memory and time, and compare them with what the devices have."""
    workload, devices = sym.workload, sym.layout.world_size
    peak_rank = max(range(sym.layout.pp), key=lambda pp_rank: peaks[pp_rank].peak_bytes)
    peak = peaks[peak_rank]
    capacity = round(hardware.device.memory_bytes.value)
    on_device = (row for row in peak.rows if row.component is not Component.HOST)
    largest = max(on_device, key=lambda row: row.bytes)
    flops_per_token = flops.model_flops_per_token(
        sym.model,
        workload.seq_len,
        attended_share=sym.attended_share,
        fine_tuning=workload.fine_tuning,
    )
    model_flops = flops_per_token * workload.tokens_per_step
    device_flops_per_s = model_flops / step.step_s / devices
    mfu = device_flops_per_s / rates.peak_flops(workload.precision)
    margin_bytes = capacity - peak.peak_bytes
    host = judge_host_memory(hardware, rates.constants, [rank.rows for rank in peaks])
    evidence = judge_evidence(sym.job, hardware)
    step_sd = float(step_deviation(rates.constants, *count_missing(evidence)))
    return Estimate(
        ledgers=ledgers,
        peak_rank=peak_rank,
        peak_bytes=peak.peak_bytes,
        capacity_bytes=capacity,
        verdict=host.join(memory_verdict(margin_bytes, peak.sd_bytes)),
        margin_bytes=margin_bytes,
        peak_sd_bytes=round(peak.sd_bytes),
        largest=f"{largest.component} of {largest.module}",
        step_s=step.step_s,
        step_sd=step_sd,
        shares=tuple(
            TimeShare(
                part=part, seconds=step.exposed.get(part, 0.0), hidden_s=step.hidden.get(part, 0.0)
            )
            for part in TimePart
            if part in step.exposed or step.hidden.get(part)
        ),
        micro_batches=sym.m,
        bubble_fraction=step.exposed.get(TimePart.BUBBLE, 0.0) / step.step_s,
        tokens_per_s_per_device=workload.tokens_per_step / step.step_s / devices,
        model_flops_per_step=float(model_flops),
        tflops_per_device=device_flops_per_s / TERA,
        mfu=mfu,
        hfu=mfu * (1 + _recomputed_flops(sym) / model_flops),
        assumptions=assumptions,
        step_interval_80=step_interval(step.step_s, step_sd, 0.8),
        step_interval_95=step_interval(step.step_s, step_sd, 0.95),
        peak_interval_80=peak_interval(peak.peak_bytes, peak.sd_bytes, 0.8),
        peak_interval_95=peak_interval(peak.peak_bytes, peak.sd_bytes, 0.95),
        # Both memories have to hold their part.
        fit_probability=host.fit_probability * fit_probability(margin_bytes, peak.sd_bytes),
        evidence=evidence,
        untimed=describe_untimed(workload, hardware),
        host_bytes=host.bytes,
        host_capacity_bytes=host.capacity_bytes,
        host_verdict=host.verdict,
    )


def _recomputed_flops(sym: Symbols) -> int:
    """Return the FLOPs that recompute adds to a step over all ranks, the router's left out."""
    model, workload = sym.model, sym.workload
    moe_layers = model.moe_layer_count
    if model.moe_layers[-1]:
        moe_layers += model.mtp_layers
    share = flops.RankShare(
        layers=tuple(range(model.layers)),
        tokens=workload.tokens_per_step,
        routed_rows=workload.tokens_per_step * model.top_k * moe_layers,
        head=True,
        mtp=model.mtp_layers,
        attended=flops.expected_attended(
            workload.seq_len, sym.attended_share, workload.global_batch
        ),
    )
    # On one rank: sharding divides these FLOPs and adds none.
    one_rank = Layout(world_size=1, recompute=sym.layout.recompute)
    logits = recomputed_logit_rows(model, one_rank, share)
    if sym.layout.recompute_block:
        chunks = stages.pipeline_chunks(model, sym.layout)
        layers = recomputed_layers(model, sym.layout, chunks)
        moe_layers = sum(model.has_experts(layer) for layer in layers)
        share = replace(
            share,
            layers=tuple(layer for layer in layers if layer < model.layers),
            routed_rows=workload.tokens_per_step * model.top_k * moe_layers,
            mtp=sum(layer > model.layers for layer in layers),
        )
    layer_rows = recomputed_flop_rows(Job(model=model, workload=workload, layout=one_rank), share)
    return flops.total_model_flops((*logits, *layer_rows))


def _assumptions(hardware: Hardware, rates: DeviceRates, sym: Symbols) -> Iterator[Assumption]:
    """Yield facts and constants behind an estimate, and what the workload is taken to do."""
    yield from _workload_assumptions(sym)
    yield from _level_assumptions(hardware, rates, sym.layout)
    for name, value in _facts(hardware, rates, sym):
        yield Assumption(
            name=name, value=f"{value.value:.6g}", kind=value.kind, source=value.source
        )
    for rate in hardware.device.rates:
        points = rate.curve.points
        yield Assumption(
            name=f"rate {rate.op} {rate.dtype}",
            value=f"{points[0][1]:.4g} to {points[-1][1]:.4g} over {len(points)} points",
            kind=rate.curve.kind,
            source=rate.curve.source,
        )
    for time in hardware.fabric.times:
        yield Assumption(
            name=f"time {time.op} over {time.group_size}",
            value=f"{len(time.curve.points)} points",
            kind=time.curve.kind,
            source=time.curve.source,
        )


def _level_assumptions(
    hardware: Hardware, rates: DeviceRates, layout: Layout
) -> Iterator[Assumption]:
    """Yield how levels of switches slow the collectives of each group that crosses them."""
    if not hardware.fabric.levels:
        return
    collectives = CollectiveModel(hardware, rates.constants)
    for group in ("tp", "cp", "dp_cp", "ep", "edp", "pp"):
        crossing = collectives.span(layout, group).crossing
        if crossing == NO_CROSSING:
            continue
        latency = mention(", {} a message", format_given(crossing.latency_s, format_seconds))
        yield Assumption(
            name=f"levels of switches, {group}",
            value=f"rings {crossing.ring:.3g} x, exchanges {crossing.exchange:.3g} x{latency}",
            kind=SourceKind.ASSUMED,
            source="; ".join(
                f"{level.wiring} of {level.devices:,} devices, {level.oversubscription:g}:1"
                for level in hardware.fabric.levels
            ),
        )


def _workload_assumptions(sym: Symbols) -> Iterator[Assumption]:
    workload, layout = sym.workload, sym.layout
    load = expected_load(sym.job)
    is_measured = workload.routing is Routing.MEASURED
    yield Assumption(
        name="expert_load",
        value=f"{load.step:.4g} x the mean on the hottest rank, {load.peak:.4g} x in peaks",
        kind=SourceKind.MEASURED if is_measured else SourceKind.ASSUMED,
        source=(
            "published runs whose routers decided"
            if has_natural_load(workload)
            else f"workload.routing={workload.routing}"
        ),
    )
    repeats = expected_repeats(sym.job)
    if repeats:
        yield Assumption(
            name="repeated_steps",
            value=f"{repeats:.2%} of steps run twice",
            kind=SourceKind.ASSUMED,
            source="rows of the hottest rank over layout.rank_capacity, drawn independently",
        )
    if workload.load_histogram and sym.model.moe and layout.ep > 1:
        yield Assumption(
            name="expert_placement",
            value=f"hottest rank {describe_placements(workload, layout.ep)}",
            kind=SourceKind.MEASURED,
            source="workload.load_histogram: rules.placement",
        )
    if workload.data.documents is not DocumentMasking.JOINED:
        share = workload.data.attended_share
        yield Assumption(
            name="documents",
            value=f"leave {share:.4g} of attention",
            kind=SourceKind.MEASURED if share < 1 else SourceKind.ASSUMED,
            source="data.attended_share, measured where the files are at hand",
        )
    if layout.offload:
        value = "+".join(layout.offload)
        if layout.offload_fraction != 1:
            value += f" ({layout.offload_fraction:.0%} of the optimizer)"
        if layout.offload_layers != 1:
            value += f" (activations of {layout.offload_layers:.0%} of the layers)"
        if layout.offload_chunks:
            value += f" (activations of {layout.offload_chunks} of {layout.vpp} chunks)"
        yield Assumption(
            name="offload",
            value=value,
            kind=SourceKind.ASSUMED,
            source=(
                "copies of activations hide under as much compute as there is; "
                "the optimizer runs on the host"
            ),
        )


def _facts(hardware: Hardware, rates: DeviceRates, sym: Symbols) -> Iterator[tuple[str, Sourced]]:
    """Yield the numbers of the hardware, and the constants that the layout uses."""
    device, fabric = hardware.device, hardware.fabric
    yield "memory_bytes", device.memory_bytes
    yield "memory_Bps", device.memory_Bps
    for peak in device.peaks:
        yield f"peak_{peak.dtype}", peak.rate
    yield "domain_Bps", fabric.domain_Bps
    yield "network_Bps", fabric.network_Bps
    yield "domain_latency_s", fabric.domain_latency_s
    yield "network_latency_s", fabric.network_latency_s
    # An estimate lists what it rests on: a constant that its job cannot touch is left out.
    unused: frozenset[str] = frozenset()
    if not sym.layout.offload:
        unused |= frozenset(OFFLOAD_CONSTANTS)
    if sym.model.recurrent is None:
        unused |= frozenset({"scan_time_scale"})
    if sym.layout.zero != 3:
        unused |= frozenset({"zero3_copies"})
    if not sym.is_frozen:
        unused |= frozenset(LORA_CONSTANTS)
    if Fusion.PERMUTE not in sym.workload.trainer.unfused:
        unused |= frozenset({"atomic_sum_s"})
    if Fusion.EXPERT_BIAS not in sym.workload.trainer.unfused:
        unused |= frozenset({"expert_bias_row_s"})
    if sym.dtype is not Dtype.NVFP4:
        unused |= frozenset(NVFP4_CONSTANTS)
    if fabric.network != NetworkKind.EFA:
        unused |= frozenset(EFA_CONSTANTS)
    unused |= frozenset(name for name in EAGER_CONSTANTS if not rates.constants[name])
    for constant in rates.constants.list_all():
        if rates.uses_constant(constant.name) and constant.name not in unused:
            yield constant.name, constant.value
