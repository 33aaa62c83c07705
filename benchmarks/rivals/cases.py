"""A published run as another planner takes it: numbers and names that every planner knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moewright.calibration.measured_row import MeasuredRow
from moewright.spec.model import AttentionKind
from moewright.spec.workload import Dtype


def build_case(row: MeasuredRow) -> dict[str, Any]:
    """Return the run as plain data: model, device, layout and workload.

    Bandwidths are bytes/s of one device in one direction, the peak is in FLOP/s of bf16.
    """
    return {
        "id": row.id,
        "seq_len": row.workload.seq_len,
        "global_batch": row.workload.global_batch,
        "precision": str(row.workload.precision),
        "model": _describe_model(row),
        "device": _describe_device(row),
        "layout": _describe_layout(row),
    }


def _describe_model(row: MeasuredRow) -> Mapping[str, Any]:
    model = row.model
    attention = model.attention
    moe = model.moe
    # Layers that mix tokens otherwise, or have no MLP, are known to no other planner here.
    is_plain = not (model.mixers or model.mlp_layers or attention.indexer)
    return {
        "name": model.name,
        "is_plain": is_plain and attention.kind is not AttentionKind.COMPRESSED,
        "hidden": model.hidden_size,
        "layers": model.layers,
        "dense_layers": model.layers - model.moe_layer_count if moe else 0,
        "vocab": model.vocab_size,
        "ffn": model.dense_ffn_size,
        "gated": model.gated,
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "is_mla": attention.kind is AttentionKind.MLA,
        "v_head_dim": attention.v_head_dim,
        "q_lora_rank": attention.q_lora_rank,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_nope_head_dim": attention.qk_nope_head_dim,
        "qk_rope_head_dim": attention.qk_rope_head_dim,
        "mtp_layers": model.mtp_layers,
        "experts": moe.experts if moe else 0,
        "top_k": moe.router.top_k if moe else 0,
        "expert_ffn": moe.ffn_size if moe else 0,
        "shared_ffn": moe.shared_ffn_size if moe else 0,
    }


def _describe_device(row: MeasuredRow) -> Mapping[str, Any]:
    hardware = row.hardware
    peaks = {peak.dtype: peak.rate.value for peak in hardware.device.peaks}
    return {
        "name": hardware.device.name,
        "memory_bytes": hardware.device.memory_bytes.value,
        "memory_Bps": hardware.device.memory_Bps.value,
        "bf16_flops": peaks.get(Dtype.BF16, 0.0),
        "domain": hardware.fabric.domain_size,
        "domain_Bps": hardware.fabric.domain_Bps.value,
        "network_Bps": hardware.fabric.network_Bps.value,
    }


def _describe_layout(row: MeasuredRow) -> Mapping[str, Any]:
    layout = row.layout
    return {
        "world_size": layout.world_size,
        "tp": layout.tp,
        "sp": layout.sp,
        "cp": layout.cp,
        "pp": layout.pp,
        "vpp": layout.vpp,
        "ep": layout.ep,
        "etp": layout.etp,
        "dp": layout.dp,
        "mbs": layout.mbs,
        "zero": layout.zero,
        "recompute": [str(module) for module in layout.recompute],
        "offload": [str(kept) for kept in layout.offload],
        "has_capacity": layout.capacity > 0,
    }
