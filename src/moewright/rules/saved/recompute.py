"""The tensors that a layer saves for backward, and which recompute policy frees each.

The table of docs/formulas.md 6 with flash attention, RMSNorm, SwiGLU and probabilities applied
before the second expert projection. A tensor that two modules save counts once; it is booked to the
module that consumes it, so the output of the input norm belongs to attention, the output of the
second norm to the router (dense layers: to the MLP), and the residual stream, which the norms save
as their input, to the norms.

Symbols: c bytes of the compute dtype; T tokens of a micro-batch on this TP group; t = T / tp under
sequence parallelism, else T; h hidden; q, kv widths of queries and keys; R rows through the rank's
experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moewright.rules import expert_placement, routing
from moewright.rules.adapters import trains_all, trains_indexer
from moewright.rules.context_parallel import cp_factors
from moewright.rules.job import Job, micro_batch_tokens, routed_rows, tp_group_tokens
from moewright.rules.low_precision import convert_kept
from moewright.rules.saved.mixer_saved import (
    MixerSymbols,
    compressed_saved,
    gate_saved,
    indexer_saved,
    recurrent_saved,
)
from moewright.rules.saved.saved_tensor import (
    ENGINE_STACK,
    KeptFormat,
    KeptTensor,
    Place,
    SavedTensor,
    SavingStack,
    find_offload,
    saved_tensor,
)
from moewright.rules.saved.trained_saved import adapter_saved, drop_unread
from moewright.rules.shapes.mixers import is_choice_shared
from moewright.rules.shapes.shards import shard_size
from moewright.spec.choices import Payload
from moewright.spec.layout import Layout, Offload, Recompute
from moewright.spec.ledger import Module
from moewright.spec.model import (
    AttentionKind,
    MixerKind,
    ModelSpec,
    MoeSpec,
    NormKind,
    QkNorm,
    ScoreFunction,
)
from moewright.spec.record import copy_with
from moewright.spec.units import FP32_BYTES, INT32_BYTES, INT64_BYTES
from moewright.spec.workload import Fusion, TrainerSpec, Workload

# A layer's input, as its first block calls it.
_LAYER_INPUTS = ("layer_input", "mlp_input")
_FP32 = KeptFormat.FP32


@dataclass(frozen=True, kw_only=True, slots=True)
class _TableSymbols:
    """The symbols of the table for one model, workload and layout."""

    c: int
    T: int
    t: int
    h: int
    tp: int
    cp: int
    a2a_ranks: int  # ranks that exchange heads for tokens
    seq_len: int
    trainer: TrainerSpec
    trains_indexer: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _LocalExperts:
    """The rows and copies that a dispatch brings to the experts of a rank."""

    R: int
    slots: int  # expert slots of all ranks, those of replicas included
    dispatch: routing.DispatchCounts


def saved_tensors(
    job: Job,
    layer: int,
    *,
    load: float,
    dispatch: routing.DispatchCounts | None = None,
    stack: SavingStack = ENGINE_STACK,
) -> tuple[SavedTensor, ...]:
    """Return what `layer` saves before any recompute, without empty tensors.

    This is the one list of what is kept: whoever counts, prices, frees or offloads saved tensors
    reads them here, and how a layer keeps them under its policies from `keep_tensors`.

    `load` is the rank's expert rows over the mean, `dispatch` what its dispatch moves (None: even
    routing). Layers above `model.layers` are MTP depths (see rules.shapes.param): a layer like the
    last one, after the two norms and the projection, all booked to MTP.

    Fused CUDA stacks save attention's output once, as the projection takes it, and exchange it
    again in backward. With DeepEP and HybridEP they save the same indices as with an all-to-all,
    while our engine saves those of its own sort.
    """
    symbols = _TableSymbols(
        c=activation_nbytes(job.workload),
        T=tp_group_tokens(job.workload, job.layout),
        t=micro_batch_tokens(job.workload, job.layout),
        h=job.model.hidden_size,
        tp=job.layout.tp,
        cp=job.layout.cp,
        a2a_ranks=cp_factors(job.layout)[0],
        seq_len=job.workload.seq_len,
        trainer=job.workload.trainer,
        trains_indexer=trains_indexer(job.workload),
    )
    is_mtp = layer > job.model.layers
    # An MTP depth is a layer like the last one.
    has_experts = job.model.moe_layers[-1 if is_mtp else layer]
    rows = [*_mixer(job.model, symbols, layer, is_fused_stack=stack.is_fused)]
    has_mlp = job.model.has_mlp(layer)
    if has_mlp:
        has_mixer = job.model.mixer(layer) is not MixerKind.NONE
        rows += _second_norm(job.model, symbols, has_mixer=has_mixer)
    if has_mlp and has_experts:
        local = _LocalExperts(
            R=routed_rows(job.model, job.workload, job.layout, load),
            slots=expert_placement.count_slots(job, layer),
            dispatch=dispatch or routing.expected_dispatch(job),
        )
        rows += _moe(job, symbols, local, is_fused_stack=stack.is_fused)
    elif has_mlp:
        rows += _dense(job.model, symbols)
    if is_mtp:
        rows = [*_mtp_inputs(job.model, symbols), *rows]
    # Before depths are booked to MTP, so that what their adapters keep is booked with them.
    if not trains_all(job.workload.fine_tuning):
        rows = _change_for_adapters(job, rows, layer, symbols, load)
    if is_mtp:
        rows = [_book_to_mtp(row) for row in rows]
    return tuple(
        _send(convert_kept(job, row, symbols.c, stack), find_offload(row))
        for row in rows
        if row.bytes
    )


def _send(row: SavedTensor, choice: Offload | None) -> SavedTensor:
    """Return a tensor that an offload choice, if any, moves to the host."""
    return row if choice is None else copy_with(row, sent_by=choice)


def _change_for_adapters(
    job: Job, rows: list[SavedTensor], layer: int, symbols: _TableSymbols, load: float
) -> list[SavedTensor]:
    fine_tuning = job.workload.fine_tuning
    adapters = adapter_saved(
        job.model,
        fine_tuning,
        layer,
        token_bytes=symbols.c * symbols.t,
        router_token_bytes=job.workload.router.router_dtype.nbytes * symbols.t,
        router_format=KeptFormat(job.workload.router.router_dtype.value),
        row_bytes=symbols.c * routed_rows(job.model, job.workload, job.layout, load),
    )
    return [*drop_unread(rows, job.model, fine_tuning, layer), *adapters]


def _book_to_mtp(row: SavedTensor) -> SavedTensor:
    """Book a tensor of a depth's layer, whose input is inside of the depth's checkpoint."""
    if row.name in _LAYER_INPUTS:
        row = copy_with(row, freed_by=(Recompute.FULL, *row.freed_by))
    # Ledgers book the router of a depth to the router (rules.shapes.flops).
    if row.module is Module.ROUTER:
        return row
    return copy_with(row, module=Module.MTP)


def layer_recompute(layout: Layout, place: int) -> tuple[Recompute, ...]:
    """Return the policies of the layer at `place` of its chunk.

    Full recompute may cover the first layers only.
    """
    if 0 < layout.recompute_block <= place:
        return ()
    return layout.recompute


def keep_tensors(
    rows: Sequence[SavedTensor], layout: Layout, position: int, *, offloads: bool
) -> tuple[KeptTensor | None, ...]:
    """Return how and where the layer at `position` of its chunk keeps each tensor; None: not.

    It is a layer that `offloads`, or one whose tensors stay where others offload theirs. A
    checkpoint over several layers keeps the input of its first layer alone, not those that the
    layers hand to each other; an MTP depth has a checkpoint of its own.
    """
    policies = layer_recompute(layout, position)
    is_depth = any(row.module is Module.MTP for row in rows)
    is_inside = position % layout.recompute_span > 0 and not is_depth

    def keep(row: SavedTensor) -> KeptTensor | None:
        if not is_kept(row, policies) or (is_inside and row.name in _LAYER_INPUTS):
            return None
        is_wide = any(policy in policies for policy in row.wide_by)
        is_sent = offloads and row.sent_by in layout.offload
        return KeptTensor(
            tensor=row,
            bytes=row.wide_bytes if is_wide else row.bytes,
            format=KeptFormat.ACTIVATION if is_wide else row.format,
            place=Place.HOST if is_sent else Place.DEVICE,
        )

    return tuple(map(keep, rows))


def is_kept(row: SavedTensor, policies: Collection[Recompute]) -> bool:
    """Return whether a tensor stays when `policies` are on."""
    if any(policy in policies for policy in row.freed_by):
        return False
    return not row.kept_by or any(policy in policies for policy in row.kept_by)


def loss_chunk_columns(model: ModelSpec, layout: Layout) -> int:
    """Return the columns of the logits that a rank makes at a time under recompute=loss.

    They are as many as the hidden size, so that they take as many bytes as the head's input, but at
    most the rank's part of the vocabulary, padding included.
    """
    return min(model.hidden_size, shard_size(model.vocab_size, layout.tp))


def activation_nbytes(workload: Workload) -> int:
    """Return the bytes of an element of a saved activation; 8-bit recipes save bf16 activations."""
    if workload.precision.is_narrow:
        return 2
    return workload.precision.nbytes


def _mixer(
    model: ModelSpec, symbols: _TableSymbols, layer: int, *, is_fused_stack: bool
) -> Iterator[SavedTensor]:
    """Yield the layer's input, the norms around what mixes tokens, and what that saves."""
    c, t, h = symbols.c, symbols.t, symbols.h
    mixer = model.mixer(layer)
    layer_input = model.residual_streams * c * t * h
    name = _LAYER_INPUTS[mixer is MixerKind.NONE]
    row = saved_tensor(Module.NORM, name, layer_input, full=False)
    if not model.norm_placement.is_before:
        # What mixes tokens takes the input as it is, and keeps it; else a checkpoint does.
        row = copy_with(row, kept_by=(Recompute.FULL,))
    yield row
    if mixer is MixerKind.NONE:
        return
    yield from _streams(model, symbols, "attention")
    # Fused into the QKV projection for GQA in the stacks that the table is compared with, so only
    # MLA can drop its output.
    is_fused = mixer is MixerKind.RECURRENT or model.attention.kind is AttentionKind.GQA
    freed_by = () if is_fused else (Recompute.LAYERNORM,)
    if model.norm_placement.is_before:
        yield saved_tensor(
            Module.NORM, "input_norm_rstd", norm_statistics(model, t), *freed_by, kept_as=_FP32
        )
    else:
        freed_by = ()
    yield saved_tensor(Module.ATTENTION, "input_norm_out", c * t * h, *freed_by)
    yield from _norm_after(model, symbols, "attention")
    shared = MixerSymbols(
        c=c, T=symbols.T, t=t, tp=symbols.tp, cp=symbols.cp, seq_len=symbols.seq_len
    )
    if mixer is MixerKind.RECURRENT:
        assert model.recurrent is not None  # what a recurrent layer needs
        yield from recurrent_saved(model.recurrent, shared, is_fused_stack=is_fused_stack)
    elif model.attention.kind is AttentionKind.COMPRESSED:
        yield from compressed_saved(model, mixer, shared, trains_indexer=symbols.trains_indexer)
        yield from _scores(model, symbols)
    else:
        yield from _attention(model, symbols, is_fused_stack=is_fused_stack)
        yield from gate_saved(model.attention, shared)
        if mixer is not MixerKind.SHARED_INDEX:
            yield from indexer_saved(
                model.attention,
                shared,
                is_trained=symbols.trains_indexer,
                is_fused_stack=is_fused_stack,
                is_shared=is_choice_shared(model, layer),
            )


