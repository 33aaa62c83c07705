"""The saves of one job: with training waiting, or from a copy of the state while it goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from moewright.engine.checkpoint.commit import (
    SaveRequest,
    checkpoint_path,
    commit_save,
    prepare_save,
    select_assigned,
    validate_extra,
)
from moewright.engine.checkpoint.coordinator import Coordinator, run_on_all_ranks
from moewright.engine.checkpoint.index import TensorEntry
from moewright.engine.checkpoint.local_shard import LocalShard
from moewright.engine.checkpoint.planning import describe_shards, plan_save
from moewright.spec.workload import CheckpointSpec, SaveMode


def save_checkpoint(
    directory: Path,
    *,
    step: int,
    shards: Sequence[LocalShard],
    extra: Mapping[str, Any],
    keep: int,
    comm: Coordinator,
) -> Path:
    """Write and return one checkpoint, `directory`/step-NNNNNNNN, as a Saver does; all ranks wait
    for it."""
    spec = CheckpointSpec(keep=keep)
    return CheckpointSaver(
        directory, spec=spec, extra=extra, comm=comm, build_background_comm=lambda: comm
    ).save(step, shards)


class CheckpointSaver:
    """Saves into `directory`, then purges older checkpoints; every rank makes one and calls it
    alike.

    Either a whole checkpoint is committed, on disk and checksummed, or nothing changes. A box that
    several ranks hold is written once. A step that is committed already, with an equal `extra`, is
    left as it is. Every rank raises the same BadInput for a full disk or an unwritable directory,
    ValueError for pieces that do not tile their tensors.

    With SaveMode.ASYNC, `save` copies to host memory what this rank writes and returns; a thread
    writes and commits. There is one copy and one thread: a save waits for the one before it. What
    goes wrong in the thread is raised, as it was, by the next call of `check`, `save` or `finish`.
    The ranks agree in the thread over `aside`, so it needs a process group of its own: a group
    carries the collectives of one thread, in order.
    """

    def __init__(
        self,
        directory: Path,
        *,
        spec: CheckpointSpec,
        extra: Mapping[str, Any],
        comm: Coordinator,
        build_background_comm: Callable[[], Coordinator],
    ) -> None:
        self._directory, self._spec, self._extra, self._comm = directory, spec, extra, comm
        self._background_comm = build_background_comm() if spec.mode is SaveMode.ASYNC else comm
        self._tensors: tuple[TensorEntry, ...] | None = None
        self._copies: tuple[torch.Tensor, ...] = ()
        self._thread: Thread | None = None
        self._failures: list[Exception] = []

    def save(self, step: int, shards: Sequence[LocalShard]) -> Path:
        """Save `pieces` as they are now: the path. They are of the same boxes in every call,
        planned once."""
        self.wait()
        validate_extra(step, self._extra)
        if self._tensors is None:
            self._tensors = plan_save(run_on_all_ranks(self._comm, lambda: describe_shards(shards)))
        order = SaveRequest(
            path=checkpoint_path(self._directory, step),
            step=step,
            extra=self._extra,
            tensors=self._tensors,
            pieces=select_assigned(shards, self._tensors, self._comm.rank),
            retention=self._spec,
        )
        if not prepare_save(order, self._comm):
            return order.path
        if self._spec.mode is SaveMode.SYNC:
            commit_save(order, self._comm)
            return order.path
        order = replace(order, pieces=self._copy_to_host(order.pieces))
        self._thread = Thread(target=self._complete, args=(order,), name="checkpoint", daemon=True)
        self._thread.start()
        return order.path

    def raise_failure(self) -> None:
        """Raise what a save under way has failed with by now."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until the save under way is committed. Raises what it failed with."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failures:
            raise self._failures.pop()

    def _complete(self, order: SaveRequest) -> None:
        try:
            commit_save(order, self._background_comm)
        except Exception as error:  # any, to be raised where it is seen
            self._failures.append(error)

    def _copy_to_host(self, pieces: Sequence[LocalShard]) -> tuple[LocalShard, ...]:
        """The pieces with their data in host memory that stays allocated, page-locked where it
        comes from a GPU."""
        if not self._copies:
            self._copies = tuple(_allocate_host_copy(piece.tensor) for piece in pieces)
        for copy, piece in zip(self._copies, pieces, strict=True):
            copy.copy_(piece.tensor.detach(), non_blocking=True)
        if any(piece.tensor.is_cuda for piece in pieces):
            torch.cuda.current_stream().synchronize()
        return tuple(
            replace(piece, tensor=copy) for piece, copy in zip(pieces, self._copies, strict=True)
        )


def _allocate_host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
