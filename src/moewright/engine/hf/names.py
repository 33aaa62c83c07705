"""Weights of a Hugging Face checkpoint and ours: one table of names, read both ways.

A tensor of theirs is `ours[index]` seen in another order of dims and `shape`: a part of one of ours
(the gate of gate_up, one expert), or all of it (experts fused in 3-D tensors). Families differ in
the names; which of them a checkpoint uses follows from the names that it has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from moewright.engine.comm.tensor_placement import TensorPlacement
from moewright.engine.hf.folder import HfFolder, HfReader
from moewright.engine.hf.name_patterns import (
    HF_HEAD,
    LAYER_PATTERNS,
    MTP_DUPLICATES,
    MTP_NAMES,
    TOP_LEVEL_NAMES,
    NamePattern,
)
from moewright.engine.hf.packed import PACKED_DTYPES, tensor_error
from moewright.rules.parameters import parameters, selection_bias_name
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import MixerKind, ModelSpec

READABLE_DTYPES = ("F64", "F32", "BF16", "F16", *PACKED_DTYPES)


@dataclass(frozen=True, kw_only=True, slots=True)
class HfTensor:
    """A tensor of a Hugging Face checkpoint: `ours[index]` in `shape`.

    A tensor of all experts has them in its first dim, and our dims in `dim_order`; `inner_shape`
    has the sizes of our dims after the experts. `whole_shape` is that of `ours[index]` where no
    dim of this tensor is one of ours alone, so that it is read as a whole. With `rows`, it is these
    rows of `ours[index]`, one after the other, in `whole_shape`.
    """

    name: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    dim_order: tuple[int, ...] = ()
    inner_shape: tuple[int, ...] = ()
    whole_shape: tuple[int, ...] = ()
    rows: tuple[range, ...] = ()

    def to_hf(self, part: torch.Tensor) -> torch.Tensor:
        """Convert `part`, which is `ours[index]`, to this tensor."""
        if self.dim_order:
            part = part.permute(self.dim_order)
        if self.rows:
            part = torch.cat([part[rows.start : rows.stop] for rows in self.rows])
        return part.reshape(self.shape).contiguous()

    def from_hf(self, stored: torch.Tensor) -> torch.Tensor:
        """Convert some experts of this tensor to the same experts of `ours[index]`."""
        sizes = (len(stored), *self.inner_shape)
        reordered = stored.reshape([sizes[dim] for dim in self.dim_order])
        inverse = [self.dim_order.index(dim) for dim in range(len(self.dim_order))]
        return reordered.permute(inverse)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTensor:
    """A tensor of our checkpoints that Hugging Face's have too.

    It is a parameter, which is trained, or a router's selection bias.
    """

    name: str
    shape: tuple[int, ...]
    trained: bool


# By our names, in our order; the tensors of an entry tile ours exactly once.
NameTable = Mapping[str, tuple[HfTensor, ...]]


def list_model_tensors(model: ModelSpec) -> tuple[ModelTensor, ...]:
    """List what goes in and out of a model: its parameters, then the selection biases."""
    tensors = [
        ModelTensor(name=param.name, shape=param.shape, trained=True) for param in parameters(model)
    ]
    if model.moe is not None and model.moe.router.selection_bias:
        shape = (model.moe.experts,)
        tensors += [
            ModelTensor(name=selection_bias_name(layer), shape=shape, trained=False)
            for layer in model.routed_layers
        ]
    return tuple(tensors)


def duplicate_tensors(model: ModelSpec) -> Mapping[str, str]:
    """Return the tensors that a checkpoint may hold besides those of the table.

    Their names are mapped to the names of our tensors that they must equal.
    """
    duplicates = {HF_HEAD: "embedding.weight"} if model.tie_embeddings else {}
    for depth in range(model.mtp_layers):
        for suffix, name in MTP_DUPLICATES.items():
            is_tied_head = model.tie_embeddings and name == "head.weight"
            hf_name = f"model.layers.{model.layers + depth}.{suffix}"
            duplicates[hf_name] = "embedding.weight" if is_tied_head else name
    return duplicates


def candidate_names(model: ModelSpec, tensor: ModelTensor) -> tuple[tuple[HfTensor, ...], ...]:
    """Return the ways a checkpoint may hold a tensor, the family's own first.

    There may be none.
    """
    if tensor.name in TOP_LEVEL_NAMES:
        return ((HfTensor(name=TOP_LEVEL_NAMES[tensor.name], index=(), shape=tensor.shape),),)
    kind, number, suffix = tensor.name.split(".", 2)
    layer = int(number)
    if kind == "mtp":
        layer += model.layers
        if suffix in MTP_NAMES:
            hf_name = f"model.layers.{layer}.{MTP_NAMES[suffix]}"
            return ((HfTensor(name=hf_name, index=(), shape=tensor.shape),),)
        suffix = suffix.removeprefix("layer.")
    elif layer > model.layers:  # the selection bias of a depth
        layer -= 1
    is_recurrent = model.mixer(layer) is MixerKind.RECURRENT
    patterns = [
        pattern
        for pattern in LAYER_PATTERNS.get(suffix, ())
        if pattern.recurrent is (is_recurrent and suffix.startswith("attention."))
    ]
    own = [pattern for pattern in patterns if model.family in pattern.families]
    own_names = {pattern.names for pattern in own}
    usual = [
        pattern for pattern in patterns if not pattern.families and pattern.names not in own_names
    ]
    prefix = f"model.layers.{layer}."
    return tuple(_expand(model, pattern, prefix, tensor.shape) for pattern in (*own, *usual))


def _expand(
    model: ModelSpec, pattern: NamePattern, prefix: str, shape: tuple[int, ...]
) -> tuple[HfTensor, ...]:
    """Return the tensors of a pattern, which hold a tensor of ours of this shape."""
    expert_indices: list[tuple[int, ...]] = [()]
    if "{}" in pattern.names[0]:
        expert_indices = [(expert,) for expert in range(shape[0])]
    tensors = []
    for expert_index in expert_indices:
        for number, name in enumerate(pattern.names):
            # The gate and the up of a parameter are its entries 0 and 1.
            part_index = (number,) if len(pattern.names) > 1 and not pattern.head_parts else ()
            index = (*expert_index, *part_index)
            whole_shape = shape[len(index) :]
            rows: tuple[range, ...] = ()
            if pattern.head_parts:
                rows = tuple(_head_rows(model, pattern.head_parts, number))
                whole_shape = (sum(map(len, rows)), *shape[1:])
            hf_shape = list(whole_shape)
            if pattern.dim_order:
                hf_shape = [hf_shape[dim] for dim in pattern.dim_order]
            if pattern.merged_dim is not None:
                first = pattern.merged_dim
                hf_shape[first : first + 2] = [hf_shape[first] * hf_shape[first + 1]]
            if pattern.unit_dim is not None:
                hf_shape.insert(pattern.unit_dim, 1)
            is_whole = pattern.unit_dim is not None or pattern.merged_dim == 0 or rows
            tensors.append(
                HfTensor(
                    name=prefix + name.format(*expert_index),
                    index=index,
                    shape=tuple(hf_shape),
                    dim_order=pattern.dim_order,
                    inner_shape=shape[1:] if pattern.dim_order else (),
                    whole_shape=whole_shape if is_whole else (),
                    rows=rows,
                )
            )
    return tuple(tensors)


def _head_rows(model: ModelSpec, head_parts: tuple[str, ...], number: int) -> Iterator[range]:
    """Yield which of our rows tensor `number` has, part by part and head by head."""
    spec = model.recurrent
    assert spec is not None  # its layers alone have such names
    sharing = spec.heads // spec.key_heads
    value = sharing * spec.head_dim
    widths = {"q": spec.key_dim, "k": spec.key_dim, "v": value, "z": value}
    widths |= {"b": sharing, "a": sharing}
    letters = "".join(head_parts)
    head_width = sum(widths[letter] for letter in letters)
    for letter in head_parts[number]:
        first = sum(widths[other] for other in letters[: letters.index(letter)])
        for head in range(spec.key_heads):
            start = head * head_width + first
            yield range(start, start + widths[letter])


def drop_absent_mtp(model: ModelSpec, names: Collection[str]) -> ModelSpec:
    """Leave out the MTP layers that config.json names where the checkpoint has none.

    transformers writes such checkpoints.
    """
    prefix = f"model.layers.{model.layers}."
    if not model.mtp_layers or any(name.startswith(prefix) for name in names):
        return model
    return replace(model, mtp_layers=0)


def is_unread(model: ModelSpec, name: str) -> bool:
    """Return whether a folder's tensor is of an MTP depth that its config.json does not name.

    Published folders of Qwen3-Next hold some. transformers reads none of them either
    (`_keys_to_ignore_on_load_unexpected` of its models).
    """
    return model.recurrent is not None and name.startswith("mtp.")


def build_name_table(model: ModelSpec, folder: HfFolder) -> NameTable:
    """Build the table of how a folder names each tensor of `model`.

    Raises:
        BadInput: naming the tensor that is missing, written twice, of another shape or dtype, or
            not one of the model's.
    """
    table = match_names(model, folder.tensors.keys(), folder.path)
    shapes = {tensor.name: tensor.shape for tensors in table.values() for tensor in tensors}
    originals = {
        name: table[own_name][0].name for name, own_name in duplicate_tensors(model).items()
    }
    for name, stored in folder.tensors.items():
        if name in shapes:
            shape = shapes[name]
        elif name in originals:
            shape = folder.tensors[originals[name]].shape
        elif is_unread(model, name):
            continue
        else:
            raise tensor_error(folder.path, name, "is not a tensor of this model")
        if stored.shape != shape:
            rule = f"has shape {list(stored.shape)}, config.json says {list(shape)}"
            raise tensor_error(folder.path, name, rule)
        if stored.dtype not in READABLE_DTYPES:
            rule = f"is of {stored.dtype}; known are {', '.join(READABLE_DTYPES)}"
            raise tensor_error(folder.path, name, rule)
    with HfReader(folder) as reader:
        for name in originals.keys() & folder.tensors.keys():
            original = originals[name]
            if not torch.equal(reader.read(name), reader.read(original)):
                rule = f"differs from {original}, of which config.json makes it a copy"
                raise tensor_error(folder.path, name, rule)
    return table


def match_names(model: ModelSpec, names: Collection[str], path: Path) -> NameTable:
    """Return the table of a checkpoint with tensors of these names.

    Each name stands for one part of one tensor of ours.

    Raises:
        BadInput: naming the tensor that is missing or would be read for two.
    """
    table = {
        tensor.name: _choose_names(model, tensor, names, path)
        for tensor in list_model_tensors(model)
    }
    seen: set[str] = set()
    for hf_tensors in table.values():
        for hf_tensor in hf_tensors:
            if hf_tensor.name in seen:
                raise tensor_error(path, hf_tensor.name, "would be read for two tensors")
            seen.add(hf_tensor.name)
    return table


def family_name_table(model: ModelSpec) -> NameTable:
    """Return the table of a checkpoint in the names of the model's family.

    Raises:
        BadInput: naming the tensor that the family has no name for.
    """
    table = {}
    for tensor in list_model_tensors(model):
        candidates = candidate_names(model, tensor)
        if not candidates:
            rule = f"has no name in Hugging Face checkpoints of {model.family or 'no family'}"
            raise BadInput(Reason(field=tensor.name, rule=rule))
        table[tensor.name] = candidates[0]
    return table


def _choose_names(
    model: ModelSpec, tensor: ModelTensor, names: Collection[str], path: Path
) -> tuple[HfTensor, ...]:
    """Return the candidate of which the checkpoint holds most.

    All of it must be there, and tile the tensor once.
    """

    def share_held(hf_tensors: tuple[HfTensor, ...]) -> float:
        return sum(hf_tensor.name in names for hf_tensor in hf_tensors) / len(hf_tensors)

    candidates = candidate_names(model, tensor)
    if not candidates:
        rule = "has no name in Hugging Face checkpoints known here"
        raise tensor_error(path, tensor.name, rule)
    best = max(candidates, key=share_held)
    for hf_tensor in best:
        if hf_tensor.name not in names:
            nearest = ""
            if tensor.name.startswith("mtp."):
                nearest = "num_nextn_predict_layers 0 in config.json, or a checkpoint that has them"
            raise tensor_error(path, hf_tensor.name, "is missing", nearest)
    indices = {(hf_tensor.index, hf_tensor.rows) for hf_tensor in best}
    numel = sum(prod(hf_tensor.shape) for hf_tensor in best)
    if len(indices) != len(best) or numel != prod(tensor.shape):
        raise tensor_error(path, tensor.name, "would not be written exactly once")
    return best


def read_parameter_box(
    reader: HfReader, hf_tensors: Sequence[HfTensor], offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """Read a box of one of our tensors, in fp32.

    Only what lies in it is read, or everything below the first dim where experts are fused.
    """
    box = torch.empty(tuple(sizes))
    for hf_tensor in hf_tensors:
        lead = len(hf_tensor.index)
        # Where this part lies in the box; a part outside of it is not read.
        position = [index - offset for index, offset in zip(hf_tensor.index, offsets, strict=False)]
        if any(not 0 <= index < size for index, size in zip(position, sizes, strict=False)):
            continue
        inner = tuple(
            slice(offset, offset + size)
            for offset, size in zip(offsets[lead:], sizes[lead:], strict=True)
        )
        if hf_tensor.rows:
            stored = reader.read(hf_tensor.name).reshape(hf_tensor.whole_shape)
            _fill_rows(box, stored.float(), hf_tensor.rows, inner)
            continue
        if hf_tensor.whole_shape:
            value = reader.read(hf_tensor.name).reshape(hf_tensor.whole_shape)[inner]
        elif hf_tensor.inner_shape:
            experts = hf_tensor.from_hf(reader.read_slice(hf_tensor.name, inner[:1]))
            value = experts[(slice(None), *inner[1:])]
        else:
            value = reader.read_slice(hf_tensor.name, inner)
        box[tuple(position)] = value.float()
    return box


def _fill_rows(
    box: torch.Tensor, stored: torch.Tensor, rows: Sequence[range], inner: tuple[slice, ...]
) -> None:
    """Copy to a box those rows of ours that a stored tensor has and that lie in `inner`."""
    own, *columns = inner
    for part, values in zip(rows, stored.split([len(part) for part in rows]), strict=True):
        first, stop = max(part.start, own.start), min(part.stop, own.stop)
        if first < stop:
            taken = values[(slice(first - part.start, stop - part.start), *columns)]
            box[first - own.start : stop - own.start] = taken


def read_local_part(
    reader: HfReader, hf_tensors: Sequence[HfTensor], placement: TensorPlacement
) -> torch.Tensor:
    """Read this rank's part of a tensor in fp32, its padding zero."""
    if placement.row_indices:
        parts = placement.split_rows()
        return torch.cat([read_local_part(reader, hf_tensors, part) for part in parts])
    local = torch.zeros(placement.local_shape)
    unpadded = tuple(slice(size) for size in placement.unpadded_shape)
    local[unpadded] = read_parameter_box(
        reader, hf_tensors, placement.offsets, placement.unpadded_shape
    )
    return local


def to_hf_tensors(
    tensor: torch.Tensor, hf_tensors: Sequence[HfTensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a parameter, or its gradient, as the tensors of the checkpoint."""
    for hf_tensor in hf_tensors:
        yield hf_tensor.name, hf_tensor.to_hf(tensor[hf_tensor.index])
