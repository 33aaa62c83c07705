"""What is done about a damaged newest checkpoint: the one before is offered by name, or taken."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from moewright.engine.checkpoint.commit import list_checkpoints
from moewright.engine.checkpoint.coordinator import Coordinator, run_on_all_ranks
from moewright.engine.checkpoint.index import OLDER_CHECKPOINT, CheckpointIndex, read_index
from moewright.engine.checkpoint.loader import verify_checkpoint
from moewright.spec.errors import BadInput

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
