"""DeepSeek-V2 to V3.2 and Kimi K2: latent attention, and routers that choose from groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moewright.families.attention import IndexerFields, UniformLayers, latent_attention
from moewright.families.decoder import Decoder, mtp_depths
from moewright.families.draft import Draft, Part
from moewright.families.experts import (
    SIGMOID,
    DenseFirst,
    ExpertGroups,
    Experts,
    Renormalize,
    SharedExpertCount,
    expert_count,
    expert_width,
    moe_of,
    scaling_factor,
    top_k,
)
from moewright.families.fields import FieldReader
from moewright.families.keys import Fixed, Neutral, OneWord
from moewright.families.record import Family
from moewright.families.tiny import INDEXER, LATENT, YARN
from moewright.spec.model import ModelSpec, ScoreFunction


@dataclass(frozen=True, kw_only=True, slots=True)
class TopkMethod:
    """DeepSeek-V2's choice: from all experts, or from the groups with the highest experts."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the method; the number of groups is read in both."""
        methods = ("greedy", "group_limited_greedy")
        method = fields.choice("topk_method", choices=methods, default="greedy")
        # V2 rates a group by its highest expert; 0 rates none.
        draft["moe.router.group_scores"] = int(method == "group_limited_greedy")

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the method."""
        router = moe_of(model).router
        is_grouped = router.groups > 1 or router.top_groups > 1
        config["topk_method"] = "group_limited_greedy" if is_grouped else "greedy"


def deepseek_v3_experts(*, layers: DenseFirst | None = None, names_method: bool = True) -> Experts:
    """Build DeepSeek-V3's experts: sigmoid scores, and a group scores its two highest experts.

    `names_method` families say so in their config.json; in the others it goes without saying.
    """
    return Experts(
        parts=(
            OneWord(names=("topk_method",), word="noaux_tc", is_written=names_method),
            OneWord(names=("scoring_func",), word="sigmoid", is_written=names_method),
            Fixed(
                values={
                    **SIGMOID,
                    "moe.router.group_scores": 2,
                    "moe.router.selection_bias": True,
                }
            ),
            Renormalize(default=True, is_softmax=False),
            *_grouped_experts(layers or DenseFirst(every=True)),
        )
    )


def _grouped_experts(layers: DenseFirst) -> tuple[Part, ...]:
    return (
        expert_count("n_routed_experts"),
        top_k(),
        ExpertGroups(),
        expert_width(),
        scaling_factor(),
        SharedExpertCount(names=("n_shared_experts",)),
        layers,
    )


DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    config=Decoder(
        attention=latent_attention(),
        experts=Experts(
            parts=(
                TopkMethod(),
                OneWord(names=("scoring_func",), word="softmax", is_written=True),
                Fixed(
                    values={
                        "moe.router.score": ScoreFunction.SOFTMAX,
                        "moe.router.renormalize": False,
                        "moe.router.pre_softmax": True,
                    }
                ),
                # DeepSeek's code then leaves out the factor, transformers' class never divides.
                Neutral(
                    names=("norm_topk_prob",),
                    allowed=(False,),
                    constants={"norm_topk_prob": False},
                ),
                *_grouped_experts(DenseFirst(every=True)),
            )
        ),
        mtp=mtp_depths(),
    ),
    tiny={**LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
)
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    config=Decoder(attention=latent_attention(), experts=deepseek_v3_experts(), mtp=mtp_depths()),
    tiny={
        **LATENT,
        "q_lora_rank": 24,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
)
KIMI_K2 = Family(
    model_type="kimi_k2",
    architecture="DeepseekV3ForCausalLM",
    nested_in=("kimi_k25",),
    config=DEEPSEEK_V3.config,
)
DEEPSEEK_V32 = Family(
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    config=Decoder(
        attention=latent_attention(
            IndexerFields(),
            layers=(UniformLayers(word="indexed_attention"),),
            interleaved_written=False,
        ),
        experts=deepseek_v3_experts(),
        mtp=mtp_depths(),
    ),
    tiny={
        **LATENT,
        **INDEXER,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
)
