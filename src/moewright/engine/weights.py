"""Weights of a Hugging Face checkpoint and ours: one table of names, read both ways.

A tensor of theirs is `ours[index]` seen in `shape`: a part of one of ours (the gate of gate_up, one expert), or all of
it (experts fused in 3-D tensors). Families differ in the names; which of them a file uses is found from the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moewright.engine.placement import Placement
from moewright.rules.inventory import Param, parameters
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

_WHOLE: Mapping[str, str] = MappingProxyType(
    {"embedding.weight": EMBEDDING, "final_norm.weight": "model.norm.weight", "head.weight": HEAD}
)
# Of a layer, below "layers.N." here and "model.layers.N." there.
_LAYER: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "input_norm.weight": ("input_layernorm.weight",),
        "post_norm.weight": ("post_attention_layernorm.weight",),
        **{f"attention.{part}.weight": (f"self_attn.{part}_proj.weight",) for part in "qkvo"},
        **{f"attention.{part}.bias": (f"self_attn.{part}_proj.bias",) for part in "qkvo"},
        "attention.q_down.weight": ("self_attn.q_a_proj.weight",),
        "attention.q_down_norm.weight": ("self_attn.q_a_layernorm.weight",),
        "attention.q_up.weight": ("self_attn.q_b_proj.weight",),
        "attention.kv_down.weight": ("self_attn.kv_a_proj_with_mqa.weight",),
        "attention.kv_norm.weight": ("self_attn.kv_a_layernorm.weight",),
        "attention.kv_up.weight": ("self_attn.kv_b_proj.weight",),
        "attention.q_norm.weight": ("self_attn.q_norm.weight",),
        "attention.k_norm.weight": ("self_attn.k_norm.weight",),
        "moe.router.weight": ("mlp.gate.weight", "block_sparse_moe.gate.weight"),
        "mlp.down.weight": ("mlp.down_proj.weight",),
        "mlp.down.bias": ("mlp.down_proj.bias",),
        "moe.shared.down.weight": ("mlp.shared_expert.down_proj.weight", "mlp.shared_experts.down_proj.weight"),
        "moe.shared.gate.weight": ("mlp.shared_expert_gate.weight",),
    }
)
# Gate above up; the spellings of one part, by family.
_GATE_UP: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType(
    {
        "mlp.gate_up.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"),),
        "mlp.gate_up.bias": (("mlp.gate_proj.bias", "mlp.up_proj.bias"),),
        "moe.shared.gate_up.weight": tuple(
            (f"mlp.{shared}.gate_proj.weight", f"mlp.{shared}.up_proj.weight")
            for shared in ("shared_expert", "shared_experts")
        ),
    }
)
SELECTION_BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"
# Experts: one tensor each, by family; or all of a layer in one, gate above up.
_EXPERT_GATE_UP = (
    ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    ("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
)
_EXPERT_DOWN = ("mlp.experts.{}.down_proj.weight", "block_sparse_moe.experts.{}.w2.weight")
_FUSED_GATE_UP, _FUSED_DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"

_FLOATS = ("F64", "F32", "BF16", "F16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Theirs:
    """A tensor of the checkpoint: `ours[index]` in `shape`."""

    name: str
    index: tuple[int, ...]
    shape: tuple[int, ...]


def spellings(param: Param) -> tuple[tuple[Theirs, ...], ...]:
    """The ways a checkpoint may hold a parameter; each tiles it exactly once. () when there is none."""
    shape = param.shape
    if param.name in _WHOLE:
        return ((Theirs(name=_WHOLE[param.name], index=(), shape=shape),),)
    _, layer, part = param.name.split(".", 2)
    base = f"model.layers.{layer}."
    if part in _LAYER:
        return tuple((Theirs(name=base + name, index=(), shape=shape),) for name in _LAYER[part])
    if part in _GATE_UP:
        return tuple(
            tuple(Theirs(name=base + name, index=(i,), shape=shape[1:]) for i, name in enumerate(names))
            for names in _GATE_UP[part]
        )
    if part == "moe.experts.gate_up.weight":
        experts, _, width, hidden = shape
        apart = tuple(
            tuple(
                Theirs(name=base + name.format(expert), index=(expert, i), shape=(width, hidden))
                for expert in range(experts)
                for i, name in enumerate(names)
            )
            for names in _EXPERT_GATE_UP
        )
        return (*apart, (Theirs(name=base + _FUSED_GATE_UP, index=(), shape=(experts, 2 * width, hidden)),))
    if part == "moe.experts.down.weight":
        apart = tuple(
            tuple(Theirs(name=base + name.format(e), index=(e,), shape=shape[1:]) for e in range(shape[0]))
            for name in _EXPERT_DOWN
        )
        return (*apart, (Theirs(name=base + _FUSED_DOWN, index=(), shape=shape),))
    return ()


Table = Mapping[str, tuple[Theirs, ...]]  # by our parameter name


def table_of(model: ModelSpec, path: Path) -> Table:
    """How the file at `path` spells each parameter of `model`.

    Raises BadInput naming the tensor that is missing, of another shape or dtype, or not one of the model's.
    """
    with open_weights(path) as file:
        stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        table = {param.name: _spelling(param, stored.keys(), path) for param in parameters(model)}
        wanted = {theirs.name: theirs for parts in table.values() for theirs in parts}
        wanted |= {theirs.name: theirs for theirs in selection_biases(model)}
        for theirs in selection_biases(model):
            if theirs.name not in stored:
                raise _refusal(theirs.name, path, "is missing")
        for name, data in stored.items():
            if name == HEAD and model.tie_embeddings:
                if not torch.equal(file.get_tensor(name), file.get_tensor(EMBEDDING)):
                    raise _refusal(name, path, f"differs from {EMBEDDING}, to which config.json ties it")
            elif name not in wanted:
                raise _refusal(name, path, "is not a tensor of this model")
            elif tuple(data.get_shape()) != wanted[name].shape:
                raise _refusal(name, path, f"has shape {data.get_shape()}, config.json says {list(wanted[name].shape)}")
            elif data.get_dtype() not in _FLOATS:
                raise _refusal(name, path, f"is of {data.get_dtype()}; known are {', '.join(_FLOATS)}")
    return table


def selection_biases(model: ModelSpec) -> tuple[Theirs, ...]:
    """The routers' selection biases, which are no parameters, by layer with experts; () where the model has none."""
    if model.moe is None or not model.moe.router.selection_bias:
        return ()
    layers = (layer for layer, is_moe in enumerate(model.moe_layers) if is_moe)
    return tuple(Theirs(name=SELECTION_BIAS.format(i), index=(), shape=(model.moe.experts,)) for i in layers)


