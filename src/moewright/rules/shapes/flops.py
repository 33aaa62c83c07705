"""Model FLOPs by one audited formula, as a total per token and as ledger rows of one rank.

See docs/formulas.md 9. A GEMM of m x k by k x n is 2 m n k FLOPs; backward is twice forward.
Attention counts the causal half. Counted: linear layers, attention scores and values, output
logits, MTP depths with their projection and their own logits pass. Not counted: input embedding,
router, recomputation, elementwise work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from moewright.rules.adapters import AdaptedLinear, adapted_linears, trains_module
from moewright.rules.context_parallel import cp_factors
from moewright.rules.shapes.mixers import (
    attention_flops,
    indexer_macs,
    mixer_macs,
    scan_flops,
    scoring_flops,
)
from moewright.rules.shapes.shards import shard_size
from moewright.spec.layout import Layout
from moewright.spec.ledger import FlopOp, FlopRow, Module
from moewright.spec.model import AttentionKind, MixerKind, ModelSpec
from moewright.spec.workload import FineTuningSpec, Task

TRAIN_TO_FORWARD_RATIO = 3  # backward takes the gradients of input and of weight
_ALL_TRAINS = FineTuningSpec()
_PRODUCTS = (FlopOp.GEMM, FlopOp.GROUPED_GEMM)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardFlops:
    """The FLOPs of one part of a forward.

    What is in an MTP depth is booked to MTP, except its router. A frozen product has no gradient of
    its weight; an indexer that does not train has none of anything.
    """

    op: FlopOp
    module: Module
    flops: int
    in_mtp: bool = False
    is_frozen: bool = False
    has_backward: bool = True

    @property
    def train_ratio(self) -> int:
        """Forward and backward over forward."""
        if not self.has_backward:
            return 1
        return TRAIN_TO_FORWARD_RATIO - self.is_frozen

    @property
    def ledger_module(self) -> Module:
        """The module that the ledger books the FLOPs to."""
        if self.in_mtp and self.module is not Module.ROUTER:
            return Module.MTP
        return self.module


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShare:
    """The part of a forward that one rank computes: its layers, and their tokens and rows.

    `tokens` are the tokens of its TP group (its CP part of the batch), the same for every layer.
    `routed_rows` are the rows through its local experts, summed over the MoE layers of the share,
    MTP depths included. `mtp` is the number of MTP depths.

    `attended` is twice the number of causal (query, key) pairs that documents leave, over all
    heads, for the queries of the rank's tokens (of all tokens of the ranks that exchange heads); 0
    where whole sequences attend. `attended_windowed` is the same number for layers with a sliding
    window; 0 where it is that of whole sequences, or not known.
    """

    layers: tuple[int, ...]
    tokens: int
    routed_rows: int
    head: bool
    mtp: int = 0
    attended: int = 0
    attended_windowed: int = 0
    mtp_rows: int = 0  # those of `routed_rows` that belong to MTP depths
    fine_tuning: FineTuningSpec = _ALL_TRAINS
    trains_indexer: bool = True


def model_flops_per_token(
    model: ModelSpec,
    seq_len: int,
    *,
    attended_share: float = 1.0,
    fine_tuning: FineTuningSpec = _ALL_TRAINS,
) -> int:
    """Return the forward and backward FLOPs of one token in a sequence, on the whole model.

    Where documents bound attention, they leave `attended_share` of the pairs of a sequence. Frozen
    weights have no gradients: their products take four sixths.
    """
    moe_depths = 0
    if model.moe_layers[-1]:
        moe_depths = model.mtp_layers
    whole_model = RankShare(
        layers=tuple(range(model.layers)),
        tokens=seq_len,
        routed_rows=seq_len * model.top_k * (model.moe_layer_count + moe_depths),
        head=True,
        mtp=model.mtp_layers,
        attended=expected_attended(seq_len, attended_share),
        mtp_rows=seq_len * model.top_k * moe_depths,
        fine_tuning=fine_tuning,
    )
    rows = train_flop_rows(model, Layout(world_size=1), whole_model, seq_len=seq_len)
    return total_model_flops(rows) // seq_len


def expected_attended(seq_len: int, attended_share: float, sequences: float = 1) -> int:
    """Return RankShare.attended of some sequences, before a run has counted it."""
    if attended_share == 1:
        return 0
    return round(attended_share * seq_len * seq_len * sequences)


def train_flop_rows(
    model: ModelSpec, layout: Layout, share: RankShare, *, seq_len: int
) -> tuple[FlopRow, ...]:
    """Return the forward and backward FLOPs of one rank's share, by (op, module), sorted.

    The router is a row of its own. MTP depths are booked to MTP, except their router and their
    logits pass (ROUTER, HEAD).
    """
    return sum_flops(
        replace(part, flops=part.train_ratio * part.flops)
        for part in forward_flops(model, layout, share, seq_len=seq_len)
    )


def forward_flop_rows(
    model: ModelSpec, layout: Layout, share: RankShare, *, seq_len: int
) -> tuple[FlopRow, ...]:
    """Return the forward part of `train_flop_rows`, which a recomputation of these layers adds."""
    return sum_flops(forward_flops(model, layout, share, seq_len=seq_len))


def sum_flops(parts: Iterable[ForwardFlops]) -> tuple[FlopRow, ...]:
    """Return the sums by (op, module), sorted."""
    sums: dict[tuple[FlopOp, Module], int] = {}
    for part in parts:
        key = part.op, part.ledger_module
        sums[key] = sums.get(key, 0) + part.flops
    return tuple(
        FlopRow(op=op, module=module, flops=flops)
        for (op, module), flops in sorted(sums.items())
        if flops
    )


def is_windowed(model: ModelSpec, layer: int) -> bool:
    """Return whether a layer's attention is limited to the sliding window.

    The attention of MTP depths (layer >= L) is not.
    """
    return model.layer_window(layer) > 0


def forward_flops(
    model: ModelSpec, layout: Layout, share: RankShare, *, seq_len: int
) -> Iterator[ForwardFlops]:
    """Yield the parts of `forward_flop_rows`, those of adapters among them."""
    for part in _base_flops(model, layout, share, seq_len=seq_len):
        is_frozen = part.op in _PRODUCTS and not trains_module(share.fine_tuning, part.module)
        yield replace(part, is_frozen=True) if is_frozen else part
    yield from _adapter_flops(model, layout, share)


def _base_flops(
    model: ModelSpec, layout: Layout, share: RankShare, *, seq_len: int
) -> Iterator[ForwardFlops]:
    h, tp = model.hidden_size, layout.tp
    for layer, count in _count_alike(model, share.layers):
        for op, module, flops in _layer_flops(model, layout, share, layer, seq_len=seq_len):
            yield ForwardFlops(op=op, module=module, flops=count * flops)
        for part in _indexer_flops(model, layout, share, layer, seq_len=seq_len):
            yield replace(part, flops=count * part.flops)
    projection = 2 * share.tokens * 2 * h * h // tp
    if not model.joins_mtp_inputs:  # of the embedding and of every stream, on the rank's own tokens
        local_tokens = share.tokens // layout.sp_degree
        projection = 2 * local_tokens * (1 + model.residual_streams) * h * h
    for depth in range(share.mtp):
        yield ForwardFlops(op=FlopOp.GEMM, module=Module.MTP, flops=projection)
        layer = model.layers + 1 + depth
        for op, module, flops in _layer_flops(model, layout, share, layer, seq_len=seq_len):
            yield ForwardFlops(op=op, module=module, flops=flops, in_mtp=True)
        for part in _indexer_flops(model, layout, share, layer, seq_len=seq_len):
            yield replace(part, in_mtp=True)
    yield head_flops(model, layout, share)
    if model.moe and share.routed_rows:
        row_flops = 2 * model.ffn_matrices * model.expert_width * model.moe.ffn_size // layout.etp
        for rows, in_mtp in ((share.routed_rows - share.mtp_rows, False), (share.mtp_rows, True)):
            yield ForwardFlops(
                op=FlopOp.GROUPED_GEMM,
                module=Module.EXPERTS,
                flops=rows * row_flops,
                in_mtp=in_mtp,
            )


def _adapter_flops(model: ModelSpec, layout: Layout, share: RankShare) -> Iterator[ForwardFlops]:
    """Yield the FLOPs of adapters; MTP depths have none."""
    if share.fine_tuning.task is not Task.LORA:
        return
    row_macs = 0
    for layer in share.layers:
        linears = adapted_linears(model, share.fine_tuning, layer)
        routed = [linear for linear in linears if linear.is_expert]
        # Layers with experts are alike, and routed_rows is their sum: the first stands for all.
        row_macs = row_macs or sum(_expert_row_macs(linear, share) for linear in routed)
        for linear in linears:
            if not linear.is_expert:
                flops = 2 * adapter_macs(linear, layout, share)
                yield ForwardFlops(op=FlopOp.GEMM, module=linear.module, flops=flops)
    flops = 2 * row_macs * (share.routed_rows - share.mtp_rows)
    yield ForwardFlops(op=FlopOp.GROUPED_GEMM, module=Module.EXPERTS, flops=flops)


def _expert_row_macs(linear: AdaptedLinear, share: RankShare) -> int:
    return linear.stack * share.fine_tuning.lora_rank * (linear.inputs + linear.outputs)


def adapter_macs(linear: AdaptedLinear, layout: Layout, share: RankShare) -> int:
    """Return the multiply-adds of an adapter outside of routed experts on a rank.

    A matrix that TP does not shard multiplies the rank's part of the tokens.
    """
    own_tokens = share.tokens // layout.sp_degree
    inputs, outputs = own_tokens * linear.inputs, own_tokens * linear.outputs
    if linear.cut == "columns":
        inputs = share.tokens * linear.inputs // layout.tp
    elif linear.cut == "rows":
        outputs = share.tokens * linear.outputs // layout.tp
    return linear.stack * share.fine_tuning.lora_rank * (inputs + outputs)


def head_flops(model: ModelSpec, layout: Layout, share: RankShare) -> ForwardFlops:
    """Return the FLOPs of the logits, of the head and of each MTP depth, and of the streams' sum.

    The weights with which parallel streams become one are of the rank's own tokens.
    """
    logits = logit_flops(model, layout, share)
    if model.residual_streams == 1:
        return logits
    # Each MTP depth runs its own pass through the shared head.
    passes = share.mtp + share.head
    local_tokens = share.tokens // layout.sp_degree
    streams_flops = passes * 2 * local_tokens * model.residual_streams**2 * model.hidden_size
    return replace(logits, flops=logits.flops + streams_flops)


def logit_flops(model: ModelSpec, layout: Layout, share: RankShare) -> ForwardFlops:
    """Return the FLOPs of the logits alone, which backward makes again under recompute=loss."""
    passes = share.mtp + share.head
    flops = passes * 2 * share.tokens * model.hidden_size * shard_size(model.vocab_size, layout.tp)
    return ForwardFlops(op=FlopOp.GEMM, module=Module.HEAD, flops=flops)


def _count_alike(model: ModelSpec, layers: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Return a layer of each kind whose FLOPs differ, and how many there are of it."""
    alike: dict[tuple[MixerKind, int, bool, bool], list[int]] = {}
    for layer in layers:
        is_moe = model.has_experts(layer)
        kind = (model.mixer(layer), model.layer_window(layer), model.has_mlp(layer), is_moe)
        alike.setdefault(kind, []).append(layer)
    return [(numbers[0], len(numbers)) for numbers in alike.values()]


