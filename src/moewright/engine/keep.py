"""What autograd keeps of a forward for backward: booked, and where the layout says so made again instead.

Two ways, as in Megatron-LM. `replayed` runs a block without a graph, keeps its inputs, and runs it again in backward.
`Keeper.discard` lets go of one tensor that a following operation keeps, and makes it again when backward asks for it.
A replay computes and communicates like the forward did, and is booked like it; it decides nothing anew (`Decided`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from moewright.engine.books import Books, identity

Resident = Callable[[torch.Tensor], bool]


@dataclass(kw_only=True, slots=True)
class Decided:
    """What the forward of a replayed MoE block decided: experts [T,k] int64, and for each balance loss the shares fp32
    of the rows that they got.

    A replay takes these instead of routing again, so that rounding cannot send a token elsewhere the second time, and
    the ranks need not agree on the shares again.
    """

    experts: torch.Tensor | None = None
    shares: tuple[torch.Tensor, ...] | None = None


class Keeper:
    """Sees every tensor that autograd keeps in a forward. `at_work` says whether some are to be replaced."""

    def __init__(self, books: Books, *, at_work: bool) -> None:
        self._books, self._at_work = books, at_work
        self._count: Callable[[torch.Tensor], None] | None = None
        self._lacking: dict[int, _Again] = {}

    @contextmanager
    def forward(self, resident: Resident) -> Iterator[None]:
        """Around the forward of a micro-batch; `resident` tells tensors that live anyway (weights, caches)."""
        with self._books.saving(resident) as count:
            if count is None and not self._at_work:
                yield
                return
            self._count = count or (lambda tensor: None)
            try:
                with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                    yield
            finally:
                self._count = None

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """Book a tensor that is kept for backward without autograd's knowledge; returns it."""
        if self._count is not None:
            self._count(tensor)
        return tensor

    @contextmanager
    def discard(
        self, made: torch.Tensor, make: Callable[..., torch.Tensor], *inputs: torch.Tensor, asked: bool
    ) -> Iterator[None]:
        """Operations inside do not keep `made`: backward calls make(*inputs), once, for all of them.

        Only if `asked`, and only in the forward proper: in evaluation nothing is kept, and a replay is short-lived.
        """
        if not asked or self._count is None or not torch.is_grad_enabled():
            yield
            return
        kept = tuple(self._pack(x.detach()) for x in inputs)
        key = identity(made)
        self._lacking[key] = _Again(make, kept, self._books)
        try:
            yield  # `made` is alive here, so no other storage has its identity
        finally:
            del self._lacking[key]

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _View:
        again = self._lacking.get(identity(tensor))
        if again is not None:
            return again.view(tensor)
        assert self._count is not None  # hooks and discards exist only inside `forward`
        self._count(tensor)
        return tensor


class _Again:
    """A tensor that backward makes again when first asked for it, and drops when last."""

    def __init__(
        self, make: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor | _View, ...], books: Books
    ) -> None:
        self._make, self._inputs = make, inputs
        self._books, self._module = books, books.module
        self._value: torch.Tensor | None = None
        self._asking = 0

    def view(self, tensor: torch.Tensor) -> _View:
        self._asking += 1
        return _View(of=self, size=tensor.size(), stride=tensor.stride(), offset=tensor.storage_offset())

    def take(self) -> torch.Tensor:
        if self._value is None:
            with torch.no_grad(), self._books.within(self._module):
                self._value = self._make(*map(_unpack, self._inputs))
        value = self._value
        self._asking -= 1
        if not self._asking:
            self._value = None
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class _View:
    """How an operation saw the tensor that it would have kept."""

    of: _Again
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


def _unpack(kept: torch.Tensor | _View) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    return kept.of.take().as_strided(kept.size, kept.stride, kept.offset)


def replayed(books: Books, block: Callable[..., tuple[torch.Tensor, ...]], *inputs: torch.Tensor) -> Any:
    """block(*inputs), of which only the inputs are kept, booked to the module that runs now; backward runs it again."""
    return _Replay.apply(books, block, *inputs)


class _Replay(torch.autograd.Function):
    """Reentrant: backward builds the graph of the block and goes through it at once, weight gradients included."""

    @staticmethod
    def forward(
        ctx: Any, books: Books, block: Callable[..., tuple[torch.Tensor, ...]], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.books, ctx.module, ctx.block = books, books.module, block
        ctx.save_for_backward(*inputs)
        out = block(*inputs)
        ctx.mark_non_differentiable(*(x for x in out if not x.is_floating_point()))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        inputs = [
            x.detach().requires_grad_(needed)
            for x, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        ]
        with torch.enable_grad(), ctx.books.within(ctx.module):
            out = ctx.block(*inputs)
            used = [(x, grad) for x, grad in zip(out, grads, strict=True) if x.requires_grad and grad is not None]
            torch.autograd.backward([x for x, _ in used], [grad for _, grad in used])
        return None, None, *(x.grad for x in inputs)