def _attention(
    model: ModelSpec, symbols: _TableSymbols, *, is_fused_stack: bool
) -> Iterator[SavedTensor]:
    spec, c, T = model.attention, symbols.c, symbols.T
    if spec.kind is AttentionKind.MLA:
        yield from _mla_core(model, symbols)
    else:
        yield from _gqa_core(model, symbols)
    out_bytes = c * T * spec.out_width // symbols.tp
    yield saved_tensor(Module.ATTENTION, "attention_out", out_bytes)
    if symbols.a2a_ranks > 1 and not is_fused_stack:
        # Attention saves its own output, of more tokens and fewer heads than the projection takes.
        yield saved_tensor(Module.ATTENTION, "attention_out", out_bytes, Recompute.CORE_ATTN)
    yield from _scores(model, symbols)


def _second_norm(
    model: ModelSpec, symbols: _TableSymbols, *, has_mixer: bool
) -> Iterator[SavedTensor]:
    """Yield what the norm before the MLP saves, and the masks of dropout.

    Each block's output is dropped before it joins the residual stream, and both masks are kept.
    Without a mixer before, the norm takes the layer's input, which is saved already.
    """
    c, t, h = symbols.c, symbols.t, symbols.h
    mask_bytes = 0
    if symbols.trainer.hidden_dropout:
        mask_bytes = 2 * t * h
    yield saved_tensor(Module.NORM, "dropout_masks", mask_bytes, kept_as=KeptFormat.BOOL)
    if has_mixer and model.norm_placement.is_before:
        yield saved_tensor(Module.NORM, "residual", model.residual_streams * c * t * h)
    yield from _streams(model, symbols, "mlp")
    if model.norm_placement.is_before:
        statistics_bytes = norm_statistics(model, t)
        yield saved_tensor(
            Module.NORM, "post_norm_rstd", statistics_bytes, Recompute.LAYERNORM, kept_as=_FP32
        )
    yield from _norm_after(model, symbols, "mlp")


