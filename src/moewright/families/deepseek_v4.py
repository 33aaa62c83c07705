"""DeepSeek-V4: compressed attention of three kinds, residual streams, experts by the token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from moewright.families.attention import HEADS, IndexerFields
from moewright.families.decoder import (
    LAYER_COUNT,
    MAX_FACTOR,
    SWIGLU,
    Decoder,
    DenseWidth,
    mtp_depths,
    norm_eps,
)
from moewright.families.draft import Draft, Part
from moewright.families.experts import (
    AllLayers,
    Experts,
    Renormalize,
    expert_count,
    expert_width,
    moe_of,
    scaling_factor,
    top_k,
)
from moewright.families.fields import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_POSITION,
    MAX_VOCAB,
    FieldReader,
    nearest_divisor,
)
from moewright.families.keys import (
    Copied,
    Fixed,
    Ignored,
    Neutral,
    Number,
    OneWord,
    Whole,
    Written,
)
from moewright.families.layer_words import SLIDING, read_layer_words
from moewright.families.record import Family
from moewright.families.rope import (
    MAX_THETA,
    SHARE,
    USUAL_THETA,
    read_scaling,
    refuse_unread,
)
from moewright.families.tiny import EIGHT_ROUTED_EXPERTS, YARN
from moewright.families.weight_names import (
    HF_EMBEDDING,
    LayerNames,
    MtpBlocks,
    WeightNames,
    gate_and_up,
    whole,
)
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import (
    AttentionKind,
    MixerKind,
    ModelSpec,
    RopeSpec,
    ScoreFunction,
)

_MAX_STREAMS = 64  # DeepSeek-V4 has 4; beyond it a mistake
_MAX_ITERATIONS = 1000  # DeepSeek-V4 has 20; beyond it a step would not end
# transformers' words for the kinds of layers.
_COMPRESSED_KINDS: Mapping[str, MixerKind] = MappingProxyType(
    {
        SLIDING: MixerKind.LOCAL_ATTENTION,
        "compressed_sparse_attention": MixerKind.COMPRESSED_SPARSE,
        "heavily_compressed_attention": MixerKind.HEAVILY_COMPRESSED,
    }
)


_COMPRESSED_RATIOS: Mapping[int, str] = MappingProxyType(
    {0: SLIDING, 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedLayers:
    """DeepSeek-V4's kinds of layers, or the ratios that older configs give for them."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read either list."""
        layers = draft["layers"]
        kinds = read_layer_words(fields, "layer_types", layers, tuple(_COMPRESSED_KINDS))
        ratios = fields.sequence("compress_ratios", max_length=MAX_LAYERS)
        if kinds is None and ratios is not None:
            numbers = [ratio for ratio in ratios if isinstance(ratio, int | float)]
            is_known = numbers == list(ratios) and set(numbers) <= _COMPRESSED_RATIOS.keys()
            if not is_known or len(ratios) < layers:
                raise fields.refusal("compress_ratios", "must hold 0, 4 or 128 for each layer")
            kinds = tuple(_COMPRESSED_RATIOS[ratio] for ratio in ratios[:layers])
        if kinds is None:
            heavy, sparse = _COMPRESSED_RATIOS[128], _COMPRESSED_RATIOS[4]
            kinds = tuple(sparse if i >= 2 and i % 2 else heavy for i in range(layers))
        draft["mixers"] = tuple(_COMPRESSED_KINDS[kind] for kind in kinds)

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the list of kinds."""
        words = {mixer: kind for kind, mixer in _COMPRESSED_KINDS.items()}
        config["layer_types"] = [words[model.mixer(layer)] for layer in range(model.layers)]


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputGroups:
    """The groups of heads whose outputs are projected by themselves; they divide the heads."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read their number."""
        heads = draft["attention.heads"]
        groups = fields.integer("o_groups", low=1, high=heads, bound="num_attention_heads")
        if heads % groups:
            rule = f"must divide num_attention_heads={heads}"
            raise fields.refusal("o_groups", rule, nearest_divisor(heads, groups))
        draft["attention.output_groups"] = groups

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add their number."""
        config["o_groups"] = model.attention.output_groups


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionRates:
    """The tokens of which each kind of compressed layer makes one key."""

    sparse: int = 4
    heavy: int = 128

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the table of both."""
        sparse, heavy = self.sparse, self.heavy
        table = fields.table("compress_rates")
        if table is not None:
            sparse = table.integer("compressed_sparse_attention", low=1, high=4096, default=sparse)
            heavy = table.integer(
                "heavily_compressed_attention", low=1, high=MAX_POSITION, default=heavy
            )
        draft["attention.sparse_rate"] = sparse
        draft["attention.heavy_rate"] = heavy

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the table of both."""
        config["compress_rates"] = {
            "compressed_sparse_attention": model.attention.sparse_rate,
            "heavily_compressed_attention": model.attention.heavy_rate,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RotatedWidth:
    """The columns of a head that turn, by their number or by their part of it."""

    share: float = 0.125

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read the number; the part says what it was, where both are there."""
        head_dim = draft["attention.head_dim"]
        share = fields.number(SHARE, low=0, high=1, default=self.share)
        draft["attention.qk_rope_head_dim"] = fields.integer(
            "qk_rope_head_dim", low=2, high=head_dim, default=max(2, int(head_dim * share))
        )

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the number; the part goes with the ropes."""
        config["qk_rope_head_dim"] = model.attention.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedRopes:
    """DeepSeek-V4's two ropes: of layers with a window alone, and of those with a compressor.

    The new form has a table for each; of the old one, the table is of the second. No scaling
    grows cosines and sines.
    """

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read both ropes."""
        share = draft["attention.qk_rope_head_dim"] / draft["attention.head_dim"]
        theta = fields.number("rope_theta", low=1, high=MAX_THETA, default=USUAL_THETA)
        second_theta = fields.number("compress_rope_theta", low=1, high=MAX_THETA, default=160000.0)
        table = fields.table("rope_parameters") or fields.table("rope_scaling")
        # Spellings of one table: the one that was not read counts as read too.
        fields.ignore("rope_parameters", "rope_scaling")
        plain, second = None, table
        if table is not None and "main" in table:
            plain, second = table.table("main"), table.table("compress")
            table.ignore("rope_type")
            refuse_unread(table, "is no kind of layer: main, compress")
        draft["attention.rope"] = RopeSpec(theta=_read_theta(plain, theta), interleaved=True)
        if plain is not None:
            plain.choice("rope_type", "type", choices=("default",), default="default")
            plain.require_neutral(SHARE, share)
        rope = RopeSpec(theta=_read_theta(second, second_theta), interleaved=True)
        if second is not None:
            rope = self._read_second(second, rope, share, draft["max_position"])
        draft["attention.compressed_rope"] = rope

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the new form, and the bases beside it."""
        spec = model.attention
        share = spec.qk_rope_head_dim / spec.head_dim
        config |= {
            SHARE: share,
            "rope_theta": spec.rope.theta,
            "compress_rope_theta": spec.compressed_rope.theta,
            "rope_parameters": {
                "main": _compressed_table(spec.rope, share),
                "compress": _compressed_table(spec.compressed_rope, share),
            },
        }

    def _read_second(
        self, table: FieldReader, rope: RopeSpec, share: float, max_position: int
    ) -> RopeSpec:
        table.require_neutral(SHARE, share)
        table.require_neutral("attention_factor", 1)
        scaling = table.choice("rope_type", "type", choices=("default", "yarn"), default="default")
        if scaling == "yarn":
            rope = read_scaling(table, replace(rope, scaling=scaling), max_position, rounds=True)
            # Equal, so that cosines and sines do not grow.
            rope = replace(rope, mscale=1.0, mscale_all_dim=1.0)
        refuse_unread(table, f"is not known for rope type {scaling}")
        return rope


def _compressed_table(rope: RopeSpec, share: float) -> dict[str, Any]:
    table: dict[str, Any] = {
        "rope_type": rope.scaling,
        "rope_theta": rope.theta,
        SHARE: share,
    }
    if rope.scaling == "default":
        return table
    return table | {
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_position,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "attention_factor": 1.0,
    }


def _read_theta(table: FieldReader | None, default: float) -> float:
    if table is None:
        return default
    return table.number("rope_theta", low=1, high=MAX_THETA, default=default)


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleSharedExpert:
    """DeepSeek-V4's shared experts, of which transformers has one, as wide as a routed one."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read their number."""
        count = fields.integer("n_shared_experts", low=0, high=MAX_EXPERTS, default=1)
        draft["moe.shared_ffn_size"] = count * draft["moe.ffn_size"]

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the one, or refuse another width."""
        moe = moe_of(model)
        if moe.shared_ffn_size != moe.ffn_size:
            rule = (
                "has no HF form: transformers has one shared expert in this family, "
                "as wide as others"
            )
            raise BadInput(
                Reason(
                    field="model.moe.shared_ffn_size",
                    value=str(moe.shared_ffn_size),
                    rule=rule,
                    nearest=str(moe.ffn_size),
                )
            )
        config["n_shared_experts"] = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class HashLayers:
    """The first layers of DeepSeek-V4, whose experts follow from the token's number."""

    def read(self, fields: FieldReader, draft: Draft) -> None:
        """Read their number, or the list of words that says it."""
        layers = draft["layers"]
        kinds = fields.sequence("mlp_layer_types", max_length=layers)
        default = 3 if kinds is None else sum(kind == "hash_moe" for kind in kinds)
        words = ["hash_moe"] * default + ["moe"] * (layers - default)
        if kinds is not None and list(kinds) != words:
            rule = "must hold hash_moe for the first layers, and moe for all others"
            raise fields.refusal("mlp_layer_types", rule)
        count = fields.integer("num_hash_layers", low=0, high=MAX_VOCAB, default=default)
        draft["moe.router.hash_layers"] = min(count, layers)

    def write(self, model: ModelSpec, config: dict[str, Any]) -> None:
        """Add the list."""
        count = moe_of(model).router.hash_layers
        config["mlp_layer_types"] = [
            "hash_moe" if layer < count else "moe" for layer in range(model.layers)
        ]


