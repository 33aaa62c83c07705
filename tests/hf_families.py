"""Tiny random models of transformers, one of each family, and the folders that hold them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from moewright.families import table
from moewright.families.tiny import TINY

transformers = pytest.importorskip("transformers")

FAMILIES = tuple(name for name, record in table.FAMILIES.items() if record.tiny)
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
    """Return a tiny random model with wide weights."""
    record = table.FAMILIES[family]
    model_class = getattr(transformers, record.architecture)
    torch.manual_seed(7)
    config = model_class.config_class(
        **{**TINY, "attn_implementation": "eager", **record.tiny, **more}
    )
    model: nn.Module = model_class(config).float()
    return model


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
        if name.endswith(("bias", "sinks", "hc.base", "hc_base")):
            nn.init.normal_(parameter, 0.0, 0.2)
        if name.endswith(("hc.scale", "hc_scale")):
            nn.init.uniform_(parameter, 0.5, 1.5)
        if not parameter.any():  # routers of AFMoE start at zero
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
        if "tid2eid" in name:
            bias.copy_(torch.rand(len(bias), 8).topk(bias.shape[1]).indices)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_bytes)


def save_gradients(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """Return the gradients of a model in the names that transformers gives to its files."""
    holder = copy.deepcopy(model)
    with torch.no_grad():
        for own, parameter in zip(holder.parameters(), model.parameters(), strict=True):
            own.copy_(torch.zeros_like(own) if parameter.grad is None else parameter.grad)
    holder.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


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


def write_published_v4(source: Path, folder: Path, block: int) -> None:
    """Write the DeepSeek-V4 of `source` as it is published, with tensors of its MTP depth beside.

    Names have no prefix; projections of attention and shared experts are of e4m3 with a power of
    two for blocks of `block` rows and columns, experts of two values of 4 bits a byte with one for
    32 of a row. That is what deepseek-ai's inference/convert.py and vLLM's loader read.
    """
    folder.mkdir()
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        own = name.removeprefix("model.").replace("embed_tokens", "embed")
        own = own.replace("hc_head.hc_", "hc_head_").replace(".attn.norm.", ".attn.kv_norm.")
        stem = own.removesuffix(".weight")
        if ".ffn.experts." in own:
            values, powers = _quantize_rows(tensor.float())
            tensors |= {own: values, f"{stem}.scale": powers}
        elif stem.endswith((".wq_a", ".wq_b", "attn.wkv", ".wo_a", ".wo_b", ".w1", ".w2", ".w3")):
            blocks = tensor.float().unflatten(0, (-1, block)).unflatten(2, (-1, block))
            powers = (blocks.abs().amax((1, 3)) / 448).log2().ceil().exp2()
            values = (blocks / powers[:, None, :, None]).flatten(2).flatten(0, 1)
            tensors[own] = values.to(torch.float8_e4m3fn)
            tensors[f"{stem}.scale"] = powers.to(torch.float8_e8m0fnu)
        else:
            tensors[own] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config |= {
        "expert_dtype": "fp4",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [block, block],
        },
    }
    (folder / "config.json").write_text(json.dumps(config))


def _quantize_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes [N,K/2] of values of 4 bits, the first in the lower half, and powers."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    blocks = matrix.unflatten(1, (-1, 32))
    powers = (blocks.abs().amax(2) / 6).log2().ceil().exp2()
    scaled = blocks / powers[..., None]
    codes = (scaled.abs()[..., None] - table).abs().argmin(-1) + 8 * (scaled < 0)
    low, high = codes.flatten(1).unflatten(1, (-1, 2)).unbind(2)
    packed = (low + 16 * high).to(torch.uint8).view(torch.int8)
    return packed, powers.to(torch.float8_e8m0fnu)
