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

_WORTH_A_KERNEL = 1 << 22  # multiplications
# x @ w.T; what torch.compile calls on a CPU. None where torch was built without oneDNN.
ONEDNN_LINEAR: Any = (
    torch.ops.mkldnn._linear_pointwise if torch.backends.mkldnn.is_available() else None
)


@cache
def has_native_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AVX512_BF16 or AMX)."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))


def widen(tensor: torch.Tensor) -> torch.Tensor:
    narrow = tensor.dtype in (torch.bfloat16, torch.float16)
    if (
        tensor.device.type == "cpu"
        and narrow
        and not (tensor.dtype == torch.bfloat16 and has_native_bf16())
    ):
        return tensor.float()
    return tensor


def matmul(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """a @ b in the dtype of a, accumulated in fp32."""
    return _product(widen(a_MK), widen(b_KN)).to(a_MK.dtype)


def accumulate_matmul(sum_MN: torch.Tensor, a_MK: torch.Tensor, b_KN: torch.Tensor) -> None:
    """sum += a @ b, the sum in fp32; the product is rounded before where the device multiplies the
    operands' dtype."""
    sum_MN.add_(_product(widen(a_MK), widen(b_KN)))


@cache
def _mkl_is_fast() -> bool:
    """Whether torch.mm runs fp32 at this CPU's rate: MKL, which it takes for that, does on Intel's
    alone."""
    cpuinfo = Path("/proc/cpuinfo")
    return (
        torch.backends.mkl.is_available()
        and cpuinfo.is_file()
        and "GenuineIntel" in cpuinfo.read_text()
    )


def _by_onednn(dtype: torch.dtype) -> bool:
    """Of what is on a CPU."""
    return dtype == torch.float32 and ONEDNN_LINEAR is not None and not _mkl_is_fast()


def _product(
    a_MK: torch.Tensor, b_KN: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """a @ b, into `out` where it is given; fp32 is fp32 throughout with either library.

    A product must be worth the kernel that oneDNN makes for each new shape.
    """
    worth = a_MK.device.type == "cpu" and a_MK.numel() * b_KN.shape[1] >= _WORTH_A_KERNEL
    if not worth or not _by_onednn(a_MK.dtype):
        return torch.mm(a_MK, b_KN, out=out)
    made = ONEDNN_LINEAR(a_MK, b_KN.mT, None, "none", [], "")
    return made if out is None else out.copy_(made)


def grouped_matmul(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Products of consecutive row groups; `ends` [E] int32 are the running ends of the groups.

    a [R,K], b [E,K,N] -> [R,N]: group e of the rows times b[e].
    a [M,R], b [R,N] -> [E,M,N]: the contraction over each group (a weight gradient).
    Groups may be empty; ends[-1] must equal R, since rows past it would be left unwritten.
    """
    if a.shape[0 if b.dim() == 3 else 1] == 0:
        return a.new_zeros(_grouped_shape(a, b, ends))
    if a.device.type == "cpu":
        return CPU_GROUPED_MATMUL(widen(a), widen(b), ends).to(a.dtype)
    return F.grouped_mm(a, b, offs=ends)


def _grouped_shape(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> tuple[int, ...]:
    return (a.shape[0], b.shape[2]) if b.dim() == 3 else (ends.shape[0], a.shape[0], b.shape[1])


def _group_by_group(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """`grouped_matmul` on a CPU, where oneDNN makes a product's kernel for its exact shape when
    that is first seen.

    Making one takes longer than the product of a few hundred rows, and keeps up to a MiB; routing
    brings new shapes in every step. So a group's rows are filled up to one of a few counts: with
    rows of other groups, whose results are left, and in a contraction with zeros. MKL, which is
    taken for fp32 on Intel's CPUs, has its kernels for any shape.
    """
    out = a.new_empty(_grouped_shape(a, b, ends))
    shaped = a.dtype != torch.float32 or _by_onednn(a.dtype)
    stops = ends.tolist()
    groups = [
        (start, stop, _filled(stop - start) if shaped else stop - start)
        for start, stop in zip([0, *stops[:-1]], stops, strict=True)
    ]
    if b.dim() == 3:
        for of_group, (start, stop, filled) in zip(b, groups, strict=True):
            _rows_times(a, of_group, out, start, stop, filled)
    elif shaped:
        widest = max(filled for _, _, filled in groups)
        rows_a, rows_b = a.new_empty(widest, a.shape[0]), b.new_empty(widest, b.shape[1])
        for of_group, (start, stop, filled) in zip(out, groups, strict=True):
            for rows, x in ((rows_a, a.mT), (rows_b, b)):
                rows[: stop - start] = x[start:stop]
                rows[stop - start : filled] = 0
            _product(rows_a[:filled].mT, rows_b[:filled], of_group)
    else:
        for of_group, (start, stop, _) in zip(out, groups, strict=True):
            _product(a[:, start:stop], b[start:stop], of_group)
    return out


# An operation of its own, so that whoever counts products sees the rows that are, not those that
# fill up a shape.
# Not torch.library.custom_op, whose first call takes two seconds to import a compiler.
_LIBRARY = torch.library.Library("moewright", "DEF")
_LIBRARY.define("group_by_group(Tensor a, Tensor b, Tensor ends) -> Tensor")
_LIBRARY.impl("group_by_group", _group_by_group, "CPU")
_LIBRARY.impl("group_by_group", lambda a, b, ends: a.new_empty(_grouped_shape(a, b, ends)), "Meta")
CPU_GROUPED_MATMUL = torch.ops.moewright.group_by_group


def _rows_times(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, start: int, stop: int, filled: int
) -> None:
    """out[start:stop] = a[start:stop] @ b. Rows of later groups are written too, before their own
    results are."""
    if start == stop:
        return
    if start + filled <= len(a):
        _product(a[start : start + filled], b, out[start : start + filled])
    elif filled <= stop:  # no rows behind: take some before
        out[start:stop] = _product(a[stop - filled : stop], b)[start - stop :]
    else:
        _product(a[start:stop], b, out[start:stop])


def _filled(rows: int) -> int:
    """The next of 16, 32, ... 256 and, from there on, of eight counts between each power of two and
    the next."""
    step = max(16, 1 << max(0, rows.bit_length() - 4))
    return -(-rows // step) * step
