"""The matrix kernels: which torch operation computes a product on this device.

A CPU without bf16 dot instructions runs torch's bf16 GEMM several times slower than its fp32 GEMM. There the operands,
bf16 values as everywhere, are widened, multiplied in fp32 and the result rounded once: the numerics of a bf16 GEMM
with fp32 accumulation, at fp32 speed.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

_WORTH_A_KERNEL = 1 << 22  # multiplications
# x @ w.T; what torch.compile calls on a CPU. None where torch was built without oneDNN.
ONEDNN_LINEAR = torch.ops.mkldnn._linear_pointwise if torch.backends.mkldnn.is_available() else None


@cache
def native_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AVX512_BF16 or AMX)."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))


def widened(tensor: torch.Tensor) -> torch.Tensor:
    narrow = tensor.dtype in (torch.bfloat16, torch.float16)
    if tensor.device.type == "cpu" and narrow and not (tensor.dtype == torch.bfloat16 and native_bf16()):
        return tensor.float()
    return tensor


def matmul(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """a @ b in the dtype of a, accumulated in fp32."""
    return _product(widened(a_MK), widened(b_KN)).to(a_MK.dtype)


def _product(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """a @ b. torch.mm takes MKL for fp32 on a CPU, which runs at half of oneDNN's rate where the CPU is not Intel's;
    both are fp32 throughout. A product must be worth the kernel that oneDNN makes for each new shape.
    """
    fp32_on_cpu = a_MK.dtype == torch.float32 and a_MK.device.type == "cpu"
    if ONEDNN_LINEAR is None or not fp32_on_cpu or a_MK.numel() * b_KN.shape[1] < _WORTH_A_KERNEL:
        return torch.mm(a_MK, b_KN)
    return ONEDNN_LINEAR(a_MK, b_KN.mT, None, "none", [], "")


def grouped_matmul(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Products of consecutive row groups; `ends` [E] int32 are the running ends of the groups.

    a [R,K], b [E,K,N] -> [R,N]: group e of the rows times b[e].
    a [M,R], b [R,N] -> [E,M,N]: the contraction over each group (a weight gradient).
    Groups may be empty; ends[-1] must equal R, since rows past it would be left unwritten.
    """
    if a.shape[0 if b.dim() == 3 else 1] == 0:
        return a.new_zeros(_grouped_shape(a, b, ends))
    if a.device.type == "cpu":
        return GROUP_BY_GROUP(widened(a), widened(b), ends).to(a.dtype)
    return F.grouped_mm(a, b, offs=ends)


def _grouped_shape(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> tuple[int, ...]:
    return (a.shape[0], b.shape[2]) if b.dim() == 3 else (ends.shape[0], a.shape[0], b.shape[1])


def _group_by_group(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """`grouped_matmul` on a CPU, where a product's kernel is made for its exact shape when that is first seen.

    Making one takes longer than the product of a few hundred rows, and routing brings new shapes in every step. So
    groups are worked on in multiples of 16 rows: beside rows of other groups, whose results are left, and in a
    contraction beside zeros.
    """
    out = a.new_empty(_grouped_shape(a, b, ends))
    stops = ends.tolist()
    groups = list(zip([0, *stops[:-1]], stops, strict=True))
    if b.dim() == 3:
        for of_group, (start, stop) in zip(b, groups, strict=True):
            _rows_times(a, of_group, out, start, stop)
        return out
    widest = _filled(max(stop - start for start, stop in groups))
    rows_a, rows_b = a.new_empty(widest, a.shape[0]), b.new_empty(widest, b.shape[1])
    for of_group, (start, stop) in zip(out, groups, strict=True):
        count, filled = stop - start, _filled(stop - start)
        for rows, x in ((rows_a, a.mT), (rows_b, b)):
            rows[:count] = x[start:stop]
            rows[count:filled] = 0
        of_group.copy_(_product(rows_a[:filled].mT, rows_b[:filled]))
    return out


# An operation of its own, so that whoever counts products sees the rows that are, not those that fill up a shape.
# Not torch.library.custom_op, whose first call takes two seconds to import a compiler.
_LIBRARY = torch.library.Library("moewright", "DEF")
_LIBRARY.define("group_by_group(Tensor a, Tensor b, Tensor ends) -> Tensor")
_LIBRARY.impl("group_by_group", _group_by_group, "CPU")
_LIBRARY.impl("group_by_group", lambda a, b, ends: a.new_empty(_grouped_shape(a, b, ends)), "Meta")
GROUP_BY_GROUP = torch.ops.moewright.group_by_group


def _rows_times(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, start: int, stop: int) -> None:
    """out[start:stop] = a[start:stop] @ b."""
    filled = _filled(stop - start)
    if start == stop:
        return
    if start + filled <= len(a):
        out[start:stop] = _product(a[start : start + filled], b)[: stop - start]
    elif filled <= stop:  # no rows behind: take some before
        out[start:stop] = _product(a[stop - filled : stop], b)[start - stop :]
    else:
        out[start:stop] = _product(a[start:stop], b)


def _filled(rows: int) -> int:
    return -(-rows // 16) * 16
