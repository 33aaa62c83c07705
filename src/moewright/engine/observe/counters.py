"""Counters: what really ran on this rank, counted for the ledger.

Bytes come from the tensors and buffers themselves, FLOPs from the shapes of the operations torch
dispatched, saved activations from the tensors autograd kept. Nothing here knows a formula of the
planner: otherwise the equality of prediction and count would prove nothing.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch

from moewright.engine.observe.flop_counter import FlopCounter
from moewright.engine.observe.module_scopes import (
    ModuleScopes,
    ObservingMode,
    OperationArgs,
    OperationKwargs,
)
from moewright.engine.observe.step_timing import WaitClock
from moewright.engine.observe.storage_census import StorageCensus
from moewright.engine.torch_private import storage_id, tree_iter
from moewright.spec.hardware import Collective
from moewright.spec.ledger import (
    CommRow,
    Component,
    FlopOp,
    FlopRow,
    Ledger,
    MemoryRow,
    Module,
    TimeRow,
    saved_component,
)

# The collectives that torch dispatches to process groups, whoever calls them.

# Operations of torch's c10d library: what they are, and which argument a rank hands in.
_RULES: Mapping[str, tuple[Collective, int]] = MappingProxyType(
    {
        "allreduce_": (Collective.ALL_REDUCE, 0),
        "allreduce_coalesced_": (Collective.ALL_REDUCE, 0),
        "reduce_": (Collective.ALL_REDUCE, 0),
        "allgather_": (Collective.ALL_GATHER, 1),
        "allgather_coalesced_": (Collective.ALL_GATHER, 1),
        "_allgather_base_": (Collective.ALL_GATHER, 1),
        "allgather_into_tensor_coalesced_": (Collective.ALL_GATHER, 1),
        "gather_": (Collective.ALL_GATHER, 1),
        "reduce_scatter_": (Collective.REDUCE_SCATTER, 1),
        "_reduce_scatter_base_": (Collective.REDUCE_SCATTER, 1),
        "reduce_scatter_tensor_coalesced_": (Collective.REDUCE_SCATTER, 1),
        "scatter_": (Collective.BROADCAST, 1),
        "broadcast_": (Collective.BROADCAST, 0),
        "alltoall_": (Collective.ALL_TO_ALL, 1),
        "alltoall_base_": (Collective.ALL_TO_ALL, 1),
        "send": (Collective.P2P, 0),
    }
)


class CollectiveCounter:
    """A counter that reports every collective with the bytes that this rank hands in."""

    def __init__(self, report: Callable[[Collective, int], None]) -> None:
        self._report = report

    def count(self, func: Any, args: OperationArgs, kwargs: OperationKwargs) -> None:
        """Report an operation that torch dispatches with these arguments, if it is a collective."""
        if func.namespace != "c10d":
            return
        rule = _RULES.get(func.overloadpacket.__name__)
        if rule is not None:
            op, index = rule
            tensors = (x for x in tree_iter(args[index]) if isinstance(x, torch.Tensor))
            self._report(op, sum(x.numel() * x.element_size() for x in tensors))


ForwardKey = tuple[int, int]  # micro-batch, model chunk


class NoteActivity(Protocol):
    """A function that is called with what the rank begins to do.

    It may wait for others, or take longer than any part of a step without a sign of life.
    """

    def __call__(
        self, activity: str, *, is_waiting: bool = False, is_slow: bool = False
    ) -> None: ...


def ignore_activity(activity: str, *, is_waiting: bool = False, is_slow: bool = False) -> None:
    """Note nothing: nobody watches this process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CounterMark:
    """What was counted up to a moment of a step; fields as in Counters."""

    collectives: Mapping[tuple[Collective, str], list[int]]
    dispatched: Mapping[Collective, list[int]]
    flops: Mapping[tuple[FlopOp, Module], int]


# The group of rows that say what ran beyond what was announced.
UNANNOUNCED = "unannounced"


