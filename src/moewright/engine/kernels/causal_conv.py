"""The short causal convolution before a recurrence, by products of torch on any device.

It is an operation of its own, so that its FLOPs count as those of a scan on any device.

Shapes: B sequences, S tokens, G key heads, W the columns of a key head, K the width of the
convolution. With `lengths` (else empty) the rows B * S are documents of these lengths, one after
the other, and nothing passes from one to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from moewright.engine.kernels.operations import OperationWork, define_operation
from moewright.spec.ledger import FlopOp

Tensors = tuple[torch.Tensor, ...]


def widen(x: torch.Tensor) -> torch.Tensor:
    """Return x in fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def map_documents(
    compute: Callable[..., Tensors], lengths: Sequence[int], *inputs: torch.Tensor
) -> Tensors:
    """Return compute(*inputs) of tensors [B,S,...], document by document where there are any."""
    if not lengths:
        return compute(*inputs)
    rows = inputs[0].shape[:2]
    documents = zip(*(x.flatten(0, 1)[None].split(list(lengths), 1) for x in inputs), strict=True)
    parts = zip(*(compute(*document) for document in documents), strict=True)
    # Rows again: documents lie one after the other over all sequences.
    return tuple(torch.cat(part, 1).unflatten(1, rows)[0] for part in parts)


def convolve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return bias + sum_j weight[:, j] x[t - K + 1 + j] of x [B,S,G,W], in fp32 at least."""
    width = weight.shape[1]
    taps = widen(weight).view(*x.shape[2:], width).unbind(-1)
    # In front of the tokens, so that none sees a later one.
    padded = F.pad(widen(x), (0, 0, 0, 0, width - 1, 0))
    out = padded[:, : x.shape[1]] * taps[0]
    for place, tap in enumerate(taps[1:], 1):
        out.addcmul_(padded[:, place : place + x.shape[1]], tap)
    if bias is None:
        return out
    return out.add_(widen(bias).view(x.shape[2:]))


def convolve_backward(
    slope: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, grad_weight: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of x [B,S,G,W] from that of what `convolve` returns.

    That of the weight is added to `grad_weight`.
    """
    tokens = x.shape[1]
    width = weight.shape[1]
    before = F.pad(widen(x), (0, 0, 0, 0, width - 1, 0))
    after = F.pad(slope, (0, 0, 0, 0, 0, width - 1))
    grad_x = torch.zeros_like(slope)
    for place, tap in enumerate(widen(weight).view(*x.shape[2:], width).unbind(-1)):
        grad_x.addcmul_(after[:, width - 1 - place :][:, :tokens], tap)
        products = before[:, place : place + tokens] * slope
        grad_weight[:, place] += products.sum((0, 1)).flatten()
    return grad_x


def _causal_conv(x: torch.Tensor, weight: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return silu of the convolution of x, in the dtype of x."""

    def run(x: torch.Tensor) -> Tensors:
        return (F.silu(convolve(x, weight, None)).to(x.dtype),)

    return map_documents(run, lengths, x)[0]


def _causal_conv_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, lengths: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and weight."""
    grad_weight = torch.zeros_like(widen(weight))

    def differentiate(grad: torch.Tensor, x: torch.Tensor) -> Tensors:
        slope = torch.ops.aten.silu_backward(widen(grad), convolve(x, weight, None))
        return (convolve_backward(slope, x, weight, grad_weight).to(x.dtype),)

    (grad_x,) = map_documents(differentiate, lengths, grad, x)
    return grad_x, grad_weight.to(weight.dtype)


def _conv_flops(x: Any, weight: Any) -> int:
    """Count a multiplication and an addition of each element for each place of the convolution."""
    return 2 * int(x.numel()) * int(weight.shape[1])


_WORK = OperationWork(op=FlopOp.SCAN, count=lambda x, weight, lengths: _conv_flops(x, weight))
CAUSAL_CONV = define_operation(
    "causal_conv(Tensor x, Tensor weight, int[] lengths) -> Tensor",
    _causal_conv,
    lambda x, weight, lengths: x.new_empty(x.shape),
    _WORK,
)
CAUSAL_CONV_BACKWARD = define_operation(
    "causal_conv_backward(Tensor grad, Tensor x, Tensor weight, int[] lengths) -> (Tensor, Tensor)",
    _causal_conv_backward,
    lambda grad, x, weight, lengths: (x.new_empty(x.shape), torch.empty_like(weight)),
    _WORK.backward(),
)
