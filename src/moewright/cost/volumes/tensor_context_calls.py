"""Collectives of tensor and context parallelism of one rank in one step: payload and calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from moewright.cost.volumes.collective_calls import CallSum, repeats_forward
from moewright.rules.adapters import (
    MLA_UP_LINEARS,
    AdaptedLinear,
    adapted_linears,
    trains_indexer,
    trains_module,
)
from moewright.rules.context_parallel import cp_factors
from moewright.rules.job import Job
from moewright.rules.saved.recompute import activation_nbytes
from moewright.rules.timetable.stages import Chunk, chunk_layers
from moewright.spec.hardware import Collective
from moewright.spec.layout import CpComm, Overlap, Recompute
from moewright.spec.ledger import Module
from moewright.spec.model import (
    AttentionKind,
    IndexerSpec,
    MixerKind,
    ModelSpec,
    QkNorm,
    RecurrentKind,
)
from moewright.spec.units import FP32_BYTES, INT32_BYTES

# The widths of a key that each projection of a compressor has.
_OVERLAPS: Mapping[MixerKind, int] = MappingProxyType(
    {MixerKind.HEAVILY_COMPRESSED: 1, MixerKind.COMPRESSED_SPARSE: 2}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _TensorWork:
    """The tensors that sequence parallelism moves in one micro-batch of some chunks.

    `gathered` and `scattered` list the width of each gathered and scattered tensor of T tokens,
    `input_gathers` and `output_scatters` those of a block's input, of its output, and of the
    gradient of that, which products with them can run beside;
    `norm_sums` and `losses` count all-reduces of one number a token; `mtp_exchanges` counts the
    all-to-alls of MTP depths that exchange columns for tokens.
    """

    gathered: list[int]
    scattered: list[int]
    input_gathers: list[int]
    output_scatters: list[int]
    attention_layers: int
    norm_sums: int
    losses: int
    mtp_exchanges: int


def tensor_parallel_calls(
    job: Job, chunks: Sequence[Chunk], micro_batches: int
) -> Iterator[CallSum]:
    """Yield the collectives over the TP group.

    Under sequence parallelism each dense MLP gathers its input (again for its weight gradient) and
    reduce-scatters its output, with the transposed pair in backward; attention likewise; the head
    gathers, the embedding scatters. The loss all-reduces the top of the logits, then their sum and
    the target's; norms of queries and keys over all heads their mean square, and a mean again in
    backward. Without sequence parallelism nothing is gathered, and what would be scattered is
    all-reduced. An adapter gathers what is between its matrices beside a column-parallel weight,
    and scatters it beside a row-parallel one; frozen weights gather nothing again. With overlap=tp
    the input of a block, its output and the gradient of that pass round the ring of the ranks, in
    tp - 1 messages of T / tp tokens. More ranks than key heads gather the parts of those.
    """
    model = job.model
    layout = job.layout
    T = job.tp_group_tokens
    c = activation_nbytes(job.workload)
    work = _tensor_work(job, chunks)
    repeats = repeats_forward(layout)
    gathered = work.gathered
    scattered = work.scattered
    passed_round = [*work.input_gathers, *work.output_scatters]
    if Overlap.TP in layout.overlap:
        messages = micro_batches * (layout.tp - 1)
        passed_bytes = messages * sum(passed_round) * c * T // layout.tp
        yield Collective.P2P, "tp", passed_bytes, messages * len(passed_round)
    else:
        gathered = gathered + work.input_gathers
        scattered = scattered + work.output_scatters
    mtp_exchanges = work.mtp_exchanges
    if not layout.sp:
        reduced_bytes = micro_batches * sum(scattered) * c * T
        yield Collective.ALL_REDUCE, "tp", reduced_bytes, micro_batches * len(scattered)
        # All ranks need all columns of an MTP projection: they gather them, and each keeps its part
        # of their gradients.
        mtp_depths = sum(chunk.mtp_layers for chunk in chunks) * model.joins_mtp_inputs
        gathered = mtp_depths * (1 + repeats) * [model.hidden_size]
        scattered = []
        mtp_exchanges = 0
    if model.attention.kind is AttentionKind.GQA and layout.tp > model.attention.kv_heads:
        keys_and_values = work.attention_layers * [2 * model.attention.kv_width]
        gathered = gathered + (1 + repeats) * keys_and_values
        scattered = scattered + keys_and_values
    gathered_bytes = micro_batches * sum(gathered) * c * T // layout.tp
    yield Collective.ALL_GATHER, "tp", gathered_bytes, micro_batches * len(gathered)
    scattered_bytes = micro_batches * sum(scattered) * c * T
    yield Collective.REDUCE_SCATTER, "tp", scattered_bytes, micro_batches * len(scattered)
    yield from _indexer_calls(job, chunks, micro_batches)
    exchanges = micro_batches * mtp_exchanges
    exchanged_bytes = exchanges * c * T * model.hidden_size // layout.tp
    yield Collective.ALL_TO_ALL, "tp", exchanged_bytes, exchanges
    number_bytes = FP32_BYTES * T * (work.norm_sums + 3 * work.losses)
    number_calls = work.norm_sums + 2 * work.losses
    yield Collective.ALL_REDUCE, "tp", micro_batches * number_bytes, micro_batches * number_calls


def _indexer_calls(job: Job, chunks: Sequence[Chunk], micro_batches: int) -> Iterator[CallSum]:
    """Yield the gathers of the keys that indexers score, and of what each rank's tokens chose.

    Without sequence parallelism every rank chooses for all tokens. To train, they sum what heads
    read of the chosen keys, and under sequence parallelism the gradients of the keys. CP ranks
    gather and sum the same.
    """
    spec, layout = job.model.attention.indexer, job.layout
    if spec is None:
        return
    if job.model.attention.kind is AttentionKind.COMPRESSED:
        yield from _block_indexer_calls(job, spec, chunks, micro_batches)
        return
    layers = [layer for chunk in chunks for layer in chunk_layers(job.model, chunk)]
    indexers = [layer for layer in layers if job.model.mixer(layer) is MixerKind.ATTENTION]
    passes = micro_batches * len(indexers)
    key_bytes = activation_nbytes(job.workload) * spec.head_dim
    choice_bytes = INT32_BYTES * min(spec.top_k, job.workload.seq_len)
    trained_passes = passes * trains_indexer(job.workload)
    T = job.tp_group_tokens
    repeated_passes = passes * (1 + repeats_forward(layout))
    choice_sums = trained_passes * choice_bytes * T  # fp32 beside int32
    sums = choice_sums + trained_passes * key_bytes * T
    gathers = repeated_passes * (key_bytes + choice_bytes) * T
    yield Collective.REDUCE_SCATTER, "cp", sums * layout.cp, 2 * trained_passes
    yield Collective.ALL_GATHER, "cp", gathers, 2 * repeated_passes
    if not layout.sp:
        yield Collective.ALL_REDUCE, "tp", choice_sums, trained_passes
        return
    yield Collective.REDUCE_SCATTER, "tp", sums, 2 * trained_passes
    yield Collective.ALL_GATHER, "tp", gathers // layout.tp, 2 * repeated_passes


def _block_indexer_calls(
    job: Job, spec: IndexerSpec, chunks: Sequence[Chunk], micro_batches: int
) -> Iterator[CallSum]:
    """Yield the gathers of both projections of a compressor of indexers, and of what they chose.

    To train, they gather the projections again for the gradients, sum these, and sum what heads
    read of the chosen blocks. CP ranks gather and sum the same.
    """
    layout, T = job.layout, job.tp_group_tokens
    layers = [layer for chunk in chunks for layer in chunk_layers(job.model, chunk)]
    mixers = [job.model.mixer(layer) for layer in layers]
    passes = micro_batches * mixers.count(MixerKind.COMPRESSED_SPARSE)
    trained = passes * trains_indexer(job.workload)
    repeated = passes * (1 + repeats_forward(layout))
    overlap = _OVERLAPS[MixerKind.COMPRESSED_SPARSE]
    projected_bytes = activation_nbytes(job.workload) * overlap * spec.head_dim
    blocks = job.workload.seq_len // job.model.attention.sparse_rate
    choice_bytes = INT32_BYTES * min(spec.top_k, blocks)
    gathered_bytes = 2 * (repeated + trained) * projected_bytes + repeated * choice_bytes
    yield (
        Collective.ALL_GATHER,
        "tp",
        gathered_bytes * T // layout.tp,
        2 * (repeated + trained) + repeated,
    )
    yield Collective.ALL_GATHER, "cp", gathered_bytes * T, 2 * (repeated + trained) + repeated
    summed_bytes = trained * (2 * projected_bytes + choice_bytes)  # fp32 beside int32
    yield Collective.REDUCE_SCATTER, "tp", summed_bytes * T, 3 * trained
    yield Collective.REDUCE_SCATTER, "cp", summed_bytes * T * layout.cp, 3 * trained


def _tensor_work(job: Job, chunks: Sequence[Chunk]) -> _TensorWork:
    model = job.model
    layout = job.layout
    h = job.model.hidden_size
    has_shared_experts = model.moe is not None and model.moe.shared_ffn_size > 0
    repeats_layer = repeats_forward(layout)
    repeats_mlp = repeats_forward(layout, Recompute.MLP)
    repeats_shared = repeats_forward(layout, Recompute.MOE, Recompute.SHARED_EXPERTS)
    gathered: list[int] = []
    scattered: list[int] = []
    input_gathers: list[int] = []
    output_scatters: list[int] = []
    attention_layers = losses = mtp_projections = 0
    fine_tuning = job.workload.fine_tuning
    trains_head = trains_module(fine_tuning, Module.HEAD) or Recompute.LOSS in layout.recompute
    for chunk in chunks:
        layers = chunk_layers(model, chunk)
        moe_layers = sum(model.has_experts(layer) for layer in layers)
        dense_mlps = sum(model.has_mlp(layer) for layer in layers) - moe_layers
        shared_mlps = has_shared_experts * moe_layers
        mlps = dense_mlps + shared_mlps
        repeated_mlps = repeats_mlp * dense_mlps + repeats_shared * shared_mlps
        heads = chunk.has_loss + chunk.mtp_layers
        embeddings = chunk.has_embedding + chunk.mtp_layers
        mixers = [layer for layer in layers if model.mixer(layer) is not MixerKind.NONE]
        for layer in mixers:
            inputs, rotated_keys, block_inputs = _mixer_inputs(model, layer)
            repeats_inputs = repeats_forward(layout, Recompute.MLA_UP_PROJ)
            input_gathers += [*(1 + repeats_inputs) * inputs, h]
            gathered += (1 + repeats_inputs) * rotated_keys
            gathered += (2 + repeats_inputs) * block_inputs
            gathered += trains_module(fine_tuning, Module.ATTENTION) * inputs
            output_scatters += (1 + repeats_layer) * [h]
            scattered += [*inputs, *rotated_keys, *block_inputs]
        input_gathers += (2 * mlps + repeated_mlps) * [h]
        output_scatters += (mlps + repeated_mlps) * [h]
        # The input of a product is gathered again for the gradient of its weight.
        gathered += trains_module(fine_tuning, Module.DENSE_MLP) * dense_mlps * [h]
        gathered += trains_module(fine_tuning, Module.SHARED_EXPERTS) * shared_mlps * [h]
        gathered += (1 + trains_head) * heads * [h]
        gathered += trains_module(fine_tuning, Module.EMBEDDING) * embeddings * [h]
        scattered += (mlps + heads + embeddings) * [h]
        # An MTP depth gathers both its inputs side by side, and again for the weight gradient. With
        # residual streams it projects a rank's own tokens.
        projections = chunk.mtp_layers * model.joins_mtp_inputs
        input_gathers += (1 + repeats_layer) * projections * [2 * h]
        gathered += trains_module(fine_tuning, Module.MTP) * projections * [2 * h]
        for linear in (i for n in layers for i in adapted_linears(model, fine_tuning, n)):
            columns = linear.stack * [fine_tuning.lora_rank]
            repeats = repeats_forward(layout, *_repeating_choices(linear))
            if linear.cut == "columns":
                input_gathers += columns
                output_scatters += (1 + repeats) * columns
            elif linear.cut == "rows":
                input_gathers += (1 + repeats) * columns
                gathered += columns
                scattered += columns
        scattered += projections * [2 * h]
        attention_layers += sum(model.mixer(i) is not MixerKind.RECURRENT for i in mixers)
        losses += heads
        mtp_projections += projections
    norm_sums = 0
    if model.attention.qk_norm is QkNorm.FULL:
        norm_sums = attention_layers * (4 + 2 * repeats_layer)
    return _TensorWork(
        gathered=gathered,
        scattered=scattered,
        input_gathers=input_gathers,
        output_scatters=output_scatters,
        attention_layers=attention_layers,
        norm_sums=norm_sums,
        losses=losses,
        mtp_exchanges=(2 + repeats_layer) * mtp_projections,
    )


def _repeating_choices(linear: AdaptedLinear) -> tuple[Recompute, ...]:
    """Return the choices, besides full recompute, that run a linear's forward again."""
    if linear.module is Module.ATTENTION:
        if linear.name in MLA_UP_LINEARS:
            return (Recompute.MLA_UP_PROJ,)
        return ()
    if linear.module is Module.SHARED_EXPERTS:
        return Recompute.MOE, Recompute.SHARED_EXPERTS
    return (Recompute.MLP,)


