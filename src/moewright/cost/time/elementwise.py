"""Elementwise work of one layer, in bytes read and written.

CUDA stacks fuse a chain into one kernel: it reads its inputs and writes its outputs. The engine on
CPU runs one pass an operation, mostly in fp32: its bytes are counted operation by operation from
what each function does (widen c + 4, multiply in place 8, multiply two 12, narrow 4 + c, and so
on), and an exponential as EXP_BYTES. With fused_kernels=plain it does so on CUDA too, exponentials
hidden behind the bytes, for the chains that are kernels of its own: norms, rotation, gated
activations, copies and sums of rows, the router and cross-entropy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moewright.cost.symbols import Symbols
from moewright.cost.time.op_time import OpRow
from moewright.cost.time.quantise import (
    Operands,
    copies_bytes,
    mixer_operands,
    mlp_operands,
    quantise_bytes,
)
from moewright.rules.adapters import adapted_widths
from moewright.rules.packed_base import packed_bytes_per_element, packed_elements
from moewright.rules.routing import counts_copies
from moewright.spec.hardware import Op
from moewright.spec.layout import Recompute
from moewright.spec.ledger import Module
from moewright.spec.model import AttentionKind, MixerKind, NormPlacement, QkNorm
from moewright.spec.plan import TimePart
from moewright.spec.workload import ExpertKernels, FusedKernels, Fusion

# Bytes of the backward over those of the forward, for fused kernels (docs/findings.md 2).
_FUSED_BACKWARD = 1.8


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementwiseKernel:
    """A kernel with its bytes per element, forward and backward, fused and eager.

    Bytes are (constant, multiple of c). `fused` are those of the fused forward, and
    `fused_backward` is the ratio of backward to forward. `forward` and `backward` are those of all
    eager passes together, one pass an operation; `calls` is the number of these passes, from which
    the size of one follows, and `exps` the exponentials per element.
    """

    fused: tuple[float, float]
    forward: tuple[float, float]
    backward: tuple[float, float]
    calls: tuple[int, int]
    exps: tuple[int, int] = (0, 0)
    fused_backward: float = _FUSED_BACKWARD


# The cost of an element's exponential on a CPU core, in bytes that it could move instead: compared
# with passes at 45 GB/s softmax and its logarithm take 0.5-0.8 ns an element more, silu hardly any
# (each function alone, 256 columns, AVX-512).
EXP_BYTES = 20

# Per element of the tensor that each row of `layer_elementwise_rows` names.
RMS_NORM = ElementwiseKernel(fused=(0, 2), forward=(24, 4), backward=(80, 3), calls=(6, 11))
RESIDUAL_ADD = ElementwiseKernel(fused=(0, 3), forward=(0, 3), backward=(0, 3), calls=(1, 1))
ROPE = ElementwiseKernel(fused=(0, 3), forward=(28, 2), backward=(28, 2), calls=(7, 7))
GATED_ACTIVATION = ElementwiseKernel(
    fused=(0, 3), forward=(36, 3), backward=(88, 5), calls=(5, 11), exps=(1, 1)
)
UNGATED_ACTIVATION = ElementwiseKernel(
    fused=(0, 2), forward=(20, 2), backward=(60, 3), calls=(4, 8), exps=(1, 1)
)
# Torch's own operations in 16 bits: activate the gate, multiply by up, then by the router's weight;
# gpt-oss adds biases before, clamps both halves, scales the gate and adds 1 to up.
_UNFUSED_READS_AND_WRITES = 8
_UNFUSED_CLAMPED_READS_AND_WRITES = 22
_UNFUSED_BACKWARD = 2.0
# Fused copies of rows reach 0.75 of the bandwidth of other kernels, 0.50 of nominal against 0.67
# (SimuMax 1.2, permutes on B200). A permute writes its rows and reads the tokens that they are of,
# an unpermute the other way round; PERMUTE and UNPERMUTE are of the rows alone.
_COPY_SHARE = 0.75
PERMUTE = ElementwiseKernel(
    fused=(0, 1 / _COPY_SHARE), forward=(0, 2), backward=(0, 3), calls=(1, 2), fused_backward=1.0
)
UNPERMUTE = ElementwiseKernel(
    fused=(0, 1 / _COPY_SHARE), forward=(0, 3), backward=(0, 2), calls=(2, 1), fused_backward=1.0
)
SORT = ElementwiseKernel(
    fused=(0, 2 / _COPY_SHARE), forward=(0, 2), backward=(0, 2), calls=(1, 1), fused_backward=1.0
)
# Router scores: softmax, top-k (a partial sort: counted as eight passes), counts and auxiliary
# loss, all in fp32.
ROUTE = ElementwiseKernel(
    fused=(8, 0), forward=(72, 0), backward=(48, 0), calls=(6, 6), exps=(1, 0)
)
# Logits: widen, log-softmax; backward: widen, softmax, scale, narrow. The fused forward reads them
# for the sums, reads them again and writes the gradient in their place; its backward scales it.
CROSS_ENTROPY = ElementwiseKernel(
    fused=(0, 3), forward=(12, 1), backward=(24, 2), calls=(2, 4), exps=(1, 1), fused_backward=2 / 3
)

# Reads and writes of an input and of an output element of a linear beside which an adapter runs,
# forward and backward. Forward: the first product reads the input; the second writes the output,
# which is scaled and added to the linear's. Backward: the gradient is scaled and read by two
# products; the gradient of the input is written and added, and the input read for that of weights.
_ADAPTER_PASSES = ((1, 6), (5, 4))

# The kernels that the engine has fused ones of its own for (docs/adr/0019).
_ENGINE_KERNELS = (
    RMS_NORM,
    ROPE,
    GATED_ACTIVATION,
    PERMUTE,
    UNPERMUTE,
    ROUTE,
    CROSS_ENTROPY,
)


def _is_fused(kernel: ElementwiseKernel, sym: Symbols) -> bool:
    is_plain = sym.workload.fused_kernels is FusedKernels.PLAIN and kernel in _ENGINE_KERNELS
    return sym.is_fused and not is_plain


def kernel_rows(
    kernel: ElementwiseKernel,
    name: str,
    sym: Symbols,
    elements: float,
    *recomputed_by: Recompute,
    part: TimePart = TimePart.ELEMENTWISE,
    blocks: float = 1.0,
) -> tuple[OpRow, OpRow]:
    """Return the forward and the backward row of a kernel over so many elements.

    An eager kernel processes them in `blocks` blocks, each with calls of its own.
    """
    if _is_fused(kernel, sym):
        constant, factor = kernel.fused
        forward_bytes = (constant + factor * sym.c) * elements
        backward_bytes = forward_bytes * kernel.fused_backward
        forward = elementwise_row(name, sym, forward_bytes, *recomputed_by, part=part)
        return forward, elementwise_row(name, sym, backward_bytes, part=part)
    exp_bytes = 0 if sym.is_fused else EXP_BYTES
    rows = []
    for (constant, factor), calls, exps, choices in (
        (kernel.forward, kernel.calls[0], kernel.exps[0], recomputed_by),
        (kernel.backward, kernel.calls[1], kernel.exps[1], ()),
    ):
        moved_bytes = (constant + factor * sym.c) * elements
        row = elementwise_row(name, sym, moved_bytes, *choices, part=part, calls=calls * blocks)
        # Exponentials take time and move nothing: x, the size of a pass that decides its rate,
        # stays.
        rows.append(replace(row, amount=row.amount + exp_bytes * exps * elements))
    return rows[0], rows[1]


def elementwise_row(
    name: str,
    sym: Symbols,
    moved_bytes: float,
    *recomputed_by: Recompute,
    part: TimePart = TimePart.ELEMENTWISE,
    calls: float = 1,
) -> OpRow:
    """Return a row that moves so many bytes in `calls` passes."""
    return OpRow(
        name=name,
        part=part,
        op=Op.ELEMENTWISE,
        amount=moved_bytes,
        x=moved_bytes / calls,
        dtype=sym.dtype,
        recomputed_by=(Recompute.FULL, *recomputed_by),
    )


def layer_elementwise_rows(
    sym: Symbols, layer: int, *, moe: bool, blocks: int
) -> Iterator[tuple[OpRow, OpRow]]:
    """Yield the forward and the backward row of each elementwise kernel of one layer.

    `blocks` is the number of its blocks, each with a norm and a sum: a mixer, an MLP or experts.
    """
    model, h = sym.model, sym.model.hidden_size
    norms = blocks * (2 if model.norm_placement is NormPlacement.AROUND else 1)
    yield kernel_rows(RMS_NORM, "norms", sym, norms * sym.t * h, Recompute.LAYERNORM)
    if model.residual_streams == 1:
        yield kernel_rows(RESIDUAL_ADD, "residuals", sym, blocks * sym.t * h)
    yield from _mixer_rows(sym, layer)
    if moe and model.moe is not None:
        yield from _moe_rows(sym)
        return
    if not model.has_mlp(layer):
        return
    activations = sym.T * model.dense_ffn_size / sym.layout.tp
    if sym.is_low_precision:
        operands = mlp_operands(sym, outside=sym.t * h, between=activations)
        yield _quantise_rows("mlp.quantise", sym, operands)
    yield _activation_rows("mlp.activation", sym, activations, Recompute.MLP)


def _mixer_rows(sym: Symbols, layer: int) -> Iterator[tuple[OpRow, OpRow]]:
    """Yield the kernels of plain and latent attention, and the quantisation of any mixer."""
    model, mixer = sym.model, sym.model.mixer(layer)
    out_width = model.attention.out_width
    if mixer is MixerKind.NONE:
        return
    if mixer is MixerKind.RECURRENT and model.recurrent is not None:
        out_width = model.recurrent.value_width
    elif model.attention.kind is not AttentionKind.COMPRESSED:
        yield from _attention_rows(sym)
    if sym.is_low_precision and sym.product_dtype(_mixer_product(mixer)).is_narrow:
        yield _quantise_rows("quantise", sym, mixer_operands(sym, mixer, out_width))


def _mixer_product(mixer: MixerKind) -> str:
    """Return how the rows of a mixer's products begin."""
    return "mixer" if mixer is MixerKind.RECURRENT else "attention"


