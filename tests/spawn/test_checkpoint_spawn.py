"""Checkpoints over real processes and gloo: resharding between world sizes, and kills in the middle of a save."""

import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from moewright.engine import collectives
from moewright.engine.checkpoint import Coordinator, alone, committed, latest, load, save
from moewright.engine.launch import launch
from moewright.engine.rank import Exit, Outcome, RankContext
from sharded import bits, blank, full_state, pieces_of

pytestmark = pytest.mark.spawn


def meet(context: RankContext) -> Coordinator:
    collectives.start(
        rank=context.rank,
        world_size=context.world,
        store=context.store(),
        backend="gloo",
        timeout_s=context.timeouts.collective_s,
    )
    return Coordinator(rank=context.rank, world=context.world, gather=collectives.gather_json)


def save_worker(context: RankContext, *, directory: Path, layout: str, step: int, killed: int = -1) -> Outcome:
    """Save one step; rank `killed` dies when its file is written but not yet on disk."""
    comm = meet(context)
    pieces = pieces_of(full_state(step), layout, comm.rank, comm.world)
    if comm.rank == killed:
        os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)  # this forked process only
    save(directory, step=step, pieces=pieces, extra={"step": step}, keep=1, comm=comm)
    collectives.stop()
    return Outcome.DONE


def load_worker(context: RankContext, *, directory: Path, layout: str, step: int) -> Outcome:
    comm = meet(context)
    truth = pieces_of(full_state(step), layout, comm.rank, comm.world)
    wanted = blank(truth)
    checkpoint = latest(directory)
    assert checkpoint is not None
    assert load(checkpoint, pieces=wanted, comm=comm) == {"step": step}
    assert bits(wanted) == bits(truth)
    collectives.stop()
    return Outcome.DONE


@pytest.mark.parametrize(
    ("source", "before", "target", "after"),
    [("rows", 2, "columns", 4), ("flat", 4, "rows", 2), ("replicated", 2, "flat", 4), ("columns", 4, "replicated", 1)],
)
def test_state_moves_between_world_sizes(tmp_path: Path, source: str, before: int, target: str, after: int) -> None:
    directory = tmp_path / "checkpoints"
    saver = partial(save_worker, directory=directory, layout=source, step=7)
    assert launch(saver, nproc=before, run_dir=tmp_path) == Exit.DONE
    loader = partial(load_worker, directory=directory, layout=target, step=7)
    assert launch(loader, nproc=after, run_dir=tmp_path) == Exit.DONE


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_killed_in_its_file_commits_nothing(
    tmp_path: Path, killed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "checkpoints"
    saver = partial(save_worker, directory=directory, layout="rows")
    assert launch(partial(saver, step=1), nproc=2, run_dir=tmp_path) == Exit.DONE
    assert launch(partial(saver, step=2, killed=killed), nproc=2, run_dir=tmp_path) == Exit.RANK_FAILED
    assert f"rank {killed} was killed by SIGKILL" in capfd.readouterr().err
    assert [path.name for path in committed(directory)] == ["step-00000001"]
    assert (directory / ".saving-step-00000002").exists()
    assert launch(partial(saver, step=2), nproc=2, run_dir=tmp_path) == Exit.DONE
    assert [path.name for path in directory.iterdir()] == ["step-00000002"]


def test_kills_at_random_times_leave_the_last_good_checkpoint(tmp_path: Path) -> None:
    """Steps are saved without a pause and the process is killed, 25 times; the latest loads and never goes back."""
    rng = random.Random(0)
    reached = 0
    torn = 0
    for _ in range(25):
        child = os.fork()
        if child == 0:
            try:
                for step in range(reached + 1, reached + 500):
                    pieces = pieces_of(full_state(step), "rows", 0, 1)
                    save(tmp_path, step=step, pieces=pieces, extra={"step": step}, keep=1, comm=alone())
            finally:
                os._exit(1)
        time.sleep(rng.uniform(0.005, 0.15))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        torn += any(path.name.startswith(".") for path in tmp_path.iterdir())
        checkpoint = latest(tmp_path)
        if checkpoint is None:
            assert reached == 0
            continue
        step = int(checkpoint.name.removeprefix("step-"))
        truth = pieces_of(full_state(step), "flat", 0, 1)
        wanted = blank(truth)
        assert load(checkpoint, pieces=wanted, comm=alone()) == {"step": step}
        assert bits(wanted) == bits(truth)
        assert step >= reached
        reached = step
    assert reached > 0
    assert torn > 0  # kills did fall into saves
