"""A Hugging Face folder becomes a checkpoint of ours.

One box of a tensor is in memory at a time, and one file mapped. Weights become fp32, as all
checkpoints of ours hold them; what they were, in which files, and the texts beside them are kept,
so that the way back (hf.export_weights) gives the same bytes; what lies beside the language model
goes with it. Scales of packed weights are
multiplied in and not kept: such weights are exported in bf16, in which software computes that
cannot multiply packed weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from moewright.codec import read_text, to_data
from moewright.engine.checkpoint import (
    SAFETENSORS_DTYPES,
    SaveRequest,
    StoredShard,
    TensorEntry,
    checkpoint_path,
    payload_file_name,
    write_single_process,
)
from moewright.engine.hf.candidates import TABLE_DTYPE, ModelTensor, list_model_tensors
from moewright.engine.hf.folder import INDEX_FILE, HfFolder, HfReader, open_hf_folder
from moewright.engine.hf.names import (
    NameTable,
    beside_tensors,
    build_name_table,
    drop_absent_mtp,
)
from moewright.engine.hf.packed import PACKED_DTYPES, tensor_error
from moewright.engine.hf.read_parts import read_parameter_box
from moewright.spec.model import ModelSpec
from moewright.spec.workload import CheckpointSpec, Dtype

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
