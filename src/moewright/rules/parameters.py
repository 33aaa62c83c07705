"""Every parameter of a model: canonical name, full shape, module, and which mesh axis cuts which
tensor dim."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from moewright.spec.ledger import Module
from moewright.spec.model import AttentionKind, ModelSpec, NormKind, PositionKind, QkNorm

EMBEDDING_LAYER = -1

_Shard = tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Param:
    """One trained tensor, in HF orientation [out, in].

    `layer`: 0..L-1; -1 the embeddings; L the final norm and the head; L+1+d everything of MTP depth
    d. `shard`: (axis, dim) pairs; an axis that is not named holds a full copy. `module`: norms
    inside attention belong to attention, everything of an MTP depth to MTP.
    """

    name: str
    shape: tuple[int, ...]
    module: Module
    layer: int
    is_expert: bool
    sharded_dims: _Shard

    @property
    def has_weight_decay(self) -> bool:
        return has_weight_decay(self.name, len(self.shape))

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamCount:
    """Elements. `total` and both `active` leave MTP out; `embedding` is the input embedding (tied
    or not)."""

    total: int
    active: int
    active_without_embedding: int
    mtp: int
    embedding: int


@lru_cache(maxsize=2)  # an estimate asks for every rank of one model
def parameters(model: ModelSpec) -> tuple[Param, ...]:
    """All parameters in registration order: embedding, layers, final norm, head, MTP depths. A tied
    head is absent."""
    return tuple(_walk(model))


def has_weight_decay(name: str, dims: int) -> bool:
    """Whether weight decay applies to a parameter: matrices, and no bias, of however many
    experts."""
    return dims > 1 and not name.endswith(".bias")


def selection_bias_name(layer: int) -> str:
    """Global name of a layer's selection bias, fp32 [experts]: state of the router that no gradient
    reaches, hence no parameter.
    """
    return f"layers.{layer}.moe.router.selection_bias"


def count_parameters(model: ModelSpec) -> ParamCount:
    """Totals; an expert tensor is active with the share top_k / experts of it."""
    total = active = mtp = embedding = 0
    for param in parameters(model):
        if param.layer > model.layers:
            mtp += param.numel
            continue
        total += param.numel
        active += (
            param.numel * model.moe.router.top_k // model.moe.experts
            if param.is_expert and model.moe
            else param.numel
        )
        if param.name == "embedding.weight":
            embedding = param.numel
    return ParamCount(
        total=total,
        active=active,
        active_without_embedding=active - embedding,
        mtp=mtp,
        embedding=embedding,
    )


def _walk(model: ModelSpec) -> Iterator[Param]:
    h, top = model.hidden_size, model.layers
    yield _tensor(
        "embedding.weight", (model.vocab_size, h), Module.EMBEDDING, EMBEDDING_LAYER, (("tp", 0),)
    )
    if model.position is PositionKind.LEARNED:
        yield _tensor("position.weight", (model.max_position, h), Module.EMBEDDING, EMBEDDING_LAYER)
    for layer in range(model.layers):
        yield from _layer(model, f"layers.{layer}.", layer, model.moe_layers[layer])
    yield from _norm(model, "final_norm", top)
    if not model.tie_embeddings:
        yield _tensor("head.weight", (model.vocab_size, h), Module.HEAD, top, (("tp", 0),))
    for depth in range(model.mtp_layers):
        yield from _mtp(model, depth)


def _mtp(model: ModelSpec, depth: int) -> Iterator[Param]:
    """docs/formulas.md 8: two norms, a projection of their concatenation, a layer like the last
    one, a final norm."""
    h, layer, prefix = model.hidden_size, model.layers + 1 + depth, f"mtp.{depth}."
    yield from _norm(model, f"{prefix}embed_norm", layer, Module.MTP)
    yield from _norm(model, f"{prefix}hidden_norm", layer, Module.MTP)
    yield _tensor(f"{prefix}proj.weight", (h, 2 * h), Module.MTP, layer, (("tp", 0),))
    for param in _layer(model, f"{prefix}layer.", layer, model.moe_layers[-1]):
        yield Param(
            name=param.name,
            shape=param.shape,
            module=Module.MTP,
            layer=layer,
            is_expert=param.is_expert,
            sharded_dims=param.sharded_dims,
        )
    yield from _norm(model, f"{prefix}final_norm", layer, Module.MTP)


def _layer(model: ModelSpec, prefix: str, layer: int, moe: bool) -> Iterator[Param]:
    yield from _norm(model, f"{prefix}input_norm", layer)
    attention = _mla if model.attention.kind is AttentionKind.MLA else _gqa
    yield from attention(model, f"{prefix}attention.", layer)
    yield from _norm(model, f"{prefix}post_norm", layer)
    yield from (_moe if moe else _dense)(model, f"{prefix}{'moe' if moe else 'mlp'}.", layer)


def _gqa(model: ModelSpec, prefix: str, layer: int) -> Iterator[Param]:
    spec, h, module = model.attention, model.hidden_size, Module.ATTENTION
    cut = (("tp", 0),)
    for part, width in (("q", spec.q_width), ("k", spec.kv_width), ("v", spec.kv_width)):
        yield _tensor(f"{prefix}{part}.weight", (width, h), module, layer, cut)
        if spec.qkv_bias:
            yield _tensor(f"{prefix}{part}.bias", (width,), module, layer, cut)
    if spec.qk_norm is QkNorm.PER_HEAD:
        for part in ("q", "k"):
            yield _tensor(f"{prefix}{part}_norm.weight", (spec.head_dim,), module, layer)
    elif spec.qk_norm is QkNorm.FULL:
        for part, width in (("q", spec.q_width), ("k", spec.kv_width)):
            yield _tensor(f"{prefix}{part}_norm.weight", (width,), module, layer, cut)
    if spec.sinks:
        yield _tensor(f"{prefix}sinks", (spec.heads,), module, layer, cut)
    yield from _out(model, prefix, layer)


def _mla(model: ModelSpec, prefix: str, layer: int) -> Iterator[Param]:
    """The down-projections and their norms are whole on every TP rank: their outputs feed all
    heads."""
    spec, h, module = model.attention, model.hidden_size, Module.ATTENTION
    cut = (("tp", 0),)
    if spec.q_lora_rank:
        yield _tensor(f"{prefix}q_down.weight", (spec.q_lora_rank, h), module, layer)
        if spec.qkv_bias:
            yield _tensor(f"{prefix}q_down.bias", (spec.q_lora_rank,), module, layer)
        yield _tensor(f"{prefix}q_down_norm.weight", (spec.q_lora_rank,), module, layer)
        yield _tensor(f"{prefix}q_up.weight", (spec.q_width, spec.q_lora_rank), module, layer, cut)
    else:
        yield _tensor(f"{prefix}q.weight", (spec.q_width, h), module, layer, cut)
    latent = spec.kv_lora_rank + spec.qk_rope_head_dim
    yield _tensor(f"{prefix}kv_down.weight", (latent, h), module, layer)
    if spec.qkv_bias:
        yield _tensor(f"{prefix}kv_down.bias", (latent,), module, layer)
    yield _tensor(f"{prefix}kv_norm.weight", (spec.kv_lora_rank,), module, layer)
    expanded = spec.heads * (spec.qk_nope_head_dim + spec.v_head_dim)
    yield _tensor(f"{prefix}kv_up.weight", (expanded, spec.kv_lora_rank), module, layer, cut)
    yield from _out(model, prefix, layer)


def _out(model: ModelSpec, prefix: str, layer: int) -> Iterator[Param]:
    h, width = model.hidden_size, model.attention.out_width
    yield _tensor(f"{prefix}o.weight", (h, width), Module.ATTENTION, layer, (("tp", 1),))
    if model.attention.out_bias:
        yield _tensor(f"{prefix}o.bias", (h,), Module.ATTENTION, layer)


def _dense(model: ModelSpec, prefix: str, layer: int) -> Iterator[Param]:
    yield from _mlp(model, prefix, layer, Module.DENSE_MLP, model.dense_ffn_size, model.mlp_bias)


def _mlp(
    model: ModelSpec, prefix: str, layer: int, module: Module, ffn: int, bias: bool
) -> Iterator[Param]:
    h = model.hidden_size
    name, lead = ("gate_up", (2,)) if model.gated else ("up", ())
    cut = (("tp", len(lead)),)
    yield _tensor(f"{prefix}{name}.weight", (*lead, ffn, h), module, layer, cut)
    if bias:
        yield _tensor(f"{prefix}{name}.bias", (*lead, ffn), module, layer, cut)
    yield _tensor(f"{prefix}down.weight", (h, ffn), module, layer, (("tp", 1),))
    if bias:
        yield _tensor(f"{prefix}down.bias", (h,), module, layer)


def _moe(model: ModelSpec, prefix: str, layer: int) -> Iterator[Param]:
    spec, h = model.moe, model.hidden_size
    if spec is None:
        raise ValueError(
            f"{model.name}: layer {layer} is marked as MoE but the model has no MoeSpec"
        )
    experts, f = spec.experts, spec.ffn_size
    yield _tensor(f"{prefix}router.weight", (experts, h), Module.ROUTER, layer)
    if spec.router.logit_bias:
        yield _tensor(f"{prefix}router.bias", (experts,), Module.ROUTER, layer)
    name, lead = ("gate_up", (experts, 2)) if model.gated else ("up", (experts,))
    rows, inner = (("ep", 0), ("etp", len(lead))), model.expert_width
    if spec.latent_size:
        yield _tensor(f"{prefix}latent.down.weight", (inner, h), Module.EXPERTS, layer)
        yield _tensor(f"{prefix}latent.up.weight", (h, inner), Module.EXPERTS, layer)
    yield _tensor(
        f"{prefix}experts.{name}.weight",
        (*lead, f, inner),
        Module.EXPERTS,
        layer,
        rows,
        expert=True,
    )
    if spec.expert_bias:
        yield _tensor(
            f"{prefix}experts.{name}.bias", (*lead, f), Module.EXPERTS, layer, rows, expert=True
        )
    columns = (("ep", 0), ("etp", 2))
    yield _tensor(
        f"{prefix}experts.down.weight",
        (experts, inner, f),
        Module.EXPERTS,
        layer,
        columns,
        expert=True,
    )
    if spec.expert_bias:
        biases = (
            ("ep", 0),
            ("etp", 1),
        )  # each adds its part to the sum, all of which they then share
        yield _tensor(
            f"{prefix}experts.down.bias",
            (experts, inner),
            Module.EXPERTS,
            layer,
            biases,
            expert=True,
        )
    if spec.shared_ffn_size:
        yield from _mlp(
            model,
            f"{prefix}shared.",
            layer,
            Module.SHARED_EXPERTS,
            spec.shared_ffn_size,
            bias=False,
        )
        if spec.shared_gate:
            yield _tensor(f"{prefix}shared.gate.weight", (1, h), Module.SHARED_EXPERTS, layer)


def _norm(model: ModelSpec, name: str, layer: int, module: Module = Module.NORM) -> Iterator[Param]:
    yield _tensor(f"{name}.weight", (model.hidden_size,), module, layer)
    if model.norm is NormKind.LAYER:
        yield _tensor(f"{name}.bias", (model.hidden_size,), module, layer)


def _tensor(
    name: str,
    shape: tuple[int, ...],
    module: Module,
    layer: int,
    shard: _Shard = (),
    *,
    expert: bool = False,
) -> Param:
    return Param(
        name=name, shape=shape, module=module, layer=layer, is_expert=expert, sharded_dims=shard
    )
