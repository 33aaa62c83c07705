"""The parameters of a model: name, full shape, module, and which mesh axis shards which dim."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from moewright.rules.shapes.mixers import compressed_attention, indexer, recurrent_mixer
from moewright.rules.shapes.param import EMBEDDING_LAYER, TP_COLUMNS, TP_ROWS, Param, tensor
from moewright.spec.ledger import Module
from moewright.spec.model import (
    AttentionKind,
    MixerKind,
    ModelSpec,
    MoeSpec,
    NormKind,
    PositionKind,
    QkNorm,
)


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


@lru_cache(maxsize=2)
def parameters_by_layer(model: ModelSpec) -> Mapping[int, tuple[Param, ...]]:
    """Return the parameters of each layer, as Param.layer numbers them."""
    by_layer: dict[int, list[Param]] = {}
    for param in parameters(model):
        by_layer.setdefault(param.layer, []).append(param)
    return MappingProxyType({layer: tuple(params) for layer, params in by_layer.items()})


def selection_bias_name(layer: int) -> str:
    """Return the global name of a layer's selection bias, fp32 [experts].

    It is state of the router that no gradient reaches, hence no parameter.
    """
    return f"layers.{layer}.moe.router.selection_bias"


def expert_table_name(layer: int) -> str:
    """Return the global name of the experts [vocabulary, top_k] that tokens have by their number.

    The table of a layer that routes so is fixed, hence no parameter.
    """
    return f"layers.{layer}.moe.router.expert_table"


def count_parameters(model: ModelSpec) -> ParamCount:
    """Return the totals; an expert tensor is active with top_k / experts of its elements.

    Layers that are alike are counted once.
    """
    total = active = mtp = embedding = 0
    for param, layers in _distinct_parameters(model):
        numel = layers * param.numel
        if param.layer > model.layers:
            mtp += numel
            continue
        total += numel
        if param.is_expert and model.moe:
            # The product first: numel is a multiple of the experts, so that nothing is cut off.
            active += layers * (param.numel * model.moe.router.top_k // model.moe.experts)
        else:
            active += numel
        if param.name == "embedding.weight":
            embedding = numel
    return ParamCount(
        total=total,
        active=active,
        active_without_embedding=active - embedding,
        mtp=mtp,
        embedding=embedding,
    )


def _distinct_parameters(model: ModelSpec) -> Iterator[tuple[Param, int]]:
    """Yield the parameters of one layer of each kind, with the layers that have as large ones."""
    alike: dict[tuple[MixerKind, bool, bool], list[int]] = {}
    for layer, is_moe in enumerate(model.moe_layers):
        kind = (model.mixer(layer), model.has_mlp(layer), is_moe)
        alike.setdefault(kind, []).append(layer)
    for (_, _, is_moe), layers in alike.items():
        for param in _layer(model, "", layers[0], is_moe=is_moe):
            yield param, len(layers)
    for param in (*_first_parameters(model), *_last_parameters(model)):
        yield param, 1


def _all_parameters(model: ModelSpec) -> Iterator[Param]:
    yield from _first_parameters(model)
    for layer in range(model.layers):
        yield from _layer(model, f"layers.{layer}.", layer, is_moe=model.moe_layers[layer])
    yield from _last_parameters(model)


def _first_parameters(model: ModelSpec) -> Iterator[Param]:
    h = model.hidden_size
    table = (model.vocab_size, h)
    yield tensor("embedding.weight", table, Module.EMBEDDING, EMBEDDING_LAYER, TP_ROWS)
    if model.position is PositionKind.LEARNED:
        yield tensor("position.weight", (model.max_position, h), Module.EMBEDDING, EMBEDDING_LAYER)


def _last_parameters(model: ModelSpec) -> Iterator[Param]:
    L = model.layers
    table = (model.vocab_size, model.hidden_size)
    yield from _norm(model, "final_norm", L)
    if not model.tie_embeddings:
        yield tensor("head.weight", table, Module.HEAD, L, TP_ROWS)
    if model.head_bias:
        yield tensor("head.bias", (model.vocab_size,), Module.HEAD, L, TP_ROWS)
    yield from _final_streams(model, "final_", L, Module.HEAD)
    for depth in range(min(1, model.mtp_layers) if model.mtp_shared else model.mtp_layers):
        yield from _mtp(model, depth)


def _final_streams(model: ModelSpec, prefix: str, layer: int, module: Module) -> Iterator[Param]:
    """Yield what makes one of residual streams before a head."""
    streams = model.residual_streams
    if streams > 1:
        for param in _stream_mix(model, prefix, layer, outputs=streams, scales=1):
            yield replace(param, module=module)


def _mtp(model: ModelSpec, depth: int) -> Iterator[Param]:
    """Yield the parameters of an MTP depth (docs/formulas.md 8).

    They are two norms, a projection of their concatenation, a layer like the last one, and a final
    norm. With residual streams each norm has a projection, whole on every TP rank, and the streams
    become one at the end.
    """
    h = model.hidden_size
    layer = model.layers + 1 + depth
    prefix = f"mtp.{depth}."
    yield from _norm(model, f"{prefix}embed_norm", layer, Module.MTP)
    yield from _norm(model, f"{prefix}hidden_norm", layer, Module.MTP)
    if model.joins_mtp_inputs:
        yield tensor(f"{prefix}proj.weight", (h, 2 * h), Module.MTP, layer, TP_ROWS)
    else:
        for part in ("embed", "hidden"):
            yield tensor(f"{prefix}{part}_proj.weight", (h, h), Module.MTP, layer)
    for param in _layer(model, f"{prefix}layer.", layer, is_moe=model.moe_layers[-1]):
        yield replace(param, module=Module.MTP)
    yield from _norm(model, f"{prefix}final_norm", layer, Module.MTP)
    yield from _final_streams(model, f"{prefix}final_", layer, Module.MTP)


def _layer(model: ModelSpec, prefix: str, layer: int, *, is_moe: bool) -> Iterator[Param]:
    """Yield what mixes the tokens of a layer, its MLP or experts, and the norms and mixes of each.

    A layer without a mixer, or without an MLP, has one norm.
    """
    mixer = model.mixer(layer)
    is_before = model.norm_placement.is_before
    is_after = model.norm_placement.is_after
    if mixer is not MixerKind.NONE:
        yield from _residual(model, f"{prefix}attention_", layer)
        if is_before:
            yield from _norm(model, f"{prefix}input_norm", layer)
        yield from _mixer(model, f"{prefix}attention.", layer, mixer)
        if is_after:
            yield from _norm(model, f"{prefix}attention_norm", layer)
    if not model.has_mlp(layer):
        return
    yield from _residual(model, f"{prefix}mlp_", layer)
    if is_before:
        yield from _norm(model, f"{prefix}post_norm", layer)
    if is_moe:
        yield from _moe(model, f"{prefix}moe.", layer)
    else:
        yield from _dense_mlp(model, f"{prefix}mlp.", layer)
    if is_after:
        yield from _norm(model, f"{prefix}mlp_norm", layer)


def _mixer(model: ModelSpec, prefix: str, layer: int, mixer: MixerKind) -> Iterator[Param]:
    spec = model.attention
    if mixer is MixerKind.RECURRENT:
        yield from recurrent_mixer(model, prefix, layer)
        return
    if spec.kind is AttentionKind.COMPRESSED:
        yield from compressed_attention(model, prefix, layer)
        return
    if spec.kind is AttentionKind.MLA:
        yield from _mla(model, prefix, layer)
    else:
        yield from _gqa(model, prefix, layer)
    if spec.indexer is not None and mixer is not MixerKind.SHARED_INDEX:
        yield from indexer(spec.indexer, model.hidden_size, spec.q_lora_rank, prefix, layer)


def _residual(model: ModelSpec, prefix: str, layer: int) -> Iterator[Param]:
    """Yield what mixes residual streams around a block: collapse, expand and mix of them."""
    streams = model.residual_streams
    if streams > 1:
        outputs = (2 + streams) * streams
        yield from _stream_mix(model, prefix, layer, outputs=outputs, scales=3)


def _stream_mix(
    model: ModelSpec, prefix: str, layer: int, *, outputs: int, scales: int
) -> Iterator[Param]:
    width = model.residual_streams * model.hidden_size
    yield tensor(f"{prefix}streams.weight", (outputs, width), Module.NORM, layer)
    yield tensor(f"{prefix}streams.bias", (outputs,), Module.NORM, layer)
    yield tensor(f"{prefix}streams.scale", (scales,), Module.NORM, layer)


def _gqa(model: ModelSpec, prefix: str, layer: int) -> Iterator[Param]:
    spec, h, module = model.attention, model.hidden_size, Module.ATTENTION
    q_rows = spec.q_width * (spec.q_matrices)
    for part, width in (("q", q_rows), ("k", spec.kv_width), ("v", spec.kv_width)):
        yield tensor(f"{prefix}{part}.weight", (width, h), module, layer, TP_ROWS)
        if spec.qkv_bias:
            yield tensor(f"{prefix}{part}.bias", (width,), module, layer, TP_ROWS)
    if spec.qk_norm in (QkNorm.PER_HEAD, QkNorm.PER_HEAD_ROTATED):
        for part in ("q", "k"):
            # One weight for all heads is whole on every TP rank; one over all is cut with them.
            yield tensor(f"{prefix}{part}_norm.weight", (spec.head_dim,), module, layer)
    elif spec.qk_norm is QkNorm.FULL:
        for part, width in (("q", spec.q_width), ("k", spec.kv_width)):
            yield tensor(f"{prefix}{part}_norm.weight", (width,), module, layer, TP_ROWS)
    if spec.sinks:
        yield tensor(f"{prefix}sinks", (spec.heads,), module, layer, TP_ROWS)
    yield from _attention_output(model, prefix, layer)


def _mla(model: ModelSpec, prefix: str, layer: int) -> Iterator[Param]:
    """Yield the parameters of multi-latent attention.

    The down-projections and their norms are whole on every TP rank: their outputs feed all heads.
    """
    spec, h, module = model.attention, model.hidden_size, Module.ATTENTION
    if spec.q_lora_rank:
        q_up = (spec.q_width, spec.q_lora_rank)
        yield tensor(f"{prefix}q_down.weight", (spec.q_lora_rank, h), module, layer)
        if spec.qkv_bias:
            yield tensor(f"{prefix}q_down.bias", (spec.q_lora_rank,), module, layer)
        yield tensor(f"{prefix}q_down_norm.weight", (spec.q_lora_rank,), module, layer)
        yield tensor(f"{prefix}q_up.weight", q_up, module, layer, TP_ROWS)
    else:
        yield tensor(f"{prefix}q.weight", (spec.q_width, h), module, layer, TP_ROWS)
    latent = spec.kv_lora_rank + spec.qk_rope_head_dim
    yield tensor(f"{prefix}kv_down.weight", (latent, h), module, layer)
    if spec.qkv_bias:
        yield tensor(f"{prefix}kv_down.bias", (latent,), module, layer)
    yield tensor(f"{prefix}kv_norm.weight", (spec.kv_lora_rank,), module, layer)
    expanded = spec.heads * (spec.qk_nope_head_dim + spec.v_head_dim)
    kv_up = (expanded, spec.kv_lora_rank)
    yield tensor(f"{prefix}kv_up.weight", kv_up, module, layer, TP_ROWS)
    yield from _attention_output(model, prefix, layer)


def _attention_output(model: ModelSpec, prefix: str, layer: int) -> Iterator[Param]:
    h, width = model.hidden_size, model.attention.out_width
    yield tensor(f"{prefix}o.weight", (h, width), Module.ATTENTION, layer, TP_COLUMNS)
    if model.attention.out_bias:
        yield tensor(f"{prefix}o.bias", (h,), Module.ATTENTION, layer)


def _dense_mlp(model: ModelSpec, prefix: str, layer: int) -> Iterator[Param]:
    ffn = model.dense_ffn_size
    yield from _mlp(model, prefix, layer, Module.DENSE_MLP, ffn, has_bias=model.mlp_bias)


def _mlp(
    model: ModelSpec, prefix: str, layer: int, module: Module, ffn: int, *, has_bias: bool
) -> Iterator[Param]:
    h = model.hidden_size
    name = model.fc1_name
    stacked = model.fc1_stack
    # Gate and up are a dim of their own, so that a cut takes the same rows of both.
    ffn_sharded = (("tp", len(stacked)),)
    yield tensor(f"{prefix}{name}.weight", (*stacked, ffn, h), module, layer, ffn_sharded)
    if has_bias:
        yield tensor(f"{prefix}{name}.bias", (*stacked, ffn), module, layer, ffn_sharded)
    yield tensor(f"{prefix}down.weight", (h, ffn), module, layer, TP_COLUMNS)
    if has_bias:
        yield tensor(f"{prefix}down.bias", (h,), module, layer)


def _moe(model: ModelSpec, prefix: str, layer: int) -> Iterator[Param]:
    spec = model.moe
    if spec is None:
        raise ValueError(
            f"{model.name}: layer {layer} is marked as MoE but the model has no MoeSpec"
        )
    h = model.hidden_size
    yield tensor(f"{prefix}router.weight", (spec.experts, h), Module.ROUTER, layer)
    if spec.router.logit_bias:
        yield tensor(f"{prefix}router.bias", (spec.experts,), Module.ROUTER, layer)
    if spec.latent_size:
        # Whole on every rank: each takes its own tokens into the latent space, before the dispatch.
        width = model.expert_width
        yield tensor(f"{prefix}latent.down.weight", (width, h), Module.EXPERTS, layer)
        yield tensor(f"{prefix}latent.up.weight", (h, width), Module.EXPERTS, layer)
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
            yield tensor(f"{prefix}shared.gate.weight", (1, h), Module.SHARED_EXPERTS, layer)


def _routed_experts(model: ModelSpec, spec: MoeSpec, prefix: str, layer: int) -> Iterator[Param]:
    """Yield the weights of all routed experts, each stacked along its first dim."""
    module, width, ffn = Module.EXPERTS, model.expert_width, spec.ffn_size
    name = model.fc1_name
    stacked = (spec.experts, *model.fc1_stack)
    up_sharded = (("ep", 0), ("etp", len(stacked)))
    up_shape = (*stacked, ffn, width)
    yield tensor(f"{prefix}{name}.weight", up_shape, module, layer, up_sharded, is_expert=True)
    if spec.expert_bias:
        bias_shape = (*stacked, ffn)
        yield tensor(f"{prefix}{name}.bias", bias_shape, module, layer, up_sharded, is_expert=True)
    down_shape = (spec.experts, width, ffn)
    down_sharded = (("ep", 0), ("etp", 2))
    yield tensor(f"{prefix}down.weight", down_shape, module, layer, down_sharded, is_expert=True)
    if spec.expert_bias:
        # Each ETP rank adds its part to the sum, all of which they then share.
        bias_sharded = (("ep", 0), ("etp", 1))
        bias_shape = (spec.experts, width)
        yield tensor(f"{prefix}down.bias", bias_shape, module, layer, bias_sharded, is_expert=True)


def _norm(model: ModelSpec, name: str, layer: int, module: Module = Module.NORM) -> Iterator[Param]:
    yield tensor(f"{name}.weight", (model.hidden_size,), module, layer)
    if model.norm is NormKind.LAYER:
        yield tensor(f"{name}.bias", (model.hidden_size,), module, layer)
