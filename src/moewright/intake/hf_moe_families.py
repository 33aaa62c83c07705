"""The experts and the router of families that spell or route in ways of their own.

Sources: the modelling files of transformers 5 of the same names, and the remote code of Ling's and
Hunyuan's checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moewright.intake.fields import (
    MAX_EXPERTS,
    MAX_FFN,
    MAX_LAYERS,
    MAX_VOCAB,
    FieldReader,
)
from moewright.intake.hf_experts import (
    MoeLayers,
    read_counts,
    read_dense_first,
    read_groups,
    softmax_router,
)
from moewright.intake.hf_layers import nemotron_letters
from moewright.spec.model import MoeSpec, RouterSpec, ScoreFunction


def read_minimax(fields: FieldReader, layers: int) -> MoeLayers:
    """Read MiniMax-M2's experts: sigmoid scores with a bias for the choice, in every layer.

    The modules that predict further tokens are not in the checkpoints, and are not read.
    """
    experts, top_k = read_counts(fields)
    fields.require_neutral("router_jitter_noise", 0)
    fields.choice("scoring_func", choices=("sigmoid",), default="sigmoid")
    fields.require_neutral("shared_intermediate_size", 0)
    fields.require_neutral("attn_type_list", [1] * layers, (1,) * layers)
    fields.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "qk_norm_type")
    has_bias = fields.boolean("use_routing_bias", default=True)
    ffn = fields.integer("intermediate_size", "moe_intermediate_size", low=1, high=MAX_FFN)
    router = RouterSpec(top_k=top_k, score=ScoreFunction.SIGMOID, selection_bias=has_bias)
    return MoeLayers(
        spec=MoeSpec(experts=experts, ffn_size=ffn, router=router), layers=(True,) * layers
    )


def read_hy_v3(fields: FieldReader, layers: int) -> MoeLayers:
    """Read Hy3's experts: sigmoid scores, chosen with a bias, with shared experts."""
    experts, top_k = read_counts(fields)
    for name in ("moe_router_use_sigmoid", "moe_router_enable_expert_bias", "route_norm"):
        fields.require_neutral(name, True)
    fields.require_neutral("qk_norm", True)
    fields.ignore(
        "enable_moe_fp32_combine",  # sums and scores are of fp32 here in any case
        "enable_attention_fp32_softmax",
        "enable_lm_head_fp32",
        "use_grouped_mm",
    )
    ffn = fields.integer("moe_intermediate_size", "expert_hidden_dim", low=1, high=MAX_FFN)
    shared = fields.integer("num_shared_experts", low=0, high=MAX_EXPERTS, default=1)
    router = RouterSpec(
        top_k=top_k,
        score=ScoreFunction.SIGMOID,
        selection_bias=True,
        scaling_factor=fields.number("router_scaling_factor", low=0, high=1e6, default=1.0),
    )
    return MoeLayers(
        spec=MoeSpec(experts=experts, ffn_size=ffn, router=router, shared_ffn_size=shared * ffn),
        layers=read_dense_first(fields, layers, default=min(1, layers)),
    )


def read_jamba(fields: FieldReader, layers: int) -> MoeLayers:
    """Read Jamba's experts: softmax over all, not divided again, in one layer of each period."""
    experts, top_k = read_counts(fields)
    period = fields.integer("expert_layer_period", low=1, high=MAX_LAYERS, default=2)
    offset = fields.integer(
        "expert_layer_offset", low=0, high=period - 1, default=min(1, period - 1)
    )
    ffn = fields.integer("intermediate_size", low=1, high=MAX_FFN)
    fields.ignore("num_logits_to_keep")
    spec = MoeSpec(experts=experts, ffn_size=ffn, router=softmax_router(top_k, renormalize=False))
    has_experts = experts > 1
    return MoeLayers(
        spec=spec,
        layers=tuple(has_experts and layer % period == offset for layer in range(layers)),
    )


