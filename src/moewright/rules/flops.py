"""Model FLOPs: one audited formula (docs/formulas.md 9), as a total per token and as rows of one
rank.

A GEMM of m x k by k x n is 2 m n k FLOPs; backward is twice forward. Attention counts the causal
half. Counted: linear layers, attention scores and values, output logits, MTP depths with their
projection and their own logits pass. Not counted: input embedding, router, recomputation,
elementwise work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from moewright.rules.context_parallel import cp_factors, twice_attended_pairs
from moewright.rules.shards import shard_size
from moewright.spec.layout import Layout
from moewright.spec.ledger import FlopOp, FlopRow, Module
from moewright.spec.model import AttentionKind, ModelSpec

TRAIN_TO_FORWARD_RATIO = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardFlops:
    """FLOPs of one part of a forward; `depth`: of an MTP depth, which they are booked to, but its
    router's."""

    op: FlopOp
    module: Module
    flops: int
    in_mtp: bool = False

    @property
    def ledger_module(self) -> Module:
        return Module.MTP if self.in_mtp and self.module is not Module.ROUTER else self.module


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShare:
    """What one rank computes in one pass: which layers, over how many tokens and rows.

    `tokens`: tokens of its TP group (its CP part of the batch), the same for every layer.
    `routed_rows`: rows through its local experts, summed over the MoE layers of the share (MTP
    depths included). `mtp`: MTP depths. `attended`: twice the causal pairs of its tokens' queries
    (of all tokens of the ranks that exchange heads) with the keys that documents leave them, over
    all heads; 0 where whole sequences attend. `near`: the same of layers with a sliding window; 0
    where it is that of whole sequences, or not known.
    """

    layers: tuple[int, ...]
    tokens: int
    routed_rows: int
    head: bool
    mtp: int = 0
    attended: int = 0
    attended_windowed: int = 0
    mtp_rows: int = 0  # of the routed rows those of MTP depths


def model_flops_per_token(model: ModelSpec, seq_len: int, *, attended_share: float = 1.0) -> int:
    """Forward and backward FLOPs of one token in a sequence of `seq_len`, on the whole model; where
    documents bound attention, they leave `attended_share` of a sequence's pairs.
    """
    moe_depths = model.mtp_layers if model.moe_layers[-1] else 0
    top_k = model.moe.router.top_k if model.moe else 0
    everything = RankShare(
        layers=tuple(range(model.layers)),
        tokens=seq_len,
        routed_rows=seq_len * top_k * (model.moe_layer_count + moe_depths),
        head=True,
        mtp=model.mtp_layers,
        attended=expected_attended(seq_len, attended_share),
        mtp_rows=seq_len * top_k * moe_depths,
    )
    rows = train_flop_rows(model, Layout(world_size=1), everything, seq_len=seq_len)
    return sum(row.flops for row in rows if row.module is not Module.ROUTER) // seq_len


def expected_attended(seq_len: int, attended_share: float, sequences: float = 1) -> int:
    """Share.attended of some sequences, before a run has counted it."""
    return 0 if attended_share == 1 else round(attended_share * seq_len * seq_len * sequences)


def train_flop_rows(
    model: ModelSpec, layout: Layout, share: RankShare, *, seq_len: int
) -> tuple[FlopRow, ...]:
    """Forward and backward FLOPs of one rank's share, by (op, module), sorted; the router is a row
    of its own.

    MTP depths are booked to MTP, except their router and their logits pass (ROUTER, HEAD).
    """
    return tuple(
        FlopRow(op=row.op, module=row.module, flops=TRAIN_TO_FORWARD_RATIO * row.flops)
        for row in forward_flop_rows(model, layout, share, seq_len=seq_len)
    )


def forward_flop_rows(
    model: ModelSpec, layout: Layout, share: RankShare, *, seq_len: int
) -> tuple[FlopRow, ...]:
    """The forward part of `flop_rows`; what a recomputation of these layers adds."""
    return sum_flops(forward_flops(model, layout, share, seq_len=seq_len))


def sum_flops(work: Iterable[ForwardFlops]) -> tuple[FlopRow, ...]:
    """By (op, module), sorted."""
    sums: dict[tuple[FlopOp, Module], int] = {}
    for one in work:
        sums[one.op, one.ledger_module] = sums.get((one.op, one.ledger_module), 0) + one.flops
    return tuple(
        FlopRow(op=op, module=module, flops=flops)
        for (op, module), flops in sorted(sums.items())
        if flops
    )


def attention_flops(model: ModelSpec, layer: int, tokens: int, seq_len: int) -> int:
    """Forward FLOPs of scores and values over all heads: 2 heads (d_qk + d_v) per attended (query,
    key) pair.

    Full causal attention attends seq_len / 2 keys a query; with a window w a query attends its last
    w, its own half (rules.context).
    """
    spec = model.attention
    # Twice the attended pairs of one sequence, so that the arithmetic stays in integers.
    pairs = twice_attended_pairs((seq_len,), seq_len, (range(seq_len),), model.layer_window(layer))
    return tokens * spec.heads * (spec.head_dim + spec.v_head_dim) * pairs // seq_len


