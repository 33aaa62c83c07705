"""Work outside the layers: embedding, head and loss, MTP projection, and what a step does once."""

from __future__ import annotations

from dataclasses import replace

from moewright.cost.elementwise import CROSS_ENTROPY, RMS_NORM, light, moved
from moewright.cost.ep_overlap import AT_ONCE
from moewright.cost.op_time import OpRow
from moewright.cost.ops import LayerOps, gemm, summed_bytes
from moewright.cost.symbols import Sizes
from moewright.rules.recompute import loss_columns
from moewright.rules.row_blocks import IN_CACHE, LOSS_ROWS, rows_at_a_time
from moewright.spec.hardware import Op
from moewright.spec.layout import Recompute
from moewright.spec.plan import TimePart

_HEAD = TimePart.HEAD


def embedding_ops(size: Sizes) -> LayerOps:
    """Gather of t rows (read, write); backward adds them into the gradient (read, read, write).

    The eager backward sums in a full fp32 table that it clears and narrows.
    """
    elements, table = (
        size.t * size.model.hidden_size,
        size.model.vocab_size * size.model.hidden_size / size.layout.tp,
    )
    forward = moved("embedding", size, 2 * size.c * elements, part=_HEAD)
    if size.fused:
        return LayerOps(
            forward=(forward,),
            backward=(moved("embedding", size, 3 * size.c * elements, part=_HEAD),),
        )
    back_bytes = (16 + size.c) * elements + (8 + size.c + summed_bytes(size)) * table
    return LayerOps(
        forward=(forward,), backward=(moved("embedding", size, back_bytes, part=_HEAD, calls=5),)
    )


def head_ops(size: Sizes) -> LayerOps:
    """Final norm, logits, and cross-entropy over the vocabulary. Logits that are not kept are made
    again, in pieces; the gradient of the head's input is summed over these in fp32, and its
    weight's is never put off.
    """
    h, vocab = size.model.hidden_size, size.model.vocab_size / size.layout.tp
    norm, norm_back = light(RMS_NORM, "head.norm", size, size.t * h, part=_HEAD)
    passes = max(1.0, size.T / (LOSS_ROWS if size.fused else rows_at_a_time(int(vocab), IN_CACHE)))
    loss, loss_back = light(
        CROSS_ENTROPY, "head.loss", size, size.T * vocab, part=_HEAD, pieces=passes
    )
    logits = replace(gemm("head.logits", size, size.T, vocab, h, _HEAD), dtype=size.wide)
    again = Recompute.LOSS in size.layout.recompute
    if again:
        pieces = max(1.0, vocab / loss_columns(size.model, size.layout))
        logits = replace(logits, x=logits.x / pieces)
        products = replace(
            logits, name=f"head.logits.{AT_ONCE}", amount=3 * logits.amount, replay=()
        )
        summing = moved(
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
    if not size.fused:
        name = "head.gradient_sum" + (f".{AT_ONCE}" if again else "")
        backward.append(moved(name, size, summed_bytes(size) * h * vocab, part=_HEAD, calls=2))
    return LayerOps(forward=forward, backward=tuple(backward))


def mtp_ops(size: Sizes) -> LayerOps:
    """What an MTP depth has besides a layer and a pass through the head: two norms and the
    projection [h, 2h]."""
    h = size.model.hidden_size
    projection = gemm("mtp.projection", size, size.T, h / size.layout.tp, 2 * h, TimePart.DENSE)
    norm, norm_back = light(RMS_NORM, "mtp.norms", size, 2 * size.t * h)
    return LayerOps(forward=(projection, norm), backward=(_twice(projection), norm_back))


def _twice(row: OpRow) -> OpRow:
    """Backward of a GEMM: two of the same size."""
    return replace(row, amount=2 * row.amount, replay=())


def optimizer_ops(size: Sizes, *, held: int, owned: int) -> tuple[OpRow, ...]:
    """Once a step: `held` parameters of the rank, `owned` of them after sharding the optimizer.

    The engine does not clear gradients: the first micro-batch overwrites them.
    """
    part = TimePart.OPTIMIZER
    adamw = OpRow(name="adamw", part=part, op=Op.OPTIMIZER, amount=owned, x=owned, dtype=size.dtype)
    if size.fused:
        # Zeroing the fp32 gradients, and reading them once.
        return adamw, moved("gradient_zero", size, 8 * held, part=part)
    return (
        adamw,
        moved("gradient_norm", size, 4 * owned, part=part),
        moved("weight_cast", size, (4 + size.c) * owned, part=part),
    )