def _mixer_inputs(model: ModelSpec, layer: int) -> tuple[list[int], list[int], list[int]]:
    """Return the widths of what a layer's mixer gathers over TP for products, and besides.

    Its input is gathered for the products and again for their weight gradients; latent attention
    gathers its latents instead, and the rotated part of the keys. Compressed attention gathers the
    queries' latent and its keys; a compressor's two projections, the last of the three, are
    gathered again in backward. The output's gradient is
    gathered; the output and the gradients of what was gathered are summed and scattered.
    """
    spec, h = model.attention, model.hidden_size
    product_inputs = [h]
    rotated_keys: list[int] = []
    block_inputs: list[int] = []
    is_recurrent = model.mixer(layer) is MixerKind.RECURRENT
    if spec.kind is AttentionKind.MLA and not is_recurrent:
        product_inputs = [spec.q_lora_rank or h, spec.kv_lora_rank]
        rotated_keys = [spec.qk_rope_head_dim]
    elif spec.kind is AttentionKind.COMPRESSED and not is_recurrent:
        product_inputs = [spec.q_lora_rank]
        rotated_keys = [spec.head_dim]
        block_inputs = 2 * [_OVERLAPS.get(model.mixer(layer), 0) * spec.head_dim]
    return product_inputs, rotated_keys, [width for width in block_inputs if width]


