"""Products that run beside the exchange of their rows over a tensor-parallel group.

With overlap=tp, rows of a product travel round the ring of the group's ranks, a rank's at a time:
while a product of one rank's rows runs, those of the next are under way. A gather hands on what it
has received, so that all ranks have had all rows after size - 1 shifts. A reduction hands on sums,
to which each rank adds its part, so that each ends where it belongs. (Wang et al., "Overlap
Communication with Dependent Computation via Decomposition", ASPLOS 2023.)

Shapes: t, T tokens of this rank and of its group, K in, N out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moewright.engine.comm.collectives import RingShift, TensorParallel

# A product of rows and a weight, such as a linear layer's forward.
Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def gather_and_multiply(
    x_tK: torch.Tensor, weights: Sequence[torch.Tensor], tp: TensorParallel, multiply: Multiply
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return x [T,K] gathered over the group, and its product with each weight [T,N]."""
    if not tp.is_pipelined:
        x_TK = tp.gather(x_tK)
        return x_TK, tuple(multiply(x_TK, weight) for weight in weights)
    size, own = tp.group.size, tp.group.index
    rows = x_tK.contiguous()
    rows_by_rank = [rows] * size
    products = [[rows] * size for _ in weights]
    for step in range(size):
        rank = (own - step) % size
        rows_by_rank[rank] = rows
        shift = RingShift(rows, tp.group) if step < size - 1 else None
        for product, weight in zip(products, weights, strict=True):
            product[rank] = multiply(rows, weight)
        if shift is not None:
            rows = shift.wait()
    return torch.cat(rows_by_rank), tuple(torch.cat(product) for product in products)


def multiply_and_reduce(
    x_TK: torch.Tensor, weight: torch.Tensor, tp: TensorParallel, multiply: Multiply
) -> torch.Tensor:
    """Return this rank's rows [t,N] of the sum over ranks of the product of x and its weight."""
    if not tp.is_pipelined:
        return tp.reduce(multiply(x_TK, weight))
    size, own = tp.group.size, tp.group.index
    rows_by_rank = x_TK.chunk(size)
    sum_tN = multiply(rows_by_rank[(own - 1) % size], weight)
    for step in range(1, size):
        shift = RingShift(sum_tN, tp.group)
        part = multiply(rows_by_rank[(own - 1 - step) % size], weight)
        sum_tN = shift.wait().add_(part)
    return sum_tN
