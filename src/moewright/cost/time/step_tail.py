"""Seconds of what a step does once, after its micro-batches: reduction, update, weight gather."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import TypeVar

import numpy as np

from moewright.cost.constants import Constants
from moewright.cost.memory.model_states import MOMENTUM_BYTES
from moewright.cost.symbols import Symbols
from moewright.cost.time.collective_time import CollectiveModel
from moewright.cost.time.elementwise import elementwise_row
from moewright.cost.time.head_ops import optimizer_ops
from moewright.cost.time.muon import muon_ops
from moewright.cost.time.op_time import DeviceRates
from moewright.rules import grid
from moewright.rules.routing import largest_of
from moewright.rules.shapes import fsdp
from moewright.spec.hardware import Collective
from moewright.spec.layout import Layout, Offload, Overlap
from moewright.spec.ledger import StepPhase
from moewright.spec.plan import TimePart
from moewright.spec.units import FP32_BYTES
from moewright.spec.workload import Dtype, MatrixUpdate

Numbers = float | np.ndarray
_BUCKET_ELEMENTS_A_RANK = 1_000_000  # Megatron-LM's, param_and_grad_buffer.py


@dataclass(frozen=True, kw_only=True, slots=True)
class RankParameters:
    """Parameters of one rank: dense and expert elements, and the calls their buckets take."""

    dense: int
    expert: int
    dense_calls: int = 1
    expert_calls: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TailSeconds:
    """The seconds of one term of what a step does once, and where they are booked.

    `hidden_s` are those of collectives that run beside micro-batches, and are hidden as far as
    these take as long; `exposed_s` come after them.
    """

    phase: StepPhase
    part: TimePart
    exposed_s: float
    hidden_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepTail:
    """Seconds of the work that a step does once, after its micro-batches, by term.

    `beside_share` is the share of the micro-batches' time beside which the hidden terms run.
    """

    terms: tuple[TailSeconds, ...]
    beside_share: float = 1.0

    @cached_property
    def hidden_s(self) -> float:
        """The seconds of what runs beside the micro-batches."""
        return sum(term.hidden_s for term in self.terms)

    @cached_property
    def total_s(self) -> float:
        """The seconds after the micro-batches."""
        return sum(term.exposed_s for term in self.terms)

    @property
    def least_s(self) -> float:
        """The least that a step takes, however short its micro-batches are."""
        return self.total_s + self.hidden_s

    def uncovered_s(self, pipeline_s: float) -> float:
        """Return what shows of the hidden terms where the micro-batches take `pipeline_s`."""
        return max(0.0, self.hidden_s - self.beside_share * pipeline_s)

    def step_s(self, pipeline_s: float) -> float:
        """Return the seconds of a step whose micro-batches take `pipeline_s`."""
        return pipeline_s + self.total_s + self.uncovered_s(pipeline_s)

    def by_phase(self) -> dict[StepPhase, float]:
        """Return the seconds after the micro-batches by phase."""
        return _sum_by((term.phase, term.exposed_s) for term in self.terms)

    def by_part(self) -> dict[TimePart, float]:
        """Return the seconds after the micro-batches by part of a step."""
        return _sum_by((term.part, term.exposed_s) for term in self.terms)


_K = TypeVar("_K")


def _sum_by(pairs: Iterable[tuple[_K, float]]) -> dict[_K, float]:
    sums: dict[_K, float] = {}
    for key, seconds in pairs:
        sums[key] = sums.get(key, 0.0) + seconds
    return sums


def count_owned_parameters(layout: Layout, parameters: RankParameters) -> tuple[int, int]:
    """Count the dense and the expert parameters that a rank updates: its shards of its own."""
    if not layout.zero:
        return parameters.dense, parameters.expert
    dense_shards = grid.group_size(layout, fsdp.state_group(layout, "dp_cp"))
    expert_shards = grid.group_size(layout, fsdp.state_group(layout, "edp"))
    return parameters.dense // dense_shards, parameters.expert // expert_shards


@dataclass(frozen=True, kw_only=True)
class TailContext:
    """What the terms of a tail are priced from: a rank with so many parameters."""

    rates: DeviceRates
    collectives: CollectiveModel
    sym: Symbols
    parameters: RankParameters

    @cached_property
    def exchanges(self) -> dict[str, _StateExchange]:
        """The exchanges of the parameters that each group reduces."""
        parameters = self.parameters
        return {
            group: _state_exchange(self.collectives, self.sym, group, numel, calls)
            for group, numel, calls in (
                ("dp_cp", parameters.dense, parameters.dense_calls),
                ("edp", parameters.expert, parameters.expert_calls),
            )
            if numel
        }

    @cached_property
    def owned(self) -> tuple[int, int]:
        """The dense and the expert parameters that the rank updates."""
        return count_owned_parameters(self.sym.layout, self.parameters)

    @cached_property
    def hideable(self) -> list[_StateExchange]:
        """The exchanges that other work may hide: not those of experts that have replicas."""
        return [
            exchange
            for group, exchange in self.exchanges.items()
            if not self.sym.layout.spare or group != "edp"
        ]

    @property
    def hidden_share(self) -> float:
        """The share of a hideable exchange that runs beside the micro-batches."""
        if not self.sym.is_fused:
            return 0.0
        return 1 - self.collectives.constants["overlapped_dp_share"]

    @property
    def replica_numel(self) -> float:
        """The elements of a rank's replicas of experts."""
        model, layout = self.sym.model, self.sym.layout
        if not layout.spare or model.moe is None:
            return 0.0
        return layout.spare * self.parameters.expert * layout.ep / model.moe.experts

    def replica_exchange_s(self, element_bytes: int) -> float:
        """Return the seconds in which ranks exchange replicas of experts with their owners."""
        if not self.replica_numel:
            return 0.0
        span = self.collectives.span(self.sym.layout, "ep")
        nbytes = element_bytes * self.replica_numel
        return self.collectives.seconds(Collective.ALL_TO_ALL, span, nbytes)


