"""Mixers beside plain and latent attention: shapes of their parameters, and their multiply-adds.

The parameters of mixers beside plain and latent attention, each name with its shape. Sources:
transformers' jamba, nemotron_h, qwen3_next, kimi_linear, deepseek_v32 and deepseek_v4; the names
are moewright's own. Heads are cut over tensor parallelism, what all heads read is whole.

Multiply-adds of mixers: their projections, and what they do along the sequence. Sources:
Megatron-Bridge's flop_utils for Mamba-2, gated delta nets, sparse attention with an indexer and
DeepSeek-V4 (docs/formulas.md 13).
"""

from __future__ import annotations

from collections.abc import Iterator

from moewright.rules.context_parallel import twice_attended_pairs
from moewright.rules.shapes.param import TP_COLUMNS, TP_ROWS, Param, tensor
from moewright.rules.timetable.stages import pipeline_chunks
from moewright.spec.layout import Layout
from moewright.spec.ledger import Module
from moewright.spec.model import (
    AttentionKind,
    AttentionSpec,
    IndexerSpec,
    MixerKind,
    ModelSpec,
    RecurrentKind,
    RecurrentSpec,
)

_MODULE = Module.ATTENTION


def recurrent_mixer(model: ModelSpec, prefix: str, layer: int) -> Iterator[Param]:
    """Yield the parameters of a layer that carries a state along the sequence."""
    spec = model.recurrent
    if spec is None:
        raise ValueError(f"{model.name}: layer {layer} is recurrent but the model has no spec")
    h = model.hidden_size
    if spec.kind is RecurrentKind.MAMBA:
        yield from _mamba(spec, h, prefix, layer)
    elif spec.kind is RecurrentKind.MAMBA2:
        yield from _mamba2(spec, h, prefix, layer)
    elif spec.kind is RecurrentKind.GATED_DELTA:
        yield from _gated_delta(spec, h, prefix, layer)
    else:
        yield from _kimi_delta(spec, h, prefix, layer)
    out = (h, spec.value_width)
    yield tensor(f"{prefix}o.weight", out, _MODULE, layer, TP_COLUMNS)


def _mamba(spec: RecurrentSpec, h: int, prefix: str, layer: int) -> Iterator[Param]:
    """Yield the projection to gate and values, and what makes steps, keys and queries of values."""
    width, state, rank = spec.value_width, spec.key_dim, spec.step_rank
    yield tensor(f"{prefix}in.weight", (2 * width, h), _MODULE, layer, TP_ROWS)
    yield from _convolution(spec, prefix, layer)
    yield tensor(f"{prefix}steps_keys.weight", (rank + 2 * state, width), _MODULE, layer)
    for name, size in (("step", rank), ("key", state), ("query", state)):
        yield tensor(f"{prefix}{name}_norm.weight", (size,), _MODULE, layer)
    yield tensor(f"{prefix}dt.weight", (width, rank), _MODULE, layer, TP_ROWS)
    yield tensor(f"{prefix}dt_bias", (width,), _MODULE, layer, TP_ROWS)
    yield tensor(f"{prefix}A_log", (width, state), _MODULE, layer, TP_ROWS)
    yield tensor(f"{prefix}D", (width,), _MODULE, layer, TP_ROWS)


def _mamba2(spec: RecurrentSpec, h: int, prefix: str, layer: int) -> Iterator[Param]:
    """Yield one projection to gates, values, keys, queries and steps, and the gated norm."""
    rows = 2 * spec.value_width + 2 * spec.key_width + spec.heads
    yield tensor(f"{prefix}zxbcdt.weight", (rows, h), _MODULE, layer, TP_ROWS)
    yield from _convolution(spec, prefix, layer)
    for name in ("dt_bias", "A_log", "D"):
        yield tensor(f"{prefix}{name}", (spec.heads,), _MODULE, layer, TP_ROWS)
    yield tensor(f"{prefix}norm.weight", (spec.value_width,), _MODULE, layer, TP_ROWS)


