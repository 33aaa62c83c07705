"""The memory of every pipeline rank of a job, under the expert load that its workload expects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moewright.cost.constants import LOAD_SCALE, Constants
from moewright.cost.memory import peak
from moewright.cost.memory.activations import policy_of
from moewright.cost.memory.model_states import BucketSet, stage_bucket_sets
from moewright.cost.memory.rank_batch import EVERY_MODULE, StageRank
from moewright.cost.memory.snapshots import rank_table
from moewright.cost.stage_parts import Array, StageParts, count_parts, list_parts
from moewright.cost.symbols import Symbols, build_symbols
from moewright.cost.time.op_time import DeviceRates
from moewright.rules.expert_load import expected_load
from moewright.rules.job import Job, routed_rows
from moewright.rules.limits.legality import check_device, check_legality, check_precision
from moewright.rules.timetable import stages
from moewright.rules.timetable.stages import Chunk
from moewright.spec.errors import BadInput, Reason
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout


def estimate_fullest_rank(job: Job, hardware: Hardware) -> peak.RankMemory:
    """Estimate the memory of the pipeline rank that holds the most.

    Raises:
        BadInput: The layout is illegal or its world is not the hardware's.
    """
    refuse_illegal_job(job, hardware)
    model, layout = job.model, job.layout
    constants = DeviceRates(hardware).constants
    parts = list_parts(model, layout, job.workload.trainer)
    chunks = stages.pipeline_chunks(model, layout)
    rank_counts = split_by_rank(layout, chunks, count_parts(model, layout, parts, chunks))
    sym = expected_symbols(job, hardware, constants)
    sets = stage_bucket_sets(job)
    peaks = rank_peaks(range(layout.pp), constants, sym, parts, sets, rank_counts)
    return max(peaks, key=lambda peak: peak.peak_bytes)


def count_saved_bytes(job: Job, hardware: Hardware) -> int:
    """Return the most that a pipeline rank keeps for backward, logits included."""
    layout = job.layout
    constants = DeviceRates(hardware).constants
    parts = list_parts(job.model, layout, job.workload.trainer)
    chunks = stages.pipeline_chunks(job.model, layout)
    rank_counts = split_by_rank(layout, chunks, count_parts(job.model, layout, parts, chunks))
    sym = expected_symbols(job, hardware, constants)
    sets = stage_bucket_sets(job)
    steady = peak.steady_micro_batches(layout, sym.m)
    taken = peak.model_memory(constants, sym, parts, policy_of(layout))
    return max(
        peak.saved_activation_bytes(
            taken,
            _stage_rank(constants, sym, parts, sets, rank_counts, pp_rank),
            table=rank_table(layout, steady, pp_rank),
        )
        for pp_rank in range(layout.pp)
    )


def refuse_illegal_job(job: Job, hardware: Hardware) -> None:
    """Raise BadInput when the layout cannot be estimated."""
    # What the device cannot do at all comes before what a layout of it cannot.
    reasons = [*check_precision(job.workload, hardware)]
    if job.layout.world_size != hardware.count:
        reasons.append(
            Reason(
                field="layout.world_size",
                value=str(job.layout.world_size),
                rule=f"the hardware has {hardware.count} devices",
                nearest=str(hardware.count),
            )
        )
    reasons += check_device(job.layout, hardware)
    reasons += check_legality(job)
    if reasons:
        raise BadInput(*reasons)


def expected_symbols(job: Job, hardware: Hardware, constants: Constants) -> Symbols:
    """Return the symbols of a layout, under the expert load that the workload expects."""
    return build_symbols(
        job,
        device_kind=hardware.device.kind,
        load=expected_load(job, scale=constants[LOAD_SCALE]),
        router_efficiency=constants["router_efficiency"],
    )


def split_by_rank(layout: Layout, chunks: Sequence[Chunk], counts: Array) -> list[Array]:
    """Split the counts of virtual stages [chunks, parts] by the pipeline rank that holds them."""
    return [counts[[chunk.pp_rank == pp_rank for chunk in chunks]] for pp_rank in range(layout.pp)]


def rank_peaks(
    pp_ranks: Sequence[int],
    constants: Constants,
    sym: Symbols,
    parts: StageParts,
    sets: Sequence[Sequence[BucketSet]],
    rank_counts: Sequence[Array],
) -> tuple[peak.RankMemory, ...]:
    """Return the peak of each of these pipeline ranks."""
    steady = peak.steady_micro_batches(sym.layout, sym.m)
    taken = peak.model_memory(constants, sym, parts, policy_of(sym.layout))
    return tuple(
        peak.rank_memory(
            taken,
            _stage_rank(constants, sym, parts, sets, rank_counts, pp_rank),
            table=rank_table(sym.layout, steady, pp_rank),
        )
        for pp_rank in pp_ranks
    )


def _stage_rank(
    constants: Constants,
    sym: Symbols,
    parts: StageParts,
    sets: Sequence[Sequence[BucketSet]],
    rank_counts: Sequence[Array],
    pp_rank: int,
) -> StageRank:
    return StageRank(
        constants=constants,
        sym=sym,
        columns=EVERY_MODULE,
        pp_rank=pp_rank,
        sets=sets[pp_rank],
        parts=parts,
        counts=rank_counts[pp_rank],
    )


def peak_growth(
    constants: Constants,
    sym: Symbols,
    parts: StageParts,
    sets: Sequence[Sequence[BucketSet]],
    rank_counts: Sequence[Array],
    peaks: Sequence[peak.RankMemory],
) -> float:
    """Return the growth of the highest of all `peaks` with the expert load.

    It is in bytes per unit of load factor of the hottest expert rank.
    """
    model, layout = sym.model, sym.layout
    if model.moe is None or layout.ep == 1:
        return 0.0
    fullest = max(range(layout.pp), key=lambda pp_rank: peaks[pp_rank].peak_bytes)
    # Bytes are linear in the load: one unit more of it gives the slope.
    load = expected_load(sym.job).peak + 1
    hotter = replace(sym, R_peak=routed_rows(model, sym.workload, layout, load))
    (grown,) = rank_peaks([fullest], constants, hotter, parts, sets, rank_counts)
    return float(grown.peak_bytes - peaks[fullest].peak_bytes)
