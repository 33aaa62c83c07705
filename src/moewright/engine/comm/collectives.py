"""The only caller of torch.distributed collectives.

Every call over a group of more than one rank counts the payload this rank hands in; over one rank
it is a no-op.
"""

from __future__ import annotations

import json
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moewright.engine.comm.tape import Tape
from moewright.engine.observe.counters import Counters
from moewright.engine.torch_private import (
    communicator,
    count_uses,
    create_fake_store,
    group_timeout,
)
from moewright.spec.hardware import Collective

_FAKE = "fake"
_GLOO = "gloo"
_RELEASE_S = 1.0  # a thread of gloo drops its use within milliseconds
_RELEASE_POLL_S = 1e-4  # shorter than a small collective
# Tensors of collectives that were waited for, each with its uses before the call. A thread of gloo
# holds those of one collective at most, so the last few are enough.
_unreleased: deque[tuple[weakref.ref[torch.Tensor], int]] = deque(maxlen=256)

# torch 2.13 renames the two; 2.11 has only the older names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A named group of ranks as this rank sees it.

    `handle` is None when this rank is alone in it, or repeats the work of another by a `tape`.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None
    counters: Counters
    tape: Tape = field(default_factory=Tape)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def count_call(self, op: Collective, tensor: torch.Tensor) -> None:
        """Count a call and the bytes of the tensor that this rank hands in."""
        self.counters.count_collective(op, self.name, tensor.numel() * tensor.element_size())

    def hand_to_library(self, *tensors: torch.Tensor) -> AbstractContextManager[None]:
        """Count tensors whose rows a library moves between the ranks inside."""
        nbytes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        return self.counters.hand_to_library(Collective.ALL_TO_ALL, self.name, nbytes)

    def begin_call(self) -> str:
        """Note that a collective begins; return what its wait is marked with."""
        return self.counters.wait_clock.begin_call(self.name)

    def measure_wait(self, name: str, mark: str = "") -> AbstractContextManager[None]:
        """Measure the call `name` inside, which blocks until the group's other ranks have come."""
        return self.counters.wait_for(self.name, name, mark)


def communicator_address(group: Group, device: torch.device) -> int:
    """Return the address of the NCCL communicator of a group of several ranks, made where needed.

    The group's first collective makes it, so one is run.
    """
    assert group.handle is not None  # several ranks
    dist.all_reduce(torch.zeros(1, device=device), group=group.handle)
    return communicator(group.handle, device)


def join_world(*, rank: int, world_size: int, store: Any, backend: str, timeout_s: float) -> None:
    """Join the world: one process group over all ranks.

    Every group that is created in it has its timeout.
    """
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )


def join_fake_world(*, rank: int, world_size: int) -> None:
    """Join a world in which no other rank runs: collectives return at once and carry no values."""
    dist.init_process_group(_FAKE, store=create_fake_store(), rank=rank, world_size=world_size)


