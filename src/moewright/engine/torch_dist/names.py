"""Where Megatron-LM keeps each of our tensors.

Layers lie in one tensor with a leading dim for all of them, or in tensors of their own; so do the
experts of a layer. The two halves of a gated product lie one above the other, or in tensors whose
names end in _w and _v. Query, key and value lie in one tensor, group by group: the group's query
heads, its key head, its value head. Each MTP depth has tensors of its own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from moewright.engine.hf.candidates import ModelTensor
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import AttentionKind, ModelSpec

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
_TOP_LEVEL = {
    "embedding.weight": EMBEDDING,
    "final_norm.weight": "decoder.final_layernorm.weight",
    "head.weight": HEAD,
}
PADDED = ("embedding.weight", "head.weight")  # in rows, to a multiple of the ranks of TP
# By our name in a layer; of several the first is what Transformer Engine's layers write.
_IN_LAYER = {
    "input_norm.weight": (
        "self_attention.linear_qkv.layer_norm_weight",
        "input_layernorm.weight",
    ),
    "post_norm.weight": ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    "attention.q_norm.weight": ("self_attention.q_layernorm.weight",),
    "attention.k_norm.weight": ("self_attention.k_layernorm.weight",),
    "attention.o.weight": ("self_attention.linear_proj.weight",),
    "attention.o.bias": ("self_attention.linear_proj.bias",),
    "attention.sinks": ("self_attention.core_attention.softmax_offset",),
    "attention.q_down.weight": ("self_attention.linear_q_down_proj.weight",),
    "attention.q_down_norm.weight": (
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.q_layernorm.weight",
    ),
    "attention.q_up.weight": ("self_attention.linear_q_up_proj.weight",),
    "attention.kv_down.weight": ("self_attention.linear_kv_down_proj.weight",),
    "attention.kv_norm.weight": (
        "self_attention.linear_kv_up_proj.layer_norm_weight",
        "self_attention.kv_layernorm.weight",
    ),
    "attention.kv_up.weight": ("self_attention.linear_kv_up_proj.weight",),
    "moe.router.weight": ("mlp.router.weight",),
    "moe.router.selection_bias": ("mlp.router.expert_bias",),
    "moe.router.bias": ("mlp.router.bias",),
    "moe.experts.gate_up.weight": ("mlp.experts.experts.linear_fc1.weight",),
    "moe.experts.gate_up.bias": ("mlp.experts.experts.linear_fc1.bias",),
    "moe.experts.down.weight": ("mlp.experts.experts.linear_fc2.weight",),
    "moe.experts.down.bias": ("mlp.experts.experts.linear_fc2.bias",),
    "moe.shared.gate_up.weight": ("mlp.shared_experts.linear_fc1.weight",),
    "moe.shared.gate.weight": ("mlp.shared_experts.gate_weight",),
    "moe.shared.down.weight": ("mlp.shared_experts.linear_fc2.weight",),
    "mlp.gate_up.weight": ("mlp.linear_fc1.weight",),
    "mlp.down.weight": ("mlp.linear_fc2.weight",),
}
# The norm before the layer's first product is part of that product where layers are of MLA or of a
# dense MLP: the order of names follows.
_MLA_NORM = ("input_layernorm.weight", "self_attention.linear_q_down_proj.layer_norm_weight")
_MLA_QUERY = "self_attention.linear_q_proj.weight"
_DENSE_NORM = ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
_QKV = {
    f"attention.{part}.{kind}": f"self_attention.linear_qkv.{kind}"
    for part in "qkv"
    for kind in ("weight", "bias")
}
_EXPERTS = "mlp.experts.experts."
_LAYERS = "decoder.layers."
_DEPTHS = "mtp.layers."
_IN_DEPTH = {
    "embed_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "proj.weight": "eh_proj.weight",
    "final_norm.weight": "final_layernorm.weight",
}
_DEPTH_LAYERS = ("transformer_layer", "mtp_model_layer")  # the latter in models of other layers


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronPlace:
    """A tensor of Megatron-LM, and the first indices of the part of it that is meant.

    `part` says which part of query, key and value is meant, "" for all.
    """

    names: tuple[str, ...]  # two: the halves of a gated product
    index: tuple[int, ...] = ()
    part: str = ""


def split_name(model: ModelSpec, name: str) -> tuple[int, str]:
    """Return the layer of one of our tensors and its name there; -1 outside of layers.

    MTP depths come after the layers.
    """
    kind, _, rest = name.partition(".")
    if kind not in ("layers", "mtp"):
        return -1, name
    number, suffix = rest.split(".", 1)
    if kind == "mtp":
        return model.layers + int(number), suffix.removeprefix("layer.")
    layer = int(number)  # a depth's selection bias leaves out the number of the head
    return (layer - 1 if layer > model.layers else layer), suffix


def candidate_suffixes(model: ModelSpec, layer: int, suffix: str) -> tuple[str, ...]:
    """Return the names in a layer that one of our tensors may have, the usual one first.

    Raises:
        BadInput: it has none.
    """
    if suffix == "attention.q.weight" and model.attention.kind is AttentionKind.MLA:
        return (_MLA_QUERY,)  # without a down projection
    if suffix in _QKV:
        return (_QKV[suffix],)
    if suffix == "input_norm.weight" and model.attention.kind is AttentionKind.MLA:
        return _MLA_NORM
    if suffix == "post_norm.weight" and not model.has_experts(layer):
        return _DENSE_NORM
    if suffix not in _IN_LAYER:
        raise _unnamed(f"layers.{layer}.{suffix}")
    return _IN_LAYER[suffix]


def _list_candidates(
    model: ModelSpec, layer: int, suffix: str
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the names that a tensor of a layer may have, each with the first indices of it."""
    if layer < model.layers:
        return tuple(
            (prefix + candidate, index)
            for candidate in candidate_suffixes(model, layer, suffix)
            for prefix, index in ((_LAYERS, (layer,)), (f"{_LAYERS}{layer}.", ()))
        )
    depth = f"{_DEPTHS}{layer - model.layers}."
    if suffix in _IN_DEPTH:
        return ((depth + _IN_DEPTH[suffix], ()),)
    return tuple(
        (f"{depth}{part}.{candidate}", ())
        for candidate in candidate_suffixes(model, layer, suffix)
        for part in _DEPTH_LAYERS
    )


