"""Model x Layout -> rows of work of one layer and one micro-batch on one rank; comm.py has the
collectives.

Symbols are those of sizes.Sizes, with h the hidden size and f the expert width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moewright.cost.elementwise import (
    FULL,
    MOE,
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

_NARROW_HEAD = 64  # tables of attention rates are of heads of 128


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOps:
    """Rows of one layer, forward and backward, without recompute and collectives."""

    forward: tuple[OpRow, ...]
    backward: tuple[OpRow, ...]


def layer_ops(size: Symbols, *, layer: int, moe: bool) -> LayerOps:
    """One transformer layer; `layer` matters for its attention window only."""
    gemms = [
        *_projections(size),
        *(_moe_gemms(size) if moe else _mlp_gemms(size, "mlp", size.model.dense_ffn_size)),
    ]
    experts = tuple(_expert_gemms(size)) if moe else ()
    core_flops = flops.attention_flops(size.model, layer, size.T, size.seq_len) / size.layout.tp
    if not flops.is_windowed(size.model, layer):
        core_flops *= size.attended_share
    core = _row(
        "attention.core",
        TimePart.ATTENTION,
        Op.ATTENTION,
        core_flops,
        size.seq_len,
        size.dtype,
        (FULL, Recompute.CORE_ATTN),
    )
    core_back = _row(
        "attention.core",
        TimePart.ATTENTION,
        Op.ATTENTION_BACKWARD,
        2 * core_flops,
        size.seq_len,
        size.dtype,
    )
    if size.model.attention.head_dim <= _NARROW_HEAD:
        core, core_back = (
            replace(row, scale_constant="narrow_head_time_scale") for row in (core, core_back)
        )
    light = tuple(layer_elementwise_rows(size, moe))
    forward = (*gemms, core, *experts, *(row for row, _ in light), *_weight_reads(size, moe))
    backward = (
        *(_scaled(row, 2.0) for row in gemms),
        core_back,
        *(_scaled(row, 2.0) for row in experts),
        *(back for _, back in light),
        *_weight_reads(size, moe),
        *_gradient_accumulation(size, moe),
    )
    return LayerOps(forward=forward, backward=backward)


def expert_ops(size: Symbols) -> LayerOps:
    """Of a fused stack, the rows of a layer that depend on how experts are cut, in the order of all
    its rows."""
    gemms, reads = tuple(_expert_gemms(size)), tuple(_weight_reads(size, moe=True))
    light = tuple(expert_elementwise_rows(size))
    return LayerOps(
        forward=(*gemms, *(row for row, _ in light), *reads),
        backward=(
            *(_scaled(row, 2.0) for row in gemms),
            *(back for _, back in light),
            *reads,
            *_gradient_accumulation(size, moe=True),
        ),
    )


def gemm_row(
    name: str, size: Symbols, tokens: int, n: float, k: float, part: TimePart, *replay: Recompute
) -> OpRow:
    """[tokens, k] x [k, n]."""
    work = 2.0 * tokens * n * k
    return _row(name, part, Op.GEMM, work, work, size.dtype, (FULL, *replay))


def _row(
    name: str,
    part: TimePart,
    op: Op,
    amount: float,
    x: float,
    dtype: Dtype,
    replay: tuple[Recompute, ...] = (),
) -> OpRow:
    return OpRow(name=name, part=part, op=op, amount=amount, x=x, dtype=dtype, recomputed_by=replay)


def _scaled(row: OpRow, factor: float) -> OpRow:
    """The backward of a forward row: `factor` times the work, in calls of the same size."""
    return replace(row, amount=row.amount * factor, recomputed_by=())


def _projections(size: Symbols) -> Iterator[OpRow]:
    spec, h, tp, T = size.model.attention, size.model.hidden_size, size.layout.tp, size.T
    dense, up = TimePart.DENSE, Recompute.MLA_UP_PROJ
    if spec.kind is AttentionKind.GQA:
        yield gemm_row("attention.q", size, T, spec.q_width / tp, h, dense)
        yield gemm_row("attention.k", size, T, spec.kv_width / tp, h, dense)
        yield gemm_row("attention.v", size, T, spec.kv_width / tp, h, dense)
    else:
        if spec.q_lora_rank:
            yield gemm_row("attention.q_down", size, size.t, spec.q_lora_rank, h, dense)
            yield gemm_row(
                "attention.q_up", size, T, spec.q_width / tp, spec.q_lora_rank, dense, up
            )
        else:
            yield gemm_row("attention.q", size, T, spec.q_width / tp, h, dense)
        yield gemm_row(
            "attention.kv_down", size, size.t, spec.kv_lora_rank + spec.qk_rope_head_dim, h, dense
        )
        expanded = spec.heads * (spec.qk_nope_head_dim + spec.v_head_dim) / tp
        yield gemm_row("attention.kv_up", size, T, expanded, spec.kv_lora_rank, dense, up)
    yield gemm_row("attention.o", size, T, h, spec.out_width / tp, dense)


def _mlp_gemms(size: Symbols, name: str, ffn: int) -> Iterator[OpRow]:
    h, tp = size.model.hidden_size, size.layout.tp
    wide = 2 if size.model.gated else 1
    replay = (Recompute.MLP,) if name == "mlp" else (Recompute.SHARED_EXPERTS, MOE)
    yield gemm_row(f"{name}.gate_up", size, size.T, wide * ffn / tp, h, TimePart.DENSE, *replay)
    yield gemm_row(f"{name}.down", size, size.T, h, ffn / tp, TimePart.DENSE, *replay)


def _moe_gemms(size: Symbols) -> Iterator[OpRow]:
    """Router, projections into the experts' space and back, and shared expert."""
    spec = size.model.moe
    if spec is None:
        return
    work = 2.0 * size.t * size.model.hidden_size * spec.experts
    yield OpRow(
        name="router",
        part=TimePart.DENSE,
        op=Op.GEMM,
        amount=work,
        x=work,
        dtype=size.wide_dtype if size.is_fused else Dtype.FP32,
        recomputed_by=(FULL, MOE),
        efficiency=size.router_efficiency,
    )
    if spec.latent_size:
        h, inner = size.model.hidden_size, spec.latent_size
        yield gemm_row("latent.down", size, size.t, inner, h, TimePart.DENSE, MOE)
        yield gemm_row("latent.up", size, size.t, h, inner, TimePart.DENSE, MOE)
    if spec.shared_ffn_size:
        yield from _mlp_gemms(size, "shared", spec.shared_ffn_size)


