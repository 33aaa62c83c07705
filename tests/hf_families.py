"""Tiny random models of transformers, one of each family, and the folders that hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

transformers = pytest.importorskip("transformers")

VOCABULARY = 97  # odd: no axis divides it
FAMILIES = (
    "qwen3_moe",
    "qwen2_moe",
    "mixtral",
    "olmoe",
    "qwen3",
    "llama",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "glm4_moe",
    "dots1",
    "solar_open",
    "hy_v3",
    "minimax_m2",
    "glm4_moe_lite",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "granitemoe",
    "granitemoeshared",
    "llama4_text",
    "phimoe",
    "qwen3_next",
    "qwen3_5_moe_text",
    "nemotron_h",
    "nemotron",
)
# Model types of folders that see too, whose language model lies below a prefix.
NESTED = ("qwen3_vl_moe", "qwen3_5_moe", "llama4")
# Families that compute what Ling computes with these shapes, Ling 2.0 and Ling-lite.
LING_SOURCES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "glm4_moe": {"attention_bias": False, "n_group": 4, "topk_group": 2},
        "granitemoeshared": {
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 8**-0.5,
            "logits_scaling": 1.0,
            "tie_word_embeddings": False,
            "shared_intermediate_size": 16,
        },
    }
)
# Families whose norms have weights around zero.
_ZERO_CENTERED_TYPES = ("qwen3_next", "qwen3_5_moe", "nemotron")


def _model(family: str, **more: Any) -> nn.Module:
    """Return a tiny random model with wide weights, so that routing has clear margins."""
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
        "attn_implementation": "eager",
        **more,
    }
    torch.manual_seed(7)
    if family == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            **shape,
            head_dim=16,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            tie_word_embeddings=True,
        )
        return transformers.Qwen3MoeForCausalLM(config).float()
    if family == "mixtral":
        config = transformers.MixtralConfig(
            **shape, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2
        )
        return transformers.MixtralForCausalLM(config).float()
    if family == "phimoe":
        # Factors and magnitudes of their own for sequences of up to 64 tokens, and for longer ones.
        factors = {
            "short_factor": [1.0, 1.25, 1.5, 2.0],
            "long_factor": [1.0, 2.0, 4.0, 8.0],
        }
        rope = {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            **factors,
            "short_mscale": 1.2,
            "long_mscale": 1.4,
            "original_max_position_embeddings": 64,
        }
        config = transformers.PhimoeConfig(
            **shape,
            intermediate_size=16,
            num_local_experts=8,
            num_experts_per_tok=2,
            attention_bias=True,
            lm_head_bias=True,
            router_jitter_noise=0.2,  # wide enough to hold several experts
            max_position_embeddings=256,
            rope_parameters=rope,
        )
        return transformers.PhimoeForCausalLM(config).float()
    if family == "olmoe":
        config = transformers.OlmoeConfig(
            **shape, intermediate_size=16, num_experts=8, num_experts_per_tok=2, pad_token_id=None
        )
        return transformers.OlmoeForCausalLM(config).float()
    if family.startswith("deepseek") or family == "glm_moe_dsa":
        latent: dict[str, Any] = {
            **shape,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
        }
        if family == "deepseek_v2":
            config = transformers.DeepseekV2Config(
                **latent, q_lora_rank=None, topk_method="group_limited_greedy"
            )
            return transformers.DeepseekV2ForCausalLM(config).float()
        # Enough heads that no key scores exactly zero in all of them, as another may.
        indexer = {"index_n_heads": 16, "index_head_dim": 12, "index_topk": 5, "q_lora_rank": 24}
        if family == "glm_moe_dsa":
            # The second layer attends to what the first has chosen.
            latent |= {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
            config = transformers.GlmMoeDsaConfig(**latent, **indexer)
            return transformers.GlmMoeDsaForCausalLM(config).float()
        yarn = {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
        if family == "deepseek_v32":
            config = transformers.DeepseekV32Config(**latent, **indexer, rope_parameters=yarn)
            return transformers.DeepseekV32ForCausalLM(config).float()
        config = transformers.DeepseekV3Config(**latent, q_lora_rank=24, rope_parameters=yarn)
        return transformers.DeepseekV3ForCausalLM(config).float()
    if family in ("glm4_moe", "dots1", "solar_open"):
        sparse: dict[str, Any] = {
            **shape,
            "head_dim": 16,
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        }
        if family == "solar_open":
            del sparse["intermediate_size"], sparse["first_k_dense_replace"]
            config = transformers.SolarOpenConfig(**sparse, n_group=4, topk_group=2)
            return transformers.SolarOpenForCausalLM(config).float()
        if family == "dots1":
            config = transformers.Dots1Config(**sparse, n_group=4, topk_group=2)
            return transformers.Dots1ForCausalLM(config).float()
        config = transformers.Glm4MoeConfig(
            **{"attention_bias": True, **sparse},
            use_qk_norm=True,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        )
        return transformers.Glm4MoeForCausalLM(config).float()
    if family == "hy_v3":
        config = transformers.HYV3Config(
            **shape,
            head_dim=16,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_experts=8,
            num_experts_per_tok=2,
            num_shared_experts=1,
            router_scaling_factor=2.5,
        )
        return transformers.HYV3ForCausalLM(config).float()
    if family == "glm4_moe_lite":
        config = transformers.Glm4MoeLiteConfig(
            **shape | {"num_key_value_heads": 4, "num_hidden_layers": 3},
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=12,
            intermediate_size=48,
            moe_intermediate_size=16,
            n_routed_experts=8,
            num_experts_per_tok=2,
        )
        return transformers.Glm4MoeLiteForCausalLM(config).float()
    if family == "ernie4_5_moe":
        config = transformers.Ernie4_5_MoeConfig(
            **shape,
            intermediate_size=48,
            moe_intermediate_size=16,
            moe_num_experts=8,
            moe_k=2,
            moe_num_shared_experts=2,
            pad_token_id=None,
        )
        return transformers.Ernie4_5_MoeForCausalLM(config).float()
    if family == "hunyuan_v1_moe":
        config = transformers.HunYuanMoEV1Config(
            **shape,
            head_dim=16,
            intermediate_size=16,
            num_experts=8,
            moe_topk=2,
            pad_token_id=None,
            rope_parameters={
                "rope_type": "dynamic",
                "type": "dynamic",
                "rope_theta": 10000.0,
                "alpha": 1000.0,
                "factor": 1.0,
            },
        )
        return transformers.HunYuanMoEV1ForCausalLM(config).float()
    if family in ("granitemoe", "granitemoeshared"):
        granite: dict[str, Any] = {
            **shape,
            "intermediate_size": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.25,
            "logits_scaling": 6.0,
            "tie_word_embeddings": True,
            **more,
        }
        if family == "granitemoe":
            config = transformers.GraniteMoeConfig(**granite)
            return transformers.GraniteMoeForCausalLM(config).float()
        granite = {"shared_intermediate_size": 24, **granite}
        config = transformers.GraniteMoeSharedConfig(**granite)
        return transformers.GraniteMoeSharedForCausalLM(config).float()
    if family == "llama4_text":
        config = transformers.Llama4TextConfig(
            **shape | {"num_hidden_layers": 4},
            head_dim=16,
            intermediate_size=16,
            intermediate_size_mlp=48,
            num_local_experts=8,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            attention_chunk_size=6,
            floor_scale=5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
        return transformers.Llama4ForCausalLM(config).float()
    if family in ("qwen3_next", "qwen3_5_moe_text"):
        hybrid: dict[str, Any] = {
            **shape,
            "head_dim": 16,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "layer_types": ["linear_attention", "full_attention"],
            # A first token reads what it wrote under a key across its query: nearly nothing, which
            # a smaller epsilon would blow up, rounding and all.
            "rms_norm_eps": 1e-3,
        }
        if family == "qwen3_next":
            config = transformers.Qwen3NextConfig(**hybrid)
            return transformers.Qwen3NextForCausalLM(config).float()
        config = transformers.Qwen3_5MoeTextConfig(**hybrid)
        return transformers.Qwen3_5MoeForCausalLM(config).float()
    if family == "nemotron_h":
        config = transformers.NemotronHConfig(
            **{name: value for name, value in shape.items() if name != "num_hidden_layers"},
            layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
            head_dim=16,
            intermediate_size=48,
            mamba_num_heads=4,
            mamba_head_dim=12,
            n_groups=2,
            ssm_state_size=8,
            chunk_size=8,
            layer_norm_epsilon=1e-3,  # as for delta nets, below
            # transformers takes it for a bound of steps, where the models have none.
            time_step_min=1e-9,
            moe_intermediate_size=16,
            moe_shared_expert_intermediate_size=24,
            moe_latent_size=16,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            pad_token_id=None,
        )
        return transformers.NemotronHForCausalLM(config).float()
    if family == "nemotron":
        config = transformers.NemotronConfig(
            **shape, head_dim=16, intermediate_size=48, pad_token_id=None
        )
        return transformers.NemotronForCausalLM(config).float()
    if family == "minimax_m2":
        config = transformers.MiniMaxM2Config(
            **shape,
            head_dim=16,
            intermediate_size=16,
            num_local_experts=8,
            num_experts_per_tok=2,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        )
        return transformers.MiniMaxM2ForCausalLM(config).float()
    if family == "qwen2_moe":
        config = transformers.Qwen2MoeConfig(
            **shape,
            intermediate_size=48,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=24,
            num_experts=8,
            num_experts_per_tok=2,
            mlp_only_layers=[1],
        )
        return transformers.Qwen2MoeForCausalLM(config).float()
    if family == "gpt_oss":
        rope = {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "truncate": False,
        }
        config = transformers.GptOssConfig(
            **{"intermediate_size": 16, **shape},
            head_dim=16,
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=6,
            max_position_embeddings=64,
            rope_parameters=rope,
        )
        return transformers.GptOssForCausalLM(config).float()
    if family == "llama":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
        config = transformers.LlamaConfig(
            **shape, intermediate_size=48, attention_bias=True, mlp_bias=True, rope_parameters=rope
        )
        return transformers.LlamaForCausalLM(config).float()
    config = transformers.Qwen3Config(**shape, head_dim=16, intermediate_size=48)
    return transformers.Qwen3ForCausalLM(config).float()


def _nested_model(family: str, **more: Any) -> nn.Module:
    """Return a tiny random model that sees, and whose language model is one of `_model`."""
    text = _model("qwen3_moe" if family == "qwen3_vl_moe" else f"{family}_text", **more).config
    fields = text.to_dict()
    fields.pop("model_type")
    vision: dict[str, Any] = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "patch_size": 4,
    }
    torch.manual_seed(11)
    if family == "qwen3_vl_moe":
        # Twice as wide as long, so that the order of an expert's dims shows.
        fields |= {"moe_intermediate_size": 12, "tie_word_embeddings": True}
        fields["rope_parameters"] |= {"mrope_section": [4, 2, 2]}
        vision["deepstack_visual_indexes"] = [0]
        config = transformers.Qwen3VLMoeConfig(text_config=fields, vision_config=vision)
        return transformers.Qwen3VLMoeForConditionalGeneration(config).float()
    if family == "qwen3_5_moe":
        config = transformers.Qwen3_5MoeConfig(text_config=fields, vision_config=vision)
        return transformers.Qwen3_5MoeForConditionalGeneration(config).float()
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 16,
        "projector_input_dim": 16,
        "projector_output_dim": 16,
    }
    config = transformers.Llama4Config(text_config=fields, vision_config=vision)
    return transformers.Llama4ForConditionalGeneration(config).float()


def transpose_experts(folder: Path) -> None:
    """Write a folder's experts as Qwen3-VL is published: an input's row, an output's column."""
    path = folder / "model.safetensors"
    stored = load_file(path)
    for name in stored:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = stored[name].transpose(1, 2).contiguous()
    save_file(stored, path, {"format": "pt"})


