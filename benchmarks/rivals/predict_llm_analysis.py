"""Predictions of llm-analysis, from a checkout of it.

    python -m benchmarks.rivals.predict_llm_analysis DIR

It knows no virtual stages, no modules that recompute but attention and whole layers, and heads of
hidden / heads alone. Its FLOPs run at the half of the peak that its documentation names.
"""

from __future__ import annotations

import logging
import sys

from benchmarks.rivals.answers import Case, answer_cases

_GIGA = 1e9
_TERA = 1e12
_FLOPS_SHARE = 0.5


def refuse(case: Case) -> str:
    """Return what llm-analysis cannot express of a case; "" where it can."""
    model = case["model"]
    layout = case["layout"]
    refusals = (
        (case["precision"] != "bf16", "training in 8 bits"),
        (not model["is_plain"] or model["is_mla"], "attention that it does not know"),
        (model["mtp_layers"] > 0, "MTP depths"),
        (model["shared_ffn"] > 0, "shared experts"),
        (bool(model["experts"]) and model["dense_layers"] > 0, "dense layers before experts"),
        (layout["cp"] > 1, "context parallelism"),
        (layout["etp"] not in (1, layout["tp"]), "expert tensor parallelism"),
        (bool(layout["offload"]), "offload"),
        (layout["has_capacity"], "capacities"),
    )
    return next((rule for is_refused, rule in refusals if is_refused), "")


def predict_step_s(case: Case) -> float:
    """Return the seconds of a step."""
    from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
    from llm_analysis.config import DtypeConfig, GPUConfig, ModelConfig, ParallelismConfig

    layout = case["layout"]
    device = case["device"]
    model = case["model"]
    analysis = LLMAnalysis(
        ModelConfig(
            name=model["name"],
            num_layers=model["layers"],
            n_head=model["heads"],
            hidden_dim=model["hidden"],
            vocab_size=model["vocab"],
            max_seq_len=case["seq_len"],
            num_key_value_heads=model["kv_heads"],
            ffn_embed_dim=model["expert_ffn"] or model["ffn"],
            moe_num_experts=model["experts"] or 1,
            moe_top_k=model["top_k"] or 1,
            mlp_gated_linear_units=model["gated"],
        ),
        GPUConfig(
            name=device["name"],
            mem_per_GPU_in_GB=device["memory_bytes"] / _GIGA,
            hbm_bandwidth_in_GB_per_sec=device["memory_Bps"] / _GIGA,
            intra_node_bandwidth_in_GB_per_sec=device["domain_Bps"] / _GIGA,
            intra_node_min_message_latency=8e-6,
            peak_fp16_TFLOPS=device["bf16_flops"] / _TERA,
            inter_node_bandwidth_in_GB_per_sec=device["network_Bps"] / _GIGA,
        ),
        DtypeConfig(),
        ParallelismConfig(
            tp_size=layout["tp"],
            pp_size=layout["pp"],
            dp_size=layout["dp"],
            ep_size=layout["ep"],
            sp_size=layout["tp"] if layout["sp"] else 1,
        ),
        flops_efficiency=_FLOPS_SHARE,
        hbm_memory_efficiency=1.0,
    )
    micro_batches = case["global_batch"] // (layout["dp"] * layout["mbs"])
    summary = analysis.training(
        batch_size_per_gpu=layout["mbs"],
        gradient_accumulation_steps=micro_batches,
        global_batch_size=case["global_batch"],
        seq_len=case["seq_len"],
        activation_recomputation=ActivationRecomputation[_recomputation(layout["recompute"])],
        ds_zero=DSZeRO(layout["zero"]),
    )
    return float(summary["latency_per_iter"])


def _recomputation(modules: list[str]) -> str:
    if "full" in modules:
        return "FULL"
    return "ATTN_COMPUTE" if "core_attn" in modules else "NONE"


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    logging.disable(logging.CRITICAL)
    answer_cases(refuse, predict_step_s)