def _attention_rows(sym: Symbols) -> Iterator[tuple[OpRow, OpRow]]:
    spec = sym.model.attention
    tp = sym.layout.tp
    if spec.kind is AttentionKind.MLA:
        latents = sym.t * (spec.q_lora_rank + spec.kv_lora_rank)
        yield kernel_rows(RMS_NORM, "latent_norms", sym, latents)
        widths = spec.heads * (2 * spec.head_dim + spec.v_head_dim)
        yield kernel_rows(ROPE, "rope", sym, sym.T * widths / tp, Recompute.MLA_UP_PROJ)
    else:
        # Fused stacks split and lay out the values in the same three passes.
        rotated_kv = 2 if _is_fused(ROPE, sym) else 1
        widths = spec.q_width + rotated_kv * spec.kv_width
        yield kernel_rows(ROPE, "rope", sym, sym.T * widths / tp)
    if spec.qk_norm is not QkNorm.NONE:
        elements = sym.T * (spec.q_width + spec.kv_width) / tp
        if _is_fused(RMS_NORM, sym):
            elements /= 2  # fused into the rotation, the norm adds one pass
        yield kernel_rows(RMS_NORM, "qk_norm", sym, elements)
    if spec.output_gate:
        yield kernel_rows(GATED_ACTIVATION, "attention.gate", sym, sym.T * spec.q_width / tp)


