"""The experts and the router of a config.json, with one reader a family.

docs/formulas.md 4 says what the routers compute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moewright.intake.fields import (
    MAX_EXPERTS,
    MAX_FFN,
    MAX_LAYERS,
    FieldReader,
    nearest_divisor,
)
from moewright.spec.model import MoeSpec, RouterSpec, ScoreFunction

EXPERT_COUNT_NAMES = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeLayers:
    """The experts of a layer, and whether each layer has them."""

    spec: MoeSpec
    layers: tuple[bool, ...]


def read_mixtral(fields: FieldReader, layers: int) -> MoeLayers:
    """Read Mixtral's experts: softmax over the chosen, in every layer."""
    experts, top_k = read_counts(fields)
    fields.require_neutral("router_jitter_noise", 0)
    ffn = fields.integer("intermediate_size", low=1, high=MAX_FFN)
    router = softmax_router(top_k, renormalize=True)
    return MoeLayers(
        spec=MoeSpec(experts=experts, ffn_size=ffn, router=router), layers=(True,) * layers
    )


def read_olmoe(fields: FieldReader, layers: int) -> MoeLayers:
    """Read OLMoE's experts: softmax over all, in every layer."""
    experts, top_k = read_counts(fields)
    ffn = fields.integer("intermediate_size", low=1, high=MAX_FFN)
    router = softmax_router(top_k, renormalize=fields.boolean("norm_topk_prob", default=False))
    return MoeLayers(
        spec=MoeSpec(experts=experts, ffn_size=ffn, router=router), layers=(True,) * layers
    )


def read_gpt_oss(fields: FieldReader, layers: int) -> MoeLayers:
    """Read gpt-oss's experts, with biases, in every layer.

    The clamped SwiGLU goes with the family: its two constants have one legal value.
    """
    experts, top_k = read_counts(fields)
    fields.require_neutral("swiglu_limit", 7)
    fields.require_neutral("swiglu_alpha", 1.702)
    ffn = fields.integer("intermediate_size", low=1, high=MAX_FFN)
    router = RouterSpec(top_k=top_k, logit_bias=True)
    spec = MoeSpec(experts=experts, ffn_size=ffn, router=router, expert_bias=True)
    return MoeLayers(spec=spec, layers=(True,) * layers)


def read_qwen_moe(fields: FieldReader, layers: int) -> MoeLayers:
    """Read the experts of Qwen2-MoE and Qwen3-MoE, in every n-th layer except `mlp_only_layers`."""
    return _read_qwen(fields, layers, renormalizes=False)


def read_qwen_hybrid(fields: FieldReader, layers: int) -> MoeLayers:
    """Read the experts of Qwen3-Next and Qwen3.5, whose chosen probabilities sum to 1."""
    return _read_qwen(fields, layers, renormalizes=True)


def _read_qwen(fields: FieldReader, layers: int, *, renormalizes: bool) -> MoeLayers:
    """Read Qwen's experts; `renormalizes` is what holds where the config does not say."""
    experts, top_k = read_counts(fields)
    step = fields.integer("decoder_sparse_step", low=1, high=MAX_LAYERS, default=1)
    dense = fields.sequence("mlp_only_layers", max_length=MAX_LAYERS) or ()
    for layer in dense:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < layers:
            raise fields.refusal("mlp_only_layers", f"must name layers 0..{layers - 1}", "[]")
    shared = fields.integer("shared_expert_intermediate_size", low=0, high=MAX_FFN, default=0)
    renormalize = fields.boolean("norm_topk_prob", default=renormalizes)
    spec = MoeSpec(
        experts=experts,
        ffn_size=fields.integer("moe_intermediate_size", low=1, high=MAX_FFN),
        router=softmax_router(top_k, renormalize=renormalize),
        shared_ffn_size=shared,
        shared_gate=bool(shared),
    )
    return MoeLayers(
        spec=spec, layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    )


def read_deepseek_v2(fields: FieldReader, layers: int) -> MoeLayers:
    """Read DeepSeek-V2's experts: softmax scores, and a group scores its highest expert."""
    method = fields.choice(
        "topk_method", choices=("greedy", "group_limited_greedy"), default="greedy"
    )
    fields.choice("scoring_func", choices=("softmax",), default="softmax")
    renormalize = fields.boolean("norm_topk_prob", default=False)
    router = RouterSpec(
        top_k=1,
        score=ScoreFunction.SOFTMAX,
        pre_softmax=not renormalize,
        renormalize=renormalize,
        group_scores=1 if method == "group_limited_greedy" else 0,
    )
    return _read_deepseek(fields, layers, router)