def reduce_gradients(tail: TailContext) -> TailSeconds:
    """Return the reduction of gradients.

    zero=2 and 3 reduce after every micro-batch. Under hybrid sharding the ranks that hold replicas
    of a shard then sum its gradient, once a step. Replicas of experts send gradients to the
    experts' owners after backward, before the owners reduce: neither is hidden.
    """
    layout = tail.sym.layout
    hidden_s = 0.0
    if Overlap.GRAD in layout.overlap or layout.zero >= 2:
        hidden_s = tail.hidden_share * sum(exchange.reduce_s for exchange in tail.hideable)
    reduce_s = sum(
        exchange.reduce_s + exchange.replica_sums_s for exchange in tail.exchanges.values()
    )
    return TailSeconds(
        phase=StepPhase.GRAD_REDUCE,
        part=TimePart.DP_COMM,
        exposed_s=reduce_s + tail.replica_exchange_s(FP32_BYTES) - hidden_s,
        hidden_s=hidden_s,
    )


def gather_weights(tail: TailContext) -> TailSeconds:
    """Return the gathers of weights.

    zero=3 gathers for each forward and backward. Replicas of experts receive weights at the end of
    the step, which nothing hides.
    """
    layout = tail.sym.layout
    hidden_s = 0.0
    if Overlap.PARAM in layout.overlap or layout.zero == 3:
        hidden_s = tail.hidden_share * sum(exchange.gather_s for exchange in tail.hideable)
    gather_s = sum(exchange.gather_s for exchange in tail.exchanges.values())
    return TailSeconds(
        phase=StepPhase.PARAM_GATHER,
        part=TimePart.DP_COMM,
        exposed_s=gather_s + tail.replica_exchange_s(tail.sym.c) - hidden_s,
        hidden_s=hidden_s,
    )


def exchange_momentum(tail: TailContext) -> TailSeconds:
    """Return the exchange of Muon's momentum, which goes to whole matrices and comes back."""
    sym = tail.sym
    exchange_s = 0.0
    if sym.workload.optimizer.matrix_update is MatrixUpdate.MUON and sym.layout.zero:
        for group, numel in zip(("dp_cp", "edp"), tail.owned, strict=True):
            if numel:
                span = tail.collectives.span(sym.layout, fsdp.state_group(sym.layout, group))
                nbytes = MOMENTUM_BYTES * numel
                exchange_s += 2 * tail.collectives.seconds(Collective.ALL_TO_ALL, span, nbytes)
    return TailSeconds(phase=StepPhase.PARAM_GATHER, part=TimePart.DP_COMM, exposed_s=exchange_s)


