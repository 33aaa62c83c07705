"""Differentiable collectives, as autograd Functions.

The functional ones of torch reduce in backward where model parallelism must not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moewright.engine.comm.collectives import (
    AsyncCollective,
    Group,
    TensorParallel,
    all_gather_rows,
    reduce_scatter_rows,
    start_all_to_all,
)
from moewright.engine.graph_nodes import ReleasingFunction


class AllGatherRows(ReleasingFunction):
    """A differentiable `all_gather_rows`, whose backward is its transpose, a reduce-scatter.

    Each rank uses the gathered rows with weights of its own, so their gradients are summed.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return all_gather_rows(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_scatter_rows(grad, ctx.group), None


class GatherSequence(ReleasingFunction):
    """A differentiable `TensorParallel.gather`, whose backward sums over ranks.

    Each rank uses the gathered tokens with weights of its own, so their gradients are summed.
    """

    @staticmethod
    def forward(ctx: Any, x_t: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        ctx.tp = tp
        return tp.gather(x_t)

    @staticmethod
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[torch.Tensor, None]:
        # A copy: `reduce` may write into what it gets, and the gradient is autograd's.
        return ctx.tp.reduce(grad_T.clone(memory_format=torch.contiguous_format)), None


class ReduceScatterRows(ReleasingFunction):
    """A differentiable `reduce_scatter_rows`, whose backward is its transpose, an all-gather."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return reduce_scatter_rows(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_gather_rows(grad, ctx.group), None


def all_to_all(
    tensor: torch.Tensor, group: Group, *, send: Sequence[int], receive: Sequence[int]
) -> torch.Tensor:
    """Send `send[i]` leading rows to rank i and get `receive[i]` from it.

    Differentiable; splits may be uneven or 0.
    """
    if group.size == 1:
        return tensor
    return _AllToAll.apply(tensor, group, tuple(send), tuple(receive))


class _AllToAll(ReleasingFunction):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        group: Group,
        send: tuple[int, ...],
        receive: tuple[int, ...],
    ) -> torch.Tensor:
        ctx.group = group
        ctx.send = send
        ctx.receive = receive
        return start_all_to_all(tensor, group, send=send, receive=receive).wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        returned = start_all_to_all(grad, ctx.group, send=ctx.receive, receive=ctx.send).wait()
        return returned, None, None, None


def all_to_all_in_turn(
    tensors: Sequence[torch.Tensor], group: Group, *, send: Sequence[int], receive: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    """Exchange one tensor after the other by `all_to_all`."""
    return tuple(all_to_all(tensor, group, send=send, receive=receive) for tensor in tensors)


def all_to_all_overlapped(
    tensors: Sequence[torch.Tensor],
    group: Group,
    *,
    send: Sequence[int],
    receive: Sequence[int],
    overlapped_work: Callable[[], None],
) -> tuple[torch.Tensor, ...]:
    """Exchange each tensor by `all_to_all` while `overlapped_work` runs.

    In backward the gradients of `tensors` travel while the gradients of `overlapped_work` are
    computed, because autograd runs the operations of a forward in reverse order.
    """
    if group.size == 1:
        overlapped_work()
        return tuple(tensors)
    exchanges = [_Exchange(group=group, send=tuple(send), receive=tuple(receive)) for _ in tensors]
    tickets = [
        _StartExchange.apply(tensor, exchange)
        for tensor, exchange in zip(tensors, exchanges, strict=True)
    ]
    overlapped_work()
    return tuple(
        _FinishExchange.apply(ticket, exchange)
        for ticket, exchange in zip(tickets, exchanges, strict=True)
    )


def all_to_all_beside(
    tensors: Sequence[torch.Tensor],
    group: Group,
    *,
    send: Sequence[int],
    receive: Sequence[int],
    forward_work: Callable[[], None],
    backward_work: Callable[[], None],
) -> tuple[torch.Tensor, ...]:
    """Exchange each tensor by `all_to_all` while `forward_work` runs.

    In backward the gradients of `tensors` travel while `backward_work` runs. Neither is part of
    this graph.
    """
    exchange = _TwoWayWork(
        group=group,
        send=tuple(send),
        receive=tuple(receive),
        forward_work=forward_work,
        backward_work=backward_work,
    )
    out: tuple[torch.Tensor, ...] = _AllToAllBeside.apply(exchange, *tensors)
    return out


@dataclass(frozen=True, kw_only=True, slots=True)
class _TwoWayWork:
    """An exchange and its transpose, each with work beside it."""

    group: Group
    send: tuple[int, ...]
    receive: tuple[int, ...]
    forward_work: Callable[[], None]
    backward_work: Callable[[], None]


class _AllToAllBeside(ReleasingFunction):
    @staticmethod
    def forward(
        ctx: Any, exchange: _TwoWayWork, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        return _exchange_beside(
            tensors, exchange.group, exchange.send, exchange.receive, exchange.forward_work
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange: _TwoWayWork = ctx.exchange
        received = _exchange_beside(
            grads, exchange.group, exchange.receive, exchange.send, exchange.backward_work
        )
        return None, *received


def _exchange_beside(
    tensors: Sequence[torch.Tensor],
    group: Group,
    send: tuple[int, ...],
    receive: tuple[int, ...],
    work: Callable[[], None],
) -> tuple[torch.Tensor, ...]:
    if group.size == 1:
        work()
        return tuple(tensor.view_as(tensor) for tensor in tensors)
    started = [start_all_to_all(tensor, group, send=send, receive=receive) for tensor in tensors]
    work()
    return tuple(exchange.wait() for exchange in started)


@dataclass(kw_only=True, slots=True)
class _Exchange:
    """One all-to-all between its start and its finish, and in backward that of its gradient."""

    group: Group
    send: tuple[int, ...]
    receive: tuple[int, ...]
    pending: AsyncCollective | None = None

    def start(self, tensor: torch.Tensor) -> None:
        self.pending = start_all_to_all(tensor, self.group, send=self.send, receive=self.receive)

    def start_backward(self, grad: torch.Tensor) -> None:
        self.pending = start_all_to_all(grad, self.group, send=self.receive, receive=self.send)

    def finish(self) -> torch.Tensor:
        assert self.pending is not None  # started before
        out = self.pending.wait()
        self.pending = None
        return out


class _StartExchange(ReleasingFunction):
    """The start of an exchange, whose backward finishes that of the gradient.

    It returns a ticket, an empty tensor that makes autograd run the finish after the start.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        exchange.start(tensor)
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, ticket: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.exchange.finish(), None


class _FinishExchange(ReleasingFunction):
    """The finish of an exchange, whose backward starts that of the gradient."""

    @staticmethod
    def forward(ctx: Any, ticket: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.finish()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.exchange.start_backward(grad)
        # The gradient of the ticket, which has to have the ticket's shape.
        return grad.new_empty(0), None
