"""Load: fill the shards of this rank from whatever boxes a checkpoint has, or from an older one."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from moewright.engine.checkpoint.commit import list_checkpoints
from moewright.engine.checkpoint.coordinator import Coordinator, run_on_all_ranks
from moewright.engine.checkpoint.files import PayloadReader, verify_file
from moewright.engine.checkpoint.index import (
    OLDER_CHECKPOINT,
    CheckpointIndex,
    TensorEntry,
    read_index,
)
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
    # A default of a field that the job lacks would be a difference by itself.
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
        # autograd refuses to write in place into a leaf that requires a gradient.
        target = shard.tensor.detach()
        for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        target.copy_(reader.read_region(tensor, stored, item.storage_offsets, item.lengths))


# The prefix of a damaged checkpoint that was put aside; nothing removes it.
_DAMAGED = ".damaged-"

T = TypeVar("T")


def offer_older(checkpoint: Path, read: Callable[[Path], T], copies: str = "") -> T:
    """Return what `read` makes of a checkpoint; a refusal of damage offers the one before by name.

    Where there is none before it, that is what lies in `copies`, the URL of copies elsewhere.

    Raises:
        BadInput: as `read` does.
    """
    try:
        return read(checkpoint)
    except BadInput as error:
        older = [path for path in list_checkpoints(checkpoint.parent) if path < checkpoint]
        if not older and not copies:
            raise
        nearest = f"--fall-back, which goes on from the newest copy in {copies}"
        if older:
            nearest = f"--fall-back, which goes on from {older[-1].name}"
        reasons = [
            replace(reason, nearest=nearest) if reason.nearest == OLDER_CHECKPOINT else reason
            for reason in error.reasons
        ]
        raise BadInput(*reasons) from error


def read_newest_index(directory: Path) -> CheckpointIndex | None:
    """Return the newest index that can be read, or None where there is no checkpoint at all.

    Raises:
        BadInput: that of the newest, where none can be read.
    """
    refusals = []
    for checkpoint in reversed(list_checkpoints(directory)):
        try:
            return read_index(checkpoint)
        except BadInput as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]
    return None


def find_readable(directory: Path) -> Path | None:
    """Find the newest checkpoint whose index can be read, if there is any."""
    for checkpoint in reversed(list_checkpoints(directory)):
        with suppress(BadInput):
            read_index(checkpoint)
            return checkpoint
    return None


def put_damaged_aside(
    directory: Path,
    comm: Coordinator,
    fetch: Callable[[Path | None], Path | None] = lambda newest: None,
) -> None:
    """Put checkpoints aside that are newer than the newest whole one; all ranks call this.

    They are renamed, and stay for whoever wants to look at them. `fetch` gets the newest whole one,
    and may bring a newer one from elsewhere, which it returns.

    Raises:
        BadInput: that of the newest, the same on every rank, where none is whole.
    """
    newest: Path | None = None
    refusals: dict[Path, BadInput] = {}
    for checkpoint in reversed(list_checkpoints(directory)):
        try:
            verify_checkpoint(checkpoint, comm)
            newest = checkpoint
            break
        except BadInput as error:
            refusals[checkpoint] = error
    if not refusals:
        return

    def replace_damaged() -> None:
        if comm.rank == 0:
            _replace_damaged(refusals, newest, fetch)

    run_on_all_ranks(comm, replace_damaged)


def _replace_damaged(
    refusals: Mapping[Path, BadInput],
    newest: Path | None,
    fetch: Callable[[Path | None], Path | None],
) -> None:
    """Fetch first: a process that ends in between has lost nothing."""
    first = next(iter(refusals.values()))
    try:
        fetched = fetch(newest)
    except BadInput as error:
        raise BadInput(*first.reasons, *error.reasons) from error
    source = fetched or newest
    if source is None:
        raise first
    for damaged, refusal in refusals.items():
        # A copy of the same step has put it aside.
        aside = aside_path(damaged) if damaged == fetched else put_aside(damaged)
        reason = refusal.reasons[0]
        with suppress(OSError):
            print(
                f"{reason.field}: {reason.rule}; put aside as {aside}: going on from {source.name}",
                file=sys.stderr,
                flush=True,
            )


def aside_path(damaged: Path) -> Path:
    """Return where a damaged checkpoint goes when it is put aside."""
    return damaged.with_name(_DAMAGED + damaged.name)


def put_aside(damaged: Path) -> Path:
    """Rename a damaged checkpoint, so that nothing takes it for one; return its new path."""
    aside = aside_path(damaged)
    shutil.rmtree(aside, ignore_errors=True)  # of an earlier time
    damaged.rename(aside)
    return aside
