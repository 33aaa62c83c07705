"""A module in the place of deep_ep: the calls that the engine makes of it, by exchanges over any
process group.

`Buffer` as in DeepEP 1.2, `HybridEPBuffer` as on its branch hybrid-ep; written after their
documented shapes.
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
    """Let `import deep_ep` find this; sums come back with `wrong` added."""
    for name in ("deep_ep", "hybrid_ep_cpp"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        patch.setitem(sys.modules, name, module)
    deep_ep = sys.modules["deep_ep"]
    deep_ep.topk_idx_t = torch.int64  # type: ignore[attr-defined]
    deep_ep.Buffer = type("Buffer", (Buffer,), {"wrong": wrong})  # type: ignore[attr-defined]
    deep_ep.HybridEPBuffer = type("HybridEPBuffer", (HybridEPBuffer,), {"wrong": wrong})  # type: ignore[attr-defined]


class _TokenExchange:
    """Which tokens [T, ranks] go where, and how many come from where."""

    def __init__(self, reached: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.reached, self.group = reached, group
        self.send = reached.sum(0)
        came = torch.empty_like(self.send)
        dist.all_to_all_single(came, self.send, group=group)
        self.receive = came

    def send(self, of_token: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([of_token[to] for to in self.reached.T])
        return self._exchange(rows, self.send, self.receive)

    def sum_back(self, of_copy: torch.Tensor) -> torch.Tensor:
        """The sum over copies, in the order of ranks."""
        rows = self._exchange(of_copy, self.receive, self.send).split(self.send.tolist())
        total = of_copy.new_zeros((len(self.reached), *of_copy.shape[1:]))
        for to, part in zip(self.reached.T, rows, strict=True):
            total[to] += part
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
        ranks, local = self.group.size(), num_experts // self.group.size()
        reached = torch.stack([(topk_idx // local == rank).any(1) for rank in range(ranks)], 1)
        chosen = topk_idx[topk_idx >= 0]
        return reached.sum(0), None, torch.bincount(chosen, minlength=num_experts), reached, None

    def dispatch(self, x: torch.Tensor, handle: Any = None, **told: Any) -> tuple[Any, ...]:
        if handle is not None:
            assert not told
            return handle.there(x), None, None, None, None, None
        way = _TokenExchange(told["is_token_in_rank"], self.group)
        local = len(told["num_tokens_per_expert"]) // self.group.size()
        ids = way.send(told["topk_idx"]) - self.group.rank() * local
        away = (ids < 0) | (ids >= local)
        weights = way.send(told["topk_weights"]).masked_fill(away, 0.0)
        counts = [int((ids == expert).sum()) for expert in range(local)]
        return way.send(x), ids.masked_fill(away, -1), weights, counts, way, None

    def combine(
        self, x: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None = None
    ) -> tuple[Any, ...]:
        back = None if topk_weights is None else handle.back(topk_weights)
        return handle.back(x) + self.wrong, back, None


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
        self.group, self.local = group, num_local_experts
        of_node = num_local_experts * num_of_ranks_per_nvlink_domain
        first = group.rank() // num_of_ranks_per_nvlink_domain * of_node
        self.node = slice(first, first + of_node)
        self.here = slice(group.rank() * num_local_experts, (group.rank() + 1) * num_local_experts)

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
            reached = routing_map.unflatten(1, (self.group.size(), self.local)).any(2)
            way = _TokenExchange(reached, self.group)
            wanted = way.send(routing_map.to(torch.uint8)).bool()[:, self.here]
            room = torch.cat(
                (wanted, torch.ones(3, self.local, dtype=torch.bool))
            )  # longer than what came
            handle = (way, None, None, torch.tensor([len(wanted)]), room, len(hidden))
        way = handle[0]
        spread = None if probs is None else way.there(probs)[:, self.node]
        return way.there(hidden), spread, None, handle

    def combine(
        self, hidden: torch.Tensor, probs: torch.Tensor | None = None, handle: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        way, back = handle[0], None
        if probs is not None:
            whole = probs.new_zeros(len(probs), self.group.size() * self.local)
            whole[:, self.node] = probs
            back = way.back(whole)
        return way.back(hidden) + self.wrong, back
