"""Products of low-rank adapters, added to those of frozen weights (LoRA, Hu et al. 2021).

The product of a weight w gets f (x a^T) b^T added, with a factor f, a [r,K] and b [N,r]. TP and EP
shard a as they shard the columns of w, b as its rows; what they do not shard is whole on every
rank, and its gradient is summed like that of any such parameter (rules.shapes.shards). A stack of
weights (gate and up) has a stack of adapters.

Shapes: t, T tokens, R rows as in parallel_linear; K in, N out, r rank, E experts.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from moewright.engine.comm.collectives import Group
from moewright.engine.kernels.products import WIDE_PRODUCTS
from moewright.engine.model.parallel_linear import (
    ColumnParallelLinear,
    GroupedLinear,
    InputNoise,
    ReplicatedLinear,
    RouterLinear,
    RowParallelLinear,
)
from moewright.engine.runtime import Runtime


class AdaptedWeight(Protocol):
    """A weight that may have an adapter: `lora_a` and `lora_b`, or None."""

    lora_a: Any
    lora_b: Any
    lora_factor: float


def add_column_adapter(
    runtime: Runtime, part: AdaptedWeight, y_TN: torch.Tensor, x_tK: torch.Tensor
) -> torch.Tensor:
    """Add the adapter of a column-parallel weight, or of a stack of them, to its product."""
    if part.lora_a is None:
        return y_TN
    replicas = _replica_group(runtime)
    a = part.lora_a.weight
    stack = part.lora_b.weight.view(-1, *part.lora_b.weight.shape[-2:]).unbind()
    # One product for the whole stack: the ranks of its adapters lie side by side.
    h_tr = ReplicatedLinear.apply(x_tK, a.flatten(0, -2), runtime.counters, WIDE_PRODUCTS, replicas)
    h_tr = h_tr * part.lora_factor
    tp = runtime.mesh.tensor_parallel
    products = [
        ColumnParallelLinear.apply(h.contiguous(), tp, WIDE_PRODUCTS, runtime.weight_grads, b)[0]
        for h, b in zip(h_tr.chunk(len(stack), 1), stack, strict=True)
    ]
    return y_TN + _join(products)


def add_row_adapter(
    runtime: Runtime, part: AdaptedWeight, y_tN: torch.Tensor, x_TK: torch.Tensor
) -> torch.Tensor:
    """Add the adapter of a row-parallel weight to its product."""
    if part.lora_a is None:
        return y_tN
    h_tr = RowParallelLinear.apply(
        x_TK,
        part.lora_a.weight,
        runtime.mesh.tensor_parallel,
        WIDE_PRODUCTS,
        runtime.weight_grads,
    )
    return y_tN + ReplicatedLinear.apply(
        h_tr * part.lora_factor,
        part.lora_b.weight,
        runtime.counters,
        WIDE_PRODUCTS,
        _replica_group(runtime),
    )


def add_replicated_adapter(
    runtime: Runtime, part: AdaptedWeight, y_tN: torch.Tensor, x_tK: torch.Tensor
) -> torch.Tensor:
    """Add the adapter of a weight that is whole on every rank to its product."""
    if part.lora_a is None:
        return y_tN
    replicas = _replica_group(runtime)
    h_tr = ReplicatedLinear.apply(
        x_tK, part.lora_a.weight, runtime.counters, WIDE_PRODUCTS, replicas
    )
    return y_tN + ReplicatedLinear.apply(
        h_tr * part.lora_factor, part.lora_b.weight, runtime.counters, WIDE_PRODUCTS, replicas
    )


def add_grouped_adapter(
    runtime: Runtime,
    part: AdaptedWeight,
    y_RN: torch.Tensor,
    x_RK: torch.Tensor,
    ends_E: torch.Tensor,
) -> torch.Tensor:
    """Add the adapters of this rank's experts to the products of their rows."""
    if part.lora_a is None:
        return y_RN
    a = part.lora_a.weight
    b = part.lora_b.weight
    stack = b.view(len(b), -1, *b.shape[-2:]).unbind(1)
    counters, weight_grads = runtime.counters, runtime.weight_grads
    h_Rr = GroupedLinear.apply(
        x_RK, a.view(len(a), -1, a.shape[-1]), ends_E, counters, WIDE_PRODUCTS, weight_grads
    )
    h_Rr = h_Rr * part.lora_factor
    products = [
        GroupedLinear.apply(h.contiguous(), b_E, ends_E, counters, WIDE_PRODUCTS, weight_grads)
        for h, b_E in zip(h_Rr.chunk(len(stack), 1), stack, strict=True)
    ]
    return y_RN + _join(products)


def add_router_adapter(
    runtime: Runtime,
    part: AdaptedWeight,
    logits_TE: torch.Tensor,
    x_TK: torch.Tensor,
    noise: InputNoise | None,
) -> torch.Tensor:
    """Add the adapter of a router to its logits, in their dtype."""
    if part.lora_a is None:
        return logits_TE
    dtype = logits_TE.dtype
    h_Tr = RouterLinear.apply(x_TK, part.lora_a.weight, runtime.counters, dtype, noise)
    return logits_TE + RouterLinear.apply(
        h_Tr * part.lora_factor, part.lora_b.weight, runtime.counters, dtype, None
    )


def _join(products: list[torch.Tensor]) -> torch.Tensor:
    """Return the products of a stack side by side."""
    if len(products) == 1:
        return products[0]
    return torch.cat(products, 1)


def _replica_group(runtime: Runtime) -> Group | None:
    """Return the ranks with the same hidden states: none under sequence parallelism."""
    if runtime.mesh.layout.sp:
        return None
    return runtime.mesh.group("tp")