def _layer_flops(
    model: ModelSpec, layout: Layout, share: RankShare, layer: int, *, seq_len: int
) -> Iterator[tuple[FlopOp, Module, int]]:
    """Yield the FLOPs of one layer without its routed experts."""
    h, tp, tokens = model.hidden_size, layout.tp, share.tokens
    # Work that TP does not shard runs on the rank's part of the sequence.
    local_tokens = tokens // layout.sp_degree
    sharded, replicated = mixer_macs(model, layer)
    # _indexer_flops yields them, as they train or not apart from the rest.
    replicated -= indexer_macs(model, layer)
    projections = 2 * tokens * sharded // tp + 2 * local_tokens * replicated
    yield FlopOp.GEMM, Module.ATTENTION, projections
    if model.recurrent is not None and model.mixer(layer) is MixerKind.RECURRENT:
        yield FlopOp.SCAN, Module.ATTENTION, scan_flops(model.recurrent, tokens) // tp
    else:
        core = _attention_core_flops(model, layout, share, layer, seq_len=seq_len)
        yield FlopOp.ATTENTION, Module.ATTENTION, core // tp
    if model.residual_streams > 1:
        yield FlopOp.GEMM, Module.NORM, 2 * local_tokens * _stream_macs(model, layer)
    if not model.has_mlp(layer):
        return
    mlp_macs = tokens * model.ffn_matrices * h
    is_moe = model.has_experts(layer)
    if not is_moe or model.moe is None:
        yield FlopOp.GEMM, Module.DENSE_MLP, 2 * mlp_macs * model.dense_ffn_size // tp
        return
    yield FlopOp.GEMM, Module.ROUTER, 2 * local_tokens * h * model.moe.experts
    yield FlopOp.GEMM, Module.EXPERTS, 2 * local_tokens * 2 * h * model.moe.latent_size
    shared = 2 * mlp_macs * model.moe.shared_ffn_size // tp
    if model.moe.shared_gate:
        shared += 2 * local_tokens * h
    yield FlopOp.GEMM, Module.SHARED_EXPERTS, shared


