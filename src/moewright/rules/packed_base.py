"""Frozen weights in fewer bits under adapters: NF4 (QLoRA, Dettmers et al. 2023), or FP8 blocks.

What is packed are the linears of attention and of MLPs, experts among them. Embeddings, head,
norms, routers and what is too narrow to be worth it stay in the precision.
"""

from __future__ import annotations

from math import ceil, prod

from moewright.rules.adapters import is_linear
from moewright.rules.shapes.param import Param, ShardedDims
from moewright.rules.shapes.parameters import parameters_by_layer
from moewright.rules.shapes.shards import local_shape
from moewright.spec.layout import Layout
from moewright.spec.ledger import Module
from moewright.spec.model import ModelSpec
from moewright.spec.workload import BaseQuantization, FineTuningSpec, Task, Workload

NF4_BLOCK = 64  # numbers that share a scale
NF4_GROUP = 256  # scales that share a scale
# Numbers that are widened at a time, a multiple of a block; 4 bytes of codes, of levels and of
# scales lie beside each then.
CHUNK_NUMEL = 1 << 24
CHUNK_BYTES = 12
FP8_BLOCK = 128  # rows, and columns, that share a scale
_SCALE_BYTES = 4
_PACKED_MODULES = frozenset(
    {Module.ATTENTION, Module.DENSE_MLP, Module.EXPERTS, Module.SHARED_EXPERTS}
)
_MIN_SIDE = 16  # of a linear; convolutions and gates of one column are narrower


def is_packed(
    name: str, module: Module, shape: tuple[int, ...], fine_tuning: FineTuningSpec
) -> bool:
    """Return whether a weight of a module is held in fewer bits, by its global shape."""
    if fine_tuning.quantize_base is BaseQuantization.NONE or fine_tuning.task is not Task.LORA:
        return False
    # An even number of codes: two of 4 bits share a byte.
    is_wide = len(shape) > 1 and min(shape[-2:]) >= _MIN_SIDE and not prod(shape[-2:]) % 2
    return module in _PACKED_MODULES and is_linear(name) and is_wide


def packed_nbytes(
    shape: tuple[int, ...], local_shape: tuple[int, ...], form: BaseQuantization
) -> int:
    """Return the bytes of a rank's part of a packed weight of a global shape.

    In NF4 they are half a byte a number, a byte a block, and in fp32 a scale for each group of the
    whole matrices and their mean; in FP8 a byte a number, and in fp32 a scale for each block.
    """
    *lead, rows, columns = local_shape
    matrices = prod(lead)
    if form is BaseQuantization.FP8:
        blocks = ceil(rows / FP8_BLOCK) * ceil(columns / FP8_BLOCK)
        return matrices * (rows * columns + _SCALE_BYTES * blocks)
    blocks = -(-rows * columns // NF4_BLOCK)
    # Of the whole matrix, by its global shape: each rank keeps all scales of groups, however cut.
    groups = ceil(ceil(prod(shape[-2:]) / NF4_BLOCK) / NF4_GROUP)
    return matrices * (rows * columns // 2 + blocks + _SCALE_BYTES * (groups + 1))


def holds_packed(workload: Workload) -> bool:
    """Return whether the linears of a job's base are held in fewer bits."""
    fine_tuning = workload.fine_tuning
    is_lora = fine_tuning.task is Task.LORA
    return is_lora and fine_tuning.quantize_base is not BaseQuantization.NONE


def packed_elements(
    model: ModelSpec, workload: Workload, layout: Layout, layer: int
) -> tuple[tuple[Module, int], ...]:
    """Return the module of every packed weight of a layer, and the elements of a rank's part."""
    if not holds_packed(workload):
        return ()
    return tuple(
        (param.module, prod(local_shape(param, layout)))
        for param in parameters_by_layer(model).get(layer, ())
        if is_packed(param.name, param.module, param.shape, workload.fine_tuning)
    )


def packed_bytes_per_element(workload: Workload) -> float:
    """Return the bytes that a number of a large packed weight takes."""
    if workload.fine_tuning.quantize_base is BaseQuantization.FP8:
        return 1 + _SCALE_BYTES / FP8_BLOCK**2
    return 0.5 + 1 / NF4_BLOCK + _SCALE_BYTES / (NF4_BLOCK * NF4_GROUP)


def cuts_blocks(param: Param, layout: Layout, form: BaseQuantization) -> bool:
    """Return whether a layout cuts a packed weight inside of its blocks."""
    cut = _cut_dims(param.sharded_dims, layout)
    last = len(param.shape) - 1
    rows, columns = local_shape(param, layout)[-2:]
    if form is BaseQuantization.FP8:
        is_inside = 0
        if last - 1 in cut:
            is_inside = rows % FP8_BLOCK
        return bool(is_inside or (columns % FP8_BLOCK if last in cut else 0))
    if last in cut:
        return bool(columns % NF4_BLOCK)
    if last - 1 in cut:
        is_cut = bool(rows * columns % NF4_BLOCK)
        # Blocks run over the flat matrix: if it is no whole number of them, a cut of its rows
        # begins blocks elsewhere than the whole matrix does.
        return is_cut or bool(prod(param.shape[-2:]) % NF4_BLOCK)
    return False


def _cut_dims(sharded_dims: ShardedDims, layout: Layout) -> set[int]:
    degrees = {"tp": layout.tp, "ep": layout.ep, "etp": layout.etp}
    return {dim for axis, dim in sharded_dims if degrees.get(axis, 1) > 1}
