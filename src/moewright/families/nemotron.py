"""The dense Nemotron, and Nemotron-H: a mixer, an MLP or experts in a layer, never two."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from moewright.families.attention import NO_WINDOW, AttentionBias, KvHeads, grouped_query
from moewright.families.decoder import Decoder, Positions, mtp_depths, norm_eps
from moewright.families.draft import Draft, Part
from moewright.families.experts import (
    GROUPS,
    LATENT_SIZE,
    SIGMOID,
    TOP_GROUPS,
    ExpertGroups,
    Experts,
    Renormalize,
    WideSharedExperts,
    expert_count,
    expert_width,
    scaling_factor,
    top_k,
)
from moewright.families.fields import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, FieldReader
from moewright.families.keys import (
    Fixed,
    Ignored,
    Neutral,
    OneWord,
    Switch,
    Whole,
    Word,
    Written,
)
from moewright.families.layer_words import FULL, LINEAR, MAX_STATE, RecurrentLayers, mixer_size
from moewright.families.record import Family
from moewright.families.rope import Rope
from moewright.families.tiny import EIGHT_ROUTED_EXPERTS
from moewright.families.weight_names import (
    LayerNames,
    MtpBlocks,
    NamePattern,
    WeightNames,
    projections,
    whole,
)
from moewright.spec.model import (
    Activation,
    MixerKind,
    ModelSpec,
    NormKind,
    PositionKind,
    RecurrentKind,
)

_MAX_CHUNK = 2**16  # as for states
_LAYERS = "num_hidden_layers"
_RELU2: Mapping[str, Activation] = MappingProxyType({"relu2": Activation.RELU_SQUARED})
# The letters of Nemotron-H's pattern, and transformers' words for them: what mixes, what follows.
_NEMOTRON_LAYERS: Mapping[str, tuple[MixerKind, bool]] = MappingProxyType(
    {
        "M": (MixerKind.RECURRENT, False),
        "*": (MixerKind.ATTENTION, False),
        "E": (MixerKind.NONE, True),
        "-": (MixerKind.NONE, True),
    }
)


_NEMOTRON_WORDS: Mapping[str, str] = MappingProxyType(
    {"mamba": "M", LINEAR: "M", "attention": "*", FULL: "*", "moe": "E", "mlp": "-"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NemotronPattern:
    """Nemotron-H's pattern of layers, a letter each, in either of its spellings.

    Every layer is a mixer alone, an MLP alone, or experts alone.
    """

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the pattern, which the number of layers may repeat."""
        pattern = self._read_letters(fields)
        layers = [_NEMOTRON_LAYERS[letter] for letter in pattern]
        draft["layers"] = len(pattern)
        draft["mixers"] = tuple(mixer for mixer, _ in layers)
        draft["mlp_layers"] = tuple(has_mlp for _, has_mlp in layers)
        draft["moe_layers"] = tuple(letter == "E" for letter in pattern)
        if "E" in pattern:
            fields.require_neutral("mlp_bias", False)  # of shared experts and latents too

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the pattern in letters."""
        letters = {MixerKind.RECURRENT: "M", MixerKind.ATTENTION: "*"}
        config["hybrid_override_pattern"] = "".join(
            letters.get(mixer, "E" if is_moe else "-")
            for mixer, is_moe in zip(model.mixers, model.moe_layers, strict=True)
        )
        config[_LAYERS] = model.layers

    def _read_letters(self, fields: FieldReader) -> str:
        name = "hybrid_override_pattern"
        pattern = fields.raw_value(name)
        fields.ignore(name)
        if pattern is None:
            words = fields.sequence("layers_block_type", max_length=MAX_LAYERS)
            if words is None:
                words = fields.sequence("layer_types", max_length=MAX_LAYERS)
            if words is None:
                raise fields.refusal(name, "is missing: a letter of M E * - for each layer")
            pattern = "".join(_NEMOTRON_WORDS.get(word, "?") for word in map(str, words))
            name = "layers_block_type"
        fields.ignore("layers_block_type", "layer_types")
        if not isinstance(pattern, str) or not pattern or set(pattern) - set(_NEMOTRON_LAYERS):
            raise fields.refusal(name, "must hold a letter of M E * - for each layer")
        if len(pattern) > MAX_LAYERS:
            raise fields.refusal(name, f"must have at most {MAX_LAYERS} layers")
        fields.require_neutral(_LAYERS, len(pattern))
        return pattern


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaInPattern:
    """The second form of Mamba, in the layers that the pattern says."""

    layers: RecurrentLayers

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the mixer, where a layer has it."""
        if MixerKind.RECURRENT in draft["mixers"]:
            self.layers.read(fields, draft)

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the mixer, where a layer has it."""
        self.layers.write(model, config)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsInPattern:
    """Nemotron-H's experts: where its pattern has none, the fields of experts say nothing."""

    experts: Experts

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the experts, where a layer has them."""
        if any(draft["moe_layers"]):
            self.experts.read(fields, draft)
            return
        fields.ignore(*(name for name in fields.unread_names() if name.startswith("moe_")))
        fields.ignore("n_routed_experts", "n_shared_experts", "num_experts_per_tok", GROUPS)
        fields.ignore(TOP_GROUPS, "norm_topk_prob", "routed_scaling_factor")

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the experts, where a layer has them."""
        self.experts.write(model, config)