def write_ling(source: Path, folder: Path) -> None:
    """Write the GLM-4.5 of `source`, or the Granite, in the names and the fields of Ling.

    Ling 2.0 computes what GLM-4.5 computes, and Ling-lite what Granite with shared experts does,
    as their published modelling files show (inclusionAI/Ling and Ling-V2, models/); transformers
    has no class of theirs.
    """
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    is_first = config["model_type"] == "granitemoeshared"
    stored = load_file(source / "model.safetensors")
    tensors = {}
    for name, tensor in stored.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            continue
        new = name.replace("self_attn.o_proj", "attention.dense")
        if name.endswith("q_proj.weight"):
            parts = [stored[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            new, tensor = (
                name.replace("self_attn.q_proj", "attention.query_key_value"),
                torch.cat(parts),
            )
        for old, own in (
            ("embed_tokens", "word_embeddings"),
            ("self_attn.q_norm", "attention.query_layernorm"),
            ("self_attn.k_norm", "attention.key_layernorm"),
            ("e_score_correction_bias", "expert_bias"),
            ("block_sparse_moe.router.layer", "mlp.gate"),
        ):
            new = new.replace(old, own)
        if "input_linear" in new:
            base = new.replace("block_sparse_moe.input_linear", "mlp.experts.{}")
            base = base.replace("shared_mlp.input_linear", "mlp.shared_experts")
            for index, expert in enumerate(tensor if tensor.dim() == 3 else tensor[None]):
                for part, rows in zip(("gate", "up"), expert.chunk(2), strict=True):
                    part_name = base.format(index).replace(".weight", f".{part}_proj.weight")
                    tensors[part_name] = rows.contiguous()
            continue
        if "output_linear" in new:
            base = new.replace("block_sparse_moe.output_linear", "mlp.experts.{}.down_proj")
            base = base.replace("shared_mlp.output_linear", "mlp.shared_experts.down_proj")
            for index, expert in enumerate(tensor if tensor.dim() == 3 else tensor[None]):
                tensors[base.format(index)] = expert.contiguous()
            continue
        tensors[new] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    kept = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    kept += ("vocab_size", "max_position_embeddings", "rms_norm_eps", "num_experts_per_tok")
    kept += ("initializer_range", "tie_word_embeddings", "hidden_act")
    ling = {name: config[name] for name in kept}
    ling |= {"rope_theta": 10000.0, "rope_scaling": None, "use_bias": False, "use_qkv_bias": False}
    ling |= {"norm_topk_prob": True, "num_shared_experts": 1}
    if is_first:
        ling |= {
            "model_type": "bailing_moe",
            "architectures": ["BailingMoeForCausalLM"],
            "num_experts": config["num_local_experts"],
            "intermediate_size": 48,
            "moe_intermediate_size": config["intermediate_size"],
            "first_k_dense_replace": 0,
        }
    else:
        ling |= {
            "model_type": "bailing_moe_v2",
            "architectures": ["BailingMoeV2ForCausalLM"],
            "head_dim": config["head_dim"],
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
            "num_experts": config["n_routed_experts"],
            "intermediate_size": config["intermediate_size"],
            "moe_intermediate_size": config["moe_intermediate_size"],
            "first_k_dense_replace": config["first_k_dense_replace"],
            "n_group": config["n_group"],
            "topk_group": config["topk_group"],
            "routed_scaling_factor": config["routed_scaling_factor"],
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "num_nextn_predict_layers": 0,
        }
    (folder / "config.json").write_text(json.dumps(ling, indent=2))


def write_model(
    family: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = 2**40,
    **more: Any,
) -> None:
    """Write a model of the family.

    None of its weights is a one or a zero: those would hide one that is left out.
    """
    model = _nested_model(family, **more) if family in NESTED else _model(family, **more)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            nn.init.normal_(parameter, 0.0, 0.2)
        if "conv1d" in name:
            nn.init.normal_(parameter, 0.0, 0.6)
        if name.endswith("mixer.D"):
            nn.init.normal_(parameter)
        if "norm" in name:
            # The norms of these families, but for those of delta nets, add 1 to their weights.
            is_centered = family.removesuffix("_text") in _ZERO_CENTERED_TYPES
            is_centered &= not any(part in name for part in ("linear_attn", "visual"))
            nn.init.uniform_(parameter, 0.5 - is_centered, 1.5 - is_centered)
    for name, bias in model.named_buffers():
        if "correction_bias" in name:
            nn.init.uniform_(bias, -0.2, 0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_bytes)


def write_fused_experts(source: Path, folder: Path) -> None:
    """Write the Qwen3-MoE of `source` with a layer's experts in one tensor, as later files do."""
    (folder / "config.json").write_text((source / "config.json").read_text())
    separate = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in separate.items() if ".experts." not in name}
    base = "model.layers.0.mlp.experts."
    gate, up, down = (
        torch.stack([separate[f"{base}{e}.{part}_proj.weight"] for e in range(8)])
        for part in ("gate", "up", "down")
    )
    fused = {**kept, f"{base}gate_up_proj": torch.cat((gate, up), 1), f"{base}down_proj": down}
    save_file(fused, folder / "model.safetensors", {"format": "pt"})


def write_fp8(source: Path, folder: Path, block: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Write the model of `source` with its matrices in e4m3 and a scale for each block.

    DeepSeek-V3 is published so, without the tensors that it keeps wide: embedding, head, routers.
    The scales lie in a file of their own. Return what the tensors stand for, in fp32.
    """
    folder.mkdir()
    checkpoint = {
        name: tensor
        for file in sorted(source.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    values = {}
    scales = {}
    wide = {}
    for name, tensor in checkpoint.items():
        values[name] = tensor
        wide[name] = tensor.float()
        if tensor.dim() < 2 or name.endswith(
            ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
        ):
            continue
        row_block, column_block = (
            torch.arange(size) // step for size, step in zip(tensor.shape, block, strict=True)
        )
        amax = torch.zeros(int(row_block[-1]) + 1, int(column_block[-1]) + 1)
        for row, strip in zip(row_block, tensor.float().abs(), strict=True):
            amax[row] = amax[row].scatter_reduce(0, column_block, strip, "amax")
        scales[f"{name}_scale_inv"] = amax / 448
        scale = scales[f"{name}_scale_inv"][row_block][:, column_block]
        values[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
        wide[name] = values[name].float() * scale
    file_of_tensor = {}
    for file, tensors in (("values.safetensors", values), ("factors.safetensors", scales)):
        save_file(tensors, folder / file, {"format": "pt"})
        file_of_tensor |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": file_of_tensor})
    )
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": list(block),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return wide
