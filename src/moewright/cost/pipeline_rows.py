"""The predicted timetable of a step, row by row, with what every row keeps in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moewright.cost.memory import peak
from moewright.cost.memory.activations import policy_of
from moewright.cost.memory.estimate_memory import expected_symbols
from moewright.cost.stage_parts import Array, count_parts, list_parts
from moewright.cost.time.collective_time import CollectiveModel
from moewright.cost.time.op_time import DeviceRates
from moewright.cost.time.pipeline_time import TimetableRows
from moewright.cost.time.step_time import Pricer, model_ops, price_model_ops
from moewright.rules.job import Job, plan_job
from moewright.rules.timetable import stages
from moewright.rules.timetable.schedule import forward_order, split_backwards, timetable
from moewright.rules.timetable.simulate import StageSeconds, row_end_times
from moewright.rules.timetable.timetable_row import RowKind
from moewright.spec.hardware import Hardware
from moewright.spec.layout import Layout
from moewright.spec.plan import Plan

KINDS = (RowKind.F, RowKind.B, RowKind.W)


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePrices:
    """Seconds of a micro-batch on the virtual stages [stages], and bytes that its forward keeps.

    `backward_s` holds weight gradients; `weight_s` is their part of it.
    """

    forward_s: Array
    backward_s: Array
    weight_s: Array
    saved_bytes: Array


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineRows:
    """The rows of every pipeline rank [ranks, rows], each rank's by their start.

    `kind` is an index into KINDS; transfers between ranks take no time.
    """

    kind: Array
    micro_batch: Array
    chunk: Array
    start_s: Array
    length_s: Array
    prices: StagePrices
    end_s: float
    idle_s: float  # of the rank that works longest


def simulate_plan(plan: Plan) -> PipelineRows:
    """Return the timetable of a plan's step, up to the end of the last backward."""
    job = plan_job(plan)
    prices = price_stages(job, plan.hardware)
    micro_batches = plan.estimate.micro_batches
    if plan.layout.schedule.splits_backward:
        columns = _simulate_split(plan.layout, micro_batches, prices)
    else:
        columns = _simulate_whole(plan.layout, micro_batches, prices)
    kind, micro_batch, chunk, start_s, length_s = columns
    # Stable: of rows without length that start at once, the earlier of the timetable stays first.
    order = np.argsort(start_s, axis=1, kind="stable")
    ends = start_s + length_s
    busy_s = length_s.sum(axis=1)
    end_s = float(ends.max())
    return PipelineRows(
        kind=np.take_along_axis(kind, order, axis=1),
        micro_batch=np.take_along_axis(micro_batch, order, axis=1),
        chunk=np.take_along_axis(chunk, order, axis=1),
        start_s=np.take_along_axis(start_s, order, axis=1),
        length_s=np.take_along_axis(length_s, order, axis=1),
        prices=prices,
        end_s=end_s,
        idle_s=end_s - float(busy_s.max()),
    )


def price_stages(job: Job, hardware: Hardware) -> StagePrices:
    """Price a micro-batch on every virtual stage, as an estimate does."""
    model, layout = job.model, job.layout
    rates = DeviceRates(hardware)
    collectives = CollectiveModel(hardware, rates.constants)
    sym = expected_symbols(job, hardware, rates.constants)
    parts = list_parts(model, layout, job.workload.trainer)
    counts = count_parts(model, layout, parts, stages.pipeline_chunks(model, layout))
    priced = price_model_ops(rates, collectives, sym, model_ops(sym))
    times = Pricer(collectives, sym, priced).part_times(layout, parts)
    memories = peak.model_memory(rates.constants, sym, parts, policy_of(layout))
    return StagePrices(
        forward_s=counts @ times.forward_s,
        backward_s=counts @ times.backward_s,
        weight_s=counts @ times.weight_grad_s,
        saved_bytes=counts @ memories.saved_bytes[:, 0],
    )


Columns = tuple[Array, Array, Array, Array, Array]  # kind, micro-batch, chunk, start, length


def _simulate_whole(layout: Layout, micro_batches: int, prices: StagePrices) -> Columns:
    """Return the rows of 1F1B or an interleaved timetable [ranks, rows]."""
    order = np.array(forward_order(layout, micro_batches))
    seconds = np.concatenate([prices.forward_s, prices.backward_s])
    ends = TimetableRows(layout, micro_batches).row_ends(seconds)
    ranks = np.arange(layout.pp)[:, None]
    chunk = np.stack([order[:, 1], layout.vpp - 1 - order[:, 1]])[:, None, :]
    stage = chunk * layout.pp + ranks
    length = np.stack([prices.forward_s[stage[0]], prices.backward_s[stage[1]]])

    def join(values: Array) -> Array:
        both = np.broadcast_to(values, ends.shape)
        return np.concatenate([both[0], both[1]], axis=1)

    kind = np.arange(2)[:, None, None]
    return join(kind), join(order[:, 0]), join(chunk), join(ends - length), join(length)


def _simulate_split(layout: Layout, micro_batches: int, prices: StagePrices) -> Columns:
    """Return the rows of a timetable whose weight gradients have rows [ranks, rows]."""
    table = timetable(layout, micro_batches)
    input_s = prices.backward_s - prices.weight_s
    seconds = [
        StageSeconds(forward=forward, input_backward=gradient, weight_backward=weights)
        for forward, gradient, weights in zip(
            prices.forward_s.tolist(), input_s.tolist(), prices.weight_s.tolist(), strict=True
        )
    ]
    ends = row_end_times(layout, table, seconds)
    longest = max(map(len, table))
    kind, micro_batch, chunk = np.zeros((3, layout.pp, longest), dtype=int)
    start_s, length_s = np.zeros((2, layout.pp, longest))
    for rank, rows in enumerate(table):
        split = split_backwards(rows)
        for place, row in enumerate(rows):
            stage = stages.virtual_stage(layout, rank, row.chunk)
            is_split = (row.micro_batch, row.chunk) in split
            lengths = {
                RowKind.F: prices.forward_s[stage],
                RowKind.B: input_s[stage] if is_split else prices.backward_s[stage],
                RowKind.W: prices.weight_s[stage],
            }
            length = float(lengths[row.kind])
            kind[rank, place] = KINDS.index(row.kind)
            micro_batch[rank, place] = row.micro_batch
            chunk[rank, place] = row.chunk
            length_s[rank, place] = length
            start_s[rank, place] = ends[row.kind, row.micro_batch, stage] - length
    return kind, micro_batch, chunk, start_s, length_s