def read_ernie(fields: FieldReader, layers: int) -> MoeLayers:
    """Read ERNIE 4.5's experts: softmax over all, chosen with a bias, in a range of layers."""
    experts = fields.integer("moe_num_experts", "num_experts", low=1, high=MAX_EXPERTS)
    top_k = fields.integer(
        "moe_k", "num_experts_per_tok", low=1, high=experts, bound="moe_num_experts"
    )
    start = fields.integer("moe_layer_start_index", low=0, high=layers, default=1)
    end = fields.integer("moe_layer_end_index", low=-1, high=MAX_LAYERS, default=-1)
    step = fields.integer("moe_layer_interval", low=1, high=MAX_LAYERS, default=1)
    shared = fields.integer("moe_num_shared_experts", low=0, high=MAX_EXPERTS, default=0)
    ffn = fields.integer("moe_intermediate_size", low=1, high=MAX_FFN)
    has_bias = fields.boolean("moe_use_aux_free", default=True)
    fields.ignore("moe_norm_min", "moe_capacity", "moe_gate", "moe_gate_act")
    last = layers - 1 if end == -1 else end
    router = RouterSpec(top_k=top_k, pre_softmax=False, selection_bias=has_bias)
    return MoeLayers(
        spec=MoeSpec(experts=experts, ffn_size=ffn, router=router, shared_ffn_size=shared * ffn),
        layers=tuple((i + 1) % step == 0 and start <= i <= last for i in range(layers)),
    )


def read_hunyuan(fields: FieldReader, layers: int) -> MoeLayers:
    """Read Hunyuan's experts: softmax over the chosen, with shared experts, in every layer.

    A number may be given for each layer; layers that differ are refused.
    """
    experts = fields.integer("num_experts", "num_local_experts", low=1, high=MAX_EXPERTS)
    top_k = _read_alike(fields, "moe_topk", layers, "num_experts_per_tok")
    if not 1 <= top_k <= experts:
        raise fields.refusal("moe_topk", f"must be in 1..{experts}", str(experts))
    shared = 0
    if fields.boolean("use_mixed_mlp_moe", default=True):
        shared = _read_alike(fields, "num_shared_expert", layers, default=1)
    fields.require_neutral("moe_layer_num_skipped", 0)
    fields.require_neutral("use_cla", False)
    fields.ignore(
        "use_rotary_pos_emb",
        "moe_random_routing_dropped_token",
        "norm_type",
        "attention_head_dim",
        "cla_share_factor",
        "sep_token_id",
        "eod_token_id",
    )
    dense = fields.integer("intermediate_size", low=1, high=MAX_FFN)
    ffn = _read_alike(fields, "moe_intermediate_size", layers, default=dense)
    router = softmax_router(top_k, renormalize=fields.boolean("norm_topk_prob", default=True))
    return MoeLayers(
        spec=MoeSpec(experts=experts, ffn_size=ffn, router=router, shared_ffn_size=shared * ffn),
        layers=(True,) * layers,
    )


def _read_alike(
    fields: FieldReader, name: str, layers: int, *spellings: str, default: int | None = None
) -> int:
    """Read a whole number that may be given once, or for each layer the same."""
    value: Any = fields.raw_value(name)
    if not isinstance(value, list):
        return fields.integer(name, *spellings, low=0, high=MAX_FFN, default=default)
    fields.ignore(name)
    is_number = bool(value) and isinstance(value[0], int) and not isinstance(value[0], bool)
    if not is_number or value != [value[0]] * layers or not 0 <= value[0] <= MAX_FFN:
        raise fields.refusal(name, f"must be the same whole number for each of {layers} layers")
    return int(value[0])


def read_bailing(fields: FieldReader, layers: int) -> MoeLayers:
    """Read the experts of Ling and Ring: softmax at first, sigmoid with a bias since version 2."""
    experts, top_k = read_counts(fields)
    is_sigmoid = fields.raw_value("model_type") == "bailing_moe_v2"
    is_sigmoid |= "BailingMoeV2ForCausalLM" in (fields.raw_value("architectures") or ())
    default = "sigmoid" if is_sigmoid else "softmax"
    score = fields.choice("score_function", choices=("softmax", "sigmoid"), default=default)
    has_bias = fields.boolean("moe_router_enable_expert_bias", default=score == "sigmoid")
    renormalize = fields.boolean("norm_topk_prob", default=True)
    fields.ignore("moe_router_enable_shared_expert", "use_rmsnorm", "max_window_layers")
    for name in ("norm_head", "norm_softmax", "multi_gate"):
        fields.require_neutral(name, False)
    router = softmax_router(top_k, renormalize=renormalize)
    if score == "sigmoid":
        router = RouterSpec(
            top_k=top_k,
            score=ScoreFunction.SIGMOID,
            renormalize=renormalize,
            selection_bias=has_bias,
        )
        router = read_groups(fields, experts, replace(router, group_scores=2))
    router = replace(router, scaling_factor=_read_scaling(fields))
    ffn = fields.integer("moe_intermediate_size", low=1, high=MAX_FFN)
    shared = fields.integer("num_shared_experts", low=0, high=MAX_EXPERTS, default=0)
    width = fields.integer("moe_shared_expert_intermediate_size", low=1, high=MAX_FFN, default=ffn)
    return MoeLayers(
        spec=MoeSpec(experts=experts, ffn_size=ffn, router=router, shared_ffn_size=shared * width),
        layers=read_dense_first(fields, layers),
    )


