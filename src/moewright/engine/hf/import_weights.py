"""A Hugging Face folder into a checkpoint of ours: one box of a tensor in memory at a time, one
file mapped.

Weights become fp32, as all checkpoints of ours hold them; what they were, in which files, and the
texts beside them are kept, so that the way back (hf_export) gives the same bytes. Scales of packed
weights are multiplied in and not kept: such weights go back in bf16, which software computes in
that cannot multiply them packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from moewright.codec import to_data
from moewright.engine.checkpoint import (
    SaveRequest,
    StoredShard,
    TensorEntry,
    checkpoint_path,
    payload_file_name,
    write_single_process,
)
from moewright.engine.hf.folder import INDEX_FILE, HfReader, open_hf_folder
from moewright.engine.hf.names import (
    ModelTensor,
    NameTable,
    build_name_table,
    drop_absent_mtp,
    list_model_tensors,
    name_error,
    read_parameter_box,
)
from moewright.engine.hf.packed import PACKED_DTYPES
from moewright.spec.model import ModelSpec
from moewright.spec.workload import CheckpointSpec, Dtype

TEXT_FILES = ("config.json", "generation_config.json", INDEX_FILE)
_FILE_BYTES = 4 * 2**30  # a file is closed with the box that makes it as long
_BOX_BYTES = 256 * 2**20  # experts are moved in groups of about as many
_EXACT_DTYPES = ("F32", "BF16", "F16")  # what fp32 holds bit for bit

ReportProgress = Callable[[int], None]  # is told of bytes as they are written


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
    """Raises BadInput naming the tensor that is missing, unknown, of another shape, or of a dtype
    fp32 cannot hold."""
    folder = open_hf_folder(source)
    model = drop_absent_mtp(model, folder.tensors.keys())
    table = build_name_table(model, folder)
    for name, stored in folder.tensors.items():
        if stored.dtype not in (*_EXACT_DTYPES, *PACKED_DTYPES):
            raise name_error(name, source, f"is of {stored.dtype}; checkpoints hold fp32")
    texts = {
        name: (source / name).read_text("utf-8") for name in TEXT_FILES if (source / name).is_file()
    }
    files = {
        file: [[name, folder.tensors[name].dtype] for name in names]
        for file, names in folder.files.items()
    }
    packed = any(
        stored.dtype in PACKED_DTYPES for stored in folder.tensors.values()
    )  # and are not packed again
    history = (
        {"unpacked_to": Dtype.BF16.value} if packed else {"hf": {"texts": texts, "files": files}}
    )
    order = SaveRequest(
        path=checkpoint_path(out, 0),
        step=0,
        extra={"model": to_data(model), **history},
        tensors=tuple(_plan_shards(list_model_tensors(model))),
        pieces=(),
        retention=CheckpointSpec(),
    )
    return ImportPlan(source=source, model=model, table=table, request=order)


def run_import(plan: ImportPlan, on_progress: ReportProgress) -> Path:
    """Write the checkpoint; returns its path. All of it is committed, or nothing."""
    with HfReader(open_hf_folder(plan.source)) as reader:

        def made(tensor: TensorEntry, shard: StoredShard) -> torch.Tensor:
            box = read_parameter_box(reader, plan.table[tensor.name], *shard.box)
            on_progress(box.nbytes)
            return box

        return write_single_process(plan.request, made)


def _plan_shards(tensors: Iterable[ModelTensor]) -> Iterator[TensorEntry]:
    """Where each box goes: whole tensors, or groups of experts."""
    number = filled = 0
    for held in tensors:
        shards = []
        row_bytes = 4 * prod(held.shape[1:])
        step = max(1, _BOX_BYTES // row_bytes) if len(held.shape) > 2 else held.shape[0]
        for first in range(0, held.shape[0], step):
            if filled >= _FILE_BYTES:
                number, filled = number + 1, 0
            rows = min(step, held.shape[0] - first)
            box = (first, *(0,) * (len(held.shape) - 1)), (rows, *held.shape[1:])
            shards.append(StoredShard(box=box, file=payload_file_name(number)))
            filled += rows * row_bytes
        yield TensorEntry(name=held.name, dtype="F32", shape=held.shape, shards=tuple(shards))
