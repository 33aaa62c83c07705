"""Ling and Ring of inclusionAI, whose code goes with their checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moewright.families.attention import QkNormSwitch, grouped_query
from moewright.families.decoder import Decoder, mtp_depths
from moewright.families.draft import Draft
from moewright.families.experts import (
    DenseFirst,
    ExpertGroups,
    Experts,
    WideSharedExperts,
    expert_count,
    expert_width,
    moe_of,
    scaling_factor,
    top_k,
)
from moewright.families.fields import FieldReader
from moewright.families.keys import Ignored, Neutral, Switch, Written
from moewright.families.record import Family
from moewright.families.rope import Rope
from moewright.families.weight_names import NamePattern, WeightNames, whole
from moewright.spec.model import ModelSpec, QkNorm, ScoreFunction

_WORDS = ("softmax", "sigmoid")


@dataclass(frozen=True, kw_only=True, slots=True)
class _BailingRouter:
    """The router of Ling and Ring: softmax at first, sigmoid with a bias since version 2.

    A checkpoint of version 2 may have the model type of the first, and the class of its own.
    """

    is_second: bool

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the scores; groups go with sigmoid alone."""
        is_sigmoid = self.is_second
        is_sigmoid |= "BailingMoeV2ForCausalLM" in (fields.raw_value("architectures") or ())
        word = fields.choice("score_function", choices=_WORDS, default=_WORDS[is_sigmoid])
        is_sigmoid = word == "sigmoid"
        has_bias = fields.boolean("moe_router_enable_expert_bias", default=is_sigmoid)
        renormalize = fields.boolean("norm_topk_prob", default=True)
        draft["moe.router.score"] = ScoreFunction(word)
        draft["moe.router.renormalize"] = renormalize
        draft["moe.router.pre_softmax"] = not is_sigmoid and not renormalize
        draft["moe.router.selection_bias"] = is_sigmoid and has_bias
        # DeepSeek-V3's rating of groups, by their two highest; softmax rates none.
        draft["moe.router.group_scores"] = 2 * is_sigmoid
        if is_sigmoid:
            ExpertGroups().read(fields, draft)

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the scores, where they are not softmax of the first version."""
        router = moe_of(model).router
        config["norm_topk_prob"] = router.renormalize
        if self.is_second or router.score is not ScoreFunction.SOFTMAX:
            config["score_function"] = router.score.value
            config["moe_router_enable_expert_bias"] = router.selection_bias
            ExpertGroups().write(model, config)


def _bailing(*, is_second: bool) -> Decoder:
    written = Written.ALWAYS if is_second else Written.CHANGED
    return Decoder(
        attention=grouped_query(
            biases=(
                Switch(names=("use_qkv_bias",), says="attention.qkv_bias", default=False),
                Switch(names=("use_bias",), says="attention.out_bias", default=False),
            ),
            qk_norm=QkNormSwitch(norm=QkNorm.PER_HEAD, default=is_second),
            rope=Rope(share=1.0, has_share_width=True),
        ),
        experts=Experts(
            parts=(
                expert_count("num_experts"),
                top_k(),
                _BailingRouter(is_second=is_second),
                Ignored(
                    names=("moe_router_enable_shared_expert", "use_rmsnorm", "max_window_layers")
                ),
                Neutral(names=("norm_head", "norm_softmax", "multi_gate"), allowed=(False,)),
                scaling_factor(written=written),
                expert_width(),
                WideSharedExperts(name="num_shared_experts", default=0, width_is_routed=True),
                DenseFirst(),
            )
        ),
        mtp=mtp_depths(written),
    )


_WEIGHTS = WeightNames(
    layers={
        **{
            f"attention.{part}.{kind}": (
                NamePattern(names=(f"attention.query_key_value.{kind}",), fused_part=part),
            )
            for part in "qkv"
            for kind in ("weight", "bias")
        },
        "attention.o.weight": whole("attention.dense.weight"),
        "attention.o.bias": whole("attention.dense.bias"),
        "attention.q_norm.weight": whole("attention.query_layernorm.weight"),
        "attention.k_norm.weight": whole("attention.key_layernorm.weight"),
        "moe.router.selection_bias": whole("mlp.gate.expert_bias"),
    },
    top_level={"embedding.weight": ("model.word_embeddings.weight",)},
    mtp_final_norm="final_layernorm.weight",
)
LING = Family(
    model_type="bailing_moe",
    architecture="BailingMoeForCausalLM",
    config=_bailing(is_second=False),
    weights=_WEIGHTS,
)
LING2 = Family(
    model_type="bailing_moe_v2",
    architecture="BailingMoeV2ForCausalLM",
    config=_bailing(is_second=True),
    weights=_WEIGHTS,
)
