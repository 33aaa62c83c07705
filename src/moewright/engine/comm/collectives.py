"""The only caller of torch.distributed collectives.

Every call over a group of more than one rank books the payload this rank hands in; over one rank it
is a no-op. Differentiable forms are own autograd Functions: the functional ones of torch reduce in
backward where model parallelism must not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moewright.engine.observe.counters import Counters
from moewright.spec.hardware import Collective

_FAKE = "fake"

# torch 2.13 renames the two; 2.11 has only the older names.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A named group of ranks as this rank sees it. `handle` is None when it is alone."""

    name: str
    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None
    counters: Counters

    @property
    def size(self) -> int:
        return len(self.ranks)

    def count_call(self, op: Collective, tensor: torch.Tensor) -> None:
        self.counters.count_collective(op, self.name, tensor.numel() * tensor.element_size())

    def measure_wait(self) -> AbstractContextManager[None]:
        """Around a call that blocks until the group's other ranks have come."""
        return self.counters.wait_clock.measure(self.name)


def join_world(*, rank: int, world_size: int, store: Any, backend: str, timeout_s: float) -> None:
    """Join the world: one process group over all ranks, its timeout the policy for every group made
    of it."""
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )


def join_fake_world(*, rank: int, world_size: int) -> None:
    """Join a world of which nobody else is there: collectives return at once and carry no
    values."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group(_FAKE, store=FakeStore(), rank=rank, world_size=world_size)


def leave_world() -> None:
    """Leave the world, if joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def create_process_groups(groups: Sequence[tuple[int, ...]], rank: int) -> dist.ProcessGroup | None:
    """Create process groups for all of `groups`, in that order on every rank; return the one `rank`
    is in."""
    mine = None
    fake = dist.get_backend() == _FAKE
    if fake:  # nobody waits for the groups of others
        groups = [ranks for ranks in groups if rank in ranks]
    for ranks in groups:
        handle = dist.new_group(list(ranks), timeout=None if fake else _world_timeout())
        if rank in ranks:
            mine = handle
    return mine


def _world_timeout() -> timedelta | None:
    """The world's timeout. A new group would not take it over: torch has a default of its own, half
    an hour on gloo. A pretended world has none.
    """
    world: Any = dist.group.WORLD
    options = world._get_backend(_control_device(None)).options
    return None if options is None else options._timeout


@dataclass(frozen=True, slots=True)
class TimedWork:
    """A call under way over a group; the wait for it goes to the group's account."""

    work: dist.Work
    group: Group

    def wait(self) -> bool:
        with self.group.measure_wait():
            return bool(self.work.wait())


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncCollective:
    """A collective under way: `out` is not to be touched, nor `tensor` to be written, before
    `land`."""

    out: torch.Tensor
    tensor: torch.Tensor
    work: TimedWork | None

    def wait(self) -> torch.Tensor:
        """Wait for it, and for good: `out` holds the result."""
        if self.work is not None:
            self.work.wait()
        return self.out


def start_all_reduce(
    tensor: torch.Tensor, group: Group, *, maximum: bool = False
) -> AsyncCollective:
    """Start a sum (or maximum) over the group, in place."""
    work = None
    if group.size > 1:
        group.count_call(Collective.ALL_REDUCE, tensor)
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        work = TimedWork(dist.all_reduce(tensor, op=op, group=group.handle, async_op=True), group)
    return AsyncCollective(out=tensor, tensor=tensor, work=work)


def start_reduce_scatter(out: torch.Tensor, tensor: torch.Tensor, group: Group) -> AsyncCollective:
    """Start to sum `tensor` [size * n] over the group; rank i gets slice i in `out` [n]."""
    if group.size == 1:
        return AsyncCollective(out=out.copy_(tensor), tensor=tensor, work=None)
    group.count_call(Collective.REDUCE_SCATTER, tensor)
    work = _scatter_single(out, tensor, group=group.handle, async_op=True)
    return AsyncCollective(out=out, tensor=tensor, work=TimedWork(work, group))


def start_all_gather(out: torch.Tensor, tensor: torch.Tensor, group: Group) -> AsyncCollective:
    """Start to concatenate each rank's `tensor` [n] into `out` [size * n]."""
    if group.size == 1:
        return AsyncCollective(out=out.copy_(tensor), tensor=tensor, work=None)
    group.count_call(Collective.ALL_GATHER, tensor)
    work = _gather_single(out, tensor, group=group.handle, async_op=True)
    return AsyncCollective(out=out, tensor=tensor, work=TimedWork(work, group))