def _gated_delta(spec: RecurrentSpec, h: int, prefix: str, layer: int) -> Iterator[Param]:
    """Yield the projections to queries, keys, values and gate, and to each head's two rates."""
    qkvz = (2 * spec.key_width + 2 * spec.value_width, h)
    yield tensor(f"{prefix}qkvz.weight", qkvz, _MODULE, layer, TP_ROWS)
    yield tensor(f"{prefix}rates.weight", (2 * spec.heads, h), _MODULE, layer, TP_ROWS)
    yield from _convolution(spec, prefix, layer)
    for name in ("dt_bias", "A_log"):
        yield tensor(f"{prefix}{name}", (spec.heads,), _MODULE, layer, TP_ROWS)
    yield tensor(f"{prefix}norm.weight", (spec.head_dim,), _MODULE, layer)


def _kimi_delta(spec: RecurrentSpec, h: int, prefix: str, layer: int) -> Iterator[Param]:
    """Yield queries, keys and values, and decay and gate of each channel through a low rank."""
    yield tensor(f"{prefix}qkv.weight", (spec.conv_width, h), _MODULE, layer, TP_ROWS)
    yield from _convolution(spec, prefix, layer)
    rank, width = spec.head_dim, spec.value_width
    for name in ("decay", "gate"):
        yield tensor(f"{prefix}{name}_down.weight", (rank, h), _MODULE, layer)
        yield tensor(f"{prefix}{name}_up.weight", (width, rank), _MODULE, layer, TP_ROWS)
    yield tensor(f"{prefix}dt_bias", (width,), _MODULE, layer, TP_ROWS)
    yield tensor(f"{prefix}A_log", (spec.heads,), _MODULE, layer, TP_ROWS)
    yield tensor(f"{prefix}beta.weight", (spec.heads, h), _MODULE, layer, TP_ROWS)
    yield tensor(f"{prefix}norm.weight", (spec.head_dim,), _MODULE, layer)


def _convolution(spec: RecurrentSpec, prefix: str, layer: int) -> Iterator[Param]:
    shape = (spec.conv_width, spec.short_conv)
    yield tensor(f"{prefix}conv.weight", shape, _MODULE, layer, TP_ROWS)
    if spec.conv_bias:
        yield tensor(f"{prefix}conv.bias", (spec.conv_width,), _MODULE, layer, TP_ROWS)


def indexer(
    spec: IndexerSpec, h: int, q_lora_rank: int, prefix: str, layer: int
) -> Iterator[Param]:
    """Yield the scorer of DeepSeek-V3.2: its queries, one key, and the weights of its heads.

    It is whole on every TP rank: all heads of attention read its choice.
    """
    width = spec.heads * spec.head_dim
    yield tensor(f"{prefix}indexer.q.weight", (width, q_lora_rank or h), _MODULE, layer)
    yield tensor(f"{prefix}indexer.k.weight", (spec.head_dim, h), _MODULE, layer)
    yield tensor(f"{prefix}indexer.k_norm.weight", (spec.head_dim,), _MODULE, layer)
    yield tensor(f"{prefix}indexer.k_norm.bias", (spec.head_dim,), _MODULE, layer)
    yield tensor(f"{prefix}indexer.heads.weight", (spec.heads, h), _MODULE, layer)


def compressed_attention(model: ModelSpec, prefix: str, layer: int) -> Iterator[Param]:
    """Yield the attention of DeepSeek-V4 with the compressor and the indexer of its kind."""
    spec, h = model.attention, model.hidden_size
    yield tensor(f"{prefix}q_down.weight", (spec.q_lora_rank, h), _MODULE, layer)
    yield tensor(f"{prefix}q_down_norm.weight", (spec.q_lora_rank,), _MODULE, layer)
    q_up = (spec.q_width, spec.q_lora_rank)
    yield tensor(f"{prefix}q_up.weight", q_up, _MODULE, layer, TP_ROWS)
    yield tensor(f"{prefix}kv.weight", (spec.head_dim, h), _MODULE, layer)
    yield tensor(f"{prefix}kv_norm.weight", (spec.head_dim,), _MODULE, layer)
    group_width = spec.out_width // spec.output_groups
    groups = spec.output_groups * spec.output_lora_rank
    yield tensor(f"{prefix}o_down.weight", (groups, group_width), _MODULE, layer, TP_ROWS)
    yield tensor(f"{prefix}o.weight", (h, groups), _MODULE, layer, TP_COLUMNS)
    yield tensor(f"{prefix}sinks", (spec.heads,), _MODULE, layer, TP_ROWS)
    mixer = model.mixer(layer)
    if mixer is MixerKind.HEAVILY_COMPRESSED:
        yield from _compressor(spec.head_dim, spec.heavy_rate, 1, h, f"{prefix}compress_", layer)
    elif mixer is MixerKind.COMPRESSED_SPARSE:
        yield from _compressor(spec.head_dim, spec.sparse_rate, 2, h, f"{prefix}compress_", layer)
        yield from _block_indexer(spec, h, prefix, layer)


