"""Bindings of DeepEP and HybridEP (github.com/deepseek-ai/DeepEP, branch hybrid-ep).

Their expert-parallel kernels send one copy of a token to each rank (between nodes, one to each
node) and sum the copies on the way back. Both have two calls, each of which is the backward of
the other: a dispatch, which returns a handle, and a combine, which sums without weights.

Each library is called from one class of this module, through its public Python interface alone.
Neither has been run on hardware by this project: tests replace them by a module that exchanges over
gloo, and a job that asks for one starts with `deepep.verify_library`, which compares it with the
plain all-to-all.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from moewright.engine.comm.collectives import Group
from moewright.engine.dispatch.interface import LibrarySizes, ReceivedCopies


class DeepEp:
    """A binding of `deep_ep.Buffer`, by its normal kernels.

    The host waits once a dispatch, for the number of copies that this rank receives.
    """

    def __init__(self, group: Group, sizes: LibrarySizes, device: torch.device) -> None:
        module = importlib.import_module("deep_ep")
        buffer_class = module.Buffer
        row_bytes = 2 * sizes.hidden  # rows are bf16
        configs = [
            buffer_class.get_dispatch_config(group.size),
            buffer_class.get_combine_config(group.size),
        ]
        self.group = group
        self._experts = sizes.experts
        self._index_dtype = getattr(module, "topk_idx_t", torch.int64)
        # One buffer serves dispatch and combine, so that it has to be large enough for either.
        self._buffer = buffer_class(
            group.handle,
            max(config.get_nvl_buffer_size_hint(row_bytes, group.size) for config in configs),
            max(config.get_rdma_buffer_size_hint(row_bytes, group.size) for config in configs),
        )

    def dispatch(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> ReceivedCopies:
        # The library takes -1 for a slot without an expert; here that is one past the last.
        chosen = experts_Tk.masked_fill(experts_Tk == self._experts, -1).to(self._index_dtype)
        rank_counts, node_counts, expert_counts, is_in_rank, _ = self._buffer.get_dispatch_layout(
            chosen, self._experts
        )
        rows, ids, weights, _, handle, _ = self._buffer.dispatch(
            x_TH.contiguous(),
            topk_idx=chosen,
            topk_weights=weights_Tk.contiguous(),
            num_tokens_per_rank=rank_counts,
            num_tokens_per_rdma_rank=node_counts,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=expert_counts,
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
    """A binding of `deep_ep.HybridEPBuffer`, by its dispatch and combine without permutation.

    It describes a token's experts by two maps [T,E]: whether it has an expert, and with which
    probability; a copy arrives with the probabilities of all experts of the node.
    """

    def __init__(self, group: Group, sizes: LibrarySizes, device: torch.device) -> None:
        module = importlib.import_module("deep_ep")
        local = sizes.experts // group.size
        first = group.index % sizes.nvlink_domain_size * local
        self.group = group
        self._experts = sizes.experts
        self._node_experts = local * sizes.nvlink_domain_size
        self._local_ids = torch.arange(local)
        self._local_columns = slice(first, first + local)  # of the node's experts
        self._buffer = module.HybridEPBuffer(
            group=group.handle,
            hidden_dim=sizes.hidden,
            max_num_of_tokens_per_rank=sizes.max_tokens,
            num_local_experts=local,
            num_of_ranks_per_nvlink_domain=sizes.nvlink_domain_size,
        )

    def dispatch(
        self, x_TH: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> ReceivedCopies:
        shape = len(x_TH), self._experts + 1
        routing_map = torch.zeros(shape, dtype=torch.bool, device=x_TH.device)
        routing_map = routing_map.scatter_(1, experts_Tk, True)[:, :-1]
        probs = weights_Tk.new_zeros(shape).scatter_(1, experts_Tk, weights_Tk)[:, :-1]
        rows, node_probs, _, handle = self._buffer.dispatch(
            hidden=x_TH.contiguous(), routing_map=routing_map.contiguous(), probs=probs.contiguous()
        )
        local_ids = self._local_ids.to(x_TH.device)
        # Whether a copy is for each local expert, [N,E_local]; as the library documents.
        is_local = handle[4][: len(rows)]
        return ReceivedCopies(
            rows=rows,
            ids=torch.where(is_local, local_ids, len(local_ids)),
            weights=node_probs[:, self._local_columns] * is_local,
            handle=(handle, experts_Tk),
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
        library_handle, experts_Tk = handle
        probs = weights_Nj.new_zeros(len(rows_NH), self._node_experts)
        probs[:, self._local_columns] = weights_Nj
        sums, token_probs = self._buffer.combine(
            hidden=rows_NH.contiguous(), probs=probs, handle=library_handle
        )
        # A dropped slot has expert E, whose weight is 0.
        token_probs = torch.cat((token_probs, token_probs.new_zeros(len(token_probs), 1)), 1)
        return sums, token_probs.gather(1, experts_Tk)
