"""The interface between router and experts: six steps, and the libraries behind some of them.

The interface between router and experts: six steps. They are dispatch (pre, comm, post) and combine
(pre, comm, post). Communication stands alone in `dispatch` and `combine`, so that it can be
overlapped or replaced: rows travel by the `exchange` that these are given, which may do other work
meanwhile.

Shapes: T tokens of this rank, k experts a token, H hidden, R rows for the experts of this rank,
E experts in all, E_local of them on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moewright.engine.comm.collectives import Group
from moewright.engine.dispatch.rows import Permute, SelectRows, Unpermute, count_ids
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.rules.routing import RoundRobinCounts
from moewright.spec.errors import Reason
from moewright.spec.layout import DispatcherKind


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedCopies:
    """The copies of tokens that this rank received: `rows` [N,H].

    `ids` [N,j] are the local experts of each copy, counted from 0, with E_local for none, and
    `weights` [N,j] fp32 their weights. `handle` is the library's own, for `combine` and
    `dispatch_cached`.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    handle: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class LibrarySizes:
    """The sizes for which a library is set up; `max_tokens` are those of a rank in one dispatch.

    `nvlink_domain_size` ranks of the group lie in one NVLink domain.
    """

    experts: int
    hidden: int
    max_tokens: int
    nvlink_domain_size: int


