"""The dispatcher that leaves dispatch and combine to DeepEP, HybridEP or NCCL-EP.

The module also opens such a library at the start, and checks it.

Shapes as in dispatch.interface; N copies that this rank received, each with j places for its local
experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from moewright.engine.comm.autograd_collectives import all_to_all_in_turn
from moewright.engine.comm.collectives import Group, all_reduce
from moewright.engine.dispatch.alltoall import AllToAllDispatcher
from moewright.engine.dispatch.dedup import mask_repeats
from moewright.engine.dispatch.deepep_bindings import DeepEp, HybridEp
from moewright.engine.dispatch.interface import (
    DispatchLibrary,
    LibrarySizes,
    RoutedRows,
    RowExchange,
    RowMap,
    TokenDispatcher,
    build_row_map,
    copy_to_host,
    permute_to_local_experts,
    unusable_reason,
)
from moewright.engine.dispatch.ncclep_binding import NcclEp
from moewright.engine.dispatch.rows import count_ids
from moewright.engine.graph_nodes import ReleasingFunction
from moewright.engine.kernels.fused.interface import KernelSet
from moewright.engine.kernels.fused.table import torch_kernels
from moewright.spec.errors import BadInput
from moewright.spec.layout import DispatcherKind

_TRIAL_TOKENS = 16  # few: the trial shows the order of rows, not the speed
_TRIAL_TOP_K = 2  # two show whether a sum over experts is right


class _Dispatch(ReleasingFunction):
    """The dispatch of tokens to the ranks of their experts.

    Backward sums the gradients of a token's copies. Every tensor that is handed to the library is
    counted.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: torch.Tensor,
        weights_Tk: torch.Tensor,
        experts_Tk: torch.Tensor,
        library: DispatchLibrary,
    ) -> tuple[Any, ...]:
        with library.group.hand_to_library(x_TH, experts_Tk, weights_Tk):
            copies = library.dispatch(x_TH, experts_Tk, weights_Tk)
        ctx.library = library
        ctx.handle = copies.handle
        ctx.mark_non_differentiable(copies.ids)
        return copies.rows, copies.weights, copies.ids, copies.handle

    @staticmethod
    def backward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor | None, ...]:
        library: DispatchLibrary = ctx.library
        with library.group.hand_to_library(rows, weights):
            x_TH, weights_Tk = library.combine_with_weights(rows, weights, ctx.handle)
        return x_TH, weights_Tk, None, None


class _Combine(ReleasingFunction):
    """The sum of what the ranks send back for each token, whose gradient goes to all of them."""

    @staticmethod
    def forward(
        ctx: Any, rows_NH: torch.Tensor, handle: Any, library: DispatchLibrary
    ) -> torch.Tensor:
        ctx.library = library
        ctx.handle = handle
        with library.group.hand_to_library(rows_NH):
            return library.combine(rows_NH, handle)

    @staticmethod
    def backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        library: DispatchLibrary = ctx.library
        with library.group.hand_to_library(grad_TH):
            return library.dispatch_cached(grad_TH, ctx.handle), None, None


@dataclass(kw_only=True, slots=True)
class DeepEpRoute:
    """The route of one batch of tokens, which is filled when the library has brought the copies.

    Until then it has `experts` [T,k] alone; after that `handle` and `row_map`, the rows of the
    local experts among the slots of the copies received. `expert_ends` and `sent_counts` as in
    TokenDispatcher.
    """

    experts: torch.Tensor
    sent_counts: torch.Tensor
    expert_ends: torch.Tensor
    row_map: RowMap | None = None
    handle: Any = None