def _freed_with_norm(model: ModelSpec) -> tuple[Recompute, ...]:
    """Return what frees the input of an MLP or a router; without a norm it is the stream itself."""
    if model.norm_placement.is_before:
        return (Recompute.LAYERNORM,)
    return ()


def _norm_after(model: ModelSpec, symbols: _TableSymbols, block: str) -> Iterator[SavedTensor]:
    """Yield what the norm of a block's output saves, in models that have one there.

    Its own output joins the residual stream, which keeps nothing of it.
    """
    if model.norm_placement.is_after:
        hidden_bytes = symbols.c * symbols.t * symbols.h
        yield saved_tensor(Module.NORM, f"{block}_block_out", hidden_bytes)
        statistics_bytes = norm_statistics(model, symbols.t)
        yield saved_tensor(Module.NORM, f"{block}_norm_rstd", statistics_bytes, kept_as=_FP32)


def _streams(model: ModelSpec, symbols: _TableSymbols, block: str) -> Iterator[SavedTensor]:
    """Yield what parallel residual streams save around a block, besides themselves.

    They are the block's input and output, and the weights of the streams as they are projected
    and as they are used, with the statistic of the norm before.
    """
    if model.residual_streams == 1:
        return
    hidden_bytes = symbols.c * symbols.t * symbols.h
    weights = model.residual_streams * (model.residual_streams + 2)
    weight_bytes = FP32_BYTES * symbols.t * (2 * weights + 1)
    yield saved_tensor(Module.NORM, f"{block}_streams", hidden_bytes)
    yield saved_tensor(Module.NORM, f"{block}_stream_weights", weight_bytes, kept_as=_FP32)
    yield saved_tensor(Module.NORM, f"{block}_out", hidden_bytes)


