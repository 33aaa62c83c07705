"""The parameters of mixers beside plain and latent attention, each name with its shape.

Sources: transformers' jamba, nemotron_h, qwen3_next, kimi_linear, deepseek_v32 and deepseek_v4; the
names are moewright's own. Heads are cut over tensor parallelism, what all heads read is whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from moewright.rules.shapes.param import TP_COLUMNS, TP_ROWS, Param, tensor
from moewright.spec.ledger import Module
from moewright.spec.model import (
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