def leave_world() -> None:
    """Leave the world, if joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def await_release() -> None:
    """Wait until gloo holds no tensor of a collective that is over.

    A thread of gloo lets go of them a moment after `wait` has returned, which nothing tells but the
    uses of the tensor. One that somebody else keeps meanwhile is given up after `_RELEASE_S`.
    """
    deadline = time.monotonic() + _RELEASE_S
    with suppress(IndexError):  # of an empty list; a second thread may wait beside
        while True:
            reference, uses = _unreleased.popleft()
            while _is_held(reference, uses) and time.monotonic() < deadline:
                time.sleep(_RELEASE_POLL_S)


def _is_held(reference: weakref.ref[torch.Tensor], uses: int) -> bool:
    tensor = reference()
    return tensor is not None and count_uses(tensor) > uses


def create_process_groups(groups: Sequence[tuple[int, ...]], rank: int) -> dist.ProcessGroup | None:
    """Create process groups for all of `groups`, in that order on every rank.

    Returns the one that `rank` is in.
    """
    is_fake = dist.get_backend() == _FAKE
    if is_fake:  # no other rank runs that would wait for its groups
        groups = [ranks for ranks in groups if rank in ranks]
    timeout = None if is_fake else _world_timeout()
    own_handle = None
    for ranks in groups:
        handle = dist.new_group(list(ranks), timeout=timeout)
        if rank in ranks:
            own_handle = handle
    return own_handle


def _world_timeout() -> timedelta | None:
    """Return the world's timeout, or None for a fake world, which has none.

    A new group would not inherit it: torch has a default of its own, half an hour on gloo.
    """
    world: Any = dist.group.WORLD
    return group_timeout(world, _control_device(None))


@dataclass(slots=True)
class TimedWork:
    """An asynchronous call over a group; the time that `wait` blocks is measured for that group.

    `tensors` are those that a thread of gloo holds, each with its uses before the call. `recorded`
    is what is to be put on the group's tape, and where. `mark` tells its wait from others' in a
    trace.
    """

    work: dist.Work | None
    group: Group
    name: str
    tensors: tuple[tuple[torch.Tensor, int], ...] = ()
    recorded: tuple[int, torch.Tensor] | None = None
    mark: str = ""

    def wait(self) -> bool:
        if self.work is None:
            return True
        with self.group.measure_wait(self.name, self.mark):
            is_done = bool(self.work.wait())
        self.work = None  # which holds the tensors too
        _unreleased.extend((weakref.ref(tensor), uses) for tensor, uses in self.tensors)
        self.tensors = ()
        if self.recorded is not None:
            self.group.tape.put(*self.recorded)
            self.recorded = None
        # Counts of live memory must not depend on when a thread of gloo lets go.
        if self.group.counters.is_counting:
            await_release()
        return is_done


def _start(
    name: str,
    group: Group,
    call: Callable[..., dist.Work | None],
    *tensors: torch.Tensor,
    **options: Any,
) -> TimedWork:
    """Start a collective; `tensors` are its arguments: the result, then what this rank hands in."""
    group.tape.note_start(f"{name} over {group.name}", tensors[-1])
    if group.tape.is_playing:
        group.tape.play(tensors[0])
        return TimedWork(None, group, name)
    recorded = None
    if group.tape.is_recording:
        recorded = group.tape.reserve(), tensors[0]
    is_held = dist.get_backend(group.handle) == _GLOO
    uses = tuple((tensor, count_uses(tensor)) for tensor in tensors if is_held)
    mark = group.begin_call()
    work = call(*tensors, group=group.handle, async_op=True, **options)
    return TimedWork(work, group, name, uses, recorded, mark)


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncCollective:
    """A collective that has started.

    Until `wait` returns, `out` must be neither read nor written, and `tensor` must not be written.
    """

    out: torch.Tensor
    tensor: torch.Tensor
    work: TimedWork | None

    def wait(self) -> torch.Tensor:
        """Wait until it is done and return `out`, which then holds the result."""
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
        work = _start("all_reduce", group, dist.all_reduce, tensor, op=op)
    return AsyncCollective(out=tensor, tensor=tensor, work=work)


def start_reduce_scatter(out: torch.Tensor, tensor: torch.Tensor, group: Group) -> AsyncCollective:
    """Start to sum `tensor` [size * n] over the group; rank i gets slice i in `out` [n]."""
    if group.size == 1:
        return AsyncCollective(out=out.copy_(tensor), tensor=tensor, work=None)
    group.count_call(Collective.REDUCE_SCATTER, tensor)
    work = _start("reduce_scatter", group, _reduce_scatter_single, out, tensor)
    return AsyncCollective(out=out, tensor=tensor, work=work)


def start_all_gather(out: torch.Tensor, tensor: torch.Tensor, group: Group) -> AsyncCollective:
    """Start to concatenate each rank's `tensor` [n] into `out` [size * n]."""
    if group.size == 1:
        return AsyncCollective(out=out.copy_(tensor), tensor=tensor, work=None)
    group.count_call(Collective.ALL_GATHER, tensor)
    work = _start("all_gather", group, _all_gather_single, out, tensor)
    return AsyncCollective(out=out, tensor=tensor, work=work)


