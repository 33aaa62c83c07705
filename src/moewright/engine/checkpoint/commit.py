"""Save: every rank writes one file into a hidden directory; one rename commits them all."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from moewright.engine.checkpoint.coordinator import Coordinator, run_on_all_ranks
from moewright.engine.checkpoint.files import (
    TensorHeader,
    fsync_directory,
    require_space,
    write_error,
    write_payload,
    write_tensors,
    write_text,
)
from moewright.engine.checkpoint.index import (
    INDEX_FILE,
    STEP_LIMIT,
    CheckpointIndex,
    FileEntry,
    StoredShard,
    TensorEntry,
    box_key,
    payload_file_name,
    read_index,
    serialize_index,
)
from moewright.engine.checkpoint.local_shard import (
    SAFETENSORS_DTYPES,
    LocalShard,
    find_nonfinite,
    find_tiling_fault,
)
from moewright.spec.errors import BadInput, Reason
from moewright.spec.workload import CheckpointSpec

_COMMITTED = re.compile(r"step-(\d{8})", re.ASCII)
# Prefixes of directories that are not yet, or no longer, checkpoints.
_SAVING = ".saving-"
_PURGED = ".purged-"


def verify_nothing() -> None:
    """Find nothing wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """A checkpoint to be written; `shards` are those that the plan gives to this rank's file.

    `verify` raises where their data is not what it should be; it is called when they are written.
    """

    path: Path
    step: int
    extra: Mapping[str, Any]
    tensors: tuple[TensorEntry, ...]
    shards: tuple[LocalShard, ...]
    retention: CheckpointSpec
    verify: Callable[[], None] = verify_nothing

    @property
    def working_path(self) -> Path:
        return self.path.with_name(_SAVING + self.path.name)

    @property
    def required_bytes(self) -> int:
        return sum(
            SAFETENSORS_DTYPES[tensor.dtype].itemsize * prod(tensor.shape)
            for tensor in self.tensors
        )


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies."""
    return directory / f"step-{step:08d}"


def checkpoint_step(name: str) -> int | None:
    """Return the step of a checkpoint's folder by its name; None where it is no such name."""
    match = _COMMITTED.fullmatch(name)
    return int(match[1]) if match else None


