"""The parameters of a model: name, full shape, module, and which mesh axis shards which dim."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from moewright.spec.ledger import Module
from moewright.spec.model import AttentionKind, ModelSpec, MoeSpec, NormKind, PositionKind, QkNorm

EMBEDDING_LAYER = -1

_ShardedDims = tuple[tuple[str, int], ...]

# What TP shards of weights [out, in]: the rows of the first of two linear layers, the columns of
# the second.
_TP_ROWS: _ShardedDims = (("tp", 0),)
_TP_COLUMNS: _ShardedDims = (("tp", 1),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Param:
    """One trained tensor, in HF orientation [out, in].

    `layer` is 0..L-1 for layers, -1 for the embeddings, L for the final norm and the head, L+1+d
    for everything of MTP depth d. `sharded_dims` holds (axis, dim) pairs; an axis that is not named
    holds a full copy. `module`: norms inside attention belong to attention, everything of an MTP
    depth to MTP.
    """

    name: str
    shape: tuple[int, ...]
    module: Module
    layer: int
    is_expert: bool
    sharded_dims: _ShardedDims

    @property
    def has_weight_decay(self) -> bool:
        return has_weight_decay(self.name, len(self.shape))

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamCount:
    """Numbers of elements.

    `total` and both `active` leave MTP out; `embedding` is the input embedding, tied or not.
    """

    total: int
    active: int
    active_without_embedding: int
    mtp: int
    embedding: int


@lru_cache(maxsize=2)  # an estimate needs every rank of one model
def parameters(model: ModelSpec) -> tuple[Param, ...]:
    """Return all parameters in registration order.

    They are embedding, layers, final norm, head, MTP depths. A tied head is absent.
    """
    return tuple(_all_parameters(model))


def has_weight_decay(name: str, dims: int) -> bool:
    """Return whether weight decay applies to a parameter.

    It applies to matrices and to no bias, of however many experts.
    """
    return dims > 1 and not name.endswith(".bias")


def selection_bias_name(layer: int) -> str:
    """Return the global name of a layer's selection bias, fp32 [experts].

    It is state of the router that no gradient reaches, hence no parameter.
    """
    return f"layers.{layer}.moe.router.selection_bias"


def count_parameters(model: ModelSpec) -> ParamCount:
    """Return the totals; an expert tensor is active with top_k / experts of its elements."""
    total = active = mtp = embedding = 0
    for param in parameters(model):
        if param.layer > model.layers:
            mtp += param.numel
            continue
        total += param.numel
        if param.is_expert and model.moe:
            active += param.numel * model.moe.router.top_k // model.moe.experts
        else:
            active += param.numel
        if param.name == "embedding.weight":
            embedding = param.numel
    return ParamCount(
        total=total,
        active=active,
        active_without_embedding=active - embedding,
        mtp=mtp,
        embedding=embedding,
    )


def _all_parameters(model: ModelSpec) -> Iterator[Param]:
    h, L = model.hidden_size, model.layers
    table = (model.vocab_size, h)
    yield _tensor("embedding.weight", table, Module.EMBEDDING, EMBEDDING_LAYER, _TP_ROWS)
    if model.position is PositionKind.LEARNED:
        yield _tensor("position.weight", (model.max_position, h), Module.EMBEDDING, EMBEDDING_LAYER)
    for layer in range(L):
        yield from _layer(model, f"layers.{layer}.", layer, is_moe=model.moe_layers[layer])
    yield from _norm(model, "final_norm", L)
    if not model.tie_embeddings:
        yield _tensor("head.weight", table, Module.HEAD, L, _TP_ROWS)
    for depth in range(model.mtp_layers):
        yield from _mtp(model, depth)


def _mtp(model: ModelSpec, depth: int) -> Iterator[Param]:
    """Yield the parameters of an MTP depth (docs/formulas.md 8).

    They are two norms, a projection of their concatenation, a layer like the last one, and a final
    norm.
    """
    h = model.hidden_size
    layer = model.layers + 1 + depth
    prefix = f"mtp.{depth}."
    yield from _norm(model, f"{prefix}embed_norm", layer, Module.MTP)
    yield from _norm(model, f"{prefix}hidden_norm", layer, Module.MTP)
    yield _tensor(f"{prefix}proj.weight", (h, 2 * h), Module.MTP, layer, _TP_ROWS)
    for param in _layer(model, f"{prefix}layer.", layer, is_moe=model.moe_layers[-1]):
        yield replace(param, module=Module.MTP)
    yield from _norm(model, f"{prefix}final_norm", layer, Module.MTP)


def _layer(model: ModelSpec, prefix: str, layer: int, *, is_moe: bool) -> Iterator[Param]:
    yield from _norm(model, f"{prefix}input_norm", layer)
    if model.attention.kind is AttentionKind.MLA:
        yield from _mla(model, f"{prefix}attention.", layer)
    else:
        yield from _gqa(model, f"{prefix}attention.", layer)
    yield from _norm(model, f"{prefix}post_norm", layer)
    if is_moe:
        yield from _moe(model, f"{prefix}moe.", layer)
    else:
        yield from _dense_mlp(model, f"{prefix}mlp.", layer)


def _gqa(model: ModelSpec, prefix: str, layer: int) -> Iterator[Param]:
    spec, h, module = model.attention, model.hidden_size, Module.ATTENTION
    for part, width in (("q", spec.q_width), ("k", spec.kv_width), ("v", spec.kv_width)):
        yield _tensor(f"{prefix}{part}.weight", (width, h), module, layer, _TP_ROWS)
        if spec.qkv_bias:
            yield _tensor(f"{prefix}{part}.bias", (width,), module, layer, _TP_ROWS)
    if spec.qk_norm is QkNorm.PER_HEAD:
        for part in ("q", "k"):
            yield _tensor(f"{prefix}{part}_norm.weight", (spec.head_dim,), module, layer)
    elif spec.qk_norm is QkNorm.FULL:
        for part, width in (("q", spec.q_width), ("k", spec.kv_width)):
            yield _tensor(f"{prefix}{part}_norm.weight", (width,), module, layer, _TP_ROWS)
    if spec.sinks:
        yield _tensor(f"{prefix}sinks", (spec.heads,), module, layer, _TP_ROWS)
    yield from _attention_output(model, prefix, layer)


def _mla(model: ModelSpec, prefix: str, layer: int) -> Iterator[Param]:
    """Yield the parameters of multi-latent attention.

    The down-projections and their norms are whole on every TP rank: their outputs feed all heads.
    """
    spec, h, module = model.attention, model.hidden_size, Module.ATTENTION
    if spec.q_lora_rank:
        q_up = (spec.q_width, spec.q_lora_rank)
        yield _tensor(f"{prefix}q_down.weight", (spec.q_lora_rank, h), module, layer)
        if spec.qkv_bias:
            yield _tensor(f"{prefix}q_down.bias", (spec.q_lora_rank,), module, layer)
        yield _tensor(f"{prefix}q_down_norm.weight", (spec.q_lora_rank,), module, layer)
        yield _tensor(f"{prefix}q_up.weight", q_up, module, layer, _TP_ROWS)
    else:
        yield _tensor(f"{prefix}q.weight", (spec.q_width, h), module, layer, _TP_ROWS)
    latent = spec.kv_lora_rank + spec.qk_rope_head_dim
    yield _tensor(f"{prefix}kv_down.weight", (latent, h), module, layer)
    if spec.qkv_bias:
        yield _tensor(f"{prefix}kv_down.bias", (latent,), module, layer)
    yield _tensor(f"{prefix}kv_norm.weight", (spec.kv_lora_rank,), module, layer)
    expanded = spec.heads * (spec.qk_nope_head_dim + spec.v_head_dim)
    kv_up = (expanded, spec.kv_lora_rank)
    yield _tensor(f"{prefix}kv_up.weight", kv_up, module, layer, _TP_ROWS)
    yield from _attention_output(model, prefix, layer)


def _attention_output(model: ModelSpec, prefix: str, layer: int) -> Iterator[Param]:
    h, width = model.hidden_size, model.attention.out_width
    yield _tensor(f"{prefix}o.weight", (h, width), Module.ATTENTION, layer, _TP_COLUMNS)
    if model.attention.out_bias:
        yield _tensor(f"{prefix}o.bias", (h,), Module.ATTENTION, layer)


def _dense_mlp(model: ModelSpec, prefix: str, layer: int) -> Iterator[Param]:
    ffn = model.dense_ffn_size
    yield from _mlp(model, prefix, layer, Module.DENSE_MLP, ffn, has_bias=model.mlp_bias)


def _mlp(
    model: ModelSpec, prefix: str, layer: int, module: Module, ffn: int, *, has_bias: bool
) -> Iterator[Param]:
    h = model.hidden_size
    name = "gate_up" if model.gated else "up"
    stacked = (2,) if model.gated else ()
    ffn_sharded = (("tp", len(stacked)),)
    yield _tensor(f"{prefix}{name}.weight", (*stacked, ffn, h), module, layer, ffn_sharded)
    if has_bias:
        yield _tensor(f"{prefix}{name}.bias", (*stacked, ffn), module, layer, ffn_sharded)
    yield _tensor(f"{prefix}down.weight", (h, ffn), module, layer, _TP_COLUMNS)
    if has_bias:
        yield _tensor(f"{prefix}down.bias", (h,), module, layer)


def _moe(model: ModelSpec, prefix: str, layer: int) -> Iterator[Param]:
    spec = model.moe
    if spec is None:
        raise ValueError(
            f"{model.name}: layer {layer} is marked as MoE but the model has no MoeSpec"
        )
    h = model.hidden_size
    yield _tensor(f"{prefix}router.weight", (spec.experts, h), Module.ROUTER, layer)
    if spec.router.logit_bias:
        yield _tensor(f"{prefix}router.bias", (spec.experts,), Module.ROUTER, layer)
    if spec.latent_size:
        width = model.expert_width
        yield _tensor(f"{prefix}latent.down.weight", (width, h), Module.EXPERTS, layer)
        yield _tensor(f"{prefix}latent.up.weight", (h, width), Module.EXPERTS, layer)
    yield from _routed_experts(model, spec, f"{prefix}experts.", layer)
    if spec.shared_ffn_size:
        yield from _mlp(
            model,
            f"{prefix}shared.",
            layer,
            Module.SHARED_EXPERTS,
            spec.shared_ffn_size,
            has_bias=False,
        )
        if spec.shared_gate:
            yield _tensor(f"{prefix}shared.gate.weight", (1, h), Module.SHARED_EXPERTS, layer)


def _routed_experts(model: ModelSpec, spec: MoeSpec, prefix: str, layer: int) -> Iterator[Param]:
    """Yield the weights of all routed experts, each stacked along its first dim."""
    module, width, ffn = Module.EXPERTS, model.expert_width, spec.ffn_size
    name = "gate_up" if model.gated else "up"
    stacked = (spec.experts, 2) if model.gated else (spec.experts,)
    up_sharded = (("ep", 0), ("etp", len(stacked)))
    up_shape = (*stacked, ffn, width)
    yield _tensor(f"{prefix}{name}.weight", up_shape, module, layer, up_sharded, is_expert=True)
    if spec.expert_bias:
        bias_shape = (*stacked, ffn)
        yield _tensor(f"{prefix}{name}.bias", bias_shape, module, layer, up_sharded, is_expert=True)
    down_shape = (spec.experts, width, ffn)
    down_sharded = (("ep", 0), ("etp", 2))
    yield _tensor(f"{prefix}down.weight", down_shape, module, layer, down_sharded, is_expert=True)
    if spec.expert_bias:
        # Each ETP rank adds its part to the sum, all of which they then share.
        bias_sharded = (("ep", 0), ("etp", 1))
        bias_shape = (spec.experts, width)
        yield _tensor(f"{prefix}down.bias", bias_shape, module, layer, bias_sharded, is_expert=True)


def _norm(model: ModelSpec, name: str, layer: int, module: Module = Module.NORM) -> Iterator[Param]:
    yield _tensor(f"{name}.weight", (model.hidden_size,), module, layer)
    if model.norm is NormKind.LAYER:
        yield _tensor(f"{name}.bias", (model.hidden_size,), module, layer)


def _tensor(
    name: str,
    shape: tuple[int, ...],
    module: Module,
    layer: int,
    sharded_dims: _ShardedDims = (),
    *,
    is_expert: bool = False,
) -> Param:
    return Param(
        name=name,
        shape=shape,
        module=module,
        layer=layer,
        is_expert=is_expert,
        sharded_dims=sharded_dims,
    )
