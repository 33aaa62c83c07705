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

from moewright.engine.checkpoint.coordinator import Coordinator, agree
from moewright.engine.checkpoint.files import (
    Row,
    flush_directory,
    require_space,
    write_fault,
    write_payload,
    write_tensors,
    write_text,
)
from moewright.engine.checkpoint.geometry import tiling_fault
from moewright.engine.checkpoint.index import (
    INDEX,
    FileEntry,
    Index,
    Shard,
    TensorEntry,
    box_key,
    index_text,
    payload_name,
    read_index,
)
from moewright.engine.checkpoint.piece import DTYPES, Piece
from moewright.spec.errors import BadInput, Reason
from moewright.spec.workload import CheckpointSpec

_COMMITTED = re.compile(r"step-(\d{8})", re.ASCII)
_SAVING, _PURGED = (
    ".saving-",
    ".purged-",
)  # names of directories that are not, or no longer, checkpoints


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A checkpoint to be written: `pieces` are those of this rank that the plan gives to its
    file."""

    final: Path
    step: int
    extra: Mapping[str, Any]
    tensors: tuple[TensorEntry, ...]
    pieces: tuple[Piece, ...]
    keep: CheckpointSpec

    @property
    def working(self) -> Path:
        return self.final.with_name(_SAVING + self.final.name)

    @property
    def need_bytes(self) -> int:
        return sum(DTYPES[tensor.dtype].itemsize * prod(tensor.shape) for tensor in self.tensors)


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def check_extra(step: int, extra: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError, on every rank, for what no index can hold."""
    if not 0 <= step < 10**8:
        raise ValueError(f"step {step} is not of 8 digits")
    index_text(Index(step=step, extra=extra, files=(), tensors=()))


def assigned(
    pieces: Sequence[Piece], tensors: Sequence[TensorEntry], rank: int
) -> tuple[Piece, ...]:
    """The pieces that the plan gives to this rank's file."""
    name = payload_name(rank)
    mine = {
        (tensor.name, shard.box)
        for tensor in tensors
        for shard in tensor.shards
        if shard.file == name
    }
    return tuple(piece for piece in pieces if (piece.name, piece.box) in mine)


def prepare(order: Order, comm: Coordinator) -> bool:
    """Make the working directory; False when the step is committed already. The pieces may still
    change.

    Raises BadInput on every rank for an unwritable directory, a full disk, or the same step of
    another job.
    """
    return bool(agree(comm, lambda: comm.rank == 0 and _prepare(order))[0])


def complete(order: Order, comm: Coordinator) -> None:
    """Write the pieces as they are now, commit, and purge older checkpoints.

    Either the whole checkpoint is committed, on disk and checksummed, or nothing changes: then
    every rank raises the same BadInput.
    """
    leads = comm.rank == 0
    try:
        entries = agree(comm, partial(_write, order, comm.rank))
        files = tuple(FileEntry(**entry) for entry in entries if entry is not None)
        index = Index(step=order.step, extra=order.extra, files=files, tensors=order.tensors)
        agree(comm, partial(_commit, order, index) if leads else lambda: None)
    except BadInput:
        if leads:
            shutil.rmtree(order.working, ignore_errors=True)
        raise
    if leads:
        _purge(order)


def write_alone(order: Order, made: Callable[[TensorEntry, Shard], torch.Tensor]) -> Path:
    """One process writes all files of a checkpoint, each box made when its turn comes; all of it,
    or nothing."""
    by_file: dict[str, list[tuple[TensorEntry, Shard]]] = {}
    for tensor in order.tensors:
        if fault := tiling_fault(tensor.shape, [shard.box for shard in tensor.shards]):
            raise ValueError(f"{tensor.name}: {fault}")
        for shard in tensor.shards:
            by_file.setdefault(shard.file, []).append((tensor, shard))
    existing = _existing(order.final.parent)
    try:
        if not _prepare(order):
            return order.final
        files = [
            write_tensors(
                order.working / file,
                [
                    Row(name=box_key(t.name, s.box[0]), dtype=t.dtype, shape=s.box[1])
                    for t, s in held
                ],
                (made(tensor, shard) for tensor, shard in held),
            )
            for file, held in by_file.items()
        ]
        _commit(
            order,
            Index(step=order.step, extra=order.extra, files=tuple(files), tensors=order.tensors),
        )
    except OSError as error:
        raise write_fault(order.final.parent, error, order.need_bytes) from error
    finally:
        shutil.rmtree(order.working, ignore_errors=True)
        _remove_empty(order.final.parent, below=existing)
    return order.final


def committed(directory: Path) -> tuple[Path, ...]:
    """The committed checkpoints below `directory`, oldest first. Half-written and stray entries are
    passed over."""
    if not directory.is_dir():
        return ()
    found = [
        path
        for path in directory.iterdir()
        if _COMMITTED.fullmatch(path.name) and (path / INDEX).is_file()
    ]
    return tuple(sorted(found))


def latest(directory: Path) -> Path | None:
    """The newest committed checkpoint, or None. Damage inside it is not skipped in silence: `load`
    refuses it."""
    found = committed(directory)
    return found[-1] if found else None


def checkpoint_at(path: Path) -> Path:
    """The checkpoint that `path` is, or the newest in it or, where it is a run's folder, in its
    `checkpoints`.

    Raises BadInput when there is none.
    """
    if (path / INDEX).is_file():
        return path
    for folder in (path, path / "checkpoints"):
        if (newest := latest(folder)) is not None:
            return newest
    what = "holds no checkpoint of moewright" if path.is_dir() else "no such folder"
    raise BadInput(Reason(field=str(path), rule=what, nearest="a folder with step-*"))


def resume_from(directory: Path) -> tuple[Path | None, tuple[Path, ...]]:
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
    newest = latest(directory)
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


def _prepare(order: Order) -> bool:
    final, directory = order.final, order.final.parent
    if (final / INDEX).is_file():
        if read_index(final).extra == order.extra:
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
        require_space(directory, order.need_bytes)
        order.working.mkdir()
    except FileExistsError as error:
        raise BadInput(Reason(field=str(directory), rule="is a file, not a directory")) from error
    except OSError as error:
        raise write_fault(_existing(directory), error, order.need_bytes) from error
    return True


def _write(order: Order, rank: int) -> dict[str, Any] | None:
    """Write this rank's file; its entry as JSON, None when the plan gives nothing to it."""
    if not order.pieces:
        return None
    try:
        entry = write_payload(order.working / payload_name(rank), order.pieces)
    except OSError as error:
        raise write_fault(order.final.parent, error, order.need_bytes) from error
    return {"name": entry.name, "nbytes": entry.nbytes, "sha256": entry.sha256}


def _commit(order: Order, index: Index) -> None:
    final, working = order.final, order.working
    try:
        write_text(working / INDEX, index_text(index))
        flush_directory(working)
        if final.is_dir():  # without an index: half-written by something else
            shutil.rmtree(final)
        working.rename(final)
        flush_directory(final.parent)
    except OSError as error:
        raise write_fault(final.parent, error, order.need_bytes) from error


def _purge(order: Order) -> None:
    """Drop all but the newest checkpoints and those to be kept for good, never the one just
    written. A rename makes each vanish at once.
    """
    older, keep = (
        [path for path in committed(order.final.parent) if path != order.final],
        order.keep,
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
