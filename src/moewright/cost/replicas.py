"""Replicas of hot experts (rules.placement) on one rank: bytes held, and what a step exchanges to
keep them equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from moewright.cost.routed_rows import rank_chunks
from moewright.rules import expert_placement, grid, shards
from moewright.rules.recompute import activation_nbytes
from moewright.spec.layout import Layout
from moewright.spec.ledger import Component, MemoryRow, Module
from moewright.spec.model import ModelSpec
from moewright.spec.workload import Workload

_FP32_BYTES = 4


def replica_rows(
    model: ModelSpec, workload: Workload, layout: Layout, pp_rank: int
) -> tuple[MemoryRow, ...]:
    """Weights and gradients; they have no states of an optimizer."""
    elements = (
        layout.spare * sum(map(sum, _elements(model, layout, pp_rank).values()))
        if layout.spare
        else 0
    )
    sizes = (
        (Component.GRADIENTS, workload.grad_dtype.nbytes),
        (Component.WEIGHTS, activation_nbytes(workload)),
    )
    return tuple(
        MemoryRow(component=c, module=Module.EXPERTS, bytes=n * elements)
        for c, n in sizes
        if elements
    )


def replica_calls(
    model: ModelSpec, workload: Workload, layout: Layout, rank: int
) -> Iterator[tuple[int, int]]:
    """Bytes and calls of all-to-alls over the expert group in a step, by layer: gradients in fp32
    to the ranks whose own the experts are, and their weights from there.
    """
    if not layout.spare:
        return
    here, c = grid.coordinate(layout, rank, "ep"), activation_nbytes(workload)
    for layer, parts in _elements(model, layout, grid.coordinate(layout, rank, "pp")).items():
        slots = expert_placement.slot_experts(model, workload, layout, layer)
        sent = len(
            expert_placement.plan_replica_exchange(slots, layout.ep, here, layout.spare).sent_slots
        )
        yield sum(parts) * (layout.spare * _FP32_BYTES + sent * c), 2 * len(parts)


def _elements(model: ModelSpec, layout: Layout, pp_rank: int) -> dict[int, Sequence[int]]:
    """Elements of one expert's tensors on a rank, by layer; MTP depths have no replicas."""
    found: dict[int, list[int]] = {}
    layers = {layer for chunk in rank_chunks(model, layout, pp_rank) for layer in chunk.layers}
    for param in shards.stage_parameters(model, layout, pp_rank):
        if param.is_expert and param.layer in layers:
            found.setdefault(param.layer, []).append(prod(shards.local_shape(param, layout)[1:]))
    return dict(found)
