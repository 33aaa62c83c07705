"""The seam between router and experts: dispatch (pre, comm, post) and combine (pre, comm, post).

Communication stands alone in `dispatch` and `combine`, so that it can be overlapped or replaced:
they call `meanwhile`, where there is such work, while rows travel. Shapes: T tokens of this rank, k
experts a token, H hidden, R rows for the experts here, E_local experts held here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.model.autograd import Permute, SelectRows, Unpermute
from moewright.rules.routing import RoundRobinCounts

OverlappedWork = Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedRows:
    """Rows on their way: rows [*, H] in compute dtype, weights [*] fp32, one weight a row."""

    rows: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RowMap:
    """Which row each (token, slot) pair became: tokens [R] says of which token a row is, rows [T,k]
    which row a slot has, R where it has none; `places` [R] are the slots of the rows, numbered t *
    k + j. `full`: every slot has a row, every row a slot.
    """

    token_of_row: torch.Tensor
    row_of_slot: torch.Tensor
    slot_of_row: torch.Tensor
    is_complete: bool
    kernels: KernelSet

    def permute(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Each token's copy in its rows: [R,H]."""
        return Permute.apply(
            x_TH, self.token_of_row, self.row_of_slot, self.is_complete, self.kernels
        )

    def unpermute(self, rows_RH: torch.Tensor) -> torch.Tensor:
        """The sum of each token's rows: [T,H]."""
        return Unpermute.apply(
            rows_RH, self.token_of_row, self.row_of_slot, self.is_complete, self.kernels
        )


def copy_to_host(*counts: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """Several lists of sizes from the device in one copy: the one wait for it in a layer."""
    parts = torch.cat(counts).cpu().split([len(one) for one in counts])
    return tuple(tuple(part.tolist()) for part in parts)


def build_row_map(ids_Tk: torch.Tensor, kept: int, kernels: KernelSet) -> RowMap:
    """Rows by id, slots of equal id in their order; only the `kept` first become rows."""
    order = torch.argsort(ids_Tk.flatten(), stable=True)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(order.numel(), device=order.device)
    full = kept == order.numel()
    if not full:
        order, rows = order[:kept].clone(), rows.clamp_(max=kept)
    tokens = order // ids_Tk.shape[1]
    return RowMap(
        token_of_row=tokens,
        row_of_slot=rows.view(ids_Tk.shape),
        slot_of_row=order,
        is_complete=full,
        kernels=kernels,
    )


def permute_to_local_experts(routed: RoutedRows, slots: RowMap) -> RoutedRows:
    """A row for each slot of received tokens that has an expert here, with its own of the token's
    weights [*,k]."""
    return RoutedRows(
        rows=slots.permute(routed.rows),
        weights=SelectRows.apply(routed.weights.flatten(), slots.slot_of_row),
    )


def pad_rows(x: torch.Tensor, rows: int, filling: int = 0) -> torch.Tensor:
    """x with rows of zeros, or of another number, after it."""
    return torch.cat((x, x.new_full((rows - len(x), *x.shape[1:]), filling)))


# What every rank sends, by its tokens and the experts of each, where a forced choice lets the host
# know without a look.
ForcedCounts = Callable[[int, int], RoundRobinCounts]


class TokenDispatcher(Protocol):
    """One way to bring tokens to their experts and the results back. A slot whose expert is E was
    dropped.

    `preprocess` agrees with the other ranks on sizes and gives, beside the rows, what the later
    steps need to know: its own kind of route. Others read of it `ends` [E_local] int32, the running
    ends of the local experts' rows, and `sent` int64, what this rank sends: rows to each expert
    [E], under de-duplication followed by copies to each rank [ep] and, where they cross to nodes
    first, to each node.
    """

    def preprocess(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> tuple[RoutedRows, Any]: ...

    def dispatch(
        self, routed: RoutedRows, route: Any, meanwhile: OverlappedWork | None
    ) -> RoutedRows: ...

    def postprocess(self, routed: RoutedRows, route: Any) -> RoutedRows: ...

    def combine_preprocess(self, rows: torch.Tensor, route: Any) -> torch.Tensor: ...

    def combine(
        self, rows: torch.Tensor, route: Any, meanwhile: OverlappedWork | None
    ) -> torch.Tensor: ...

    def combine_postprocess(self, rows: torch.Tensor, route: Any) -> torch.Tensor: ...
