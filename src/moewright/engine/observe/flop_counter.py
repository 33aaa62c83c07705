"""FLOPs of the operations that torch dispatches, from the shapes of their arguments.

The numbers of arguments are those of torch's native_functions.yaml; `causal` is its `is_causal`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moewright.engine.kernels.causal_conv import (
    CAUSAL_CONV,
    CAUSAL_CONV_BACKWARD,
    conv_flops,
)
from moewright.engine.kernels.compressed_attention import (
    COMPRESSED_ATTENTION,
    COMPRESSED_ATTENTION_BACKWARD,
    compressed_attention_flops,
)
from moewright.engine.kernels.delta_rule import (
    DELTA_RULE,
    DELTA_RULE_BACKWARD,
    SCAN_WORK,
    scan_flops,
)
from moewright.engine.kernels.exact_attention import EXACT_ATTENTION, EXACT_ATTENTION_BACKWARD
from moewright.engine.kernels.matmul import CPU_GROUPED_MATMUL
from moewright.engine.kernels.scaled_groups import SCALED_WEIGHT_GRAD
from moewright.engine.kernels.sparse_attention import (
    CHOOSE_KEYS,
    SCORE_GRADIENTS,
    SPARSE_ATTENTION,
    SPARSE_ATTENTION_BACKWARD,
    choice_flops,
    sparse_attention_flops,
)
from moewright.engine.kernels.state_space import (
    STATE_SPACE,
    STATE_SPACE_BACKWARD,
    state_space_flops,
)
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
    """Count a grouped product.

    [R,K] x [E,K,N] multiplies each row once; [M,R] x [R,N] (a weight gradient) contracts over all
    rows once.
    """
    a, b = args[0], args[1]
    return 2 * int(a.shape[0]) * int(a.shape[1]) * int(b.shape[-1])


def _scaled_grouped_mm_flops(args: OperationArgs, kwargs: OperationKwargs) -> int:
    return _numbers_of_element(args) * _grouped_mm_flops(args, kwargs)


def _scaled_weight_grad_flops(args: OperationArgs, kwargs: OperationKwargs) -> int:
    """Count a contraction over the rows of experts, without those that fill tiles."""
    return 2 * int(args[5]) * len(args[0]) * len(args[1])


def _bmm_flops(args: OperationArgs, kwargs: OperationKwargs) -> int:
    a, b = args[0], args[1]
    return 2 * int(a.shape[0]) * int(a.shape[1]) * int(a.shape[2]) * int(b.shape[2])


def _attention_flops(args: OperationArgs, kwargs: OperationKwargs, *, causal: bool) -> int:
    """Count the scores and values of q [B,heads,S,Dq] over k, v [B,kv_heads,K,Dv].

    All pairs of a query and a key count, or the causal half of them, or those that a mask leaves.
    """
    q, v = args[0], args[2]
    batch, heads, queries, q_dim = q.shape
    q_dim = getattr(q, "true_width", q_dim)
    v_dim = getattr(v, "true_width", v.shape[3])
    twice_pairs = (1 if causal else 2) * int(queries) * int(v.shape[2])
    if kwargs.get("attn_mask") is not None:
        twice_pairs = kwargs["attn_mask"].twice_pairs
    # A pair costs two FLOPs in each dim of its score and of its value.
    return twice_pairs * int(batch) * int(heads) * (int(q_dim) + int(v_dim))


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


def _conv_flops(args: OperationArgs, kwargs: OperationKwargs) -> int:
    return conv_flops(args[0], args[1])


def _conv_backward_flops(args: OperationArgs, kwargs: OperationKwargs) -> int:
    return 2 * _conv_flops(args[1:], kwargs)


def _scan_flops(args: OperationArgs, kwargs: OperationKwargs) -> int:
    return scan_flops(args[0], args[1], args[3])


def _scan_backward_flops(args: OperationArgs, kwargs: OperationKwargs) -> int:
    return 2 * _scan_flops(args[1:], kwargs)


def _state_space_flops(args: OperationArgs, kwargs: OperationKwargs) -> int:
    return state_space_flops(args[0], args[1], args[3])


def _state_space_backward_flops(args: OperationArgs, kwargs: OperationKwargs) -> int:
    return 2 * _state_space_flops(args[1:], kwargs)


def _choice_flops(args: OperationArgs, kwargs: OperationKwargs) -> int:
    return choice_flops(args[0], args[3])


def _score_gradient_flops(args: OperationArgs, kwargs: OperationKwargs) -> int:
    return 2 * choice_flops(args[1], args[5])


def _sparse_flops(args: OperationArgs, kwargs: OperationKwargs) -> int:
    return sparse_attention_flops(args[0], args[3], args[4])


def _sparse_backward_flops(args: OperationArgs, kwargs: OperationKwargs) -> int:
    return 2 * sparse_attention_flops(args[1], args[6], args[7])


def _compressed_flops(args: OperationArgs, kwargs: OperationKwargs) -> int:
    return compressed_attention_flops(args[0], args[2], args[3], *args[6])


def _compressed_backward_flops(args: OperationArgs, kwargs: OperationKwargs) -> int:
    return 2 * compressed_attention_flops(args[1], args[3], args[4], *args[9])


def _stated_flops(args: OperationArgs, kwargs: OperationKwargs) -> int:
    return int(args[1])


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
    """A counter that reports the FLOPs of every operation it has a rule for."""

    def __init__(self, report: Callable[[FlopOp, int], None]) -> None:
        self._report = report
        self._rules: dict[Any, tuple[FlopOp, _FlopRule]] = {
            getattr(_aten, name): (op, rule)
            for name, op, rule in _FLOP_RULES
            # An older torch lacks some of them.
            if hasattr(_aten, name)
        }
        self._rules[CPU_GROUPED_MATMUL] = (FlopOp.GROUPED_GEMM, _grouped_mm_flops)
        self._rules[SCALED_WEIGHT_GRAD] = (FlopOp.GROUPED_GEMM, _scaled_weight_grad_flops)
        self._rules[EXACT_ATTENTION] = (FlopOp.ATTENTION, _attention_forward)
        self._rules[EXACT_ATTENTION_BACKWARD] = (FlopOp.ATTENTION, _attention_backward_on_cpu)
        self._rules[CHOOSE_KEYS] = (FlopOp.GEMM, _choice_flops)
        self._rules[SCORE_GRADIENTS] = (FlopOp.GEMM, _score_gradient_flops)
        self._rules[SPARSE_ATTENTION] = (FlopOp.ATTENTION, _sparse_flops)
        self._rules[SPARSE_ATTENTION_BACKWARD] = (FlopOp.ATTENTION, _sparse_backward_flops)
        self._rules[COMPRESSED_ATTENTION] = (FlopOp.ATTENTION, _compressed_flops)
        self._rules[COMPRESSED_ATTENTION_BACKWARD] = (FlopOp.ATTENTION, _compressed_backward_flops)
        self._rules[CAUSAL_CONV] = (FlopOp.SCAN, _conv_flops)
        self._rules[CAUSAL_CONV_BACKWARD] = (FlopOp.SCAN, _conv_backward_flops)
        self._rules[DELTA_RULE] = (FlopOp.SCAN, _scan_flops)
        self._rules[DELTA_RULE_BACKWARD] = (FlopOp.SCAN, _scan_backward_flops)
        self._rules[STATE_SPACE] = (FlopOp.SCAN, _state_space_flops)
        self._rules[STATE_SPACE_BACKWARD] = (FlopOp.SCAN, _state_space_backward_flops)
        self._rules[SCAN_WORK] = (FlopOp.SCAN, _stated_flops)
        # None where torch has no oneDNN: no operation is that.
        self._rules[ONEDNN_LINEAR] = (FlopOp.GEMM, _linear_flops)

    def count(self, func: Any, args: OperationArgs, kwargs: OperationKwargs) -> None:
        """Report the FLOPs of an operation that torch dispatches with these arguments."""
        counted = self._rules.get(func.overloadpacket)
        if counted is not None:
            op, rule = counted
            self._report(op, rule(args, kwargs))