_ATTENTION: tuple[Part, ...] = (
    Fixed(
        values={
            "attention.kind": AttentionKind.COMPRESSED,
            "attention.kv_heads": 1,
            "attention.sinks": True,
        }
    ),
    HEADS,
    Neutral(names=("num_key_value_heads",), allowed=(1,), constants={"num_key_value_heads": 1}),
    Whole(names=("head_dim",), says="attention.head_dim", low=2, high=MAX_HEAD_DIM),
    Copied(says="attention.v_head_dim", source="attention.head_dim"),
    OutputGroups(),
    CompressionRates(),
    Neutral(names=("attention_bias", "mlp_bias"), allowed=(False,)),
    RotatedWidth(),
    CompressedRopes(),
    Whole(names=("sliding_window",), says="attention.sliding_window", high=MAX_POSITION),
    Whole(names=("q_lora_rank",), says="attention.q_lora_rank", high=MAX_HIDDEN),
    IndexerFields(interleaved_written=Written.CHANGED),
    Whole(names=("o_lora_rank",), says="attention.output_lora_rank", high=MAX_HIDDEN),
)
_LAYER_NAMES: LayerNames = {
    "input_norm.weight": whole("attn_norm.weight"),
    "post_norm.weight": whole("ffn_norm.weight"),
    "attention.o.weight": whole("attn.wo_b.weight"),
    "attention.q_down.weight": whole("attn.wq_a.weight"),
    "attention.q_down_norm.weight": whole("attn.q_norm.weight"),
    "attention.q_up.weight": whole("attn.wq_b.weight"),
    "attention.kv.weight": whole("attn.wkv.weight"),
    "attention.o_down.weight": whole("attn.wo_a.weight"),
    **{
        f"attention.{own}{part}": whole(f"attn.{prefix}compressor.{name}")
        for own, prefix in (("compress_", ""), ("indexer.", "indexer."))
        for part, name in (
            ("kv.weight", "wkv.weight"),
            ("gate.weight", "wgate.weight"),
            ("position", "ape"),
            ("norm.weight", "norm.weight"),
        )
    },
    **{
        f"{own}_streams.{part}": whole(f"hc_{block}_{name}")
        for own, block in (("attention", "attn"), ("mlp", "ffn"))
        for part, name in (("weight", "fn"), ("bias", "base"), ("scale", "scale"))
    },
    "attention.kv_norm.weight": whole("attn.norm.weight", "attn.kv_norm.weight"),
    "attention.indexer.q.weight": whole("attn.indexer.wq_b.weight"),
    "attention.indexer.heads.weight": whole("attn.indexer.weights_proj.weight"),
    "attention.sinks": whole("attn.attn_sink"),
    "moe.router.weight": whole("ffn.gate.weight"),
    "moe.router.expert_table": whole("ffn.gate.tid2eid"),
    "moe.router.selection_bias": whole("ffn.gate.bias"),
    "moe.shared.gate_up.weight": gate_and_up(
        "ffn.shared_experts.w1.weight", "ffn.shared_experts.w3.weight"
    ),
    "moe.shared.down.weight": whole("ffn.shared_experts.w2.weight"),
    "moe.experts.gate_up.weight": gate_and_up(
        "ffn.experts.{}.w1.weight", "ffn.experts.{}.w3.weight"
    ),
    "moe.experts.down.weight": whole("ffn.experts.{}.w2.weight"),
}
# As transformers writes them, then as they are published.
_WEIGHTS = WeightNames(
    layers=_LAYER_NAMES,
    top_level={
        "embedding.weight": (HF_EMBEDDING, "embed.weight"),
        "final_norm.weight": ("model.norm.weight", "norm.weight"),
        "head.weight": ("head.weight",),
        **{
            f"final_streams.{own}": (f"model.hc_head.hc_{part}", f"hc_head_{part}")
            for own, part in (("weight", "fn"), ("bias", "base"), ("scale", "scale"))
        },
    },
    layer_prefixes=("model.layers.", "layers."),
    mtp_blocks=MtpBlocks(prefix="mtp."),
    mtp_final_norm="norm.weight",
    module_names={
        ".attn.": ".self_attn.",
        ".ffn.": ".mlp.",
        ".wq_a": ".q_a_proj",
        ".wq_b": ".q_b_proj",
        ".wkv": ".kv_proj",
        ".wgate": ".gate_proj",
        ".wo_b": ".o_b_proj",
        ".shared_experts.w1": ".shared_experts.gate_proj",
        ".shared_experts.w2": ".shared_experts.down_proj",
        ".shared_experts.w3": ".shared_experts.up_proj",
    },
    module_parameters={
        r"(.*\.mlp\.gate)": r"\1.weight",
        r"(.*\.experts)\.\d+\.w[13]": r"\1.gate_up_proj",
        r"(.*\.experts)\.\d+\.w2": r"\1.down_proj",
    },
)
DEEPSEEK_V4 = Family(
    model_type="deepseek_v4",
    architecture="DeepseekV4ForCausalLM",
    config=Decoder(
        layers=(LAYER_COUNT, CompressedLayers()),
        style=(
            SWIGLU,
            norm_eps(),
            Whole(names=("hc_mult",), says="residual_streams", high=_MAX_STREAMS, default=4),
            Whole(
                names=("hc_sinkhorn_iters",),
                says="stream_iterations",
                high=_MAX_ITERATIONS,
                default=20,
            ),
            Number(names=("hc_eps",), says="stream_eps", default=1e-6),
            Number(
                names=("swiglu_limit",),
                says="activation_limit",
                low=1 / MAX_FACTOR,
                high=MAX_FACTOR,
                default=10.0,
            ),
        ),
        attention=_ATTENTION,
        experts=Experts(
            parts=(
                expert_count("n_routed_experts"),
                top_k(),
                OneWord(names=("scoring_func",), word="sqrtsoftplus", is_written=True),
                OneWord(names=("topk_method",), word="noaux_tc"),
                Neutral(names=("router_jitter_noise",), allowed=(0,)),
                Ignored(names=("expert_dtype",)),
                HashLayers(),
                Fixed(
                    values={
                        "moe.router.score": ScoreFunction.SQRT_SOFTPLUS,
                        "moe.router.selection_bias": True,
                    }
                ),
                Renormalize(default=True, is_softmax=False),
                scaling_factor(),
                expert_width(),
                SingleSharedExpert(),
                AllLayers(),
            )
        ),
        # transformers has none of the depths that the field counts, and leaves out their tensors.
        mtp=mtp_depths(),
        dense_width=DenseWidth(is_written=False),
    ),
    weights=_WEIGHTS,
    tiny={
        **EIGHT_ROUTED_EXPERTS,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 8,
        "moe_intermediate_size": 16,
        "sliding_window": 6,
        "index_n_heads": 16,
        "index_head_dim": 12,
        "index_topk": 2,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 4,
        "swiglu_limit": 0.5,  # most rows reach it
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 8,
        },
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "rope_parameters": {name: value for name, value in YARN.items() if name != "rope_theta"},
    },
)