def is_windowed(model: ModelSpec, layer: int) -> bool:
    """Whether a layer's attention is limited to the sliding window. MTP depths (layer >= L) are
    not."""
    return model.layer_window(layer) > 0


def attention_macs(model: ModelSpec) -> tuple[int, int]:
    """Multiply-adds a token costs in the projections of one layer: (cut by TP, whole on every TP
    rank)."""
    spec, h = model.attention, model.hidden_size
    if spec.kind is AttentionKind.GQA:
        return h * (spec.q_width + 2 * spec.kv_width) + spec.out_width * h, 0
    kv_up = spec.kv_lora_rank * spec.heads * (spec.qk_nope_head_dim + spec.v_head_dim)
    down = h * (spec.kv_lora_rank + spec.qk_rope_head_dim)
    if not spec.q_lora_rank:
        return h * spec.q_width + kv_up + spec.out_width * h, down
    return spec.q_lora_rank * spec.q_width + kv_up + spec.out_width * h, down + h * spec.q_lora_rank


def forward_flops(
    model: ModelSpec, layout: Layout, share: RankShare, *, seq_len: int
) -> Iterator[ForwardFlops]:
    """The parts of `forward_rows`."""
    h, tp = model.hidden_size, layout.tp
    tokens = share.tokens
    for layer in share.layers:
        for op, module, flops in _layer(
            model, layout, layer, model.moe_layers[layer], share, seq_len
        ):
            yield ForwardFlops(op=op, module=module, flops=flops)
    for depth in range(share.mtp):
        yield ForwardFlops(op=FlopOp.GEMM, module=Module.MTP, flops=2 * tokens * 2 * h * h // tp)
        for op, module, flops in _layer(
            model, layout, model.layers + 1 + depth, model.moe_layers[-1], share, seq_len
        ):
            yield ForwardFlops(op=op, module=module, flops=flops, in_mtp=True)
    yield head_flops(model, layout, share)
    if model.moe and share.routed_rows:
        matrices = 3 if model.gated else 2
        per_row = 2 * matrices * model.expert_width * model.moe.ffn_size // layout.etp
        grouped, experts = FlopOp.GROUPED_GEMM, Module.EXPERTS
        yield ForwardFlops(
            op=grouped, module=experts, flops=(share.routed_rows - share.mtp_rows) * per_row
        )
        yield ForwardFlops(op=grouped, module=experts, flops=share.mtp_rows * per_row, in_mtp=True)


def head_flops(model: ModelSpec, layout: Layout, share: RankShare) -> ForwardFlops:
    """The logits, of the head and of each MTP depth."""
    passes = share.mtp + (1 if share.head else 0)
    flops = passes * 2 * share.tokens * model.hidden_size * shard_size(model.vocab_size, layout.tp)
    return ForwardFlops(op=FlopOp.GEMM, module=Module.HEAD, flops=flops)


def _layer(
    model: ModelSpec, layout: Layout, layer: int, moe: bool, share: RankShare, seq_len: int
) -> Iterator[tuple[FlopOp, Module, int]]:
    """One layer without its routed experts."""
    h, tp, tokens, spec = model.hidden_size, layout.tp, share.tokens, model.attention
    own = (
        tokens // tp if layout.sp else tokens
    )  # work that is not cut by TP runs on the rank's sequence part
    matrices = 3 if model.gated else 2
    cut, whole = attention_macs(model)
    yield FlopOp.GEMM, Module.ATTENTION, 2 * tokens * cut // tp + 2 * own * whole
    core = attention_flops(model, layer, tokens, seq_len)
    if share.attended:
        inside = (
            share.attended * spec.heads * (spec.head_dim + spec.v_head_dim) // cp_factors(layout)[0]
        )
        core = min(core, inside) if is_windowed(model, layer) else inside
    if share.attended_windowed and is_windowed(model, layer):
        core = (
            share.attended_windowed
            * spec.heads
            * (spec.head_dim + spec.v_head_dim)
            // cp_factors(layout)[0]
        )
    yield FlopOp.ATTENTION, Module.ATTENTION, core // tp
    if not moe or model.moe is None:
        yield FlopOp.GEMM, Module.DENSE_MLP, 2 * tokens * matrices * h * model.dense_ffn_size // tp
        return
    yield FlopOp.GEMM, Module.ROUTER, 2 * own * h * model.moe.experts
    yield FlopOp.GEMM, Module.EXPERTS, 2 * own * 2 * h * model.moe.latent_size
    gate = 2 * own * h if model.moe.shared_gate else 0
    yield (
        FlopOp.GEMM,
        Module.SHARED_EXPERTS,
        2 * tokens * matrices * h * model.moe.shared_ffn_size // tp + gate,
    )


def total_model_flops(rows: Sequence[FlopRow]) -> int:
    """Model FLOPs of some rows: everything but the router."""
    return sum(row.flops for row in rows if row.module is not Module.ROUTER)
