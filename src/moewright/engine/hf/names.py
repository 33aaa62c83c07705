"""Weights of a Hugging Face checkpoint and ours: one table of names, read both ways.

A tensor of theirs is `ours[index]` seen in another order of dims and `shape`: a part of one of ours
(the gate of gate_up, one expert), or all of it (experts fused in 3-D tensors). Or it has several of
ours one after the other (queries, keys and values of Ling). Families differ in the names; which of
them a checkpoint uses follows from the names and shapes that it has. In a folder that sees or hears
too, the language model lies below a prefix; what lies beside it is kept as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import torch

from moewright.engine.hf.candidates import (
    TABLE_DTYPE,
    HfTensor,
    ModelTensor,
    candidate_names,
    list_model_tensors,
)
from moewright.engine.hf.folder import HfFolder, HfReader
from moewright.engine.hf.packed import PACKED_DTYPES, tensor_error
from moewright.families.table import find_family
from moewright.families.weight_names import (
    BESIDE_PREFIX,
    HF_HEAD,
    MTP_DUPLICATES,
    NESTINGS,
    Nesting,
)
from moewright.spec.errors import BadInput, Reason
from moewright.spec.model import AttentionKind, ModelSpec

READABLE_DTYPES = ("F64", "F32", "BF16", "F16", *PACKED_DTYPES)


# By our names, in our order; the tensors of an entry tile ours exactly once.
NameTable = Mapping[str, tuple[HfTensor, ...]]
# The tensors of a folder by name; () for a shape that is not known.
StoredShapes = Mapping[str, tuple[int, ...]]


def find_nesting(names: Iterable[str]) -> Nesting | None:
    """Return where a folder of these names has its language model; None where all of it is one."""
    nested = (nesting for name in names for nesting in NESTINGS if name.startswith(nesting.model))
    return next(nested, None)


def is_beside(model: ModelSpec, nesting: Nesting | None, name: str) -> bool:
    """Return whether a folder's tensor is no part of the language model.

    What sees or hears lies beside a nested model, and published folders of Qwen3-Next hold an MTP
    depth that their config.json does not name, later ones of DeepSeek-V4 depths of another form:
    transformers reads none of them into the language model either
    (`_keys_to_ignore_on_load_unexpected` of its classes).
    """
    if nesting is not None:
        return not name.startswith((nesting.model, nesting.head))
    has_depth = model.recurrent is not None or model.attention.kind is AttentionKind.COMPRESSED
    has_blocks = find_family(model.family).weights.mtp_blocks is not None
    is_read = model.mtp_layers > 0 and has_blocks
    return has_depth and not is_read and name.startswith("mtp.")


def duplicate_tensors(model: ModelSpec, nesting: Nesting | None = None) -> Mapping[str, str]:
    """Return the tensors that a checkpoint may hold besides those of the table.

    Their names are mapped to the names of our tensors that they must equal.
    """
    duplicates = {HF_HEAD: "embedding.weight"} if model.tie_embeddings else {}
    has_copies = not find_family(model.family).weights.mtp_final_norm
    copied_depths = model.mtp_layers if has_copies else 0
    for depth in range(copied_depths):
        for suffix, name in MTP_DUPLICATES.items():
            is_tied_head = model.tie_embeddings and name == "head.weight"
            hf_name = f"model.layers.{model.layers + depth}.{suffix}"
            duplicates[hf_name] = "embedding.weight" if is_tied_head else name
    if nesting is None:
        return duplicates
    return {nesting.rename(hf_name): name for hf_name, name in duplicates.items()}


def drop_absent_mtp(model: ModelSpec, names: Collection[str]) -> ModelSpec:
    """Leave out the MTP layers that config.json names where the checkpoint has none.

    transformers writes such checkpoints.
    """
    nesting = find_nesting(names)
    blocks = find_family(model.family).weights.mtp_blocks
    prefix = f"model.layers.{model.layers}." if blocks is None else blocks.prefix
    if model.attention.kind is AttentionKind.COMPRESSED:
        prefix += "0.e_proj."  # later files have depths of another form under the same prefix
    if nesting is not None:
        prefix = nesting.rename(prefix)
    if not model.mtp_layers or any(name.startswith(prefix) for name in names):
        return model
    return replace(model, mtp_layers=0)


def build_name_table(model: ModelSpec, folder: HfFolder) -> NameTable:
    """Build the table of how a folder names each tensor of `model`.

    Raises:
        BadInput: naming the tensor that is missing, written twice, of another shape or dtype, or
            not one of the model's.
    """
    stored_shapes = {name: stored.shape for name, stored in folder.tensors.items()}
    nesting = find_nesting(stored_shapes)
    table = match_names(model, stored_shapes, folder.path)
    shapes = {tensor.name: tensor.stored_shape for tensors in table.values() for tensor in tensors}
    integers = {
        part.name
        for tensor in list_model_tensors(model)
        if tensor.dtype == TABLE_DTYPE
        for part in table[tensor.name]
    }
    originals = {
        name: table[own_name][0].name
        for name, own_name in duplicate_tensors(model, nesting).items()
    }
    for name, stored in folder.tensors.items():
        if name in shapes:
            shape = shapes[name]
        elif name in originals:
            shape = folder.tensors[originals[name]].shape
        elif is_beside(model, nesting, name):
            shape = stored.shape
        else:
            raise tensor_error(folder.path, name, "is not a tensor of this model")
        if stored.shape != shape:
            rule = f"has shape {list(stored.shape)}, config.json says {list(shape)}"
            raise tensor_error(folder.path, name, rule)
        readable = (TABLE_DTYPE,) if name in integers else READABLE_DTYPES
        if stored.dtype not in readable:
            rule = f"is of {stored.dtype}; known are {', '.join(readable)}"
            raise tensor_error(folder.path, name, rule)
    with HfReader(folder) as reader:
        for name in originals.keys() & folder.tensors.keys():
            original = originals[name]
            if not torch.equal(reader.read(name), reader.read(original)):
                rule = f"differs from {original}, of which config.json makes it a copy"
                raise tensor_error(folder.path, name, rule)
    return table


def match_names(model: ModelSpec, shapes: StoredShapes, path: Path) -> NameTable:
    """Return the table of a checkpoint with tensors of these names.

    Each name, or rows of it, stands for one part of one tensor of ours.

    Raises:
        BadInput: naming the tensor that is missing or would be read for two.
    """
    nesting = find_nesting(shapes)
    table = {
        tensor.name: _choose_names(tensor, _list_candidates(model, tensor, nesting), shapes, path)
        for tensor in list_model_tensors(model)
    }
    seen: set[tuple[str, range]] = set()
    for hf_tensors in table.values():
        for hf_tensor in hf_tensors:
            place = (hf_tensor.name, hf_tensor.fused_rows)
            if place in seen:
                raise tensor_error(path, hf_tensor.name, "would be read for two tensors")
            seen.add(place)
    return table


def _list_candidates(
    model: ModelSpec, tensor: ModelTensor, nesting: Nesting | None
) -> tuple[tuple[HfTensor, ...], ...]:
    candidates = candidate_names(model, tensor)
    if nesting is None:
        return candidates
    return tuple(
        tuple(replace(hf_tensor, name=nesting.rename(hf_tensor.name)) for hf_tensor in hf_tensors)
        for hf_tensors in candidates
    )


def beside_tensors(
    model: ModelSpec, shapes: StoredShapes
) -> Iterator[tuple[ModelTensor, tuple[HfTensor, ...]]]:
    """Yield what a folder holds beside the language model, under our names for it."""
    nesting = find_nesting(shapes)
    for name, shape in shapes.items():
        if is_beside(model, nesting, name):
            own = ModelTensor(name=BESIDE_PREFIX + name, shape=shape, trained=False)
            yield own, (HfTensor(name=name, index=(), shape=shape),)


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
    tensor: ModelTensor,
    candidates: Sequence[tuple[HfTensor, ...]],
    shapes: StoredShapes,
    path: Path,
) -> tuple[HfTensor, ...]:
    """Return the candidate of which the checkpoint holds most, in its shapes where it has a choice.

    All of it must be there, and tile the tensor once.
    """

    def rate(hf_tensors: tuple[HfTensor, ...]) -> tuple[float, bool]:
        count = sum(hf_tensor.name in shapes for hf_tensor in hf_tensors)
        agrees = all(shapes.get(part.name) == part.stored_shape for part in hf_tensors)
        return count / len(hf_tensors), agrees

    if not candidates:
        rule = "has no name in Hugging Face checkpoints known here"
        raise tensor_error(path, tensor.name, rule)
    # Of equal ones max takes the first, which is the family's own.
    best = max(candidates, key=rate)
    for hf_tensor in best:
        if hf_tensor.name not in shapes:
            nearest = ""
            if tensor.name.startswith("mtp."):
                nearest = "num_nextn_predict_layers 0 in config.json, or a checkpoint that has them"
            raise tensor_error(path, hf_tensor.name, "is missing", nearest)
    indices = {(hf_tensor.index, hf_tensor.rows) for hf_tensor in best}
    numel = sum(prod(hf_tensor.shape) for hf_tensor in best)
    if len(indices) != len(best) or numel != prod(tensor.shape):
        raise tensor_error(path, tensor.name, "would not be written exactly once")
    return best


def to_hf_tensors(
    tensor: torch.Tensor, hf_tensors: Sequence[HfTensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a parameter, or its gradient, as tensors of the checkpoint, or as rows of them."""
    for hf_tensor in hf_tensors:
        yield hf_tensor.name, hf_tensor.to_hf(tensor[hf_tensor.index])


def join_hf_tensors(
    parts: Iterable[tuple[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint; rows of the same one come in their order."""
    tensors: dict[str, list[torch.Tensor]] = {}
    for name, part in parts:
        tensors.setdefault(name, []).append(part)
    return {name: join_rows(rows) for name, rows in tensors.items()}


def join_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows of parts one after the other; a tensor in one part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
