"""Weights of 8- and 4-bit products that a rank converts once a step, and the bytes of the copies.

A weight is the same for all micro-batches of a step. Where there are several, it is converted by
the first that reads it, along its columns for the product of forward and along its rows for the
gradient of its input, and both copies stay; a frozen weight is converted once a run. (Transformer
Engine does so where it is told `is_first_microbatch`.) A step of one micro-batch keeps none.

Weights that do not stay whole have none: those of ZeRO-3, which are gathered for each pass, and a
packed base, which is widened for each product. Nor have those of a model whose parts are captured
in graphs, which read what was there when they were captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from moewright.rules import expert_placement
from moewright.rules.adapters import is_trained
from moewright.rules.delayed_scaling import FIRST_WEIGHTS
from moewright.rules.job import Job
from moewright.rules.low_precision import OperandFormat, find_recipe, kept_bytes
from moewright.rules.packed_base import is_packed
from moewright.rules.shapes.fsdp import is_fsdp_sharded
from moewright.rules.shapes.param import Param, name_in_layer
from moewright.rules.shapes.shards import gradient_group, local_shape, stage_parameters
from moewright.spec.layout import CudaGraphScope
from moewright.spec.ledger import Component, MemoryRow

# Weights that one product makes together with the first of its linear.
_JOINED_WEIGHTS = frozenset({"attention.k", "attention.v", "attention.rates"})
_END_BYTES = 8  # where the rows of an expert end


def keeps_copies(micro_batches: int) -> bool:
    """Return whether a step of so many micro-batches keeps its converted weights."""
    return micro_batches > 1


def copied_weights(job: Job, pp_rank: int) -> Iterator[Param]:
    """Yield the weights of a pipeline stage whose copies a step of several micro-batches keeps."""
    graphs = job.layout.graphs
    has_part_graphs = bool(graphs) and CudaGraphScope.FULL not in graphs
    if find_recipe(job.workload) is None or has_part_graphs:
        return
    names = FIRST_WEIGHTS | _JOINED_WEIGHTS
    for param in stage_parameters(job.model, job.layout, pp_rank):
        is_linear = name_in_layer(param.name) in names and param.name.endswith(".weight")
        if is_linear and _stays_whole(job, param):
            yield param


def _stays_whole(job: Job, param: Param) -> bool:
    """Return whether a rank's part of a weight lies in its memory all step long as it is read."""
    layout = job.layout
    fine_tuning = job.workload.fine_tuning
    if not is_trained(fine_tuning, param.name):
        return not is_packed(param.name, param.module, param.shape, fine_tuning)
    group = gradient_group(param.sharded_dims, layout)
    return layout.zero < 3 or not is_fsdp_sharded(layout, group)


def weight_copy_rows(job: Job, pp_rank: int) -> tuple[MemoryRow, ...]:
    """Return the bytes of the copies on a rank, in a row for each weight; those of replicas too."""
    recipe = find_recipe(job.workload)
    if recipe is None or not keeps_copies(job.micro_batches):
        return ()
    return tuple(
        MemoryRow(
            component=Component.WEIGHTS,
            module=param.module,
            bytes=sum(
                copies_nbytes(recipe.weights, shape)
                for shape in _matrix_shapes(job, param, pp_rank)
            ),
        )
        for param in copied_weights(job, pp_rank)
    )


def _matrix_shapes(job: Job, param: Param, pp_rank: int) -> Iterator[tuple[int, ...]]:
    """Yield the shape [N,K] or [E,N,K] of a rank's part of a weight, and that of its replicas."""
    shape = local_shape(param, job.layout)
    if not param.is_expert:
        yield prod(shape[:-1]), shape[-1]
        return
    matrix = prod(shape[1:-1]), shape[-1]
    yield shape[0], *matrix
    replicas = expert_placement.count_slots(job, param.layer) // job.layout.ep - shape[0]
    if replicas:
        yield replicas, *matrix


def copies_nbytes(operand: OperandFormat, shape: tuple[int, ...]) -> int:
    """Return the bytes of both copies of a weight [N,K], or of experts [E,N,K]."""
    rows, columns = shape[-2:]
    return _copy_nbytes(operand, shape[:-2], rows, columns) + _copy_nbytes(
        operand, shape[:-2], columns, rows
    )


def _copy_nbytes(operand: OperandFormat, experts: tuple[int, ...], rows: int, columns: int) -> int:
    """Return the bytes of a copy along its columns; a tile holds no rows of two experts."""
    if not experts:
        return int(kept_bytes(operand, rows, columns, 1))
    if operand.is_tiled:
        rows += -rows % operand.block
    (count,) = experts
    return int(kept_bytes(operand, count * rows, columns, count)) + _END_BYTES * count