def _spelling(param: Param, stored: Sequence[str] | Any, path: Path) -> tuple[Theirs, ...]:
    """The spelling of which the file holds most; all of it must be there."""
    choices = spellings(param)
    if not choices:
        raise _refusal(param.name, path, "has no name in Hugging Face checkpoints known here")
    best = max(choices, key=lambda parts: sum(theirs.name in stored for theirs in parts) / len(parts))
    for theirs in best:
        if theirs.name not in stored:
            raise _refusal(theirs.name, path, "is missing")
    if sum(prod(theirs.shape) for theirs in best) != param.numel:
        raise ValueError(f"{param.name}: its spelling does not tile it")
    return best


def _refusal(name: str, path: Path, rule: str) -> BadInput:
    return BadInput(Reason(field=name, rule=f"{rule} ({path})"))


def open_weights(path: Path) -> Any:
    """The safetensors file at `path`, to be used as a context; BadInput when it is none."""
    if not path.is_file():
        raise BadInput(Reason(field=str(path), rule="no such file"))
    try:
        return safe_open(str(path), framework="pt")
    except SafetensorError as error:
        raise BadInput(Reason(field=str(path), rule=f"is no safetensors file: {error}")) from None


def read_part(file: Any, parts: Sequence[Theirs], at: Placement) -> torch.Tensor:
    """This rank's part of a parameter in fp32, its padding zero; only what lies on the rank is read."""
    local = torch.zeros(at.local)
    for theirs in parts:
        lead = len(theirs.index)
        place = [here - offset for here, offset in zip(theirs.index, at.offsets, strict=False)]
        if any(not 0 <= here < size for here, size in zip(place, at.inside, strict=False)):
            continue
        box = tuple(slice(o, o + n) for o, n in zip(at.offsets[lead:], at.inside[lead:], strict=True))
        data = file.get_slice(theirs.name)
        if theirs.shape == at.whole[lead:]:
            found = data[box]
        else:  # fused: more dims here than there, the first the same
            rows = data[box[0]]
            found = rows.reshape(rows.shape[0], *at.whole[1:])[(slice(None), *box[1:])]
        target = local
        for here in place:
            target = target[here]
        target[tuple(map(slice, at.inside[lead:]))] = found.float()
    return local


def in_their_names(whole: torch.Tensor, parts: Sequence[Theirs]) -> Iterator[tuple[str, torch.Tensor]]:
    """A parameter, or its gradient, as the tensors of the checkpoint."""
    for theirs in parts:
        yield theirs.name, whole[theirs.index].reshape(theirs.shape).contiguous()
