"""The dispatcher that leaves the way there and back to a library (DeepEP, HybridEP), and its proof
at the start.

Shapes as in the seam; N copies that came here, j of their experts or places for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moewright.engine.comm.collectives import Group, all_reduce
from moewright.engine.dispatch.alltoall import AllToAllDispatcher
from moewright.engine.dispatch.dedup import mask_repeats
from moewright.engine.dispatch.deepep_bindings import DispatchLibrary, unusable_reason
from moewright.engine.dispatch.interface import (
    OverlappedWork,
    RoutedRows,
    RowMap,
    TokenDispatcher,
    build_row_map,
    copy_to_host,
    permute_to_local_experts,
)
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.kernels.fused.reference import TorchKernels
from moewright.engine.model.autograd import count_ids
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Collective
from moewright.spec.layout import DispatcherKind as Kind

_TOKENS, _TOP_K = 16, 2  # of the proof


class _Dispatch(torch.autograd.Function):
    """Tokens to the ranks of their experts; their gradients are summed on the way back. Books what
    is handed over."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: torch.Tensor,
        weights_Tk: torch.Tensor,
        experts_Tk: torch.Tensor,
        library: DispatchLibrary,
    ) -> tuple[Any, ...]:
        for tensor in (x_TH, experts_Tk, weights_Tk):
            library.group.count_call(Collective.ALL_TO_ALL, tensor)
        arrived = library.dispatch(x_TH, experts_Tk, weights_Tk)
        ctx.library, ctx.handle = library, arrived.handle
        ctx.mark_non_differentiable(arrived.ids)
        return arrived.rows, arrived.weights, arrived.ids, arrived.handle

    @staticmethod
    def backward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor | None, ...]:
        for tensor in (rows, weights):
            ctx.library.group.book(Collective.ALL_TO_ALL, tensor)
        x_TH, weights_Tk = ctx.library.combine_both(rows, weights, ctx.handle)
        return x_TH, weights_Tk, None, None


class _Combine(torch.autograd.Function):
    """What the ranks send back for each token, summed; its gradient goes to all of them."""

    @staticmethod
    def forward(
        ctx: Any, rows_NH: torch.Tensor, handle: Any, library: DispatchLibrary
    ) -> torch.Tensor:
        ctx.library, ctx.handle = library, handle
        library.group.count_call(Collective.ALL_TO_ALL, rows_NH)
        return library.combine(rows_NH, handle)

    @staticmethod
    def backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.library.group.book(Collective.ALL_TO_ALL, grad_TH)
        return ctx.library.dispatch_again(grad_TH, ctx.handle), None, None


@dataclass(kw_only=True, slots=True)
class DeepEpRoute:
    """`experts` [T,k] until the library has brought the copies; after that `handle` and `slots`,
    the rows of the local experts among the slots of the copies here. `ends` and `sent` as in the
    seam.
    """

    experts: torch.Tensor
    sent_counts: torch.Tensor
    expert_ends: torch.Tensor
    row_map: RowMap | None = None
    handle: Any = None


