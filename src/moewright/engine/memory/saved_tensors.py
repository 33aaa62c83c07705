"""What autograd keeps of a forward for backward: booked, and where the layout says so made again or
fetched instead.

Two ways to make it again, as in Megatron-LM. `replayed` runs a block without a graph, keeps its
inputs, and runs it again in backward. `Keeper.discard` lets go of one tensor that a following
operation keeps, and makes it again when backward asks for it. A replay computes and communicates
like the forward did, and is booked like it; it decides nothing anew (`Decided`).

`Keeper.offload` moves a kept tensor to host memory and fetches it when backward asks for it. On a
GPU the way out runs on a stream of its own beside the forward; the way back is waited for. On a CPU
the copy lies in the same memory as the original did: it saves nothing, but what a rank's device
would hold is counted and proven all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from moewright.engine.observe.counters import Counters, storage_id

IsResident = Callable[[torch.Tensor], bool]


@dataclass(kw_only=True, slots=True)
class RoutingDecisions:
    """What the forward of a replayed MoE block decided: experts [T,k] int64, and for each balance
    loss the shares fp32 of the rows that they got.

    A replay takes these instead of routing again, so that rounding cannot send a token elsewhere
    the second time, and the ranks need not agree on the shares again.
    """

    experts: torch.Tensor | None = None
    shares: tuple[torch.Tensor, ...] | None = None


class SavedTensorManager:
    """Sees every tensor that autograd keeps in a forward. `at_work` says whether some are to be
    replaced."""

    def __init__(self, books: Counters, *, replaces_tensors: bool) -> None:
        self._books, self._at_work = books, replaces_tensors
        self._count: Callable[[torch.Tensor], None] | None = None
        self._lacking: dict[int, _Replacement] = {}
        self._outgoing: torch.cuda.Stream | None = None
        self._made_dims = 0  # tensors of so many dims go to the host when they are kept; 0: none
        self._made: list[torch.Tensor] = []

    @contextmanager
    def track_forward(self, key: tuple[int, int], resident: IsResident) -> Iterator[None]:
        """Around the forward of `key` (micro-batch, chunk); `resident` tells tensors that live
        anyway (weights, caches).
        """
        with self._books.count_saved(key, resident) as count:
            if count is None and not self._at_work:
                yield
                return
            self._count = count or (lambda tensor: None)
            try:
                with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                    yield
            finally:
                self._count = None

    def count_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Book a tensor that is kept for backward without autograd's knowledge; returns it."""
        if self._count is not None:
            self._count(tensor)
        return tensor

    @contextmanager
    def discard_and_recompute(
        self,
        made: torch.Tensor,
        make: Callable[..., torch.Tensor],
        *inputs: torch.Tensor,
        enabled: bool,
    ) -> Iterator[None]:
        """Operations inside do not keep `made`: backward calls make(*inputs), once, for all of
        them.

        Only if `asked`, and only in the forward proper: in evaluation nothing is kept, and a replay
        is short-lived.
        """
        if not enabled or self._count is None or not torch.is_grad_enabled():
            yield
            return
        kept = tuple(self._pack(x.detach()) for x in inputs)
        key = storage_id(made)
        self._lacking[key] = _Recomputed(make, kept, self._books)
        try:
            yield  # `made` is alive here, so no other storage has its identity
        finally:
            del self._lacking[key]

    @contextmanager
    def offload(self, *tensors: torch.Tensor, enabled: bool) -> Iterator[None]:
        """Operations inside keep these tensors on the host; `asked` as for `discard`, which goes
        before."""
        if not enabled or self._count is None or not torch.is_grad_enabled():
            yield
            return
        mine = {storage_id(x): self._away(x) for x in tensors if storage_id(x) not in self._lacking}
        self._lacking.update(mine)
        try:
            yield
        finally:
            for key in mine:
                del self._lacking[key]

    @contextmanager
    def offload_saved(self, *, dims: int, enabled: bool) -> Iterator[None]:
        """Tensors of `dims` dims that operations inside make and keep, or keep without being in
        `offload`, go to the host, for the inside alone.
        """
        if not enabled or self._count is None or not torch.is_grad_enabled():
            yield
            return
        before = set(self._lacking)
        self._made_dims = dims
        try:
            yield
        finally:
            self._made_dims = 0
            self._made.clear()
            self._lacking = {key: other for key, other in self._lacking.items() if key in before}

    def _away(self, tensor: torch.Tensor) -> _Offloaded:
        if tensor.is_cuda and self._outgoing is None:
            self._outgoing = torch.cuda.Stream(tensor.device)
        return _Offloaded(tensor.device, self._books, self._outgoing)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _SavedView:
        key = storage_id(tensor)
        if self._made_dims and tensor.dim() == self._made_dims and key not in self._lacking:
            self._lacking[key] = self._away(tensor)
            self._made.append(tensor)  # alive as long as its identity is looked up
        other = self._lacking.get(key)
        if other is not None:
            return other.view(tensor)
        assert self._count is not None  # hooks, discards and offloads exist only inside `forward`
        self._count(tensor)
        return tensor