def read_phimoe(fields: FieldReader, layers: int) -> MoeLayers:
    """Read Phi-MoE's experts: two choices one after the other (sparse mixer), in every layer.

    The jitter is the threshold of its choice, not noise; it also samples its choices in training,
    where moewright chooses as in inference.
    """
    experts, top_k = read_counts(fields)
    if top_k != 2:
        raise fields.refusal("num_experts_per_tok", "the sparse mixer chooses 2", "2")
    mixer_eps = fields.number("router_jitter_noise", low=0, high=1, default=0.01)
    fields.require_neutral("input_jitter_noise", 0, 0.01)
    fields.ignore("original_max_position_embeddings")
    ffn = fields.integer("intermediate_size", low=1, high=MAX_FFN)
    router = RouterSpec(
        top_k=top_k, score=ScoreFunction.SPARSE_MIXER, renormalize=False, mixer_eps=mixer_eps
    )
    return MoeLayers(
        spec=MoeSpec(experts=experts, ffn_size=ffn, router=router), layers=(True,) * layers
    )


def read_granite(fields: FieldReader, layers: int) -> MoeLayers:
    """Read Granite's experts: softmax over the chosen, in every layer."""
    experts, top_k = read_counts(fields)
    shared = fields.integer("shared_intermediate_size", low=0, high=MAX_FFN, default=0)
    ffn = fields.integer("intermediate_size", low=1, high=MAX_FFN)
    router = softmax_router(top_k, renormalize=True)
    return MoeLayers(
        spec=MoeSpec(experts=experts, ffn_size=ffn, router=router, shared_ffn_size=shared),
        layers=(True,) * layers,
    )


def read_llama4(fields: FieldReader, layers: int) -> MoeLayers:
    """Read Llama 4's experts: sigmoid scores that weight the input, in every n-th layer."""
    experts, top_k = read_counts(fields)
    fields.require_neutral("router_jitter_noise", 0)
    fields.ignore("for_llm_class", "use_scaled_rope")
    step = fields.integer("interleave_moe_layer_step", low=1, high=MAX_LAYERS, default=1)
    listed = fields.sequence("moe_layers", max_length=layers)
    numbers = tuple(range(step - 1, layers, step)) if listed is None else listed
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < layers for i in numbers):
        raise fields.refusal("moe_layers", f"must name layers 0..{layers - 1}", "null")
    ffn = fields.integer("intermediate_size", low=1, high=MAX_FFN)
    router = RouterSpec(
        top_k=top_k, score=ScoreFunction.SIGMOID, renormalize=False, scales_input=True
    )
    return MoeLayers(
        spec=MoeSpec(experts=experts, ffn_size=ffn, router=router, shared_ffn_size=ffn),
        layers=tuple(i in numbers for i in range(layers)),
    )


