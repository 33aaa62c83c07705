"""Replicas of hot experts on one rank: their bytes, and what a step exchanges to keep them equal.

rules.expert_placement decides which experts have replicas, and where.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from moewright.cost.routed_rows import rank_chunks
from moewright.rules import expert_placement, grid
from moewright.rules.job import Job
from moewright.rules.saved.recompute import activation_nbytes
from moewright.rules.shapes import shards
from moewright.spec.layout import Layout
from moewright.spec.ledger import Component, MemoryRow, Module
from moewright.spec.model import ModelSpec


def replica_rows(job: Job, pp_rank: int) -> tuple[MemoryRow, ...]:
    """Return the weights and gradients of a rank's replicas; they have no optimizer states."""
    if not job.layout.spare:
        return ()
    expert_numels = _expert_tensor_numels(job.model, job.layout, pp_rank).values()
    numel = job.layout.spare * sum(sum(tensors) for tensors in expert_numels)
    if not numel:
        return ()
    return tuple(
        MemoryRow(component=component, module=Module.EXPERTS, bytes=nbytes * numel)
        for component, nbytes in (
            (Component.GRADIENTS, job.workload.grad_dtype.nbytes),
            (Component.WEIGHTS, activation_nbytes(job.workload)),
        )
    )


def replica_calls(job: Job, rank: int) -> Iterator[tuple[int, int]]:
    """Yield the bytes and calls of the all-to-alls over the EP group in a step, by layer.

    Gradients go in grad_dtype to the ranks that own the experts, and their weights come from there.
    """
    if not job.layout.spare:
        return
    ep_rank = grid.coordinate(job.layout, rank, "ep")
    pp_rank = grid.coordinate(job.layout, rank, "pp")
    weight_bytes = activation_nbytes(job.workload)
    gradient_bytes = job.workload.grad_dtype.nbytes
    for layer, tensors in _expert_tensor_numels(job.model, job.layout, pp_rank).items():
        slots = expert_placement.slot_experts(job, layer)
        exchange = expert_placement.plan_replica_exchange(
            slots, job.layout.ep, ep_rank, job.layout.spare
        )
        element_bytes = job.layout.spare * gradient_bytes + len(exchange.sent_slots) * weight_bytes
        yield sum(tensors) * element_bytes, 2 * len(tensors)


def _expert_tensor_numels(
    model: ModelSpec, layout: Layout, pp_rank: int
) -> dict[int, Sequence[int]]:
    """Return the elements of each tensor of one expert on a rank, by layer.

    MTP depths have no replicas.
    """
    numels: dict[int, list[int]] = {}
    layers = {layer for chunk in rank_chunks(model, layout, pp_rank) for layer in chunk.layers}
    for param in shards.stage_parameters(model, layout, pp_rank):
        if param.is_expert and param.layer in layers:
            expert_shape = shards.local_shape(param, layout)[1:]
            numels.setdefault(param.layer, []).append(prod(expert_shape))
    return dict(numels)