class DeepEpDispatcher:
    """A dispatcher over an expert-parallel group that calls one of the libraries."""

    def __init__(self, library: DispatchLibrary, experts: int, kernels: KernelSet) -> None:
        self._library = library
        self._experts = experts
        self._kernels = kernels

    def map_rows(self, experts_Tk: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return nothing: the library maps rows as it sends them."""
        return ()

    def preprocess(
        self,
        x_TH: torch.Tensor,
        experts_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
        mapped: tuple[torch.Tensor, ...] = (),
    ) -> tuple[RoutedRows, DeepEpRoute]:
        """Count what is sent; the library works out the rest by itself."""
        ranks = self._library.group.size
        destinations_Tk = mask_repeats(experts_Tk // (self._experts // ranks), ranks)
        expert_counts = count_ids(experts_Tk, self._experts + 1)[:-1]
        rank_counts = count_ids(destinations_Tk, ranks + 1)[:-1]
        route = DeepEpRoute(
            experts=experts_Tk,
            sent_counts=torch.cat((expert_counts, rank_counts)),
            expert_ends=torch.empty(0, dtype=torch.int32, device=x_TH.device),
        )
        return RoutedRows(rows=x_TH, weights=weights_Tk), route

    def dispatch(self, routed: RoutedRows, route: DeepEpRoute, exchange: RowExchange) -> RoutedRows:
        """Send copies and weights to the ranks of their experts.

        Nothing overlaps it (rules.limits.engine_limits).
        """
        rows, weights, ids, route.handle = _Dispatch.apply(
            routed.rows, routed.weights, route.experts, self._library
        )
        local = self._experts // self._library.group.size
        counts = count_ids(ids, local + 1)[:-1]
        ((local_rows,),) = copy_to_host(counts.sum()[None])
        route.row_map = build_row_map(ids, local_rows, self._kernels)
        route.expert_ends = counts.cumsum(0).to(torch.int32)
        return RoutedRows(rows=rows, weights=weights)

    def postprocess(self, routed: RoutedRows, route: DeepEpRoute) -> RoutedRows:
        """Make a row for each local expert that a copy has, by expert."""
        assert route.row_map is not None  # dispatched before
        return permute_to_local_experts(routed, route.row_map)

    def combine_preprocess(self, rows: torch.Tensor, route: DeepEpRoute) -> torch.Tensor:
        """Sum the weighted outputs of the local experts for each copy."""
        assert route.row_map is not None  # dispatched before
        return route.row_map.unpermute(rows)

    def combine(
        self, rows: torch.Tensor, route: DeepEpRoute, exchange: RowExchange
    ) -> torch.Tensor:
        """Send partial sums back to the ranks of their tokens, where the library sums them."""
        return _Combine.apply(rows, route.handle, self._library)

    def combine_postprocess(self, rows: torch.Tensor, route: DeepEpRoute) -> torch.Tensor:
        return rows


_BINDINGS: Mapping[
    DispatcherKind, Callable[[Group, LibrarySizes, torch.device], DispatchLibrary]
] = MappingProxyType(
    {
        DispatcherKind.DEEPEP: DeepEp,
        DispatcherKind.HYBRIDEP: HybridEp,
        DispatcherKind.NCCLEP: NcclEp,
    }
)


def open_library(
    dispatcher: DispatcherKind, group: Group, sizes: LibrarySizes, device: torch.device
) -> DispatchLibrary:
    """Set up the library that a layout's dispatcher names; every rank of the group calls this.

    Raises:
        BadInput: when it cannot be set up.
    """
    try:
        return _BINDINGS[dispatcher](group, sizes, device)
    except Exception as error:  # it may refuse a device, a number of ranks, its own version
        raise BadInput(
            unusable_reason(dispatcher, f"cannot be set up: {type(error).__name__}: {error}")
        ) from error


def verify_library(
    library: DispatchLibrary,
    kind: DispatcherKind,
    etp_group: Group,
    *,
    experts: int,
    hidden: int,
    like: torch.Tensor,
) -> None:
    """Compare a tiny dispatch and combine, forward and backward, with the plain all-to-all.

    Every rank of the group calls this, with an ETP group of one. `like` is a tensor of the dtype
    and device that the job uses.

    Raises:
        BadInput: on all ranks, when the library fails on one of them or gives another result.
    """
    plain = AllToAllDispatcher(
        library.group, etp_group, experts, torch_kernels(), forced_counts=None, may_drop=False
    )
    fused = DeepEpDispatcher(library, experts, torch_kernels())
    failures = like.new_zeros(1, dtype=torch.float32)
    rule = "differs from the plain all-to-all in a trial at the start"
    try:
        results, references = (
            _run_trial(dispatcher, library.group, experts, hidden, like)
            for dispatcher in (fused, plain)
        )
        # bf16 keeps 8 bits, and the two sum in another order.
        tolerance = 2e-2 if like.element_size() < 4 else 1e-5
        is_close = all(
            float((result - reference).norm()) <= tolerance * float(reference.norm())
            for result, reference in zip(results, references, strict=True)
        )
        failures += not is_close
    # The library may refuse the device, the width of rows or the number of ranks.
    except Exception as error:
        failures += 1
        rule = f"failed a trial at the start: {type(error).__name__}: {error}"
    # All ranks come here, also those where it failed, or the others would wait for ever.
    if float(all_reduce(failures, library.group)):
        raise BadInput(unusable_reason(kind, rule))


def _run_trial(
    dispatcher: TokenDispatcher, group: Group, experts: int, hidden: int, like: torch.Tensor
) -> list[torch.Tensor]:
    """Return the outputs and gradients of tokens through experts that multiply by their number.

    So a row that reaches a wrong expert changes the output.
    """
    device = like.device
    top_k = min(_TRIAL_TOP_K, experts)
    angles = torch.arange(_TRIAL_TOKENS * hidden, device=device) + group.index
    x = torch.sin(angles).view(_TRIAL_TOKENS, hidden).to(like).requires_grad_()
    tokens = torch.arange(_TRIAL_TOKENS, device=device)
    slots = tokens[:, None] * 3 + torch.arange(top_k, device=device) * 5 + group.index
    weights = ((slots % 7 + 1).float() / 8).requires_grad_()
    chosen = torch.stack([(slots[:, 0] + slot) % experts for slot in range(top_k)], 1)
    routed, route = dispatcher.preprocess(x, chosen, weights)
    routed = dispatcher.postprocess(dispatcher.dispatch(routed, route, all_to_all_in_turn), route)
    local = experts // group.size
    row_numbers = torch.arange(len(routed.rows), dtype=torch.int32, device=device)
    local_expert = torch.searchsorted(route.expert_ends, row_numbers, right=True)
    factor = local_expert + 1 + group.index * local
    rows = (routed.rows.float() * (routed.weights * factor)[:, None]).to(like)
    rows = dispatcher.combine(dispatcher.combine_preprocess(rows, route), route, all_to_all_in_turn)
    out = dispatcher.combine_postprocess(rows, route)
    out.backward(torch.cos(x.detach().float()).to(like))
    return [tensor.detach().float() for tensor in (out, x.grad, weights.grad) if tensor is not None]