def read_kimi_linear(fields: FieldReader, layers: int) -> MoeLayers:
    """Read Kimi Linear's experts: sigmoid scores with a bias, after the first dense layers."""
    experts = fields.integer("num_experts", "num_local_experts", low=1, high=MAX_EXPERTS)
    top_k = fields.integer(
        "num_experts_per_token", "num_experts_per_tok", low=1, high=experts, bound="num_experts"
    )
    fields.choice("moe_router_activation_func", choices=("sigmoid",), default="sigmoid")
    fields.require_neutral("num_expert_group", 1)
    fields.require_neutral("n_group", 1)
    fields.require_neutral("topk_group", 1)
    fields.ignore("use_grouped_topk")
    renormalize = fields.boolean("moe_renormalize", default=True)
    router = RouterSpec(
        top_k=top_k,
        score=ScoreFunction.SIGMOID,
        renormalize=renormalize,
        scaling_factor=_read_scaling(fields),
        selection_bias=True,
    )
    ffn = fields.integer("moe_intermediate_size", low=1, high=MAX_FFN)
    shared = fields.integer(
        "num_shared_experts", "n_shared_experts", low=0, high=MAX_EXPERTS, default=0
    )
    return MoeLayers(
        spec=MoeSpec(experts=experts, ffn_size=ffn, router=router, shared_ffn_size=shared * ffn),
        layers=read_dense_first(fields, layers),
    )


def read_nemotron_h(fields: FieldReader, layers: int) -> MoeLayers:
    """Read Nemotron-H's experts, in the layers that its pattern marks with E."""
    pattern = nemotron_letters(fields)
    has_experts = tuple(letter == "E" for letter in pattern)
    if not any(has_experts):
        fields.ignore(*(name for name in fields.unread_names() if name.startswith("moe_")))
        fields.ignore("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group")
        fields.ignore("topk_group", "norm_topk_prob", "routed_scaling_factor")
        placeholder = MoeSpec(experts=1, ffn_size=1, router=RouterSpec(top_k=1))
        return MoeLayers(spec=placeholder, layers=has_experts)
    experts, top_k = read_counts(fields)
    router = RouterSpec(
        top_k=top_k,
        score=ScoreFunction.SIGMOID,
        renormalize=fields.boolean("norm_topk_prob", default=True),
        selection_bias=True,
        group_scores=2,
    )
    router = replace(read_groups(fields, experts, router), scaling_factor=_read_scaling(fields))
    shared = fields.integer("n_shared_experts", low=0, high=MAX_EXPERTS, default=1)
    width = fields.integer("moe_shared_expert_intermediate_size", low=0, high=MAX_FFN, default=0)
    ffn = fields.integer("moe_intermediate_size", low=1, high=MAX_FFN)
    spec = MoeSpec(experts=experts, ffn_size=ffn, router=router, shared_ffn_size=shared * width)
    return MoeLayers(spec=spec, layers=has_experts)


def read_deepseek_v4(fields: FieldReader, layers: int) -> MoeLayers:
    """Read DeepSeek-V4's experts, in every layer; the first choose by the token's number."""
    experts, top_k = read_counts(fields)
    fields.choice("scoring_func", choices=("sqrtsoftplus",), default="sqrtsoftplus")
    fields.choice("topk_method", choices=("noaux_tc",), default="noaux_tc")
    fields.require_neutral("router_jitter_noise", 0)
    fields.ignore("expert_dtype", "intermediate_size")
    kinds = fields.sequence("mlp_layer_types", max_length=layers)
    default = 3 if kinds is None else sum(kind == "hash_moe" for kind in kinds)
    words = ["hash_moe"] * default + ["moe"] * (layers - default)
    if kinds is not None and list(kinds) != words:
        rule = "must hold hash_moe for the first layers, and moe for all others"
        raise fields.refusal("mlp_layer_types", rule)
    hash_layers = fields.integer("num_hash_layers", low=0, high=MAX_VOCAB, default=default)
    router = RouterSpec(
        top_k=top_k,
        score=ScoreFunction.SQRT_SOFTPLUS,
        renormalize=fields.boolean("norm_topk_prob", default=True),
        scaling_factor=_read_scaling(fields),
        selection_bias=True,
        hash_layers=min(hash_layers, layers),
    )
    ffn = fields.integer("moe_intermediate_size", low=1, high=MAX_FFN)
    shared = fields.integer("n_shared_experts", low=0, high=MAX_EXPERTS, default=1)
    return MoeLayers(
        spec=MoeSpec(experts=experts, ffn_size=ffn, router=router, shared_ffn_size=shared * ffn),
        layers=(True,) * layers,
    )


def _read_scaling(fields: FieldReader) -> float:
    return fields.number("routed_scaling_factor", low=0, high=1e6, default=1.0)