def _compressor(
    width: int, rate: int, overlap: int, h: int, prefix: str, layer: int
) -> Iterator[Param]:
    """Yield what makes one key of `rate` tokens: a gated sum over `overlap` blocks of them."""
    for name in ("kv", "gate"):
        yield tensor(f"{prefix}{name}.weight", (overlap * width, h), _MODULE, layer)
    yield tensor(f"{prefix}position", (rate, overlap * width), _MODULE, layer)
    yield tensor(f"{prefix}norm.weight", (width,), _MODULE, layer)


def _block_indexer(spec: AttentionSpec, h: int, prefix: str, layer: int) -> Iterator[Param]:
    if spec.indexer is None:
        raise ValueError(f"layer {layer} chooses blocks but the model has no indexer")
    heads, width = spec.indexer.heads, spec.indexer.head_dim
    yield from _compressor(width, spec.sparse_rate, 2, h, f"{prefix}indexer.", layer)
    q_up = (heads * width, spec.q_lora_rank)
    yield tensor(f"{prefix}indexer.q.weight", q_up, _MODULE, layer)
    yield tensor(f"{prefix}indexer.heads.weight", (heads, h), _MODULE, layer)


def mixer_macs(model: ModelSpec, layer: int) -> tuple[int, int]:
    """Return the multiply-adds that a token costs in the projections of a layer's mixer.

    The first number is sharded by TP, the second is whole on every TP rank.
    """
    mixer, spec, h = model.mixer(layer), model.attention, model.hidden_size
    if mixer is MixerKind.NONE:
        return 0, 0
    if mixer is MixerKind.RECURRENT:
        assert model.recurrent is not None  # what a recurrent layer needs
        return recurrent_macs(model.recurrent, h)
    if spec.kind is AttentionKind.COMPRESSED:
        sharded, replicated = compressed_macs(spec, h, mixer)
        return sharded, replicated + indexer_macs(model, layer)
    if spec.kind is AttentionKind.GQA:
        sharded, replicated = _grouped_query_macs(spec, h), 0
    else:
        sharded, replicated = _latent_macs(spec, h)
    return sharded, replicated + indexer_macs(model, layer)


def _grouped_query_macs(spec: AttentionSpec, h: int) -> int:
    gates = spec.gate_width
    return h * (spec.q_width + gates + 2 * spec.kv_width) + spec.out_width * h


def _latent_macs(spec: AttentionSpec, h: int) -> tuple[int, int]:
    kv_up = spec.kv_lora_rank * spec.heads * (spec.qk_nope_head_dim + spec.v_head_dim)
    down = h * (spec.kv_lora_rank + spec.qk_rope_head_dim)
    if not spec.q_lora_rank:
        return h * spec.q_width + kv_up + spec.out_width * h, down
    return spec.q_lora_rank * spec.q_width + kv_up + spec.out_width * h, down + h * spec.q_lora_rank


def indexer_macs(model: ModelSpec, layer: int) -> int:
    """Return the multiply-adds of a token in the projections of a layer's indexer.

    One that chooses among blocks has a compressor of its own.
    """
    spec, h, mixer = model.attention, model.hidden_size, model.mixer(layer)
    if spec.indexer is None or mixer not in (MixerKind.ATTENTION, MixerKind.COMPRESSED_SPARSE):
        return 0
    heads, width = spec.indexer.heads, spec.indexer.head_dim
    if mixer is MixerKind.COMPRESSED_SPARSE:
        # Four widths: keys and gates of the two blocks that its compressor overlaps.
        return spec.q_lora_rank * heads * width + h * (4 * width + heads)
    return (spec.q_lora_rank or h) * heads * width + h * (width + heads)