NEMOTRON_LAYERS: tuple[Part, ...] = (
    NemotronPattern(),
    Neutral(names=("mamba_proj_bias", "use_bias", "residual_in_fp32"), allowed=(False,)),
    Neutral(
        names=("time_step_limit", "mamba_dt_limit"),
        # The second is how transformers writes infinity in JSON.
        allowed=([0.0, math.inf], [0.0, {"__float__": "Infinity"}]),
    ),
    OneWord(names=("mamba_hidden_act",), word="silu"),
    Neutral(names=("mtp_hybrid_override_pattern",), allowed=("*E",)),
    Neutral(
        names=("mtp_layers_block_type",),
        allowed=(["attention", "moe"], [FULL, "moe"], ("attention", "moe")),
    ),
    Ignored(names=("expand", "mtp_use_repeated_layer")),
    MambaInPattern(
        layers=RecurrentLayers(
            kind=RecurrentKind.MAMBA2,
            parts=(
                mixer_size("mamba_num_heads", "heads", MAX_HEADS),
                mixer_size("mamba_head_dim", "head_dim", MAX_HEAD_DIM),
                Whole(
                    names=("n_groups", "mamba_n_groups"),
                    says="recurrent.key_heads",
                    high=MAX_HEADS,
                ),
                mixer_size("ssm_state_size", "key_dim", MAX_STATE),
                mixer_size("conv_kernel", "short_conv", 64, 4),
                Switch(names=("use_conv_bias",), says="recurrent.conv_bias", default=True),
                mixer_size("chunk_size", "chunk_size", _MAX_CHUNK, 128),
                # transformers 5.23 has no steps below this (its pull request 48989), the models
                # none at 0.
                Ignored(names=(), constants={"time_step_min": 1e-9}),
            ),
        )
    ),
)


