"""Rows of work of what mixes the tokens of a layer: its projections, its core and its passes.

Attention is priced by its FLOPs (cost/time/ops.py prices plain attention's projections). A
recurrence is bound by memory: the kernels of mamba_ssm and fla read and write their inputs, the
states at the ends of chunks and the matrix of each chunk a few times over, and their products are
small beside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moewright.cost.memory.buffers import score_count
from moewright.cost.symbols import Symbols
from moewright.cost.time.elementwise import RMS_NORM, ROPE, elementwise_row, kernel_rows
from moewright.cost.time.gemm_rows import gemm_row
from moewright.cost.time.op_time import OpRow
from moewright.rules.shapes import mixers
from moewright.spec.hardware import Op
from moewright.spec.layout import Recompute
from moewright.spec.model import (
    AttentionKind,
    AttentionSpec,
    MixerKind,
    ModelSpec,
    RecurrentKind,
    RecurrentSpec,
)
from moewright.spec.plan import TimePart
from moewright.spec.units import FP32_BYTES

# Passes over the states at chunk ends: made, carried on (a read and a write), and used.
_STATE_PASSES = 4
# Passes over the matrix of a chunk: made and used; a delta rule also inverts it.
_CHUNK_MATRIX_PASSES = 2
_DELTA_MATRIX_PASSES = 4
# Backward makes the states again and the gradients of every input (mamba_ssm, fla).
_SCAN_BACKWARD = 2.5
_NARROW_HEAD_DIM = 64  # the tables of attention rates are of heads of 128

_RowPair = tuple[OpRow, OpRow]


def mixer_products(sym: Symbols, layer: int) -> Iterator[OpRow]:
    """Yield the products of a mixer that is not plain or latent attention."""
    model, mixer = sym.model, sym.model.mixer(layer)
    if mixer is MixerKind.NONE:
        return
    if mixer is MixerKind.RECURRENT:
        assert model.recurrent is not None  # what a recurrent layer needs
        yield from _recurrent_products(sym, model.recurrent)
    elif model.attention.kind is AttentionKind.COMPRESSED:
        yield from _compressed_products(sym, layer)


def _recurrent_products(sym: Symbols, spec: RecurrentSpec) -> Iterator[OpRow]:
    h, tp, T = sym.model.hidden_size, sym.layout.tp, sym.T
    out = spec.value_width / tp
    sharded, replicated = mixers.recurrent_macs(spec, h)
    # Multiply-adds over h are columns: those of the first product, less those of the last.
    wide = sharded / h / tp - out
    yield gemm_row("mixer.in", sym, T, wide, h, TimePart.DENSE)
    if replicated:
        yield gemm_row("mixer.low_rank", sym, sym.t, replicated / h, h, TimePart.DENSE)
    yield gemm_row("mixer.out", sym, T, h, out, TimePart.DENSE)


def _compressed_products(sym: Symbols, layer: int) -> Iterator[OpRow]:
    spec, h, tp = sym.model.attention, sym.model.hidden_size, sym.layout.tp
    rank, dense = spec.q_lora_rank, TimePart.DENSE
    yield gemm_row("attention.q_down", sym, sym.t, rank + spec.head_dim, h, dense)
    yield gemm_row("attention.q_up", sym, sym.T, spec.q_width / tp, rank, dense)
    low = spec.output_lora_rank
    yield _widen(gemm_row("attention.o_down", sym, sym.T, low, spec.out_width / tp, dense), sym)
    groups = spec.output_groups * low / tp
    yield gemm_row("attention.o", sym, sym.T, h, groups, dense)
    _, replicated = mixers.mixer_macs(sym.model, layer)
    compressor = replicated / h - rank - spec.head_dim
    if compressor:
        yield _widen(gemm_row("attention.compressor", sym, sym.t, compressor, h, dense), sym)


def _widen(row: OpRow, sym: Symbols) -> OpRow:
    """Return a product that is of 16 bits or more in every precision."""
    return replace(row, dtype=sym.wide_dtype)


def indexer_products(sym: Symbols, layer: int) -> Iterator[OpRow]:
    """Yield the products of the scorer of sparse attention over latents."""
    spec, h = sym.model.attention, sym.model.hidden_size
    if spec.indexer is None or sym.model.mixer(layer) is not MixerKind.ATTENTION:
        return
    heads, width = spec.indexer.heads, spec.indexer.head_dim
    q_in = spec.q_lora_rank or h
    yield gemm_row("indexer.q", sym, sym.t, heads * width, q_in, TimePart.DENSE)
    yield gemm_row("indexer.k", sym, sym.t, width + heads, h, TimePart.DENSE)


def mixer_core(sym: Symbols, layer: int) -> tuple[_RowPair, ...]:
    """Return the rows of attention or of the recurrence, forward and backward; () for none."""
    mixer = sym.model.mixer(layer)
    if mixer is MixerKind.NONE:
        return ()
    if mixer is MixerKind.RECURRENT:
        assert sym.model.recurrent is not None  # what a recurrent layer needs
        return tuple(_scan_rows(sym, sym.model.recurrent))
    core_flops = mixers.attention_flops(sym.model, layer, sym.T, sym.seq_len) / sym.layout.tp
    if sym.workload.trainer.attention_backend.keeps_scores:
        return tuple(_whole_score_rows(sym, core_flops))
    # Documents shorten what reaches to their beginning, and no window.
    near = core_flops
    if sym.model.attention.kind is AttentionKind.COMPRESSED:
        near = mixers.window_flops(sym.model, sym.T, sym.seq_len) / sym.layout.tp
    elif not sym.model.layer_window(layer):
        near = 0
    core_flops = near + (core_flops - near) * sym.attended_share
    return (_attention_rows(sym, core_flops),)


def _whole_score_rows(sym: Symbols, core_flops: float) -> Iterator[_RowPair]:
    """Yield attention that makes whole matrices of scores: two products, and passes over scores.

    The products do not skip what a mask hides. Forward writes the scores, reads and writes them in
    the softmax and reads them again; backward reads and writes their gradients beside them.
    """
    choices = (Recompute.FULL, Recompute.CORE_ATTN)
    part = TimePart.ATTENTION
    products = OpRow(
        name="attention.scores",
        part=part,
        op=Op.GEMM,
        amount=2 * core_flops,
        x=2 * core_flops,
        dtype=sym.wide_dtype,
        recomputed_by=choices,
    )
    yield products, replace(products, amount=4 * core_flops, recomputed_by=())
    nbytes = sym.c * score_count(sym)
    forward = elementwise_row("attention.softmax", sym, 4 * nbytes, *choices)
    backward = elementwise_row("attention.softmax", sym, 7 * nbytes)
    yield replace(forward, part=part), replace(backward, part=part)


def _attention_rows(sym: Symbols, core_flops: float) -> _RowPair:
    """Return the forward and the backward row of flash attention."""
    scale_constant = ""
    if sym.model.attention.head_dim <= _NARROW_HEAD_DIM:
        scale_constant = "narrow_head_time_scale"
    if sym.model.attention.sinks:
        scale_constant = "sink_attention_time_scale"
    forward = OpRow(
        name="attention.core",
        part=TimePart.ATTENTION,
        op=Op.ATTENTION,
        amount=core_flops,
        x=sym.seq_len,
        dtype=sym.dtype,
        recomputed_by=(Recompute.FULL, Recompute.CORE_ATTN),
        scale_constant=scale_constant,
    )
    backward = replace(forward, op=Op.ATTENTION_BACKWARD, amount=2 * core_flops, recomputed_by=())
    return forward, backward


def _scan_rows(sym: Symbols, spec: RecurrentSpec) -> Iterator[_RowPair]:
    """Yield the convolution, the recurrence and the gated norm of a recurrent mixer."""
    c, tokens = sym.c, sym.T / sym.layout.tp
    yield _pass_rows("mixer.conv", sym, 2 * c * spec.conv_width * tokens)
    yield _pass_rows("mixer.scan", sym, scan_bytes(spec, c) * tokens)
    # The norm reads the gate beside its input.
    yield kernel_rows(RMS_NORM, "mixer.norm", sym, 1.5 * tokens * spec.value_width)


def scan_bytes(spec: RecurrentSpec, c: int) -> float:
    """Return the bytes that the forward of a recurrence moves a token, over all heads."""
    states = spec.heads * spec.head_dim * spec.key_dim / spec.chunk_size
    state_bytes = _STATE_PASSES * FP32_BYTES * states
    value = spec.value_width
    if spec.kind is RecurrentKind.MAMBA:
        # Values, steps and gate read, the output written; keys and queries are small.
        return c * (4 * value + 2 * spec.key_width) + state_bytes
    if spec.kind is RecurrentKind.MAMBA2:
        matrices = spec.key_heads * spec.chunk_size
        matrix_bytes = _CHUNK_MATRIX_PASSES * FP32_BYTES * matrices
        # Values twice, keys and queries twice, and the output.
        return c * (3 * value + 4 * spec.key_width) + state_bytes + matrix_bytes
    matrices = spec.heads * spec.chunk_size
    matrix_bytes = _DELTA_MATRIX_PASSES * FP32_BYTES * matrices
    keys = spec.heads * spec.key_dim
    # Queries and keys normalised (a read and a write of each) and read twice; the two products of a
    # chunk's inverse written and read; values twice, and the output.
    return c * (8 * keys + 2 * (keys + value) + 3 * value) + state_bytes + matrix_bytes


def _pass_rows(name: str, sym: Symbols, moved_bytes: float) -> _RowPair:
    part = TimePart.ATTENTION
    row = elementwise_row(name, sym, moved_bytes, part=part)
    forward = replace(row, scale_constant="scan_time_scale")
    amount = _SCAN_BACKWARD * moved_bytes
    return forward, replace(forward, amount=amount, x=amount, recomputed_by=())


def mixer_passes(sym: Symbols, layer: int) -> Iterator[_RowPair]:
    """Yield the elementwise kernels of DeepSeek-V4's attention, and of residual streams."""
    model = sym.model
    mixer = model.mixer(layer)
    is_compressed = model.attention.kind is AttentionKind.COMPRESSED
    if is_compressed and mixer is not MixerKind.NONE:
        spec, tp = model.attention, sym.layout.tp
        latents = sym.t * (spec.q_lora_rank + spec.head_dim) + sym.T * spec.q_width / tp
        yield kernel_rows(RMS_NORM, "latent_norms", sym, latents)
        # The output turns back, so that what it holds of positions is relative.
        turned = sym.T * (spec.q_width + spec.out_width) / tp
        yield kernel_rows(ROPE, "rope", sym, turned)
    if model.residual_streams > 1:
        yield from _stream_rows(sym, layer)


