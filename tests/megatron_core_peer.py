"""Megatron-core, from its package, loads a torch_dist checkpoint and saves it again, on CPUs.

`megatron_core_peer.py HF_DIR IN OUT TP PP EP SINGLETON` is one rank of torchrun. It builds the
Qwen3-MoE of HF_DIR/config.json, loads IN with Megatron-core's own reader, writes OUT with its own
writer, with tensors of their own for layers and experts where SINGLETON is 1. One process alone
compares logits with transformers'.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def build_model(config: dict[str, Any], tp: int, pp: int, ep: int) -> torch.nn.Module:
    """Return this rank's part of the model."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
    )
    core = TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        ffn_hidden_size=config["intermediate_size"],
        num_moe_experts=config.get("num_experts") or config["num_local_experts"],
        moe_ffn_hidden_size=config["moe_intermediate_size"],
        moe_router_topk=config["num_experts_per_tok"],
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=config["rms_norm_eps"],
        qk_layernorm=True,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        attention_softmax_in_fp32=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
        sequence_parallel=False,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=core.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=True,
        normalization="RMSNorm",
    )
    return GPTModel(
        core,
        spec,
        vocab_size=-(-config["vocab_size"] // tp) * tp,  # padded
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=10000,
    )


def main() -> None:
    # On CPUs there is nothing to wait for; its saver asks all the same.
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    hf, source, out = map(Path, sys.argv[1:4])
    tp, pp, ep, singleton = map(int, sys.argv[4:8])
    dist.init_process_group("gloo")
    from megatron.core import dist_checkpointing
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # nothing is drawn
    moe_utils.te_general_gemm = None  # a name that it reads and binds with Transformer Engine alone
    from megatron.core.dist_checkpointing.validation import StrictHandling

    config = json.loads((hf / "config.json").read_text())
    model = build_model(config, tp, pp, ep)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))  # what is not loaded shows

    def weights(metadata: dict[str, Any]) -> dict[str, Any]:
        state = model.sharded_state_dict(metadata=metadata)
        return {key: value for key, value in state.items() if "_extra_state" not in key}

    wanted = weights({})
    for value in wanted.values():
        # Layers of Transformer Engine, which trainings use, have the norm of experts' layers by
        # itself; the local ones here call it after a dense layer's.
        value.key = value.key.replace(
            "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
        )
    state = dist_checkpointing.load(wanted, str(source), strict=StrictHandling.RAISE_ALL)
    model.load_state_dict(state, strict=False)
    left = [
        name
        for name, value in model.named_parameters()
        if value[: value.shape[0] - bool(tp > 1)].isnan().any()  # the last row may pad
    ]
    assert not left, left
    if dist.get_world_size() == 1:
        compare_logits(model, hf, config["vocab_size"])
    if dist.get_rank() == 0:
        out.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(weights({"singleton_local_shards": bool(singleton)}), str(out))
    dist.barrier()
    for child in multiprocessing.active_children():  # its saver's manager would be left behind
        child.kill()
    os._exit(0)


def compare_logits(model: torch.nn.Module, hf: Path, vocabulary: int) -> None:
    """Compare the logits of some tokens with transformers'."""
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        hf, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = torch.randint(0, vocabulary, (2, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(16).expand(2, 16)
    mask = torch.triu(torch.ones(16, 16, dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        ours = model.eval()(tokens, positions, mask)
        expected = theirs(tokens).logits
    difference = (ours - expected).abs().max().item() / expected.abs().max().item()
    print(f"logits differ by {difference:.2e} of the largest", flush=True)
    assert difference < 1e-5, difference


if __name__ == "__main__":
    main()
