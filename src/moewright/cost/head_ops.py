"""Work outside the layers: embedding, head and loss, MTP projection, and what a step does once."""

from __future__ import annotations

from dataclasses import replace

from moewright.cost.elementwise import CROSS_ENTROPY, RMS_NORM, elementwise_row, kernel_rows
from moewright.cost.ep_overlap import NEVER_DELAYED
from moewright.cost.op_time import OpRow
from moewright.cost.ops import LayerOps, gemm_row, gradient_sum_bytes
from moewright.cost.symbols import Symbols
from moewright.rules.recompute import loss_chunk_columns
from moewright.rules.row_blocks import CACHED_NUMEL, MAX_LOSS_ROWS, rows_per_block
from moewright.spec.hardware import Op
from moewright.spec.layout import Recompute
from moewright.spec.plan import TimePart

_HEAD = TimePart.HEAD


def embedding_ops(size: Symbols) -> LayerOps:
    """Gather of t rows (read, write); backward adds them into the gradient (read, read, write).

    The eager backward sums in a full fp32 table that it clears and narrows.
    """
    elements, table = (
        size.t * size.model.hidden_size,
        size.model.vocab_size * size.model.hidden_size / size.layout.tp,
    )
    forward = elementwise_row("embedding", size, 2 * size.c * elements, part=_HEAD)
    if size.is_fused:
        return LayerOps(
            forward=(forward,),
            backward=(elementwise_row("embedding", size, 3 * size.c * elements, part=_HEAD),),
        )
    back_bytes = (16 + size.c) * elements + (8 + size.c + gradient_sum_bytes(size)) * table
    return LayerOps(
        forward=(forward,),
        backward=(elementwise_row("embedding", size, back_bytes, part=_HEAD, calls=5),),
    )


def head_ops(size: Symbols) -> LayerOps:
    """Final norm, logits, and cross-entropy over the vocabulary. Logits that are not kept are made
    again, in pieces; the gradient of the head's input is summed over these in fp32, and its
    weight's is never put off.
    """
    h, vocab = size.model.hidden_size, size.model.vocab_size / size.layout.tp
    norm, norm_back = kernel_rows(RMS_NORM, "head.norm", size, size.t * h, part=_HEAD)
    passes = max(
        1.0, size.T / (MAX_LOSS_ROWS if size.is_fused else rows_per_block(int(vocab), CACHED_NUMEL))
    )
    loss, loss_back = kernel_rows(
        CROSS_ENTROPY, "head.loss", size, size.T * vocab, part=_HEAD, blocks=passes
    )
    logits = replace(gemm_row("head.logits", size, size.T, vocab, h, _HEAD), dtype=size.wide_dtype)
    again = Recompute.LOSS in size.layout.recompute
    if again:
        pieces = max(1.0, vocab / loss_chunk_columns(size.model, size.layout))
        logits = replace(logits, x=logits.x / pieces)
        products = replace(
            logits, name=f"head.logits.{NEVER_DELAYED}", amount=3 * logits.amount, recomputed_by=()
        )
        summing = elementwise_row(
            "head.input_gradient",
            size,
            (8 + size.c) * size.T * h * pieces,
            part=_HEAD,
            calls=pieces,
        )
        backward = [products, norm_back, loss_back, summing]
    else:
        backward = [_twice(logits), norm_back, loss_back]
    forward = (logits, norm, loss)
    if not size.is_fused:
        name = "head.gradient_sum" + (f".{NEVER_DELAYED}" if again else "")
        backward.append(
            elementwise_row(name, size, gradient_sum_bytes(size) * h * vocab, part=_HEAD, calls=2)
        )
    return LayerOps(forward=forward, backward=tuple(backward))


def mtp_ops(size: Symbols) -> LayerOps:
    """What an MTP depth has besides a layer and a pass through the head: two norms and the
    projection [h, 2h]."""
    h = size.model.hidden_size
    projection = gemm_row("mtp.projection", size, size.T, h / size.layout.tp, 2 * h, TimePart.DENSE)
    norm, norm_back = kernel_rows(RMS_NORM, "mtp.norms", size, 2 * size.t * h)
    return LayerOps(forward=(projection, norm), backward=(_twice(projection), norm_back))


def _twice(row: OpRow) -> OpRow:
    """Backward of a GEMM: two of the same size."""
    return replace(row, amount=2 * row.amount, recomputed_by=())


def optimizer_ops(size: Symbols, *, numel: int, owned_numel: int) -> tuple[OpRow, ...]:
    """Once a step: `held` parameters of the rank, `owned` of them after sharding the optimizer.

    The engine does not clear gradients: the first micro-batch overwrites them.
    """
    part = TimePart.OPTIMIZER
    adamw = OpRow(
        name="adamw",
        part=part,
        op=Op.OPTIMIZER,
        amount=owned_numel,
        x=owned_numel,
        dtype=size.dtype,
    )
    if size.is_fused:
        # Zeroing the fp32 gradients, and reading them once.
        return adamw, elementwise_row("gradient_zero", size, 8 * numel, part=part)
    return (
        adamw,
        elementwise_row("gradient_norm", size, 4 * owned_numel, part=part),
        elementwise_row("weight_cast", size, (4 + size.c) * owned_numel, part=part),
    )
