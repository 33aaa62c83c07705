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
from moewright.engine.checkpoint.coordinator import (
    Coordinator,
    run_on_all_ranks,
    yield_to_training,
)
from moewright.engine.checkpoint.copier import RemoteCopier
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
    """Save one checkpoint as a CheckpointSaver does, while all ranks wait; return its path."""
    saver = CheckpointSaver(
        directory,
        spec=CheckpointSpec(keep=keep),
        extra=extra,
        comm=comm,
        build_background_comm=lambda: comm,
    )
    return saver.save(step, shards)


class CheckpointSaver:
    """A saver of checkpoints into `directory`; every rank makes one and calls it alike.

    Either a whole checkpoint is committed, on disk and checksummed, or nothing changes; then older
    checkpoints are purged. A box that several ranks hold is written once. A step that is committed
    already, with an equal `extra`, is left as it is. Every rank raises the same BadInput for a full
    disk or an unwritable directory, and ValueError for shards that do not tile their tensors.

    With SaveMode.ASYNC, `save` copies to host memory (`host_copy`) what this rank writes and
    returns; a thread writes and commits. There is one copy and one thread: a save waits for the one
    before it. What goes wrong in the thread is raised, as it was, by the next call of
    `raise_failure`, `save` or `wait`. The thread has a coordinator and a process group of its own,
    because a group carries the collectives of one thread, in order.
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
        self._directory = directory
        self._spec = spec
        self._extra = extra
        self._comm = comm
        self._background_comm = comm
        # Here, because all ranks have to create a process group at the same time.
        if spec.mode is SaveMode.ASYNC:
            self._background_comm = build_background_comm()
        self._tensors: tuple[TensorEntry, ...] | None = None
        self._host_copy = torch.empty(0, dtype=torch.uint8)
        self._copier: RemoteCopier | None = None
        if spec.copy_to and comm.rank == 0:
            self._copier = RemoteCopier(directory, spec, comm.note)
        self._thread: Thread | None = None
        self._failures: list[Exception] = []

    def save(
        self, step: int, shards: Sequence[LocalShard], verify: Callable[[], None] = lambda: None
    ) -> Path:
        """Save `shards` as they are now, and return the checkpoint's path.

        They have the same boxes in every call until `plan_anew`, so the save is planned once.
        `verify` is called between the reading of them and the commit; what it raises keeps them
        from being committed.
        """
        self.wait()
        validate_extra(step, self._extra)
        assigned = self._assign(shards)
        assert self._tensors is not None  # planned
        request = SaveRequest(
            path=checkpoint_path(self._directory, step),
            step=step,
            extra=self._extra,
            tensors=self._tensors,
            shards=assigned,
            retention=self._spec,
        )
        # Before the copy: a full disk is refused by this call, and not by the thread later.
        if not prepare_save(request, self._comm):
            return request.path
        if self._spec.mode is SaveMode.SYNC:
            self._commit_and_copy(replace(request, verify=verify), self._comm)
            return request.path
        request = replace(request, shards=self._copy_to_host(request.shards))
        # After the copy, which is what will be written, and before training changes anything.
        verify()
        self._thread = Thread(target=self._commit, args=(request,), name="checkpoint", daemon=True)
        self._thread.start()
        return request.path

    def plan_anew(self, extra: Mapping[str, Any]) -> None:
        """Say that the boxes of the shards are others from now on, with another `extra`."""
        self.wait()
        self._extra = extra
        self._tensors = None

    def allocate(self, shards: Sequence[LocalShard]) -> None:
        """Take the memory for the copy of what this rank writes; every rank calls this.

        A run that has it at its first step has it at each save.
        """
        if self._spec.mode is SaveMode.ASYNC:
            self._fit_host_copy(self._assign(shards))

    @property
    def host_copy(self) -> torch.Tensor:
        """The memory for the copy, as bytes, page-locked beside a GPU; empty in SaveMode.SYNC."""
        return self._host_copy

    def _assign(self, shards: Sequence[LocalShard]) -> tuple[LocalShard, ...]:
        """Return what this rank writes of its shards; the first call of all ranks plans that."""
        if self._tensors is None:
            self._tensors = plan_save(run_on_all_ranks(self._comm, lambda: describe_shards(shards)))
        return select_assigned(shards, self._tensors, self._comm.rank)

    def raise_failure(self) -> None:
        """Raise what a save under way has failed with by now."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until the save under way is committed, and raise what it failed with."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failures:
            raise self._failures.pop()

    def abandon(self) -> None:
        """Let the save under way end as it will, and leave the copy under way to itself.

        It waits for the thread, which writes into the folder that the next save makes anew.
        """
        if self._thread is not None:
            self._thread.join()
        if self._copier is not None:
            self._copier.leave()

    def close(self) -> None:
        """Wait until the save under way is committed, and copied where copies are made."""
        self.wait()
        if self._copier is not None:
            self._copier.close()

    @property
    def copied_step(self) -> int:
        """The step of the newest copy elsewhere, 0 before the first; -1 where none are made."""
        return -1 if self._copier is None else self._copier.copied_step

    def take_copy_failures(self) -> list[str]:
        """Return the outages of copies that have begun since the last call."""
        return [] if self._copier is None else self._copier.take_failures()

    def _commit_and_copy(self, request: SaveRequest, comm: Coordinator) -> None:
        commit_save(request, comm)
        if self._copier is not None:
            self._copier.submit(request.path)

    def _commit(self, request: SaveRequest) -> None:
        yield_to_training()
        try:
            self._commit_and_copy(request, self._background_comm)
        except Exception as error:  # of any kind: `wait` raises it in the main thread
            self._failures.append(error)

    def _fit_host_copy(self, shards: Sequence[LocalShard]) -> None:
        nbytes = sum(shard.tensor.nbytes for shard in shards)
        if self._host_copy.numel() != nbytes:
            # Only from page-locked memory does a copy of a GPU run beside the host.
            is_pinned = any(shard.tensor.is_cuda for shard in shards)
            self._host_copy = torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_pinned)

    def _copy_to_host(self, shards: Sequence[LocalShard]) -> tuple[LocalShard, ...]:
        """Copy the shards to host memory that stays allocated."""
        self._fit_host_copy(shards)
        # The widest first, so that each lies at a multiple of its width.
        shards = sorted(shards, key=lambda shard: -shard.tensor.itemsize)
        sizes = [shard.tensor.nbytes for shard in shards]
        copies = [
            part.view(shard.tensor.dtype).view(shard.tensor.shape)
            for part, shard in zip(self._host_copy.split(sizes), shards, strict=True)
        ]
        for copy, shard in zip(copies, shards, strict=True):
            copy.copy_(shard.tensor.detach(), non_blocking=True)
        # Training writes the weights next, so the copies must be over.
        if any(shard.tensor.is_cuda for shard in shards):
            torch.cuda.current_stream().synchronize()
        return tuple(
            replace(shard, tensor=copy) for shard, copy in zip(shards, copies, strict=True)
        )
