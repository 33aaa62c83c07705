"""FLOPs of the operations that torch dispatches, from the shapes of their arguments.

The numbers of arguments are those of torch's native_functions.yaml; `causal` is its `is_causal`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moewright.engine.kernels.exact_attention import attention_flops
from moewright.engine.kernels.matmul import grouped_flops
from moewright.engine.kernels.operations import find_work
from moewright.engine.observe.module_scopes import OperationArgs, OperationKwargs
from moewright.engine.torch_private import ONEDNN_LINEAR
from moewright.spec.ledger import FlopOp

_aten = torch.ops.aten

_FlopRule = Callable[[OperationArgs, OperationKwargs], int]


def _mm_flops(args: OperationArgs, kwargs: OperationKwargs) -> int:
    a, b = args[0], args[1]
    return 2 * int(a.shape[0]) * int(a.shape[1]) * int(b.shape[1])


def _scaled_mm_flops(args: OperationArgs, kwargs: OperationKwargs) -> int:
    return _numbers_of_element(args) * _mm_flops(args, kwargs)


def _numbers_of_element(args: OperationArgs) -> int:
    return 2 if args[0].dtype is torch.float4_e2m1fn_x2 else 1


def _linear_flops(args: OperationArgs, kwargs: OperationKwargs) -> int:
    x, weight = args[0], args[1]
    return 2 * int(x.shape[0]) * int(x.shape[1]) * int(weight.shape[0])


def _grouped_mm_flops(args: OperationArgs, kwargs: OperationKwargs) -> int:
    return grouped_flops(args[0], args[1])


def _scaled_grouped_mm_flops(args: OperationArgs, kwargs: OperationKwargs) -> int:
    return _numbers_of_element(args) * _grouped_mm_flops(args, kwargs)


def _bmm_flops(args: OperationArgs, kwargs: OperationKwargs) -> int:
    a, b = args[0], args[1]
    return 2 * int(a.shape[0]) * int(a.shape[1]) * int(a.shape[2]) * int(b.shape[2])


def _attention_flops(args: OperationArgs, kwargs: OperationKwargs, *, causal: bool) -> int:
    return attention_flops(args[0], args[2], causal, kwargs.get("attn_mask"))


def _attention_forward(args: OperationArgs, kwargs: OperationKwargs) -> int:
    # torch leaves out an argument that has its default value.
    return _attention_flops(args, kwargs, causal=len(args) > 4 and args[4])


def _attention_backward_on_cpu(args: OperationArgs, kwargs: OperationKwargs) -> int:
    """Count twice the forward: model FLOPs by convention leave out the recomputed scores."""
    return 2 * _attention_flops(args[1:], kwargs, causal=args[7])


def _attention_backward(args: OperationArgs, kwargs: OperationKwargs) -> int:
    return 2 * _attention_flops(args[1:], kwargs, causal=args[11])


def _varlen_attention_flops(
    q: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, kwargs: OperationKwargs, *, causal: bool
) -> int:
    """Count the attention of each segment of queries to its segment of keys.

    All pairs of a segment count, or the causal half of them, or a window's part of either.
    Shapes: q [T,heads,Dq], v [K,kv_heads,Dv], cu_seqlens [segments + 1].
    """
    q_dim = getattr(q, "true_width", q.shape[2])
    v_dim = getattr(v, "true_width", v.shape[2])
    queries = cu_seqlens_q.diff().long()
    keys = cu_seqlens_k.diff().long()
    twice_pairs = (1 if causal else 2) * queries * keys
    window_left = kwargs.get("window_size_left")
    if window_left is not None:
        # So many keys are too far from the last query, and one fewer from each query before it.
        far_keys = (keys - window_left - 1).clamp(min=0)
        cut_queries = torch.minimum(far_keys, queries)
        twice_pairs = twice_pairs - 2 * cut_queries * far_keys + cut_queries * (cut_queries - 1)
    return int(twice_pairs.sum()) * int(q.shape[1]) * (int(q_dim) + int(v_dim))


def _varlen_attention_forward(args: OperationArgs, kwargs: OperationKwargs) -> int:
    q, _, v, cu_seqlens_q, cu_seqlens_k = args[:5]
    return _varlen_attention_flops(q, v, cu_seqlens_q, cu_seqlens_k, kwargs, causal=args[8])


def _varlen_attention_backward(args: OperationArgs, kwargs: OperationKwargs) -> int:
    _, q, _, v, _, _, cu_seqlens_q, cu_seqlens_k = args[:8]
    return 2 * _varlen_attention_flops(q, v, cu_seqlens_q, cu_seqlens_k, kwargs, causal=args[11])


_FLOP_RULES: tuple[tuple[str, FlopOp, _FlopRule], ...] = (
    ("mm", FlopOp.GEMM, _mm_flops),
    ("_scaled_mm_v2", FlopOp.GEMM, _scaled_mm_flops),
    ("bmm", FlopOp.GEMM, _bmm_flops),
    ("_grouped_mm", FlopOp.GROUPED_GEMM, _grouped_mm_flops),
    ("_scaled_grouped_mm_v2", FlopOp.GROUPED_GEMM, _scaled_grouped_mm_flops),
    ("_scaled_dot_product_flash_attention_for_cpu", FlopOp.ATTENTION, _attention_forward),
    (
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        FlopOp.ATTENTION,
        _attention_backward_on_cpu,
    ),
    ("_scaled_dot_product_flash_attention", FlopOp.ATTENTION, _attention_forward),
    ("_scaled_dot_product_flash_attention_backward", FlopOp.ATTENTION, _attention_backward),
    ("_flash_attention_forward", FlopOp.ATTENTION, _varlen_attention_forward),
    ("_flash_attention_backward", FlopOp.ATTENTION, _varlen_attention_backward),
)


class FlopCounter:
    """A counter that reports the FLOPs of registered operations, and by rules those of torch."""

    def __init__(self, report: Callable[[FlopOp, int], None]) -> None:
        self._report = report
        self._rules: dict[Any, tuple[FlopOp, _FlopRule]] = {
            getattr(_aten, name): (op, rule)
            for name, op, rule in _FLOP_RULES
            # An older torch lacks some of them.
            if hasattr(_aten, name)
        }
        # None where torch has no oneDNN: no operation is that.
        self._rules[ONEDNN_LINEAR] = (FlopOp.GEMM, _linear_flops)

    def count(self, func: Any, args: OperationArgs, kwargs: OperationKwargs) -> None:
        """Report the FLOPs of an operation that torch dispatches with these arguments."""
        counted = self._rules.get(func.overloadpacket)
        if counted is not None:
            op, rule = counted
            self._report(op, rule(args, kwargs))
        elif work := find_work(func.overloadpacket):
            self._report(work.op, work.count(*args, **kwargs))
