"""Rows of work of one layer and one micro-batch on one rank, without its collectives.

The symbols are those of symbols.Symbols; h is the hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moewright.cost.symbols import Symbols
from moewright.cost.time.elementwise import (
    adapter_rows,
    elementwise_row,
    expert_elementwise_rows,
    layer_elementwise_rows,
)
from moewright.cost.time.gemm_rows import LayerOps, backward_gemms, gemm_row
from moewright.cost.time.mixers import (
    count_blocks,
    indexer_products,
    mixer_core,
    mixer_passes,
    mixer_products,
)
from moewright.cost.time.op_time import OpRow
from moewright.rules.adapters import trains_module
from moewright.rules.shapes.mixers import mixer_macs
from moewright.spec.hardware import Op
from moewright.spec.layout import Layout, Recompute
from moewright.spec.ledger import Module
from moewright.spec.model import AttentionKind, MixerKind, ModelSpec
from moewright.spec.plan import TimePart
from moewright.spec.workload import Dtype


def layer_ops(sym: Symbols, *, layer: int, moe: bool) -> LayerOps:
    """Return the rows of one layer; `layer` decides its mixer and its attention window."""
    products = [*_projections(sym, layer)]
    expert_gemms: tuple[OpRow, ...] = ()
    if moe:
        products += _moe_gemms(sym)
        expert_gemms = tuple(_expert_gemms(sym))
    elif sym.model.has_mlp(layer):
        products += _mlp_gemms(sym, "mlp", sym.model.dense_ffn_size)
    cores = mixer_core(sym, layer)
    blocks = count_blocks(sym.model, layer)
    passes = (
        *mixer_passes(sym, layer),
        *layer_elementwise_rows(sym, layer, moe=moe, blocks=blocks),
        *adapter_rows(sym, layer),
    )
    weight_reads = tuple(_expert_weight_reads(sym)) if moe else ()
    return LayerOps(
        forward=(
            *products,
            *(forward for forward, _ in cores),
            *expert_gemms,
            *(forward for forward, _ in passes),
            *weight_reads,
        ),
        backward=(
            *(backward_gemms(row, sym) for row in products),
            *(backward for _, backward in cores),
            *(backward_gemms(row, sym) for row in expert_gemms),
            *(backward for _, backward in passes),
            *weight_reads,
            *_gradient_accumulation(sym, layer, moe),
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
            *(backward_gemms(row, sym) for row in gemms),
            *(backward for _, backward in passes),
            *weight_reads,
            *_expert_gradient_sum(sym),
        ),
    )


def _projections(sym: Symbols, layer: int) -> Iterator[OpRow]:
    spec = sym.model.attention
    mixer = sym.model.mixer(layer)
    is_other = mixer in (MixerKind.NONE, MixerKind.RECURRENT)
    if is_other or spec.kind is AttentionKind.COMPRESSED:
        yield from mixer_products(sym, layer)
        return
    yield from indexer_products(sym, layer)
    h = sym.model.hidden_size
    tp = sym.layout.tp
    T = sym.T
    dense = TimePart.DENSE
    up = Recompute.MLA_UP_PROJ
    if spec.kind is AttentionKind.GQA:
        q_width = spec.q_width * (spec.q_matrices)
        yield gemm_row("attention.q", sym, T, q_width / tp, h, dense)
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
    first_width = sym.model.fc1_matrices * ffn_size / tp
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
        # The engine's router computes in fp32, whatever the precision.
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


def _expert_gemms(sym: Symbols) -> Iterator[OpRow]:
    spec = sym.model.moe
    if spec is None:
        return
    rows_per_expert = sym.R * sym.layout.ep / spec.experts
    for name, linears in (("gate_up", sym.model.fc1_matrices), ("down", 1)):
        width = linears * spec.ffn_size / sym.layout.etp
        yield OpRow(
            name=f"experts.{name}",
            part=TimePart.EXPERTS,
            op=Op.GROUPED_GEMM,
            amount=2.0 * sym.R * width * sym.model.expert_width,
            x=rows_per_expert,
            dtype=sym.dtype,
            recomputed_by=(Recompute.FULL, Recompute.MOE),
        )


def expert_numel(model: ModelSpec, layout: Layout) -> int:
    """Return the elements of one layer's routed experts on one rank."""
    if model.moe is None:
        return 0
    matrices = model.ffn_matrices
    matrix_numel = model.expert_width * model.moe.ffn_size
    return matrices * matrix_numel * model.moe.experts // (layout.ep * layout.etp)


def _expert_weight_reads(sym: Symbols) -> Iterator[OpRow]:
    """Yield the one read of the expert weights that a pass makes, on CUDA.

    On a CPU the grouped GEMM rates, measured by rows per expert, include the read.
    """
    if sym.is_fused:
        read_bytes = sym.operand_bytes * expert_numel(sym.model, sym.layout)
        row = elementwise_row(
            "experts.weight_read", sym, read_bytes, Recompute.MOE, part=TimePart.EXPERTS
        )
        yield replace(row, scale_constant="weight_traffic_time_scale")


def gradient_sum_bytes(sym: Symbols) -> float:
    """Return the bytes that eager accumulation moves a gradient element, mean over micro-batches.

    A gradient is widened and added (c + 16 bytes), but copied (c + 4) for the first micro-batch.
    """
    return sym.c + 16 - 12 / sym.m


def _gradient_accumulation(sym: Symbols, layer: int, moe: bool) -> Iterator[OpRow]:
    """Yield the accumulation of weight gradients.

    A fused accumulation is part of the product and moves only the sum; for experts alone it is
    exposed beside the products. An eager one is a pass of its own over all weights of the layer.
    """
    if not sym.is_fused:
        moved_bytes = gradient_sum_bytes(sym) * _layer_numel(sym, layer, moe)
        if not moved_bytes:
            return
        # One call widens, one adds.
        yield elementwise_row("gradient_sum", sym, moved_bytes, calls=2)
    elif moe:
        yield from _expert_gradient_sum(sym)


def _expert_gradient_sum(sym: Symbols) -> Iterator[OpRow]:
    """Yield the accumulation of the experts' gradients on a fused stack: a read and a write."""
    if not trains_module(sym.workload.fine_tuning, Module.EXPERTS):
        return
    sum_bytes = 2 * sym.workload.grad_dtype.nbytes * expert_numel(sym.model, sym.layout)
    row = elementwise_row("experts.gradient_sum", sym, sum_bytes, part=TimePart.EXPERTS)
    yield replace(row, scale_constant="weight_traffic_time_scale")


def _layer_numel(sym: Symbols, layer: int, moe: bool) -> int:
    """Return the elements of one layer's matrices on one rank that train."""
    model = sym.model
    tp = sym.layout.tp
    h = model.hidden_size
    sharded, replicated = mixer_macs(model, layer)
    by_module = {Module.ATTENTION: sharded // tp + replicated}
    matrices = model.ffn_matrices
    if not moe and model.has_mlp(layer):
        by_module[Module.DENSE_MLP] = matrices * h * model.dense_ffn_size // tp
    elif moe and model.moe is not None:
        latents = 2 * h * model.moe.latent_size
        by_module[Module.ROUTER] = h * model.moe.experts
        by_module[Module.EXPERTS] = latents + expert_numel(model, sym.layout)
        by_module[Module.SHARED_EXPERTS] = matrices * h * model.moe.shared_ffn_size // tp
    fine_tuning = sym.workload.fine_tuning
    return sum(numel for module, numel in by_module.items() if trains_module(fine_tuning, module))