def _scores(model: ModelSpec, symbols: _TableSymbols) -> Iterator[SavedTensor]:
    """Yield what attention keeps of its scores.

    In tiles it is the log-sum of each query, in fp32. In whole matrices [heads, queries, keys] it
    is the probabilities, and where some are dropped the mask and what is left, whatever attention
    masks or windows.
    """
    core = Recompute.CORE_ATTN
    queries = symbols.T * model.attention.heads // symbols.tp
    if not symbols.trainer.attention_backend.keeps_scores:
        lse_bytes = FP32_BYTES * queries
        yield saved_tensor(Module.ATTENTION, "lse", lse_bytes, core, kept_as=_FP32)
        return
    scores = queries * symbols.seq_len
    yield saved_tensor(Module.ATTENTION, "probabilities", symbols.c * scores, core)
    if symbols.trainer.attention_dropout:
        yield saved_tensor(Module.ATTENTION, "dropped_probabilities", symbols.c * scores, core)
        yield saved_tensor(Module.ATTENTION, "dropout_mask", scores, core, kept_as=KeptFormat.BOOL)


def _gqa_core(model: ModelSpec, symbols: _TableSymbols) -> Iterator[SavedTensor]:
    spec, c, T, tp = model.attention, symbols.c, symbols.T, symbols.tp
    kv_heads = max(1, spec.kv_heads // tp)  # with more ranks than key heads, neighbours share one
    # The norms save their inputs: the projections before rotation are alive beside the rotated
    # copies.
    if spec.qk_norm is QkNorm.FULL:
        yield saved_tensor(
            Module.ATTENTION, "qk_norm_in", c * T * (spec.q_width + spec.kv_width) // tp
        )
        yield saved_tensor(Module.ATTENTION, "qk_norm_rstd", FP32_BYTES * T * 2, kept_as=_FP32)
    elif spec.qk_norm is not QkNorm.NONE:
        local_width = spec.q_width // tp + kv_heads * spec.head_dim
        local_heads = spec.heads // tp + kv_heads
        yield saved_tensor(Module.ATTENTION, "qk_norm_in", c * T * local_width)
        yield saved_tensor(
            Module.ATTENTION, "qk_norm_rstd", FP32_BYTES * T * local_heads, kept_as=_FP32
        )
    # Ranks that exchange heads keep at least one key head each.
    kv_width = max(kv_heads, symbols.a2a_ranks) * spec.head_dim
    yield saved_tensor(Module.ATTENTION, "qkv", c * T * (spec.q_width // tp + 2 * kv_width))


def _mla_core(model: ModelSpec, symbols: _TableSymbols) -> Iterator[SavedTensor]:
    """Yield the tensors of multi-latent attention.

    The latents are of t tokens: the down-projections are whole on every rank and run before the
    gather.
    """
    spec, c, T, t, tp = model.attention, symbols.c, symbols.T, symbols.t, symbols.tp
    expanded = spec.heads * (2 * spec.head_dim + spec.v_head_dim)
    norms = 2 if spec.q_lora_rank else 1
    yield saved_tensor(Module.ATTENTION, "q_down", c * t * spec.q_lora_rank)
    yield saved_tensor(Module.ATTENTION, "q_latent", c * t * spec.q_lora_rank)
    yield saved_tensor(
        Module.ATTENTION, "kv_down", c * t * (spec.kv_lora_rank + spec.qk_rope_head_dim)
    )
    yield saved_tensor(Module.ATTENTION, "kv_latent", c * t * spec.kv_lora_rank)
    yield saved_tensor(Module.ATTENTION, "latent_rstd", FP32_BYTES * t * norms, kept_as=_FP32)
    yield saved_tensor(Module.ATTENTION, "qkv", c * T * expanded // tp, Recompute.MLA_UP_PROJ)


def _dense(model: ModelSpec, symbols: _TableSymbols) -> Iterator[SavedTensor]:
    c, T, tp = symbols.c, symbols.T, symbols.tp
    ffn = model.dense_ffn_size
    fc1_width = _fc1_width(model, ffn)
    post_norm_bytes = c * symbols.t * symbols.h
    freed_by = _freed_with_norm(model)
    yield saved_tensor(Module.DENSE_MLP, "post_norm_out", post_norm_bytes, *freed_by)
    yield saved_tensor(Module.DENSE_MLP, "fc1", c * T * fc1_width // tp, Recompute.MLP)
    yield saved_tensor(Module.DENSE_MLP, "activation", c * T * ffn // tp, Recompute.MLP)


def _moe(
    job: Job,
    symbols: _TableSymbols,
    local: _LocalExperts,
    *,
    is_fused_stack: bool,
) -> Iterator[SavedTensor]:
    if job.model.moe is None:
        return
    c, t, R, etp = symbols.c, symbols.t, local.R, job.layout.etp
    ffn = job.model.moe.ffn_size
    fc1_width = _fc1_width(job.model, ffn)
    moe = Recompute.MOE
    freed_by = _freed_with_norm(job.model)
    yield saved_tensor(Module.ROUTER, "post_norm_out", c * t * symbols.h, *freed_by)
    yield from _router(job.model.moe, job.workload, t)
    yield saved_tensor(Module.EXPERTS, "permuted", c * R * job.model.expert_width, moe)
    if job.model.moe.router.scales_input:
        # The product with the router's weight keeps the rows as they came.
        yield saved_tensor(Module.EXPERTS, "unscaled", c * R * job.model.expert_width, moe)
    yield saved_tensor(Module.EXPERTS, "latent_out", c * t * job.model.moe.latent_size, moe)
    yield saved_tensor(Module.EXPERTS, "fc1", c * R * fc1_width // etp, moe)
    yield saved_tensor(Module.EXPERTS, "activation", c * R * ffn // etp, Recompute.MOE_ACT, moe)
    if is_fused_stack:
        unweighted = c * R * _unweighted_width(job.model, symbols.trainer) // etp
        yield saved_tensor(Module.EXPERTS, "unweighted", unweighted, Recompute.MOE_ACT, moe)
    yield saved_tensor(Module.EXPERTS, "probs", FP32_BYTES * R, moe, kept_as=_FP32)
    indices = _index_counts(job.model.moe, job.layout, t, local, is_fused_stack=is_fused_stack)
    for name, count in indices._asdict().items():
        nbytes = INT64_BYTES * count
        yield saved_tensor(Module.EXPERTS, f"{name}_indices", nbytes, moe, kept_as=KeptFormat.INT64)
    # The row ends of replicas are kept once more, apart from those of the own experts.
    replicas = (local.slots - job.model.moe.experts) // job.layout.ep
    row_ends = local.slots // job.layout.ep + replicas
    yield saved_tensor(
        Module.EXPERTS, "row_ends", INT32_BYTES * row_ends, moe, kept_as=KeptFormat.INT32
    )
    yield from _shared_experts(job.model, symbols)


class _IndexCounts(NamedTuple):
    """The indices saved before rows leave, between dispatch and combine, and after they return."""

    sent: int
    received: int
    returned: int


def _index_counts(
    moe: MoeSpec, layout: Layout, t: int, local: _LocalExperts, *, is_fused_stack: bool
) -> _IndexCounts:
    """Return how many indices of permutations are saved for unpermute and backward.

    A slot here is one of the top-k choices of a token. Each sort saves the row of every slot and
    the token of every row; where slots may have no row, the slots of the rows too. De-duplication
    sorts once for each crossing and once for the experts; a library that dispatches keeps its own
    indices to itself. All-to-all sorts by expert on the sending side, and by local expert where
    rows arrive mixed. Rows that ETP ranks gathered are picked out of their padding in that order:
    only their positions are saved, because this step has no inverse.
    """
    R, dispatch = local.R, local.dispatch
    top_k = moe.router.top_k
    slots = t * top_k
    facts = layout.dispatcher.facts
    if facts.payload is Payload.TOKENS:
        return _IndexCounts(0, slots * layout.ep * layout.etp + 2 * R, 0)
    if facts.is_library and not is_fused_stack:
        columns = moe.experts // layout.ep if facts.brings_local_probs else top_k
        return _IndexCounts(0, dispatch.copies_in * columns + 2 * R, 0)
    if routing.sends_own_copies(layout):
        to_experts = dispatch.copies_gathered * top_k + 2 * R
        if not layout.ep_node:
            return _IndexCounts(slots, to_experts, dispatch.copies_out)
        to_ranks = dispatch.node_copies_in * top_k + dispatch.copies_out
        return _IndexCounts(slots, to_ranks + to_experts, dispatch.node_copies_out)
    sent = slots
    if layout.capacity or layout.rank_capacity:
        sent += dispatch.rows_sent
    received = 0
    if layout.etp > 1:
        received = R
    elif layout.ep > 1 and moe.experts > layout.ep:
        # With one expert a rank, rows arrive sorted.
        received = 2 * R
    return _IndexCounts(sent, received, dispatch.rows_sent)


def _router(moe: MoeSpec, workload: Workload, t: int) -> Iterator[SavedTensor]:
    """Yield the scores of all experts, what was chosen, and what the auxiliary losses save.

    They are in the router's own dtype.
    """
    loss = workload.loss
    score = moe.router.score
    chosen = t * moe.router.top_k
    dtype = workload.router.router_dtype

    def save_numbers(name: str, count: int) -> SavedTensor:
        nbytes = dtype.nbytes * count
        return saved_tensor(
            Module.ROUTER, name, nbytes, Recompute.MOE, kept_as=KeptFormat(dtype.value)
        )

    yield save_numbers("scores", t * moe.experts)
    chosen_bytes = INT64_BYTES * chosen
    # No policy frees it: rounding in a replayed router must not choose other experts.
    yield saved_tensor(Module.ROUTER, "chosen", chosen_bytes, full=False, kept_as=KeptFormat.INT64)
    if moe.router.renormalize:
        yield save_numbers("chosen_scores", chosen + t)
    shares = bool(loss.aux_coeff) + bool(loss.global_aux_coeff)
    if loss.seq_aux_coeff:
        shares += t
    share_bytes = FP32_BYTES * shares * moe.experts
    yield saved_tensor(Module.ROUTER, "load_share", share_bytes, full=False, kept_as=_FP32)
    # Independent scores enter the balance loss over their sum (docs/formulas.md 4).
    if shares and not score.is_distribution:
        yield save_numbers("score_sums", t)
    # The derivatives of softmax and sigmoid follow from the scores; these need the logits.
    if loss.z_coeff or score in (ScoreFunction.SQRT_SOFTPLUS, ScoreFunction.SPARSE_MIXER):
        yield save_numbers("logits", t * moe.experts)
    if loss.z_coeff:
        yield save_numbers("log_sums", t)


def _shared_experts(model: ModelSpec, symbols: _TableSymbols) -> Iterator[SavedTensor]:
    if model.moe is None:
        return
    c, T, tp = symbols.c, symbols.T, symbols.tp
    ffn = model.moe.shared_ffn_size
    fc1_width = _fc1_width(model, ffn)
    freed_by = (Recompute.SHARED_EXPERTS, Recompute.MOE)
    # Its input is the router's, which is kept once.
    yield saved_tensor(Module.SHARED_EXPERTS, "fc1", c * T * fc1_width // tp, *freed_by)
    yield saved_tensor(Module.SHARED_EXPERTS, "activation", c * T * ffn // tp, *freed_by)
    if model.moe.shared_gate:
        # The gated product saves both factors.
        gated_bytes = c * symbols.t * (symbols.h + 1)
        yield saved_tensor(Module.SHARED_EXPERTS, "gated", gated_bytes, *freed_by)


def _mtp_inputs(model: ModelSpec, symbols: _TableSymbols) -> Iterator[SavedTensor]:
    """Yield the embedding that its norm takes, and both norms' outputs, which projections take.

    The hidden state is saved by the final norm before it, or by the stage if that is another's
    (cost.memory.activations).
    """
    rows = (1 + model.residual_streams) * symbols.t
    yield saved_tensor(Module.MTP, "embedding", symbols.c * symbols.t * symbols.h, full=False)
    yield saved_tensor(Module.MTP, "joined", symbols.c * rows * symbols.h)
    yield saved_tensor(Module.MTP, "joined_rstd", norm_statistics(model, rows), kept_as=_FP32)


def _unweighted_width(model: ModelSpec, trainer: TrainerSpec) -> int:
    """Return the widths of what an expert's activation keeps between its steps, unless fused.

    The product with the router's weight keeps the activation, and a gated one the activated gate.
    """
    if model.moe is None or Fusion.ACTIVATION not in trainer.unfused:
        return 0
    return _fc1_width(model, model.moe.ffn_size)


def _fc1_width(model: ModelSpec, ffn: int) -> int:
    """Return the output width of the first linear layer: gate and up, or up alone."""
    return model.fc1_matrices * ffn


def norm_statistics(model: ModelSpec, rows: int) -> int:
    """Return the bytes of the fp32 reciprocal deviation of every row; LayerNorm saves means too."""
    statistics = 2 if model.norm is NormKind.LAYER else 1
    return FP32_BYTES * rows * statistics
