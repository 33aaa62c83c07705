"""Weight gradients that are computed later than the input gradients of the same operation.

Schedules that split the backward (rules.timetable.zero_bubble) send a stage's input gradients on
before they compute its weight gradients. While a backward is inside `WeightGradStore.defer_for`,
the matrix products of the model leave in the store the computation of their weight gradients, with
its operands; `WeightGradStore.run_deferred` runs it and passes the gradients on to the parameters.

Column-parallel, row-parallel and grouped products do so, which have nearly all of a stage's weight
gradients. The gradients of norms, the embedding, the router and gates are computed with the input
gradients: they are sums, and products no wider than the number of experts, whose operands would
otherwise have to be kept until the W row.

With overlap=wgrad gradients wait only until the next exchange of the same backward has started
(`WeightGradStore.run_collected`), beside which they are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge

Key = tuple[int, int]  # micro-batch, chunk
Operands = tuple[torch.Tensor, ...]
ComputeGrads = Callable[[Operands], Sequence[torch.Tensor]]
# Is called with the operands of a deferred computation, in the scope of its module.
CountOperands = Callable[[Operands], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _DeferredGrads:
    """A deferred computation of the gradients at `edges`, of parameters or of their views.

    `operands` are the tensors that are kept for it.
    """

    edges: tuple[GradientEdge, ...]
    operands: Operands
    compute: ComputeGrads


class WeightGradStore:
    """A store of the weight gradients that are still to be computed, by (micro-batch, chunk)."""

    def __init__(self) -> None:
        self._deferred: dict[Key, list[_DeferredGrads]] = {}
        self._collecting: list[_DeferredGrads] | None = None
        self._count: CountOperands = _count_nothing

    @property
    def is_deferring(self) -> bool:
        """Whether the backward that runs leaves its weight gradients to later."""
        return self._collecting is not None

    @contextmanager
    def defer_for(self, key: Key, count: CountOperands | None = None) -> Iterator[None]:
        """Defer the weight gradients of the backward of `key`, which runs inside.

        `count` is called with the operands that are kept for each.
        """
        self._collecting = self._deferred[key] = []
        self._count = count or _count_nothing
        try:
            yield
        finally:
            self._collecting = None
            self._count = _count_nothing

    @contextmanager
    def compute_at_once(self) -> Iterator[None]:
        """Defer nothing of the part of a backward that runs inside."""
        collecting, self._collecting = self._collecting, None
        try:
            yield
        finally:
            self._collecting = collecting

    def compute_or_defer(
        self, edges: Sequence[GradientEdge], operands: Operands, compute: ComputeGrads
    ) -> Sequence[torch.Tensor | None]:
        """Return the gradients at `edges`, or None for each while they are deferred."""
        if self._collecting is None:
            return compute(operands)
        self._count(operands)
        self._collecting.append(
            _DeferredGrads(edges=tuple(edges), operands=operands, compute=compute)
        )
        return (None,) * len(edges)

    def run_collected(self) -> None:
        """Compute what the backward that runs has deferred so far; nothing where it defers none."""
        if self._collecting is not None:
            _compute_all(self._collecting)

    def run_deferred(self, key: Key) -> None:
        """Compute the gradients that were deferred for `key`, in the order of its backward."""
        _compute_all(self._deferred.pop(key))


def _compute_all(deferred: list[_DeferredGrads]) -> None:
    while deferred:
        # Taken out first, so that its operands are freed once it is done.
        grads = deferred.pop(0)
        with torch.no_grad():
            values = grads.compute(grads.operands)
        # From the edges on: a gradient of a view goes to its parameter, whose hooks run.
        torch.autograd.backward(grads.edges, values)


def _count_nothing(operands: Operands) -> None:
    pass
