"""Seconds of what a step does once, after its micro-batches: reduction, update, weight gather."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

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
from moewright.spec.workload import Dtype, MatrixUpdate

_FP32_BYTES = 4
_BUCKET_ELEMENTS_A_RANK = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RankParameters:
    """Parameters of one rank: dense and expert elements, and the calls their buckets take."""

    dense: int
    expert: int
    dense_calls: int = 1
    expert_calls: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTail:
    """Seconds of the work that a step does once, after its micro-batches.

    `hidden_s` are the seconds of collectives that run beside micro-batches, and are hidden as far
    as these take as long; the other fields are exposed.
    """

    reduce_s: float
    gather_s: float
    optimizer_s: float
    hidden_s: float

    @property
    def total_s(self) -> float:
        """The seconds after the micro-batches."""
        return self.reduce_s + self.gather_s + self.optimizer_s

    @property
    def least_s(self) -> float:
        """The least that a step takes, however short its micro-batches are."""
        return self.total_s + self.hidden_s

    def step_s(self, pipeline_s: float) -> float:
        """Return the seconds of a step whose micro-batches take `pipeline_s`."""
        return max(pipeline_s + self.total_s, self.least_s)


def count_owned_parameters(layout: Layout, parameters: RankParameters) -> tuple[int, int]:
    """Count the dense and the expert parameters that a rank updates: its shards of its own."""
    if not layout.zero:
        return parameters.dense, parameters.expert
    dense_shards = grid.group_size(layout, fsdp.state_group(layout, "dp_cp"))
    expert_shards = grid.group_size(layout, fsdp.state_group(layout, "edp"))
    return parameters.dense // dense_shards, parameters.expert // expert_shards


def step_tail(
    rates: DeviceRates, collectives: CollectiveModel, sym: Symbols, parameters: RankParameters
) -> StepTail:
    """Return gradient reduction, optimizer and weight gather of a rank with so many parameters.

    zero=2 and 3 reduce after every micro-batch, zero=3 gathers for each forward and backward, with
    copies from and to the buffers of its collectives that nothing hides; both add each reduced
    shard to the gradients of the step. Under hybrid sharding the ranks that hold replicas of a
    shard then sum its gradient, once a step.
    Replicas of experts send gradients to the experts' owners after backward, before the owners
    reduce, and receive weights at the end of the step: none of that, nor the owners' reduction and
    gather, is hidden.
    """
    layout = sym.layout
    reduce_s, gather_s, replica_sums_s = 0.0, 0.0, 0.0
    hideable_reduce_s, hideable_gather_s = 0.0, 0.0  # what other work may hide
    for group, numel, calls in (
        ("dp_cp", parameters.dense, parameters.dense_calls),
        ("edp", parameters.expert, parameters.expert_calls),
    ):
        if not numel:
            continue
        exchange = _state_exchange(collectives, sym, group, numel, calls)
        reduce_s += exchange.reduce_s
        gather_s += exchange.gather_s
        replica_sums_s += exchange.replica_sums_s
        if not layout.spare or group != "edp":
            hideable_reduce_s = reduce_s
            hideable_gather_s = gather_s
    if layout.spare and sym.model.moe is not None:
        span = collectives.span(layout, "ep")
        replicas = layout.spare * parameters.expert * layout.ep / sym.model.moe.experts
        reduce_s += collectives.seconds(Collective.ALL_TO_ALL, span, _FP32_BYTES * replicas)
        gather_s += collectives.seconds(Collective.ALL_TO_ALL, span, sym.c * replicas)
    gather_s += _momentum_exchange_s(collectives, sym, parameters)
    hidden_share = 1 - collectives.constants["overlapped_dp_share"] if sym.is_fused else 0.0
    hidden_reduce_s, hidden_gather_s = 0.0, 0.0
    if Overlap.GRAD in layout.overlap or layout.zero >= 2:
        hidden_reduce_s = hidden_share * hideable_reduce_s
    if Overlap.PARAM in layout.overlap or layout.zero == 3:
        hidden_gather_s = hidden_share * hideable_gather_s
    return StepTail(
        reduce_s=reduce_s - hidden_reduce_s + replica_sums_s,
        gather_s=gather_s
        - hidden_gather_s
        + _flat_copies_s(rates, sym, parameters)
        + _shard_sums_s(rates, sym, parameters),
        optimizer_s=_optimizer_s(rates, sym, parameters),
        hidden_s=hidden_reduce_s + hidden_gather_s,
    )


def _flat_copies_s(rates: DeviceRates, sym: Symbols, parameters: RankParameters) -> float:
    """Return the seconds in which zero=3 copies weights out of gathered buffers, and gradients in.

    PyTorch's fully_shard does so beside nothing, in the stream of the micro-batches
    (_fsdp_collectives.py: foreach_all_gather_copy_out, foreach_reduce).
    """
    layout = sym.layout
    if layout.zero != 3:
        return 0.0
    numel = sum(
        count
        for group, count in (("dp_cp", parameters.dense), ("edp", parameters.expert))
        if grid.group_size(layout, fsdp.state_group(layout, group)) > 1
    )
    weight_bytes = 2 * _gathered_weight_bytes(rates.constants, sym) * numel
    grad_bytes = (sym.c + sym.workload.grad_dtype.nbytes) * sym.trained_share * numel
    row = elementwise_row("flat_copies", sym, 2 * weight_bytes + grad_bytes)
    return rates.constants["zero3_copies"] * sym.m * rates.seconds(row)


def _shard_sums_s(rates: DeviceRates, sym: Symbols, parameters: RankParameters) -> float:
    """Return the seconds in which zero=2 and 3 add reduced shards to the gradients of a step.

    Products write the gradients of a micro-batch into a buffer; once it is reduced, the rank's
    shard is added (Megatron-FSDP, param_and_grad_buffer.py: local_grad += reduced_grad; PyTorch's
    foreach_reduce likewise). One read and the write of experts' sums are priced beside their
    products.
    """
    layout = sym.layout
    if layout.zero < 2 or not sym.is_fused:
        return 0.0
    dense, expert = count_owned_parameters(layout, parameters)
    grad_bytes = sym.workload.grad_dtype.nbytes * sym.trained_share
    row = elementwise_row("shard_sums", sym, grad_bytes * (3 * dense + expert))
    return sym.m * rates.seconds(row)


def _momentum_exchange_s(
    collectives: CollectiveModel, sym: Symbols, parameters: RankParameters
) -> float:
    """Return the seconds in which Muon's momentum goes to whole matrices and comes back."""
    is_muon = sym.workload.optimizer.matrix_update is MatrixUpdate.MUON
    if not is_muon or not sym.layout.zero:
        return 0.0
    total_s = 0.0
    owned = count_owned_parameters(sym.layout, parameters)
    for group, numel in zip(("dp_cp", "edp"), owned, strict=True):
        if numel:
            span = collectives.span(sym.layout, fsdp.state_group(sym.layout, group))
            nbytes = MOMENTUM_BYTES * numel
            total_s += 2 * collectives.seconds(Collective.ALL_TO_ALL, span, nbytes)
    return total_s


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


def _optimizer_s(rates: DeviceRates, sym: Symbols, parameters: RankParameters) -> float:
    """Return the seconds of the optimizer, on the device and on the host, and of the step's end.

    Between two steps all ranks wait for the one whose host comes last.
    """
    c, layout = rates.constants, sym.layout
    trained = sym.trained_share
    owned_dense, owned_expert = count_owned_parameters(layout, parameters)
    owned = trained * (owned_dense + owned_expert)
    numel = trained * (parameters.dense + parameters.expert)
    ops = optimizer_ops(sym, numel=numel, owned_numel=owned)
    on_device_s = sum(rates.seconds(row) for row in ops)
    host_share = layout.offload_fraction if Offload.OPTIMIZER in layout.offload else 0.0
    on_host_s = owned * c["host_optimizer_s_per_parameter"]
    tail_s = c["step_tail_s"] + c["step_jitter_s"] * largest_of(layout.world_size)
    for row in muon_ops(sym, owned_dense=owned_dense, owned_expert=owned_expert):
        tail_s += rates.seconds(row)
    return tail_s + (1 - host_share) * on_device_s + host_share * on_host_s
