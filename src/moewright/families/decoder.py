"""What the config.jsons of families share: sizes, style, depths, positions, and their order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from moewright.families.draft import Draft, Part
from moewright.families.experts import NoExperts
from moewright.families.fields import (
    MAX_FFN,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_POSITION,
    MAX_VOCAB,
    FieldReader,
)
from moewright.families.keys import Neutral, Number, Switch, Whole, Word, Written
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import Activation, ModelSpec, PositionKind

MAX_FACTOR = 1e6  # a multiplier beyond it is a mistake
_MTP = "num_nextn_predict_layers"
_SILU: Mapping[str, Activation] = MappingProxyType(
    {"silu": Activation.SILU, "swiglu": Activation.SILU}
)
HIDDEN_SIZE = Whole(names=("hidden_size",), says="hidden_size", high=MAX_HIDDEN)
LAYER_COUNT = Whole(names=("num_hidden_layers",), says="layers", high=MAX_LAYERS)
VOCABULARY = Whole(names=("vocab_size",), says="vocab_size", high=MAX_VOCAB)
INITIALIZER_RANGE = Number(
    names=("initializer_range",), says="initializer_range", high=100, default=0.02
)
SWIGLU = Word(names=("hidden_act",), says="activation", words=_SILU)
MLP_BIAS = Switch(names=("mlp_bias",), says="mlp_bias", default=False, written=Written.CHANGED)
_MAX_POSITION = Whole(
    names=("max_position_embeddings", "model_max_length"),
    says="max_position",
    high=MAX_POSITION,
    default=2048,
)
_DROPOUTS = Neutral(
    names=("attention_dropout", "hidden_dropout", "embedding_dropout", "output_dropout"),
    allowed=(0,),
)


def factor(name: str, says: str) -> Number:
    """Build a constant factor: the field `name` says the field `says` of the model."""
    return Number(names=(name,), says=says, low=1 / MAX_FACTOR, high=MAX_FACTOR, default=1.0)


def norm_eps(*names: str, default: float = 1e-6) -> Number:
    """Build the epsilon of all norms, by the names that the family has for it."""
    return Number(names=names or ("rms_norm_eps",), says="norm_eps", default=default)


def mtp_depths(written: Written = Written.ALWAYS) -> Whole:
    """Build the number of tokens more that the model predicts ahead."""
    return Whole(
        names=(_MTP, "num_mtp_layers"),
        says="mtp_layers",
        low=0,
        high=MAX_LAYERS,
        default=0,
        written=written,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NoMtpDepths:
    """A family that predicts one token ahead."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Refuse a config that names depths."""
        if fields.raw_value(_MTP):
            rule = f"multi-token prediction is not known for {draft.family}"
            raise fields.refusal(_MTP, rule, "0")

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Write nothing: transformers would not make the depths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Positions:
    """How positions enter the model, unless a config asks for ALiBi."""

    kind: PositionKind = PositionKind.ROPE

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read whether it does."""
        is_alibi = fields.boolean("alibi", default=False)
        draft["position"] = PositionKind.ALIBI if is_alibi else self.kind

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Refuse ALiBi."""
        if model.position is PositionKind.ALIBI:
            rule = "has no HF form: transformers has no such positions in this family"
            raise BadInput(
                Reason(field="model.position", value=model.position, rule=rule, nearest=self.kind)
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseWidth:
    """The width of dense MLPs; families whose layers all have experts need not say it.

    Where no layer has a dense MLP, the field holds an expert's width.
    """

    name: str = "intermediate_size"
    is_written: bool = True

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the width; 0 where no layer has such an MLP."""
        moe_layers = draft["moe_layers"]
        mlp_layers = draft.get("mlp_layers", ()) or (True,) * len(moe_layers)
        layers = zip(moe_layers, mlp_layers, strict=True)
        is_needed = any(has_mlp and not is_moe for is_moe, has_mlp in layers)
        default = None if is_needed else 1
        width = fields.integer(self.name, low=1, high=MAX_FFN, default=default)
        draft["dense_ffn_size"] = width if is_needed else 0

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the width."""
        if self.is_written:
            expert_width = 1 if model.moe is None else model.moe.ffn_size
            config[self.name] = model.dense_ffn_size or expert_width


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """The config.json of a decoder, in the fields and the order that families share.

    `layers` say how many there are, and what mixes their tokens where it is not attention alone;
    `style` is what all of them have alike; `tied` whether the head is the embedding where the
    config does not say.
    """

    attention: tuple[Part, ...]
    layers: tuple[Part, ...] = (LAYER_COUNT,)
    style: tuple[Part, ...] = (SWIGLU, norm_eps())
    experts: Part = field(default_factory=NoExperts)
    mtp: Part = field(default_factory=NoMtpDepths)
    mlp_bias: Switch = MLP_BIAS
    positions: Positions = field(default_factory=Positions)
    tied: bool = False
    dense_width: DenseWidth = field(default_factory=DenseWidth)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts in the order in which they are read."""
        tie = Switch(names=("tie_word_embeddings",), says="tie_embeddings", default=self.tied)
        return (
            HIDDEN_SIZE,
            *self.layers,
            # Before attention, whose window and rope ask for it.
            _MAX_POSITION,
            _DROPOUTS,
            *self.style,
            *self.attention,
            self.experts,
            self.mtp,
            VOCABULARY,
            self.mlp_bias,
            self.positions,
            tie,
            INITIALIZER_RANGE,
            # Behind the experts, which say which layers have no dense MLP.
            self.dense_width,
        )