def _expert_gemms(size: Symbols) -> Iterator[OpRow]:
    spec = size.model.moe
    if spec is None:
        return
    h, wide = size.model.expert_width, 2 if size.model.gated else 1
    per_expert = size.R * size.layout.ep / spec.experts
    for name, n in (("gate_up", wide), ("down", 1)):
        work = 2.0 * size.R * n * spec.ffn_size / size.layout.etp * h
        row = _row(
            f"experts.{name}",
            TimePart.EXPERTS,
            Op.GROUPED_GEMM,
            work,
            per_expert,
            size.dtype,
            (FULL, MOE),
        )
        yield replace(row, scale_constant="biased_expert_time_scale" if spec.expert_bias else "")


def expert_numel(model: ModelSpec, layout: Layout) -> int:
    """Weights of one layer's routed experts on one rank."""
    if model.moe is None:
        return 0
    matrices = 3 if model.gated else 2
    return (
        matrices
        * model.expert_width
        * model.moe.ffn_size
        * model.moe.experts
        // (layout.ep * layout.etp)
    )


def _weight_reads(size: Symbols, moe: bool) -> Iterator[OpRow]:
    """Expert weights are read once a pass; a rate measured by rows per expert has that inside, so
    CUDA only."""
    if moe and size.is_fused:
        read_bytes = size.c * expert_numel(size.model, size.layout)
        row = elementwise_row("experts.weight_read", size, read_bytes, MOE, part=TimePart.EXPERTS)
        yield replace(row, scale_constant="weight_traffic_time_scale")


def gradient_sum_bytes(size: Symbols) -> float:
    """Bytes a gradient element costs the eager accumulation, mean over the micro-batches."""
    return size.c + 16 - 12 / size.m


def _gradient_accumulation(size: Symbols, moe: bool) -> Iterator[OpRow]:
    """fp32 accumulation of weight gradients: fused into the GEMM it reads and writes the fp32 sum
    (8 bytes).

    Eagerly every gradient is widened and added (c + 16), but copied for the first micro-batch of a
    step (c + 4).
    """
    if size.is_fused:
        if moe:
            sum_bytes = 8 * expert_numel(size.model, size.layout)
            row = elementwise_row("experts.gradient_sum", size, sum_bytes, part=TimePart.EXPERTS)
            yield replace(row, scale_constant="weight_traffic_time_scale")
        return
    cut, whole = flops.attention_macs(size.model)
    numel = cut // size.layout.tp + whole
    matrices = 3 if size.model.gated else 2
    if not moe:
        numel += matrices * size.model.hidden_size * size.model.dense_ffn_size // size.layout.tp
    elif size.model.moe is not None:
        latent = 2 * size.model.moe.latent_size
        numel += size.model.hidden_size * (size.model.moe.experts + latent) + expert_numel(
            size.model, size.layout
        )
        numel += (
            matrices * size.model.hidden_size * size.model.moe.shared_ffn_size // size.layout.tp
        )
    yield elementwise_row("gradient_sum", size, gradient_sum_bytes(size) * numel, calls=2)
