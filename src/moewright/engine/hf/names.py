"""Weights of a Hugging Face checkpoint and ours: one table of names, read both ways.

A tensor of theirs is `ours[index]` seen in another order of dims and `shape`: a part of one of ours
(the gate of gate_up, one expert), or all of it (experts fused in 3-D tensors). Families differ in
the names; which of them a checkpoint uses is found from it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import MappingProxyType

import torch

from moewright.engine.comm.tensor_placement import Placement
from moewright.engine.hf.folder import HfFolder, HfReader
from moewright.engine.hf.packed import PACKED
from moewright.rules.parameters import parameters, selection_bias_name
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FLOATS = ("F64", "F32", "BF16", "F16", *PACKED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spelling:
    """Names of one parameter: one for all of it, or one for its gate and one for its up; "{}" is
    the expert's number.

    A name for all experts holds our dims in another `order`, after which dim `merged` and the next
    are one. With `families`, the names are of these families alone, and stand before the others.
    """

    names: tuple[str, ...]
    order: tuple[int, ...] = ()
    merged: int | None = None
    families: tuple[str, ...] = ()


def _same(*names: str) -> tuple[Spelling, ...]:
    return tuple(Spelling(names=(name,)) for name in names)


_OSS = ("gpt_oss",)
_WHOLE: Mapping[str, str] = MappingProxyType(
    {"embedding.weight": EMBEDDING, "final_norm.weight": "model.norm.weight", "head.weight": HEAD}
)
# Of a layer, below "layers.N." here and "model.layers.N." there.
_LAYER: Mapping[str, tuple[Spelling, ...]] = MappingProxyType(
    {
        "input_norm.weight": _same("input_layernorm.weight"),
        "post_norm.weight": _same("post_attention_layernorm.weight"),
        **{f"attention.{part}.weight": _same(f"self_attn.{part}_proj.weight") for part in "qkvo"},
        **{f"attention.{part}.bias": _same(f"self_attn.{part}_proj.bias") for part in "qkvo"},
        "attention.q_down.weight": _same("self_attn.q_a_proj.weight"),
        "attention.q_down_norm.weight": _same("self_attn.q_a_layernorm.weight"),
        "attention.q_up.weight": _same("self_attn.q_b_proj.weight"),
        "attention.kv_down.weight": _same("self_attn.kv_a_proj_with_mqa.weight"),
        "attention.kv_norm.weight": _same("self_attn.kv_a_layernorm.weight"),
        "attention.kv_up.weight": _same("self_attn.kv_b_proj.weight"),
        "attention.q_norm.weight": _same("self_attn.q_norm.weight"),
        "attention.k_norm.weight": _same("self_attn.k_norm.weight"),
        "attention.sinks": _same("self_attn.sinks"),
        "mlp.gate_up.weight": (Spelling(names=("mlp.gate_proj.weight", "mlp.up_proj.weight")),),
        "mlp.gate_up.bias": (Spelling(names=("mlp.gate_proj.bias", "mlp.up_proj.bias")),),
        "mlp.down.weight": _same("mlp.down_proj.weight"),
        "mlp.down.bias": _same("mlp.down_proj.bias"),
        "moe.router.weight": (
            Spelling(names=("block_sparse_moe.gate.weight",), families=("mixtral",)),
            Spelling(names=("mlp.router.weight",), families=_OSS),
            *_same("mlp.gate.weight"),
        ),
        "moe.router.bias": _same("mlp.router.bias"),
        "moe.router.selection_bias": _same("mlp.gate.e_score_correction_bias"),
        "moe.shared.gate_up.weight": (
            Spelling(
                names=("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
                families=("qwen2_moe",),
            ),
            Spelling(
                names=("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight")
            ),
        ),
        "moe.shared.down.weight": (
            Spelling(names=("mlp.shared_expert.down_proj.weight",), families=("qwen2_moe",)),
            *_same("mlp.shared_experts.down_proj.weight"),
        ),
        "moe.shared.gate.weight": _same("mlp.shared_expert_gate.weight"),
        "moe.experts.gate_up.weight": (
            Spelling(
                names=(
                    "block_sparse_moe.experts.{}.w1.weight",
                    "block_sparse_moe.experts.{}.w3.weight",
                ),
                families=("mixtral",),
            ),
            # gate and up take turns in the columns
            Spelling(
                names=("mlp.experts.gate_up_proj",), order=(0, 3, 2, 1), merged=2, families=_OSS
            ),
            Spelling(names=("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight")),
            Spelling(names=("mlp.experts.gate_up_proj",), order=(0, 1, 2, 3), merged=1),
        ),
        "moe.experts.down.weight": (
            Spelling(names=("block_sparse_moe.experts.{}.w2.weight",), families=("mixtral",)),
            Spelling(names=("mlp.experts.down_proj",), order=(0, 2, 1), families=_OSS),
            Spelling(names=("mlp.experts.{}.down_proj.weight",)),
            Spelling(names=("mlp.experts.down_proj",)),
        ),
        "moe.experts.gate_up.bias": (
            Spelling(
                names=("mlp.experts.gate_up_proj_bias",), order=(0, 2, 1), merged=1, families=_OSS
            ),
        ),
        "moe.experts.down.bias": _same("mlp.experts.down_proj_bias"),
    }
)
# Of a multi-token prediction depth, besides its layer; there it is one more layer.
_DEPTH: Mapping[str, str] = MappingProxyType(
    {
        "embed_norm.weight": "enorm.weight",
        "hidden_norm.weight": "hnorm.weight",
        "proj.weight": "eh_proj.weight",
        "final_norm.weight": "shared_head.norm.weight",
    }
)
_DEPTH_COPIES: Mapping[str, str] = MappingProxyType(
    {"embed_tokens.weight": "embedding.weight", "shared_head.head.weight": "head.weight"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Theirs:
    """A tensor of the checkpoint: `ours[index]` in `shape`. One that holds all experts has them
    first, and our dims `below` in another `order`.
    """

    name: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()
    below: tuple[int, ...] = ()

    def seen(self, part: torch.Tensor) -> torch.Tensor:
        """This tensor, of ours[index]."""
        return (part.permute(self.order) if self.order else part).reshape(self.shape).contiguous()

    def back(self, stored: torch.Tensor) -> torch.Tensor:
        """The way back, for some of the experts."""
        sizes = (len(stored), *self.below)
        there = stored.reshape([sizes[dim] for dim in self.order])
        return there.permute([self.order.index(dim) for dim in range(len(self.order))])


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A tensor of our checkpoints that theirs have too: a parameter, or a router's selection
    bias."""

    name: str
    shape: tuple[int, ...]
    trained: bool


