"""Work outside the layers: embedding, head and loss, MTP projection, and what a step does once."""

from __future__ import annotations

from dataclasses import replace

from moewright.cost.constants import Constants
from moewright.cost.symbols import Symbols
from moewright.cost.time.elementwise import CROSS_ENTROPY, RMS_NORM, elementwise_row, kernel_rows
from moewright.cost.time.gemm_rows import NEVER_DELAYED, LayerOps, backward_gemms, gemm_row
from moewright.cost.time.op_time import OpRow
from moewright.cost.time.ops import gradient_sum_bytes
from moewright.cost.time.quantise import weight_quantise_bytes
from moewright.rules.adapters import trains_module
from moewright.rules.row_blocks import CACHED_NUMEL, MAX_LOSS_ROWS, rows_per_block
from moewright.rules.saved.recompute import loss_chunk_columns
from moewright.spec.hardware import Op
from moewright.spec.layout import Recompute
from moewright.spec.ledger import Module
from moewright.spec.plan import TimePart

_HEAD = TimePart.HEAD


def embedding_ops(sym: Symbols) -> LayerOps:
    """Return the rows of the embedding, a gather of t rows: read and write.

    The backward adds them into the gradient: two reads and a write. The eager one sums in a full
    fp32 table that it clears and narrows.
    """
    elements = sym.t * sym.model.hidden_size
    table_elements = sym.model.vocab_size * sym.model.hidden_size / sym.layout.tp
    forward = (elementwise_row("embedding", sym, 2 * sym.c * elements, part=_HEAD),)
    if not trains_module(sym.workload.fine_tuning, Module.EMBEDDING):
        return LayerOps(forward=forward, backward=())
    backward_bytes = float(3 * sym.c * elements)
    calls = 1
    if not sym.is_fused:
        backward_bytes = (16 + sym.c) * elements
        backward_bytes += (8 + sym.c + gradient_sum_bytes(sym)) * table_elements
        calls = 5
    return LayerOps(
        forward=forward,
        backward=(elementwise_row("embedding", sym, backward_bytes, part=_HEAD, calls=calls),),
    )


def head_ops(sym: Symbols) -> LayerOps:
    """Return the rows of the final norm, the logits, and cross-entropy over the vocabulary.

    Logits that are not kept (recompute=loss) are made again, in blocks of columns; the gradient of
    the head's input is summed over these in fp32, and the gradient of its weight is never delayed.
    """
    h = sym.model.hidden_size
    vocab = sym.model.vocab_size / sym.layout.tp
    norm, norm_backward = kernel_rows(RMS_NORM, "head.norm", sym, sym.t * h, part=_HEAD)
    block_rows = MAX_LOSS_ROWS if sym.is_fused else rows_per_block(int(vocab), CACHED_NUMEL)
    loss, loss_backward = kernel_rows(
        CROSS_ENTROPY,
        "head.loss",
        sym,
        sym.T * vocab,
        part=_HEAD,
        blocks=max(1.0, sym.T / block_rows),
    )
    logits = gemm_row("head.logits", sym, sym.T, vocab, h, _HEAD)
    logits = replace(logits, dtype=sym.head_dtype)
    is_trained = trains_module(sym.workload.fine_tuning, Module.HEAD)
    gradient_sum = "head.gradient_sum"
    if Recompute.LOSS in sym.layout.recompute:
        gradient_sum += f".{NEVER_DELAYED}"
        blocks = max(1.0, vocab / loss_chunk_columns(sym.model, sym.layout))
        logits = replace(logits, x=logits.x / blocks)
        backward = [
            replace(
                logits,
                name=f"head.logits.{NEVER_DELAYED}",
                # The logits again, their input's gradient, and the weight's where it trains.
                amount=(2 + is_trained) * logits.amount,
                recomputed_by=(),
            ),
            norm_backward,
            loss_backward,
            elementwise_row(
                "head.input_gradient",
                sym,
                (8 + sym.c) * sym.T * h * blocks,
                part=_HEAD,
                calls=blocks,
            ),
        ]
    else:
        backward = [backward_gemms(logits, sym), norm_backward, loss_backward]
    if not sym.is_fused and is_trained:
        sum_bytes = gradient_sum_bytes(sym) * h * vocab
        backward.append(elementwise_row(gradient_sum, sym, sum_bytes, part=_HEAD, calls=2))
    return LayerOps(forward=(logits, norm, loss), backward=tuple(backward))


def add_eager_loss(constants: Constants, sym: Symbols, head: LayerOps) -> LayerOps:
    """Return the head with what an unfused loss moves beyond the fused one: half of it forward."""
    extra_bytes = constants["eager_loss_bytes"] * sym.T * sym.model.vocab_size / sym.layout.tp
    if not extra_bytes:
        return head
    row = elementwise_row("head.eager_loss", sym, extra_bytes / 2, part=_HEAD)
    return LayerOps(forward=(*head.forward, row), backward=(*head.backward, row))


def mtp_ops(sym: Symbols) -> LayerOps:
    """Return the rows that an MTP depth has besides its layer and its pass through the head.

    They are two norms and the projection [h, 2h]; with residual streams one [h, h] of the embedding
    and of each stream.
    """
    h, streams = sym.model.hidden_size, sym.model.residual_streams
    projection = gemm_row("mtp.projection", sym, sym.T, h / sym.layout.tp, 2 * h, TimePart.DENSE)
    if not sym.model.joins_mtp_inputs:
        rows = (1 + streams) * sym.t
        projection = gemm_row("mtp.projection", sym, rows, h, h, TimePart.DENSE)
    norms, norms_backward = kernel_rows(RMS_NORM, "mtp.norms", sym, (1 + streams) * sym.t * h)
    return LayerOps(
        forward=(projection, norms), backward=(backward_gemms(projection, sym), norms_backward)
    )


def optimizer_ops(sym: Symbols, *, numel: float, owned_numel: float) -> tuple[OpRow, ...]:
    """Return the rows of the optimizer, once a step, for a rank that holds `numel` parameters.

    It updates `owned_numel` of them where the optimizer is sharded. The engine does not clear
    gradients: the first micro-batch overwrites them.
    """
    part = TimePart.OPTIMIZER
    adamw = OpRow(
        name="adamw",
        part=part,
        op=Op.OPTIMIZER,
        amount=owned_numel,
        x=owned_numel,
        dtype=sym.dtype,
    )
    if sym.is_fused:
        # Zeroing the gradients, and reading them once.
        moved_bytes = 2.0 * sym.workload.grad_dtype.nbytes
        if sym.is_low_precision:
            moved_bytes += weight_quantise_bytes(sym)
        return adamw, elementwise_row("gradient_zero", sym, moved_bytes * numel, part=part)
    return (
        adamw,
        elementwise_row("gradient_norm", sym, 4 * owned_numel, part=part),
        elementwise_row("weight_cast", sym, (4 + sym.c) * owned_numel, part=part),
    )
