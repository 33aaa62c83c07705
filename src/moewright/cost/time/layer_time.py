"""Seconds of one layer, or of embedding, head and MTP projection, for one micro-batch.

They consist of rows of work, collectives and host time (docs/formulas.md 11). Device and host
overlap in part: time = (device^p + host^p)^(1/p), for forward, backward and a recomputed block
each; p = 1 adds them. Waits for the split sizes of an all-to-all are always added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moewright.cost.constants import Constants
from moewright.cost.memory.activations import OffloadedActivations
from moewright.cost.stage_parts import LayerKind
from moewright.cost.symbols import Symbols
from moewright.cost.time.collective_time import CollectiveModel
from moewright.cost.time.gemm_rows import LayerOps
from moewright.cost.time.host_time import host_exponent, layer_host_s
from moewright.cost.time.layer_collectives import (
    EXPERT_ROW_NAMES,
    ContextExchange,
    covered_exchange,
    cp_exchange,
    ep_exchange_s,
    tp_all_reduce_s,
    tp_exchange_s,
    tp_heads_s,
    weight_gradient_s,
)
from moewright.cost.time.op_time import DeviceRates, TimedRows
from moewright.rules.saved.saved_tensor import fetches_chunks
from moewright.spec.hardware import Collective
from moewright.spec.layout import CudaGraphScope, Layout, Overlap, Recompute
from moewright.spec.model import MixerKind, ModelSpec
from moewright.spec.plan import TimePart

PartSeconds = Mapping[TimePart, float]
FloatOrArray = float | np.ndarray  # one number, or an array with one for each of many choices


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchTime:
    """Seconds of one micro-batch, forward and backward, by part: exposed, and hidden by other work.

    `forward_s` are those of the exposed seconds that belong to the forward, `weight_grad_s` those
    that belong to the weight gradients.
    """

    exposed: PartSeconds
    hidden: PartSeconds
    forward_s: float
    weight_grad_s: float

    @property
    def total_s(self) -> float:
        return sum(self.exposed.values())


def add_times(weighted: Iterable[tuple[MicroBatchTime, float]]) -> MicroBatchTime:
    """Return the weighted sum."""
    exposed: dict[TimePart, float] = {}
    hidden: dict[TimePart, float] = {}
    forward_s = 0.0
    weight_grad_s = 0.0
    for time, weight in weighted:
        forward_s += weight * time.forward_s
        weight_grad_s += weight * time.weight_grad_s
        for sums, parts in ((exposed, time.exposed), (hidden, time.hidden)):
            for part, seconds in parts.items():
                sums[part] = sums.get(part, 0.0) + weight * seconds
    return MicroBatchTime(
        exposed=exposed, hidden=hidden, forward_s=forward_s, weight_grad_s=weight_grad_s
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedOps:
    """The rows of a layer with their seconds."""

    forward: TimedRows
    backward: TimedRows


def price_ops(rates: DeviceRates, ops: LayerOps) -> PricedOps:
    """Return the rows with the seconds that they take at these rates."""
    return PricedOps(
        forward=tuple((row, rates.seconds(row)) for row in ops.forward),
        backward=tuple((row, rates.seconds(row)) for row in ops.backward),
    )


def replace_expert_rows(priced: PricedOps, experts: PricedOps) -> PricedOps:
    """Return `priced` with its rows between dispatch and combine taken from `experts`, in order."""

    def replace_rows(rows: TimedRows, replacements: TimedRows) -> TimedRows:
        replacement = iter(replacements)
        return tuple(
            next(replacement) if row.name.startswith(EXPERT_ROW_NAMES) else (row, seconds)
            for row, seconds in rows
        )

    return PricedOps(
        forward=replace_rows(priced.forward, experts.forward),
        backward=replace_rows(priced.backward, experts.backward),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCollectives:
    """Seconds of the collectives of one layer and micro-batch.

    `ep_forward_s` and `ep_backward_s` are dispatch and combine. `tp_s` is one gather or scatter;
    each of `tp_blocks` blocks makes two in forward and three in backward. `heads_s` is what ranks
    of a TP group exchange of queries and keys, forward and as much backward. `cp` is the exchange
    of context parallelism.
    """

    ep_forward_s: float
    ep_backward_s: float
    tp_s: float
    tp_blocks: int
    heads_s: float
    cp: ContextExchange


def price_collectives(
    collectives: CollectiveModel, sym: Symbols, kind: LayerKind
) -> LayerCollectives:
    """Return the seconds of the collectives of a layer of a kind."""
    model, layout = sym.model, sym.layout
    hidden_bytes = sym.c * sym.T * model.hidden_size
    tp_s = tp_exchange_s(collectives, layout, hidden_bytes)
    if not layout.sp:
        tp_s *= 2  # an all-reduce instead of a gather or a scatter
    ep_forward_s, ep_backward_s = 0.0, 0.0
    if kind.is_moe:
        ep_forward_s, ep_backward_s = ep_exchange_s(collectives, sym)
    return LayerCollectives(
        ep_forward_s=ep_forward_s,
        ep_backward_s=ep_backward_s,
        tp_s=tp_s,
        tp_blocks=_tp_blocks(sym, kind),
        heads_s=tp_heads_s(collectives, sym, kind.mixer),
        cp=cp_exchange(collectives, sym, kind.mixer),
    )


def _tp_blocks(sym: Symbols, kind: LayerKind) -> int:
    """Return how many blocks are tensor-parallel: a mixer, and a dense or shared MLP."""
    if sym.layout.tp == 1:
        return 0
    mixers = int(kind.mixer is not MixerKind.NONE)
    if not kind.is_moe:
        return mixers + kind.has_mlp
    has_shared_experts = sym.model.moe is not None and sym.model.moe.shared_ffn_size > 0
    return mixers + has_shared_experts


def stage_transfer_s(collectives: CollectiveModel, sym: Symbols, layout: Layout) -> float:
    """Return the time of one hidden state to the next pipeline stage."""
    if layout.pp == 1:
        return 0.0
    span = collectives.span(layout, "pp")
    sent_bytes = sym.c * sym.t * sym.model.hidden_size * sym.model.residual_streams
    return collectives.seconds(Collective.P2P, span, sent_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTime:
    """Seconds of one layer and micro-batch on the device, by part.

    Recompute and host time are not in it.
    """

    exposed: PartSeconds
    hidden: PartSeconds
    forward_s: float
    backward_s: float


class _PartSums:
    """Sums of exposed and hidden seconds by part, while a layer is added up."""

    __slots__ = ("exposed", "hidden")

    def __init__(self) -> None:
        self.exposed: dict[TimePart, float] = {}
        self.hidden: dict[TimePart, float] = {}

    def expose(self, part: TimePart, seconds: float) -> None:
        if seconds:
            self.exposed[part] = self.exposed.get(part, 0.0) + seconds

    def hide(self, part: TimePart, seconds: float) -> None:
        if seconds:
            self.hidden[part] = self.hidden.get(part, 0.0) + seconds

    def expose_rows(self, rows: TimedRows) -> float:
        """Add the rows to their parts and return their sum."""
        total_s = 0.0
        for row, seconds in rows:
            self.expose(row.part, seconds)
            total_s += seconds
        return total_s


def device_time(
    collectives: CollectiveModel,
    layout: Layout,
    priced: PricedOps,
    moved: LayerCollectives,
    *,
    host_s: float,
) -> DeviceTime:
    """Return the device's time for rows and collectives, less what the layout overlaps.

    Beside another micro-batch an exchange hides no longer than that one takes on device and host;
    `host_s` is the host time of an eager layer.
    """
    covered = covered_exchange(
        layout,
        priced.forward,
        priced.backward,
        moved.ep_forward_s,
        moved.ep_backward_s,
        delayed_share=collectives.constants["delayed_gradient_share"],
    )
    tp_s = moved.tp_blocks * moved.tp_s
    forward_hidden_s = min(moved.ep_forward_s, covered.forward_s)
    backward_hidden_s = min(moved.ep_backward_s, covered.backward_s)
    if Overlap.EP in layout.overlap:
        hidden_share = collectives.constants["ep_overlap_hidden"]
        rows_s = sum(seconds for _, seconds in (*priced.forward, *priced.backward))
        cp_s = moved.cp.forward_s + moved.cp.backward_s
        # A block makes two TP collectives in forward and three in backward; either exchange has
        # half of the layer beside it.
        beside_s = (rows_s + 5 * tp_s + 2 * moved.heads_s + cp_s + host_s) / 2
        forward_hidden_s = min(moved.ep_forward_s, hidden_share * covered.forward_s, beside_s)
        backward_hidden_s = min(moved.ep_backward_s, hidden_share * covered.backward_s, beside_s)
    sums = _PartSums()
    forward_s = _add_pass(
        sums,
        priced.forward,
        ep_s=moved.ep_forward_s,
        hidden_ep_s=forward_hidden_s,
        tp_s=2 * tp_s + moved.heads_s,
        cp_s=moved.cp.forward_s,
        cp_hides=moved.cp.is_ring,
    )
    backward_s = _add_pass(
        sums,
        priced.backward,
        ep_s=moved.ep_backward_s,
        hidden_ep_s=backward_hidden_s,
        tp_s=3 * tp_s + moved.heads_s,
        cp_s=moved.cp.backward_s,
        cp_hides=moved.cp.is_ring,
    )
    return DeviceTime(
        exposed=sums.exposed, hidden=sums.hidden, forward_s=forward_s, backward_s=backward_s
    )


def _add_pass(
    sums: _PartSums,
    rows: TimedRows,
    *,
    ep_s: float,
    hidden_ep_s: float,
    tp_s: float,
    cp_s: float,
    cp_hides: bool,
) -> float:
    """Add the rows and collectives of one pass to their parts, and return its exposed seconds.

    A ring of keys and values hides under the attention of the pass.
    """
    hidden_cp_s = 0.0
    if cp_hides:
        attention_s = sum(seconds for row, seconds in rows if row.part is TimePart.ATTENTION)
        hidden_cp_s = min(cp_s, attention_s)
    sums.hide(TimePart.EP_COMM, hidden_ep_s)
    sums.hide(TimePart.CP_COMM, hidden_cp_s)
    sums.expose(TimePart.EP_COMM, ep_s - hidden_ep_s)
    sums.expose(TimePart.TP_COMM, tp_s)
    sums.expose(TimePart.CP_COMM, cp_s - hidden_cp_s)
    return sums.expose_rows(rows) + ep_s - hidden_ep_s + tp_s + cp_s - hidden_cp_s


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayCost:
    """The terms that recompute and graphs add to a layer's time.

    Fields are numbers for one policy, or arrays for many. `host_s` is the host time of forward and
    backward. A recomputed block (a whole layer or its MoE block) runs as a forward of its own: it
    takes `block_s` on the device and `block_host_share` of the forward's host time, in a share
    `block_layer_share` of the layers. Other recompute choices repeat kernels inside the backward:
    they take `kernel_s`, in `kernel_groups` groups of launches.
    """

    host_s: FloatOrArray
    block_s: FloatOrArray
    block_host_share: FloatOrArray
    block_layer_share: FloatOrArray
    kernel_s: FloatOrArray
    kernel_groups: FloatOrArray

    @classmethod
    def stack(cls, costs: Sequence[ReplayCost]) -> ReplayCost:
        """Return one cost with an array [costs] for each field."""
        return cls(
            **{name: np.array([getattr(cost, name) for cost in costs]) for name in cls.__slots__}
        )


class ReplayPolicy(Protocol):
    """Anything with recompute choices and CUDA graphs: a Layout or an ActivationPolicy."""

    @property
    def recompute(self) -> tuple[Recompute, ...]: ...
    @property
    def graphs(self) -> tuple[CudaGraphScope, ...]: ...


def replay_cost(
    collectives: CollectiveModel,
    sym: Symbols,
    layout: Layout,
    policy: ReplayPolicy,
    priced: PricedOps,
    moved: LayerCollectives,
    kind: LayerKind,
) -> ReplayCost:
    """Return the replay cost of a policy in a layout.

    Full recompute is one more forward, with its collectives and host time, in the share of the
    layers that it covers; recompute=moe repeats its block, with a share of the forward's host time.
    """
    c = collectives.constants
    choices = policy.recompute
    kernel_choices = _kernel_choices(choices)
    block_s = 0.0
    kernel_s = 0.0
    block_host_share = c["host_recomputed_moe_share"]
    block_layer_share = 1.0
    if Recompute.FULL in choices:
        block_s = sum(seconds for _, seconds in priced.forward)
        tp_s = 2 * moved.tp_blocks * moved.tp_s
        block_s += moved.ep_forward_s + tp_s + moved.heads_s + moved.cp.forward_s
        block_host_share = 1.0
        block_layer_share = _recomputed_share(layout, sym.model)
    elif choices:
        for row, seconds in priced.forward:
            if Recompute.MOE in choices and Recompute.MOE in row.recomputed_by:
                block_s += seconds
            elif not kernel_choices.isdisjoint(row.recomputed_by):
                kernel_s += seconds
        if Recompute.MOE in choices:
            block_s += moved.ep_forward_s
    return ReplayCost(
        host_s=layer_host_s(c, layout, policy.graphs, sym, kind),
        block_s=block_s,
        block_host_share=block_host_share,
        block_layer_share=block_layer_share,
        kernel_s=kernel_s,
        kernel_groups=len(kernel_choices),
    )


def _kernel_choices(choices: Sequence[Recompute]) -> frozenset[Recompute]:
    """Return the choices that repeat a few kernels inside backward, not a block of their own."""
    blocks = (Recompute.FULL, Recompute.MOE, Recompute.LOSS)
    return frozenset(choice for choice in choices if choice not in blocks)


def _recomputed_share(layout: Layout, model: ModelSpec) -> float:
    """Return the share of the layers that full recompute takes.

    It can take the first layers of each chunk alone.
    """
    if not layout.recompute_block:
        return 1.0
    # Chunks may have fewer layers than the block.
    return min(1.0, layout.recompute_block * layout.pp * layout.vpp / model.layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTimes:
    """Seconds of a layer's passes: device and host together.

    `block_s` is a recomputed block; `forward_wait_s` and `backward_wait_s` are waits for copies of
    offloaded activations; `copy_s` is the time of the copies in one direction.
    """

    forward_s: FloatOrArray
    backward_s: FloatOrArray
    block_s: FloatOrArray
    forward_wait_s: FloatOrArray
    backward_wait_s: FloatOrArray
    copy_s: FloatOrArray

    @property
    def total_s(self) -> FloatOrArray:
        return (
            self.forward_s
            + self.backward_s
            + self.block_s
            + self.forward_wait_s
            + self.backward_wait_s
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """What the passes of a layer are made of: device time, recompute and offloaded activations."""

    device: DeviceTime
    replay: ReplayCost
    offloaded: OffloadedActivations
    is_moe: bool


def pass_times(
    collectives: CollectiveModel, sym: Symbols, layout: Layout, cost: LayerCost, *, synced: bool
) -> PassTimes:
    """Return the passes of a layer: device and host side by side, and copies beside both.

    Copies that take longer than a pass are exposed as waits; where whole chunks come and go, those
    that take longer than their row and the one beside it. An offloaded module costs the host as
    much as a recomputed one, in forward and in backward. `synced` tells that the host waits for
    transfers between stages.
    """
    c = collectives.constants
    device = cost.device
    replay = cost.replay
    p = host_exponent(c, sym, synced=synced, is_moe=cost.is_moe)
    forward_sync_s, backward_sync_s = 0.0, 0.0
    if cost.is_moe:
        forward_sync_s, backward_sync_s = collectives.dispatch_waits_s(layout)
    group_s = c["host_s_per_recompute_module"]
    forward_host_s = replay.host_s / 3  # backward launches twice as much (docs/findings.md 2)
    backward_host_s = 2 * forward_host_s + group_s * replay.kernel_groups
    copies_host_s = group_s * cost.offloaded.modules
    forward_s = join_times(p, device.forward_s, forward_host_s + copies_host_s) + forward_sync_s
    backward_device_s = device.backward_s + replay.kernel_s
    backward_s = join_times(p, backward_device_s, backward_host_s + copies_host_s)
    backward_s = backward_s + backward_sync_s
    block_s = join_times(p, replay.block_s, replay.block_host_share * forward_host_s)
    # A replayed dispatch waits for split sizes again.
    block_s = block_s + forward_sync_s
    # Without a block its share of the host time, a constant, would still be there.
    has_block = replay.block_s > 0
    forward_window_s, backward_window_s = forward_s, backward_s
    if fetches_chunks(layout):
        # A copy out runs on beside the next row, a copy back begins beside the row before: F, B and
        # W follow each other, and B is half of a whole backward.
        forward_window_s = backward_window_s = forward_s + backward_s / 2
    copy_s = cost.offloaded.bytes / (c["host_link_Bps"] * c["host_link_efficiency"])
    return PassTimes(
        forward_s=forward_s,
        backward_s=backward_s,
        block_s=has_block * replay.block_layer_share * block_s,
        forward_wait_s=_positive(copy_s - forward_window_s),
        backward_wait_s=_positive(copy_s - backward_window_s),
        copy_s=copy_s,
    )


def _positive(seconds: FloatOrArray) -> FloatOrArray:
    """Return seconds, 0 where they are negative."""
    if isinstance(seconds, np.ndarray):
        return np.maximum(0.0, seconds)
    return max(0.0, seconds)


def join_times(p: float, device_s: FloatOrArray, host_s: FloatOrArray) -> FloatOrArray:
    """Return the seconds that device and host take side by side."""
    if p == 1.0:
        return device_s + host_s
    joined: FloatOrArray = (device_s**p + host_s**p) ** (1 / p)
    return joined


def layer_time(
    collectives: CollectiveModel,
    sym: Symbols,
    layout: Layout,
    priced: PricedOps,
    cost: LayerCost,
) -> MicroBatchTime:
    """Return the time of one layer and micro-batch by part."""
    device = cost.device
    replay = cost.replay
    synced = layout.pp > 1 and layout.vpp == 1
    passes = pass_times(collectives, sym, layout, cost, synced=synced)
    busy_s = device.backward_s + replay.kernel_s
    host_s = passes.forward_s - device.forward_s + passes.backward_s - busy_s
    wait_s = float(passes.forward_wait_s + passes.backward_wait_s)
    sums = _PartSums()
    sums.exposed.update(device.exposed)
    sums.hidden.update(device.hidden)
    sums.expose(TimePart.HOST, float(host_s))
    sums.expose(TimePart.RECOMPUTE, float(passes.block_s + replay.kernel_s))
    sums.expose(TimePart.OFFLOAD, wait_s)
    # Copied out and back, less what either pass waits for.
    sums.hide(TimePart.OFFLOAD, 2 * float(passes.copy_s) - wait_s)
    weight_grad_s = 0.0
    if device.backward_s:
        # Host time and overlap fall on the gradients of inputs and of weights alike.
        backward_s = float(passes.backward_s + passes.backward_wait_s)
        weight_grad_s = weight_gradient_s(priced.backward) * backward_s / float(busy_s)
    return MicroBatchTime(
        exposed=sums.exposed,
        hidden=sums.hidden,
        forward_s=float(passes.forward_s + passes.forward_wait_s),
        weight_grad_s=weight_grad_s,
    )


def outside_layers_time(
    collectives: CollectiveModel,
    sym: Symbols,
    priced: PricedOps,
    *,
    gathers: int,
    sums: int = 0,
) -> MicroBatchTime:
    """Return the time of the embedding, the head or an MTP projection, on the device alone.

    Under TP the rows make `gathers` gathers or scatters of the hidden state, and in forward `sums`
    all-reduces of one number a token, as the loss over a sharded vocabulary does.
    """
    parts = _PartSums()
    forward_s = parts.expose_rows(priced.forward)
    parts.expose_rows(priced.backward)
    if sym.layout.tp > 1:
        hidden_bytes = sym.c * sym.T * sym.model.hidden_size
        gathers_s = gathers * tp_exchange_s(collectives, sym.layout, hidden_bytes)
        sums_s = sums * tp_all_reduce_s(collectives, sym)
        parts.expose(TimePart.TP_COMM, gathers_s + sums_s)
        # One of an embedding's two is forward, and about as many of a head's three.
        forward_s += gathers_s / 2 + sums_s
    return MicroBatchTime(
        exposed=parts.exposed,
        hidden={},
        forward_s=forward_s,
        weight_grad_s=weight_gradient_s(priced.backward),
    )


def token_loop_time(constants: Constants, sym: Symbols) -> MicroBatchTime:
    """Return the time of a trainer's own loop over the tokens of a micro-batch, before backward.

    It reads them from the device one by one, which stands still meanwhile.
    """
    seconds = constants["host_s_per_token"] * sym.T * sym.layout.cp
    exposed = {TimePart.HOST: seconds} if seconds else {}
    return MicroBatchTime(exposed=exposed, hidden={}, forward_s=seconds, weight_grad_s=0.0)
