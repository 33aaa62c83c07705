"""What is done about a damaged newest checkpoint: the one before is offered by name, or taken."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from moewright.engine.checkpoint.commit import list_checkpoints
from moewright.engine.checkpoint.coordinator import Coordinator, run_on_all_ranks
from moewright.engine.checkpoint.index import OLDER_CHECKPOINT, CheckpointIndex, read_index
from moewright.engine.checkpoint.loader import verify_checkpoint
from moewright.spec.errors import BadInput, Reason

# The prefix of a damaged checkpoint that was put aside; nothing removes it.
_DAMAGED = ".damaged-"

T = TypeVar("T")


def offer_older(checkpoint: Path, read: Callable[[Path], T]) -> T:
    """Return what `read` makes of a checkpoint; a refusal of damage offers the one before by name.

    Raises:
        BadInput: as `read` does.
    """
    try:
        return read(checkpoint)
    except BadInput as error:
        older = [path for path in list_checkpoints(checkpoint.parent) if path < checkpoint]
        if not older:
            raise
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


def put_damaged_aside(directory: Path, comm: Coordinator) -> None:
    """Put checkpoints aside that are newer than the newest whole one; all ranks call this.

    They are renamed, and stay for whoever wants to look at them.

    Raises:
        BadInput: that of the newest, the same on every rank, where none is whole.
    """
    refusals: dict[Path, BadInput] = {}
    for checkpoint in reversed(list_checkpoints(directory)):
        try:
            verify_checkpoint(checkpoint, comm)
            break
        except BadInput as error:
            refusals[checkpoint] = error
    else:
        if refusals:
            raise next(iter(refusals.values()))
        return

    def rename_damaged() -> None:
        if comm.rank == 0:
            for damaged, refusal in refusals.items():
                _put_aside(damaged, refusal.reasons[0], checkpoint)

    run_on_all_ranks(comm, rename_damaged)


def _put_aside(damaged: Path, reason: Reason, newest: Path) -> None:
    aside = damaged.with_name(_DAMAGED + damaged.name)
    shutil.rmtree(aside, ignore_errors=True)  # of an earlier time
    damaged.rename(aside)
    with suppress(OSError):
        print(
            f"{reason.field}: {reason.rule}; put aside as {aside}: going on from {newest.name}",
            file=sys.stderr,
            flush=True,
        )
