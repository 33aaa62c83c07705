"""Hunyuan-A13B and Hy3 of Tencent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moewright.families.attention import HeadDim, QkNormSwitch, grouped_query
from moewright.families.decoder import Decoder, mtp_depths
from moewright.families.draft import Draft
from moewright.families.experts import (
    SIGMOID,
    AllLayers,
    DenseFirst,
    Experts,
    Renormalize,
    SharedExpertCount,
    expert_count,
    expert_width,
    moe_of,
    scaling_factor,
    top_k,
    whole_shared_experts,
)
from moewright.families.fields import MAX_EXPERTS, MAX_FFN, FieldReader
from moewright.families.keys import Fixed, Ignored, Neutral, Whole
from moewright.families.record import Family
from moewright.families.rope import Rope
from moewright.families.tiny import EIGHT_EXPERTS
from moewright.families.weight_names import WeightNames, shared_mlp, whole
from moewright.spec.model import ModelSpec, QkNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class _HunyuanExperts:
    """Hunyuan's numbers of experts, which may be given for each layer the same."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the experts per token, the shared experts and the width of one."""
        layers = draft["layers"]
        experts = draft["moe.experts"]
        chosen = _read_alike(fields, "moe_topk", layers, "num_experts_per_tok")
        if not 1 <= chosen <= experts:
            raise fields.refusal("moe_topk", f"must be in 1..{experts}", str(experts))
        shared = 0
        if fields.boolean("use_mixed_mlp_moe", default=True):
            shared = _read_alike(fields, "num_shared_expert", layers, default=1)
        dense = fields.integer("intermediate_size", low=1, high=MAX_FFN)
        width = _read_alike(fields, "moe_intermediate_size", layers, default=dense)
        if not width:
            raise fields.refusal("moe_intermediate_size", "must be above 0", "1")
        draft["moe.router.top_k"] = chosen
        draft["moe.ffn_size"] = width
        draft["moe.shared_ffn_size"] = shared * width

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add each number once; the width stands where others have that of dense MLPs."""
        moe = moe_of(model)
        config |= {
            "moe_topk": moe.router.top_k,
            "use_mixed_mlp_moe": moe.shared_ffn_size > 0,
            # The switch turns them off, and not a number of 0.
            "num_shared_expert": max(1, whole_shared_experts(moe)),
        }


def _read_alike(
    fields: FieldReader, name: str, layers: int, *spellings: str, default: int | None = None
) -> int:
    """Read a whole number that may be given once, or for each layer the same."""
    value: Any = fields.raw_value(name)
    if not isinstance(value, list):
        return fields.integer(name, *spellings, low=0, high=MAX_FFN, default=default)
    fields.ignore(name)
    is_number = bool(value) and isinstance(value[0], int) and not isinstance(value[0], bool)
    if not is_number or value != [value[0]] * layers or not 0 <= value[0] <= MAX_FFN:
        raise fields.refusal(name, f"must be the same whole number for each of {layers} layers")
    return int(value[0])


HUNYUAN = Family(
    weights=WeightNames(
        layers={
            "attention.q_norm.weight": whole("self_attn.query_layernorm.weight"),
            "attention.k_norm.weight": whole("self_attn.key_layernorm.weight"),
            "moe.router.weight": whole("mlp.gate.wg.weight"),
            **shared_mlp("mlp.shared_mlp"),
        }
    ),
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    config=Decoder(
        attention=grouped_query(
            head_dim=HeadDim(names=("head_dim", "attention_head_dim")),
            qk_norm=QkNormSwitch(norm=QkNorm.PER_HEAD_ROTATED, default=True),
            rope=Rope(more_types=("dynamic",)),
        ),
        experts=Experts(
            parts=(
                Whole(
                    names=("num_experts", "num_local_experts"),
                    says="moe.experts",
                    high=MAX_EXPERTS,
                ),
                _HunyuanExperts(),
                Neutral(names=("moe_layer_num_skipped",), allowed=(0,)),
                # Attention over keys of an earlier layer is not modelled.
                Neutral(names=("use_cla",), allowed=(False,)),
                Ignored(
                    names=(
                        "use_rotary_pos_emb",
                        "moe_random_routing_dropped_token",
                        "norm_type",
                        "attention_head_dim",
                        "cla_share_factor",
                        "sep_token_id",
                        "eod_token_id",
                    )
                ),
                Renormalize(default=True),
                AllLayers(),
            )
        ),
    ),
    tiny={
        "head_dim": 16,
        "intermediate_size": 16,
        "num_experts": 8,
        "moe_topk": 2,
        "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "dynamic",
            "type": "dynamic",
            "rope_theta": 10000.0,
            "alpha": 1000.0,
            "factor": 1.0,
        },
    },
)
_HY3_WEIGHTS = WeightNames(
    layers={
        "moe.router.weight": whole("mlp.router.gate.weight"),
        "moe.router.selection_bias": whole("mlp.expert_bias"),
        **shared_mlp("mlp.shared_mlp"),
    }
)
HY3 = Family(
    model_type="hy_v3",
    architecture="HYV3ForCausalLM",
    config=Decoder(
        attention=grouped_query(head_dim=HeadDim(default=128), qk_norm=QkNorm.PER_HEAD),
        experts=Experts(
            parts=(
                expert_count("num_experts"),
                top_k(),
                Neutral(
                    names=(
                        "moe_router_use_sigmoid",
                        "moe_router_enable_expert_bias",
                        "route_norm",
                        "qk_norm",
                    ),
                    allowed=(True,),
                ),
                Ignored(
                    names=(
                        "enable_moe_fp32_combine",  # sums and scores are of fp32 here in any case
                        "enable_attention_fp32_softmax",
                        "enable_lm_head_fp32",
                        "use_grouped_mm",
                    )
                ),
                expert_width("moe_intermediate_size", "expert_hidden_dim"),
                SharedExpertCount(names=("num_shared_experts",), default=1),
                Fixed(values={**SIGMOID, "moe.router.selection_bias": True}),
                scaling_factor("router_scaling_factor"),
                DenseFirst(default=1, first=False, words=True),
            )
        ),
        mtp=mtp_depths(),
    ),
    weights=_HY3_WEIGHTS,
    tiny={
        **EIGHT_EXPERTS,
        "head_dim": 16,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_shared_experts": 1,
        "router_scaling_factor": 2.5,
    },
)
