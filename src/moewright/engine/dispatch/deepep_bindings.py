"""DeepEP and HybridEP (github.com/deepseek-ai/DeepEP, its branch hybrid-ep): expert-parallel
kernels that move one copy of a token to a rank, and between nodes one to a node, and sum on the way
back.

Both have two calls, each of which is the backward of the other: a dispatch, which gives a handle,
and a combine, which sums without weights. Each library is spoken to in one class of this module,
through its public Python interface alone. Neither has been run on hardware by this project: tests
put a module in their place that exchanges over gloo, and a job that asks for one starts with
`fused.prove`, which holds it against the plain all-to-all.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moewright.engine.comm.collectives import Group
from moewright.spec.errors import BadInput, Reason
from moewright.spec.layout import DispatcherKind


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedCopies:
    """Copies [N,H] that came here; of each its experts here, ids [N,j] from 0 with E_local for
    none, and their weights [N,j] fp32. `handle` is the library's, for the way back.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    handle: Any


class DispatchLibrary(Protocol):
    """What a library does for an expert-parallel group; ids and weights [T,k] are of the tokens
    here, E for none."""

    group: Group

    def dispatch(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> ReceivedCopies: ...

    def dispatch_cached(self, x_TH: torch.Tensor, handle: Any) -> torch.Tensor:
        """Other rows of the same tokens the same way: [N,H]."""
        ...

    def combine(self, rows_NH: torch.Tensor, handle: Any) -> torch.Tensor:
        """Sums [T,H] of what the ranks send back for each token."""
        ...

    def combine_with_weights(
        self, rows_NH: torch.Tensor, weights_Nj: torch.Tensor, handle: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and each weight [T,k] from the rank that it went to."""
        ...


class DeepEp:
    """`deep_ep.Buffer`, by its normal kernels, which wait for the device once to learn how many
    copies come."""

    def __init__(self, module: Any, group: Group, *, experts: int, hidden: int) -> None:
        row_bytes, make = 2 * hidden, module.Buffer  # rows are bf16
        configs = [
            config(group.size) for config in (make.get_dispatch_config, make.get_combine_config)
        ]
        self.group, self._experts = group, experts
        self._index = getattr(module, "topk_idx_t", torch.int64)
        self._buffer = make(
            group.handle,
            max(config.get_nvl_buffer_size_hint(row_bytes, group.size) for config in configs),
            max(config.get_rdma_buffer_size_hint(row_bytes, group.size) for config in configs),
        )

    def dispatch(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> ReceivedCopies:
        chosen = experts_Tk.masked_fill(experts_Tk == self._experts, -1).to(self._index)
        to_ranks, to_nodes, to_experts, reached, _ = self._buffer.get_dispatch_layout(
            chosen, self._experts
        )
        rows, ids, weights, _, handle, _ = self._buffer.dispatch(
            x_TH.contiguous(),
            topk_idx=chosen,
            topk_weights=weights_Tk.contiguous(),
            num_tokens_per_rank=to_ranks,
            num_tokens_per_rdma_rank=to_nodes,
            is_token_in_rank=reached,
            num_tokens_per_expert=to_experts,
        )
        ids = ids.long().masked_fill(ids < 0, self._experts // self.group.size)
        return ReceivedCopies(rows=rows, ids=ids, weights=weights, handle=handle)

    def dispatch_cached(self, x_TH: torch.Tensor, handle: Any) -> torch.Tensor:
        rows: torch.Tensor = self._buffer.dispatch(x_TH.contiguous(), handle=handle)[0]
        return rows

    def combine(self, rows_NH: torch.Tensor, handle: Any) -> torch.Tensor:
        sums: torch.Tensor = self._buffer.combine(rows_NH.contiguous(), handle)[0]
        return sums

    def combine_with_weights(
        self, rows_NH: torch.Tensor, weights_Nj: torch.Tensor, handle: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sums, weights, _ = self._buffer.combine(
            rows_NH.contiguous(), handle, topk_weights=weights_Nj.contiguous()
        )
        return sums, weights


class HybridEp:
    """`deep_ep.HybridEPBuffer`, by its dispatch and combine without permutation. It speaks of
    experts in maps: whether a token has an expert [T,E], with which probability [T,E]; what arrives
    has those of all experts of the node.
    """

    def __init__(
        self,
        module: Any,
        group: Group,
        *,
        experts: int,
        hidden: int,
        max_tokens: int,
        nvlink_domain_size: int,
    ) -> None:
        """`tokens` of a rank at most; `near` ranks of the group lie in one NVLink domain."""
        local = experts // group.size
        self.group, self._experts = group, experts
        self._of_node, self._first = (
            local * nvlink_domain_size,
            group.index % nvlink_domain_size * local,
        )
        self._here = torch.arange(local)
        self._buffer = module.HybridEPBuffer(
            group=group.handle,
            hidden_dim=hidden,
            max_num_of_tokens_per_rank=max_tokens,
            num_local_experts=local,
            num_of_ranks_per_nvlink_domain=nvlink_domain_size,
        )

    @property
    def _mine(self) -> slice:
        return slice(self._first, self._first + len(self._here))

    def dispatch(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> ReceivedCopies:
        shape = len(x_TH), self._experts + 1
        chosen = torch.zeros(shape, dtype=torch.bool, device=x_TH.device).scatter_(
            1, experts_Tk, True
        )[:, :-1]
        weights = weights_Tk.new_zeros(shape).scatter_(1, experts_Tk, weights_Tk)[:, :-1]
        rows, probs, _, handle = self._buffer.dispatch(
            hidden=x_TH.contiguous(), routing_map=chosen.contiguous(), probs=weights.contiguous()
        )
        here = self._here.to(x_TH.device)
        wanted = handle[4][
            : len(rows)
        ]  # whether a copy is for an expert here [N,E_local]; as the library documents
        ids = torch.where(wanted, here, len(here))
        return ReceivedCopies(
            rows=rows, ids=ids, weights=probs[:, self._mine] * wanted, handle=(handle, experts_Tk)
        )

    def dispatch_cached(self, x_TH: torch.Tensor, handle: Any) -> torch.Tensor:
        rows: torch.Tensor = self._buffer.dispatch(hidden=x_TH.contiguous(), handle=handle[0])[0]
        return rows

    def combine(self, rows_NH: torch.Tensor, handle: Any) -> torch.Tensor:
        sums: torch.Tensor = self._buffer.combine(hidden=rows_NH.contiguous(), handle=handle[0])[0]
        return sums

    def combine_with_weights(
        self, rows_NH: torch.Tensor, weights_Nj: torch.Tensor, handle: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        probs = weights_Nj.new_zeros(len(rows_NH), self._of_node)
        probs[:, self._mine] = weights_Nj
        sums, back = self._buffer.combine(
            hidden=rows_NH.contiguous(), probs=probs, handle=handle[0]
        )
        back = torch.cat((back, back.new_zeros(len(back), 1)), 1)  # a dropped slot has no expert
        return sums, back.gather(1, handle[1])


def open_library(
    dispatcher: DispatcherKind,
    group: Group,
    *,
    experts: int,
    hidden: int,
    max_tokens: int,
    nvlink_domain_size: int,
) -> DispatchLibrary:
    """The library set up for a group; every rank of it calls this. Raises BadInput when it cannot
    be."""
    try:
        module = importlib.import_module("deep_ep")
        if dispatcher is DispatcherKind.DEEPEP:
            return DeepEp(module, group, experts=experts, hidden=hidden)
        return HybridEp(
            module,
            group,
            experts=experts,
            hidden=hidden,
            max_tokens=max_tokens,
            nvlink_domain_size=nvlink_domain_size,
        )
    except Exception as error:  # whatever it refuses: a device, a number of ranks, its own version
        raise BadInput(
            unusable_reason(dispatcher, f"cannot be set up: {type(error).__name__}: {error}")
        ) from error


def unusable_reason(dispatcher: DispatcherKind, why: str) -> Reason:
    return Reason(
        field="layout.dispatcher", value=dispatcher, rule=why, nearest=DispatcherKind.DEDUP
    )
