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

from moewright.engine.comm.tensor_placement import TensorPlacement
from moewright.engine.hf.folder import HfFolder, HfReader
from moewright.engine.hf.packed import PACKED_DTYPES
from moewright.rules.parameters import parameters, selection_bias_name
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import ModelSpec

HF_HEAD, HF_EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
READABLE_DTYPES = ("F64", "F32", "BF16", "F16", *PACKED_DTYPES)


@dataclass(frozen=True, kw_only=True, slots=True)
class NamePattern:
    """Names of one parameter: one for all of it, or one for its gate and one for its up; "{}" is
    the expert's number.

    A name for all experts holds our dims in another `order`, after which dim `merged` and the next
    are one. With `families`, the names are of these families alone, and stand before the others.
    """

    names: tuple[str, ...]
    dim_order: tuple[int, ...] = ()
    merged_dim: int | None = None
    families: tuple[str, ...] = ()


def _patterns(*names: str) -> tuple[NamePattern, ...]:
    return tuple(NamePattern(names=(name,)) for name in names)


_GPT_OSS = ("gpt_oss",)
_TOP_LEVEL: Mapping[str, str] = MappingProxyType(
    {
        "embedding.weight": HF_EMBEDDING,
        "final_norm.weight": "model.norm.weight",
        "head.weight": HF_HEAD,
    }
)
# Of a layer, below "layers.N." here and "model.layers.N." there.
_LAYER: Mapping[str, tuple[NamePattern, ...]] = MappingProxyType(
    {
        "input_norm.weight": _patterns("input_layernorm.weight"),
        "post_norm.weight": _patterns("post_attention_layernorm.weight"),
        **{
            f"attention.{part}.weight": _patterns(f"self_attn.{part}_proj.weight")
            for part in "qkvo"
        },
        **{f"attention.{part}.bias": _patterns(f"self_attn.{part}_proj.bias") for part in "qkvo"},
        "attention.q_down.weight": _patterns("self_attn.q_a_proj.weight"),
        "attention.q_down_norm.weight": _patterns("self_attn.q_a_layernorm.weight"),
        "attention.q_up.weight": _patterns("self_attn.q_b_proj.weight"),
        "attention.kv_down.weight": _patterns("self_attn.kv_a_proj_with_mqa.weight"),
        "attention.kv_norm.weight": _patterns("self_attn.kv_a_layernorm.weight"),
        "attention.kv_up.weight": _patterns("self_attn.kv_b_proj.weight"),
        "attention.q_norm.weight": _patterns("self_attn.q_norm.weight"),
        "attention.k_norm.weight": _patterns("self_attn.k_norm.weight"),
        "attention.sinks": _patterns("self_attn.sinks"),
        "mlp.gate_up.weight": (NamePattern(names=("mlp.gate_proj.weight", "mlp.up_proj.weight")),),
        "mlp.gate_up.bias": (NamePattern(names=("mlp.gate_proj.bias", "mlp.up_proj.bias")),),
        "mlp.down.weight": _patterns("mlp.down_proj.weight"),
        "mlp.down.bias": _patterns("mlp.down_proj.bias"),
        "moe.router.weight": (
            NamePattern(names=("block_sparse_moe.gate.weight",), families=("mixtral",)),
            NamePattern(names=("mlp.router.weight",), families=_GPT_OSS),
            *_patterns("mlp.gate.weight"),
        ),
        "moe.router.bias": _patterns("mlp.router.bias"),
        "moe.router.selection_bias": _patterns("mlp.gate.e_score_correction_bias"),
        "moe.shared.gate_up.weight": (
            NamePattern(
                names=("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
                families=("qwen2_moe",),
            ),
            NamePattern(
                names=("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight")
            ),
        ),
        "moe.shared.down.weight": (
            NamePattern(names=("mlp.shared_expert.down_proj.weight",), families=("qwen2_moe",)),
            *_patterns("mlp.shared_experts.down_proj.weight"),
        ),
        "moe.shared.gate.weight": _patterns("mlp.shared_expert_gate.weight"),
        "moe.experts.gate_up.weight": (
            NamePattern(
                names=(
                    "block_sparse_moe.experts.{}.w1.weight",
                    "block_sparse_moe.experts.{}.w3.weight",
                ),
                families=("mixtral",),
            ),
            # gate and up take turns in the columns
            NamePattern(
                names=("mlp.experts.gate_up_proj",),
                dim_order=(0, 3, 2, 1),
                merged_dim=2,
                families=_GPT_OSS,
            ),
            NamePattern(names=("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight")),
            NamePattern(names=("mlp.experts.gate_up_proj",), dim_order=(0, 1, 2, 3), merged_dim=1),
        ),
        "moe.experts.down.weight": (
            NamePattern(names=("block_sparse_moe.experts.{}.w2.weight",), families=("mixtral",)),
            NamePattern(names=("mlp.experts.down_proj",), dim_order=(0, 2, 1), families=_GPT_OSS),
            NamePattern(names=("mlp.experts.{}.down_proj.weight",)),
            NamePattern(names=("mlp.experts.down_proj",)),
        ),
        "moe.experts.gate_up.bias": (
            NamePattern(
                names=("mlp.experts.gate_up_proj_bias",),
                dim_order=(0, 2, 1),
                merged_dim=1,
                families=_GPT_OSS,
            ),
        ),
        "moe.experts.down.bias": _patterns("mlp.experts.down_proj_bias"),
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
class HfTensor:
    """A tensor of the checkpoint: `ours[index]` in `shape`. One that holds all experts has them
    first, and our dims `below` in another `order`.
    """

    name: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    dim_order: tuple[int, ...] = ()
    inner_shape: tuple[int, ...] = ()

    def to_hf(self, part: torch.Tensor) -> torch.Tensor:
        """This tensor, of ours[index]."""
        return (
            (part.permute(self.dim_order) if self.dim_order else part)
            .reshape(self.shape)
            .contiguous()
        )

    def from_hf(self, stored: torch.Tensor) -> torch.Tensor:
        """The way back, for some of the experts."""
        sizes = (len(stored), *self.inner_shape)
        there = stored.reshape([sizes[dim] for dim in self.dim_order])
        return there.permute([self.dim_order.index(dim) for dim in range(len(self.dim_order))])


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTensor:
    """A tensor of our checkpoints that theirs have too: a parameter, or a router's selection
    bias."""

    name: str
    shape: tuple[int, ...]
    trained: bool


NameTable = Mapping[
    str, tuple[HfTensor, ...]
]  # by our name, in our order; each tiles ours exactly once


def list_model_tensors(model: ModelSpec) -> tuple[ModelTensor, ...]:
    """Everything of a model that goes in and out: its parameters, then the selection biases."""
    found = [
        ModelTensor(name=param.name, shape=param.shape, trained=True) for param in parameters(model)
    ]
    if model.moe is not None and model.moe.router.selection_bias:
        shape = (model.moe.experts,)
        found += [
            ModelTensor(name=selection_bias_name(layer), shape=shape, trained=False)
            for layer in model.routed_layers
        ]
    return tuple(found)


def duplicate_tensors(model: ModelSpec) -> Mapping[str, str]:
    """Tensors that a checkpoint may hold besides the table: their name, and ours that they must
    equal."""
    found = {HF_HEAD: "embedding.weight"} if model.tie_embeddings else {}
    for depth in range(model.mtp_layers):
        for part, ours in _DEPTH_COPIES.items():
            tied = model.tie_embeddings and ours == "head.weight"
            found[f"model.layers.{model.layers + depth}.{part}"] = (
                "embedding.weight" if tied else ours
            )
    return found


def candidate_names(model: ModelSpec, tensor: ModelTensor) -> tuple[tuple[HfTensor, ...], ...]:
    """The ways a checkpoint may hold a tensor, the family's own first. () when there is none."""
    if tensor.name in _TOP_LEVEL:
        return ((HfTensor(name=_TOP_LEVEL[tensor.name], index=(), shape=tensor.shape),),)
    kind, number, part = tensor.name.split(".", 2)
    layer = int(number)
    if kind == "mtp":
        layer += model.layers
        if part in _DEPTH:
            return (
                (
                    HfTensor(
                        name=f"model.layers.{layer}.{_DEPTH[part]}", index=(), shape=tensor.shape
                    ),
                ),
            )
        part = part.removeprefix("layer.")
    elif layer > model.layers:  # the selection bias of a depth
        layer -= 1
    known = _LAYER.get(part, ())
    own = [one for one in known if model.family in one.families]
    taken = {one.names for one in own}
    usual = [one for one in known if not one.families and one.names not in taken]
    return tuple(_expand(one, f"model.layers.{layer}.", tensor.shape) for one in (*own, *usual))


def _expand(pattern: NamePattern, base: str, shape: tuple[int, ...]) -> tuple[HfTensor, ...]:
    experts = range(shape[0]) if "{}" in pattern.names[0] else (None,)
    found = []
    for expert in experts:
        for place, name in enumerate(pattern.names):
            index = (
                *(() if expert is None else (expert,)),
                *((place,) if len(pattern.names) > 1 else ()),
            )
            inner = list(shape[len(index) :])
            if pattern.dim_order:
                inner = [inner[dim] for dim in pattern.dim_order]
            if pattern.merged_dim is not None:
                inner[pattern.merged_dim : pattern.merged_dim + 2] = [
                    inner[pattern.merged_dim] * inner[pattern.merged_dim + 1]
                ]
            below = shape[1:] if pattern.dim_order else ()
            found.append(
                HfTensor(
                    name=base + name.format(expert),
                    index=index,
                    shape=tuple(inner),
                    dim_order=pattern.dim_order,
                    inner_shape=below,
                )
            )
    return tuple(found)


def drop_absent_mtp(model: ModelSpec, names: Collection[str]) -> ModelSpec:
    """A checkpoint may leave out the MTP layers that its config.json names (transformers does);
    then so do we."""
    first = f"model.layers.{model.layers}."
    if not model.mtp_layers or any(name.startswith(first) for name in names):
        return model
    return replace(model, mtp_layers=0)


def build_name_table(model: ModelSpec, folder: HfFolder) -> NameTable:
    """How a folder spells each tensor of `model`.

    Raises BadInput naming the tensor that is missing, written twice, of another shape or dtype, or
    not one of the model's.
    """
    table = match_names(model, folder.tensors.keys(), folder.path)
    wanted = {theirs.name: theirs for parts in table.values() for theirs in parts}
    spare = duplicate_tensors(model)
    for name, stored in folder.tensors.items():
        if name not in wanted and name not in spare:
            raise name_error(name, folder.path, "is not a tensor of this model")
        shape = (
            wanted[name].shape
            if name in wanted
            else folder.tensors[table[spare[name]][0].name].shape
        )
        if stored.shape != shape:
            raise name_error(
                name, folder.path, f"has shape {list(stored.shape)}, config.json says {list(shape)}"
            )
        if stored.dtype not in READABLE_DTYPES:
            raise name_error(
                name, folder.path, f"is of {stored.dtype}; known are {', '.join(READABLE_DTYPES)}"
            )
    with HfReader(folder) as reader:
        for name in spare.keys() & folder.tensors.keys():
            like = table[spare[name]][0].name
            if not torch.equal(reader.read(name), reader.read(like)):
                raise name_error(
                    name, folder.path, f"differs from {like}, of which config.json makes it a copy"
                )
    return table


def match_names(model: ModelSpec, names: Collection[str], where: Path) -> NameTable:
    """The table of a checkpoint with tensors of these names; each of them stands for one place of
    ours."""
    table = {
        held.name: _choose_names(model, held, names, where) for held in list_model_tensors(model)
    }
    _refuse_duplicates([theirs.name for parts in table.values() for theirs in parts], where)
    return table


def family_name_table(model: ModelSpec) -> NameTable:
    """The table of a checkpoint as the model's family has it."""
    table = {}
    for held in list_model_tensors(model):
        choices = candidate_names(model, held)
        if not choices:
            rule = f"has no name in Hugging Face checkpoints of {model.family or 'no family'}"
            raise BadInput(Reason(field=held.name, rule=rule))
        table[held.name] = choices[0]
    return table


def _choose_names(
    model: ModelSpec, tensor: ModelTensor, names: Collection[str], where: Path
) -> tuple[HfTensor, ...]:
    """The spelling of which the checkpoint holds most; all of it must be there, and tile ours
    once."""
    choices = candidate_names(model, tensor)
    if not choices:
        raise name_error(tensor.name, where, "has no name in Hugging Face checkpoints known here")
    best = max(
        choices, key=lambda parts: sum(theirs.name in names for theirs in parts) / len(parts)
    )
    for theirs in best:
        if theirs.name not in names:
            depth = tensor.name.startswith("mtp.")
            close = (
                "num_nextn_predict_layers 0 in config.json, or a checkpoint that has them"
                if depth
                else ""
            )
            raise name_error(theirs.name, where, "is missing", close)
    places = {theirs.index for theirs in best}
    if len(places) != len(best) or sum(prod(theirs.shape) for theirs in best) != prod(tensor.shape):
        raise name_error(tensor.name, where, "would not be written exactly once")
    return best


def _refuse_duplicates(names: Sequence[str], where: Path) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise name_error(name, where, "would be read for two tensors")
        seen.add(name)


def name_error(name: str, path: Path, rule: str, nearest: str = "") -> BadInput:
    return BadInput(Reason(field=name, rule=f"{rule} ({path})", nearest=nearest))


def read_parameter_box(
    reader: HfReader, parts: Sequence[HfTensor], offsets: Sequence[int], sizes: Sequence[int]
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
        if theirs.inner_shape:
            found = theirs.from_hf(reader.read_slice(theirs.name, inner[:1]))[
                (slice(None), *inner[1:])
            ]
        else:
            found = reader.read_slice(theirs.name, inner)
        box[tuple(place)] = found.float()
    return box


def read_local_part(
    reader: HfReader, parts: Sequence[HfTensor], at: TensorPlacement
) -> torch.Tensor:
    """This rank's part of a tensor in fp32, its padding zero."""
    if at.row_indices:
        return torch.cat([read_local_part(reader, parts, one) for one in at.split_rows()])
    local = torch.zeros(at.local_shape)
    local[tuple(map(slice, at.unpadded_shape))] = read_parameter_box(
        reader, parts, at.offsets, at.unpadded_shape
    )
    return local


def to_hf_tensors(
    whole: torch.Tensor, parts: Sequence[HfTensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """A parameter, or its gradient, as the tensors of the checkpoint."""
    for theirs in parts:
        yield theirs.name, theirs.to_hf(whole[theirs.index])
