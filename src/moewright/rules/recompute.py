"""What backward needs of a layer: the tensors kept from forward, and which recompute policy frees
each.

The table of docs/formulas.md 6 with flash attention, RMSNorm, SwiGLU and probabilities applied
before the second expert projection. A tensor that two modules keep counts once; it is booked to the
module that consumes it, so the output of the input norm belongs to attention, the output of the
second norm to the router (dense layers: to the MLP), and the residual stream, which the norms keep
as their input, to the norms.

Symbols: c bytes of the compute dtype; T tokens of a micro-batch on this TP group; t = T / tp under
sequence parallelism, else T; h hidden; q, kv widths of queries and keys; R rows through the rank's
experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from moewright.rules import expert_placement, routing
from moewright.rules.context_parallel import cp_factors
from moewright.rules.shards import shard_size
from moewright.spec.layout import DispatcherKind, Layout, Recompute
from moewright.spec.ledger import Module
from moewright.spec.model import AttentionKind, ModelSpec, MoeSpec, NormKind, QkNorm, ScoreFunction
from moewright.spec.workload import Workload

FP32_BYTES = 4
INT64_BYTES = 8
INT32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """Bytes of one tensor that a layer keeps for backward, per micro-batch on one rank.

    Any policy of `freed_by` removes it. The layer input is freed by none: even full recomputation
    starts from it. Nor is what a router decided, which a replay must not decide again.
    """

    module: Module
    name: str
    bytes: int
    freed_by: tuple[Recompute, ...]
    owner: Module  # the module that it is part of, also where all is booked to an MTP depth


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """The symbols of the table for one model, workload and layout."""

    c: int
    T: int
    t: int
    h: int
    tp: int
    apart: int  # ranks that exchange heads for tokens


def saved_tensors(
    model: ModelSpec,
    workload: Workload,
    layout: Layout,
    layer: int,
    *,
    load: float,
    dispatch: routing.DispatchCounts | None = None,
    repeats_exchange: bool = False,
) -> tuple[SavedTensor, ...]:
    """What `layer` keeps before any recompute, rows of zero left out.

    `load` is the rank's expert rows over the mean, `moved` what its dispatch moves (None: even
    routing). Layers above `model.layers` are MTP depths (see inventory.Param): a layer like the
    last one, after the two norms and the projection, all booked to MTP.

    `exchanged_again`: fused CUDA stacks keep attention's output once, as the projection takes it,
    and exchange it again in backward; beside DeepEP and HybridEP they keep numbers as beside an
    all-to-all, our seam those of its own sort.
    """
    T = workload.seq_len * layout.mbs // layout.cp
    size = _Sizes(
        c=activation_nbytes(workload),
        T=T,
        t=T // layout.tp if layout.sp else T,
        h=model.hidden_size,
        tp=layout.tp,
        apart=cp_factors(layout)[0],
    )
    mtp = layer > model.layers
    rows = [*_attention(model, size, exchanged_again=repeats_exchange)]
    if model.moe_layers[-1 if mtp else layer]:
        dispatch = dispatch or routing.expected_dispatch(model, workload, layout)
        slots = expert_placement.count_slots(model, workload, layout, layer)
        R = routing.routed_rows(model, workload, layout, load)
        rows += _moe(
            model, workload, layout, size, R, dispatch, slots, own_seam=not repeats_exchange
        )
    else:
        rows += _dense(model, size)
    if mtp:
        rows = [
            row if row.module is Module.ROUTER else replace(row, module=Module.MTP)
            for row in (*_mtp_inputs(model, size), *rows)
        ]
    return tuple(row for row in rows if row.bytes)


def layer_recompute(layout: Layout, place: int) -> tuple[Recompute, ...]:
    """The policies of the layer at `place` of its chunk: full recompute may take the first layers
    alone."""
    return () if 0 < layout.recompute_block <= place else layout.recompute


def layer_kept_tensors(
    rows: Collection[SavedTensor], layout: Layout, place: int
) -> tuple[SavedTensor, ...]:
    """The rows that the layer at `place` of its chunk keeps. A checkpoint over several layers keeps
    the first's input alone of what any of them reads from the one before; an MTP depth has one of
    its own."""
    left = kept_tensors(rows, layer_recompute(layout, place))
    depth = any(row.module is Module.MTP for row in rows)
    if place % layout.recompute_span and not depth:
        left = tuple(row for row in left if row.name != "layer_input")
    return left


def kept_tensors(
    rows: Collection[SavedTensor], policies: Collection[Recompute]
) -> tuple[SavedTensor, ...]:
    """The rows that stay when `policies` are on."""
    return tuple(row for row in rows if not any(policy in policies for policy in row.freed_by))


def loss_chunk_columns(model: ModelSpec, layout: Layout) -> int:
    """Columns of the logits that a rank makes at a time under recompute=loss: as many as the hidden
    state has, so that they take what the head's input takes; at most its part of the vocabulary,
    padding among them.
    """
    return min(model.hidden_size, shard_size(model.vocab_size, layout.tp))


def activation_nbytes(workload: Workload) -> int:
    """Bytes of a kept activation; 8-bit recipes keep bf16 activations."""
    return 2 if workload.precision.is_narrow else workload.precision.nbytes


def _attention(model: ModelSpec, size: _Sizes, *, exchanged_again: bool) -> Iterator[SavedTensor]:
    spec, c, T, t, h = model.attention, size.c, size.T, size.t, size.h
    mla = spec.kind is AttentionKind.MLA
    yield _row(Module.NORM, "layer_input", c * t * h, full=False)
    # Fused into the QKV projection for GQA in the stacks the table is held against, so only MLA can
    # drop its output.
    replayed = (Recompute.LAYERNORM,) if mla else ()
    yield _row(Module.NORM, "input_norm_rstd", _norm_statistics(model, t), *replayed)
    yield _row(Module.ATTENTION, "input_norm_out", c * t * h, *replayed)
    if mla:
        yield from _mla_core(model, size)
    else:
        yield from _gqa_core(model, size)
    yield _row(Module.ATTENTION, "attention_out", c * T * spec.out_width // size.tp)
    if (
        size.apart > 1 and not exchanged_again
    ):  # attention keeps its own output, of more tokens and fewer heads than the projection's input
        yield _row(
            Module.ATTENTION,
            "attention_out",
            c * T * spec.out_width // size.tp,
            Recompute.CORE_ATTN,
        )
    yield _row(Module.ATTENTION, "lse", FP32_BYTES * T * spec.heads // size.tp, Recompute.CORE_ATTN)
    yield _row(Module.NORM, "residual", c * t * h)
    yield _row(Module.NORM, "post_norm_rstd", _norm_statistics(model, t), Recompute.LAYERNORM)


def _gqa_core(model: ModelSpec, size: _Sizes) -> Iterator[SavedTensor]:
    spec, c, T, tp = model.attention, size.c, size.T, size.tp
    key_heads = max(
        1, spec.kv_heads // tp
    )  # more ranks than key heads: neighbours read the same one
    keys = key_heads * spec.head_dim
    # The norms keep their inputs: the projections before rotation are alive beside the rotated
    # copies.
    if spec.qk_norm is QkNorm.FULL:
        yield _row(Module.ATTENTION, "qk_norm_in", c * T * (spec.q_width + spec.kv_width) // tp)
        yield _row(Module.ATTENTION, "qk_norm_rstd", FP32_BYTES * T * 2)
    elif spec.qk_norm is QkNorm.PER_HEAD:
        yield _row(Module.ATTENTION, "qk_norm_in", c * T * (spec.q_width // tp + keys))
        yield _row(
            Module.ATTENTION, "qk_norm_rstd", FP32_BYTES * T * (spec.heads // tp + key_heads)
        )
    keys = (
        max(key_heads, size.apart) * spec.head_dim
    )  # those that exchange heads keep one each at least
    yield _row(Module.ATTENTION, "qkv", c * T * (spec.q_width // tp + 2 * keys))


def _mla_core(model: ModelSpec, size: _Sizes) -> Iterator[SavedTensor]:
    """The latents live on t tokens: the down-projections are whole on every rank and run before the
    gather."""
    spec, c, T, t, tp = model.attention, size.c, size.T, size.t, size.tp
    expanded = spec.heads * (2 * spec.head_dim + spec.v_head_dim)
    norms = 2 if spec.q_lora_rank else 1
    yield _row(Module.ATTENTION, "q_down", c * t * spec.q_lora_rank)
    yield _row(Module.ATTENTION, "q_latent", c * t * spec.q_lora_rank)
    yield _row(Module.ATTENTION, "kv_down", c * t * (spec.kv_lora_rank + spec.qk_rope_head_dim))
    yield _row(Module.ATTENTION, "kv_latent", c * t * spec.kv_lora_rank)
    yield _row(Module.ATTENTION, "latent_rstd", FP32_BYTES * t * norms)
    yield _row(Module.ATTENTION, "qkv", c * T * expanded // tp, Recompute.MLA_UP_PROJ)


def _dense(model: ModelSpec, size: _Sizes) -> Iterator[SavedTensor]:
    c, T, ffn, wide = size.c, size.T, model.dense_ffn_size, 2 if model.gated else 1
    yield _row(Module.DENSE_MLP, "post_norm_out", c * size.t * size.h, Recompute.LAYERNORM)
    yield _row(Module.DENSE_MLP, "fc1", c * T * wide * ffn // size.tp, Recompute.MLP)
    yield _row(Module.DENSE_MLP, "activation", c * T * ffn // size.tp, Recompute.MLP)


def _moe(
    model: ModelSpec,
    workload: Workload,
    layout: Layout,
    size: _Sizes,
    R: int,
    moved: routing.DispatchCounts,
    slots: int,
    *,
    own_seam: bool,
) -> Iterator[SavedTensor]:
    if model.moe is None:
        return
    replicas = (slots - model.moe.experts) // layout.ep  # whose ends are kept apart once more
    c, t, f, wide, etp = size.c, size.t, model.moe.ffn_size, 2 if model.gated else 1, layout.etp
    moe = Recompute.MOE
    yield _row(Module.ROUTER, "post_norm_out", c * t * size.h, Recompute.LAYERNORM)
    yield from _router(model.moe, workload, t)
    yield _row(Module.EXPERTS, "permuted", c * R * model.expert_width, moe)
    yield _row(Module.EXPERTS, "latent_out", c * t * model.moe.latent_size, moe)
    yield _row(Module.EXPERTS, "fc1", c * R * wide * f // etp, moe)
    yield _row(Module.EXPERTS, "activation", c * R * f // etp, Recompute.MOE_ACT, moe)
    yield _row(Module.EXPERTS, "probs", FP32_BYTES * R, moe)
    yield _row(
        Module.EXPERTS,
        "indices",
        INT64_BYTES * _indices(model.moe, layout, t, R, moved, own_seam=own_seam),
        moe,
    )
    yield _row(Module.EXPERTS, "row_ends", INT32_BYTES * (slots // layout.ep + replicas), moe)
    yield from _shared(model, size)


def _indices(
    moe: MoeSpec, layout: Layout, t: int, R: int, moved: routing.DispatchCounts, *, own_seam: bool
) -> int:
    """Numbers that say which row went where, kept for the way back.

    Each sort keeps the row of every slot and the token of every row; where slots may have no row,
    the slots of the rows too. De-duplication sorts once for each crossing and once for the experts;
    a library that dispatches keeps what it needs to itself. All-to-all sorts by expert on this
    side, and by local expert where rows come mixed; rows that ETP ranks gathered are picked out of
    their padding in that order: the places are kept, they have no inverse.
    """
    slots = t * moe.router.top_k
    if layout.dispatcher is DispatcherKind.ALL_GATHER:
        return slots * layout.ep * layout.etp + 2 * R
    if layout.dispatcher in routing.LIBRARY_DISPATCHERS and own_seam:
        wide = (
            moe.experts // layout.ep
            if layout.dispatcher is DispatcherKind.HYBRIDEP
            else moe.router.top_k
        )
        return moved.copies_in * wide + 2 * R
    if layout.dispatcher is DispatcherKind.DEDUP:
        crossed = slots + moved.node_copies_out + moved.node_copies_in * moe.router.top_k
        return crossed + moved.copies_out + moved.copies_gathered * moe.router.top_k + 2 * R
    mixed = 2 * R if layout.ep > 1 and moe.experts > layout.ep else 0
    return (
        slots + moved.rows_sent * (2 if layout.capacity else 1) + (R if layout.etp > 1 else mixed)
    )


def _router(moe: MoeSpec, workload: Workload, t: int) -> Iterator[SavedTensor]:
    """In the router's own dtype: scores of all experts, what was chosen, and what the auxiliary
    losses keep."""
    loss, chosen, score = workload.loss, t * moe.router.top_k, moe.router.score
    wide = workload.router.router_dtype.nbytes
    yield _row(Module.ROUTER, "scores", wide * t * moe.experts, Recompute.MOE)
    yield _row(Module.ROUTER, "chosen", INT64_BYTES * chosen, full=False)
    if moe.router.renormalize:
        yield _row(Module.ROUTER, "chosen_scores", wide * (chosen + t), Recompute.MOE)
    shares = bool(loss.aux_coeff) + bool(loss.global_aux_coeff) + (t if loss.seq_aux_coeff else 0)
    yield _row(Module.ROUTER, "load_share", FP32_BYTES * shares * moe.experts, full=False)
    if shares and score is not ScoreFunction.SOFTMAX:
        yield _row(Module.ROUTER, "score_sums", wide * t, Recompute.MOE)
    if loss.z_coeff or score is ScoreFunction.SQRT_SOFTPLUS:
        yield _row(Module.ROUTER, "logits", wide * t * moe.experts, Recompute.MOE)
    if loss.z_coeff:
        yield _row(Module.ROUTER, "log_sums", wide * t, Recompute.MOE)


def _shared(model: ModelSpec, size: _Sizes) -> Iterator[SavedTensor]:
    if model.moe is None:
        return
    c, T, fs, wide = size.c, size.T, model.moe.shared_ffn_size, 2 if model.gated else 1
    freed = (Recompute.SHARED_EXPERTS, Recompute.MOE)
    yield _row(Module.SHARED_EXPERTS, "fc1", c * T * wide * fs // size.tp, *freed)
    yield _row(Module.SHARED_EXPERTS, "activation", c * T * fs // size.tp, *freed)
    if model.moe.shared_gate:
        # The gated product keeps both factors.
        yield _row(Module.SHARED_EXPERTS, "gated", c * size.t * (size.h + 1), *freed)


def _mtp_inputs(model: ModelSpec, size: _Sizes) -> Iterator[SavedTensor]:
    """The embedding that its norm takes, and the outputs of both norms side by side, the input of
    the projection. The hidden state is kept by the final norm before it, or by the stage if that is
    another's (cost.saved).
    """
    yield _row(Module.MTP, "embedding", size.c * size.t * size.h)
    yield _row(Module.MTP, "joined", 2 * size.c * size.t * size.h)
    yield _row(Module.MTP, "joined_rstd", 2 * _norm_statistics(model, size.t))


def _norm_statistics(model: ModelSpec, rows: int) -> int:
    """fp32 reciprocal deviation of every row, and its mean for LayerNorm."""
    return FP32_BYTES * rows * (2 if model.norm is NormKind.LAYER else 1)


def _row(
    module: Module, name: str, size_bytes: int, *freed_by: Recompute, full: bool = True
) -> SavedTensor:
    freed = (Recompute.FULL, *freed_by) if full else freed_by
    return SavedTensor(module=module, name=name, bytes=size_bytes, freed_by=freed, owner=module)