def read_deepseek_v3(fields: FieldReader, layers: int) -> MoeLayers:
    """Read DeepSeek-V3's experts: sigmoid scores, and a group scores its two highest experts."""
    fields.choice("topk_method", choices=("noaux_tc",), default="noaux_tc")
    fields.choice("scoring_func", choices=("sigmoid",), default="sigmoid")
    router = RouterSpec(
        top_k=1,
        score=ScoreFunction.SIGMOID,
        pre_softmax=False,
        renormalize=fields.boolean("norm_topk_prob", default=True),
        group_scores=2,
        selection_bias=True,
    )
    return _read_deepseek(fields, layers, router)


def _read_deepseek(fields: FieldReader, layers: int, router: RouterSpec) -> MoeLayers:
    """Read the experts of a DeepSeek config, with the groups that the router chooses from.

    `router` has the family's scores. Its `group_scores` is the number of experts whose scores rate
    a group (DeepSeek's code); it is 0 where the router chooses from all experts at once.
    """
    experts, top_k = read_counts(fields)
    router = read_groups(fields, experts, replace(router, top_k=top_k))
    ffn = fields.integer("moe_intermediate_size", low=1, high=MAX_FFN)
    scaling = fields.number("routed_scaling_factor", low=0, high=1e6, default=1.0)
    shared = fields.integer("n_shared_experts", low=0, high=MAX_EXPERTS, default=0)
    return MoeLayers(
        spec=MoeSpec(
            experts=experts,
            ffn_size=ffn,
            router=replace(router, scaling_factor=scaling),
            shared_ffn_size=shared * ffn,
        ),
        layers=read_dense_first(fields, layers),
    )


def read_groups(fields: FieldReader, experts: int, router: RouterSpec) -> RouterSpec:
    """Read the groups that the router chooses from, where it rates groups at all.

    Raises:
        BadInput: the groups do not divide the experts, or leave too few to choose from.
    """
    groups = fields.integer("n_group", low=1, high=experts, default=1)
    top_groups = fields.integer("topk_group", low=1, high=groups, bound="n_group", default=1)
    if experts % groups:
        nearest = nearest_divisor(experts, groups)
        raise fields.refusal("n_group", f"must divide the {experts} experts", nearest)
    if not router.group_scores:
        return router
    eligible = experts // groups * top_groups
    if router.top_k > eligible:
        rule = f"leaves {eligible} experts to choose {router.top_k} from"
        raise fields.refusal("topk_group", rule, str(-(-router.top_k * groups // experts)))
    return replace(router, groups=groups, top_groups=top_groups)


def read_dense_first(fields: FieldReader, layers: int, *, default: int = 0) -> tuple[bool, ...]:
    """Read which layers have experts: those after the first dense ones, or as listed.

    `default` is the number of dense layers where the config does not say.

    Raises:
        BadInput: the list has another length, or another word than dense and sparse.
    """
    first = fields.integer(
        "first_k_dense_replace", low=0, high=layers, bound="num_hidden_layers", default=default
    )
    step = fields.integer("moe_layer_freq", low=1, high=MAX_LAYERS, default=1)
    listed = fields.sequence("mlp_layer_types", max_length=layers)
    if listed is None:
        return tuple(i >= first and i % step == 0 for i in range(layers))
    if len(listed) != layers or any(kind not in ("dense", "sparse") for kind in listed):
        raise fields.refusal("mlp_layer_types", f"must hold dense or sparse for {layers} layers")
    return tuple(kind == "sparse" for kind in listed)


def read_counts(fields: FieldReader) -> tuple[int, int]:
    """Read (experts, top-k), top-k at most the experts.

    Raises:
        BadInput: a number is missing or wrong.
    """
    experts = fields.integer(*EXPERT_COUNT_NAMES, low=1, high=MAX_EXPERTS)
    spelling = next(name for name in EXPERT_COUNT_NAMES if fields.has_value(name))
    top_k = fields.integer(
        "num_experts_per_tok", "experts_per_token", low=1, high=experts, bound=spelling
    )
    return experts, top_k


def softmax_router(top_k: int, *, renormalize: bool) -> RouterSpec:
    """Build a router with softmax scores.

    Softmax over the chosen experts equals softmax over all, chosen and rescaled to sum 1
    (docs/formulas.md 4).
    """
    return RouterSpec(top_k=top_k, pre_softmax=not renormalize, renormalize=renormalize)