def copy_flat_weights(tail: TailContext) -> TailSeconds:
    """Return the copies in which zero=3 takes weights out of gathered buffers, and gradients in.

    PyTorch's fully_shard does so beside nothing, in the stream of the micro-batches
    (_fsdp_collectives.py: foreach_all_gather_copy_out, foreach_reduce).
    """
    rates, sym, layout = tail.rates, tail.sym, tail.sym.layout
    copies_s = 0.0
    if layout.zero == 3:
        numel = sum(
            count
            for group, count in (("dp_cp", tail.parameters.dense), ("edp", tail.parameters.expert))
            if grid.group_size(layout, fsdp.state_group(layout, group)) > 1
        )
        # Read from the buffer of the gather and written to the weights.
        weight_bytes = 2 * _gathered_weight_bytes(rates.constants, sym) * numel
        grad_bytes = (sym.c + sym.workload.grad_dtype.nbytes) * sym.trained_share * numel
        # Weights are gathered for the forward and for the backward of a micro-batch.
        row = elementwise_row("flat_copies", sym, 2 * weight_bytes + grad_bytes)
        copies_s = rates.constants["zero3_copies"] * sym.m * rates.seconds(row)
    return TailSeconds(phase=StepPhase.PARAM_GATHER, part=TimePart.DP_COMM, exposed_s=copies_s)


def add_shards(tail: TailContext) -> TailSeconds:
    """Return the sums in which zero=2 and 3 add reduced shards to the gradients of a step.

    Products write the gradients of a micro-batch into a buffer; once it is reduced, the rank's
    shard is added (Megatron-FSDP, param_and_grad_buffer.py: local_grad += reduced_grad; PyTorch's
    foreach_reduce likewise). One read and the write of experts' sums are priced beside their
    products.
    """
    sym = tail.sym
    sums_s = 0.0
    if sym.layout.zero >= 2 and sym.is_fused:
        dense, expert = tail.owned
        grad_bytes = sym.workload.grad_dtype.nbytes * sym.trained_share
        row = elementwise_row("shard_sums", sym, grad_bytes * (3 * dense + expert))
        sums_s = sym.m * tail.rates.seconds(row)
    return TailSeconds(phase=StepPhase.PARAM_GATHER, part=TimePart.DP_COMM, exposed_s=sums_s)


def update_weights(tail: TailContext) -> TailSeconds:
    """Return the optimizer, on the device and on the host, and the step's end.

    Between two steps all ranks wait for the one whose host comes last.
    """
    rates, sym, layout = tail.rates, tail.sym, tail.sym.layout
    c, trained = rates.constants, sym.trained_share
    owned_dense, owned_expert = tail.owned
    owned = trained * (owned_dense + owned_expert)
    numel = trained * (tail.parameters.dense + tail.parameters.expert)
    ops = optimizer_ops(sym, numel=numel, owned_numel=owned)
    on_device_s = sum(rates.seconds(row) for row in ops)
    host_share = 0.0
    if Offload.OPTIMIZER in layout.offload:
        host_share = layout.offload_fraction
    on_host_s = owned * c["host_optimizer_s_per_parameter"]
    end_s = c["step_tail_s"] + c["step_jitter_s"] * largest_of(layout.world_size)
    for row in muon_ops(sym, owned_dense=owned_dense, owned_expert=owned_expert):
        end_s += rates.seconds(row)
    update_s = end_s + (1 - host_share) * on_device_s + host_share * on_host_s
    return TailSeconds(phase=StepPhase.OPTIMIZER, part=TimePart.OPTIMIZER, exposed_s=update_s)


