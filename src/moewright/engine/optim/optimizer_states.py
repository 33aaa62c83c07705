"""Optimizer state of a rank: master weights and moments in flat tensors, and what lies in them.

The fp32 master copy and the two moments live in host memory where they are offloaded. Matrices that
Muon updates have one fp32 momentum in place of the moments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

import torch

from moewright.engine.checkpoint import LocalShard, flat_range_shards
from moewright.engine.model.layers import NamedParameter
from moewright.engine.optim.moments import Moment, build_moment, new_state
from moewright.engine.runtime import Runtime
from moewright.rules.optimizers import is_muon_matrix
from moewright.rules.shapes.buckets import BucketEntry
from moewright.spec.ledger import Component, MemoryRow, Module
from moewright.spec.workload import MatrixUpdate


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedRange:
    """The elements [first, last) of a parameter that a rank owns, from `start` on in its shard.

    Their moments, or their momentum where `has_momentum`, are from `moment_start` on in theirs.
    """

    parameter: NamedParameter
    first: int
    last: int
    start: int
    moment_start: int
    has_momentum: bool

    @property
    def numel(self) -> int:
        return self.last - self.first

    @property
    def shard_slice(self) -> slice:
        return slice(self.start, self.start + self.numel)

    @property
    def moment_slice(self) -> slice:
        return slice(self.moment_start, self.moment_start + self.numel)


class UpdateRange(Protocol):
    """Elements of a shard that an update rule takes, and where their moments are."""

    @property
    def start(self) -> int: ...
    @property
    def moment_start(self) -> int: ...
    @property
    def numel(self) -> int: ...
    @property
    def shard_slice(self) -> slice: ...
    @property
    def moment_slice(self) -> slice: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeRange:
    """All elements of a shard."""

    numel: int
    start: int = 0
    moment_start: int = 0

    @property
    def shard_slice(self) -> slice:
        return slice(0, self.numel)

    @property
    def moment_slice(self) -> slice:
        return slice(0, self.numel)


class OptimizerStates(Protocol):
    """Flat tensors of master weights and moments, and what lies in them.

    They are those of a shard from its element `first` on, in host memory where `on_host`.
    """

    @property
    def first(self) -> int: ...
    @property
    def on_host(self) -> bool: ...
    @property
    def owned(self) -> Sequence[OwnedRange]: ...
    @property
    def master(self) -> torch.Tensor: ...
    @property
    def exp_avg(self) -> Moment: ...
    @property
    def exp_avg_sq(self) -> Moment: ...
    @property
    def momentum(self) -> torch.Tensor: ...


def state_tensors(states: OptimizerStates) -> Iterator[torch.Tensor]:
    """Yield the master weights and the moments."""
    yield from (states.master, states.momentum)
    yield from (*states.exp_avg.tensors, *states.exp_avg_sq.tensors)


def uses_muon(runtime: Runtime, parameter: NamedParameter) -> bool:
    """Tell whether Muon updates a parameter."""
    dims = len(parameter.placement.local_shape)
    return runtime.workload.optimizer.matrix_update is MatrixUpdate.MUON and is_muon_matrix(
        parameter.name, dims, parameter.module
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSegment:
    """Optimizer state of a shard from its element `first` on, all of it in one memory."""

    first: int
    on_host: bool  # master and moments live in host memory, and are updated there
    master: torch.Tensor
    exp_avg: Moment
    exp_avg_sq: Moment
    momentum: torch.Tensor
    owned: tuple[OwnedRange, ...]

    @property
    def shard_slice(self) -> slice:
        return slice(self.first, self.first + self.master.numel())

    def memory_rows(self) -> list[MemoryRow]:
        """Return the bytes of every tensor by module; padding is OTHER."""
        owned_spans = [(owned.parameter.module, owned.numel) for owned in self.owned]
        moment_spans, momentum_spans = (
            [
                (owned.parameter.module, owned.numel)
                for owned in self.owned
                if owned.has_momentum == has_momentum
            ]
            for has_momentum in (False, True)
        )
        master = Component.MASTER.placed(on_host=self.on_host)
        moments = Component.MOMENTS.placed(on_host=self.on_host)
        return [
            *split_by_module(master, self.master, owned_spans),
            *split_moment_by_module(moments, self.exp_avg, moment_spans),
            *split_moment_by_module(moments, self.exp_avg_sq, moment_spans),
            *split_by_module(moments, self.momentum, momentum_spans),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredStates:
    """Optimizer state as boxes of the global tensors, and moments with what checkpoints hold.

    What is read into the boxes is read into the state itself, but for 8-bit moments.
    """

    shards: tuple[LocalShard, ...]
    moments: tuple[tuple[Moment, torch.Tensor], ...]

    def take(self) -> None:
        """Take what a checkpoint held, once it has been read into the boxes."""
        for moment, stored in self.moments:
            moment.take_stored(stored)


def store_states(states: OptimizerStates) -> StoredStates:
    """Return the optimizer state of the owned ranges as checkpoints hold it."""
    moved = [replace(owned, start=owned.moment_start) for owned in states.owned]
    adamw = [owned for owned in moved if not owned.has_momentum]
    muon = [owned for owned in moved if owned.has_momentum]
    exp_avg, exp_avg_sq = states.exp_avg.to_stored(), states.exp_avg_sq.to_stored()
    return StoredStates(
        shards=(
            *build_local_shards(states.owned, "", states.master),
            *build_local_shards(adamw, "optim/exp_avg/", exp_avg),
            *build_local_shards(adamw, "optim/exp_avg_sq/", exp_avg_sq),
            *build_local_shards(muon, "optim/momentum/", states.momentum),
        ),
        moments=((states.exp_avg, exp_avg), (states.exp_avg_sq, exp_avg_sq)),
    )


def build_local_shards(
    ranges: Sequence[OwnedRange], prefix: str, flat: torch.Tensor
) -> list[LocalShard]:
    """Return a flat tensor of owned ranges as boxes of the global tensors `prefix` + name.

    Padding is in none of them.
    """
    shards: list[LocalShard] = []
    for owned in ranges:
        placement = owned.parameter.placement
        passed = 0  # elements of the parameter that lie before `part`
        for part in placement.split_rows() or (placement,):
            # Only the first dim is ever padded, so the unpadded elements come first.
            first = max(owned.first - passed, 0)
            last = min(owned.last - passed, prod(part.unpadded_shape))
            if first < last:
                start = owned.start + passed + first - owned.first
                shards += flat_range_shards(
                    prefix + owned.parameter.name,
                    global_shape=part.global_shape,
                    offsets=part.offsets,
                    local_shape=part.unpadded_shape,
                    start=first,
                    flat=flat[start : start + last - first],
                )
            passed += prod(part.local_shape)
    return shards


class SegmentBuilder:
    """Builds the state of the elements [start, stop) of a bucket, parameter by parameter."""

    def __init__(
        self, runtime: Runtime, start: int, stop: int, *, first: int, on_host: bool
    ) -> None:
        self._runtime = runtime
        self._start = start
        self._stop = stop
        self._first = first
        self._on_host = on_host
        self._state_device = torch.device("cpu") if on_host else runtime.device
        self._master = self._new_state(stop - start, torch.float32)
        self._owned: list[OwnedRange] = []
        self._momentum_numel = 0

    def add(self, entry: BucketEntry, parameter: NamedParameter, value: torch.Tensor) -> None:
        """Take what lies here of a parameter of some value."""
        first = max(entry.start, self._start)
        last = min(entry.start + entry.numel, self._stop)
        if first >= last:
            return
        has_momentum = uses_muon(self._runtime, parameter)
        start = first - self._start
        owned = OwnedRange(
            parameter=parameter,
            first=first - entry.start,
            last=last - entry.start,
            start=start,
            # Moments leave out what has a momentum, so that they lag by what came of that before.
            moment_start=self._momentum_numel if has_momentum else start - self._momentum_numel,
            has_momentum=has_momentum,
        )
        self._momentum_numel += owned.numel * has_momentum
        self._master[owned.shard_slice] = value.flatten()[owned.first : owned.last]
        self._owned.append(owned)

    def build(self) -> StateSegment:
        """Return the state, with moments of zero."""
        moments_numel = self._stop - self._start - self._momentum_numel
        exp_avg, exp_avg_sq = build_moments(self._runtime, moments_numel, self._state_device)
        return StateSegment(
            first=self._first,
            on_host=self._on_host,
            master=self._master,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            momentum=self._new_state(self._momentum_numel, torch.float32),
            owned=tuple(self._owned),
        )

    def _new_state(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return new_state(numel, dtype, self._state_device, self._runtime.device)


def copy_to_state_device(grads: torch.Tensor, state_device: torch.device) -> torch.Tensor:
    """Return gradients where optimizer state is updated: as they are, or copied to the host."""
    if grads.device.type == state_device.type:
        return grads
    host = torch.empty(grads.shape, dtype=grads.dtype, device=state_device, pin_memory=True)
    host.copy_(grads, non_blocking=True)
    # The host reads them next.
    torch.cuda.current_stream(grads.device).synchronize()
    return host


def build_moments(
    runtime: Runtime, numel: int, state_device: torch.device
) -> tuple[Moment, Moment]:
    """Return the first and the second moment of so many elements, of zeros."""
    first, second = runtime.workload.optimizer.moment_dtypes
    return (
        build_moment(numel, first, state_device, runtime.device, is_second=False),
        build_moment(numel, second, state_device, runtime.device, is_second=True),
    )


def split_moment_by_module(
    component: Component, moment: Moment, spans: Sequence[tuple[Module, int]]
) -> list[MemoryRow]:
    """Return memory rows of spans of a moment's elements; scales of blocks are OTHER."""
    elements, *scales = moment.tensors
    return [
        *split_by_module(component, elements, spans),
        *(row for tensor in scales for row in split_by_module(component, tensor, ())),
    ]


def split_by_module(
    component: Component,
    buffer: torch.Tensor,
    spans: Sequence[tuple[Module, int]],
    nbytes: int | None = None,
) -> list[MemoryRow]:
    """Return memory rows of spans of a buffer's elements.

    They add up to `nbytes`, by default the bytes of the buffer's whole storage; what belongs to no
    module is OTHER.
    """
    size = buffer.element_size()
    rows = [
        MemoryRow(component=component, module=module, bytes=count * size) for module, count in spans
    ]
    total = buffer.untyped_storage().nbytes() if nbytes is None else nbytes
    padding = total - sum(row.bytes for row in rows)
    return [*rows, MemoryRow(component=component, module=Module.OTHER, bytes=padding)]
