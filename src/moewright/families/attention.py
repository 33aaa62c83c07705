"""Parts of a config.json that say what attention is: grouped-query with its variants, latent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moewright.families.draft import Draft, Part
from moewright.families.fields import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_POSITION,
    FieldReader,
    nearest_divisor,
)
from moewright.families.keys import Fixed, Neutral, Switch, Whole, Written, require_even
from moewright.families.layer_words import (
    FULL,
    SLIDING,
    read_layer_words,
    read_local_mixers,
    write_local_words,
)
from moewright.families.rope import Rope
from moewright.spec.model import AttentionKind, ModelSpec, QkNorm

_KV_HEADS = "num_key_value_heads"
HEADS = Whole(names=("num_attention_heads",), says="attention.heads", high=MAX_HEADS)


@dataclass(frozen=True, kw_only=True, slots=True)
class KvHeads:
    """The heads of keys and values, which divide those of queries.

    Where an `is_optional` family leaves them out, or any family has null, every head has its own.
    """

    is_optional: bool = False

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the heads."""
        heads = draft["attention.heads"]
        # A written null means a key head for each query head; a missing field may be a slip.
        has_default = self.is_optional or _KV_HEADS in fields
        kv_heads = fields.integer(
            _KV_HEADS,
            low=1,
            high=heads,
            bound="num_attention_heads",
            default=heads if has_default else None,
        )
        if heads % kv_heads:
            rule = f"must divide num_attention_heads={heads}"
            raise fields.refusal(_KV_HEADS, rule, nearest_divisor(heads, kv_heads))
        draft["attention.kv_heads"] = kv_heads

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the heads."""
        config[_KV_HEADS] = model.attention.kv_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadDim:
    """The width of a head; `default` where it does not follow from the hidden size."""

    default: int | None = None
    names: tuple[str, ...] = ("head_dim",)

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the width; the hidden size must divide where neither says it."""
        hidden = draft["hidden_size"]
        heads = draft["attention.heads"]
        if not fields.has_value("head_dim") and hidden % heads and self.default is None:
            rule = f"must divide hidden_size={hidden} when head_dim is not given"
            raise fields.refusal("num_attention_heads", rule, nearest_divisor(hidden, heads))
        default = self.default or hidden // heads
        head_dim = fields.integer(*self.names, low=1, high=MAX_HEAD_DIM, default=default)
        require_even(fields, "head_dim", head_dim)
        draft["attention.head_dim"] = head_dim
        draft["attention.v_head_dim"] = head_dim

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the width."""
        config[self.names[0]] = model.attention.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBias:
    """One switch for the biases of q, k and v, and of the output where it `has_output` ones."""

    default: bool = False
    has_output: bool = True
    written: Written = Written.ALWAYS

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the switch."""
        bias = fields.boolean("attention_bias", default=self.default)
        draft["attention.qkv_bias"] = bias
        draft["attention.out_bias"] = bias and self.has_output

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the switch."""
        bias = model.attention.qkv_bias
        if self.written is Written.ALWAYS or bias != self.default:
            config["attention_bias"] = bias


@dataclass(frozen=True, kw_only=True, slots=True)
class QkNormSwitch:
    """Whether queries and keys are normalised, in the family's way."""

    norm: QkNorm
    default: bool

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the switch."""
        is_on = fields.boolean("use_qk_norm", default=self.default)
        draft["attention.qk_norm"] = self.norm if is_on else QkNorm.NONE

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the switch."""
        config["use_qk_norm"] = model.attention.qk_norm is not QkNorm.NONE


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeLayers:
    """Which layers rotate their queries and keys: all but every n-th, or as listed."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read which layers rotate; () where all do."""
        layers = draft["layers"]
        interval = fields.integer("no_rope_layer_interval", low=1, high=MAX_LAYERS, default=4)
        listed = fields.sequence("no_rope_layers", max_length=layers)
        if not listed:
            draft["rope_layers"] = tuple((layer + 1) % interval != 0 for layer in range(layers))
            return
        if len(listed) != layers or any(entry not in (0, 1) for entry in listed):
            raise fields.refusal("no_rope_layers", f"must hold 0 or 1 for each of {layers} layers")
        draft["rope_layers"] = () if all(listed) else tuple(map(bool, listed))

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the list."""
        rotates = model.rope_layers or (True,) * model.layers
        config["no_rope_layers"] = [int(is_rotated) for is_rotated in rotates]


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The sliding window of attention, in all layers or in those that `layer_types` names.

    Without that list it is in every `every`-th layer from the first, or in all but every
    `full_every`-th where that is given, of which the field `full_every_name` may say another; a
    family that `needs_types` has it only by the list, and then only where `use_sliding_window` is
    on. `default` is the window where the config does not say. With `is_plain`, the field is always
    there, null for none, and the list only where layers differ. With `within_positions`, a window
    of all positions is none.
    """

    default: int = 0
    every: int = 1
    full_every: int = 0
    full_every_name: str = ""
    needs_types: bool = False
    writes_switch: bool = False
    is_plain: bool = False
    within_positions: bool = False

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the window and the layers that have it."""
        layers = draft["layers"]
        kinds = read_layer_words(fields, "layer_types", layers, (FULL, SLIDING))
        is_used = fields.boolean("use_sliding_window", default=not self.needs_types)
        window = fields.integer("sliding_window", low=0, high=MAX_POSITION, default=self.default)
        if self.within_positions and window >= draft["max_position"]:
            return
        full_every = self.full_every
        if self.full_every_name:
            name = self.full_every_name
            full_every = fields.integer(name, low=1, high=MAX_LAYERS, default=full_every)
        if kinds is None and full_every:
            kinds = tuple(SLIDING if (layer + 1) % full_every else FULL for layer in range(layers))
        if kinds is not None:
            self._read_kinds(fields, draft, kinds, window)
        elif is_used and window:
            if self.needs_types:
                rule = "needs layer_types to say which layers are windowed"
                raise fields.refusal("use_sliding_window", rule, "false")
            draft["attention.sliding_window"] = window
            draft["attention.window_every"] = self.every

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the window, and the list of layers that have it."""
        window = model.attention.sliding_window
        if not window:
            if self.is_plain:
                config["sliding_window"] = None
            # Without the list a reader would make windows by `full_every` again.
            if self.full_every:
                config["layer_types"] = write_local_words(model, SLIDING)
            return
        config["sliding_window"] = window
        if self.writes_switch:
            config["use_sliding_window"] = True
        if not self.is_plain or model.attention.window_every != self.every:
            config["layer_types"] = write_local_words(model, SLIDING)

    def _read_kinds(
        self, fields: FieldReader, draft: Draft, kinds: tuple[str, ...], window: int
    ) -> None:
        if SLIDING not in kinds:
            return
        if not window:
            raise fields.refusal("sliding_window", f"is missing while layer_types has {SLIDING}")
        draft["attention.sliding_window"] = window
        # A period where there is one: `mixers` is for patterns that no period says.
        for every in range(1, len(kinds) + 1):
            if all((kind == SLIDING) == (layer % every == 0) for layer, kind in enumerate(kinds)):
                draft["attention.window_every"] = every
                return
        draft["mixers"] = read_local_mixers(kinds, SLIDING)


