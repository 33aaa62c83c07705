"""Optimizer moments: the bytes of their number formats, and how 8-bit ones are laid out.

In fp8 a moment is OCP Microscaling numbers (E4M3, a power of two in 8 bits for 32 elements): 33/32
bytes an element. Transformer Engine's own optimizer has one fp32 scale for what a rank owns of a
parameter; a scale of a block is the same in every layout whose shards begin with blocks.
"""

from __future__ import annotations

from typing import Any

from moewright.spec.workload import Dtype, OptimizerSpec

MOMENT_BLOCK = 32  # elements with one scale (OCP Microscaling Formats 1.0)
MOMENT_DTYPES = (Dtype.FP32, Dtype.BF16, Dtype.FP8)
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
    return sum(
        _STORED_NBYTES if is_scaled(dtype) else dtype.nbytes for dtype in optimizer.moment_dtypes
    )


def shard_multiple(optimizer: OptimizerSpec) -> int:
    """Return what the elements of a rank's shard of a bucket are a multiple of."""
    if any(map(is_scaled, optimizer.moment_dtypes)):
        return _SHARD_ELEMENTS
    return 1
