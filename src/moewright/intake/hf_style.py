"""What a config.json says of every layer alike: activation, norms, constant factors, streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moewright.intake.fields import FieldReader
from moewright.spec.model import Activation, MultiplierSpec, NormKind, NormPlacement

# Families whose embedding and head share their weights where the config does not say.
TIED = ("ernie4_5_moe", "smollm3", "grok-1")
# Families whose attention knows no positions: their recurrent layers do.
UNROTATED = ("jamba", "nemotron_h", "kimi_linear")

_SPELLINGS: Mapping[str, Activation] = MappingProxyType(
    {
        "silu": Activation.SILU,
        "swiglu": Activation.SILU,
        "gelu": Activation.GELU,
        "relu2": Activation.RELU_SQUARED,
    }
)
# The spellings of the activation that a family takes; SiLU for the others.
_ACTIVATIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"nemotron": ("relu2",), "nemotron_h": ("relu2",), "grok-1": ("gelu",)}
)
_UNGATED = ("nemotron", "nemotron_h")
_LAYER_NORMS = ("phimoe", "nemotron")
_PLACEMENTS: Mapping[str, NormPlacement] = MappingProxyType(
    {"olmo3": NormPlacement.AFTER, "grok-1": NormPlacement.AROUND}
)
# Families whose norms have weights around zero.
_ZERO_CENTERED = ("nemotron", "qwen3_next", "qwen3_5_moe_text")
_MAX_FACTOR = 1e6
_MAX_STREAMS = 64
_MAX_ITERATIONS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """The properties that all layers of a model share."""

    activation: Activation
    gated: bool
    norm: NormKind
    norm_eps: float
    norm_placement: NormPlacement
    head_bias: bool
    multipliers: MultiplierSpec
    score_cap: float
    residual_streams: int
    stream_iterations: int
    stream_eps: float
    activation_limit: float
    zero_centered_norms: bool


def read_style(fields: FieldReader, family: str) -> Style:
    """Read the properties that all layers of a model share.

    Raises:
        BadInput: a field is wrong, or switches on what moewright does not model.
    """
    for dropout in ("attention_dropout", "hidden_dropout", "embedding_dropout", "output_dropout"):
        fields.require_neutral(dropout, 0)
    has_streams = family == "deepseek_v4"
    spellings = _ACTIVATIONS.get(family, ("silu", "swiglu"))
    names = ("mlp_hidden_act", "hidden_act") if family == "nemotron_h" else ("hidden_act",)
    activation = _SPELLINGS[fields.choice(*names, choices=spellings, default=spellings[0])]
    return Style(
        activation=activation,
        gated=family not in _UNGATED,
        norm=NormKind.LAYER if family in _LAYER_NORMS else NormKind.RMS,
        norm_eps=_read_norm_eps(fields, family),
        norm_placement=_PLACEMENTS.get(family, NormPlacement.BEFORE),
        head_bias=family == "phimoe" and fields.boolean("lm_head_bias", default=False),
        multipliers=_read_multipliers(fields, family),
        score_cap=_read_score_cap(fields, family),
        residual_streams=_read_streams(fields) if has_streams else 1,
        stream_iterations=_read_iterations(fields) if has_streams else 20,
        stream_eps=_read_stream_eps(fields) if has_streams else 1e-6,
        activation_limit=_read_limit(fields) if has_streams else 0.0,
        zero_centered_norms=family in _ZERO_CENTERED,
    )


def _read_norm_eps(fields: FieldReader, family: str) -> float:
    names: tuple[str, ...] = ("rms_norm_eps",)
    if family == "nemotron":
        names = ("norm_eps",)
    elif family in ("nemotron_h", "phimoe"):
        names = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps")
    default = 1e-5 if family in ("nemotron", "nemotron_h", "phimoe", "grok-1") else 1e-6
    return fields.number(*names, low=0, high=1, default=default)


def _read_multipliers(fields: FieldReader, family: str) -> MultiplierSpec:
    if family in ("granitemoe", "granitemoeshared"):
        return MultiplierSpec(
            embedding=_read_factor(fields, "embedding_multiplier"),
            residual=_read_factor(fields, "residual_multiplier"),
            attention=_read_factor(fields, "attention_multiplier"),
            logits=_read_factor(fields, "logits_scaling"),
        )
    if family == "grok-1":
        return MultiplierSpec(
            embedding=_read_factor(fields, "embedding_multiplier_scale"),
            attention=_read_factor(fields, "attn_output_multiplier"),
            logits=1 / _read_factor(fields, "output_multiplier_scale"),
        )
    return MultiplierSpec()


def _read_factor(fields: FieldReader, name: str) -> float:
    return fields.number(name, low=1 / _MAX_FACTOR, high=_MAX_FACTOR, default=1.0)


def _read_score_cap(fields: FieldReader, family: str) -> float:
    if family != "grok-1":
        return 0.0
    return fields.number("max_attn_value", low=0, high=_MAX_FACTOR, default=0.0)


def _read_streams(fields: FieldReader) -> int:
    return fields.integer("hc_mult", low=1, high=_MAX_STREAMS, default=4)


def _read_iterations(fields: FieldReader) -> int:
    return fields.integer("hc_sinkhorn_iters", low=1, high=_MAX_ITERATIONS, default=20)


def _read_stream_eps(fields: FieldReader) -> float:
    return fields.number("hc_eps", low=0, high=1, default=1e-6)


def _read_limit(fields: FieldReader) -> float:
    return fields.number("swiglu_limit", low=1 / _MAX_FACTOR, high=_MAX_FACTOR, default=10.0)
