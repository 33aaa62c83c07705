"""Bytes that 8-bit and 4-bit recipes move to quantise the operands of products.

A linear layer quantises its input in forward and the gradient of its output in backward, each in
one pass that writes a copy for either direction in which products read it. Weights are quantised
once a step, for the first micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from moewright.cost.symbols import Symbols
from moewright.spec.model import AttentionKind, MixerKind
from moewright.spec.workload import Dtype, TensorScaling

_WIDE_BYTES = 2.0  # an operand before it is quantised
_TWO_8BIT_COPIES = 2.0
# With 8 bits of scale every 32 elements, which is as much as 32 bits every 128.
_BLOCK_COPIES = 2 * (1 + 1 / 32)
_NVFP4_COPIES = 2 * (1 / 2 + 1 / 16)  # with 8 bits of scale every 16


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
    if sym.dtype is Dtype.NVFP4:
        four_bit = 2 * _WIDE_BYTES + _NVFP4_COPIES
        return QuantiseBytes(forward=four_bit, backward=four_bit)
    if sym.dtype is Dtype.MXFP8:
        once = _WIDE_BYTES + _BLOCK_COPIES
        return QuantiseBytes(forward=once, backward=once)
    once = _WIDE_BYTES + _TWO_8BIT_COPIES
    if sym.workload.tensor_scaling is TensorScaling.DELAYED:
        return QuantiseBytes(forward=_TWO_8BIT_COPIES, backward=once)
    return QuantiseBytes(forward=_WIDE_BYTES + once, backward=_WIDE_BYTES + once)


def copies_bytes(sym: Symbols) -> float:
    """Return the bytes an element of the copies that products read, in either direction."""
    if not sym.is_low_precision:
        return _WIDE_BYTES
    if sym.dtype is Dtype.NVFP4:
        return _NVFP4_COPIES
    return _BLOCK_COPIES if sym.dtype is Dtype.MXFP8 else _TWO_8BIT_COPIES


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
    return quantise_bytes(sym).backward
