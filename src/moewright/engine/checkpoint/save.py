"""Save: every rank writes one file into a hidden directory; one rename commits them all."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from moewright.engine.checkpoint.coordinator import Coordinator, agree
from moewright.engine.checkpoint.files import flush_directory, require_space, write_fault, write_payload, write_text
from moewright.engine.checkpoint.index import (
    INDEX,
    FileEntry,
    Index,
    TensorEntry,
    index_text,
    payload_name,
    read_index,
)
from moewright.engine.checkpoint.piece import DTYPES, Piece
from moewright.engine.checkpoint.planning import plan_save, specs
from moewright.spec.errors import BadInput, Reason

_COMMITTED = re.compile(r"step-(\d{8})", re.ASCII)
_SAVING, _PURGED = ".saving-", ".purged-"  # names of directories that are not, or no longer, checkpoints


def save(
    directory: Path, *, step: int, pieces: Sequence[Piece], extra: Mapping[str, Any], keep: int, comm: Coordinator
) -> Path:
    """Write and return checkpoint `directory`/step-NNNNNNNN, then purge all but the newest `keep`. All ranks call.

    Either the whole checkpoint is committed, on disk and checksummed, or nothing changes. A box that several ranks
    hold is written once. A step that is committed already, with an equal `extra`, is left as it is. Raises BadInput
    on every rank for a full disk or an unwritable directory, ValueError for pieces that do not tile their tensors.
    """
    if not 0 <= step < 10**8 or keep < 1:
        raise ValueError(f"step {step} is not of 8 digits, or keep {keep} is below 1")
    index_text(Index(step=step, extra=extra, files=(), tensors=()))  # a bad `extra` must fail on every rank
    final = directory / f"step-{step:08d}"
    working = directory / f"{_SAVING}{final.name}"
    tensors = plan_save(agree(comm, lambda: specs(pieces)))
    need_bytes = sum(DTYPES[tensor.dtype].itemsize * prod(tensor.shape) for tensor in tensors)
    leads = comm.rank == 0
    if agree(comm, lambda: leads and _prepare(working, final, extra, need_bytes))[0] == "committed":
        return final
    try:
        entries = agree(comm, partial(_write, working, pieces, tensors, comm.rank, need_bytes))
        files = tuple(FileEntry(**entry) for entry in entries if entry is not None)
        index = Index(step=step, extra=extra, files=files, tensors=tensors)
        agree(comm, lambda: leads and _commit(working, final, index, need_bytes))
    except BadInput:
        if leads:
            shutil.rmtree(working, ignore_errors=True)
        raise
    if leads:
        _purge(directory, keep, final)
    return final


def committed(directory: Path) -> tuple[Path, ...]:
    """The committed checkpoints below `directory`, oldest first. Half-written and stray entries are passed over."""
    if not directory.is_dir():
        return ()
    found = [path for path in directory.iterdir() if _COMMITTED.fullmatch(path.name) and (path / INDEX).is_file()]
    return tuple(sorted(found))


def latest(directory: Path) -> Path | None:
    """The newest committed checkpoint, or None. Damage inside it is not skipped in silence: `load` refuses it."""
    found = committed(directory)
    return found[-1] if found else None


def resume_from(directory: Path) -> tuple[Path | None, tuple[Path, ...]]:
    """The newest committed checkpoint, and what lies there under a newer step's name without being one.

    (None, ()) for a folder that has never held one. Raises BadInput when something else is offered as a checkpoint:
    starting anew beside it would pass over what somebody meant to continue.
    """
    if directory.exists() and not directory.is_dir():
        raise BadInput(Reason(field=str(directory), rule="is a file, not a directory"))
    entries = [path for path in directory.iterdir() if not path.name.startswith(".")] if directory.exists() else []
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
        raise BadInput(Reason(field=str(newest), rule=rule, nearest=str(newest.with_name(f"step-{step:08d}"))))
    return newest, tuple(path for path in named if path > newest)


def _prepare(working: Path, final: Path, extra: Mapping[str, Any], need_bytes: int) -> str:
    """Make the working directory; "committed" when the step is there already."""
    directory = final.parent
    if (final / INDEX).is_file():
        if read_index(final).extra == extra:
            return "committed"
        raise BadInput(Reason(field=str(final), rule="is the same step of another job", nearest="another directory"))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for stale in directory.iterdir():
            if stale.name.startswith((_SAVING, _PURGED)):
                shutil.rmtree(stale)
        require_space(directory, need_bytes)
        working.mkdir()
    except FileExistsError as error:
        raise BadInput(Reason(field=str(directory), rule="is a file, not a directory")) from error
    except OSError as error:
        raise write_fault(_existing(directory), error, need_bytes) from error
    return "writing"


def _write(
    working: Path, pieces: Sequence[Piece], tensors: Sequence[TensorEntry], rank: int, need_bytes: int
) -> dict[str, Any] | None:
    """Write what the plan gives to this rank; its file entry as JSON, None when that is nothing."""
    name = payload_name(rank)
    mine = {(tensor.name, shard.box) for tensor in tensors for shard in tensor.shards if shard.file == name}
    chosen = [piece for piece in pieces if (piece.name, piece.box) in mine]
    if not chosen:
        return None
    try:
        entry = write_payload(working / name, chosen)
    except OSError as error:
        raise write_fault(working.parent, error, need_bytes) from error
    return {"name": entry.name, "nbytes": entry.nbytes, "sha256": entry.sha256}


def _commit(working: Path, final: Path, index: Index, need_bytes: int) -> str:
    try:
        write_text(working / INDEX, index_text(index))
        flush_directory(working)
        if final.is_dir():  # without an index: half-written by something else
            shutil.rmtree(final)
        working.rename(final)
        flush_directory(final.parent)
    except OSError as error:
        raise write_fault(final.parent, error, need_bytes) from error
    return final.name


def _purge(directory: Path, keep: int, newest: Path) -> None:
    """Drop all but the newest `keep` checkpoints, never the one just written. A rename makes each vanish at once."""
    older = [path for path in committed(directory) if path != newest]
    for path in older[: max(0, len(older) - (keep - 1))]:
        gone = path.with_name(_PURGED + path.name)
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)  # what is left is removed by the next save


def _existing(path: Path) -> Path:
    """`path`, or its nearest parent that exists."""
    return path if path.exists() else _existing(path.parent)
