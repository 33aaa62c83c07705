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

from moewright.cost.op_time import OpRow
from moewright.cost.symbols import Symbols
from moewright.spec.hardware import Op
from moewright.spec.layout import DispatcherKind, Recompute
from moewright.spec.model import AttentionKind, QkNorm
from moewright.spec.plan import TimePart
from moewright.spec.workload import Dtype, FusedKernels

FULL, MOE, NORM = Recompute.FULL, Recompute.MOE, Recompute.LAYERNORM
DEDUP_DISPATCHERS = (DispatcherKind.DEDUP, DispatcherKind.DEEPEP, DispatcherKind.HYBRIDEP)

# Backward over forward bytes of fused elementwise kernels (time_model_findings, section 2).
_FUSED_BACKWARD = 1.8


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementwiseKernel:
    """Bytes an element costs, as (constant, multiple of c), and exponentials it takes eagerly,
    forward and backward; `calls` passes, so that one call's size is known.
    """

    fused: tuple[float, float]
    forward: tuple[float, float]
    backward: tuple[float, float]
    calls: tuple[int, int]
    exps: tuple[int, int] = (0, 0)
    fused_backward: float = _FUSED_BACKWARD


# What an element's exponential costs on a CPU core, in bytes it could move instead: beside passes
# at 45 GB/s softmax
# and its logarithm take 0.5-0.8 ns an element more, silu hardly any (each function alone, 256
# columns, AVX-512).
EXP_BYTES = 20

# Per element of the tensor named in each row of `layer_rows`.
RMS_NORM = ElementwiseKernel(fused=(0, 2), forward=(24, 4), backward=(80, 3), calls=(6, 11))
RESIDUAL_ADD = ElementwiseKernel(fused=(0, 3), forward=(0, 3), backward=(0, 3), calls=(1, 1))
ROPE = ElementwiseKernel(fused=(0, 3), forward=(28, 2), backward=(28, 2), calls=(7, 7))
GATED_ACTIVATION = ElementwiseKernel(
    fused=(0, 3), forward=(36, 3), backward=(88, 5), calls=(5, 11), exps=(1, 1)
)
UNGATED_ACTIVATION = ElementwiseKernel(
    fused=(0, 2), forward=(20, 2), backward=(60, 3), calls=(4, 8), exps=(1, 1)
)
PERMUTE = ElementwiseKernel(
    fused=(0, 2.4), forward=(0, 2), backward=(0, 3), calls=(1, 2), fused_backward=1.0
)
UNPERMUTE = ElementwiseKernel(
    fused=(0, 2.4), forward=(0, 3), backward=(0, 2), calls=(2, 1), fused_backward=1.0
)
SORT = ElementwiseKernel(
    fused=(0, 2.4), forward=(0, 2), backward=(0, 2), calls=(1, 1), fused_backward=1.0
)
# Router scores: softmax, top-k (a partial sort: counted as eight passes), counts and auxiliary
# loss, all fp32.
ROUTE = ElementwiseKernel(
    fused=(8, 0), forward=(72, 0), backward=(48, 0), calls=(6, 6), exps=(1, 0)
)
# Logits: widen, log-softmax; backward widen, softmax, scale, narrow. Fused: read for the sums, read
# again and the
# gradient written in their place; backward scales it.
CROSS_ENTROPY = ElementwiseKernel(
    fused=(0, 3), forward=(12, 1), backward=(24, 2), calls=(2, 4), exps=(1, 1), fused_backward=2 / 3
)

_KERNELS = (
    RMS_NORM,
    ROPE,
    GATED_ACTIVATION,
    PERMUTE,
    UNPERMUTE,
    ROUTE,
    CROSS_ENTROPY,
)  # of the engine's seam (docs/adr/0019)


def _fuses(kernel: ElementwiseKernel, size: Symbols) -> bool:
    return size.is_fused and not (
        size.workload.fused_kernels is FusedKernels.PLAIN and kernel in _KERNELS
    )


def kernel_rows(
    kernel: ElementwiseKernel,
    name: str,
    size: Symbols,
    elements: float,
    *replay: Recompute,
    part: TimePart = TimePart.ELEMENTWISE,
    blocks: float = 1.0,
) -> tuple[OpRow, OpRow]:
    """The forward and the backward row of a kernel over so many elements, taken eagerly in so many
    pieces."""
    if _fuses(kernel, size):
        constant, factor = kernel.fused
        forward_bytes = (constant + factor * size.c) * elements
        back_bytes = forward_bytes * kernel.fused_backward
        return elementwise_row(name, size, forward_bytes, *replay, part=part), elementwise_row(
            name, size, back_bytes, part=part
        )
    rows, exp_bytes = [], 0 if size.is_fused else EXP_BYTES
    for (constant, factor), calls, exps, replays in (
        (kernel.forward, kernel.calls[0], kernel.exps[0], replay),
        (kernel.backward, kernel.calls[1], kernel.exps[1], ()),
    ):
        moved_bytes = (constant + factor * size.c) * elements
        row = elementwise_row(name, size, moved_bytes, *replays, part=part, calls=calls * blocks)
        rows.append(replace(row, amount=row.amount + exp_bytes * exps * elements))
    return rows[0], rows[1]


