"""Megatron-core, from its package, loads a torch_dist checkpoint and saves it again, on CPUs.

`megatron_core_peer.py HF_DIR IN OUT TP PP EP SINGLETON OPTIMIZER` is one rank of torchrun. It
builds the Qwen3-MoE, GLM-4.5 or gpt-oss of HF_DIR/config.json, loads IN with Megatron-core's own
reader, writes OUT with its own writer, with tensors of their own for layers and experts where
SINGLETON is 1. One process alone compares logits with transformers', but for gpt-oss, whose rope
and activation are not built here. OPTIMIZER is a way in which Megatron-core shards the state of its
distributed optimizer, which goes the same way then; `plain` is the one for half precision that is
not distributed, whose moments are made here.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def build_model(
    config: dict[str, Any], tp: int, pp: int, ep: int, dtype: torch.dtype
) -> torch.nn.Module:
    """Return this rank's part of the model."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
    )
    is_glm = config["model_type"] == "glm4_moe"
    is_gpt_oss = config["model_type"] == "gpt_oss"
    expert_width = config["intermediate_size" if is_gpt_oss else "moe_intermediate_size"]
    core = TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        ffn_hidden_size=config["intermediate_size"],
        num_moe_experts=config["n_routed_experts" if is_glm else "num_local_experts"],
        moe_ffn_hidden_size=expert_width,
        moe_router_topk=config["num_experts_per_tok"],
        moe_shared_expert_intermediate_size=config.get("n_shared_experts", 0) * expert_width
        or None,
        moe_router_score_function="sigmoid" if is_glm else "softmax",
        moe_router_enable_expert_bias=is_glm,
        add_bias_linear=is_gpt_oss,
        softmax_type="learnable" if is_gpt_oss else "vanilla",
        add_qkv_bias=config["attention_bias"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=config["rms_norm_eps"],
        qk_layernorm=not is_gpt_oss,
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
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        mtp_num_layers=config.get("num_nextn_predict_layers"),
    )
    spec = get_gpt_layer_local_spec(
        num_experts=core.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=not is_gpt_oss,
        normalization="RMSNorm",
    )
    depths = None
    is_last = parallel_state.is_pipeline_last_stage()
    if core.mtp_num_layers and is_last:
        depths = get_gpt_mtp_block_spec(core, spec, use_transformer_engine=False)
    model = GPTModel(
        core,
        spec,
        mtp_block_spec=depths,
        vocab_size=-(-config["vocab_size"] // tp) * tp,  # padded
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=is_last,
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=10000,
    )
    return model.to(dtype)


def build_optimizer(model: torch.nn.Module, kind: str) -> Any:
    """Return Megatron-core's optimizer of the model, on CPUs."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import (
        OptimizerConfig,
        distrib_optimizer,
        get_megatron_optimizer,
    )

    # It asks for types and devices of CUDA by name.
    type_name, tensor = torch.Tensor.type, torch.tensor
    torch.Tensor.type = lambda self, *to: (  # asked for, or converted to
        type_name(self, *to) if to else type_name(self).replace("torch.", "torch.cuda.")
    )  # type: ignore[method-assign, assignment, misc]
    torch.tensor = lambda data, device=None, **more: tensor(data, **more)  # type: ignore[assignment]
    is_plain = kind == "plain"
    whole = DistributedDataParallel(
        config=model.config,
        ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=not is_plain),
        module=model,
    )
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=1e-3,
        bf16=is_plain,
        params_dtype=torch.bfloat16 if is_plain else torch.float32,
        use_distributed_optimizer=not is_plain,
    )
    # As with Transformer Engine's AdamW, which counts steps by group.
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    torch.optim.Adam.__setstate__ = torch.optim.Optimizer.__setstate__  # type: ignore[method-assign]
    return get_megatron_optimizer(config, [whole])


def fill_moments(optimizer: Any) -> None:
    """Copy the weights to the main weights; the moments become their half and their square."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        part.reload_model_params()
        for main, moments in part.optimizer.state.items():
            moments["exp_avg"].copy_(main * 0.5)
            moments["exp_avg_sq"].copy_(main * main)
            moments["step"] = torch.tensor(2.0)


def main() -> None:
    # On CPUs there is nothing to wait for; its saver asks all the same.
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda self, *_: self  # type: ignore[method-assign, assignment, misc]
    hf, source, out = map(Path, sys.argv[1:4])
    tp, pp, ep, singleton = map(int, sys.argv[4:8])
    kind = sys.argv[8] if len(sys.argv) > 8 else ""
    dist.init_process_group("gloo")
    from megatron.core import dist_checkpointing
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # nothing is drawn
    moe_utils.te_general_gemm = None  # a name that it reads and binds with Transformer Engine alone
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.validation import StrictHandling

    config = json.loads((hf / "config.json").read_text())
    model = build_model(config, tp, pp, ep, torch.bfloat16 if kind == "plain" else torch.float32)
    optimizer = build_optimizer(model, kind) if kind else None
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))  # what is not loaded shows

    def list_state(metadata: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
        state = model.sharded_state_dict(metadata=metadata)
        state = {key: value for key, value in state.items() if "_extra_state" not in key}
        if not kind:
            return state
        more = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        return state | {"optimizer": more}

    metadata = {"chained_optim_avoid_prefix": True}
    if kind and kind != "plain":
        metadata["distrib_optim_sharding_type"] = kind
    wanted = list_state(dict(metadata), is_loading=True)
    if kind == "plain":
        del wanted["optimizer"]
    for value in nested_values(wanted):
        # Layers of Transformer Engine, which trainings use, have the norm of experts' layers by
        # itself; the local ones here call it after a dense layer's.
        if hasattr(value, "key"):
            value.key = value.key.replace(
                "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
            )
    is_plain = kind == "plain"  # whose checkpoint has other states besides
    strict = StrictHandling.ASSUME_OK_UNEXPECTED if is_plain else StrictHandling.RAISE_ALL
    state = dist_checkpointing.load(wanted, str(source), strict=strict)
    if kind and kind != "plain":
        optimizer.load_state_dict(state.pop("optimizer"))
    model.load_state_dict(state, strict=False)
    if kind == "plain":
        fill_moments(optimizer)
    left = [
        name
        for name, value in model.named_parameters()
        if value[: value.shape[0] - bool(tp > 1)].isnan().any()  # the last row may pad
    ]
    assert not left, left
    if dist.get_world_size() == 1 and not kind and config["model_type"] != "gpt_oss":
        compare_logits(model, hf, config["vocab_size"])
    if dist.get_rank() == 0:
        out.mkdir(parents=True)
    dist.barrier()
    metadata["singleton_local_shards"] = bool(singleton)
    more = {"iteration": 2, "args": Namespace(seq_length=32)}
    dist_checkpointing.save(list_state(metadata, is_loading=False) | more, str(out))
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
