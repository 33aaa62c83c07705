"""Rows of work of one layer and one micro-batch on one rank, without its collectives.

The symbols are those of symbols.Symbols; h is the hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moewright.cost.elementwise import (
    elementwise_row,
    expert_elementwise_rows,
    layer_elementwise_rows,
)
from moewright.cost.op_time import OpRow
from moewright.cost.symbols import Symbols
from moewright.rules import flops
from moewright.spec.hardware import Op
from moewright.spec.layout import Layout, Recompute
from moewright.spec.model import AttentionKind, ModelSpec
from moewright.spec.plan import TimePart
from moewright.spec.workload import Dtype

_NARROW_HEAD_DIM = 64  # the tables of attention rates are of heads of 128
_BACKWARD_PRODUCTS = 2.0  # a product's gradients are two products of its size
_FP32_SUM_BYTES = 8  # a gradient is added to its fp32 sum by one read and one write of 4 bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOps:
    """The rows of one layer, forward and backward, without recompute and collectives."""

    forward: tuple[OpRow, ...]
    backward: tuple[OpRow, ...]


def layer_ops(sym: Symbols, *, layer: int, moe: bool) -> LayerOps:
    """Return the rows of one transformer layer; `layer` decides its attention window only."""
    if moe:
        dense_gemms = (*_projections(sym), *_moe_gemms(sym))
        expert_gemms = tuple(_expert_gemms(sym))
    else:
        dense_gemms = (*_projections(sym), *_mlp_gemms(sym, "mlp", sym.model.dense_ffn_size))
        expert_gemms = ()
    core, core_backward = _attention_core(sym, layer)
    passes = tuple(layer_elementwise_rows(sym, moe))
    weight_reads = tuple(_expert_weight_reads(sym)) if moe else ()
    return LayerOps(
        forward=(
            *dense_gemms,
            core,
            *expert_gemms,
            *(forward for forward, _ in passes),
            *weight_reads,
        ),
        backward=(
            *(backward_gemms(row) for row in dense_gemms),
            core_backward,
            *(backward_gemms(row) for row in expert_gemms),
            *(backward for _, backward in passes),
            *weight_reads,
            *_gradient_accumulation(sym, moe),
        ),
    )


def expert_ops(sym: Symbols) -> LayerOps:
    """Return the rows of a fused layer that depend on how its experts are sharded.

    They come in the order that they have among all rows of the layer.
    """
    gemms = tuple(_expert_gemms(sym))
    passes = tuple(expert_elementwise_rows(sym))
    weight_reads = tuple(_expert_weight_reads(sym))
    return LayerOps(
        forward=(*gemms, *(forward for forward, _ in passes), *weight_reads),
        backward=(
            *(backward_gemms(row) for row in gemms),
            *(backward for _, backward in passes),
            *weight_reads,
            *_gradient_accumulation(sym, moe=True),
        ),
    )


def gemm_row(
    name: str,
    sym: Symbols,
    tokens: int,
    n: float,
    k: float,
    part: TimePart,
    *recomputed_by: Recompute,
) -> OpRow:
    """Return the row of a product [tokens, k] x [k, n]."""
    product_flops = 2.0 * tokens * n * k
    return OpRow(
        name=name,
        part=part,
        op=Op.GEMM,
        amount=product_flops,
        x=product_flops,
        dtype=sym.dtype,
        recomputed_by=(Recompute.FULL, *recomputed_by),
    )


def backward_gemms(row: OpRow) -> OpRow:
    """Return the backward of a product: twice the work, in calls of the same size."""
    return replace(row, amount=row.amount * _BACKWARD_PRODUCTS, recomputed_by=())


def _attention_core(sym: Symbols, layer: int) -> tuple[OpRow, OpRow]:
    """Return the forward and the backward row of flash attention."""
    core_flops = flops.attention_flops(sym.model, layer, sym.T, sym.seq_len) / sym.layout.tp
    if not flops.is_windowed(sym.model, layer):
        core_flops *= sym.attended_share
    scale_constant = ""
    if sym.model.attention.head_dim <= _NARROW_HEAD_DIM:
        scale_constant = "narrow_head_time_scale"
    forward = OpRow(
        name="attention.core",
        part=TimePart.ATTENTION,
        op=Op.ATTENTION,
        amount=core_flops,
        x=sym.seq_len,
        dtype=sym.dtype,
        recomputed_by=(Recompute.FULL, Recompute.CORE_ATTN),
        scale_constant=scale_constant,
    )
    backward = replace(forward, op=Op.ATTENTION_BACKWARD, amount=2 * core_flops, recomputed_by=())
    return forward, backward


def _projections(sym: Symbols) -> Iterator[OpRow]:
    spec = sym.model.attention
    h = sym.model.hidden_size
    tp = sym.layout.tp
    T = sym.T
    dense = TimePart.DENSE
    up = Recompute.MLA_UP_PROJ
    if spec.kind is AttentionKind.GQA:
        yield gemm_row("attention.q", sym, T, spec.q_width / tp, h, dense)
        yield gemm_row("attention.k", sym, T, spec.kv_width / tp, h, dense)
        yield gemm_row("attention.v", sym, T, spec.kv_width / tp, h, dense)
    else:
        rank = spec.q_lora_rank
        if rank:
            yield gemm_row("attention.q_down", sym, sym.t, rank, h, dense)
            yield gemm_row("attention.q_up", sym, T, spec.q_width / tp, rank, dense, up)
        else:
            yield gemm_row("attention.q", sym, T, spec.q_width / tp, h, dense)
        kv_latent = spec.kv_lora_rank + spec.qk_rope_head_dim
        yield gemm_row("attention.kv_down", sym, sym.t, kv_latent, h, dense)
        expanded = spec.heads * (spec.qk_nope_head_dim + spec.v_head_dim) / tp
        yield gemm_row("attention.kv_up", sym, T, expanded, spec.kv_lora_rank, dense, up)
    yield gemm_row("attention.o", sym, T, h, spec.out_width / tp, dense)


def _mlp_gemms(sym: Symbols, name: str, ffn_size: int) -> Iterator[OpRow]:
    h = sym.model.hidden_size
    tp = sym.layout.tp
    recomputed_by: tuple[Recompute, ...] = (Recompute.SHARED_EXPERTS, Recompute.MOE)
    if name == "mlp":
        recomputed_by = (Recompute.MLP,)
    first_width = _first_linears(sym.model) * ffn_size / tp
    yield gemm_row(f"{name}.gate_up", sym, sym.T, first_width, h, TimePart.DENSE, *recomputed_by)
    yield gemm_row(f"{name}.down", sym, sym.T, h, ffn_size / tp, TimePart.DENSE, *recomputed_by)


def _moe_gemms(sym: Symbols) -> Iterator[OpRow]:
    """Yield the router, the projections into and out of a latent space, and the shared experts."""
    spec = sym.model.moe
    if spec is None:
        return
    h = sym.model.hidden_size
    router_flops = 2.0 * sym.t * h * spec.experts
    yield OpRow(
        name="router",
        part=TimePart.DENSE,
        op=Op.GEMM,
        amount=router_flops,
        x=router_flops,
        dtype=sym.wide_dtype if sym.is_fused else Dtype.FP32,
        recomputed_by=(Recompute.FULL, Recompute.MOE),
        efficiency=sym.router_efficiency,
    )
    latent = spec.latent_size
    if latent:
        yield gemm_row("latent.down", sym, sym.t, latent, h, TimePart.DENSE, Recompute.MOE)
        yield gemm_row("latent.up", sym, sym.t, h, latent, TimePart.DENSE, Recompute.MOE)
    if spec.shared_ffn_size:
        yield from _mlp_gemms(sym, "shared", spec.shared_ffn_size)


def _first_linears(model: ModelSpec) -> int:
    """Return how many linears read the input of an MLP: gate and up, or one without a gate."""
    return 2 if model.gated else 1


def _expert_gemms(sym: Symbols) -> Iterator[OpRow]:
    spec = sym.model.moe
    if spec is None:
        return
    rows_per_expert = sym.R * sym.layout.ep / spec.experts
    for name, linears in (("gate_up", _first_linears(sym.model)), ("down", 1)):
        width = linears * spec.ffn_size / sym.layout.etp
        yield OpRow(
            name=f"experts.{name}",
            part=TimePart.EXPERTS,
            op=Op.GROUPED_GEMM,
            amount=2.0 * sym.R * width * sym.model.expert_width,
            x=rows_per_expert,
            dtype=sym.dtype,
            recomputed_by=(Recompute.FULL, Recompute.MOE),
            scale_constant="biased_expert_time_scale" if spec.expert_bias else "",
        )


def expert_numel(model: ModelSpec, layout: Layout) -> int:
    """Return the elements of one layer's routed experts on one rank."""
    if model.moe is None:
        return 0
    matrices = _first_linears(model) + 1
    matrix_numel = model.expert_width * model.moe.ffn_size
    return matrices * matrix_numel * model.moe.experts // (layout.ep * layout.etp)


