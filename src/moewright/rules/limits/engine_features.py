"""Which features of a model the engine does not compute yet; the planner plans all of them."""

from __future__ import annotations

from collections.abc import Iterator

from moewright.families.table import find_family
from moewright.spec.model import (
    Activation,
    AttentionKind,
    AttentionSpec,
    MixerKind,
    ModelSpec,
    MoeSpec,
    PositionKind,
    QkNorm,
    RecurrentKind,
    ScoreFunction,
)

# A field of the model, its value, whether the engine cannot compute it, and what it can.
Feature = tuple[str, object, bool, str]

_RECURRENCES = (RecurrentKind.GATED_DELTA, RecurrentKind.MAMBA2)
_MIXERS = (
    MixerKind.ATTENTION,
    MixerKind.LOCAL_ATTENTION,
    MixerKind.SHARED_INDEX,
    MixerKind.COMPRESSED_SPARSE,
    MixerKind.HEAVILY_COMPRESSED,
    MixerKind.NONE,
)
_ROPE_SCALINGS = ("default", "linear", "yarn", "llama3", "longrope")


def unsupported_features(model: ModelSpec) -> Iterator[Feature]:
    """Yield the features that the engine may lack, each with whether this model has it."""
    yield from _attention_features(model.attention)
    missing = "+".join(sorted(set(map(str, _missing_mixers(model)))))
    yield "mixers", missing, bool(missing), "attention"
    spec = model.attention
    # The eight columns that carry a bias lie beside a head's, in kernels of at most 256. They leave
    # log-sum-exps that grow with the position, which sinks must not be compared with.
    is_wide = spec.head_dim > 248
    is_plain = spec.qk_norm in (QkNorm.NONE, QkNorm.PER_HEAD, QkNorm.FULL)
    positions = [PositionKind.ROPE]
    if spec.kind is AttentionKind.GQA and is_plain:
        positions.append(PositionKind.NONE)
        if not is_wide and not spec.sinks:
            positions.append(PositionKind.ALIBI)
    yield "position", model.position, model.position not in positions, "rope"
    # Parallel streams mix around the output of a block as it is.
    placement = model.norm_placement
    has_both = placement.is_after and model.residual_streams > 1
    yield "norm_placement", placement, has_both, "before"
    # The two forms of an MLP: a gate, or the square of a ReLU.
    activation = Activation.SILU if model.gated else Activation.RELU_SQUARED
    yield "activation", model.activation, model.activation is not activation, activation
    family = find_family(model.family)
    scaling = spec.rope.scaling
    has_two = family.scales_full_layers_alone and scaling != "default" and model.max_window > 0
    yield "attention.rope.scaling", scaling, has_two, "default"
    attention = model.multipliers.attention
    # There 1 is a factor of scores, which the record has as "none".
    nearest = f"{model.attention.head_dim**-0.5:g}"
    yield "multipliers.attention", attention, family.has_score_factor and attention == 1, nearest
    # A head that is the embedding has no tensors of its own.
    yield "head_bias", True, model.head_bias and model.tie_embeddings, "false"
    yield "score_cap", model.score_cap, model.score_cap > 0, "0"
    has_streams = model.residual_streams > 1
    is_plain_stream = spec.kind is not AttentionKind.COMPRESSED
    yield "residual_streams", model.residual_streams, has_streams and is_plain_stream, "1"
    factor = model.multipliers.residual
    yield "multipliers.residual", factor, has_streams and factor != 1, "1"
    limit = model.activation_limit
    yield "activation_limit", limit, limit > 0 and not model.gated, "0"
    if model.moe is not None:
        yield from _expert_features(model.moe)


def _missing_mixers(model: ModelSpec) -> Iterator[MixerKind | RecurrentKind]:
    for mixer in model.mixers:
        if mixer is MixerKind.RECURRENT and model.recurrent is not None:
            if model.recurrent.kind not in _RECURRENCES:
                yield model.recurrent.kind
        elif mixer not in _MIXERS:
            yield mixer


def _attention_features(spec: AttentionSpec) -> Iterator[Feature]:
    is_mla = spec.kind is AttentionKind.MLA
    is_compressed = spec.kind is AttentionKind.COMPRESSED
    yield "attention.qkv_bias", True, is_mla and (spec.qkv_bias or spec.out_bias), "false"
    scaling = spec.rope.scaling
    yield "attention.rope.scaling", scaling, scaling not in _ROPE_SCALINGS, "default"
    is_gated = spec.output_gate and spec.kind is not AttentionKind.GQA
    yield "attention.output_gate", True, is_gated, "false"
    # An indexer's queries come from those of latent attention, before they are expanded.
    top_k = spec.indexer.top_k if spec.indexer else 0
    has_latent = (is_mla or is_compressed) and spec.q_lora_rank > 0
    yield "attention.indexer.top_k", top_k, top_k > 0 and not has_latent, "none"


def _expert_features(spec: MoeSpec) -> Iterator[Feature]:
    router = spec.router
    is_biased = router.selection_bias or router.top_groups < router.groups
    is_mixed = router.score is ScoreFunction.SPARSE_MIXER
    yield "moe.router.score", router.score, is_mixed and is_biased, "softmax"