class Counters:
    """The running counts of one rank, which stand still except inside `counting()`.

    `scopes` say what the counts are attributed to; `census` weighs what lives on the rank's device.
    `note` tells whoever watches this process what it begins to do.
    `wait_clock` measures waits for collectives all the time; with `blocking` False, on a device
    that is not the CPU, it does not.
    """

    def __init__(self, *, blocking: bool = True) -> None:
        self.scopes = ModuleScopes()
        self.note: NoteActivity = ignore_activity
        # How many forwards in flight count each storage.
        self._saved_storages: Counter[int] = Counter()
        self.census = StorageCensus(
            self.scopes,
            device_type="cpu" if blocking else "cuda",
            list_saved=self._list_saved_storages,
        )
        self._flop_counter = FlopCounter(self._count_flops)
        self._collective_counter = CollectiveCounter(self._count_dispatched)
        self.wait_clock = WaitClock(blocking=blocking)
        # By operation and group: the bytes that callers announced, and the calls.
        self.collectives: dict[tuple[Collective, str], list[int]] = defaultdict(lambda: [0, 0])
        # By operation: the same as torch dispatched it to process groups.
        self._dispatched: dict[Collective, list[int]] = defaultdict(lambda: [0, 0])
        self.flops: dict[tuple[FlopOp, Module], int] = defaultdict(int)
        # Bytes that each forward in flight keeps for its backward.
        self._saved_in_flight: dict[ForwardKey, dict[Module, int]] = {}
        self._peak_saved: dict[Module, int] = {}
        self._peak_in_flight = 0
        self._is_counting = False
        self._is_in_library = False
        self._counts_flops = True

    def count_collective(self, op: Collective, group: str, nbytes: int) -> None:
        """Count one call of a collective, with the bytes that this rank hands in."""
        if self._is_counting:
            row = self.collectives[(op, group)]
            row[0] += nbytes
            row[1] += 1

    @contextmanager
    def wait_for(self, group: str, name: str, mark: str = "") -> Iterator[None]:
        """Measure and note a call inside, which blocks until the others of a group have come.

        `mark` is that of a collective which has begun before (`WaitClock.begin_call`).
        """
        scope = self.scopes.current
        place = "" if scope.layer is None else f" of layer {scope.layer}"
        self.note(f"{name} over {group}, in {scope.module}{place}", is_waiting=True)
        with self.wait_clock.measure(group, mark):
            yield
        self.note(f"after {name} over {group}, in {scope.module}{place}")

    @contextmanager
    def hand_to_library(self, op: Collective, group: str, nbytes: Sequence[int]) -> Iterator[None]:
        """Count the tensors that a library of its own moves inside, past torch's process groups."""
        for tensor_bytes in nbytes:
            self.count_collective(op, group, tensor_bytes)
            # As if torch had dispatched it, or it would stand in the rows of what nobody saw.
            if self._is_counting:
                self._count_dispatched(op, tensor_bytes)
        self._is_in_library = True
        try:
            yield
        finally:
            self._is_in_library = False

    def note_row_end(self) -> None:
        """Note that a row of the timetable has ended: what lives now is kept for later rows."""
        if not self._is_counting:
            return
        self.census.note_host_bytes()
        self.census.note_rest()

    def _count_dispatched(self, op: Collective, nbytes: int) -> None:
        # What the library sends by itself has been announced.
        if self._is_in_library:
            return
        row = self._dispatched[op]
        row[0] += nbytes
        row[1] += 1

    def _list_unannounced(self) -> Iterator[CommRow]:
        """Yield the collectives that ran and that nobody announced, or the other way round."""
        announced: dict[Collective, list[int]] = defaultdict(lambda: [0, 0])
        for (op, _), (nbytes, calls) in self.collectives.items():
            announced[op][0] += nbytes
            announced[op][1] += calls
        for op in sorted({*announced, *self._dispatched}):
            nbytes = self._dispatched[op][0] - announced[op][0]
            calls = self._dispatched[op][1] - announced[op][1]
            if nbytes or calls:
                yield CommRow(op=op, group=UNANNOUNCED, bytes=nbytes, calls=calls)

    def _count_flops(self, op: FlopOp, flops: int) -> None:
        if self._counts_flops:
            self.flops[(op, self.scopes.module)] += flops

    @contextmanager
    def leave_out_flops(self) -> Iterator[None]:
        """Leave out the FLOPs of products inside, which are an optimizer's and not the model's."""
        self._counts_flops = False
        try:
            yield
        finally:
            self._counts_flops = True

    @property
    def is_counting(self) -> bool:
        """Whether what runs now is counted."""
        return self._is_counting

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the collectives, FLOPs and storages of everything inside, from zero."""
        self.collectives.clear()
        self._dispatched.clear()
        self.flops.clear()
        self._saved_in_flight.clear()
        self._saved_storages.clear()
        self._peak_saved = {}
        self._peak_in_flight = 0
        self._is_counting = True
        try:
            self.census.begin()
            with ObservingMode(
                before=(self._flop_counter.count, self._collective_counter.count),
                after=(self.census.weigh,),
            ):
                yield
                self.census.end()
        finally:
            self._is_counting = False

    def mark(self) -> CounterMark:
        """Remember what was counted so far, for `return_to`."""
        return CounterMark(
            collectives=_copy_sums(self.collectives),
            dispatched=_copy_sums(self._dispatched),
            flops=dict(self.flops),
        )

    def return_to(self, mark: CounterMark) -> None:
        """Forget what ran since a mark: it came to nothing, and is run again.

        No forward may be in flight. What was held meanwhile is forgotten too.
        """
        if not self._is_counting:
            return
        for sums, marked in (
            (self.collectives, mark.collectives),
            (self._dispatched, mark.dispatched),
        ):
            sums.clear()
            sums.update(_copy_sums(marked))
        self.flops.clear()
        self.flops.update(mark.flops)
        self._peak_saved = {}
        self._peak_in_flight = 0
        self.census.begin()

    @contextmanager
    def count_saved(
        self, key: ForwardKey, is_weight: Callable[[torch.Tensor], bool]
    ) -> Iterator[Callable[[torch.Tensor], None] | None]:
        """Count the storages that the forward of `key` keeps for backward, until `release`.

        A backward that leaves weight gradients is counted again: what they wait with takes the
        place of what the forward kept.

        Yields a function to call with every tensor that is kept, or None when nothing is counted.
        Each storage counts once, while it lives, for the module that kept it first. `is_weight`
        tells tensors that live anyway (weights, caches). The ledger has the counts, over all
        forwards in flight, of the moment with the most bytes (`note_saved`).
        """
        if not self._is_counting:
            yield None
            return
        saved_bytes: dict[Module, int] = defaultdict(int)
        before = self._saved_in_flight.get(key)
        if before is None:
            self._saved_in_flight[key] = saved_bytes
            self._peak_in_flight = max(self._peak_in_flight, len(self._saved_in_flight))
        yield self._count_into(saved_bytes, is_weight)
        self._saved_in_flight[key] = saved_bytes
        self.note_saved()

    def count_fetched(self, key: ForwardKey) -> Callable[[torch.Tensor], None]:
        """Return what counts a tensor that comes back from the host for the backward of `key`."""
        saved_bytes = self._saved_in_flight.get(key, {})
        if not self._is_counting:
            return lambda tensor: None
        return self._count_into(saved_bytes, lambda tensor: False)

    def _count_into(
        self, saved_bytes: dict[Module, int], is_weight: Callable[[torch.Tensor], bool]
    ) -> Callable[[torch.Tensor], None]:
        """Return what adds storages to the bytes of the module that runs, while they live."""
        seen: dict[int, Module] = {}

        def forget(storage: int, nbytes: int) -> None:
            saved_bytes[seen.pop(storage)] -= nbytes
            self._saved_storages[storage] -= 1

        def count(tensor: torch.Tensor) -> None:
            number = storage_id(tensor)
            if number not in seen and not is_weight(tensor):
                storage = tensor.untyped_storage()
                seen[number] = self.scopes.module
                self._saved_storages[number] += 1
                saved_bytes[self.scopes.module] += storage.nbytes()
                weakref.finalize(storage, forget, number, storage.nbytes()).atexit = False

        return count

    def _list_saved_storages(self) -> Iterator[int]:
        return (storage for storage, count in self._saved_storages.items() if count > 0)

    def note_gradients_ready(self) -> None:
        """Note that all micro-batches are through backward; what lives now is the optimizer's."""
        if self._is_counting:
            self.census.note_gradients_ready()

    def note_gradients_reduced(self) -> None:
        """Note that the gradients are reduced, and nothing has been updated."""
        if self._is_counting:
            self.census.note_gradients_reduced()

    def note_saved(self) -> None:
        """Note that a pass, or a segment of it, has ended: this may be the fullest moment."""
        total = self.sum_saved()
        if sum(total.values()) > sum(self._peak_saved.values()):
            self._peak_saved = total

    def sum_saved(self) -> dict[Module, int]:
        """Sum what is kept now for the backwards of all forwards in flight."""
        return _sum_by_module(self._saved_in_flight.values())

    def release(self, key: ForwardKey) -> None:
        """Note that nothing is kept for the backward of `key` any more."""
        self._saved_in_flight.pop(key, None)

    def build_ledger(
        self,
        *,
        rank: int,
        pp_rank: int,
        state: tuple[MemoryRow, ...],
        time: tuple[TimeRow, ...],
        notes: tuple[str, ...],
    ) -> Ledger:
        """Build the ledger of what was counted; `state` is the memory that is held all the time."""
        memory = list(state)
        for module, nbytes in self._peak_saved.items():
            component = saved_component(module)
            memory.append(MemoryRow(component=component, module=module, bytes=nbytes))
        memory = _add_host_bytes(memory, self.census.most_host_bytes)
        return Ledger(
            rank=rank,
            pp_rank=pp_rank,
            memory=tuple(
                sorted(
                    (row for row in memory if row.bytes),
                    key=lambda row: (row.component, row.module),
                )
            ),
            comm=(
                *(
                    CommRow(op=op, group=group, bytes=nbytes, calls=calls)
                    for (op, group), (nbytes, calls) in sorted(self.collectives.items())
                ),
                *self._list_unannounced(),
            ),
            flops=tuple(
                FlopRow(op=op, module=module, flops=flops)
                for (op, module), flops in sorted(self.flops.items())
                if flops
            ),
            time=time,
            in_flight=self._peak_in_flight,
            storages=self.census.totals,
            unlisted=self.census.unlisted,
            notes=notes,
        )


def _add_host_bytes(memory: Sequence[MemoryRow], nbytes: int) -> list[MemoryRow]:
    """Return rows to which so many bytes of activations in host memory are added."""
    place = Component.HOST, Module.OTHER
    others = [row for row in memory if (row.component, row.module) != place]
    nbytes += sum(row.bytes for row in memory if (row.component, row.module) == place)
    return [*others, MemoryRow(component=place[0], module=place[1], bytes=nbytes)]


def _copy_sums(sums: Mapping[Any, list[int]]) -> dict[Any, list[int]]:
    return {key: list(numbers) for key, numbers in sums.items()}


def _sum_by_module(counts: Iterable[Mapping[Module, int]]) -> dict[Module, int]:
    total: dict[Module, int] = defaultdict(int)
    for count in counts:
        for module, nbytes in count.items():
            total[module] += nbytes
    return total