def elementwise_row(
    name: str,
    size: Symbols,
    amount_bytes: float,
    *replay: Recompute,
    part: TimePart = TimePart.ELEMENTWISE,
    calls: float = 1,
) -> OpRow:
    """A row that moves so many bytes in `calls` passes."""
    return OpRow(
        name=name,
        part=part,
        op=Op.ELEMENTWISE,
        amount=amount_bytes,
        x=amount_bytes / calls,
        dtype=size.dtype,
        recomputed_by=(FULL, *replay),
    )


def layer_elementwise_rows(size: Symbols, moe: bool) -> Iterator[tuple[OpRow, OpRow]]:
    """Forward and backward rows of one layer."""
    spec, t, h, tp = size.model.attention, size.t, size.model.hidden_size, size.layout.tp
    yield kernel_rows(RMS_NORM, "norms", size, 2 * t * h, NORM)
    yield kernel_rows(RESIDUAL_ADD, "residuals", size, 2 * t * h)
    if spec.kind is AttentionKind.MLA:
        yield kernel_rows(
            RMS_NORM, "latent_norms", size, t * (spec.q_lora_rank + spec.kv_lora_rank)
        )
        widths = spec.heads * (2 * spec.head_dim + spec.v_head_dim)
        yield kernel_rows(ROPE, "rope", size, size.T * widths / tp, Recompute.MLA_UP_PROJ)
    else:
        # Fused stacks split and lay out the values in the same three passes.
        widths = spec.q_width + (2 if _fuses(ROPE, size) else 1) * spec.kv_width
        yield kernel_rows(ROPE, "rope", size, size.T * widths / tp)
    if spec.qk_norm is not QkNorm.NONE:
        elements = size.T * (spec.q_width + spec.kv_width) / tp
        # One pass more than the rotation's own when fused into it.
        yield kernel_rows(
            RMS_NORM, "qk_norm", size, elements / 2 if _fuses(RMS_NORM, size) else elements
        )
    if size.is_low_precision:
        yield _quantise(size, "quantise", 1.5 * (t * h + size.T * spec.out_width / tp))
    if moe and size.model.moe is not None:
        yield from _moe_rows(size)
    else:
        if size.is_low_precision:
            yield _quantise(size, "mlp.quantise", t * h + size.T * size.model.dense_ffn_size / tp)
        yield _activation(
            size, "mlp.activation", size.T * size.model.dense_ffn_size / tp, Recompute.MLP
        )


def _moe_rows(size: Symbols) -> Iterator[tuple[OpRow, OpRow]]:
    spec, h, layout = size.model.moe, size.model.expert_width, size.layout
    assert spec is not None
    if spec.shared_ffn_size:
        shared = size.T * spec.shared_ffn_size / layout.tp
        if size.is_low_precision:
            elements = size.t * size.model.hidden_size + shared
            yield _quantise(size, "shared.quantise", elements, Recompute.SHARED_EXPERTS, MOE)
        yield _activation(size, "shared.activation", shared, Recompute.SHARED_EXPERTS, MOE)
    yield kernel_rows(ROUTE, "routing", size, size.t * spec.experts, MOE)
    sent = size.t * spec.router.top_k
    yield kernel_rows(PERMUTE, "permute", size, sent * h, MOE)
    yield kernel_rows(UNPERMUTE, "unpermute", size, sent * h, MOE)
    yield from expert_elementwise_rows(size)


def expert_elementwise_rows(size: Symbols) -> Iterator[tuple[OpRow, OpRow]]:
    """Of those, what experts do with the rows that reach them."""
    spec, h, layout = size.model.moe, size.model.expert_width, size.layout
    assert spec is not None
    width = spec.ffn_size / layout.etp
    if size.is_low_precision:
        yield _quantise(size, "experts.quantise", size.R * (h + width), MOE)
    yield _activation(size, "experts.activation", size.R * width, Recompute.MOE_ACT, MOE)
    # A plain all-to-all hands over rows ordered by source: they are sorted by expert, and back, on
    # arrival too.
    if layout.dispatcher not in DEDUP_DISPATCHERS and (size.is_fused or layout.ep > 1):
        yield kernel_rows(SORT, "sort_received", size, 2 * size.R * h, MOE)


def _quantise(size: Symbols, name: str, elements: float, *replay: Recompute) -> tuple[OpRow, OpRow]:
    """Operands of 8-bit GEMMs: read in 16 bits, written in 8; 3 bytes an element
    (time_model_findings, section 2). Those of 4-bit ones are read twice, as the scale of the tensor
    comes first, and written in 4 + 8/16 bits both ways.
    """
    amount = (4 + 2 * 9 / 16 if size.dtype is Dtype.NVFP4 else 3) * elements
    return elementwise_row(name, size, amount, *replay), elementwise_row(
        name, size, _FUSED_BACKWARD * amount
    )


def _activation(
    size: Symbols, name: str, elements: float, *replay: Recompute
) -> tuple[OpRow, OpRow]:
    return kernel_rows(
        GATED_ACTIVATION if size.model.gated else UNGATED_ACTIVATION, name, size, elements, *replay
    )