def _moe_rows(sym: Symbols) -> Iterator[tuple[OpRow, OpRow]]:
    spec = sym.model.moe
    layout = sym.layout
    assert spec is not None
    if spec.shared_ffn_size:
        choices = (Recompute.SHARED_EXPERTS, Recompute.MOE)
        activations = sym.T * spec.shared_ffn_size / layout.tp
        if sym.is_low_precision:
            hidden = sym.t * sym.model.hidden_size
            operands = mlp_operands(sym, outside=hidden, between=activations)
            yield _quantise_rows("shared.quantise", sym, operands, *choices)
        yield _activation_rows("shared.activation", sym, activations, *choices)
    yield kernel_rows(ROUTE, "routing", sym, sym.t * spec.experts, Recompute.MOE)
    tokens = sym.t * sym.model.expert_width
    sent = tokens * spec.router.top_k
    copied = sent + tokens if _is_fused(PERMUTE, sym) else sent
    yield kernel_rows(PERMUTE, "permute", sym, copied, Recompute.MOE)
    yield kernel_rows(UNPERMUTE, "unpermute", sym, copied, Recompute.MOE)
    yield from expert_elementwise_rows(sym)


def expert_elementwise_rows(sym: Symbols) -> Iterator[tuple[OpRow, OpRow]]:
    """Yield the rows of what experts do with the token rows that reach them."""
    spec = sym.model.moe
    h = sym.model.expert_width
    layout = sym.layout
    assert spec is not None
    width = spec.ffn_size / layout.etp
    is_fused = sym.workload.trainer.expert_kernels is ExpertKernels.FUSED
    between = 0 if is_fused else sym.R * width
    if sym.is_low_precision:
        operands = mlp_operands(sym, outside=sym.R * h, between=between)
        yield _quantise_rows("experts.quantise", sym, operands, Recompute.MOE)
    if is_fused:
        yield _epilogue_rows("experts.epilogue", sym, sym.R * width, Recompute.MOE)
    else:
        choices = (Recompute.MOE_ACT, Recompute.MOE)
        yield _activation_rows("experts.activation", sym, between, *choices)
    if sym.is_frozen and sym.workload.fine_tuning.lora_experts:
        firsts = sym.model.fc1_matrices
        inputs = firsts * h + width
        outputs = firsts * width + h
        yield _adapter_rows("experts.adapters", sym, sym.R, inputs, outputs, Recompute.MOE)
    # Layers with experts are alike: the first stands for all.
    layer = sym.model.moe_layers.index(True)
    yield from _unpack_rows("experts.unpack_weights", sym, layer, of_experts=True)
    # A plain all-to-all hands over rows ordered by source: on arrival they are sorted by expert,
    # and before the way back by source again.
    if not counts_copies(layout) and (sym.is_fused or layout.ep > 1):
        yield kernel_rows(SORT, "sort_received", sym, 2 * sym.R * h, Recompute.MOE)


