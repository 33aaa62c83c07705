"""Which features of a model the engine does not compute yet; the planner plans all of them."""

from __future__ import annotations

from collections.abc import Iterator

from moewright.spec.model import (
    Activation,
    AttentionKind,
    AttentionSpec,
    MixerKind,
    ModelSpec,
    MoeSpec,
    MultiplierSpec,
    NormKind,
    NormPlacement,
    PositionKind,
    QkNorm,
    ScoreFunction,
)

# A field of the model, its value, whether the engine cannot compute it, and what it can.
Feature = tuple[str, object, bool, str]

_QK_NORMS = (QkNorm.NONE, QkNorm.PER_HEAD, QkNorm.FULL)
_ROPE_SCALINGS = ("default", "linear", "yarn", "llama3")


def unsupported_features(model: ModelSpec) -> Iterator[Feature]:
    """Yield the features that the engine may lack, each with whether this model has it."""
    yield from _attention_features(model.attention)
    mixers = sorted({mixer for mixer in model.mixers if mixer is not MixerKind.ATTENTION})
    kinds = "+".join(
        model.recurrent.kind if m is MixerKind.RECURRENT and model.recurrent else m for m in mixers
    )
    yield "mixers", kinds, bool(kinds), "attention"
    yield "mlp_layers", "some", not all(model.mlp_layers), "all"
    yield "position", model.position, model.position is not PositionKind.ROPE, "rope"
    yield "rope_layers", "some", not all(model.rope_layers), "all"
    yield "norm", model.norm, model.norm is not NormKind.RMS, "rms"
    placement = model.norm_placement
    yield "norm_placement", placement, placement is not NormPlacement.BEFORE, "before"
    yield "gated", False, not model.gated, "true"
    yield "activation", model.activation, model.activation is not Activation.SILU, "silu"
    yield "head_bias", True, model.head_bias, "false"
    yield "multipliers", "other than 1", model.multipliers != MultiplierSpec(), "1"
    yield "score_cap", model.score_cap, model.score_cap > 0, "0"
    yield "residual_streams", model.residual_streams, model.residual_streams > 1, "1"
    yield "mtp_shared", True, model.mtp_shared and model.mtp_layers > 0, "false"
    if model.moe is not None:
        yield from _expert_features(model.moe)


def _attention_features(spec: AttentionSpec) -> Iterator[Feature]:
    is_mla = spec.kind is AttentionKind.MLA
    is_compressed = spec.kind is AttentionKind.COMPRESSED
    yield "attention.kind", spec.kind, is_compressed, AttentionKind.GQA
    yield "attention.qkv_bias", True, is_mla and (spec.qkv_bias or spec.out_bias), "false"
    yield "attention.rope.interleaved", True, spec.rope.interleaved and not is_mla, "false"
    scaling = spec.rope.scaling
    yield "attention.rope.scaling", scaling, scaling not in _ROPE_SCALINGS, "default"
    yield "attention.qk_norm", spec.qk_norm, spec.qk_norm not in _QK_NORMS, QkNorm.PER_HEAD
    yield "attention.output_gate", True, spec.output_gate, "false"
    yield "attention.chunked", True, spec.chunked, "false"
    top_k = spec.indexer.top_k if spec.indexer else 0
    yield "attention.indexer.top_k", top_k, top_k > 0, "none"


def _expert_features(spec: MoeSpec) -> Iterator[Feature]:
    router = spec.router
    yield "moe.router.score", router.score, router.score is ScoreFunction.SPARSE_MIXER, "softmax"
    yield "moe.router.scales_input", True, router.scales_input, "false"
    yield "moe.router.hash_layers", router.hash_layers, router.hash_layers > 0, "0"