def find_places(
    model: ModelSpec, tensor: ModelTensor, names: Collection[str]
) -> tuple[MegatronPlace, ...]:
    """Return where a checkpoint holds one of our tensors, one place for each expert.

    Raises:
        BadInput: it does not hold it.
    """
    layer, suffix = split_name(model, tensor.name)
    if layer < 0:
        if suffix not in _TOP_LEVEL:
            raise _unnamed(tensor.name)
        name = _TOP_LEVEL[suffix]
        if name not in names:
            raise _missing(tensor.name, name)
        return (MegatronPlace(names=(name,)),)
    candidates = _list_candidates(model, layer, suffix)
    for candidate, index in candidates:
        places = _expand(candidate, index, tensor, names)
        if places:
            is_merged = suffix in _QKV and candidate.endswith(_QKV[suffix])
            part = ""
            if is_merged:
                part = suffix.split(".")[1]
            return tuple(
                MegatronPlace(names=place.names, index=place.index, part=part) for place in places
            )
    # The first has all layers in one tensor; the second is the layer's own.
    usual = candidates[1] if layer < model.layers else candidates[0]
    raise _missing(tensor.name, usual[0])


def _expand(
    name: str, index: tuple[int, ...], tensor: ModelTensor, names: Collection[str]
) -> tuple[MegatronPlace, ...]:
    """Return the places of a tensor under a name; () where the checkpoint has none of them."""
    if _EXPERTS not in name:
        halves = _find_halves(name, names)
        if halves:
            return (MegatronPlace(names=halves, index=index),)
        return ()
    experts = range(tensor.shape[0])
    if halves := _find_halves(name, names):
        return tuple(MegatronPlace(names=halves, index=(*index, expert)) for expert in experts)
    before, _, after = name.partition(_EXPERTS)
    places = []
    for expert in experts:
        halves = _find_halves(f"{before}{_EXPERTS}{expert}.{after}", names)
        if not halves:
            return ()
        places.append(MegatronPlace(names=halves, index=index))
    return tuple(places)


def _find_halves(name: str, names: Collection[str]) -> tuple[str, ...]:
    if name in names:
        return (name,)
    halves = (f"{name}_w", f"{name}_v")
    if all(half in names for half in halves):
        return halves
    return ()


def _missing(own: str, name: str) -> BadInput:
    return BadInput(Reason(field=own, rule=f"is missing: the checkpoint has no {name}"))


def _unnamed(own: str) -> BadInput:
    rule = "has no name in checkpoints of Megatron-LM that is known here"
    return BadInput(Reason(field=own, rule=rule))


def is_stacked(name: str) -> bool:
    """Tell whether a tensor of Megatron-LM holds all layers, one after the other."""
    return name.startswith(_LAYERS) and not name.removeprefix(_LAYERS)[0].isdecimal()


def list_written_names(model: ModelSpec, tensors: Collection[ModelTensor]) -> dict[str, list[str]]:
    """Return the names that are written, each with our tensors that it is made of.

    Layers that are all alike lie in one tensor, as Megatron-LM writes them; else each has its own.

    Raises:
        BadInput: a tensor has no name there.
    """
    is_alike = len(set(model.moe_layers)) == 1
    written: dict[str, list[str]] = {}
    for tensor in tensors:
        layer, suffix = split_name(model, tensor.name)
        if layer < 0:
            if suffix not in _TOP_LEVEL:
                raise _unnamed(tensor.name)
            name = _TOP_LEVEL[suffix]
        else:
            candidates = _list_candidates(model, layer, suffix)
            is_own = layer < model.layers and not is_alike
            name, _ = candidates[1] if is_own else candidates[0]
        written.setdefault(name, []).append(tensor.name)
    return written
