"""A Hugging Face folder becomes a checkpoint of ours.

One box of a tensor is in memory at a time, and one file mapped. Weights become fp32, as all
checkpoints of ours hold them; what they were, in which files, and the texts beside them are kept,
so that the way back (hf.export_weights) gives the same bytes; what lies beside the language model
goes with it. Scales of packed weights are
multiplied in and not kept: such weights are exported in bf16, in which software computes that
cannot multiply packed weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from moewright.codec import from_data, read_text, to_data
from moewright.engine.checkpoint import (
    SAFETENSORS_DTYPES,
    CheckpointIndex,
    SaveRequest,
    StoredShard,
    TensorEntry,
    checkpoint_path,
    payload_file_name,
    write_single_process,
)
from moewright.engine.comm.mesh import TensorPlacement
from moewright.engine.hf.candidates import TABLE_DTYPE, HfTensor, ModelTensor, list_model_tensors
from moewright.engine.hf.folder import INDEX_FILE, SINGLE_FILE, HfFolder, HfReader, open_hf_folder
from moewright.engine.hf.names import (
    NameTable,
    beside_tensors,
    build_name_table,
    drop_absent_mtp,
)
from moewright.engine.hf.packed import PACKED_DTYPES, tensor_error
from moewright.spec.errors import BadInput, Reason, Verbatim
from moewright.spec.model import ModelSpec
from moewright.spec.workload import CheckpointSpec, Dtype

# The order of dtypes in a file, as safetensors has it.
DTYPE_ORDER = (TABLE_DTYPE, "F32", "BF16", "F16")

# The names that a checkpoint may give files of weights: no folders, nothing hidden.
_WEIGHT_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")


@dataclass(frozen=True, kw_only=True, slots=True)
class HfOrigin:
    """The folder that a checkpoint was imported from, as its `extra` describes it.

    `texts` are small files, word for word; `files` has the name and the dtype of each tensor of
    every file of weights, in order; `shapes` has those that names do not tell.
    """

    texts: Mapping[str, Verbatim]
    files: Mapping[str, tuple[tuple[str, str], ...]]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def parse_origin(index: CheckpointIndex, checkpoint: Path) -> HfOrigin | None:
    """Return the folder that a checkpoint was imported from; None where there was none.

    A checkpoint may come from anybody, and its names become files.

    Raises:
        BadInput: naming the entry that is no plain file name, or names a tensor twice.
    """
    data = index.extra.get("hf")
    if data is None:
        return None
    where = f"{checkpoint}: hf"
    origin = from_data(HfOrigin, data, where=where)
    for name in origin.texts:
        if name not in TEXT_FILES:
            rule = "is not a file that an import keeps"
            raise BadInput(
                Reason(
                    field=f"{where}.texts",
                    value=ascii(name),
                    rule=rule,
                    nearest=", ".join(TEXT_FILES),
                )
            )
    seen: set[str] = set()
    for file, entries in origin.files.items():
        if not _WEIGHT_FILE.fullmatch(file):
            rule = "is not the plain name of a safetensors file"
            raise BadInput(
                Reason(field=f"{where}.files", value=ascii(file), rule=rule, nearest=SINGLE_FILE)
            )
        for name, dtype in entries:
            field = f"{where}.files.{file}"
            if dtype not in DTYPE_ORDER:
                legal = ", ".join(DTYPE_ORDER)
                rule = f"{name} is of {dtype}; known are {legal}"
                raise BadInput(Reason(field=field, rule=rule))
            if name in seen:
                raise BadInput(Reason(field=field, rule=f"names {name} twice"))
            seen.add(name)
    return origin


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
        # Not strict: an index names the first dims alone.
        position = [index - offset for index, offset in zip(hf_tensor.index, offsets, strict=False)]
        if any(not 0 <= index < size for index, size in zip(position, sizes, strict=False)):
            continue
        inner = tuple(
            slice(offset, offset + size)
            for offset, size in zip(offsets[lead:], sizes[lead:], strict=True)
        )
        if hf_tensor.rows:
            # As a whole, because its rows need not follow each other in ours.
            stored = reader.read(hf_tensor.name).reshape(hf_tensor.whole_shape)
            _fill_rows(box, stored.float(), hf_tensor.rows, inner)
            continue
        if hf_tensor.whole_shape:
            value = reader.read(hf_tensor.name).reshape(hf_tensor.whole_shape)[inner]
        elif hf_tensor.inner_shape:
            experts = hf_tensor.from_hf(reader.read_slice(hf_tensor.name, inner[:1]))
            value = experts[(slice(None), *inner[1:])]
        elif hf_tensor.fused_shape:
            first = hf_tensor.fused_rows.start
            rows = slice(first + inner[0].start, first + inner[0].stop)
            value = reader.read_slice(hf_tensor.name, (rows, *inner[1:]))
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


TEXT_FILES = ("config.json", "generation_config.json", INDEX_FILE)
# A file is closed with the box that makes it as long as this.
_FILE_BYTES = 4 * 2**30
# Experts are moved in groups of about this many bytes.
_BOX_BYTES = 256 * 2**20
# Tensors of all experts have so many dims; families differ in their order.
_FUSED_DIMS = 3
# The dtypes whose values fp32 holds bit for bit.
_EXACT_DTYPES = ("F32", "BF16", "F16", TABLE_DTYPE)

# Is called with the bytes of each part as it is written.
ReportProgress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportPlan:
    """A folder that is known to be of `model`, and what a checkpoint of it will be."""

    source: Path
    model: ModelSpec
    table: NameTable
    request: SaveRequest

    @property
    def nbytes(self) -> int:
        return self.request.required_bytes


def plan_import(source: Path, model: ModelSpec, out: Path) -> ImportPlan:
    """Check that a folder is of `model`, and plan its checkpoint in `out`.

    Raises:
        BadInput: naming the tensor that is missing, unknown, of another shape, or of a dtype that
            fp32 cannot hold.
    """
    folder = open_hf_folder(source)
    model = drop_absent_mtp(model, folder.tensors.keys())
    table = dict(build_name_table(model, folder))
    tensors = list(list_model_tensors(model))
    shapes = {name: stored.shape for name, stored in folder.tensors.items()}
    for tensor, hf_tensors in beside_tensors(model, shapes):
        table[tensor.name] = hf_tensors
        tensors.append(tensor)
    for name, stored in folder.tensors.items():
        if stored.dtype not in (*_EXACT_DTYPES, *PACKED_DTYPES):
            raise tensor_error(source, name, f"is of {stored.dtype}; checkpoints hold fp32")
    request = SaveRequest(
        path=checkpoint_path(out, 0),
        step=0,
        extra={"model": to_data(model), **_describe_origin(folder)},
        tensors=tuple(plan_shards(tensors)),
        shards=(),
        retention=CheckpointSpec(),
    )
    return ImportPlan(source=source, model=model, table=table, request=request)


def _describe_origin(folder: HfFolder) -> dict[str, Any]:
    """Return what an export needs to give the same bytes; packed weights are not packed again."""
    if any(stored.dtype in PACKED_DTYPES for stored in folder.tensors.values()):
        return {"unpacked_to": Dtype.BF16.value}
    texts = {
        name: read_text(folder.path / name) for name in TEXT_FILES if (folder.path / name).is_file()
    }
    files = {
        file: [[name, folder.tensors[name].dtype] for name in names]
        for file, names in folder.files.items()
    }
    shapes = {
        name: list(stored.shape)
        for name, stored in folder.tensors.items()
        if len(stored.shape) == _FUSED_DIMS
    }
    return {"hf": {"texts": texts, "files": files, "shapes": shapes}}


def run_import(plan: ImportPlan, on_progress: ReportProgress) -> Path:
    """Write the checkpoint and return its path; all of it is committed, or nothing."""
    with HfReader(open_hf_folder(plan.source)) as reader:

        def build_box(tensor: TensorEntry, shard: StoredShard) -> torch.Tensor:
            box = read_parameter_box(reader, plan.table[tensor.name], *shard.box)
            on_progress(box.nbytes)
            # A table of experts goes back to whole numbers, which fp32 holds up to 2**24.
            return box.to(SAFETENSORS_DTYPES[tensor.dtype])

        return write_single_process(plan.request, build_box)


def plan_shards(tensors: Iterable[ModelTensor]) -> Iterator[TensorEntry]:
    """Yield where each box goes: whole tensors, or groups of experts."""
    file_number = 0
    file_bytes = 0
    for tensor in tensors:
        shards = []
        rows, *row_shape = tensor.shape or (1,)
        row_bytes = 4 * prod(row_shape)
        box_rows = rows
        if len(tensor.shape) > 2:
            box_rows = max(1, _BOX_BYTES // row_bytes)
        for first in range(0, rows, box_rows):
            if file_bytes >= _FILE_BYTES:
                file_number += 1
                file_bytes = 0
            count = min(box_rows, rows - first)
            offsets = (first, *(0,) * len(row_shape))
            box = (offsets, (count, *row_shape)) if tensor.shape else ((), ())
            shards.append(StoredShard(box=box, file=payload_file_name(file_number)))
            file_bytes += count * row_bytes
        yield TensorEntry(
            name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, shards=tuple(shards)
        )