# What a step does once. Estimates book the terms by phase and part, searches sum them.
TAIL_TERMS: tuple[Callable[[TailContext], TailSeconds], ...] = (
    reduce_gradients,
    gather_weights,
    exchange_momentum,
    copy_flat_weights,
    add_shards,
    update_weights,
)


def exchange_window(
    zero: int, *, pp: Numbers, vpp: Numbers, micro_batches: Numbers
) -> float | np.ndarray:
    """Return the share of the micro-batches' time beside which exchanges of states can run.

    zero=2 and 3 reduce and gather for every micro-batch. Otherwise a gradient is complete after the
    last backward of its chunk, and a weight needed before the first forward, so that the rest of
    one micro-batch is beside the exchange, and with virtual stages the chunks of those of a group
    that come after (Megatron-LM, interleaved schedule: grad_sync_func, param_sync_func).
    """
    if zero >= 2:
        return 1.0
    return np.minimum(1.0, ((vpp - 1) * pp + 1) / (vpp * micro_batches))


def step_tail(
    rates: DeviceRates, collectives: CollectiveModel, sym: Symbols, parameters: RankParameters
) -> StepTail:
    """Return what a rank with so many parameters does once a step."""
    tail = TailContext(rates=rates, collectives=collectives, sym=sym, parameters=parameters)
    layout = sym.layout
    window = exchange_window(layout.zero, pp=layout.pp, vpp=layout.vpp, micro_batches=sym.m)
    return StepTail(terms=tuple(term(tail) for term in TAIL_TERMS), beside_share=float(window))


@dataclass(frozen=True, kw_only=True, slots=True)
class _StateExchange:
    """Seconds of a group's gradient reduction and weight gather, and of sums over replicas."""

    reduce_s: float
    gather_s: float
    replica_sums_s: float


def _state_exchange(
    collectives: CollectiveModel, sym: Symbols, group: str, numel: int, calls: int
) -> _StateExchange:
    """Return the exchanges of a step for the parameters that `group` reduces, in so many calls.

    Stacks on CUDA grow their buckets with the group, to a million elements a rank (Megatron-LM,
    param_and_grad_buffer.py), so that calls over many ranks stay few.
    """
    layout, workload = sym.layout, sym.workload
    passes = sym.m if layout.zero >= 2 else 1
    span = collectives.span(layout, fsdp.state_group(layout, group))
    if sym.is_fused:
        calls = min(calls, ceil(numel / (_BUCKET_ELEMENTS_A_RANK * span.size)))
    # Gradients are those of what trains, and so are updated weights, which ZeRO-1 gathers.
    trained = sym.trained_share
    call_bytes = workload.grad_dtype.nbytes * trained * numel / calls
    if not layout.zero:
        reduce_s = calls * collectives.seconds(Collective.ALL_REDUCE, span, call_bytes)
        return _StateExchange(reduce_s=reduce_s, gather_s=0.0, replica_sums_s=0.0)
    reduce_s = calls * collectives.seconds(Collective.REDUCE_SCATTER, span, call_bytes)
    gathered = numel if layout.zero == 3 else trained * numel
    gathered_bytes = _gathered_weight_bytes(collectives.constants, sym) * gathered
    weight_bytes = gathered_bytes / span.size / calls
    gather_s = calls * collectives.seconds(Collective.ALL_GATHER, span, weight_bytes)
    replica_sums_s = 0.0
    if layout.shard:
        replicas_span = collectives.span(layout, fsdp.fsdp_groups(layout, group).replica_group)
        replica_sums_s = calls * collectives.seconds(
            Collective.ALL_REDUCE, replicas_span, call_bytes / span.size
        )
    gathers = 2 * passes if layout.zero == 3 else 1
    return _StateExchange(
        reduce_s=passes * reduce_s, gather_s=gathers * gather_s, replica_sums_s=replica_sums_s
    )


def _gathered_weight_bytes(constants: Constants, sym: Symbols) -> int:
    """Return the bytes of a gathered weight: one where 8-bit weights are the stored ones.

    Weights with a scale a block are gathered in 16 bits and quantised after that.
    """
    stores_8bit = sym.dtype is Dtype.FP8 and not constants["fp8_weight_copies_bytes"]
    return 1 if stores_8bit else sym.c
