"""The memory-bound passes of a layer, by the engine's own functions, and the bytes they move.

Shapes: T tokens, k experts a token, R = T k token rows, D hidden size, F twice D (gate and up).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moewright.cost.symbols import Symbols, build_symbols
from moewright.cost.time import elementwise
from moewright.cost.time.op_time import OpRow
from moewright.engine.dispatch.rows import Permute, Unpermute
from moewright.engine.kernels.fused.table import build_kernels
from moewright.engine.model.activations import SwiGlu
from moewright.engine.model.autograd import NormSettings, RmsNorm, Rotary
from moewright.engine.runtime import torch_dtype
from moewright.rules.expert_load import RankLoad
from moewright.rules.job import Job
from moewright.spec.hardware import DeviceKind
from moewright.spec.layout import Layout
from moewright.spec.model import AttentionKind, AttentionSpec, ModelSpec
from moewright.spec.workload import Dtype, FusedKernels, Workload

HEAD_DIM = 32  # any: the passes are counted in bytes
TOP_K = 4  # rows a token is permuted to; any, as above
EPS = 1e-6  # as most families have it


def count_pass_bytes(
    kind: DeviceKind, dtype: Dtype, tokens: int, width: int
) -> tuple[float, float]:
    """Return the bytes that the planner counts for `build_passes`, and their mean over a pass."""
    rows = _pass_rows(_build_symbols(kind, dtype, tokens, width), tokens * width)
    moved_bytes = sum(row.amount for row in rows)
    passes = sum(row.amount / row.x for row in rows)
    return moved_bytes, moved_bytes / passes


def _pass_rows(symbols: Symbols, elements: int) -> list[OpRow]:
    """Return the rows of each function of `build_passes`, forward and backward."""
    kernels = (
        (elementwise.RMS_NORM, 2 * elements),
        (elementwise.RESIDUAL_ADD, 2 * elements),
        (elementwise.ROPE, elements),
        (elementwise.GATED_ACTIVATION, TOP_K * elements),
        (elementwise.PERMUTE, TOP_K * elements),
        (elementwise.UNPERMUTE, TOP_K * elements),
    )
    return [
        row
        for kernel, count in kernels
        for row in elementwise.kernel_rows(kernel, "passes", symbols, count)
    ]


def _build_symbols(kind: DeviceKind, dtype: Dtype, tokens: int, width: int) -> Symbols:
    heads = max(1, width // HEAD_DIM)
    attention = AttentionSpec(
        kind=AttentionKind.GQA, heads=heads, kv_heads=heads, head_dim=HEAD_DIM, v_head_dim=HEAD_DIM
    )
    model = ModelSpec(
        name="passes",
        family="",
        hidden_size=width,
        layers=1,
        vocab_size=1,
        attention=attention,
        dense_ffn_size=width,
        moe=None,
        moe_layers=(False,),
    )
    workload = Workload(seq_len=tokens, global_batch=1, precision=dtype)
    return build_symbols(
        Job(model=model, workload=workload, layout=Layout(world_size=1)),
        device_kind=kind,
        load=RankLoad(),
        router_efficiency=1.0,
    )


def build_passes(dtype: Dtype, tokens: int, width: int, device: torch.device) -> Callable[[], None]:
    """Build a call of all passes of a layer but its products, its attention and its router.

    The call runs two norms, two residuals, rotation, permute, unpermute and the SwiGLU of experts
    as wide as the hidden state, forward and backward.
    """
    compute_dtype = torch_dtype(dtype)
    kernels = build_kernels(FusedKernels.AUTO, DeviceKind(device.type))
    norm_settings = NormSettings(eps=EPS, kernels=kernels)
    rows = TOP_K * tokens

    def draw_leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(compute_dtype).requires_grad_()

    x_TD = draw_leaf(tokens, width)
    gate_up_RF = draw_leaf(rows, 2 * width)
    weight_D = draw_leaf(width)
    row_weights_R = torch.rand(rows, device=device, requires_grad=True)
    leaves = (x_TD, gate_up_RF, weight_D, row_weights_R)
    cos, sin = torch.rand(2, tokens, HEAD_DIM // 2, device=device)
    # A random permutation of the token slots, and where each slot went.
    slot_of_row_R = torch.randperm(rows, device=device)
    row_of_slot = torch.empty_like(slot_of_row_R)
    row_of_slot[slot_of_row_R] = torch.arange(rows, device=device)
    token_of_row_R = slot_of_row_R // TOP_K
    row_of_slot_Tk = row_of_slot.view(tokens, TOP_K)
    grads = (
        torch.randn(tokens, width, device=device).to(compute_dtype),
        torch.randn(rows, width, device=device).to(compute_dtype),
    )

    def call() -> None:
        normed = RmsNorm.apply(x_TD, weight_D, norm_settings)
        rotated = Rotary.apply(normed.view(1, tokens, -1, HEAD_DIM), cos, sin, kernels)
        hidden_TD = x_TD + rotated.view_as(x_TD)
        normed = RmsNorm.apply(hidden_TD, weight_D, norm_settings)
        permuted_RD = Permute.apply(normed, token_of_row_R, row_of_slot_Tk, True, kernels)
        combined = Unpermute.apply(permuted_RD, token_of_row_R, row_of_slot_Tk, True, kernels)
        out_TD = hidden_TD + combined
        activated_RD = SwiGlu.apply(gate_up_RF, row_weights_R, kernels)
        torch.autograd.backward((out_TD, activated_RD), grads)
        for leaf in leaves:
            leaf.grad = None

    return call