def _expert_weight_reads(sym: Symbols) -> Iterator[OpRow]:
    """Yield the one read of the expert weights that a pass makes, on CUDA.

    On a CPU the grouped GEMM rates, measured by rows per expert, include the read.
    """
    if sym.is_fused:
        read_bytes = sym.c * expert_numel(sym.model, sym.layout)
        row = elementwise_row(
            "experts.weight_read", sym, read_bytes, Recompute.MOE, part=TimePart.EXPERTS
        )
        yield replace(row, scale_constant="weight_traffic_time_scale")


def gradient_sum_bytes(sym: Symbols) -> float:
    """Return the bytes that eager accumulation moves a gradient element, mean over micro-batches.

    A gradient is widened and added (c + 16 bytes), but copied (c + 4) for the first micro-batch.
    """
    return sym.c + 16 - 12 / sym.m


def _gradient_accumulation(sym: Symbols, moe: bool) -> Iterator[OpRow]:
    """Yield the fp32 accumulation of weight gradients.

    A fused accumulation is part of the product and moves only the sum; for experts alone it is
    exposed beside the products. An eager one is a pass of its own over all weights of the layer.
    """
    if not sym.is_fused:
        moved_bytes = gradient_sum_bytes(sym) * _layer_numel(sym, moe)
        yield elementwise_row("gradient_sum", sym, moved_bytes, calls=2)
    elif moe:
        sum_bytes = _FP32_SUM_BYTES * expert_numel(sym.model, sym.layout)
        row = elementwise_row("experts.gradient_sum", sym, sum_bytes, part=TimePart.EXPERTS)
        yield replace(row, scale_constant="weight_traffic_time_scale")


def _layer_numel(sym: Symbols, moe: bool) -> int:
    """Return the elements of one layer's matrices on one rank."""
    model = sym.model
    tp = sym.layout.tp
    h = model.hidden_size
    sharded, replicated = flops.attention_macs(model)
    numel = sharded // tp + replicated
    matrices = _first_linears(model) + 1
    if not moe:
        numel += matrices * h * model.dense_ffn_size // tp
    elif model.moe is not None:
        numel += h * (model.moe.experts + 2 * model.moe.latent_size)
        numel += expert_numel(model, sym.layout)
        numel += matrices * h * model.moe.shared_ffn_size // tp
    return numel
