"""Copies of the state in host memory, from which ranks go on when one of them has died.

Every few steps each rank copies its state to host memory and hands the copy to the next rank, so
that what a rank has lost lies with its neighbour, and the others go back to their own copy of the
same step. There are two generations of copies, since a rank may die while one is taken.

The sessions of a rank's process: when another rank is lost, it meets the others again. A session
begins when the ranks meet and ends when the worker does. Where another rank has died, the launcher
puts a new process into its place and calls all ranks together; the processes of the others stay,
with what they hold outside of the session.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from moewright.engine.checkpoint import Coordinator, LocalShard
from moewright.engine.comm import collectives
from moewright.engine.comm.collectives import Group, exchange_flat
from moewright.engine.run.worker import (
    RankContext,
    RankInfo,
    RankOutcome,
    Worker,
    has_lost_peer,
)
from moewright.rules.job import GENERATIONS

# How long a rank that has lost another one waits to be called; then it ends, and so do all.
_CALL_S = 5.0


def run_in_sessions(worker: Worker, context: RankContext) -> RankOutcome:
    """Run `worker`, and again each time that it has lost another rank and the ranks are called.

    What the worker has registered with `close_on_loss` is closed in between, and the process groups
    are left.

    Raises:
        Exception: what the worker raised, where that was its own fault, or nobody calls.
    """
    while True:
        with ExitStack() as on_loss:
            try:
                outcome = worker(replace(context, on_loss=on_loss))
            except Exception as error:
                if context.calls is None or not has_lost_peer(error):
                    # Nothing is closed: the process ends.
                    on_loss.pop_all()
                    raise
                loss = error
            else:
                on_loss.pop_all()
                return outcome
        context.note("has lost another rank", is_waiting=True)
        _release(loss)
        collectives.leave_world()
        gc.collect()  # models refer to themselves, and the engine turns the collector off
        info = _wait_for_call(context.calls)
        if info is None:
            raise loss
        context = replace(context, info=info)
        context.beat(0)


def _release(error: BaseException | None) -> None:
    """Let go of what the frames of an exception hold, and those of the ones that it came from."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _wait_for_call(calls: Connection) -> RankInfo | None:
    """Return the newest call; None where none comes in time."""
    info: RankInfo | None = None
    with suppress(EOFError, OSError):  # the launcher is gone
        if calls.poll(_CALL_S):
            info = calls.recv()
            while calls.poll(0):
                info = calls.recv()
    return info


_NONE = -1  # no step: steps count from 0


@dataclass(kw_only=True, slots=True)
class _Generation:
    """A copy of this rank's state and one of the rank before it, as bytes, with their steps."""

    own: torch.Tensor
    neighbour: torch.Tensor
    own_step: int = _NONE
    neighbour_step: int = _NONE


class PeerCopies:
    """The copies that this rank holds; they outlive the process groups.

    A step of a copy counts the updates that it has; `every` is 0 where none are made.
    """

    def __init__(self, *, rank: int, world_size: int, every: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._every = every if world_size > 1 else 0
        self._generations: list[_Generation] = []

    def is_due(self, step: int) -> bool:
        """Tell whether a copy is to be taken after this update."""
        return self._every > 0 and step % self._every == 0

    @property
    def is_active(self) -> bool:
        """Whether copies are taken at all."""
        return self._every > 0

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The memory of all copies, whose sizes do not change in a run."""
        return tuple(
            part
            for generation in self._generations
            for part in (generation.own, generation.neighbour)
        )

    def allocate(self, shards: Sequence[LocalShard], comm: Coordinator) -> None:
        """Take the memory for copies of `shards` and of the previous rank's; all ranks call it."""
        if not self._every:
            return
        own_nbytes = sum(shard.tensor.nbytes for shard in shards)
        sizes = comm.gather(own_nbytes)
        if not self._generations:
            neighbour_nbytes = sizes[(self._rank - 1) % self._world_size]
            self._generations = [
                _Generation(own=_allocate(own_nbytes), neighbour=_allocate(neighbour_nbytes))
                for _ in range(GENERATIONS)
            ]

    def take(self, step: int, shards: Sequence[LocalShard], world: Group) -> None:
        """Copy the state after update `step`, and hand the copy on; every rank calls this.

        The older generation is overwritten.
        """
        oldest = min(self._generations, key=lambda generation: generation.own_step)
        # Of no step until it is whole: a rank may die meanwhile.
        oldest.own_step = oldest.neighbour_step = _NONE
        for shard, part in _cut(oldest.own, shards):
            part.copy_(shard.tensor.detach())
        oldest.own_step = step
        exchange_flat(oldest.own, oldest.neighbour, world, distance=1)
        oldest.neighbour_step = step

    def recover(self, newest_saved: int, comm: Coordinator, world: Group) -> int | None:
        """Get this rank's copy of the newest step of which every rank's is left; return that step.

        None where there is none, or a checkpoint of rank 0's `newest_saved` is newer. A rank that
        has lost its own copy gets it from its neighbour. Every rank calls this.
        """
        if not self._every:
            return None
        own_steps = [generation.own_step for generation in self._generations]
        neighbour_steps = [generation.neighbour_step for generation in self._generations]
        views = comm.gather({"own": own_steps, "neighbour": neighbour_steps, "saved": newest_saved})
        step = find_common_step(views)
        if step < views[0]["saved"]:
            return None
        lacks = [step not in view["own"] for view in views]
        chosen = self._choose_generation(step)
        # The rank before gets its own state back, of which the copy lies here.
        gives = lacks[(self._rank - 1) % self._world_size]
        nothing = chosen.own[:0]
        exchange_flat(
            chosen.neighbour if gives else nothing,
            chosen.own if lacks[self._rank] else nothing,
            world,
            distance=-1,
        )
        for generation in self._generations:
            generation.own_step = generation.neighbour_step = _NONE  # of steps that are done again
        chosen.own_step = step
        return step

    def load(self, shards: Sequence[LocalShard]) -> None:
        """Fill `shards`, in whatever order, from this rank's newest copy."""
        newest = max(self._generations, key=lambda generation: generation.own_step)
        for shard, part in _cut(newest.own, shards):
            shard.tensor.detach().copy_(part)

    def _choose_generation(self, step: int) -> _Generation:
        """Return the generation of a step; where this rank has lost all, any."""
        for generation in self._generations:
            if step in (generation.own_step, generation.neighbour_step):
                return generation
        return self._generations[0]


def find_common_step(views: Sequence[Mapping[str, Any]]) -> int:
    """Return the newest step of which a copy of every rank's state is left; -1 where there is none.

    Each rank's view has the steps of its own copies, and those that it holds of the rank before.
    """
    left = [
        {*view["own"], *following["neighbour"]}
        for view, following in zip(views, (*views[1:], views[0]), strict=True)
    ]
    return max((_NONE, *set.intersection(*left)))


def _cut(
    flat: torch.Tensor, shards: Sequence[LocalShard]
) -> Iterator[tuple[LocalShard, torch.Tensor]]:
    """Yield each shard with its part of a copy.

    Wider dtypes come first, so that each part begins at a multiple of its elements' bytes, and no
    byte lies between two.
    """
    start = 0
    for shard in sorted(
        shards, key=lambda shard: (-shard.tensor.element_size(), shard.name, shard.box)
    ):
        stop = start + shard.tensor.nbytes
        yield shard, flat[start:stop].view(shard.tensor.dtype).view(shard.tensor.shape)
        start = stop


def _allocate(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)