class DeepEpDispatcher:
    """Dispatch over an expert-parallel group by a library."""

    def __init__(self, library: DispatchLibrary, experts: int, kernels: KernelSet) -> None:
        self._library, self._experts, self._kernels = library, experts, kernels

    def preprocess(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> tuple[RoutedRows, DeepEpRoute]:
        """Count what is sent; the library finds the way by itself."""
        ranks = self._library.group.size
        first_Tk = mask_repeats(experts_Tk // (self._experts // ranks), ranks)
        sent = [
            count_ids(ids, places + 1)[:-1]
            for ids, places in ((experts_Tk, self._experts), (first_Tk, ranks))
        ]
        nothing = torch.empty(0, dtype=torch.int32, device=x_TH.device)
        return RoutedRows(rows=x_TH, weights=weights_Tk), DeepEpRoute(
            experts=experts_Tk, sent_counts=torch.cat(sent), expert_ends=nothing
        )

    def dispatch(
        self, routed: RoutedRows, route: DeepEpRoute, meanwhile: OverlappedWork | None
    ) -> RoutedRows:
        """Copies and weights to the ranks of their experts. Nothing goes on beside it
        (engine.support)."""
        rows, weights, ids, route.handle = _Dispatch.apply(
            routed.rows, routed.weights, route.experts, self._library
        )
        local = self._experts // self._library.group.size
        counts = count_ids(ids, local + 1)[:-1]
        ((here,),) = copy_to_host(counts.sum()[None])
        route.row_map, route.expert_ends = (
            build_row_map(ids, here, self._kernels),
            counts.cumsum(0).to(torch.int32),
        )
        return RoutedRows(rows=rows, weights=weights)

    def postprocess(self, routed: RoutedRows, route: DeepEpRoute) -> RoutedRows:
        """A row for each expert here that a copy wants, by expert."""
        assert route.row_map is not None  # dispatched before
        return permute_to_local_experts(routed, route.row_map)

    def combine_preprocess(self, rows: torch.Tensor, route: DeepEpRoute) -> torch.Tensor:
        """The weighted sum of the experts here for each copy."""
        assert route.row_map is not None  # dispatched before
        return route.row_map.unpermute(rows)

    def combine(
        self, rows: torch.Tensor, route: DeepEpRoute, meanwhile: OverlappedWork | None
    ) -> torch.Tensor:
        """Partial sums back to the ranks of their tokens, where the library sums them."""
        return _Combine.apply(rows, route.handle, self._library)

    def combine_postprocess(self, rows: torch.Tensor, route: DeepEpRoute) -> torch.Tensor:
        return rows


def verify_library(
    library: DispatchLibrary,
    kind: Kind,
    alone: Group,
    *,
    experts: int,
    hidden: int,
    like: torch.Tensor,
) -> None:
    """Hold a tiny dispatch and combine, forward and backward, against the plain all-to-all; every
    rank of the group calls this, with an ETP group of one. `like` has dtype and device. Raises
    BadInput on all when one rank sees another result.
    """
    plain = AllToAllDispatcher(
        library.group, alone, experts, TorchKernels(), forced_counts=None, may_drop=False
    )
    fused = DeepEpDispatcher(library, experts, TorchKernels())
    wrong, why = (
        like.new_zeros(1, dtype=torch.float32),
        "differs from the plain all-to-all in a trial at the start",
    )
    try:
        ours, theirs = (_trial(way, library.group, experts, hidden, like) for way in (fused, plain))
        # bf16 keeps 8 bits, and the two sum in another order.
        tolerance = 2e-2 if like.element_size() < 4 else 1e-5
        pairs = zip(ours, theirs, strict=True)
        near = (
            float((one - other).norm()) <= tolerance * float(other.norm()) for one, other in pairs
        )
        wrong += not all(near)
    except (
        Exception
    ) as error:  # its own kernels may refuse the device, the width of rows or the number of ranks
        wrong += 1
        why = f"failed a trial at the start: {type(error).__name__}: {error}"
    if float(all_reduce(wrong, library.group)):
        raise BadInput(unusable_reason(kind, why))


def _trial(
    way: TokenDispatcher, group: Group, experts: int, hidden: int, like: torch.Tensor
) -> list[torch.Tensor]:
    """Outputs and gradients of tokens through experts that multiply by their number: a row at a
    wrong one shows."""
    top_k, tokens = min(_TOP_K, experts), torch.arange(_TOKENS, device=like.device)
    x = (
        torch.sin(torch.arange(_TOKENS * hidden, device=like.device) + group.index)
        .view(_TOKENS, hidden)
        .to(like)
    )
    slots = tokens[:, None] * 3 + torch.arange(top_k, device=like.device) * 5 + group.index
    weights = (slots % 7 + 1).float() / 8
    chosen = torch.stack([(slots[:, 0] + other) % experts for other in range(top_k)], 1)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    routed, route = way.preprocess(x, chosen, weights)
    routed = way.postprocess(way.dispatch(routed, route, None), route)
    local = experts // group.size
    places = torch.arange(len(routed.rows), dtype=torch.int32, device=like.device)
    factor = torch.searchsorted(route.ends, places, right=True) + 1 + group.index * local
    rows = (routed.rows.float() * (routed.weights * factor)[:, None]).to(like)
    out = way.combine_postprocess(
        way.combine(way.combine_preprocess(rows, route), route, None), route
    )
    out.backward(torch.cos(x.detach().float()).to(like))
    return [one.detach().float() for one in (out, x.grad, weights.grad) if one is not None]