def _stream_rows(sym: Symbols, layer: int) -> Iterator[_RowPair]:
    """Yield the mixes of residual streams, each of which is read three times and written once."""
    streams = sym.model.residual_streams
    blocks = count_blocks(sym.model, layer)
    elements = blocks * sym.t * sym.model.hidden_size
    moved_bytes = sym.c * elements * (4 * streams + 2)
    forward = elementwise_row("streams", sym, moved_bytes)
    yield forward, elementwise_row("streams", sym, 2 * moved_bytes)


def count_blocks(model: ModelSpec, layer: int) -> int:
    """Count the blocks of a layer, each with a norm before and a sum after it."""
    return (model.mixer(layer) is not MixerKind.NONE) + model.has_mlp(layer)


def mixer_width(model: ModelSpec, layer: int) -> tuple[int, int]:
    """Return the width of what a mixer's first products make, and of what its last one takes.

    Latent and compressed attention count what their heads take.
    """
    mixer, spec = model.mixer(layer), model.attention
    if mixer is MixerKind.NONE:
        return 0, 0
    if mixer is MixerKind.RECURRENT:
        assert model.recurrent is not None  # what a recurrent layer needs
        recurrent = model.recurrent
        wide = recurrent.conv_width + recurrent.value_width + recurrent.heads
        return wide, recurrent.value_width
    return _attention_width(spec), spec.out_width


def _attention_width(spec: AttentionSpec) -> int:
    if spec.kind is AttentionKind.MLA:
        return spec.heads * (2 * spec.head_dim + spec.v_head_dim)
    gates = spec.gate_width
    return spec.q_width + gates + 2 * spec.kv_width