def scoring_flops(model: ModelSpec, layer: int, tokens: int, seq_len: int) -> int:
    """Return the forward FLOPs of the scores that a layer's indexer gives all pairs.

    They are pairs of tokens, or of a token and a block.
    """
    spec, mixer = model.attention.indexer, model.mixer(layer)
    if spec is None or mixer not in (MixerKind.ATTENTION, MixerKind.COMPRESSED_SPARSE):
        return 0
    if mixer is MixerKind.COMPRESSED_SPARSE:
        return tokens * spec.heads * spec.head_dim * (seq_len // model.attention.sparse_rate)
    return tokens * spec.heads * spec.head_dim * _twice_pairs(seq_len, 0) // seq_len


def compressed_macs(spec: AttentionSpec, h: int, mixer: MixerKind) -> tuple[int, int]:
    """Return `mixer_macs` of a layer of DeepSeek-V4, without those of its indexer."""
    sharded = spec.q_lora_rank * spec.q_width
    sharded += spec.out_width * spec.output_lora_rank
    sharded += spec.output_groups * spec.output_lora_rank * h
    replicated = h * (spec.q_lora_rank + spec.head_dim)
    if mixer is MixerKind.HEAVILY_COMPRESSED:
        # Keys and their gates: of one block here, of two overlapping ones below.
        replicated += 2 * h * spec.head_dim
    elif mixer is MixerKind.COMPRESSED_SPARSE:
        replicated += 4 * h * spec.head_dim
    return sharded, replicated


def recurrent_macs(spec: RecurrentSpec, h: int) -> tuple[int, int]:
    """Return `mixer_macs` of a recurrent layer."""
    wide = 2 * spec.key_width + 2 * spec.value_width
    out = spec.value_width * h
    if spec.kind is RecurrentKind.MAMBA:
        # Into the low rank of steps beside keys and queries, and out of it again.
        steps_keys = spec.step_rank + 2 * spec.key_width + spec.step_rank
        return 2 * spec.value_width * h + spec.value_width * steps_keys + out, 0
    if spec.kind is RecurrentKind.MAMBA2:
        return h * (wide + spec.heads) + out, 0
    if spec.kind is RecurrentKind.GATED_DELTA:
        return h * (wide + 2 * spec.heads) + out, 0
    low_ranks = 2 * spec.head_dim
    sharded = h * (spec.conv_width + spec.heads) + low_ranks * spec.value_width + out
    return sharded, h * low_ranks


def scan_flops(spec: RecurrentSpec, tokens: int) -> int:
    """Return the forward FLOPs of the convolution and the recurrence of some tokens.

    They are those that Megatron counts: 7 an element of the state for Mamba-2, whose convolution
    it leaves out; four products of the state with a vector for a delta net. For Mamba's first
    version they are the 9 an element of the state that VMamba counts of its selective scan.
    """
    if spec.kind is RecurrentKind.MAMBA:
        return tokens * spec.value_width * (2 * spec.short_conv + 9 * spec.key_dim)
    if spec.kind is RecurrentKind.MAMBA2:
        return tokens * 7 * spec.value_width * spec.key_dim
    convolution = spec.short_conv * spec.conv_width
    return 2 * tokens * (convolution + 4 * spec.heads * spec.key_dim * spec.head_dim)


def attention_flops(model: ModelSpec, layer: int, tokens: int, seq_len: int) -> int:
    """Return the forward FLOPs of scores and values over all heads.

    They are 2 heads (d_qk + d_v) per attended (query, key) pair. Full causal attention attends
    seq_len / 2 keys per query; with a window w a query attends its last w keys, of which its own
    counts half (rules.context_parallel). Sparse attention takes `top_k` keys of the latents that
    all heads share, and its indexer scores every pair.
    """
    spec, mixer = model.attention, model.mixer(layer)
    if mixer in (MixerKind.NONE, MixerKind.RECURRENT):
        return 0
    if spec.kind is AttentionKind.COMPRESSED:
        flops = tokens * _compressed_pair_flops(spec, mixer, seq_len) // seq_len
        return flops + scoring_flops(model, layer, tokens, seq_len)
    if spec.indexer is None:
        pairs = attended_pairs(model, layer, seq_len)
        return tokens * spec.heads * (spec.head_dim + spec.v_head_dim) * pairs // seq_len
    pairs = _twice_pairs(seq_len, spec.indexer.top_k)
    pair_width = spec.head_dim + spec.v_head_dim
    if spec.kv_lora_rank:
        # The published kernels score and sum latents, which all heads share, unexpanded.
        pair_width = 2 * spec.kv_lora_rank + spec.qk_rope_head_dim
    flops = tokens * spec.heads * pair_width * pairs // seq_len
    return flops + scoring_flops(model, layer, tokens, seq_len)


def window_flops(model: ModelSpec, tokens: int, seq_len: int) -> int:
    """Return the part of `attention_flops` of the window that every layer of DeepSeek-V4 has."""
    spec = model.attention
    pairs = _twice_pairs(seq_len, spec.sliding_window)
    return tokens * 2 * spec.heads * spec.head_dim * pairs // seq_len


def attended_pairs(model: ModelSpec, layer: int, seq_len: int) -> int:
    """Return twice the (query, key) pairs of one sequence, so that arithmetic stays in integers."""
    window = model.layer_window(layer)
    if not window or not model.attention.chunked:
        return _twice_pairs(seq_len, window)
    chunks, rest = divmod(seq_len, window)
    return chunks * window**2 + rest**2


def _twice_pairs(seq_len: int, window: int) -> int:
    if not seq_len:  # no block is as short as the sequence
        return 0
    return twice_attended_pairs((seq_len,), seq_len, (range(seq_len),), window)


def _compressed_pair_flops(spec: AttentionSpec, mixer: MixerKind, seq_len: int) -> int:
    """Return the FLOPs of the pairs of a sequence in DeepSeek-V4's attention.

    Every layer attends to its window; a heavily compressed one also to every block before the
    query, a compressed sparse one to the `top_k` blocks that its indexer scores highest.
    """
    pairs = _twice_pairs(seq_len, spec.sliding_window)
    if mixer is MixerKind.HEAVILY_COMPRESSED:
        # rate b^2 halves of a pair for b blocks (docs/formulas.md 13); a tail makes no key.
        pairs += spec.heavy_rate * (seq_len // spec.heavy_rate) ** 2
    elif mixer is MixerKind.COMPRESSED_SPARSE:
        assert spec.indexer is not None  # what chooses the blocks of such a layer
        blocks = seq_len // spec.sparse_rate
        pairs += spec.sparse_rate * _twice_pairs(blocks, spec.indexer.top_k)
    return 2 * spec.heads * spec.head_dim * pairs


def choice_source(model: ModelSpec, layer: int) -> int | None:
    """Return the layer that chooses for `layer`: itself, or the last before it that chooses.

    None where attention is to all keys.
    """
    if model.attention.indexer is None:
        return None
    if model.mixer(layer) is not MixerKind.SHARED_INDEX:
        return layer
    return max(i for i in range(layer) if model.mixer(i) is MixerKind.ATTENTION)


def is_choice_shared(model: ModelSpec, layer: int) -> bool:
    """Return whether the layer after `layer` takes its choice of keys."""
    return layer + 1 < model.layers and model.mixer(layer + 1) is MixerKind.SHARED_INDEX


def parted_choices(model: ModelSpec, layout: Layout) -> Iterator[tuple[int, int]]:
    """Yield each layer whose choice comes from another chunk of the pipeline, and its source."""
    if MixerKind.SHARED_INDEX not in model.mixers:
        return
    for chunk in pipeline_chunks(model, layout):
        for layer in chunk.layers:
            source = choice_source(model, layer)
            if source is not None and source not in chunk.layers:
                yield layer, source
