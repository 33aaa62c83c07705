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
    Order,
    Shard,
    TensorEntry,
    checkpoint_path,
    payload_name,
    write_alone,
)
from moewright.engine.hf.folder import INDEX, HfReader, open_folder
from moewright.engine.hf.names import (
    Held,
    Table,
    held_tensors,
    read_box,
    refusal,
    table_of,
    without_absent_mtp,
)
from moewright.engine.hf.packed import PACKED
from moewright.spec.model import ModelSpec
from moewright.spec.workload import CheckpointSpec, Dtype

TEXTS = ("config.json", "generation_config.json", INDEX)
_FILE_BYTES = 4 * 2**30  # a file is closed with the box that makes it as long
_BOX_BYTES = 256 * 2**20  # experts are moved in groups of about as many
_EXACT = ("F32", "BF16", "F16")  # what fp32 holds bit for bit

Told = Callable[[int], None]  # is told of bytes as they are written


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """A folder that is known to be of `model`, and what a checkpoint of it will be."""

    source: Path
    model: ModelSpec
    table: Table
    order: Order

    @property
    def nbytes(self) -> int:
        return self.order.need_bytes


def plan_import(source: Path, model: ModelSpec, out: Path) -> Import:
    """Raises BadInput naming the tensor that is missing, unknown, of another shape, or of a dtype
    fp32 cannot hold."""
    folder = open_folder(source)
    model = without_absent_mtp(model, folder.tensors.keys())
    table = table_of(model, folder)
    for name, stored in folder.tensors.items():
        if stored.dtype not in (*_EXACT, *PACKED):
            raise refusal(name, source, f"is of {stored.dtype}; checkpoints hold fp32")
    texts = {
        name: (source / name).read_text("utf-8") for name in TEXTS if (source / name).is_file()
    }
    files = {
        file: [[name, folder.tensors[name].dtype] for name in names]
        for file, names in folder.files.items()
    }
    packed = any(
        stored.dtype in PACKED for stored in folder.tensors.values()
    )  # and are not packed again
    history = (
        {"unpacked_to": Dtype.BF16.value} if packed else {"hf": {"texts": texts, "files": files}}
    )
    order = Order(
        final=checkpoint_path(out, 0),
        step=0,
        extra={"model": to_data(model), **history},
        tensors=tuple(_placed(held_tensors(model))),
        pieces=(),
        keep=CheckpointSpec(),
    )
    return Import(source=source, model=model, table=table, order=order)


def run_import(plan: Import, told: Told) -> Path:
    """Write the checkpoint; returns its path. All of it is committed, or nothing."""
    with HfReader(open_folder(plan.source)) as reader:

        def made(tensor: TensorEntry, shard: Shard) -> torch.Tensor:
            box = read_box(reader, plan.table[tensor.name], *shard.box)
            told(box.nbytes)
            return box

        return write_alone(plan.order, made)


def _placed(tensors: Iterable[Held]) -> Iterator[TensorEntry]:
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
            shards.append(Shard(box=box, file=payload_name(number)))
            filled += rows * row_bytes
        yield TensorEntry(name=held.name, dtype="F32", shape=held.shape, shards=tuple(shards))
