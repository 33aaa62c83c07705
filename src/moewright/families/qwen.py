"""Qwen 2 and 3, dense and with experts, and the language model of Qwen3-VL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moewright.families.attention import HeadDim, Window, grouped_query
from moewright.families.decoder import Decoder
from moewright.families.draft import Draft
from moewright.families.experts import (
    Experts,
    Renormalize,
    expert_count,
    expert_width,
    moe_of,
    require_layers,
    top_k,
)
from moewright.families.fields import MAX_FFN, MAX_LAYERS, FieldReader
from moewright.families.keys import Written
from moewright.families.record import Family, UpcycledForms
from moewright.families.rope import Rope
from moewright.families.tiny import EIGHT_EXPERTS
from moewright.families.weight_names import NamePattern, WeightNames, shared_mlp
from moewright.spec.model import ModelSpec, QkNorm

WINDOW = Window(needs_types=True, writes_switch=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class QkvBias:
    """The switch of Qwen 2 for biases of q, k and v; the output never has one."""

    written: Written = Written.ALWAYS

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the switch; that of other families would mean the output too."""
        if fields.boolean("attention_bias", default=False):
            rule = f"{draft.family} has biases on q, k and v only"
            raise fields.refusal("attention_bias", rule, "false")
        draft["attention.qkv_bias"] = fields.boolean("qkv_bias", default=True)

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the switch."""
        bias = model.attention.qkv_bias
        if self.written is Written.ALWAYS or not bias:
            config["qkv_bias"] = bias


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseStep:
    """Experts in every n-th layer, counted from 1, except the listed ones (Qwen)."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the step and the list."""
        layers = draft["layers"]
        step = fields.integer("decoder_sparse_step", low=1, high=MAX_LAYERS, default=1)
        dense = fields.sequence("mlp_only_layers", max_length=MAX_LAYERS) or ()
        require_layers(fields, "mlp_only_layers", dense, layers, "[]")
        draft["moe_layers"] = tuple(
            layer not in dense and (layer + 1) % step == 0 for layer in range(layers)
        )

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the dense layers as a list."""
        dense = [layer for layer, is_moe in enumerate(model.moe_layers) if not is_moe]
        # With a step of 1 the list alone says which layers are dense, whatever their pattern.
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedSharedExpert:
    """Qwen's shared expert, of a width of its own and with a gate; a width of 0 is none."""

    written: Written = Written.ALWAYS

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the width."""
        name = "shared_expert_intermediate_size"
        width = fields.integer(name, low=0, high=MAX_FFN, default=0)
        draft["moe.shared_ffn_size"] = width
        draft["moe.shared_gate"] = bool(width)

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the width."""
        width = moe_of(model).shared_ffn_size
        if width or self.written is Written.ALWAYS:
            config["shared_expert_intermediate_size"] = width


def qwen_experts(*, renormalizes: bool = False, shared: Written = Written.ALWAYS) -> Experts:
    """Build the experts of Qwen; `renormalizes` holds where the config does not say."""
    return Experts(
        parts=(
            expert_count("num_experts"),
            top_k(),
            SparseStep(),
            GatedSharedExpert(written=shared),
            Renormalize(default=renormalizes),
            expert_width(),
        )
    )


QWEN2 = Family(
    model_type="qwen2",
    upcycled=UpcycledForms(in_all_layers="qwen2_moe", in_some_layers="qwen2_moe"),
    architecture="Qwen2ForCausalLM",
    config=Decoder(
        attention=grouped_query(window=WINDOW, biases=(QkvBias(written=Written.CHANGED),))
    ),
)
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    config=Decoder(
        attention=grouped_query(window=WINDOW, biases=(QkvBias(),)), experts=qwen_experts()
    ),
    weights=WeightNames(layers=shared_mlp("mlp.shared_expert")),
    tiny={
        **EIGHT_EXPERTS,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
)
QWEN3 = Family(
    model_type="qwen3",
    upcycled=UpcycledForms(in_all_layers="qwen3_moe", in_some_layers="qwen3_moe"),
    architecture="Qwen3ForCausalLM",
    config=Decoder(
        attention=grouped_query(
            head_dim=HeadDim(default=128), window=WINDOW, qk_norm=QkNorm.PER_HEAD
        )
    ),
    tiny={"head_dim": 16, "intermediate_size": 48},
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    config=Decoder(
        attention=grouped_query(window=WINDOW, qk_norm=QkNorm.PER_HEAD),
        experts=qwen_experts(shared=Written.CHANGED),
    ),
    tiny={
        **EIGHT_EXPERTS,
        "head_dim": 16,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "tie_word_embeddings": True,
    },
)
QWEN3_VL = Family(
    model_type="qwen3_vl_moe_text",
    nested_in=("qwen3_vl_moe",),
    written_as="qwen3_moe",
    config=Decoder(
        attention=grouped_query(
            window=WINDOW,
            qk_norm=QkNorm.PER_HEAD,
            # sections agree on positions of text
            rope=Rope(passive=("mrope_section", "mrope_interleaved")),
        ),
        experts=qwen_experts(renormalizes=True, shared=Written.CHANGED),
    ),
    # as published; transformers writes those that it made itself in the usual order
    weights=WeightNames(
        layers={
            "moe.experts.gate_up.weight": (
                NamePattern(
                    names=("mlp.experts.gate_up_proj",), dim_order=(0, 3, 1, 2), merged_dim=2
                ),
            ),
            "moe.experts.down.weight": (
                NamePattern(names=("mlp.experts.down_proj",), dim_order=(0, 2, 1)),
            ),
        }
    ),
)
