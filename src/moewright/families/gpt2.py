"""GPT-2 and GPT-3: LayerNorm, learned positions, biases, GELU, tied embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moewright.families.decoder import INITIALIZER_RANGE, VOCABULARY
from moewright.families.draft import Draft
from moewright.families.experts import NoExperts
from moewright.families.fields import (
    MAX_FFN,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_POSITION,
    FieldReader,
    nearest_divisor,
)
from moewright.families.keys import Fixed, Ignored, Neutral, Number, Switch, Whole, Word
from moewright.families.record import Family, Parts
from moewright.spec.model import (
    Activation,
    AttentionKind,
    ModelSpec,
    NormKind,
    PositionKind,
    RopeSpec,
)

_DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
_SUMMARY_FIELDS = ("activation", "proj_to_labels", "type", "use_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Heads:
    """Heads that share the hidden size."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read their number, which divides the hidden size."""
        hidden = draft["hidden_size"]
        heads = fields.integer("n_head", "num_attention_heads", low=1, high=MAX_HEADS)
        if hidden % heads:
            nearest = nearest_divisor(hidden, heads)
            raise fields.refusal("n_head", f"must divide n_embd={hidden}", nearest)
        for says, value in (("heads", heads), ("kv_heads", heads)):
            draft[f"attention.{says}"] = value
        for says in ("head_dim", "v_head_dim"):
            draft[f"attention.{says}"] = hidden // heads

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add their number."""
        config["n_head"] = model.attention.heads


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    config=Parts(
        parts=(
            Whole(names=("n_embd", "hidden_size"), says="hidden_size", high=MAX_HIDDEN),
            Whole(names=("n_layer", "num_hidden_layers"), says="layers", high=MAX_LAYERS),
            _Heads(),
            Word(
                names=("activation_function",),
                says="activation",
                words={"gelu_new": Activation.GELU, "gelu": Activation.GELU},
            ),
            Neutral(
                names=(*_DROPOUTS, "summary_first_dropout"),
                allowed=(0,),
                constants=dict.fromkeys(_DROPOUTS, 0.0),
            ),
            Neutral(names=("scale_attn_by_inverse_layer_idx",), allowed=(False,)),
            Neutral(names=("scale_attn_weights",), allowed=(True,)),
            # The first is of numerics, the second repeats n_positions.
            Ignored(names=("reorder_and_upcast_attn", "n_ctx")),
            # Of heads that sum a text up, which a language model has not.
            Ignored(names=tuple(f"summary_{field}" for field in _SUMMARY_FIELDS)),
            VOCABULARY,
            NoExperts(),
            Fixed(
                values={
                    "attention.kind": AttentionKind.GQA,
                    "attention.qkv_bias": True,
                    "attention.out_bias": True,
                    "attention.rope": RopeSpec(),
                    "gated": False,
                    "mlp_bias": True,
                    "norm": NormKind.LAYER,
                    "position": PositionKind.LEARNED,
                }
            ),
            Whole(
                names=("n_inner",),
                says="dense_ffn_size",
                high=MAX_FFN,
                default=lambda model: 4 * model["hidden_size"],
            ),
            Number(names=("layer_norm_epsilon",), says="norm_eps", default=1e-5),
            Whole(names=("n_positions",), says="max_position", high=MAX_POSITION, default=1024),
            Switch(names=("tie_word_embeddings",), says="tie_embeddings", default=True),
            INITIALIZER_RANGE,
        )
    ),
)
