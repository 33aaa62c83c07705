"""What optimizers ask of tensors: formats of moments, and the matrices that Muon updates.

Optimizer moments: the bytes of their number formats, and how 8-bit ones are laid out. In fp8 a
moment is OCP Microscaling numbers (E4M3, a power of two in 8 bits for 32 elements): 33/32 bytes an
element. Transformer Engine's own optimizer has one fp32 scale for what a rank owns of a parameter;
a scale of a block is the same in every layout whose shards begin with blocks.

Which matrices Muon updates, and which rank makes each of their updates orthogonal. Muon (Jordan et
al. 2024) updates the matrices of layers by their orthogonal momentum; embeddings, head, norms and
biases are AdamW's. Every expert is a matrix of its own, and the gate and up projections of an MLP
are one. The ranks that shard the optimizer's states keep the momentum of their own elements; for an
update they send it to the rank that a matrix is dealt to, which sends the orthogonal matrix back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import prod, sqrt
from types import MappingProxyType
from typing import Any

from moewright.rules.shapes.param import ShardedDims, has_weight_decay
from moewright.spec.ledger import Module
from moewright.spec.workload import Dtype, MuonCoefficients, MuonScale, OptimizerSpec

MOMENT_BLOCK = 32  # elements with one scale (OCP Microscaling Formats 1.0)
MOMENT_DTYPES = (Dtype.FP32, Dtype.BF16, Dtype.FP8)
GRADIENT_DTYPES = (Dtype.FP32, Dtype.BF16)  # in which gradients are summed
# Shards are of whole blocks, and of the 64 elements with which parameters begin in a bucket.
_SHARD_ELEMENTS = 64
_STORED_NBYTES = 2  # checkpoints hold 8-bit moments in bf16


def is_scaled(dtype: Dtype) -> bool:
    """Tell whether moments of a dtype have scales."""
    return dtype is Dtype.FP8


def moment_nbytes(optimizer: OptimizerSpec) -> int:
    """Return the bytes of an element of both moments, without scales."""
    return sum(dtype.nbytes for dtype in optimizer.moment_dtypes)


def scale_nbytes(optimizer: OptimizerSpec, numel: Any) -> Any:
    """Return the bytes of the scales of `numel` consecutive elements; it may be an array."""
    scaled = sum(is_scaled(dtype) for dtype in optimizer.moment_dtypes)
    return scaled * -(-numel // MOMENT_BLOCK)


def stored_nbytes(optimizer: OptimizerSpec) -> int:
    """Return the bytes of an element of both moments in a checkpoint."""
    return sum(stored_widths(optimizer))


def stored_widths(optimizer: OptimizerSpec) -> tuple[int, ...]:
    """Return the bytes of an element of each moment in a checkpoint."""
    return tuple(
        _STORED_NBYTES if is_scaled(dtype) else dtype.nbytes for dtype in optimizer.moment_dtypes
    )


def shard_multiple(optimizer: OptimizerSpec) -> int:
    """Return what the elements of a rank's shard of a bucket are a multiple of."""
    if any(map(is_scaled, optimizer.moment_dtypes)):
        return _SHARD_ELEMENTS
    return 1


# Coefficients (a, b, c) of X <- a X + b (X X') X + c (X X')^2 X, a triple for each step, in turn:
# those of Megatron-LM's emerging optimizers by the same names; "simple" is Jordan's.
COEFFICIENTS: Mapping[MuonCoefficients, tuple[tuple[float, float, float], ...]] = MappingProxyType(
    {
        MuonCoefficients.SIMPLE: ((3.4445, -4.7750, 2.0315),),
        MuonCoefficients.QUINTIC: (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
    }
)
_TABLES = (Module.EMBEDDING, Module.HEAD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """A matrix [rows, columns] of a parameter, before tensor parallelism shards it.

    On a rank it is the elements [first, first + numel) of the flat local parameter.
    """

    name: str
    first: int
    numel: int
    rows: int
    columns: int

    @property
    def step_flops(self) -> int:
        """FLOPs of a Newton-Schulz step on the whole matrix, along its shorter side.

        They are those of X X', of its square, and of their product with X.
        """
        short, long = sorted((self.rows, self.columns))
        return 4 * short * short * long + 2 * short**3


def is_muon_matrix(name: str, dims: int, module: Module) -> bool:
    """Return whether Muon updates a parameter of so many dims."""
    return has_weight_decay(name, dims) and module not in _TABLES


def list_matrices(
    name: str, shape: Sequence[int], local_shape: Sequence[int], cuts: ShardedDims
) -> list[Matrix]:
    """Return the matrices that a rank holds of a parameter: one, or one of each expert."""
    # The first dim of an expert weight counts experts, each a matrix of its own.
    stacked = int(any(axis == "ep" for axis, _ in cuts))
    count = prod(local_shape[:stacked])
    numel = prod(local_shape[stacked:])
    rows = prod(shape[stacked:-1])
    return [
        Matrix(name=name, first=index * numel, numel=numel, rows=rows, columns=shape[-1])
        for index in range(count)
    ]


def deal_matrices(matrices: Sequence[Matrix], ranks: int) -> tuple[int, ...]:
    """Return the rank that makes each matrix orthogonal: the least busy one, largest first."""
    owners = [0] * len(matrices)
    busy = [(0, rank) for rank in range(ranks)]
    heapify(busy)
    # sorted keeps equal ones in order and the heap breaks ties by rank: all ranks deal alike.
    for index in sorted(range(len(matrices)), key=lambda i: -matrices[i].step_flops):
        flops, rank = busy[0]
        owners[index] = rank
        heapreplace(busy, (flops + matrices[index].step_flops, rank))
    return tuple(owners)


def scale_update(mode: MuonScale, extra_factor: float, rows: int, columns: int) -> float:
    """Return the factor of an orthogonal matrix that makes it an update of weights [rows, columns].

    The modes are those of Megatron-LM: max(1, rows / columns)^0.5 (Jordan), max(rows, columns)^0.5
    (arXiv 2502.16982) and (rows / columns)^0.5 (Bernstein).
    """
    squares = {
        MuonScale.SHAPE_SCALING: max(1.0, rows / columns),
        MuonScale.SPECTRAL: float(max(rows, columns)),
        MuonScale.UNIT_RMS_NORM: rows / columns,
    }
    return extra_factor * sqrt(squares[mode])
