"""What checkpoints of Hugging Face call the parameters of a model, and families otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

HF_HEAD = "lm_head.weight"
HF_EMBEDDING = "model.embed_tokens.weight"
_MODEL_PREFIX = "model."
_HEAD_PREFIX = "lm_head."
# Our names of tensors that are kept as they are, and are of no part of the language model.
BESIDE_PREFIX = "beside."


@dataclass(frozen=True, kw_only=True, slots=True)
class NamePattern:
    """The names of one parameter: one for all of it, or one for its gate and one for its up.

    "{}" in a name is the expert's number. A tensor of all experts has our dims in `dim_order`, and
    then dim `merged_dim` and the next merged into one; `unit_dim` puts a dim of size 1 there.
    `recurrent` names are those of recurrent layers. Our rows lie key head by key head; with
    `head_parts`, which has letters for the parts of a head, a tensor has those of its own letters,
    each over all heads. With `fused_part`, the tensor has queries, keys and values one after the
    other, and ours is that part of it.
    """

    names: tuple[str, ...]
    dim_order: tuple[int, ...] = ()
    merged_dim: int | None = None
    unit_dim: int | None = None
    recurrent: bool = False
    head_parts: tuple[str, ...] = ()
    fused_part: str = ""


# By our names below "layers.N.": the ways of a checkpoint to hold a tensor of a layer.
LayerNames = Mapping[str, tuple[NamePattern, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpBlocks:
    """Blocks of MTP depths that are numbered by themselves, after `prefix`.

    A depth is so many blocks: attention and what follows it may be one of their own.
    """

    prefix: str
    per_depth: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightNames:
    """What a family calls otherwise than most.

    `layers` are tried before the usual names of a layer's tensors, `top_level` take the place of
    the usual ones of the others. `layer_prefixes` stand before a layer's number. MTP depths are
    further layers, or `mtp_blocks`; `mtp_final_norm` is the last norm of a depth. transformers'
    modules are called by `module_names` where files have other parts of names, and by
    `module_parameters`, patterns of linears in files, where they are of no linear's module; PEFT
    knows those of older families by itself.
    """

    layers: LayerNames = field(default_factory=dict)
    top_level: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layer_prefixes: tuple[str, ...] = ("model.layers.",)
    mtp_blocks: MtpBlocks | None = None
    mtp_final_norm: str = ""
    module_names: Mapping[str, str] = field(default_factory=dict)
    module_parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Nesting:
    """Where a folder that sees or hears too has its language model: prefixes of its names."""

    model: str
    head: str

    def rename(self, name: str) -> str:
        """Return the name in such a folder of a tensor of a language model alone."""
        if name.startswith(_MODEL_PREFIX):
            return self.model + name.removeprefix(_MODEL_PREFIX)
        # What is not of the model is its head.
        return self.head + name.removeprefix(_HEAD_PREFIX)


NESTINGS = (
    Nesting(model="model.language_model.", head=_HEAD_PREFIX),  # Qwen3-VL, Qwen3.5
    Nesting(model="language_model.model.", head="language_model.lm_head."),  # Llama 4, Kimi K2.5
)


def whole(*names: str, recurrent: bool = False) -> tuple[NamePattern, ...]:
    """Build the names of a parameter that a tensor holds as it is."""
    return tuple(NamePattern(names=(name,), recurrent=recurrent) for name in names)


def gate_and_up(gate: str, up: str) -> tuple[NamePattern, ...]:
    """Build the names of a parameter whose gate and up are tensors of their own."""
    return (NamePattern(names=(gate, up)),)


def projections(own: str, module: str, parts: Sequence[str]) -> LayerNames:
    """Build the names of the linears of a part of a layer that a module of files has as they are.

    `own` is our name of the part, "q" of `parts` is q_proj in files.
    """
    return {
        f"{own}.{part}.{kind}": whole(f"{module}.{part}_proj.{kind}")
        for part in parts
        for kind in ("weight", "bias")
    }


# Names of the tensors that are of no layer.
TOP_LEVEL_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embedding.weight": HF_EMBEDDING,
        "final_norm.weight": "model.norm.weight",
        "final_norm.bias": "model.norm.bias",
        "head.weight": HF_HEAD,
        "head.bias": "lm_head.bias",
    }
)
# Names of the tensors of a layer, theirs below "model.layers.N.".
USUAL_LAYER_NAMES: LayerNames = MappingProxyType(
    {
        "input_norm.weight": whole("input_layernorm.weight"),
        "input_norm.bias": whole("input_layernorm.bias"),
        "post_norm.weight": whole("post_attention_layernorm.weight"),
        "post_norm.bias": whole("post_attention_layernorm.bias"),
        **projections("attention", "self_attn", "qkv"),
        "attention.o.weight": (
            *whole("self_attn.o_proj.weight"),
            *whole("linear_attn.out_proj.weight", recurrent=True),
        ),
        "attention.o.bias": whole("self_attn.o_proj.bias"),
        "attention.qkvz.weight": whole("linear_attn.in_proj_qkvz.weight", recurrent=True),
        "attention.rates.weight": whole("linear_attn.in_proj_ba.weight", recurrent=True),
        "attention.conv.weight": (
            NamePattern(
                names=("linear_attn.conv1d.weight",),
                # A depthwise convolution has one channel a group.
                unit_dim=1,
                recurrent=True,
                head_parts=("qkv",),
            ),
        ),
        **{
            f"attention.{part}": whole(f"linear_attn.{part}", recurrent=True)
            for part in ("dt_bias", "A_log", "D", "norm.weight")
        },
        "attention.q_down.weight": whole("self_attn.q_a_proj.weight"),
        "attention.q_down_norm.weight": whole("self_attn.q_a_layernorm.weight"),
        "attention.q_up.weight": whole("self_attn.q_b_proj.weight"),
        "attention.kv_down.weight": whole("self_attn.kv_a_proj_with_mqa.weight"),
        "attention.kv_norm.weight": whole("self_attn.kv_a_layernorm.weight"),
        "attention.kv_up.weight": whole("self_attn.kv_b_proj.weight"),
        "attention.indexer.q.weight": whole("self_attn.indexer.wq_b.weight"),
        "attention.indexer.k.weight": whole("self_attn.indexer.wk.weight"),
        "attention.indexer.k_norm.weight": whole("self_attn.indexer.k_norm.weight"),
        "attention.indexer.k_norm.bias": whole("self_attn.indexer.k_norm.bias"),
        "attention.indexer.heads.weight": whole("self_attn.indexer.weights_proj.weight"),
        "attention.q_norm.weight": whole("self_attn.q_norm.weight"),
        "attention.k_norm.weight": whole("self_attn.k_norm.weight"),
        "attention.sinks": whole("self_attn.sinks"),
        **{
            f"mlp.gate_up.{kind}": gate_and_up(f"mlp.gate_proj.{kind}", f"mlp.up_proj.{kind}")
            for kind in ("weight", "bias")
        },
        **projections("mlp", "mlp", ("up", "down")),
        "moe.router.weight": whole("mlp.gate.weight"),
        "moe.router.bias": whole("mlp.router.bias"),
        "moe.router.selection_bias": whole("mlp.gate.e_score_correction_bias"),
        "moe.shared.gate_up.weight": gate_and_up(
            "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"
        ),
        "moe.shared.down.weight": whole("mlp.shared_experts.down_proj.weight"),
        "moe.shared.gate.weight": whole("mlp.shared_expert_gate.weight"),
        "moe.experts.gate_up.weight": (
            *gate_and_up("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
            # One tensor of all experts, the rows of gate before those of up.
            NamePattern(names=("mlp.experts.gate_up_proj",), dim_order=(0, 1, 2, 3), merged_dim=1),
        ),
        "moe.experts.down.weight": whole(
            "mlp.experts.{}.down_proj.weight", "mlp.experts.down_proj"
        ),
        "moe.experts.down.bias": whole("mlp.experts.down_proj_bias"),
    }
)
# Names of the tensors of an MTP depth besides its layer; Hugging Face has it as one more layer.
MTP_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embed_norm.weight": "enorm.weight",
        "hidden_norm.weight": "hnorm.weight",
        "proj.weight": "eh_proj.weight",
        "embed_proj.weight": "e_proj.weight",
        "hidden_proj.weight": "h_proj.weight",
        **{
            f"final_streams.{own}": f"hc_head_{part}"
            for own, part in (("weight", "fn"), ("bias", "base"), ("scale", "scale"))
        },
        "final_norm.weight": "shared_head.norm.weight",
    }
)
# Names of tensors of an MTP depth that are copies of tensors of ours.
MTP_DUPLICATES: Mapping[str, str] = MappingProxyType(
    {"embed_tokens.weight": "embedding.weight", "shared_head.head.weight": "head.weight"}
)


def shared_mlp(name: str) -> LayerNames:
    """Build the names of shared experts that are called `name` as one MLP."""
    return {
        "moe.shared.gate_up.weight": gate_and_up(
            f"{name}.gate_proj.weight", f"{name}.up_proj.weight"
        ),
        "moe.shared.down.weight": whole(f"{name}.down_proj.weight"),
    }