Table = Mapping[str, tuple[Theirs, ...]]  # by our name, in our order; each tiles ours exactly once


def held_tensors(model: ModelSpec) -> tuple[Held, ...]:
    """Everything of a model that goes in and out: its parameters, then the selection biases."""
    found = [Held(name=param.name, shape=param.shape, trained=True) for param in parameters(model)]
    if model.moe is not None and model.moe.router.selection_bias:
        shape = (model.moe.experts,)
        found += [
            Held(name=selection_bias_name(layer), shape=shape, trained=False)
            for layer in model.routed_layers
        ]
    return tuple(found)


def copies(model: ModelSpec) -> Mapping[str, str]:
    """Tensors that a checkpoint may hold besides the table: their name, and ours that they must
    equal."""
    found = {HEAD: "embedding.weight"} if model.tie_embeddings else {}
    for depth in range(model.mtp_layers):
        for part, ours in _DEPTH_COPIES.items():
            tied = model.tie_embeddings and ours == "head.weight"
            found[f"model.layers.{model.layers + depth}.{part}"] = (
                "embedding.weight" if tied else ours
            )
    return found


def spellings(model: ModelSpec, held: Held) -> tuple[tuple[Theirs, ...], ...]:
    """The ways a checkpoint may hold a tensor, the family's own first. () when there is none."""
    if held.name in _WHOLE:
        return ((Theirs(name=_WHOLE[held.name], index=(), shape=held.shape),),)
    kind, number, part = held.name.split(".", 2)
    layer = int(number)
    if kind == "mtp":
        layer += model.layers
        if part in _DEPTH:
            return (
                (Theirs(name=f"model.layers.{layer}.{_DEPTH[part]}", index=(), shape=held.shape),),
            )
        part = part.removeprefix("layer.")
    elif layer > model.layers:  # the selection bias of a depth
        layer -= 1
    known = _LAYER.get(part, ())
    own = [one for one in known if model.family in one.families]
    taken = {one.names for one in own}
    usual = [one for one in known if not one.families and one.names not in taken]
    return tuple(_expanded(one, f"model.layers.{layer}.", held.shape) for one in (*own, *usual))


def _expanded(one: Spelling, base: str, shape: tuple[int, ...]) -> tuple[Theirs, ...]:
    experts = range(shape[0]) if "{}" in one.names[0] else (None,)
    found = []
    for expert in experts:
        for place, name in enumerate(one.names):
            index = (
                *(() if expert is None else (expert,)),
                *((place,) if len(one.names) > 1 else ()),
            )
            inner = list(shape[len(index) :])
            if one.order:
                inner = [inner[dim] for dim in one.order]
            if one.merged is not None:
                inner[one.merged : one.merged + 2] = [inner[one.merged] * inner[one.merged + 1]]
            below = shape[1:] if one.order else ()
            found.append(
                Theirs(
                    name=base + name.format(expert),
                    index=index,
                    shape=tuple(inner),
                    order=one.order,
                    below=below,
                )
            )
    return tuple(found)


def without_absent_mtp(model: ModelSpec, names: Collection[str]) -> ModelSpec:
    """A checkpoint may leave out the MTP layers that its config.json names (transformers does);
    then so do we."""
    first = f"model.layers.{model.layers}."
    if not model.mtp_layers or any(name.startswith(first) for name in names):
        return model
    return replace(model, mtp_layers=0)


