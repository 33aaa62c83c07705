"""The tensors that mixers beside plain and latent attention save for backward.

Sources: mamba_ssm's selective scan, whose inputs and output are kept beside a state of fp32 at
every 2,048th token, with transformers' Jamba around it; mamba_ssm's fused scan of Mamba-2, which
keeps the projection's output and its own and makes the states again; fla's chunked delta rule,
which keeps its inputs and the matrix of each chunk (our engine makes both again:
engine.model.delta_net); Megatron-LM's sparse attention over latents; DeepSeek-V4's compressors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moewright.rules.saved.saved_tensor import KeptFormat, SavedTensor, saved_tensor
from moewright.spec.layout import Recompute
from moewright.spec.ledger import Module
from moewright.spec.model import (
    AttentionSpec,
    MixerKind,
    ModelSpec,
    RecurrentKind,
    RecurrentSpec,
)
from moewright.spec.units import FP32_BYTES, INT32_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerSymbols:
    """Bytes `c` of an activation, T tokens on a TP group and t on a rank, degrees of TP and CP."""

    c: int
    T: int
    t: int
    tp: int
    cp: int
    seq_len: int


def recurrent_saved(
    spec: RecurrentSpec, symbols: MixerSymbols, *, is_fused_stack: bool
) -> Iterator[SavedTensor]:
    """Yield what a recurrent mixer saves behind its input norm.

    A fused stack is one of other trainers, by the kernels' own autograd functions.
    """
    c, T, tp = symbols.c, symbols.T, symbols.tp
    value, conv = spec.value_width, spec.conv_width
    if spec.kind is RecurrentKind.MAMBA:
        small = spec.step_rank + 2 * spec.key_dim
        yield _row("mixer_in", 2 * c * T * value // tp)
        yield _row("conv_out", c * T * value // tp)
        yield _row("steps_keys", 2 * c * T * small)
        # The norms of steps, keys and queries (rules.shapes.mixers).
        yield _row("mixer_norm_rstd", 3 * FP32_BYTES * T, KeptFormat.FP32)
        yield _row("steps", c * T * value // tp)
        chunks = -(-T // spec.chunk_size)
        # Two numbers an element: mamba_ssm keeps the running product of decays beside the state.
        state_bytes = 2 * FP32_BYTES * chunks * value * spec.key_dim // tp
        yield _row("states", state_bytes, KeptFormat.FP32)
        yield _row("scan_out", c * T * value // tp)
        yield _row("mixer_out", c * T * value // tp)
        return
    if spec.kind is RecurrentKind.MAMBA2:
        yield _row("mixer_in", c * T * (conv + value + spec.heads) // tp)
        yield _row("scan_out", c * T * value // tp)
        yield _row("mixer_norm_rstd", FP32_BYTES * T * spec.key_heads // tp, KeptFormat.FP32)
        yield _row("mixer_out", c * T * value // tp)
        return
    keys = spec.heads * spec.key_dim  # queries and keys are repeated for the heads of values
    rates = spec.heads * (1 if spec.kind is RecurrentKind.GATED_DELTA else spec.key_dim)
    yield _row("mixer_in", c * T * (conv + value) // tp)
    yield _row("conv_out", c * T * conv // tp)
    yield _row("rates", FP32_BYTES * T * (rates + spec.heads) // tp, KeptFormat.FP32)
    if is_fused_stack:
        yield _row("scan_in", c * T * (2 * keys + value) // tp)
        yield _row("chunk_matrix", c * T * spec.heads * spec.chunk_size // tp)
    yield _row("scan_out", c * T * value // tp)
    yield _row("mixer_norm_rstd", FP32_BYTES * T * spec.heads // tp, KeptFormat.FP32)
    yield _row("mixer_out", c * T * value // tp)


def compressed_saved(
    model: ModelSpec, mixer: MixerKind, symbols: MixerSymbols, *, trains_indexer: bool
) -> Iterator[SavedTensor]:
    """Yield what DeepSeek-V4's attention saves behind its input norm.

    Queries are kept before their norm and after their rotation. A compressor keeps its projections
    of the rank's own tokens, and its keys before their norm and after their rotation. CP ranks hold
    the keys, the blocks and the choice of all tokens, and the output once more: attention's own is
    of more tokens and fewer heads than the projection takes.
    """
    spec, c, T, t, tp = model.attention, symbols.c, symbols.T, symbols.t, symbols.tp
    yield _row("q_down", c * t * spec.q_lora_rank)
    yield _row("q_latent", c * t * spec.q_lora_rank)
    yield _row("latent_rstd", 2 * FP32_BYTES * t, KeptFormat.FP32)
    yield _row("kv_down", c * t * spec.head_dim)
    yield _row("qk_norm_rstd", FP32_BYTES * T * spec.heads // tp, KeptFormat.FP32)
    # One head of keys, which are its values too, of the tokens of all CP ranks.
    yield _row("qkv", c * T * (2 * spec.q_width // tp + symbols.cp * spec.head_dim))
    out_bytes = c * T * spec.out_width // tp
    yield _row("attention_out", out_bytes)
    if symbols.cp > 1:
        yield saved_tensor(Module.ATTENTION, "attention_out", out_bytes, Recompute.CORE_ATTN)
    yield _row("o_down", c * T * spec.output_groups * spec.output_lora_rank // tp)
    if mixer is MixerKind.HEAVILY_COMPRESSED:
        yield from _compressor_saved("", symbols, spec.head_dim, spec.heavy_rate, overlap=1)
    elif mixer is MixerKind.COMPRESSED_SPARSE:
        yield from _compressor_saved("", symbols, spec.head_dim, spec.sparse_rate, overlap=2)
        yield from _block_indexer_saved(spec, symbols, is_trained=trains_indexer)


def _compressor_saved(
    prefix: str, symbols: MixerSymbols, width: int, rate: int, *, overlap: int
) -> Iterator[SavedTensor]:
    # By sequence, as a tail shorter than a block makes no key.
    blocks = symbols.T * symbols.cp // symbols.seq_len * (symbols.seq_len // rate)
    yield _row(f"{prefix}compressor", 2 * overlap * symbols.c * symbols.t * width)
    yield _row(f"{prefix}blocks", blocks * 2 * symbols.c * width)
    yield _row(f"{prefix}blocks_rstd", blocks * FP32_BYTES, KeptFormat.FP32)


def _block_indexer_saved(
    spec: AttentionSpec, symbols: MixerSymbols, *, is_trained: bool
) -> Iterator[SavedTensor]:
    """Yield what a chooser of blocks saves: its choice, and to train what its scores are of."""
    assert spec.indexer is not None  # what chooses the blocks of such a layer
    heads, width = spec.indexer.heads, spec.indexer.head_dim
    chosen_bytes = INT32_BYTES * min(spec.indexer.top_k, symbols.seq_len // spec.sparse_rate)
    yield _row("index_chosen", chosen_bytes * symbols.T * symbols.cp, KeptFormat.INT32)
    if not is_trained:
        return
    yield from _compressor_saved("index_", symbols, width, spec.sparse_rate, overlap=2)
    yield _row("index_queries", symbols.c * symbols.t * heads * width)
    yield _row("index_heads", FP32_BYTES * symbols.t * heads, KeptFormat.FP32)
    # By the score of each chosen block, and the choice as for tokens.
    yield from _slopes_saved(chosen_bytes * symbols.t, symbols)


def indexer_saved(
    spec: AttentionSpec,
    symbols: MixerSymbols,
    *,
    is_trained: bool,
    is_fused_stack: bool,
    is_shared: bool = False,
) -> Iterator[SavedTensor]:
    """Yield what a scorer saves: its queries and keys, its heads' weights, and the chosen keys.

    Without an objective it saves the choice alone. Our attention takes the choice as an input, for
    all tokens of the TP group, and so may other layers; core attention of Megatron-LM has the
    scorer inside. CP ranks hold the keys and the choice of all tokens.
    """
    if spec.indexer is None:
        return
    t, heads, width = symbols.t, spec.indexer.heads, spec.indexer.head_dim
    all_tokens = symbols.T * symbols.cp
    chosen_bytes = INT32_BYTES * min(spec.indexer.top_k, symbols.seq_len)
    if is_fused_stack:
        if is_trained:
            yield _row("index_qk", symbols.c * t * (heads * width + width + heads))
        core = Recompute.CORE_ATTN
        yield saved_tensor(
            Module.ATTENTION, "index_chosen", chosen_bytes * t, core, kept_as=KeptFormat.INT32
        )
    else:
        if is_trained:
            # The keys before their norm are of this rank's tokens; those that it scores are of all.
            yield _row("index_qk", symbols.c * (t * (heads * width + width) + all_tokens * width))
            yield _row("index_heads", FP32_BYTES * t * heads, KeptFormat.FP32)
            yield _row("index_norm_rstd", 2 * FP32_BYTES * t, KeptFormat.FP32)
            yield from _slopes_saved(chosen_bytes * t, symbols)
        full = not is_shared
        all_bytes = chosen_bytes * all_tokens
        yield saved_tensor(
            Module.ATTENTION, "index_chosen", all_bytes, full=full, kept_as=KeptFormat.INT32
        )


def _slopes_saved(chosen_bytes: int, symbols: MixerSymbols) -> Iterator[SavedTensor]:
    """Yield the slope of an indexer's objective by each score, in 4 bytes, as a choice has.

    Beside it is the choice of this rank's tokens, which CP ranks hold in another order than that of
    all.
    """
    yield _row("index_slopes", chosen_bytes, KeptFormat.FP32)
    if symbols.cp > 1:
        yield _row("index_own_choice", chosen_bytes, KeptFormat.INT32)


def gate_saved(spec: AttentionSpec, symbols: MixerSymbols) -> Iterator[SavedTensor]:
    """Yield the gate of attention's output, and the gated output, which its projection takes."""
    width = spec.gate_width
    for name in ("output_gate", "gated_out"):
        yield _row(name, symbols.c * symbols.T * width // symbols.tp)


def _row(name: str, size_bytes: int, kept_as: KeptFormat = KeptFormat.ACTIVATION) -> SavedTensor:
    return saved_tensor(Module.ATTENTION, name, size_bytes, kept_as=kept_as)