# Layers have one block each.
_BLOCK_NAMES: LayerNames = {
    "input_norm.weight": whole("norm.weight"),
    "post_norm.weight": whole("norm.weight"),
    **projections("attention", "mixer", "qkv"),
    "attention.o.weight": (
        *whole("mixer.o_proj.weight"),
        *whole("mixer.out_proj.weight", recurrent=True),
    ),
    "attention.zxbcdt.weight": (
        NamePattern(names=("mixer.in_proj.weight",), recurrent=True, head_parts=("zvkqa",)),
    ),
    "attention.conv.weight": (
        NamePattern(
            names=("mixer.conv1d.weight",), unit_dim=1, recurrent=True, head_parts=("vkq",)
        ),
    ),
    "attention.conv.bias": (
        NamePattern(names=("mixer.conv1d.bias",), recurrent=True, head_parts=("vkq",)),
    ),
    **{
        f"attention.{part}": whole(f"mixer.{part}", recurrent=True)
        for part in ("dt_bias", "A_log", "D", "norm.weight")
    },
    **projections("mlp", "mixer", ("up", "down")),
    "moe.router.weight": whole("mixer.gate.weight"),
    "moe.router.selection_bias": whole("mixer.gate.e_score_correction_bias"),
    "moe.latent.down.weight": whole("mixer.fc1_latent_proj.weight"),
    "moe.latent.up.weight": whole("mixer.fc2_latent_proj.weight"),
    "moe.shared.up.weight": whole("mixer.shared_experts.up_proj.weight"),
    "moe.shared.down.weight": whole("mixer.shared_experts.down_proj.weight"),
    "moe.experts.up.weight": whole("mixer.experts.{}.up_proj.weight"),
    "moe.experts.down.weight": whole("mixer.experts.{}.down_proj.weight"),
}
NEMOTRON = Family(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    config=Decoder(
        style=(
            Word(names=("hidden_act",), says="activation", words=_RELU2),
            norm_eps("norm_eps", default=1e-5),
            Fixed(values={"gated": False, "norm": NormKind.LAYER, "zero_centered_norms": True}),
        ),
        attention=grouped_query(kv_heads=KvHeads(is_optional=True), rope=Rope(share=0.5)),
    ),
    tiny={"head_dim": 16, "intermediate_size": 48, "pad_token_id": None},
)
NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    config=Decoder(
        layers=NEMOTRON_LAYERS,
        style=(
            Word(names=("mlp_hidden_act", "hidden_act"), says="activation", words=_RELU2),
            norm_eps(
                "layer_norm_epsilon", "rms_norm_eps", "layer_norm_eps", "norm_eps", default=1e-5
            ),
            # all depths have the same weights
            Fixed(values={"gated": False, "mtp_shared": True}),
        ),
        attention=grouped_query(
            window=NO_WINDOW,
            biases=(AttentionBias(written=Written.CHANGED),),
            rope=Rope(written=Written.CHANGED),
        ),
        experts=ExpertsInPattern(
            experts=Experts(
                parts=(
                    expert_count("n_routed_experts"),
                    top_k(),
                    Fixed(
                        values={
                            **SIGMOID,
                            "moe.router.selection_bias": True,
                            "moe.router.group_scores": 2,
                        }
                    ),
                    Renormalize(default=True, is_softmax=False),
                    ExpertGroups(),
                    scaling_factor(),
                    expert_width(),
                    WideSharedExperts(name="n_shared_experts", default=1),
                ),
                latent_size=LATENT_SIZE,
            )
        ),
        mtp=mtp_depths(),
        mlp_bias=Switch(names=("mlp_bias",), says="mlp_bias", default=False),
        positions=Positions(kind=PositionKind.NONE),
    ),
    weights=WeightNames(
        layers=_BLOCK_NAMES,
        top_level={
            "embedding.weight": ("backbone.embeddings.weight",),
            "final_norm.weight": ("backbone.norm_f.weight",),
        },
        layer_prefixes=("backbone.layers.",),
        mtp_blocks=MtpBlocks(prefix="mtp.layers.", per_depth=2),
        mtp_final_norm="final_layernorm.weight",
    ),
    tiny={
        **EIGHT_ROUTED_EXPERTS,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_hidden_layers": 4,
        "head_dim": 16,
        "intermediate_size": 48,
        "mamba_num_heads": 4,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "layer_norm_epsilon": 1e-3,  # as for delta nets
        # transformers takes it for a bound of steps, where the models have none.
        "time_step_min": 1e-9,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "moe_latent_size": 16,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "pad_token_id": None,
    },
)