def validate_extra(step: int, extra: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError, on every rank, for what no index can hold."""
    if not 0 <= step < STEP_LIMIT:
        raise ValueError(f"step {step} is not of 8 digits")
    serialize_index(CheckpointIndex(step=step, extra=extra, files=(), tensors=()))


def select_assigned(
    shards: Sequence[LocalShard], tensors: Sequence[TensorEntry], rank: int
) -> tuple[LocalShard, ...]:
    """Return the parts of shards that the plan gives to this rank's file, as views of them."""
    file = payload_file_name(rank)
    assigned = {
        tensor.name: [stored.box for stored in tensor.shards if stored.file == file]
        for tensor in tensors
    }
    return tuple(
        shard.part(box)
        for shard in shards
        # A tensor of which no rank holds an element is not in the plan.
        if shard.tensor.numel()
        for box in assigned[shard.name]
        if shard.contains(box)
    )


def prepare_save(request: SaveRequest, comm: Coordinator) -> bool:
    """Make the working directory; return False when the step is committed already.

    The data of the shards may still change after it.

    Raises:
        BadInput: on every rank, for an unwritable directory, a full disk, or the same step of
            another job.
    """

    def prepare_on_leader() -> bool:
        return comm.rank == 0 and _prepare(request)

    leader_result, *_ = run_on_all_ranks(comm, prepare_on_leader)
    return bool(leader_result)


def commit_save(request: SaveRequest, comm: Coordinator) -> None:
    """Write the shards as they are now, commit, and purge older checkpoints.

    Either the whole checkpoint is committed, on disk and checksummed, or nothing changes.

    Raises:
        BadInput: the same on every rank, when nothing changed.
        FloatingPointError: likewise, where a tensor holds a NaN or an infinite number.
    """
    is_leader = comm.rank == 0
    try:
        entries = run_on_all_ranks(comm, partial(_write_and_verify, request, comm))
        _require_finite(request, entries)
        files = tuple(FileEntry(**entry) for entry in entries if entry is not None)
        # The replies above are a barrier: no index is written before every file is on disk.
        index = CheckpointIndex(
            step=request.step, extra=request.extra, files=files, tensors=request.tensors
        )

        def commit_on_leader() -> None:
            if is_leader:
                _commit(request, index)

        run_on_all_ranks(comm, commit_on_leader)
    # Any other error ends the job, and the next save sweeps the working directory.
    except (BadInput, FloatingPointError):
        if is_leader:
            shutil.rmtree(request.working_path, ignore_errors=True)
        raise
    if is_leader:
        _purge(request)


def write_single_process(
    request: SaveRequest, build_box: Callable[[TensorEntry, StoredShard], torch.Tensor]
) -> Path:
    """Write all files of a checkpoint in one process: all of it, or nothing.

    Each box is built when its turn comes.
    """
    shards_by_file: dict[str, list[tuple[TensorEntry, StoredShard]]] = {}
    for tensor in request.tensors:
        # `plan_save` checks this for shards of ranks; here nobody has yet.
        if fault := find_tiling_fault(tensor.shape, [shard.box for shard in tensor.shards]):
            raise ValueError(f"{tensor.name}: {fault}")
        for shard in tensor.shards:
            shards_by_file.setdefault(shard.file, []).append((tensor, shard))
    directory = request.path.parent
    # Before `_prepare` makes folders: what fails removes those that it made, and no others.
    existing = _nearest_existing(directory)
    try:
        if not _prepare(request):
            return request.path
        files = []
        for file, shards in shards_by_file.items():
            headers = [
                TensorHeader(
                    name=box_key(tensor.name, shard.box[0]),
                    dtype=tensor.dtype,
                    shape=shard.box[1],
                )
                for tensor, shard in shards
            ]
            boxes = (build_box(tensor, shard) for tensor, shard in shards)
            files.append(write_tensors(request.working_path / file, headers, boxes))
        index = CheckpointIndex(
            step=request.step, extra=request.extra, files=tuple(files), tensors=request.tensors
        )
        _commit(request, index)
    except OSError as error:
        raise write_error(directory, error, request.required_bytes) from error
    finally:
        # After a commit there is nothing for these two to remove.
        shutil.rmtree(request.working_path, ignore_errors=True)
        _remove_empty(directory, below=existing)
    return request.path


def list_checkpoints(directory: Path) -> tuple[Path, ...]:
    """List the committed checkpoints below `directory`, oldest first.

    Half-written and stray entries are passed over.
    """
    if not directory.is_dir():
        return ()
    checkpoints = [
        path
        for path in directory.iterdir()
        if checkpoint_step(path.name) is not None and (path / INDEX_FILE).is_file()
    ]
    # Names sort as their steps do, for all have eight digits.
    return tuple(sorted(checkpoints))


def find_latest(directory: Path) -> Path | None:
    """Find the newest committed checkpoint, if there is any.

    Damage inside it is not skipped in silence: `load_checkpoint` refuses it.
    """
    checkpoints = list_checkpoints(directory)
    return next(reversed(checkpoints), None)


def latest_step(directory: Path) -> int:
    """Return the step of the newest committed checkpoint, 0 where there is none."""
    return folder_step(find_latest(directory))


def folder_step(checkpoint: Path | None) -> int:
    """Return the step that the folder of a checkpoint is named by, 0 where there is none."""
    return (checkpoint_step(checkpoint.name) or 0) if checkpoint else 0


def find_checkpoint(path: Path) -> Path:
    """Find the checkpoint that `path` is, or the newest one in it.

    Of the folder of a run, that is the newest one in its `checkpoints`.

    Raises:
        BadInput: when there is none.
    """
    if (path / INDEX_FILE).is_file():
        return path
    for folder in (path, path / "checkpoints"):
        if (newest := find_latest(folder)) is not None:
            return newest
    rule = "holds no checkpoint of moewright" if path.is_dir() else "no such folder"
    raise BadInput(Reason(field=str(path), rule=rule, nearest="a folder with step-*"))


def find_resume_point(directory: Path) -> tuple[Path | None, tuple[Path, ...]]:
    """Find the newest committed checkpoint, and the entries of newer steps that are not committed.

    Returns (None, ()) for a folder that has never held one.

    Raises:
        BadInput: when the folder holds something else and no checkpoint, or one under another
            step's name. Starting anew there would pass over what somebody meant to continue.
    """
    if directory.exists() and not directory.is_dir():
        raise BadInput(Reason(field=str(directory), rule="is a file, not a directory"))
    entries = []
    if directory.exists():
        entries = [path for path in directory.iterdir() if not path.name.startswith(".")]
    named = sorted(path for path in entries if _COMMITTED.fullmatch(path.name))
    newest = find_latest(directory)
    if newest is None:
        if named:
            read_index(named[-1])  # raises: it has no index
        if entries:
            rule = f"is not a checkpoint of moewright, and the only one in {directory}"
            raise BadInput(Reason(field=str(min(entries)), rule=rule, nearest="an empty folder"))
        return None, ()
    step = read_index(newest).step
    expected = checkpoint_path(directory, step)
    if newest.name != expected.name:
        rule = f"holds step {step}"
        nearest = str(newest.with_name(expected.name))
        raise BadInput(Reason(field=str(newest), rule=rule, nearest=nearest))
    return newest, tuple(path for path in named if path > newest)


def _prepare(request: SaveRequest) -> bool:
    directory = request.path.parent
    if (request.path / INDEX_FILE).is_file():
        if read_index(request.path).extra == request.extra:
            return False
        rule = "is the same step of another job"
        raise BadInput(Reason(field=str(request.path), rule=rule, nearest="another directory"))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # No rank writes yet: all wait for the leader's reply.
        for stale in directory.iterdir():
            if stale.name.startswith((_SAVING, _PURGED)):
                _remove(stale)
        require_space(directory, request.required_bytes)
        request.working_path.mkdir()
    # By the first `mkdir`: the working directory was swept before the second.
    except FileExistsError as error:
        raise BadInput(Reason(field=str(directory), rule="is a file, not a directory")) from error
    except OSError as error:
        existing = _nearest_existing(directory)
        raise write_error(existing, error, request.required_bytes) from error
    return True


def _write_and_verify(request: SaveRequest, comm: Coordinator) -> dict[str, Any] | None:
    """Write this rank's file; what `verify` raises keeps all ranks from the commit."""
    entry = _write(request, comm)
    request.verify()
    return entry


def _write(request: SaveRequest, comm: Coordinator) -> dict[str, Any] | None:
    """Write this rank's file, and return its entry as JSON; None when the plan gives it nothing.

    Where a tensor is not finite, its name is returned, and nothing written.
    """
    if not request.shards:
        return None
    # Returned and not raised: `run_on_all_ranks` has ranks agree on BadInput alone.
    if name := find_nonfinite(request.shards):
        return {"not_finite": name}
    try:
        path = request.working_path / payload_file_name(comm.rank)
        entry = write_payload(path, request.shards, comm.note)
    except OSError as error:
        raise write_error(request.path.parent, error, request.required_bytes) from error
    return {"name": entry.name, "nbytes": entry.nbytes, "sha256": entry.sha256}


def _require_finite(request: SaveRequest, entries: Sequence[Mapping[str, Any] | None]) -> None:
    """Raise FloatingPointError, the same on every rank, where a rank has named a tensor."""
    for rank, entry in enumerate(entries):
        if entry is None or "not_finite" not in entry:
            continue
        newest = find_latest(request.path.parent)
        kept = f"{newest.name} stays the newest" if newest else "there is none yet"
        raise FloatingPointError(
            f"{entry['not_finite']} of rank {rank} is not finite: the checkpoint of step "
            f"{request.step} is not committed, {kept}"
        )


def _commit(request: SaveRequest, index: CheckpointIndex) -> None:
    directory = request.path.parent
    try:
        write_text(request.working_path / INDEX_FILE, serialize_index(index))
        # The names of the files must be durable before the rename makes them a checkpoint.
        fsync_directory(request.working_path)
        if os.path.lexists(request.path):  # without an index: half-written by something else
            _remove(request.path)
        request.working_path.rename(request.path)
        # The rename is durable only when the folder around it is flushed.
        fsync_directory(directory)
    except OSError as error:
        raise write_error(directory, error, request.required_bytes) from error


def _purge(request: SaveRequest) -> None:
    """Remove all but the newest checkpoints and those to be kept for good.

    The one just written always stays. A rename makes each vanish at once; what cannot be renamed or
    removed is left to the next save, which says what is wrong with the disk.
    """
    retention = request.retention
    older = [path for path in list_checkpoints(request.path.parent) if path != request.path]
    # The one just written counts too; a negative end would cut from the back.
    for path in older[: max(0, len(older) - (retention.keep - 1))]:
        if retention.keeps_for_good(checkpoint_step(path.name) or 0):
            continue
        purged = path.with_name(_PURGED + path.name)
        with suppress(OSError):
            path.rename(purged)
        shutil.rmtree(purged, ignore_errors=True)


def _nearest_existing(path: Path) -> Path:
    """Return `path`, or its nearest parent that exists."""
    return path if path.exists() else _nearest_existing(path.parent)


def _remove(path: Path) -> None:
    """Remove a folder, or what lies where one of ours would."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _remove_empty(folder: Path, below: Path) -> None:
    """Remove a folder, and those that hold nothing but it, as long as they lie below `below`."""
    while folder != below and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent
