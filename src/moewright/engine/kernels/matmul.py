"""The matrix kernels: which torch operation computes a product on this device.

A CPU without bf16 dot instructions runs torch's bf16 GEMM several times slower than its fp32 GEMM.
There the operands, bf16 values as everywhere, are widened, multiplied in fp32 and the result
rounded once: the numerics of a bf16 GEMM with fp32 accumulation, at fp32 speed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from moewright.engine.kernels.operations import OperationWork, define_operation
from moewright.engine.torch_private import ONEDNN_LINEAR
from moewright.spec.ledger import FlopOp

# Multiplications from which a product is worth the kernel that oneDNN makes for each new shape.
_MIN_ONEDNN_PRODUCT = 1 << 22


@cache
def has_native_bf16() -> bool:
    """Tell whether this CPU multiplies bf16 in hardware (AVX512_BF16 or AMX)."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in fp32 where this CPU does not multiply its 16-bit dtype in hardware."""
    if tensor.device.type != "cpu" or tensor.dtype not in (torch.bfloat16, torch.float16):
        return tensor
    if tensor.dtype == torch.bfloat16 and has_native_bf16():
        return tensor
    return tensor.float()


def matmul(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """Return a @ b in the dtype of a, accumulated in fp32."""
    return _multiply(widen(a_MK), widen(b_KN)).to(a_MK.dtype)


def accumulate_matmul(sum_MN: torch.Tensor, a_MK: torch.Tensor, b_KN: torch.Tensor) -> None:
    """Add a @ b to the fp32 `sum`.

    Where the device multiplies the operands' dtype, the product is rounded to it before the sum.
    """
    sum_MN.add_(_multiply(widen(a_MK), widen(b_KN)))


@cache
def _mkl_is_fast() -> bool:
    """Tell whether torch.mm, which calls MKL, is fast in fp32: it is on Intel's CPUs alone."""
    cpuinfo = Path("/proc/cpuinfo")
    return (
        torch.backends.mkl.is_available()
        and cpuinfo.is_file()
        and "GenuineIntel" in cpuinfo.read_text()
    )


def _uses_onednn(dtype: torch.dtype) -> bool:
    """Tell whether oneDNN multiplies operands of this dtype on this CPU."""
    return dtype == torch.float32 and ONEDNN_LINEAR is not None and not _mkl_is_fast()


def _multiply(
    a_MK: torch.Tensor, b_KN: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a @ b, in `out` where it is given; fp32 is fp32 throughout with either library."""
    is_large = a_MK.device.type == "cpu" and a_MK.numel() * b_KN.shape[1] >= _MIN_ONEDNN_PRODUCT
    if not is_large or not _uses_onednn(a_MK.dtype):
        return torch.mm(a_MK, b_KN, out=out)
    product = ONEDNN_LINEAR(a_MK, b_KN.mT, None, "none", [], "")
    return product if out is None else out.copy_(product)


def grouped_matmul(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply consecutive row groups; `ends` [E] int32 are their running ends (cumulative sizes).

    a [R,K], b [E,K,N] -> [R,N]: group e of the rows times b[e].
    a [M,R], b [R,N] -> [E,M,N]: the contraction over each group (a weight gradient).
    Groups may be empty; ends[-1] must equal R, since rows past it would be left unwritten.
    """
    # torch's grouped product leaves the result of no rows unwritten.
    if a.shape[0 if b.dim() == 3 else 1] == 0:
        return a.new_zeros(_grouped_shape(a, b, ends))
    if a.device.type == "cpu":
        return CPU_GROUPED_MATMUL(widen(a), widen(b), ends).to(a.dtype)
    product = F.grouped_mm(a, b, offs=ends)
    if b.dim() == 2 and _misses_empty_groups(a.device):
        zero_empty_groups(product, ends)
    return product


@cache
def _misses_empty_groups(device: torch.device) -> bool:
    """Tell whether a contraction over no rows yields what an accumulator held before.

    CUTLASS does so on 10.x (NVIDIA/cutlass#2674, pytorch#172439).
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10


def zero_empty_groups(product_EMN: torch.Tensor, ends: torch.Tensor) -> None:
    """Set the products of groups without rows to zero; the host does not learn which they are."""
    is_empty = ends.diff(prepend=ends.new_zeros(1)) == 0
    product_EMN.masked_fill_(is_empty[:, None, None], 0.0)


def _grouped_shape(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> tuple[int, ...]:
    if b.dim() == 3:
        return a.shape[0], b.shape[2]
    return ends.shape[0], a.shape[0], b.shape[1]


def _grouped_matmul_on_cpu(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply row groups on a CPU, padded to few shapes for oneDNN.

    oneDNN makes a product's kernel for its exact shape when that is first seen. Making one takes
    longer than the product of a few hundred rows, and keeps up to a MiB; routing brings new shapes
    in every step. So a group's rows are padded up to one of a few counts: with rows of other
    groups, whose results are dropped, and in a contraction with zeros. MKL, which is taken for fp32
    on Intel's CPUs, has its kernels for any shape.
    """
    out = a.new_empty(_grouped_shape(a, b, ends))
    pads = a.dtype != torch.float32 or _uses_onednn(a.dtype)
    # The host may read here, for on a CPU nothing is under way.
    stops = ends.tolist()
    groups = [
        (start, stop, _pad_row_count(stop - start) if pads else stop - start)
        for start, stop in zip([0, *stops[:-1]], stops, strict=True)
    ]
    if b.dim() == 3:
        for matrix, (start, stop, padded) in zip(b, groups, strict=True):
            _multiply_rows(a, matrix, out, start, stop, padded)
    elif pads:
        longest = max(padded for _, _, padded in groups)
        rows_a = a.new_empty(longest, a.shape[0])
        rows_b = b.new_empty(longest, b.shape[1])
        for matrix, (start, stop, padded) in zip(out, groups, strict=True):
            for rows, x in ((rows_a, a.mT), (rows_b, b)):
                # Zeros after the rows add nothing to the contraction.
                rows[: stop - start] = x[start:stop]
                rows[stop - start : padded] = 0
            _multiply(rows_a[:padded].mT, rows_b[:padded], matrix)
    else:
        for matrix, (start, stop, _) in zip(out, groups, strict=True):
            _multiply(a[:, start:stop], b[start:stop], matrix)
    return out


def grouped_flops(a: Any, b: Any) -> int:
    """Count a grouped product.

    [R,K] x [E,K,N] multiplies each row once; [M,R] x [R,N] (a weight gradient) contracts over all
    rows once.
    """
    return 2 * int(a.shape[0]) * int(a.shape[1]) * int(b.shape[-1])


# An operation of its own, so that the FLOP counter sees the real rows, not those that pad a shape.
# The operation's name stands in traces, where moewright.diagnosis looks for it.
CPU_GROUPED_MATMUL = define_operation(
    "group_by_group(Tensor a, Tensor b, Tensor ends) -> Tensor",
    _grouped_matmul_on_cpu,
    lambda a, b, ends: a.new_empty(_grouped_shape(a, b, ends)),
    OperationWork(op=FlopOp.GROUPED_GEMM, count=lambda a, b, ends: grouped_flops(a, b)),
    devices=("CPU",),
)


def _multiply_rows(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, start: int, stop: int, padded: int
) -> None:
    """Set out[start:stop] = a[start:stop] @ b by a product of `padded` rows.

    Rows of later groups are written too, before their own results are.
    """
    if start == stop:
        return
    if start + padded <= len(a):
        _multiply(a[start : start + padded], b, out[start : start + padded])
    elif padded <= stop:  # no rows after the group: take some before it
        out[start:stop] = _multiply(a[stop - padded : stop], b)[start - stop :]
    else:
        _multiply(a[start:stop], b, out[start:stop])


def _pad_row_count(rows: int) -> int:
    """Return the row count that a group is padded to.

    It is the next of 16, 32, ... 256 and, from there on, of eight counts between each power of two
    and the next.
    """
    step = max(16, 1 << max(0, rows.bit_length() - 4))
    return -(-rows // step) * step
