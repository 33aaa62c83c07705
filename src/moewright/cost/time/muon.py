"""The exchanges and products of a Muon update (rules.muon, engine.optim.muon)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from moewright.cost.memory.model_states import (
    MOMENTUM_BYTES,
    BucketSet,
    is_updated_by_muon,
    own_elements,
)
from moewright.cost.symbols import Symbols
from moewright.cost.time.op_time import OpRow
from moewright.cost.volumes.collective_calls import CallSum
from moewright.rules import grid
from moewright.rules.adapters import is_trained
from moewright.rules.job import Job
from moewright.rules.optimizers import deal_matrices, list_matrices
from moewright.rules.shapes import fsdp, shards
from moewright.rules.shapes.parameters import parameters
from moewright.spec.hardware import Collective, Op
from moewright.spec.model import ModelSpec
from moewright.spec.plan import TimePart
from moewright.spec.workload import MatrixUpdate, Workload

_STEP_PRODUCTS = 3  # X X', its square, and the product with X


def muon_calls(
    job: Job, rank: int, sets: Sequence[BucketSet], units: Sequence[fsdp.FsdpUnit]
) -> Iterator[CallSum]:
    """Yield the exchanges of momentum, and the gathers of matrices that TP shards.

    For each group of gradients a rank sends what it owns of the momentum and gets whole matrices,
    and the way back; both exchanges take place where the group has any matrix.
    """
    if job.workload.optimizer.matrix_update is not MatrixUpdate.MUON:
        return
    layout, model = job.layout, job.model
    pp_rank = grid.coordinate(layout, rank, "pp")
    for group in shards.GRADIENT_GROUPS:
        params = [
            param
            for param in shards.stage_parameters(model, layout, pp_rank)
            if is_updated_by_muon(job.workload, param)
            and is_trained(job.workload.fine_tuning, param.name)
            and shards.gradient_group(param.sharded_dims, layout) == group
        ]
        if not params:
            continue
        momentum_group = fsdp.momentum_group(layout, group)
        ranks, index = 1, 0
        if momentum_group is not None:
            ranks = grid.group_size(layout, momentum_group)
            index = grid.group_ranks(layout, momentum_group, rank).index(rank)
        matrices = [
            matrix
            for param in params
            for matrix in list_matrices(
                param.name, param.shape, shards.local_shape(param, layout), param.sharded_dims
            )
        ]
        owners = deal_matrices(matrices, ranks)
        dealt = [matrix for matrix, owner in zip(matrices, owners, strict=True) if owner == index]
        if momentum_group is not None and ranks > 1:
            names = {param.name for param in params}
            elements = _own_numel(names, sets, units) + sum(matrix.numel for matrix in dealt)
            yield Collective.ALL_TO_ALL, momentum_group, MOMENTUM_BYTES * elements, 2
        axis_of = {
            param.name: axis for param in params for axis, _ in param.sharded_dims if axis != "ep"
        }
        for axis in sorted(set(axis_of.values())):
            numel = sum(matrix.numel for matrix in dealt if axis_of.get(matrix.name) == axis)
            # All matrices of an axis go in one call.
            yield Collective.ALL_GATHER, axis, MOMENTUM_BYTES * numel, int(numel > 0)


def _own_numel(names: set[str], sets: Sequence[BucketSet], units: Sequence[fsdp.FsdpUnit]) -> int:
    """Return how many elements of parameters a rank owns, in flat buffers and in sharded units."""
    flat = sum(
        numel for bucket_set in sets for name, numel in own_elements(bucket_set) if name in names
    )
    sharded = sum(
        shard.elements.own for unit in units for shard in unit.shards if shard.param.name in names
    )
    return flat + sharded


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonWork:
    """FLOPs of a Muon update for each dense and each expert parameter, and of a mean product."""

    dense_flops: float
    expert_flops: float
    product_flops: float


@lru_cache(maxsize=4)  # a search asks for every rank of one model
def muon_work(model: ModelSpec, workload: Workload) -> MuonWork:
    """Return the work of an update, averaged over all parameters of the model."""
    numel = {False: 0, True: 0}
    flops = {False: 0, True: 0}
    products = 0
    for param in parameters(model):
        numel[param.is_expert] += param.numel
        if is_updated_by_muon(workload, param):
            matrices = list_matrices(param.name, param.shape, param.shape, param.sharded_dims)
            flops[param.is_expert] += sum(matrix.step_flops for matrix in matrices)
            products += _STEP_PRODUCTS * len(matrices)
    steps = workload.muon.muon_num_ns_steps
    return MuonWork(
        dense_flops=steps * flops[False] / max(1, numel[False]),
        expert_flops=steps * flops[True] / max(1, numel[True]),
        product_flops=sum(flops.values()) / max(1, products),
    )


def muon_ops(sym: Symbols, *, owned_dense: float, owned_expert: float) -> tuple[OpRow, ...]:
    """Return the row of the products of an update of so many parameters; () without Muon.

    All TP ranks make the whole of a matrix that they share orthogonal.
    """
    if sym.workload.optimizer.matrix_update is not MatrixUpdate.MUON:
        return ()
    work = muon_work(sym.model, sym.workload)
    layout = sym.layout
    flops = layout.tp * owned_dense * work.dense_flops
    flops += layout.etp * owned_expert * work.expert_flops
    return (
        OpRow(
            name="muon",
            part=TimePart.OPTIMIZER,
            op=Op.GEMM,
            amount=flops,
            x=work.product_flops,
            dtype=sym.wide_dtype,
        ),
    )
