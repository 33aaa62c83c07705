"""Weight gradients that are made later than the input gradients of the same operation.

Schedules that split the backward (rules.zero_bubble) send a stage's input gradients on before they
make its weight gradients. While a backward is inside `Later.collecting`, the matrix products of the
model leave here how to make their weight gradients, with what that takes; `Later.make` does it and
takes the gradients on to the parameters.

Column, row and grouped products do so, which are nearly all of a stage's weight gradients. Those of
norms, the embedding, the router and gates come with the input gradients: sums, and products no
wider than the number of experts, of tensors that would else have to wait for the W row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge

Key = tuple[int, int]  # micro-batch, chunk
Make = Callable[[], Sequence[torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _DeferredGrads:
    """`make` gives the gradients of what the `edges` lead to: parameters, or views of them."""

    edges: tuple[GradientEdge, ...]
    make: Make


class WeightGradStore:
    """What is owed, by (micro-batch, chunk)."""

    def __init__(self) -> None:
        self._owed: dict[Key, list[_DeferredGrads]] = {}
        self._collecting: list[_DeferredGrads] | None = None

    @contextmanager
    def defer_for(self, key: Key) -> Iterator[None]:
        """The backward of `key` runs inside: its weight gradients are owed."""
        self._collecting = self._owed[key] = []
        try:
            yield
        finally:
            self._collecting = None

    def compute_or_defer(
        self, edges: Sequence[GradientEdge], make: Make
    ) -> Sequence[torch.Tensor | None]:
        """Of the tensors that the `edges` lead to: at once, or None for each where they are
        owed."""
        if self._collecting is None:
            return make()
        self._collecting.append(_DeferredGrads(edges=tuple(edges), make=make))
        return (None,) * len(edges)

    def run_deferred(self, key: Key) -> None:
        """Pay what is owed for `key`, in the order of its backward."""
        owed = self._owed.pop(key)
        while owed:
            one = owed.pop(0)
            with torch.no_grad():
                gradients = one.make()
            torch.autograd.backward(one.edges, gradients)
