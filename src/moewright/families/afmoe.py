"""AFMoE of Arcee (Trinity): norms around blocks, gated attention, sigmoid scores with a bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moewright.families.attention import HeadDim, KvHeads, Window, grouped_query
from moewright.families.decoder import SWIGLU, Decoder, norm_eps
from moewright.families.draft import Draft
from moewright.families.experts import (
    SIGMOID,
    DenseFirst,
    Experts,
    SharedExpertCount,
    expert_count,
    expert_width,
    scaling_factor,
    top_k,
)
from moewright.families.fields import FieldReader
from moewright.families.keys import Fixed, Ignored, Neutral, OneWord
from moewright.families.record import Family
from moewright.families.tiny import EIGHT_EXPERTS
from moewright.families.weight_names import NamePattern, WeightNames, whole
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import MixerKind, ModelSpec, NormPlacement, QkNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class _InputScale:
    """Whether embeddings grow by the root of the hidden size."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the switch."""
        if fields.boolean("mup_enabled", default=False):
            draft["multipliers.embedding"] = draft["hidden_size"] ** 0.5

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the switch, or refuse another factor."""
        factor = model.multipliers.embedding
        scale = model.hidden_size**0.5
        if factor not in (1.0, scale):
            rule = "has no HF form: this family has the root of the hidden size, or none"
            field = "model.multipliers.embedding"
            raise BadInput(
                Reason(field=field, value=f"{factor:g}", rule=rule, nearest=f"{scale:g}")
            )
        config["mup_enabled"] = factor == scale


@dataclass(frozen=True, kw_only=True, slots=True)
class _RotatedWindows:
    """The layers that rotate queries and keys: those with a window."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Set them from the window, which is read before."""
        every = draft.get("attention.window_every", 0)
        mixers = draft.get("mixers", ()) or tuple(
            MixerKind.LOCAL_ATTENTION if every and layer % every == 0 else MixerKind.ATTENTION
            for layer in range(draft["layers"])
        )
        rotates = tuple(mixer is MixerKind.LOCAL_ATTENTION for mixer in mixers)
        # () stands for all layers.
        draft["rope_layers"] = () if all(rotates) else rotates

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Write nothing: the layers with a window are written."""


AFMOE = Family(
    model_type="afmoe",
    architecture="AfmoeForCausalLM",
    config=Decoder(
        style=(
            SWIGLU,
            norm_eps(default=1e-5),
            Fixed(values={"norm_placement": NormPlacement.AROUND}),
            _InputScale(),
        ),
        attention=grouped_query(
            _RotatedWindows(),
            Fixed(values={"attention.output_gate": True}),
            kv_heads=KvHeads(is_optional=True),
            head_dim=HeadDim(default=128),
            window=Window(default=1024, full_every=4, full_every_name="global_attn_every_n_layers"),
            qk_norm=QkNorm.PER_HEAD,
        ),
        experts=Experts(
            parts=(
                expert_count("num_experts"),
                top_k(),
                OneWord(names=("score_func",), word="sigmoid"),
                Neutral(names=("route_norm",), allowed=(True,)),
                Neutral(
                    names=("n_group", "topk_group", "num_expert_groups", "num_limited_groups"),
                    allowed=(1,),
                ),
                Ignored(names=("load_balance_coeff", "use_grouped_mm")),
                Fixed(values={**SIGMOID, "moe.router.selection_bias": True}),
                scaling_factor("route_scale"),
                expert_width(),
                SharedExpertCount(names=("num_shared_experts",), default=2),
                DenseFirst(default=1, name="num_dense_layers"),
            )
        ),
    ),
    weights=WeightNames(
        layers={
            # Our queries have their gates beside them, head by head.
            "attention.q.weight": (
                NamePattern(
                    names=("self_attn.q_proj.weight", "self_attn.gate_proj.weight"),
                    head_parts=("q", "g"),
                ),
            ),
            "attention_norm.weight": whole("post_attention_layernorm.weight"),
            "post_norm.weight": whole("pre_mlp_layernorm.weight"),
            "mlp_norm.weight": whole("post_mlp_layernorm.weight"),
            "moe.router.weight": whole("mlp.router.gate.weight"),
            "moe.router.selection_bias": whole("mlp.expert_bias"),
        }
    ),
    tiny={
        **EIGHT_EXPERTS,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "route_scale": 2.5,
        "sliding_window": 6,
        "mup_enabled": True,
    },
)
