"""The names that families of Hugging Face checkpoints give to the parameters of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

HF_HEAD = "lm_head.weight"
HF_EMBEDDING = "model.embed_tokens.weight"
_MODEL_PREFIX = "model."
_HEAD_PREFIX = "lm_head."
# Our names of tensors that are kept as they are, and are of no part of the language model.
BESIDE_PREFIX = "beside."


@dataclass(frozen=True, kw_only=True, slots=True)
class NamePattern:
    """The names of one parameter: one for all of it, or one for its gate and one for its up.

    "{}" in a name is the expert's number. A tensor of all experts has our dims in `dim_order`, and
    then dim `merged_dim` and the next merged into one; `unit_dim` puts a dim of size 1 there. With
    `families`, the names are of these families alone, and are tried before those of every family.
    `recurrent` names are those of recurrent layers. Our rows lie key head by key head; with
    `head_parts`, which has letters for the parts of a head, a tensor has those of its own letters,
    each over all heads. With `fused_part`, the tensor has queries, keys and values one after the
    other, and ours is that part of it.
    """

    names: tuple[str, ...]
    dim_order: tuple[int, ...] = ()
    merged_dim: int | None = None
    unit_dim: int | None = None
    families: tuple[str, ...] = ()
    recurrent: bool = False
    head_parts: tuple[str, ...] = ()
    fused_part: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nesting:
    """Where a folder that sees or hears too has its language model: prefixes of its names."""

    model: str
    head: str

    def rename(self, name: str) -> str:
        """Return the name in such a folder of a tensor of a language model alone."""
        if name.startswith(_MODEL_PREFIX):
            return self.model + name.removeprefix(_MODEL_PREFIX)
        return self.head + name.removeprefix(_HEAD_PREFIX)


def _block_patterns(*names: str, recurrent: bool = False) -> tuple[NamePattern, ...]:
    """Return the names of Nemotron-H, whose layers have one block each."""
    return _patterns(*names, families=_NEMOTRON_H, recurrent=recurrent)


def _patterns(
    *names: str, families: tuple[str, ...] = (), recurrent: bool = False
) -> tuple[NamePattern, ...]:
    return tuple(
        NamePattern(names=(name,), families=families, recurrent=recurrent) for name in names
    )


_GPT_OSS = ("gpt_oss",)
_MIXTRAL = ("mixtral", "minimax_m2", "phimoe")
_HUNYUAN = ("hunyuan_v1_moe",)
_HY3 = ("hy_v3",)
_GRANITE = ("granitemoe", "granitemoeshared")
_LLAMA4 = ("llama4_text",)
_QWEN35 = ("qwen3_5_moe_text",)
_QWEN_VL = ("qwen3_vl_moe_text",)
_BAILING = ("bailing_moe", "bailing_moe_v2")
_NEMOTRON_H = ("nemotron_h",)
_V4 = ("deepseek_v4",)
_ONE_SHARED_EXPERT = ("qwen2_moe", "qwen3_next", *_QWEN35)
# Names of the tensors that are of no layer.
TOP_LEVEL_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embedding.weight": HF_EMBEDDING,
        "final_norm.weight": "model.norm.weight",
        "final_norm.bias": "model.norm.bias",
        "head.weight": HF_HEAD,
        "head.bias": "lm_head.bias",
    }
)
# Those of families that name some in a way of their own; of DeepSeek-V4 as transformers writes
# them, then as they are published.
TOP_LEVEL_FAMILY_NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        **{key: {"embedding.weight": ("model.word_embeddings.weight",)} for key in _BAILING},
        "nemotron_h": {
            "embedding.weight": ("backbone.embeddings.weight",),
            "final_norm.weight": ("backbone.norm_f.weight",),
        },
        "deepseek_v4": {
            "embedding.weight": (HF_EMBEDDING, "embed.weight"),
            "final_norm.weight": ("model.norm.weight", "norm.weight"),
            "head.weight": ("head.weight",),
            **{
                f"final_streams.{own}": (f"model.hc_head.hc_{part}", f"hc_head_{part}")
                for own, part in (("weight", "fn"), ("bias", "base"), ("scale", "scale"))
            },
        },
    }
)
# What stands before a layer's number in the names of its tensors, where it is not "model.layers.".
LAYER_PREFIXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"nemotron_h": ("backbone.layers.",), "deepseek_v4": ("model.layers.", "layers.")}
)
NESTINGS = (
    Nesting(model="model.language_model.", head=_HEAD_PREFIX),  # Qwen3-VL, Qwen3.5
    Nesting(model="language_model.model.", head="language_model.lm_head."),  # Llama 4, Kimi K2.5
)
# Names of the tensors of a layer: ours below "layers.N.", theirs below "model.layers.N.".
LAYER_PATTERNS: Mapping[str, tuple[NamePattern, ...]] = MappingProxyType(
    {
        "input_norm.weight": (
            *_block_patterns("norm.weight"),
            *_patterns("attn_norm.weight", families=_V4),
            *_patterns("input_layernorm.weight"),
        ),
        "input_norm.bias": _patterns("input_layernorm.bias"),
        "post_norm.weight": (
            *_block_patterns("norm.weight"),
            *_patterns("ffn_norm.weight", families=_V4),
            *_patterns("post_attention_layernorm.weight"),
        ),
        "post_norm.bias": _patterns("post_attention_layernorm.bias"),
        **{
            f"attention.{part}.{kind}": (
                NamePattern(
                    names=(f"attention.query_key_value.{kind}",),
                    families=_BAILING,
                    fused_part=part,
                ),
                *_block_patterns(f"mixer.{part}_proj.{kind}"),
                *_patterns(f"self_attn.{part}_proj.{kind}"),
            )
            for part in "qkv"
            for kind in ("weight", "bias")
        },
        "attention.o.weight": (
            *_patterns("attention.dense.weight", families=_BAILING),
            *_patterns("attn.wo_b.weight", families=_V4),
            *_block_patterns("mixer.o_proj.weight"),
            *_patterns("self_attn.o_proj.weight"),
            *_block_patterns("mixer.out_proj.weight", recurrent=True),
            *_patterns("linear_attn.out_proj.weight", recurrent=True),
        ),
        "attention.zxbcdt.weight": (
            NamePattern(
                names=("mixer.in_proj.weight",),
                families=_NEMOTRON_H,
                recurrent=True,
                head_parts=("zvkqa",),
            ),
        ),
        "attention.qkvz.weight": (
            NamePattern(
                names=("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"),
                families=_QWEN35,
                recurrent=True,
                head_parts=("qkv", "z"),
            ),
            *_patterns("linear_attn.in_proj_qkvz.weight", recurrent=True),
        ),
        "attention.rates.weight": (
            NamePattern(
                names=("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"),
                families=_QWEN35,
                recurrent=True,
                head_parts=("b", "a"),
            ),
            *_patterns("linear_attn.in_proj_ba.weight", recurrent=True),
        ),
        "attention.conv.weight": (
            NamePattern(
                names=("mixer.conv1d.weight",),
                families=_NEMOTRON_H,
                unit_dim=1,
                recurrent=True,
                head_parts=("vkq",),
            ),
            NamePattern(
                names=("linear_attn.conv1d.weight",),
                unit_dim=1,
                recurrent=True,
                head_parts=("qkv",),
            ),
        ),
        "attention.conv.bias": (
            NamePattern(
                names=("mixer.conv1d.bias",),
                families=_NEMOTRON_H,
                recurrent=True,
                head_parts=("vkq",),
            ),
        ),
        **{
            f"attention.{part}": (
                *_block_patterns(f"mixer.{part}", recurrent=True),
                *_patterns(f"linear_attn.{part}", recurrent=True),
            )
            for part in ("dt_bias", "A_log", "D", "norm.weight")
        },
        "attention.o.bias": (
            *_patterns("attention.dense.bias", families=_BAILING),
            *_patterns("self_attn.o_proj.bias"),
        ),
        "attention.q_down.weight": (
            *_patterns("attn.wq_a.weight", families=_V4),
            *_patterns("self_attn.q_a_proj.weight"),
        ),
        "attention.q_down_norm.weight": (
            *_patterns("attn.q_norm.weight", families=_V4),
            *_patterns("self_attn.q_a_layernorm.weight"),
        ),
        "attention.q_up.weight": (
            *_patterns("attn.wq_b.weight", families=_V4),
            *_patterns("self_attn.q_b_proj.weight"),
        ),
        "attention.kv.weight": _patterns("attn.wkv.weight", families=_V4),
        "attention.o_down.weight": _patterns("attn.wo_a.weight", families=_V4),
        **{
            f"attention.{own}{part}": _patterns(f"attn.{prefix}compressor.{name}", families=_V4)
            for own, prefix in (("compress_", ""), ("indexer.", "indexer."))
            for part, name in (
                ("kv.weight", "wkv.weight"),
                ("gate.weight", "wgate.weight"),
                ("position", "ape"),
                ("norm.weight", "norm.weight"),
            )
        },
        **{
            f"{own}_streams.{part}": _patterns(f"hc_{block}_{name}", families=_V4)
            for own, block in (("attention", "attn"), ("mlp", "ffn"))
            for part, name in (("weight", "fn"), ("bias", "base"), ("scale", "scale"))
        },
        "attention.kv_down.weight": _patterns("self_attn.kv_a_proj_with_mqa.weight"),
        "attention.kv_norm.weight": (
            *_patterns("attn.norm.weight", "attn.kv_norm.weight", families=_V4),
            *_patterns("self_attn.kv_a_layernorm.weight"),
        ),
        "attention.kv_up.weight": _patterns("self_attn.kv_b_proj.weight"),
        "attention.indexer.q.weight": (
            *_patterns("attn.indexer.wq_b.weight", families=_V4),
            *_patterns("self_attn.indexer.wq_b.weight"),
        ),
        "attention.indexer.k.weight": _patterns("self_attn.indexer.wk.weight"),
        "attention.indexer.k_norm.weight": _patterns("self_attn.indexer.k_norm.weight"),
        "attention.indexer.k_norm.bias": _patterns("self_attn.indexer.k_norm.bias"),
        "attention.indexer.heads.weight": (
            *_patterns("attn.indexer.weights_proj.weight", families=_V4),
            *_patterns("self_attn.indexer.weights_proj.weight"),
        ),
        "attention.q_norm.weight": (
            *_patterns("self_attn.query_layernorm.weight", families=_HUNYUAN),
            *_patterns("attention.query_layernorm.weight", families=_BAILING),
            *_patterns("self_attn.q_norm.weight"),
        ),
        "attention.k_norm.weight": (
            *_patterns("self_attn.key_layernorm.weight", families=_HUNYUAN),
            *_patterns("attention.key_layernorm.weight", families=_BAILING),
            *_patterns("self_attn.k_norm.weight"),
        ),
        "attention.sinks": (
            *_patterns("attn.attn_sink", families=_V4),
            *_patterns("self_attn.sinks"),
        ),
        "mlp.gate_up.weight": (
            NamePattern(
                names=("feed_forward.gate_proj.weight", "feed_forward.up_proj.weight"),
                families=_LLAMA4,
            ),
            NamePattern(names=("mlp.gate_proj.weight", "mlp.up_proj.weight")),
        ),
        "mlp.gate_up.bias": (NamePattern(names=("mlp.gate_proj.bias", "mlp.up_proj.bias")),),
        "mlp.down.weight": (
            *_patterns("feed_forward.down_proj.weight", families=_LLAMA4),
            *_block_patterns("mixer.down_proj.weight"),
            *_patterns("mlp.down_proj.weight"),
        ),
        "mlp.down.bias": (
            *_block_patterns("mixer.down_proj.bias"),
            *_patterns("mlp.down_proj.bias"),
        ),
        **{
            f"mlp.up.{kind}": (
                *_block_patterns(f"mixer.up_proj.{kind}"),
                *_patterns(f"mlp.up_proj.{kind}"),
            )
            for kind in ("weight", "bias")
        },
        "moe.router.weight": (
            NamePattern(names=("block_sparse_moe.gate.weight",), families=_MIXTRAL),
            NamePattern(names=("mlp.router.weight",), families=_GPT_OSS),
            *_patterns("ffn.gate.weight", families=_V4),
            *_patterns("mlp.gate.wg.weight", families=_HUNYUAN),
            *_patterns("mlp.router.gate.weight", families=_HY3),
            *_patterns("block_sparse_moe.router.layer.weight", families=_GRANITE),
            *_patterns("feed_forward.router.weight", families=_LLAMA4),
            *_block_patterns("mixer.gate.weight"),
            *_patterns("mlp.gate.weight"),
        ),
        "moe.router.bias": _patterns("mlp.router.bias"),
        "moe.router.expert_table": _patterns("ffn.gate.tid2eid", families=_V4),
        "moe.router.selection_bias": (
            NamePattern(
                names=("block_sparse_moe.e_score_correction_bias",), families=("minimax_m2",)
            ),
            NamePattern(
                names=("mlp.moe_statics.e_score_correction_bias",),
                unit_dim=0,
                families=("ernie4_5_moe",),
            ),
            *_patterns("ffn.gate.bias", families=_V4),
            *_patterns("mlp.gate.expert_bias", families=_BAILING),
            *_block_patterns("mixer.gate.e_score_correction_bias"),
            *_patterns("mlp.expert_bias", families=_HY3),
            *_patterns("mlp.gate.e_score_correction_bias"),
        ),
        "moe.latent.down.weight": _block_patterns("mixer.fc1_latent_proj.weight"),
        "moe.latent.up.weight": _block_patterns("mixer.fc2_latent_proj.weight"),
        "moe.shared.up.weight": _block_patterns("mixer.shared_experts.up_proj.weight"),
        "moe.shared.gate_up.weight": (
            NamePattern(
                names=("ffn.shared_experts.w1.weight", "ffn.shared_experts.w3.weight"),
                families=_V4,
            ),
            NamePattern(
                names=("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
                families=_ONE_SHARED_EXPERT,
            ),
            NamePattern(
                names=("mlp.shared_mlp.gate_proj.weight", "mlp.shared_mlp.up_proj.weight"),
                families=(*_HUNYUAN, *_HY3),
            ),
            NamePattern(names=("shared_mlp.input_linear.weight",), merged_dim=0, families=_GRANITE),
            NamePattern(
                names=(
                    "feed_forward.shared_expert.gate_proj.weight",
                    "feed_forward.shared_expert.up_proj.weight",
                ),
                families=_LLAMA4,
            ),
            NamePattern(
                names=("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight")
            ),
        ),
        "moe.shared.down.weight": (
            *_patterns("ffn.shared_experts.w2.weight", families=_V4),
            *_patterns("mlp.shared_expert.down_proj.weight", families=_ONE_SHARED_EXPERT),
            *_patterns("mlp.shared_mlp.down_proj.weight", families=(*_HUNYUAN, *_HY3)),
            *_patterns("shared_mlp.output_linear.weight", families=_GRANITE),
            *_patterns("feed_forward.shared_expert.down_proj.weight", families=_LLAMA4),
            *_block_patterns("mixer.shared_experts.down_proj.weight"),
            *_patterns("mlp.shared_experts.down_proj.weight"),
        ),
        "moe.shared.gate.weight": _patterns("mlp.shared_expert_gate.weight"),
        "moe.experts.gate_up.weight": (
            NamePattern(
                names=("ffn.experts.{}.w1.weight", "ffn.experts.{}.w3.weight"), families=_V4
            ),
            NamePattern(
                names=(
                    "block_sparse_moe.experts.{}.w1.weight",
                    "block_sparse_moe.experts.{}.w3.weight",
                ),
                families=_MIXTRAL,
            ),
            # gate and up take turns in the columns
            NamePattern(
                names=("mlp.experts.gate_up_proj",),
                dim_order=(0, 3, 2, 1),
                merged_dim=2,
                families=_GPT_OSS,
            ),
            NamePattern(
                names=("block_sparse_moe.input_linear.weight",),
                dim_order=(0, 1, 2, 3),
                merged_dim=1,
                families=_GRANITE,
            ),
            # columns are gate and up, one after the other
            NamePattern(
                names=("feed_forward.experts.gate_up_proj",),
                dim_order=(0, 3, 1, 2),
                merged_dim=2,
                families=_LLAMA4,
            ),
            # as published; transformers writes those that it made itself in the usual order
            NamePattern(
                names=("mlp.experts.gate_up_proj",),
                dim_order=(0, 3, 1, 2),
                merged_dim=2,
                families=_QWEN_VL,
            ),
            NamePattern(names=("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight")),
            NamePattern(names=("mlp.experts.gate_up_proj",), dim_order=(0, 1, 2, 3), merged_dim=1),
        ),
        "moe.experts.up.weight": _block_patterns("mixer.experts.{}.up_proj.weight"),
        "moe.experts.down.weight": (
            *_patterns("ffn.experts.{}.w2.weight", families=_V4),
            *_block_patterns("mixer.experts.{}.down_proj.weight"),
            NamePattern(names=("block_sparse_moe.experts.{}.w2.weight",), families=_MIXTRAL),
            NamePattern(names=("mlp.experts.down_proj",), dim_order=(0, 2, 1), families=_GPT_OSS),
            *_patterns("block_sparse_moe.output_linear.weight", families=_GRANITE),
            NamePattern(
                names=("feed_forward.experts.down_proj",), dim_order=(0, 2, 1), families=_LLAMA4
            ),
            NamePattern(names=("mlp.experts.down_proj",), dim_order=(0, 2, 1), families=_QWEN_VL),
            NamePattern(names=("mlp.experts.{}.down_proj.weight",)),
            NamePattern(names=("mlp.experts.down_proj",)),
        ),
        "moe.experts.gate_up.bias": (
            NamePattern(
                names=("mlp.experts.gate_up_proj_bias",),
                dim_order=(0, 2, 1),
                merged_dim=1,
                families=_GPT_OSS,
            ),
        ),
        "moe.experts.down.bias": _patterns("mlp.experts.down_proj_bias"),
    }
)
# Names of the tensors of an MTP depth besides its layer; Hugging Face has it as one more layer.
MTP_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embed_norm.weight": "enorm.weight",
        "hidden_norm.weight": "hnorm.weight",
        "proj.weight": "eh_proj.weight",
        "embed_proj.weight": "e_proj.weight",
        "hidden_proj.weight": "h_proj.weight",
        **{
            f"final_streams.{own}": f"hc_head_{part}"
            for own, part in (("weight", "fn"), ("bias", "base"), ("scale", "scale"))
        },
        "final_norm.weight": "shared_head.norm.weight",
    }
)
# What families call the last norm of a depth otherwise.
MTP_FINAL_NORMS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys((*_BAILING, *_NEMOTRON_H), "final_layernorm.weight"),
        "deepseek_v4": "norm.weight",
    }
)
# What stands before the blocks of MTP depths, where these are numbered by themselves, and how many
# blocks a depth is: attention and what follows it may be one of their own.
MTP_BLOCKS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {"nemotron_h": ("mtp.layers.", 2), "deepseek_v4": ("mtp.", 1)}
)
# Names of tensors of an MTP depth that are copies of tensors of ours.
MTP_DUPLICATES: Mapping[str, str] = MappingProxyType(
    {"embed_tokens.weight": "embedding.weight", "shared_head.head.weight": "head.weight"}
)
# What transformers' modules are called where files of a family have other names: parts of names.
MODULE_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "deepseek_v4": {
            ".attn.": ".self_attn.",
            ".ffn.": ".mlp.",
            ".wq_a": ".q_a_proj",
            ".wq_b": ".q_b_proj",
            ".wkv": ".kv_proj",
            ".wgate": ".gate_proj",
            ".wo_b": ".o_b_proj",
            ".shared_experts.w1": ".shared_experts.gate_proj",
            ".shared_experts.w2": ".shared_experts.down_proj",
            ".shared_experts.w3": ".shared_experts.up_proj",
        }
    }
)
# The parameters of transformers' modules, by patterns of linears in its files, that are of no
# linear's module there; PEFT knows those of older families by itself.
MODULE_PARAMETERS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "deepseek_v4": {
            r"(.*\.mlp\.gate)": r"\1.weight",
            r"(.*\.experts)\.\d+\.w[13]": r"\1.gate_up_proj",
            r"(.*\.experts)\.\d+\.w2": r"\1.down_proj",
        }
    }
)