class _Replacement:
    """For a tensor that backward brings back when first asked for it, and drops when last."""

    def __init__(self, books: Counters) -> None:
        self._books, self._where = books, books.scope
        self._value: torch.Tensor | None = None
        self._asking = 0

    def bring(self) -> torch.Tensor:
        raise NotImplementedError

    def view(self, tensor: torch.Tensor) -> _SavedView:
        self._asking += 1
        return _SavedView(
            of=self, size=tensor.size(), stride=tensor.stride(), offset=tensor.storage_offset()
        )

    def take(self) -> torch.Tensor:
        if self._value is None:
            with torch.no_grad(), self._books.attribute_to(self._where):
                self._value = self.bring()
        value = self._value
        self._asking -= 1
        if not self._asking:
            self._value = None
        return value


class _Recomputed(_Replacement):
    """Made again from its inputs."""

    def __init__(
        self,
        make: Callable[..., torch.Tensor],
        inputs: tuple[torch.Tensor | _SavedView, ...],
        books: Counters,
    ) -> None:
        super().__init__(books)
        self._make, self._inputs = make, inputs

    def bring(self) -> torch.Tensor:
        return self._make(*map(_unpack, self._inputs))


class _Offloaded(_Replacement):
    """On the host, from the first time that an operation keeps it."""

    def __init__(
        self, device: torch.device, books: Counters, outgoing: torch.cuda.Stream | None
    ) -> None:
        super().__init__(books)
        self._device, self._outgoing = device, outgoing
        self._host: torch.Tensor | None = None

    def view(self, tensor: torch.Tensor) -> _SavedView:
        if self._host is None:
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            self._host = self._copied(tensor.as_strided((size,), (1,), 0))
        return super().view(tensor)

    def _copied(self, flat: torch.Tensor) -> torch.Tensor:
        with self._books.on_host():
            host = torch.empty_like(flat, device="cpu", pin_memory=self._outgoing is not None)
        if self._outgoing is None:
            return host.copy_(flat)
        self._outgoing.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outgoing):
            host.copy_(flat, non_blocking=True)
            self._gone = self._outgoing.record_event()
        flat.record_stream(
            self._outgoing
        )  # its memory is not given to others before the copy is made
        return host

    def bring(self) -> torch.Tensor:
        assert self._host is not None  # only a view asks for it
        if self._outgoing is None:
            return self._host.clone()
        torch.cuda.current_stream(self._device).wait_event(self._gone)
        return self._host.to(self._device, non_blocking=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _SavedView:
    """How an operation saw the tensor that it would have kept."""

    of: _Replacement
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


def _unpack(kept: torch.Tensor | _SavedView) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    return kept.of.take().as_strided(kept.size, kept.stride, kept.offset)


def run_checkpointed(
    books: Counters, block: Callable[..., tuple[torch.Tensor, ...]], *inputs: torch.Tensor
) -> Any:
    """block(*inputs), of which only the inputs are kept, booked to the module that runs now;
    backward runs it again."""
    return _Checkpoint.apply(books, block, *inputs)


class _Checkpoint(torch.autograd.Function):
    """Reentrant: backward builds the graph of the block and goes through it at once, weight
    gradients included."""

    @staticmethod
    def forward(
        ctx: Any,
        books: Counters,
        block: Callable[..., tuple[torch.Tensor, ...]],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.books, ctx.where, ctx.block = books, books.scope, block
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
        with torch.enable_grad(), ctx.books.within(ctx.where):
            out = ctx.block(*inputs)
            used = [
                (x, grad)
                for x, grad in zip(out, grads, strict=True)
                if x.requires_grad and grad is not None
            ]
            torch.autograd.backward([x for x, _ in used], [grad for _, grad in used])
        return None, None, *(x.grad for x in inputs)