def adapter_rows(sym: Symbols, layer: int) -> Iterator[tuple[OpRow, OpRow]]:
    """Yield the rows of the adapters of a layer, those of its experts apart."""
    if sym.is_frozen:
        inputs, outputs = adapted_widths(sym.model, sym.workload, layer)
        yield _adapter_rows("adapters", sym, sym.T / sym.layout.tp, inputs, outputs)
        yield from _unpack_rows("unpack_weights", sym, layer, of_experts=False)


def _unpack_rows(
    name: str, sym: Symbols, layer: int, *, of_experts: bool
) -> Iterator[tuple[OpRow, OpRow]]:
    """Yield the rows that widen packed weights, before each of their two products.

    They are those of a layer's experts, or the others of the layer.
    """
    elements = sum(
        numel
        for module, numel in packed_elements(sym.model, sym.workload, sym.layout, layer)
        if (module is Module.EXPERTS) == of_experts
    )
    if elements:
        nbytes = elements * (packed_bytes_per_element(sym.workload) + sym.c)
        yield elementwise_row(name, sym, nbytes), elementwise_row(name, sym, nbytes)


def _adapter_rows(
    name: str, sym: Symbols, tokens: float, inputs: float, outputs: float, *choices: Recompute
) -> tuple[OpRow, OpRow]:
    """Return the rows of adapters beside linears of these summed widths.

    Their thin products are bound by what they read and write; no stack fuses them into the products
    beside them.
    """
    forward_bytes, backward_bytes = (
        sym.c * tokens * (reads * inputs + writes * outputs) for reads, writes in _ADAPTER_PASSES
    )
    forward = elementwise_row(name, sym, forward_bytes, *choices)
    return forward, elementwise_row(name, sym, backward_bytes)


def _quantise_rows(
    name: str, sym: Symbols, operands: Operands, *recomputed_by: Recompute
) -> tuple[OpRow, OpRow]:
    """Return the rows that quantise the operands of 8-bit or 4-bit products."""
    moved = quantise_bytes(sym)
    forward = elementwise_row(name, sym, moved.forward * operands.inputs, *recomputed_by)
    return forward, elementwise_row(name, sym, moved.backward * operands.gradients)


def _epilogue_rows(
    name: str, sym: Symbols, elements: float, *recomputed_by: Recompute
) -> tuple[OpRow, OpRow]:
    """Return the rows of what fused products move besides a product's own inputs and outputs.

    Forward they write the activated elements as the next product reads them. Backward they read
    what was activated, and write its gradients as the next product reads them.
    """
    halves = sym.model.fc1_matrices
    copies = copies_bytes(sym)
    forward = elementwise_row(name, sym, copies * elements, *recomputed_by)
    return forward, elementwise_row(name, sym, halves * (sym.c + copies) * elements)


def _activation_rows(
    name: str, sym: Symbols, elements: float, *recomputed_by: Recompute
) -> tuple[OpRow, OpRow]:
    kernel = GATED_ACTIVATION if sym.model.gated else UNGATED_ACTIVATION
    if sym.is_fused and Fusion.ACTIVATION in sym.workload.trainer.unfused:
        has_bias = sym.model.moe is not None and sym.model.moe.expert_bias
        passes = _UNFUSED_CLAMPED_READS_AND_WRITES if has_bias else _UNFUSED_READS_AND_WRITES
        kernel = replace(kernel, fused=(0, passes), fused_backward=_UNFUSED_BACKWARD)
    return kernel_rows(kernel, name, sym, elements, *recomputed_by)
