"""Save: every rank writes one file into a hidden directory; one rename commits them all."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
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
from moewright.engine.checkpoint.geometry import find_tiling_fault
from moewright.engine.checkpoint.index import (
    INDEX_FILE,
    CheckpointIndex,
    FileEntry,
    StoredShard,
    TensorEntry,
    box_key,
    payload_file_name,
    read_index,
    serialize_index,
)
from moewright.engine.checkpoint.local_shard import SAFETENSORS_DTYPES, LocalShard
from moewright.spec.errors import BadInput, Reason
from moewright.spec.workload import CheckpointSpec

_COMMITTED = re.compile(r"step-(\d{8})", re.ASCII)
_SAVING, _PURGED = (
    ".saving-",
    ".purged-",
)  # names of directories that are not, or no longer, checkpoints


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """A checkpoint to be written: `pieces` are those of this rank that the plan gives to its
    file."""

    path: Path
    step: int
    extra: Mapping[str, Any]
    tensors: tuple[TensorEntry, ...]
    pieces: tuple[LocalShard, ...]
    retention: CheckpointSpec

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
    return directory / f"step-{step:08d}"


def validate_extra(step: int, extra: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError, on every rank, for what no index can hold."""
    if not 0 <= step < 10**8:
        raise ValueError(f"step {step} is not of 8 digits")
    serialize_index(CheckpointIndex(step=step, extra=extra, files=(), tensors=()))


def select_assigned(
    pieces: Sequence[LocalShard], tensors: Sequence[TensorEntry], rank: int
) -> tuple[LocalShard, ...]:
    """The pieces that the plan gives to this rank's file."""
    name = payload_file_name(rank)
    mine = {
        (tensor.name, shard.box)
        for tensor in tensors
        for shard in tensor.shards
        if shard.file == name
    }
    return tuple(piece for piece in pieces if (piece.name, piece.box) in mine)


def prepare_save(request: SaveRequest, comm: Coordinator) -> bool:
    """Make the working directory; False when the step is committed already. The pieces may still
    change.

    Raises BadInput on every rank for an unwritable directory, a full disk, or the same step of
    another job.
    """
    return bool(run_on_all_ranks(comm, lambda: comm.rank == 0 and _prepare(request))[0])


def commit_save(request: SaveRequest, comm: Coordinator) -> None:
    """Write the pieces as they are now, commit, and purge older checkpoints.

    Either the whole checkpoint is committed, on disk and checksummed, or nothing changes: then
    every rank raises the same BadInput.
    """
    leads = comm.rank == 0
    try:
        entries = run_on_all_ranks(comm, partial(_write, request, comm.rank))
        files = tuple(FileEntry(**entry) for entry in entries if entry is not None)
        index = CheckpointIndex(
            step=request.step, extra=request.extra, files=files, tensors=request.tensors
        )
        run_on_all_ranks(comm, partial(_commit, request, index) if leads else lambda: None)
    except BadInput:
        if leads:
            shutil.rmtree(request.working_path, ignore_errors=True)
        raise
    if leads:
        _purge(request)


def write_single_process(
    request: SaveRequest, read_box: Callable[[TensorEntry, StoredShard], torch.Tensor]
) -> Path:
    """One process writes all files of a checkpoint, each box made when its turn comes; all of it,
    or nothing."""
    by_file: dict[str, list[tuple[TensorEntry, StoredShard]]] = {}
    for tensor in request.tensors:
        if fault := find_tiling_fault(tensor.shape, [shard.box for shard in tensor.shards]):
            raise ValueError(f"{tensor.name}: {fault}")
        for shard in tensor.shards:
            by_file.setdefault(shard.file, []).append((tensor, shard))
    existing = _existing(request.path.parent)
    try:
        if not _prepare(request):
            return request.path
        files = [
            write_tensors(
                request.working_path / file,
                [
                    TensorHeader(name=box_key(t.name, s.box[0]), dtype=t.dtype, shape=s.box[1])
                    for t, s in held
                ],
                (read_box(tensor, shard) for tensor, shard in held),
            )
            for file, held in by_file.items()
        ]
        _commit(
            request,
            CheckpointIndex(
                step=request.step, extra=request.extra, files=tuple(files), tensors=request.tensors
            ),
        )
    except OSError as error:
        raise write_error(request.path.parent, error, request.required_bytes) from error
    finally:
        shutil.rmtree(request.working_path, ignore_errors=True)
        _remove_empty(request.path.parent, below=existing)
    return request.path