def start_all_to_all(
    tensor: torch.Tensor, group: Group, *, send: tuple[int, ...], receive: tuple[int, ...]
) -> AsyncCollective:
    """Start to exchange rows over more than one rank.

    `send[i]` leading rows go to rank i, `receive[i]` come from it.
    """
    group.count_call(Collective.ALL_TO_ALL, tensor)
    tensor = tensor.contiguous()
    out = tensor.new_empty((sum(receive), *tensor.shape[1:]))
    splits = {"output_split_sizes": list(receive), "input_split_sizes": list(send)}
    work = _start("all_to_all", group, dist.all_to_all_single, out, tensor, **splits)
    return AsyncCollective(out=out, tensor=tensor, work=work)


def all_reduce(tensor: torch.Tensor, group: Group, *, maximum: bool = False) -> torch.Tensor:
    """Sum (or take the maximum) over the group, in place."""
    return start_all_reduce(tensor, group, maximum=maximum).wait()


def reduce_scatter(out: torch.Tensor, tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum `tensor` [size * n] over the group; rank i gets slice i in `out` [n]."""
    return start_reduce_scatter(out, tensor, group).wait()


def all_gather(out: torch.Tensor, tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Concatenate each rank's `tensor` [n] into `out` [size * n]."""
    return start_all_gather(out, tensor, group).wait()


def all_gather_rows(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return every rank's [n, ...], one after the other: [size * n, ...]."""
    if group.size == 1:
        return tensor
    out = tensor.new_empty((group.size * len(tensor), *tensor.shape[1:]))
    return all_gather(out, tensor.contiguous(), group)


def reduce_scatter_rows(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the ranks and return this rank's slice of the sum: [size * n, ...] -> [n, ...].

    This is the transpose of `all_gather_rows`.
    """
    if group.size == 1:
        return tensor
    out = tensor.new_empty((len(tensor) // group.size, *tensor.shape[1:]))
    return reduce_scatter(out, tensor.contiguous(), group)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallel:
    """A TP group as transformer blocks use it.

    Between blocks a rank holds its t of the group's T tokens with sequence parallelism, else all T.
    Each of `gather` and `reduce` is the backward of the other. `is_pipelined`: products run beside
    the exchange of their rows.
    """

    group: Group
    sequence_parallel: bool
    is_pipelined: bool = False

    def gather(self, x_t: torch.Tensor) -> torch.Tensor:
        """Return all T tokens, from what a rank holds between blocks."""
        return self.start_gather(x_t).wait()

    def reduce(self, x_T: torch.Tensor) -> torch.Tensor:
        """Sum over ranks and return what a rank holds between blocks; may overwrite `x_T`."""
        return self.start_reduce(x_T).wait()

    def start_gather(self, x_t: torch.Tensor) -> AsyncCollective:
        """Start `gather`."""
        # Without sequence parallelism every rank holds all tokens as it is.
        if not self.sequence_parallel or self.group.size == 1:
            return AsyncCollective(out=x_t, tensor=x_t, work=None)
        out = x_t.new_empty((self.group.size * len(x_t), *x_t.shape[1:]))
        return start_all_gather(out, x_t.contiguous(), self.group)

    def start_reduce(self, x_T: torch.Tensor) -> AsyncCollective:
        """Start `reduce`; until it is done, `x_T` must not be written."""
        if not self.sequence_parallel:
            return start_all_reduce(x_T, self.group)
        if self.group.size == 1:
            return AsyncCollective(out=x_T, tensor=x_T, work=None)
        out = x_T.new_empty((len(x_T) // self.group.size, *x_T.shape[1:]))
        return start_reduce_scatter(out, x_T.contiguous(), self.group)


class RingShift:
    """An exchange that sends a tensor to the next rank of a ring and receives the previous's."""

    def __init__(self, tensor: torch.Tensor, group: Group) -> None:
        group.count_call(Collective.P2P, tensor)
        self._sent = tensor.contiguous()
        self._received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self._works: list[TimedWork] = []
        tape = group.tape
        tape.note_start(f"ring shift over {group.name}", self._sent)
        if tape.is_playing:
            tape.play(self._received)
            return
        recorded = None
        if tape.is_recording:
            recorded = tape.reserve(), self._received
        next_rank = group.ranks[(group.index + 1) % group.size]
        previous_rank = group.ranks[(group.index - 1) % group.size]
        # One batch: NCCL runs the messages between a pair of ranks in order, so in a ring of two
        # both ranks would send first and wait for each other.
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, next_rank, group.handle),
                dist.P2POp(dist.irecv, self._received, previous_rank, group.handle),
            ]
        )
        self._works = [TimedWork(work, group, "ring shift") for work in works]
        self._works[-1].recorded = recorded  # which is received once all is done

    def wait(self) -> torch.Tensor:
        """Wait for the tensor of the previous rank, and return it."""
        for work in self._works:
            work.wait()
        return self._received


def send(tensor: torch.Tensor, group: Group, *, to: int) -> TimedWork:
    """Start sending to rank `to` of the group.

    The tensor must stay alive and unchanged until the returned work has been waited for.
    """
    group.count_call(Collective.P2P, tensor)
    with group.measure_wait(
        "send"
    ):  # the call itself may block, on gloo, until the message has room
        work = dist.isend(tensor, group.ranks[to], group=group.handle)
    assert work is not None  # this rank is in the group
    return TimedWork(work, group, "send")


def receive(out: torch.Tensor, group: Group, *, source: int) -> TimedWork:
    """Start receiving into `out` what rank `source` of the group sends next.

    `out` holds it once the returned work has been waited for.
    """
    with group.measure_wait("receive"):
        work = dist.irecv(out, group.ranks[source], group=group.handle)
    assert work is not None  # this rank is in the group
    return TimedWork(work, group, "receive")


def shift_flat(flat: torch.Tensor, group: Group, *, count: int, distance: int) -> torch.Tensor:
    """Send elements [n] to the rank `distance` further in the group.

    Returns the `count` elements that the rank as far before sends. It is control traffic, which is
    not counted.
    """
    received = flat.new_empty(count)
    exchange_flat(flat, received, group, distance=distance)
    return received


def exchange_flat(
    sent: torch.Tensor, received: torch.Tensor, group: Group, *, distance: int
) -> None:
    """Send to the rank `distance` further in the group, and receive from the one as far before.

    An empty tensor is neither sent nor received. It is control traffic, which is not counted.
    """
    target = group.ranks[(group.index + distance) % group.size]
    source = group.ranks[(group.index - distance) % group.size]
    calls = []
    if sent.numel():
        calls.append(dist.P2POp(dist.isend, sent, target, group.handle))
    if received.numel():
        calls.append(dist.P2POp(dist.irecv, received, source, group.handle))
    if calls:
        for work in dist.batch_isend_irecv(calls):
            TimedWork(work, group, "shift").wait()


def new_control_group() -> dist.ProcessGroup | None:
    """Create a process group of the whole world for the control traffic of a second thread.

    Every rank creates it at the same time.
    """
    if not dist.is_initialized():
        return None
    return dist.new_group(backend="gloo", timeout=_world_timeout())


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's JSON-able value, in rank order, on every rank of the world.

    It is control traffic, which is not counted. `group`: one of `new_control_group`; the world's
    own when not given.
    """
    if not dist.is_initialized():
        return [value]
    world = dist.get_world_size()
    device = _control_device(group)
    # Texts differ in length and gathers take equal ones: sizes go first, then padded texts.
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = torch.zeros(world, dtype=torch.int64, device=device)
    _all_gather_single(sizes, torch.tensor([data.numel()], device=device), group=group)
    max_size = int(sizes.max())
    padded = torch.zeros(max_size, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    parts = torch.zeros(world * max_size, dtype=torch.uint8, device=device)
    _all_gather_single(parts, padded, group=group)
    rows = parts.view(world, max_size).cpu()
    return [
        json.loads(bytes(row[:size].numpy()))
        for row, size in zip(rows, sizes.tolist(), strict=True)
    ]


def _control_device(group: dist.ProcessGroup | None) -> torch.device:
    # NCCL moves memory of a GPU alone.
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
