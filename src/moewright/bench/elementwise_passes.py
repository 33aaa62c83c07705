"""The memory-bound passes of a layer, by the engine's own functions, in the bytes that the planner
counts for them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moewright.cost import elementwise
from moewright.cost.op_time import OpRow
from moewright.cost.symbols import Symbols, build_symbols
from moewright.engine.kernels.fused.select import build_kernels
from moewright.engine.model.activations import SwiGlu
from moewright.engine.model.autograd import Permute, RmsNorm, Rotary, Unpermute
from moewright.engine.runtime import torch_dtype
from moewright.spec.hardware import DeviceKind
from moewright.spec.layout import Layout
from moewright.spec.model import AttentionKind, AttentionSpec, ModelSpec
from moewright.spec.workload import Dtype, FusedKernels, Workload

HEAD_DIM, TOP_K, EPS = 32, 4, 1e-6


def count_pass_bytes(
    kind: DeviceKind, dtype: Dtype, tokens: int, width: int
) -> tuple[float, float]:
    """Bytes that the planner counts for `passes`, and their mean over its passes."""
    rows = _rows(_sizes(kind, dtype, tokens, width), tokens * width)
    moved_bytes = sum(row.amount for row in rows)
    return moved_bytes, moved_bytes / sum(row.amount / row.x for row in rows)


def _rows(size: Symbols, elements: int) -> list[OpRow]:
    """Of each function of `passes`, forward and backward."""
    every = (
        (elementwise.RMS_NORM, 2 * elements),
        (elementwise.RESIDUAL_ADD, 2 * elements),
        (elementwise.ROPE, elements),
        (elementwise.GATED_ACTIVATION, TOP_K * elements),
        (elementwise.PERMUTE, TOP_K * elements),
        (elementwise.UNPERMUTE, TOP_K * elements),
    )
    return [
        row
        for kernel, count in every
        for row in elementwise.kernel_rows(kernel, "passes", size, count)
    ]


def _sizes(kind: DeviceKind, dtype: Dtype, tokens: int, width: int) -> Symbols:
    heads = max(1, width // HEAD_DIM)
    spec = AttentionSpec(
        kind=AttentionKind.GQA, heads=heads, kv_heads=heads, head_dim=HEAD_DIM, v_head_dim=HEAD_DIM
    )
    model = ModelSpec(
        name="passes",
        family="",
        hidden_size=width,
        layers=1,
        vocab_size=1,
        attention=spec,
        dense_ffn_size=width,
        moe=None,
        moe_layers=(False,),
    )
    work = Workload(seq_len=tokens, global_batch=1, precision=dtype)
    return build_symbols(
        model, work, Layout(world_size=1), device_kind=kind, load=1.0, router_efficiency=1.0
    )


def build_passes(dtype: Dtype, tokens: int, width: int, device: torch.device) -> Callable[[], None]:
    """Two norms, two residuals, rotation, permute, unpermute and SwiGLU of experts as wide as the
    hidden state, forward and backward: of a layer all that is neither a product nor attention, but
    for its router.
    """
    kind, torch_type = torch_dtype(dtype), DeviceKind(device.type)
    kernels = build_kernels(FusedKernels.AUTO, torch_type)
    routed = TOP_K * tokens

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(kind).requires_grad_()

    x, wide, weight = drawn(tokens, width), drawn(routed, 2 * width), drawn(width)
    shares = torch.rand(routed, device=device, requires_grad=True)
    cos, sin = torch.rand(2, tokens, HEAD_DIM // 2, device=device)
    order = torch.randperm(routed, device=device)
    slots = torch.empty_like(order)
    slots[order] = torch.arange(routed, device=device)
    of_row, of_slot = order // TOP_K, slots.view(tokens, TOP_K)
    grads = (
        torch.randn(tokens, width, device=device).to(kind),
        torch.randn(routed, width, device=device).to(kind),
    )
    leaves = x, wide, weight, shares

    def call() -> None:
        normed = RmsNorm.apply(x, weight, EPS, None, None, False, kernels)
        turned = Rotary.apply(normed.view(1, tokens, -1, HEAD_DIM), cos, sin, kernels)
        first = x + turned.view_as(x)
        normed = RmsNorm.apply(first, weight, EPS, None, None, False, kernels)
        rows = Permute.apply(normed, of_row, of_slot, True, kernels)
        out = first + Unpermute.apply(rows, of_row, of_slot, True, kernels)
        active = SwiGlu.apply(wide, shares, kernels)
        torch.autograd.backward((out, active), grads)
        for leaf in leaves:
            leaf.grad = None

    return call
