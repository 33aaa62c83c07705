"""Predictions of SimuMax, from a checkout of it: `python -m benchmarks.rivals.predict_simumax DIR`.

It ships kernel tables of B200 and of an A100 on PCIe. Those parts take them; others take the B200
file without its tables, and their matrix products run at the shares of the peak that a new user
would write. Peaks, bandwidths and domains are those of the part. Its bandwidth of the network is
that of a whole node.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.rivals.answers import Case, answer_cases

_GIGA = 1e9
_TERA = 1e12
# Shares of the peak on parts whose kernels it has not measured.
_SHARES = {"matmul": 0.65, "default": 0.65, "group_matmul": 0.50}
_BLACKWELL = ("B200", "GB200")
_MODULES = {"layernorm", "mla_up_proj", "moe_act", "mlp", "moe"}


def refuse(case: Case) -> str:
    """Return what SimuMax cannot express of a case; "" where it can."""
    model = case["model"]
    layout = case["layout"]
    recompute = set(layout["recompute"])
    refusals = (
        (case["precision"] != "bf16", "its system files have no factors of 8 bits"),
        (not model["is_plain"], "layers that it does not know"),
        (model["mtp_layers"] > 0, "MTP depths"),
        (layout["zero"] >= 2, "ZeRO-2 and -3 are read and ignored"),
        (bool(layout["offload"]), "offload"),
        (layout["has_capacity"], "capacities"),
        (bool(recompute - _MODULES - {"full"}), "recompute of other modules"),
        (layout["tp"] > 1 and not layout["sp"], "tensor without sequence parallelism"),
    )
    return next((rule for is_refused, rule in refusals if is_refused), "")


def predict_step_s(checkout: Path, case: Case) -> float:
    """Return the seconds of a step."""
    from simumax.core.config import ModelConfig, StrategyConfig, SystemConfig
    from simumax.core.perf_llm import PerfLLM

    simulator = PerfLLM()
    with contextlib.redirect_stdout(io.StringIO()):
        simulator.configure(
            strategy_config=StrategyConfig(**_strategy(case)),
            model_config=ModelConfig(**_model(case)),
            system_config=SystemConfig.init_from_dict(_system(checkout, case)),
        )
        simulator.run_estimate()
        costs = simulator.analysis_cost().data
    return float(costs["duration_time_per_iter"].split()[0])


def _model(case: Case) -> dict[str, Any]:
    model = case["model"]
    fields: dict[str, Any] = {
        "hidden_size": model["hidden"],
        "head_num": model["heads"],
        "kv_head_num": model["kv_heads"],
        "head_size": model["head_dim"],
        "intermediate_size": model["ffn"] or model["expert_ffn"],
        "layer_num": model["layers"],
        "vocab_size": model["vocab"],
        "use_swiglu": model["gated"],
    }
    if model["experts"]:
        fields |= {
            "expert_num": model["experts"],
            "topk": model["top_k"],
            "moe_ffn_hidden_size": model["expert_ffn"],
            "moe_shared_expert_intermediate_size": model["shared_ffn"] or None,
            "dense_layers": model["dense_layers"],
        }
    if model["is_mla"]:
        fields |= {
            "attention_type": "mla",
            "head_size": model["qk_nope_head_dim"],
            "v_head_dim": model["v_head_dim"],
            "qk_head_dim": model["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": model["qk_rope_head_dim"],
            "q_lora_rank": model["q_lora_rank"] or None,
            "kv_lora_rank": model["kv_lora_rank"],
        }
    return fields


def _strategy(case: Case) -> dict[str, Any]:
    layout = case["layout"]
    fields: dict[str, Any] = {
        "seq_len": case["seq_len"],
        "micro_batch_size": layout["mbs"],
        "micro_batch_num": case["global_batch"] // (layout["dp"] * layout["mbs"]),
        "world_size": layout["world_size"],
        "tp_size": layout["tp"],
        "cp_size": layout["cp"],
        "pp_size": layout["pp"],
        "ep_size": layout["ep"],
        "etp_size": layout["etp"],
        "interleaving_size": layout["vpp"],
        "pp_comm_async": layout["vpp"] == 1,  # its cost path has no other under VPP
        "zero_state": layout["zero"],
        "enable_sequence_parallel": layout["tp"] > 1,
        "enable_recompute": bool(layout["recompute"]),
    }
    layers = case["model"]["layers"]
    # As many layers as a stage holds, which it asks for by number.
    if "full" in layout["recompute"]:
        fields |= {"recompute_granularity": "full_block", "recompute_layer_num": layers}
    elif layout["recompute"]:
        fields |= {
            "recompute_granularity": "selective_recompute",
            "recompute_layer_num": layers,
            "megatron_recompute": True,
            "megatron_recompute_modules": list(layout["recompute"]),
        }
    chunks = layout["pp"] * layout["vpp"]
    if layers % chunks and (layers + 2) % chunks == 0:
        fields["account_for_embedding_in_pipeline_split"] = True
        fields["account_for_loss_in_pipeline_split"] = True
    elif layers % chunks:
        first = -(-layers // layout["pp"])
        fields["num_layers_in_last_pipeline_stage"] = layers - first * (layout["pp"] - 1)
    return fields


def _system(checkout: Path, case: Case) -> dict[str, Any]:
    device = case["device"]
    system = _read_system(checkout, "b200_bf16_ceperm")
    accelerator = system["accelerator"]
    if device["name"].startswith("A100"):
        accelerator = _read_system(checkout, "a100_pcie")["accelerator"]
        system["accelerator"] = accelerator
    elif device["name"] not in _BLACKWELL:
        for name, op in accelerator["op"].items():
            op.pop("accurate_efficient_factor", None)
            op["efficient_factor"] = _SHARES.get(name, op["efficient_factor"])
    for op in accelerator["op"].values():
        op["tflops"] = device["bf16_flops"] / _TERA
    for bandwidth in accelerator["bandwidth"].values():
        bandwidth["gbps"] = device["memory_Bps"] / _GIGA
    accelerator["mem_gbs"] = device["memory_bytes"] / 2**30
    system["num_per_node"] = device["domain"]
    networks = system["networks"]
    for name in ("low_intra_node", "high_intra_node"):
        networks[name]["bandwidth"]["gbps"] = device["domain_Bps"] / _GIGA
    node_Bps = device["network_Bps"] * device["domain"]
    networks["inter_node"]["bandwidth"]["gbps"] = node_Bps / _GIGA
    return system


def _read_system(checkout: Path, name: str) -> dict[str, Any]:
    path = checkout / "configs" / "system" / f"{name}.json"
    system: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return system


def main(checkout: Path) -> None:
    """Answer every case on standard input."""
    sys.path.insert(0, str(checkout))
    warnings.simplefilter("ignore")
    answer_cases(refuse, partial(predict_step_s, checkout))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
