"""Differentiable row functions: rows are copied, summed, selected and reordered.

Each is an autograd Function of its own, so that what is kept for backward is the same on every
device, and is exactly what the memory model says.

Shapes: T tokens, k slots a token, R routed rows, K width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moewright.engine.graph_nodes import ReleasingFunction
from moewright.engine.kernels.fused.interface import KernelSet

# Rows over the budget of a rank (`layout.rank_capacity`), noted on the device as a step goes on.
#
# Nothing is read by the host until the step's gradients are reduced: if some rank had more rows for
# another than the budget, the step is run again with as many rows as there are.


class RowBudget:
    """The state of the budget: whether it is enforced, and how many rows were over it.

    It is enforced only inside `enforce`; elsewhere, as in an evaluation, all rows are sent.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_enforced = False
        self._excess = torch.zeros((), dtype=torch.float64, device=device)

    @contextmanager
    def enforce(self) -> Iterator[None]:
        """Pad rows to the budget inside, and count those over it from zero."""
        self._excess.zero_()
        self.is_enforced = True
        try:
            yield
        finally:
            self.is_enforced = False

    def note(self, rows: torch.Tensor) -> None:
        """Add rows that were over the budget, a number on the device."""
        self._excess += rows

    def flag(self) -> torch.Tensor:
        """Return 2 if a row was over the budget, else 0: fp64 on the device.

        It is added up over ranks. A dry run reads 1 for every number, which no sum of these is.
        """
        return 2.0 * (self._excess > 0)


class Permute(ReleasingFunction):
    """A copy of each token to its routed rows: x [T,K] -> [R,K]; the transpose of Unpermute.

    Row i holds token tokens[i]; slot j of token t is row rows[t,j], which is R for a slot without a
    row; where `is_complete` every slot has one. Keeps `rows`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TK: torch.Tensor,
        tokens_R: torch.Tensor,
        rows_Tk: torch.Tensor,
        is_complete: bool,
        kernels: KernelSet,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows_Tk)
        ctx.is_complete = is_complete
        ctx.kernels = kernels
        return kernels.permute(x_TK, tokens_R)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (rows_Tk,) = ctx.saved_tensors
        return ctx.kernels.unpermute(grad, rows_Tk, ctx.is_complete), None, None, None, None


class Unpermute(ReleasingFunction):
    """The sum of each token's routed rows: [R,K] -> [T,K]; the transpose of Permute.

    Keeps `tokens`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows_RK: torch.Tensor,
        tokens_R: torch.Tensor,
        rows_Tk: torch.Tensor,
        is_complete: bool,
        kernels: KernelSet,
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens_R)
        ctx.kernels = kernels
        return kernels.unpermute(rows_RK, rows_Tk, is_complete)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (tokens_R,) = ctx.saved_tensors
        return ctx.kernels.permute(grad, tokens_R), None, None, None, None


def count_ids(ids: torch.Tensor, extent: int) -> torch.Tensor:
    """Count how often each of 0..extent-1 stands in `ids`: [extent] int64.

    Unlike torch.bincount this does not wait for the device.
    """
    flat = ids.flatten()
    # In integers: sums of ones in fp32 stop at 2**24, and their order would not be free.
    counts = torch.zeros(extent, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))


class ReorderRows(ReleasingFunction):
    """The rows of x in the order of a permutation; keeps its inverse, by which backward selects."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class SelectRows(ReleasingFunction):
    """The rows of x at `places`; the transpose of ScatterRows. Keeps `places`.

    A place must not occur twice: backward would keep the gradient of only one of its copies.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.rows = x.shape[0]
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (places,) = ctx.saved_tensors
        return _scatter_rows(grad, places, ctx.rows), None


class ScatterRows(ReleasingFunction):
    """A scatter of row i of x to row places[i] of `rows`, else zeros; the transpose of SelectRows.

    Keeps `places`.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.save_for_backward(places)
        return _scatter_rows(x, places, rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grad.index_select(0, places), None, None


def _scatter_rows(x: torch.Tensor, places: torch.Tensor, rows: int) -> torch.Tensor:
    return x.new_zeros((rows, *x.shape[1:])).index_copy_(0, places, x)
