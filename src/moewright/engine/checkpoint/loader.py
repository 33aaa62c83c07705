"""Load: fill this rank's pieces from whatever boxes a checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from moewright.engine.checkpoint.coordinator import Coordinator, run_on_all_ranks
from moewright.engine.checkpoint.files import PayloadReader, verify_file
from moewright.engine.checkpoint.index import CheckpointIndex, TensorEntry, read_index
from moewright.engine.checkpoint.local_shard import SAFETENSORS_DTYPES, LocalShard
from moewright.engine.checkpoint.planning import plan_load
from moewright.spec.errors import BadInput, Reason


def load_checkpoint(
    checkpoint: Path, *, shards: Sequence[LocalShard], comm: Coordinator
) -> Mapping[str, Any]:
    """Fill every piece in place, bit for bit, from any layout; return the checkpoint's `extra`. All
    ranks call.

    Each file's checksum is verified by one rank, and every piece is checked for name, shape and
    dtype, before any tensor is touched. Raises the same BadInput on every rank, naming the file or
    the tensor.
    """
    index = read_index_on_all_ranks(checkpoint, comm)
    wanted = [piece for piece in shards if piece.tensor.numel()]
    run_on_all_ranks(comm, lambda: _check(checkpoint, index, wanted, comm))
    run_on_all_ranks(comm, lambda: _fill(checkpoint, index, wanted))
    return index.extra


def read_index_on_all_ranks(checkpoint: Path, comm: Coordinator) -> CheckpointIndex:
    """The index as this rank reads it; raises on every rank when one rank cannot read it."""
    found: list[CheckpointIndex] = []
    run_on_all_ranks(comm, lambda: found.append(read_index(checkpoint)))
    return found[0]


def refuse_mismatch(
    saved: Mapping[str, Any],
    expected: Mapping[str, Any],
    *,
    field: str = "resume",
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Raise BadInput for `field`, naming all in which a checkpoint and the job that is to take it
    up differ.

    Nested mappings are compared field by field ("model.hidden_size"); all else by equality.
    `unsaid` has what a field of the job means where the checkpoint is older than the field, and
    lacks it.
    """
    ours, theirs = _flat(expected), _flat(saved)
    theirs = {name: value for name, value in _flat(defaults).items() if name in ours} | theirs
    fields = [
        name
        for name in sorted(ours | theirs)
        if ours.get(name, "absent") != theirs.get(name, "absent")
    ]
    if fields:
        differences = "; ".join(
            f"{name} is {theirs.get(name, 'absent')} in the checkpoint and {ours.get(name, 'absent')} in the job"
            for name in fields
        )
        raise BadInput(
            Reason(
                field=field,
                rule=differences,
                nearest="the checkpoint's values, or another run directory",
            )
        )


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return flat


def _check(
    checkpoint: Path, index: CheckpointIndex, wanted: Sequence[LocalShard], comm: Coordinator
) -> None:
    for entry in index.files[comm.rank :: comm.world_size]:
        verify_file(checkpoint, entry)
    tensors = {tensor.name: tensor for tensor in index.tensors}
    for piece in wanted:
        tensor = tensors.get(piece.name)
        if tensor is None:
            raise BadInput(Reason(field=piece.name, rule=f"is not in the checkpoint {checkpoint}"))
        for what, ours, theirs in (
            ("shape", list(piece.global_shape), list(tensor.shape)),
            ("dtype", piece.dtype, tensor.dtype),
        ):
            if ours != theirs:
                rule = f"the {what} in the checkpoint {checkpoint} is {theirs}"
                raise BadInput(
                    Reason(
                        field=f"{piece.name} ({what})",
                        value=str(ours),
                        rule=rule,
                        nearest=str(theirs),
                    )
                )


def _fill(checkpoint: Path, index: CheckpointIndex, wanted: Sequence[LocalShard]) -> None:
    by_name: dict[str, list[LocalShard]] = {}
    for piece in wanted:
        by_name.setdefault(piece.name, []).append(piece)
    with PayloadReader(checkpoint) as reader:
        for tensor in index.tensors:
            _fill_tensor(reader, tensor, by_name.get(tensor.name, []))


def read_tensor_box(
    reader: PayloadReader, tensor: TensorEntry, offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """One box of a tensor of a checkpoint, on the host."""
    box = torch.empty(tuple(sizes), dtype=SAFETENSORS_DTYPES[tensor.dtype])
    piece = LocalShard(
        name=tensor.name, global_shape=tensor.shape, offsets=tuple(offsets), tensor=box
    )
    _fill_tensor(reader, tensor, [piece])
    return box


def _fill_tensor(reader: PayloadReader, tensor: TensorEntry, wanted: Sequence[LocalShard]) -> None:
    for piece, shard, item in plan_load(tensor, wanted):
        target = piece.tensor.detach()
        for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        target.copy_(reader.read_region(tensor, shard, item.storage_offsets, item.lengths))