def context_parallel_calls(
    job: Job, chunks: Sequence[Chunk], micro_batches: int
) -> Iterator[CallSum]:
    """Yield the collectives of every attention layer over the CP group.

    Ranks that exchange heads for tokens hand over queries, keys, values and the output, and in
    backward their gradients. Between the others go keys and values: sent on by all ranks but one
    (or gathered once) in forward and in backward, where their gradients, summed in fp32, go all
    the way round (or are reduced and scattered).
    """
    spec = job.model.attention
    layout = job.layout
    T = job.tp_group_tokens
    tp = layout.tp
    c = activation_nbytes(job.workload)
    is_mla = spec.kind is AttentionKind.MLA
    mixers = [job.model.mixer(i) for chunk in chunks for i in chunk_layers(job.model, chunk)]
    yield from _recurrent_calls(job, micro_batches * mixers.count(MixerKind.RECURRENT))
    if spec.kind is AttentionKind.COMPRESSED and layout.cp_comm is CpComm.A2A:
        yield from _block_calls(job, mixers, micro_batches)
        return
    others = (MixerKind.NONE, MixerKind.RECURRENT)
    passes = micro_batches * sum(mixer not in others for mixer in mixers)
    head_ranks, ring_ranks = cp_factors(layout)
    all_key_heads = spec.heads if is_mla else spec.kv_heads
    # Each rank that exchanges heads gets at least one of the keys, which several then share.
    key_heads = max(1, all_key_heads // tp, head_ranks)
    block = T * key_heads * (spec.head_dim + spec.v_head_dim)
    input_bytes = c * (T * spec.q_width // tp + block)
    input_calls = 2 if is_mla else 3
    input_passes = passes * (2 + repeats_forward(layout, Recompute.MLA_UP_PROJ))
    yield Collective.ALL_TO_ALL, "cp_a2a", input_passes * input_bytes, input_passes * input_calls
    output_passes = passes * (2 + repeats_forward(layout))
    output_bytes = output_passes * c * T * spec.out_width // tp
    yield Collective.ALL_TO_ALL, "cp_a2a", output_bytes, output_passes
    kv_passes = passes * (2 + repeats_forward(layout, Recompute.CORE_ATTN))
    if layout.cp_comm is CpComm.ALL_GATHER:
        gradient_bytes = passes * ring_ranks * FP32_BYTES * block
        yield Collective.ALL_GATHER, "cp_kv", kv_passes * c * block, kv_passes
        yield Collective.REDUCE_SCATTER, "cp_kv", gradient_bytes, passes
    else:
        kv_sends = (ring_ranks - 1) * kv_passes
        gradient_sends = ring_ranks * passes
        yield Collective.P2P, "cp_kv", kv_sends * c * block, kv_sends
        yield Collective.P2P, "cp_kv", gradient_sends * FP32_BYTES * block, gradient_sends


def _block_calls(job: Job, mixers: Sequence[MixerKind], micro_batches: int) -> Iterator[CallSum]:
    """Yield the exchanges of heads for tokens around attention to blocks, and what it gathers.

    Queries and the output are exchanged; keys and both projections of compressors are gathered,
    the projections again in backward, and the gradients of either are summed and scattered.
    """
    spec, layout, T = job.model.attention, job.layout, job.tp_group_tokens
    c = activation_nbytes(job.workload)
    forwards = 1 + repeats_forward(layout)
    passes = micro_batches * (1 + forwards) * len(mixers)
    exchanged_bytes = passes * c * T * (spec.q_width + spec.out_width) // layout.tp
    yield Collective.ALL_TO_ALL, "cp_a2a", exchanged_bytes, 2 * passes
    blocks = [_OVERLAPS[mixer] * spec.head_dim for mixer in mixers if mixer in _OVERLAPS]
    keys = len(mixers) * [spec.head_dim]
    gathered = forwards * keys + 2 * (1 + forwards) * blocks
    summed = keys + 2 * blocks
    gathered_bytes = micro_batches * c * T * sum(gathered)
    yield Collective.ALL_GATHER, "cp", gathered_bytes, micro_batches * len(gathered)
    summed_bytes = micro_batches * c * T * layout.cp * sum(summed)
    yield Collective.REDUCE_SCATTER, "cp", summed_bytes, micro_batches * len(summed)


def _recurrent_calls(job: Job, passes: int) -> Iterator[CallSum]:
    """Yield the exchanges of heads for tokens before and after each recurrent mixer."""
    spec, layout = job.model.recurrent, job.layout
    if spec is None or layout.cp == 1:
        return
    widths = spec.projected_width + spec.value_width
    # The rates of a delta net come from a projection of their own.
    calls = 3 if spec.kind is RecurrentKind.GATED_DELTA else 2
    nbytes = activation_nbytes(job.workload) * job.tp_group_tokens * widths // layout.tp
    exchanges = passes * (2 + repeats_forward(layout))
    yield Collective.ALL_TO_ALL, "cp", exchanges * nbytes, calls * exchanges