def _indexer_flops(
    model: ModelSpec, layout: Layout, share: RankShare, layer: int, *, seq_len: int
) -> Iterator[ForwardFlops]:
    """Yield the FLOPs of a layer's indexer of tokens, for the rank's part of the sequence.

    Its scores are a product like others: no recomputation of core attention repeats it.
    """
    local_tokens = share.tokens // layout.sp_degree
    flops = 2 * local_tokens * indexer_macs(model, layer)
    flops += scoring_flops(model, layer, local_tokens, seq_len)
    has_backward = share.trains_indexer
    yield ForwardFlops(
        op=FlopOp.GEMM, module=Module.ATTENTION, flops=flops, has_backward=has_backward
    )


def _stream_macs(model: ModelSpec, layer: int) -> int:
    """Return the multiply-adds of a token that decide how a layer's residual streams mix."""
    streams = model.residual_streams
    blocks = (model.mixer(layer) is not MixerKind.NONE) + model.has_mlp(layer)
    return blocks * (2 + streams) * streams * streams * model.hidden_size


def _attention_core_flops(
    model: ModelSpec, layout: Layout, share: RankShare, layer: int, *, seq_len: int
) -> int:
    """Return the FLOPs of scores and values of a TP group, where documents may bound attention."""
    spec = model.attention
    core = attention_flops(model, layer, share.tokens, seq_len)
    # The indexer's scores are a part of their own (_indexer_flops).
    core -= scoring_flops(model, layer, share.tokens, seq_len)
    is_sparse = spec.indexer is not None or spec.kind is AttentionKind.COMPRESSED
    # What they count stays that of whole sequences, whatever documents bound (docs/formulas.md 13).
    if is_sparse or model.mixer(layer) is MixerKind.NONE:
        return core
    pair_flops = spec.heads * (spec.head_dim + spec.v_head_dim)
    a2a_ranks = cp_factors(layout)[0]
    has_window = is_windowed(model, layer)
    if share.attended_windowed and has_window:
        return share.attended_windowed * pair_flops // a2a_ranks
    if not share.attended:
        return core
    # `attended` is of all tokens of the ranks that exchange heads, this rank has its part of heads.
    in_documents = share.attended * pair_flops // a2a_ranks
    if has_window:
        # Both bound the pairs; how many both leave is not counted, so the smaller stands for it.
        return min(core, in_documents)
    return in_documents


def total_model_flops(rows: Sequence[FlopRow]) -> int:
    """Return the model FLOPs of some rows: everything but the router."""
    return sum(row.flops for row in rows if row.module is not Module.ROUTER)