def start_all_to_all(
    tensor: torch.Tensor, group: Group, *, send: tuple[int, ...], receive: tuple[int, ...]
) -> AsyncCollective:
    """Start to send `send[i]` leading rows to rank i and to get `receive[i]` from it, over more
    than one rank."""
    group.count_call(Collective.ALL_TO_ALL, tensor)
    tensor = tensor.contiguous()
    out = tensor.new_empty((sum(receive), *tensor.shape[1:]))
    work = dist.all_to_all_single(
        out, tensor, list(receive), list(send), group=group.handle, async_op=True
    )
    return AsyncCollective(out=out, tensor=tensor, work=TimedWork(work, group))


def all_reduce(tensor: torch.Tensor, group: Group, *, maximum: bool = False) -> torch.Tensor:
    """Sum (or maximum) over the group, in place."""
    return start_all_reduce(tensor, group, maximum=maximum).wait()


def reduce_scatter(out: torch.Tensor, tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum `tensor` [size * n] over the group; rank i gets slice i in `out` [n]."""
    return start_reduce_scatter(out, tensor, group).wait()


def all_gather(out: torch.Tensor, tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Concatenate each rank's `tensor` [n] into `out` [size * n]."""
    return start_all_gather(out, tensor, group).wait()


def all_gather_rows(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Every rank's [n, ...], one after the other: [size * n, ...]."""
    if group.size == 1:
        return tensor
    return all_gather(
        tensor.new_empty((group.size * len(tensor), *tensor.shape[1:])), tensor.contiguous(), group
    )


def reduce_scatter_rows(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Slice i, on rank i, of the sum over ranks: [size * n, ...] -> [n, ...]; the transpose of
    `gather`."""
    if group.size == 1:
        return tensor
    return reduce_scatter(
        tensor.new_empty((len(tensor) // group.size, *tensor.shape[1:])), tensor.contiguous(), group
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallel:
    """A TP group as blocks use it: between them a rank holds its t of the group's T tokens
    (`sequence`), or all T.

    Each of the two ways is the backward of the other.
    """

    group: Group
    sequence_parallel: bool

    def gather(self, x_t: torch.Tensor) -> torch.Tensor:
        """All T tokens, from what a rank holds between blocks."""
        return all_gather_rows(x_t, self.group) if self.sequence_parallel else x_t

    def reduce(self, x_T: torch.Tensor) -> torch.Tensor:
        """What a rank holds between blocks of the sum over ranks; may overwrite `x_T`."""
        return (
            reduce_scatter_rows(x_T, self.group)
            if self.sequence_parallel
            else all_reduce(x_T, self.group)
        )


class AllGatherRows(torch.autograd.Function):
    """`gather` with its transpose in backward: the gathered copies are used by different
    weights."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return all_gather_rows(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_scatter_rows(grad, ctx.group), None


class GatherSequence(torch.autograd.Function):
    """`TensorParallel.whole`, of what the ranks' different weights use then: backward sums what
    each of them adds."""

    @staticmethod
    def forward(ctx: Any, x_t: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        ctx.tp = tp
        return tp.gather(x_t)

    @staticmethod
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.tp.summed(grad_T.clone(memory_format=torch.contiguous_format)), None


class ReduceScatterRows(torch.autograd.Function):
    """`scatter_sum` with its transpose in backward."""

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
    """Send `send[i]` leading rows to rank i and get `receive[i]` from it; differentiable; splits
    may be uneven or 0."""
    if group.size == 1:
        return tensor
    return _AllToAll.apply(tensor, group, tuple(send), tuple(receive))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        group: Group,
        send: tuple[int, ...],
        receive: tuple[int, ...],
    ) -> torch.Tensor:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        return start_all_to_all(tensor, group, send=send, receive=receive).wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        back = start_all_to_all(grad, ctx.group, send=ctx.receive, receive=ctx.send).wait()
        return back, None, None, None


def all_to_all_overlapped(
    tensors: Sequence[torch.Tensor],
    group: Group,
    *,
    send: Sequence[int],
    receive: Sequence[int],
    overlapped_work: Callable[[], None] | None,
) -> tuple[torch.Tensor, ...]:
    """`all_to_all` of each tensor, `meanwhile` called while they travel; in backward their
    gradients travel while those of what `meanwhile` made are found, for autograd takes the latest
    first.
    """
    if group.size == 1 or overlapped_work is None:
        out = tuple(all_to_all(tensor, group, send=send, receive=receive) for tensor in tensors)
        if overlapped_work is not None:
            overlapped_work()
        return out
    trips = [_Exchange(group=group, send=tuple(send), receive=tuple(receive)) for _ in tensors]
    tickets = [
        _StartExchange.apply(tensor, trip) for tensor, trip in zip(tensors, trips, strict=True)
    ]
    overlapped_work()
    return tuple(
        _FinishExchange.apply(ticket, trip) for ticket, trip in zip(tickets, trips, strict=True)
    )


@dataclass(kw_only=True, slots=True)
class _Exchange:
    """One exchange under way, and in backward that of its gradient."""

    group: Group
    send: tuple[int, ...]
    receive: tuple[int, ...]
    pending: AsyncCollective | None = None

    def start(self, tensor: torch.Tensor, *, back: bool) -> None:
        send, receive = (self.receive, self.send) if back else (self.send, self.receive)
        self.pending = start_all_to_all(tensor, self.group, send=send, receive=receive)

    def finish(self) -> torch.Tensor:
        assert self.pending is not None  # started before
        out = self.pending.wait()
        self.pending = None
        return out


class _StartExchange(torch.autograd.Function):
    """Starts an exchange; its backward ends that of the gradient. Gives a ticket, empty, that
    orders the two ends."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, trip: _Exchange) -> torch.Tensor:
        ctx.trip = trip
        trip.start(tensor, back=False)
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, ticket: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.trip.end(), None


class _FinishExchange(torch.autograd.Function):
    """Ends an exchange; its backward starts that of the gradient."""

    @staticmethod
    def forward(ctx: Any, ticket: torch.Tensor, trip: _Exchange) -> torch.Tensor:
        ctx.trip = trip
        return trip.finish()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.trip.start(grad, back=True)
        return grad.new_empty(0), None


class RingShift:
    """A tensor on its way to the next rank of a ring, and that of the rank before on its way
    here."""

    def __init__(self, tensor: torch.Tensor, group: Group) -> None:
        group.count_call(Collective.P2P, tensor)
        self._sent, self._received = (
            tensor.contiguous(),
            torch.empty_like(tensor, memory_format=torch.contiguous_format),
        )
        after, before = (group.ranks[(group.index + step) % group.size] for step in (1, -1))
        # One batch: NCCL runs what a pair of ranks exchanges in order, and two sends first would
        # wait for each other.
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, after, group.handle),
                dist.P2POp(dist.irecv, self._received, before, group.handle),
            ]
        )
        self._works = [TimedWork(work, group) for work in works]

    def wait(self) -> torch.Tensor:
        """What the rank before sent, once it is here."""
        for work in self._works:
            work.wait()
        return self._received


def send(tensor: torch.Tensor, group: Group, *, to: int) -> TimedWork:
    """Start sending to rank `to` of the group. The tensor must live, unchanged, until the work has
    been waited for."""
    group.count_call(Collective.P2P, tensor)
    with group.measure_wait():  # the call itself may block, on gloo, until the message has room
        work = dist.isend(tensor, group.ranks[to], group=group.handle)
    assert work is not None  # this rank is in the group
    return TimedWork(work, group)


def receive(out: torch.Tensor, group: Group, *, source: int) -> TimedWork:
    """Start receiving into `out` what rank `source` of the group sends next; waiting for the work
    brings it there."""
    with group.measure_wait():
        work = dist.irecv(out, group.ranks[source], group=group.handle)
    assert work is not None  # this rank is in the group
    return TimedWork(work, group)


def new_control_group() -> dist.ProcessGroup | None:
    """A process group of the whole world for the control traffic of a second thread; every rank
    makes it at once."""
    return (
        dist.new_group(backend="gloo", timeout=_world_timeout()) if dist.is_initialized() else None
    )


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's JSON-able value, in rank order, on every rank of the world. Control traffic: not
    booked.

    `group`: one of `aside`; the world's own when not given.
    """
    if not dist.is_initialized():
        return [value]
    world, device = dist.get_world_size(), _control_device(group)
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = torch.zeros(world, dtype=torch.int64, device=device)
    _gather_single(sizes, torch.tensor([data.numel()], device=device), group=group)
    room = int(sizes.max())
    padded = torch.zeros(room, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    parts = torch.zeros(world * room, dtype=torch.uint8, device=device)
    _gather_single(parts, padded, group=group)
    rows = parts.view(world, room).cpu()
    return [
        json.loads(bytes(row[:size].numpy()))
        for row, size in zip(rows, sizes.tolist(), strict=True)
    ]


def _control_device(group: dist.ProcessGroup | None) -> torch.device:
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