@dataclass(frozen=True, kw_only=True, slots=True)
class UniformLayers:
    """A list of layers that may be there, and says the same word of each."""

    word: str
    rule: str = ""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Refuse a list of anything else."""
        layers = draft["layers"]
        if not self.rule:
            read_layer_words(fields, "layer_types", layers, (self.word,))
            return
        listed = fields.sequence("layer_types", max_length=layers)
        if listed not in (None, (self.word,) * layers):
            raise fields.refusal("layer_types", self.rule)

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Write nothing: the list says nothing new."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualKvHeads:
    """The heads of keys where each head expands its own from the latent."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Refuse fewer heads of keys than of queries."""
        heads = draft["attention.heads"]
        kv_heads = fields.integer(_KV_HEADS, low=1, high=MAX_HEADS, default=heads)
        if kv_heads != heads:
            rule = (
                f"must equal num_attention_heads={heads}: "
                "latent attention expands keys for every head"
            )
            raise fields.refusal(_KV_HEADS, rule, str(heads))
        draft["attention.kv_heads"] = heads

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the heads."""
        config[_KV_HEADS] = model.attention.kv_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentWidths:
    """The widths of latent attention's queries and keys: without positions, and rotated."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read both; transformers writes their sum and the rotated one once more."""
        nope = fields.integer("qk_nope_head_dim", low=1, high=MAX_HEAD_DIM)
        rope = fields.integer("qk_rope_head_dim", low=2, high=MAX_HEAD_DIM)
        require_even(fields, "qk_rope_head_dim", rope)
        fields.ignore("head_dim")
        fields.require_neutral("qk_head_dim", nope + rope)
        draft["attention.head_dim"] = nope + rope
        draft["attention.qk_nope_head_dim"] = nope
        draft["attention.qk_rope_head_dim"] = rope

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add both."""
        config["qk_nope_head_dim"] = model.attention.qk_nope_head_dim
        config["qk_rope_head_dim"] = model.attention.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexerFields:
    """The scorer that chooses the keys of sparse attention."""

    interleaved: bool = False  # where the config does not say
    interleaved_written: Written = Written.ALWAYS

    @property
    def _keys(self) -> tuple[Part, ...]:
        return (
            Whole(names=("index_n_heads",), says="attention.indexer.heads", high=MAX_HEADS),
            Whole(names=("index_head_dim",), says="attention.indexer.head_dim", high=MAX_HEAD_DIM),
            Whole(names=("index_topk",), says="attention.indexer.top_k", high=MAX_POSITION),
            Switch(
                names=("indexer_rope_interleave",),
                says="attention.indexer.interleaved",
                default=self.interleaved,
                written=self.interleaved_written,
            ),
        )

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the scorer."""
        for key in self._keys:
            key.read(fields, draft)

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the scorer, where there is one."""
        if model.attention.indexer is not None:
            for key in self._keys:
                key.write(model, config)


NO_WINDOW = Neutral(names=("sliding_window",))


def grouped_query(
    *more: Part,
    kv_heads: KvHeads | None = None,
    head_dim: HeadDim | None = None,
    window: Part | None = None,
    biases: tuple[Part, ...] = (AttentionBias(),),
    qk_norm: QkNorm | QkNormSwitch = QkNorm.NONE,
    rope: Rope | None = None,
) -> tuple[Part, ...]:
    """Build the parts of grouped-query attention; `more` are read after the window."""
    if isinstance(qk_norm, QkNorm):
        norm_part: Part = Fixed(values={"attention.qk_norm": qk_norm})
    else:
        norm_part = qk_norm
    return (
        Fixed(values={"attention.kind": AttentionKind.GQA}),
        HEADS,
        kv_heads or KvHeads(),
        head_dim or HeadDim(),
        window or Window(),
        *more,
        *biases,
        norm_part,
        rope or Rope(),
    )


def latent_attention(
    *more: Part, layers: tuple[Part, ...] | None = None, interleaved_written: bool = True
) -> tuple[Part, ...]:
    """Build the parts of latent attention; `more` are read before the rope.

    `layers` are what a list of layers may say; by default that each has full attention.
    """
    if layers is None:
        rule = "latent attention is full in every layer"
        layers = (UniformLayers(word=FULL, rule=rule),)
    return (
        Fixed(values={"attention.kind": AttentionKind.MLA}),
        HEADS,
        EqualKvHeads(),
        LatentWidths(),
        *layers,
        AttentionBias(),
        Whole(names=("v_head_dim",), says="attention.v_head_dim", high=MAX_HEAD_DIM),
        Whole(
            names=("q_lora_rank",),
            says="attention.q_lora_rank",
            low=0,
            high=MAX_HIDDEN,
            default=0,
            zero_is_null=True,
        ),
        Whole(names=("kv_lora_rank",), says="attention.kv_lora_rank", high=MAX_HIDDEN),
        *more,
        Switch(
            names=("rope_interleave",),
            says="attention.rope.interleaved",
            default=True,
            written=Written.ALWAYS if interleaved_written else Written.CHANGED,
        ),
        Rope(width="attention.qk_rope_head_dim"),
    )