def list_checkpoints(directory: Path) -> tuple[Path, ...]:
    """The committed checkpoints below `directory`, oldest first. Half-written and stray entries are
    passed over."""
    if not directory.is_dir():
        return ()
    found = [
        path
        for path in directory.iterdir()
        if _COMMITTED.fullmatch(path.name) and (path / INDEX_FILE).is_file()
    ]
    return tuple(sorted(found))


def find_latest(directory: Path) -> Path | None:
    """The newest committed checkpoint, or None. Damage inside it is not skipped in silence: `load`
    refuses it."""
    found = list_checkpoints(directory)
    return found[-1] if found else None


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` is, or the newest in it or, where it is a run's folder, in its
    `checkpoints`.

    Raises BadInput when there is none.
    """
    if (path / INDEX_FILE).is_file():
        return path
    for folder in (path, path / "checkpoints"):
        if (newest := find_latest(folder)) is not None:
            return newest
    what = "holds no checkpoint of moewright" if path.is_dir() else "no such folder"
    raise BadInput(Reason(field=str(path), rule=what, nearest="a folder with step-*"))


def find_resume_point(directory: Path) -> tuple[Path | None, tuple[Path, ...]]:
    """The newest committed checkpoint, and what lies there under a newer step's name without being
    one.

    (None, ()) for a folder that has never held one. Raises BadInput when something else is offered
    as a checkpoint: starting anew beside it would pass over what somebody meant to continue.
    """
    if directory.exists() and not directory.is_dir():
        raise BadInput(Reason(field=str(directory), rule="is a file, not a directory"))
    entries = (
        [path for path in directory.iterdir() if not path.name.startswith(".")]
        if directory.exists()
        else []
    )
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
    if f"step-{step:08d}" != newest.name:
        rule = f"holds step {step}"
        raise BadInput(
            Reason(field=str(newest), rule=rule, nearest=str(newest.with_name(f"step-{step:08d}")))
        )
    return newest, tuple(path for path in named if path > newest)


def _prepare(request: SaveRequest) -> bool:
    final, directory = request.path, request.path.parent
    if (final / INDEX_FILE).is_file():
        if read_index(final).extra == request.extra:
            return False
        raise BadInput(
            Reason(
                field=str(final),
                rule="is the same step of another job",
                nearest="another directory",
            )
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for stale in directory.iterdir():
            if stale.name.startswith((_SAVING, _PURGED)):
                shutil.rmtree(stale)
        require_space(directory, request.required_bytes)
        request.working_path.mkdir()
    except FileExistsError as error:
        raise BadInput(Reason(field=str(directory), rule="is a file, not a directory")) from error
    except OSError as error:
        raise write_error(_existing(directory), error, request.required_bytes) from error
    return True


def _write(request: SaveRequest, rank: int) -> dict[str, Any] | None:
    """Write this rank's file; its entry as JSON, None when the plan gives nothing to it."""
    if not request.pieces:
        return None
    try:
        entry = write_payload(request.working_path / payload_file_name(rank), request.pieces)
    except OSError as error:
        raise write_error(request.path.parent, error, request.required_bytes) from error
    return {"name": entry.name, "nbytes": entry.nbytes, "sha256": entry.sha256}


def _commit(request: SaveRequest, index: CheckpointIndex) -> None:
    final, working = request.path, request.working_path
    try:
        write_text(working / INDEX_FILE, serialize_index(index))
        fsync_directory(working)
        if final.is_dir():  # without an index: half-written by something else
            shutil.rmtree(final)
        working.rename(final)
        fsync_directory(final.parent)
    except OSError as error:
        raise write_error(final.parent, error, request.required_bytes) from error


def _purge(request: SaveRequest) -> None:
    """Drop all but the newest checkpoints and those to be kept for good, never the one just
    written. A rename makes each vanish at once.
    """
    older, keep = (
        [path for path in list_checkpoints(request.path.parent) if path != request.path],
        request.retention,
    )
    for path in older[: max(0, len(older) - (keep.keep - 1))]:
        if (
            keep.keep_every_steps
            and int(path.name.removeprefix("step-")) % keep.keep_every_steps == 0
        ):
            continue
        gone = path.with_name(_PURGED + path.name)
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)  # what is left is removed by the next save


def _existing(path: Path) -> Path:
    """`path`, or its nearest parent that exists."""
    return path if path.exists() else _existing(path.parent)


def _remove_empty(folder: Path, below: Path) -> None:
    """Remove a folder, and those that hold nothing but it, down from one that stays."""
    while folder != below and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent
