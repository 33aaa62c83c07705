"""Bytes that 8-bit and 4-bit recipes move to quantise the operands of products.

A linear layer quantises its input in forward and the gradient of its output in backward, each in
one pass that writes a copy for either direction in which products read it. A frozen weight has no
gradient, so that its input and the gradient of its output are read in one direction each. Weights
are quantised once a step, for the first micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from moewright.cost.symbols import Symbols
from moewright.spec.model import AttentionKind, MixerKind
from moewright.spec.workload import Dtype, TensorScaling

_WIDE_BYTES = 2.0  # an operand before it is quantised
_8BIT_COPY = 1.0
# With 8 bits of scale every 32 elements, which is as much as 32 bits every 128.
_BLOCK_COPY = 1 + 1 / 32
_NVFP4_COPY = 1 / 2 + 1 / 16  # with 8 bits of scale every 16


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantiseBytes:
    """Bytes an element that quantising moves: an input in forward, a gradient in backward."""

    forward: float
    backward: float


def quantise_bytes(sym: Symbols) -> QuantiseBytes:
    """Return the bytes an element of the recipe of a workload.

    A delayed scale is known beforehand, so norms and activations write 8-bit inputs themselves and
    gradients are read once. A current scale needs a pass over the tensor for its largest element;
    so does NVFP4. A scale a block is taken from what the pass holds anyway.
    """
    return _recipe_bytes(sym, copies=_count_copies(sym))


def _count_copies(sym: Symbols) -> int:
    """Return the copies of an operand: a product of the weight reads one, its gradient another."""
    return 1 if sym.is_frozen else 2


def _recipe_bytes(sym: Symbols, *, copies: int) -> QuantiseBytes:
    """Return the bytes an element where so many copies are written."""
    once = _WIDE_BYTES + copies * _copy_bytes(sym.dtype)
    if sym.dtype is Dtype.NVFP4:
        return QuantiseBytes(forward=_WIDE_BYTES + once, backward=_WIDE_BYTES + once)
    if sym.dtype is Dtype.MXFP8:
        return QuantiseBytes(forward=once, backward=once)
    if sym.workload.tensor_scaling is TensorScaling.DELAYED:
        return QuantiseBytes(forward=copies * _8BIT_COPY, backward=once)
    return QuantiseBytes(forward=_WIDE_BYTES + once, backward=_WIDE_BYTES + once)


def _copy_bytes(dtype: Dtype) -> float:
    """Return the bytes an element of a copy, with its scales."""
    if dtype is Dtype.NVFP4:
        return _NVFP4_COPY
    return _BLOCK_COPY if dtype is Dtype.MXFP8 else _8BIT_COPY


def copies_bytes(sym: Symbols) -> float:
    """Return the bytes an element of the copies that products read."""
    if not sym.is_low_precision:
        return _WIDE_BYTES
    return _count_copies(sym) * _copy_bytes(sym.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operands:
    """Elements that linear layers quantise: inputs in forward, output gradients in backward."""

    inputs: float
    gradients: float


def mixer_operands(sym: Symbols, mixer: MixerKind, out_width: float) -> Operands:
    """Return the operands of the projections into and out of a mixer, whose output is so wide.

    Ranks that share a sequence quantise their own part of what they gather. What goes into other
    mixers than attention is taken to be twice as wide as what comes out.
    """
    spec = sym.model.attention
    tp = sym.layout.tp
    hidden = sym.t * sym.model.hidden_size
    attended = sym.T * out_width / tp
    if spec.kind is AttentionKind.COMPRESSED and mixer is not MixerKind.RECURRENT:
        latents = sym.t * (spec.q_lora_rank + spec.head_dim)
        low = sym.T * spec.output_groups * spec.output_lora_rank / tp
        return Operands(
            inputs=hidden + sym.t * spec.q_lora_rank + low,
            gradients=latents + sym.T * spec.q_width / tp + hidden,
        )
    if mixer is MixerKind.RECURRENT:
        return Operands(inputs=hidden + attended, gradients=2 * attended + hidden)
    if spec.kind is AttentionKind.GQA:
        projected = sym.T * (spec.q_width + 2 * spec.kv_width) / tp
        return Operands(inputs=hidden + attended, gradients=projected + hidden)
    latents = sym.t * (spec.q_lora_rank + spec.kv_lora_rank)
    expanded = spec.q_width + spec.heads * (spec.qk_nope_head_dim + spec.v_head_dim)
    return Operands(
        inputs=hidden + latents + attended,
        gradients=latents + sym.T * expanded / tp + hidden,
    )


def mlp_operands(sym: Symbols, *, outside: float, between: float) -> Operands:
    """Return the operands of the two linear layers of an MLP.

    `outside` elements come in and go out, `between` lie between the two.
    """
    first_linears = sym.model.fc1_matrices
    return Operands(inputs=outside + between, gradients=first_linears * between + outside)


def weight_quantise_bytes(sym: Symbols) -> float:
    """Return the bytes an element of a weight that quantising it moves, once a step."""
    return _recipe_bytes(sym, copies=2).backward