def table_of(model: ModelSpec, folder: HfFolder) -> Table:
    """How a folder spells each tensor of `model`.

    Raises BadInput naming the tensor that is missing, written twice, of another shape or dtype, or
    not one of the model's.
    """
    table = named(model, folder.tensors.keys(), folder.path)
    wanted = {theirs.name: theirs for parts in table.values() for theirs in parts}
    spare = copies(model)
    for name, stored in folder.tensors.items():
        if name not in wanted and name not in spare:
            raise refusal(name, folder.path, "is not a tensor of this model")
        shape = (
            wanted[name].shape
            if name in wanted
            else folder.tensors[table[spare[name]][0].name].shape
        )
        if stored.shape != shape:
            raise refusal(
                name, folder.path, f"has shape {list(stored.shape)}, config.json says {list(shape)}"
            )
        if stored.dtype not in FLOATS:
            raise refusal(name, folder.path, f"is of {stored.dtype}; known are {', '.join(FLOATS)}")
    with HfReader(folder) as reader:
        for name in spare.keys() & folder.tensors.keys():
            like = table[spare[name]][0].name
            if not torch.equal(reader.tensor(name), reader.tensor(like)):
                raise refusal(
                    name, folder.path, f"differs from {like}, of which config.json makes it a copy"
                )
    return table


def named(model: ModelSpec, names: Collection[str], where: Path) -> Table:
    """The table of a checkpoint with tensors of these names; each of them stands for one place of
    ours."""
    table = {held.name: _spelling(model, held, names, where) for held in held_tensors(model)}
    _refuse_twice([theirs.name for parts in table.values() for theirs in parts], where)
    return table


def usual(model: ModelSpec) -> Table:
    """The table of a checkpoint as the model's family has it."""
    table = {}
    for held in held_tensors(model):
        choices = spellings(model, held)
        if not choices:
            rule = f"has no name in Hugging Face checkpoints of {model.family or 'no family'}"
            raise BadInput(Reason(field=held.name, rule=rule))
        table[held.name] = choices[0]
    return table


def _spelling(
    model: ModelSpec, held: Held, names: Collection[str], where: Path
) -> tuple[Theirs, ...]:
    """The spelling of which the checkpoint holds most; all of it must be there, and tile ours
    once."""
    choices = spellings(model, held)
    if not choices:
        raise refusal(held.name, where, "has no name in Hugging Face checkpoints known here")
    best = max(
        choices, key=lambda parts: sum(theirs.name in names for theirs in parts) / len(parts)
    )
    for theirs in best:
        if theirs.name not in names:
            depth = held.name.startswith("mtp.")
            close = (
                "num_nextn_predict_layers 0 in config.json, or a checkpoint that has them"
                if depth
                else ""
            )
            raise refusal(theirs.name, where, "is missing", close)
    places = {theirs.index for theirs in best}
    if len(places) != len(best) or sum(prod(theirs.shape) for theirs in best) != prod(held.shape):
        raise refusal(held.name, where, "would not be written exactly once")
    return best


def _refuse_twice(names: Sequence[str], where: Path) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise refusal(name, where, "would be read for two tensors")
        seen.add(name)


def refusal(name: str, path: Path, rule: str, close: str = "") -> BadInput:
    return BadInput(Reason(field=name, rule=f"{rule} ({path})", nearest=close))


def read_box(
    reader: HfReader, parts: Sequence[Theirs], offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """A box of one of our tensors, in fp32; only what lies in it is read, or all below the first
    dim of fused ones."""
    box = torch.empty(tuple(sizes))
    for theirs in parts:
        lead = len(theirs.index)
        place = [here - offset for here, offset in zip(theirs.index, offsets, strict=False)]
        if any(not 0 <= here < size for here, size in zip(place, sizes, strict=False)):
            continue
        inner = tuple(slice(o, o + n) for o, n in zip(offsets[lead:], sizes[lead:], strict=True))
        if theirs.below:
            found = theirs.back(reader.part(theirs.name, inner[:1]))[(slice(None), *inner[1:])]
        else:
            found = reader.part(theirs.name, inner)
        box[tuple(place)] = found.float()
    return box


def read_part(reader: HfReader, parts: Sequence[Theirs], at: Placement) -> torch.Tensor:
    """This rank's part of a tensor in fp32, its padding zero."""
    if at.rows:
        return torch.cat([read_part(reader, parts, one) for one in at.apart()])
    local = torch.zeros(at.local)
    local[tuple(map(slice, at.inside))] = read_box(reader, parts, at.offsets, at.inside)
    return local


def in_their_names(
    whole: torch.Tensor, parts: Sequence[Theirs]
) -> Iterator[tuple[str, torch.Tensor]]:
    """A parameter, or its gradient, as the tensors of the checkpoint."""
    for theirs in parts:
        yield theirs.name, theirs.seen(whole[theirs.index])
