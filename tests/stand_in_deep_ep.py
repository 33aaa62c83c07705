"""A stand-in for deep_ep, which exchanges over any process group.

It has the calls of deep_ep that the engine makes: `Buffer` as in DeepEP 1.2 and `HybridEPBuffer`
as on its branch hybrid-ep. It is written after their documented shapes.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist


def install(patch: pytest.MonkeyPatch, *, wrong: float = 0.0) -> None:
    """Make `import deep_ep` find this module.

    Sums come back with `wrong` added, so that a test can plant an error.
    """
    for name in ("deep_ep", "hybrid_ep_cpp"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        patch.setitem(sys.modules, name, module)
    deep_ep = sys.modules["deep_ep"]
    deep_ep.topk_idx_t = torch.int64  # type: ignore[attr-defined]
    deep_ep.Buffer = type("Buffer", (Buffer,), {"wrong": wrong})  # type: ignore[attr-defined]
    hybrid = type("HybridEPBuffer", (HybridEPBuffer,), {"wrong": wrong})
    deep_ep.HybridEPBuffer = hybrid  # type: ignore[attr-defined]


class TokenExchange:
    """An exchange that knows which tokens [T, ranks] go to which rank, and how many arrive."""

    def __init__(self, reaches_rank: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.reaches_rank = reaches_rank
        self.group = group
        self.send_counts = reaches_rank.sum(0)
        self.receive_counts = torch.empty_like(self.send_counts)
        dist.all_to_all_single(self.receive_counts, self.send_counts, group=group)

    def send(self, token_rows: torch.Tensor) -> torch.Tensor:
        """Send the rows of tokens to the ranks that they reach."""
        rows = torch.cat([token_rows[is_sent] for is_sent in self.reaches_rank.T])
        return self._exchange(rows, self.send_counts, self.receive_counts)

    def sum_back(self, replica_rows: torch.Tensor) -> torch.Tensor:
        """Send the replicas of tokens back and sum them in the order of ranks."""
        rows = self._exchange(replica_rows, self.receive_counts, self.send_counts)
        parts = rows.split(self.send_counts.tolist())
        total = replica_rows.new_zeros((len(self.reaches_rank), *replica_rows.shape[1:]))
        for is_sent, part in zip(self.reaches_rank.T, parts, strict=True):
            total[is_sent] += part
        return total

    def _exchange(
        self, rows: torch.Tensor, send: torch.Tensor, receive: torch.Tensor
    ) -> torch.Tensor:
        out = rows.new_empty((int(receive.sum()), *rows.shape[1:]))
        dist.all_to_all_single(
            out, rows.contiguous(), receive.tolist(), send.tolist(), group=self.group
        )
        return out


class Buffer:
    wrong = 0.0

    def __init__(
        self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0
    ) -> None:
        assert num_nvl_bytes > 0
        self.group = group

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> SimpleNamespace:
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda hidden, ranks: hidden * ranks,
            get_rdma_buffer_size_hint=lambda hidden, ranks: 0,
        )

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        ranks = self.group.size()
        local = num_experts // ranks
        reaches_rank = torch.stack([(topk_idx // local == rank).any(1) for rank in range(ranks)], 1)
        chosen = topk_idx[topk_idx >= 0]
        expert_counts = torch.bincount(chosen, minlength=num_experts)
        return reaches_rank.sum(0), None, expert_counts, reaches_rank, None

    def dispatch(self, x: torch.Tensor, handle: Any = None, **arguments: Any) -> tuple[Any, ...]:
        if handle is not None:
            assert not arguments
            return handle.send(x), None, None, None, None, None
        exchange = TokenExchange(arguments["is_token_in_rank"], self.group)
        local = len(arguments["num_tokens_per_expert"]) // self.group.size()
        ids = exchange.send(arguments["topk_idx"]) - self.group.rank() * local
        is_elsewhere = (ids < 0) | (ids >= local)
        weights = exchange.send(arguments["topk_weights"]).masked_fill(is_elsewhere, 0.0)
        counts = [int((ids == expert).sum()) for expert in range(local)]
        return exchange.send(x), ids.masked_fill(is_elsewhere, -1), weights, counts, exchange, None

    def combine(
        self, x: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None = None
    ) -> tuple[Any, ...]:
        weights = None if topk_weights is None else handle.sum_back(topk_weights)
        return handle.sum_back(x) + self.wrong, weights, None


class HybridEPBuffer:
    wrong = 0.0

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        num_of_ranks_per_nvlink_domain: int,
    ) -> None:
        assert group.size() % num_of_ranks_per_nvlink_domain == 0
        self.group = group
        self.local = num_local_experts
        node_experts = num_local_experts * num_of_ranks_per_nvlink_domain
        first_of_node = group.rank() // num_of_ranks_per_nvlink_domain * node_experts
        self.node = slice(first_of_node, first_of_node + node_experts)
        first = group.rank() * num_local_experts
        self.local_experts = slice(first, first + num_local_experts)

    def dispatch(
        self,
        hidden: torch.Tensor,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        handle: Any = None,
    ) -> tuple[Any, ...]:
        if handle is None:
            assert routing_map is not None
            assert routing_map.dtype == torch.bool
            reaches_rank = routing_map.unflatten(1, (self.group.size(), self.local)).any(2)
            exchange = TokenExchange(reaches_rank, self.group)
            is_local = exchange.send(routing_map.to(torch.uint8)).bool()[:, self.local_experts]
            # The map is longer than the number of rows that arrived, as HybridEP's is.
            padded = torch.cat((is_local, torch.ones(3, self.local, dtype=torch.bool)))
            handle = (exchange, None, None, torch.tensor([len(is_local)]), padded, len(hidden))
        exchange = handle[0]
        node_probs = None if probs is None else exchange.send(probs)[:, self.node]
        return exchange.send(hidden), node_probs, None, handle

    def combine(
        self, hidden: torch.Tensor, probs: torch.Tensor | None = None, handle: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        exchange = handle[0]
        token_probs = None
        if probs is not None:
            all_probs = probs.new_zeros(len(probs), self.group.size() * self.local)
            all_probs[:, self.node] = probs
            token_probs = exchange.sum_back(all_probs)
        return exchange.sum_back(hidden) + self.wrong, token_probs
