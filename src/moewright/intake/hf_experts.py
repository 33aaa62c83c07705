"""Experts and router of a config.json, one reader a family; docs/formulas.md 4 for what the routers
compute."""

from __future__ import annotations

from dataclasses import dataclass

from moewright.intake.fields import MAX_EXPERTS, MAX_FFN, MAX_LAYERS, FieldReader, nearest_divisor
from moewright.spec.model import MoeSpec, RouterSpec, ScoreFunction

EXPERT_COUNT_NAMES = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeLayers:
    spec: MoeSpec
    layers: tuple[bool, ...]


def _counts(fields: FieldReader) -> tuple[int, int]:
    """(experts, top-k), top-k no more than experts."""
    experts = fields.integer(*EXPERT_COUNT_NAMES, low=1, high=MAX_EXPERTS)
    spelling = next(name for name in EXPERT_COUNT_NAMES if fields.has_value(name))
    return experts, fields.integer(
        "num_experts_per_tok", "experts_per_token", low=1, high=experts, bound=spelling
    )


def _softmax_router(top_k: int, *, renormalize: bool) -> RouterSpec:
    """Softmax over the chosen experts equals softmax over all, chosen and rescaled to sum 1
    (docs/formulas.md 4)."""
    return RouterSpec(top_k=top_k, pre_softmax=not renormalize, renormalize=renormalize)


def read_mixtral(fields: FieldReader, layers: int) -> MoeLayers:
    experts, top_k = _counts(fields)
    fields.require_neutral("router_jitter_noise", 0)
    ffn = fields.integer("intermediate_size", low=1, high=MAX_FFN)
    router = _softmax_router(top_k, renormalize=True)
    return MoeLayers(
        spec=MoeSpec(experts=experts, ffn_size=ffn, router=router), layers=(True,) * layers
    )


def read_olmoe(fields: FieldReader, layers: int) -> MoeLayers:
    experts, top_k = _counts(fields)
    ffn = fields.integer("intermediate_size", low=1, high=MAX_FFN)
    router = _softmax_router(top_k, renormalize=fields.boolean("norm_topk_prob", default=False))
    return MoeLayers(
        spec=MoeSpec(experts=experts, ffn_size=ffn, router=router), layers=(True,) * layers
    )


def read_gpt_oss(fields: FieldReader, layers: int) -> MoeLayers:
    """The clamped SwiGLU of gpt-oss goes with the family: its two constants have one legal
    value."""
    experts, top_k = _counts(fields)
    fields.require_neutral("swiglu_limit", 7)
    fields.require_neutral("swiglu_alpha", 1.702)
    ffn = fields.integer("intermediate_size", low=1, high=MAX_FFN)
    router = RouterSpec(top_k=top_k, logit_bias=True)
    spec = MoeSpec(experts=experts, ffn_size=ffn, router=router, expert_bias=True)
    return MoeLayers(spec=spec, layers=(True,) * layers)


def read_qwen_moe(fields: FieldReader, layers: int) -> MoeLayers:
    experts, top_k = _counts(fields)
    step = fields.integer("decoder_sparse_step", low=1, high=MAX_LAYERS, default=1)
    dense = fields.sequence("mlp_only_layers", max_length=MAX_LAYERS) or ()
    for layer in dense:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < layers:
            raise fields.refusal("mlp_only_layers", f"must name layers 0..{layers - 1}", "[]")
    shared = fields.integer("shared_expert_intermediate_size", low=0, high=MAX_FFN, default=0)
    spec = MoeSpec(
        experts=experts,
        ffn_size=fields.integer("moe_intermediate_size", low=1, high=MAX_FFN),
        router=_softmax_router(top_k, renormalize=fields.boolean("norm_topk_prob", default=False)),
        shared_ffn_size=shared,
        shared_gate=bool(shared),
    )
    return MoeLayers(
        spec=spec, layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    )


def read_deepseek_v2(fields: FieldReader, layers: int) -> MoeLayers:
    method = fields.choice(
        "topk_method", choices=("greedy", "group_limited_greedy"), default="greedy"
    )
    fields.choice("scoring_func", choices=("softmax",), default="softmax")
    renormalize = fields.boolean("norm_topk_prob", default=False)
    return _deepseek(
        fields, layers, ScoreFunction.SOFTMAX, grouped=method != "greedy", renormalize=renormalize
    )


def read_deepseek_v3(fields: FieldReader, layers: int) -> MoeLayers:
    fields.choice("topk_method", choices=("noaux_tc",), default="noaux_tc")
    fields.choice("scoring_func", choices=("sigmoid",), default="sigmoid")
    renormalize = fields.boolean("norm_topk_prob", default=True)
    return _deepseek(fields, layers, ScoreFunction.SIGMOID, grouped=True, renormalize=renormalize)


def _deepseek(
    fields: FieldReader, layers: int, score: ScoreFunction, *, grouped: bool, renormalize: bool
) -> MoeLayers:
    """A group scores its highest expert in DeepSeek-V2, the sum of its two highest in DeepSeek-V3
    (their code)."""
    experts, top_k = _counts(fields)
    groups = fields.integer("n_group", low=1, high=experts, default=1)
    top_groups = fields.integer("topk_group", low=1, high=groups, bound="n_group", default=1)
    if experts % groups:
        raise fields.refusal(
            "n_group", f"must divide the {experts} experts", nearest_divisor(experts, groups)
        )
    if grouped and top_k > experts // groups * top_groups:
        rule = f"leaves {experts // groups * top_groups} experts to choose {top_k} from"
        raise fields.refusal("topk_group", rule, str(-(-top_k * groups // experts)))
    ffn = fields.integer("moe_intermediate_size", low=1, high=MAX_FFN)
    router = RouterSpec(
        top_k=top_k,
        score=score,
        pre_softmax=score is ScoreFunction.SOFTMAX and not renormalize,
        renormalize=renormalize,
        scaling_factor=fields.number("routed_scaling_factor", low=0, high=1e6, default=1.0),
        groups=groups if grouped else 1,
        top_groups=top_groups if grouped else 1,
        group_scores=(1 if score is ScoreFunction.SOFTMAX else 2) if grouped else 0,
        selection_bias=score is ScoreFunction.SIGMOID,
    )
    shared = fields.integer("n_shared_experts", low=0, high=MAX_EXPERTS, default=0)
    first = fields.integer(
        "first_k_dense_replace", low=0, high=layers, bound="num_hidden_layers", default=0
    )
    freq = fields.integer("moe_layer_freq", low=1, high=MAX_LAYERS, default=1)
    return MoeLayers(
        spec=MoeSpec(experts=experts, ffn_size=ffn, router=router, shared_ffn_size=shared * ffn),
        layers=tuple(i >= first and i % freq == 0 for i in range(layers)),
    )
