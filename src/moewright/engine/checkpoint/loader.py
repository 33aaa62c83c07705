"""Load: fill the shards of this rank from whatever boxes a checkpoint has."""

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
    """Fill every shard in place, bit for bit, from any layout; return the checkpoint's `extra`.

    All ranks call this. Before any tensor is touched, one rank verifies the checksum of each file,
    and every shard is checked for name, shape and dtype.

    Raises:
        BadInput: the same on every rank, naming the file or the tensor.
    """
    index = verify_checkpoint(checkpoint, comm)
    targets = [shard for shard in shards if shard.tensor.numel()]
    run_on_all_ranks(comm, lambda: _check(checkpoint, index, targets))
    run_on_all_ranks(comm, lambda: _fill(checkpoint, index, targets, comm))
    return index.extra


def verify_checkpoint(checkpoint: Path, comm: Coordinator) -> CheckpointIndex:
    """Verify that a checkpoint is as it was committed, and return its index; all ranks call this.

    Raises:
        BadInput: the same on every rank, naming the file.
    """
    index = read_index_on_all_ranks(checkpoint, comm)

    def verify_own_files() -> None:
        for entry in index.files[comm.rank :: comm.world_size]:
            verify_file(checkpoint, entry, comm.note)

    run_on_all_ranks(comm, verify_own_files)
    return index


def read_index_on_all_ranks(checkpoint: Path, comm: Coordinator) -> CheckpointIndex:
    """Read the index; raise on every rank when one rank cannot read it."""
    # Results go from rank to rank as JSON; the index itself stays on the rank that read it.
    indices: list[CheckpointIndex] = []
    run_on_all_ranks(comm, lambda: indices.append(read_index(checkpoint)))
    return indices[0]


def refuse_mismatch(
    saved: Mapping[str, Any],
    expected: Mapping[str, Any],
    *,
    field: str = "resume",
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Raise BadInput for `field`, naming every field in which a checkpoint and a job differ.

    Nested mappings are compared field by field ("model.hidden_size"); all else by equality.
    `defaults` gives the value of a field that the checkpoint lacks, because it is older than the
    field.
    """
    job_values = _flatten(expected)
    saved_values = {name: value for name, value in _flatten(defaults).items() if name in job_values}
    saved_values |= _flatten(saved)
    differences = []
    for name in sorted(job_values | saved_values):
        in_job = job_values.get(name, "absent")
        in_checkpoint = saved_values.get(name, "absent")
        if in_job != in_checkpoint:
            differences.append(
                f"{name} is {in_checkpoint} in the checkpoint and {in_job} in the job"
            )
    if differences:
        nearest = "the checkpoint's values, or another run directory"
        raise BadInput(Reason(field=field, rule="; ".join(differences), nearest=nearest))


def _flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _check(checkpoint: Path, index: CheckpointIndex, shards: Sequence[LocalShard]) -> None:
    tensors = {tensor.name: tensor for tensor in index.tensors}
    for shard in shards:
        tensor = tensors.get(shard.name)
        if tensor is None:
            raise BadInput(Reason(field=shard.name, rule=f"is not in the checkpoint {checkpoint}"))
        comparisons = (
            ("shape", str(list(shard.global_shape)), str(list(tensor.shape))),
            ("dtype", shard.dtype, tensor.dtype),
        )
        for quality, value, stored in comparisons:
            if value != stored:
                raise BadInput(
                    Reason(
                        field=f"{shard.name} ({quality})",
                        value=value,
                        rule=f"the {quality} in the checkpoint {checkpoint} is {stored}",
                        nearest=stored,
                    )
                )


def _fill(
    checkpoint: Path, index: CheckpointIndex, shards: Sequence[LocalShard], comm: Coordinator
) -> None:
    shards_by_name: dict[str, list[LocalShard]] = {}
    for shard in shards:
        shards_by_name.setdefault(shard.name, []).append(shard)
    with PayloadReader(checkpoint) as reader:
        for tensor in index.tensors:
            comm.note(f"loads {tensor.name}")
            _fill_tensor(reader, tensor, shards_by_name.get(tensor.name, []))


def read_tensor_box(
    reader: PayloadReader, tensor: TensorEntry, offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """Read one box of a tensor of a checkpoint, on the host."""
    box = torch.empty(tuple(sizes), dtype=SAFETENSORS_DTYPES[tensor.dtype])
    shard = LocalShard(
        name=tensor.name, global_shape=tensor.shape, offsets=tuple(offsets), tensor=box
    )
    _fill_tensor(reader, tensor, [shard])
    return box


def _fill_tensor(reader: PayloadReader, tensor: TensorEntry, shards: Sequence[LocalShard]) -> None:
    for shard, stored, item in plan_load(tensor, shards):
        target = shard.tensor.detach()
        for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        target.copy_(reader.read_region(tensor, stored, item.storage_offsets, item.lengths))