class DispatchLibrary(Protocol):
    """A library that dispatches and combines over an expert-parallel group.

    Experts and weights [T,k] are those of this rank's tokens; a dropped slot has expert E.
    """

    group: Group

    def dispatch(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> ReceivedCopies: ...

    def dispatch_cached(self, x_TH: torch.Tensor, handle: Any) -> torch.Tensor:
        """Send other rows of the same tokens to the same ranks: [N,H]."""
        ...

    def combine(self, rows_NH: torch.Tensor, handle: Any) -> torch.Tensor:
        """Return the sums [T,H] of what the ranks send back for each token."""
        ...

    def combine_with_weights(
        self, rows_NH: torch.Tensor, weights_Nj: torch.Tensor, handle: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums of `combine`, and each weight [T,k] from the rank that received it."""
        ...


def unusable_reason(dispatcher: DispatcherKind, rule: str) -> Reason:
    """Return the reason why a library cannot dispatch."""
    nearest = dispatcher.stand_in
    return Reason(field="layout.dispatcher", value=dispatcher, rule=rule, nearest=nearest)


class RowExchange(Protocol):
    """A way to exchange the rows of tensors over a group, like all_to_all_in_turn."""

    def __call__(
        self,
        tensors: Sequence[torch.Tensor],
        group: Group,
        *,
        send: Sequence[int],
        receive: Sequence[int],
    ) -> tuple[torch.Tensor, ...]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedRows:
    """Rows on their way: rows [*,H] in the compute dtype, and their weights in fp32.

    Weights are [*], one a row; where a row is a whole token that several experts of a rank may
    take, they are [*,k], all weights of the token.
    """

    rows: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RowMap:
    """A map between (token, slot) pairs and rows.

    `token_of_row` [R] is the token of each row, `row_of_slot` [T,k] the row of each slot, R where
    the slot has none; `slot_of_row` [R] is the slot of each row, numbered t * k + j. `is_complete`
    is true where every slot has a row and every row a slot.
    """

    token_of_row: torch.Tensor
    row_of_slot: torch.Tensor
    slot_of_row: torch.Tensor
    is_complete: bool
    kernels: KernelSet

    def permute(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Copy each token to its rows: [R,H]."""
        return Permute.apply(
            x_TH, self.token_of_row, self.row_of_slot, self.is_complete, self.kernels
        )

    def unpermute(self, rows_RH: torch.Tensor) -> torch.Tensor:
        """Sum the rows of each token: [T,H]."""
        return Unpermute.apply(
            rows_RH, self.token_of_row, self.row_of_slot, self.is_complete, self.kernels
        )


def copy_to_host(*counts: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """Copy several lists of sizes to the host in one copy: a layer waits for the device once."""
    parts = torch.cat(counts).cpu().split([len(part) for part in counts])
    return tuple(tuple(part.tolist()) for part in parts)


def build_row_map(ids_Tk: torch.Tensor, kept: int, kernels: KernelSet) -> RowMap:
    """Sort slots by id, stably; only the first `kept` of the sorted slots become rows."""
    order = torch.argsort(ids_Tk.flatten(), stable=True)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(order.numel(), device=order.device)
    is_complete = kept == order.numel()
    if not is_complete:
        # A slice would keep the whole storage; the plan counts the rows that are kept.
        order = order[:kept].clone()
        # Slots past the last row point at row R, which unpermute takes for none.
        rows = rows.clamp_(max=kept)
    return RowMap(
        token_of_row=order // ids_Tk.shape[1],
        row_of_slot=rows.view(ids_Tk.shape),
        slot_of_row=order,
        is_complete=is_complete,
        kernels=kernels,
    )


def build_padded_map(
    ids_Tk: torch.Tensor, *, ranks: int, ids_a_rank: int, rows_a_rank: int, kernels: KernelSet
) -> RowMap:
    """Sort slots by id, stably, with `rows_a_rank` rows for each block of `ids_a_rank` ids.

    Slots past the rows of their block have none, as have those of ids past the last block. A
    padding row has slot number T * k, one past the last slot, and holds the first token.
    """
    flat = ids_Tk.flatten()
    slots = flat.numel()
    rows = ranks * rows_a_rank
    order = flat.argsort(stable=True)
    sorted_ranks = flat[order] // ids_a_rank
    # One count more than ranks: of slots that were dropped.
    counts = count_ids(sorted_ranks, ranks + 1)
    starts = counts.cumsum(0) - counts
    place = torch.arange(slots, device=flat.device) - starts[sorted_ranks]
    row = sorted_ranks * rows_a_rank + place
    # Slots without room all write to one row past the end, which is cut off below: a scatter of a
    # fixed size, where a selection would make the host wait for a count.
    row = row.masked_fill((sorted_ranks == ranks) | (place >= rows_a_rank), rows)
    row_of_slot = torch.empty_like(order)
    row_of_slot[order] = row
    slot_of_row = torch.full((rows + 1,), slots, dtype=torch.int64, device=flat.device)
    slot_of_row = slot_of_row.scatter_(0, row, order)[:-1].clone()
    token_of_row = slot_of_row // ids_Tk.shape[1]
    return RowMap(
        # A padding row must hold some token; its weight is 0, so that it adds nothing to any sum.
        token_of_row=token_of_row.masked_fill_(slot_of_row == slots, 0),
        row_of_slot=row_of_slot.view(ids_Tk.shape),
        slot_of_row=slot_of_row,
        is_complete=False,
        kernels=kernels,
    )


def permute_to_local_experts(received: RoutedRows, row_map: RowMap) -> RoutedRows:
    """Make a row for each slot of the received tokens whose expert is on this rank.

    The row's weight is the one of its slot among the token's weights [*,k].
    """
    return RoutedRows(
        rows=row_map.permute(received.rows),
        weights=SelectRows.apply(received.weights.flatten(), row_map.slot_of_row),
    )


def pad_rows(x: torch.Tensor, rows: int, fill_value: int = 0) -> torch.Tensor:
    """Pad x to `rows` rows with zeros, or with another number."""
    return torch.cat((x, x.new_full((rows - len(x), *x.shape[1:]), fill_value)))


# What every source of rows sends [ETP ranks][EP ranks], as coordinates order them. Under forced
# routing the host knows that without reading counts from the device.
ForcedCounts = tuple[tuple[RoundRobinCounts, ...], ...]


class TokenDispatcher(Protocol):
    """A way to bring tokens to their experts and the results back.

    A slot whose expert is E was dropped. `map_rows` returns what is known of the rows to send
    before the host reads how many there are, so that a graph may do it; () where that is nothing.
    `preprocess`, which takes what `map_rows` returned where that has run, agrees with the other
    ranks on sizes and returns, beside the rows, a route: what the later steps of this dispatcher
    need to know. Other code reads two fields of a route. `expert_ends` [E_local] int32 are the
    running ends of the local experts' rows. `sent_counts` int64 are the rows that this rank sends
    to each expert [E]; de-duplication appends the copies sent to each rank [ep] and, where they
    cross to nodes first, those sent to each node.
    """

    def map_rows(self, experts_Tk: torch.Tensor) -> tuple[torch.Tensor, ...]: ...

    def preprocess(
        self,
        x_TH: torch.Tensor,
        experts_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
        mapped: tuple[torch.Tensor, ...] = (),
    ) -> tuple[RoutedRows, Any]: ...

    def dispatch(self, routed: RoutedRows, route: Any, exchange: RowExchange) -> RoutedRows: ...

    def postprocess(self, routed: RoutedRows, route: Any) -> RoutedRows: ...

    def combine_preprocess(self, rows: torch.Tensor, route: Any) -> torch.Tensor: ...

    def combine(self, rows: torch.Tensor, route: Any, exchange: RowExchange) -> torch.Tensor: ...

    def combine_postprocess(self, rows: torch.Tensor, route: Any) -> torch.Tensor: ...
