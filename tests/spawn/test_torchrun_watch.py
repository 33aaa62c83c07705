"""Ranks that torchrun started are watched: a hang is named, with every stack, and all are ended."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

import tiny_jobs
from moewright.codec import read_incidents
from moewright.engine.comm import collectives
from moewright.engine.observe.phase_clock import DeviceMeter
from moewright.engine.run.launch import launch
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode, RankContext, RankOutcome, Timeouts
from moewright.spec.plan import Plan
from moewright.spec.run import IncidentKind

pytestmark = [pytest.mark.spawn, pytest.mark.waits]
IMPATIENT = Timeouts(rendezvous_s=20.0, collective_s=60.0, hang_s=0.3, first_step_s=0.0)
WORLD = 2


def join(context: RankContext) -> None:
    collectives.join_world(
        rank=context.rank,
        world_size=context.world_size,
        store=context.open_store(),
        backend="gloo",
        timeout_s=60.0,
    )


def hang_in_a_forward(context: RankContext) -> RankOutcome:
    join(context)
    context.beat(2)
    if context.rank == 1:
        context.note("forward of micro-batch 3, chunk 0")
    else:
        context.note("all_to_all over ep, in experts of layer 1", is_waiting=True)
    time.sleep(60)
    return RankOutcome.DONE


def wait_for_each_other(context: RankContext) -> RankOutcome:
    join(context)
    context.beat(2)
    context.note("all_reduce over world, in router", is_waiting=True)
    time.sleep(60)
    return RankOutcome.DONE


def be_suspended(context: RankContext) -> RankOutcome:
    join(context)
    context.beat(2)
    context.note("all_reduce over world, in router", is_waiting=True)
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)
    return RankOutcome.DONE


def end_at_once(context: RankContext) -> RankOutcome:
    join(context)
    if context.rank == 1:
        time.sleep(0.5)
    return RankOutcome.DONE


WORKERS = {
    worker.__name__: worker
    for worker in (hang_in_a_forward, wait_for_each_other, be_suspended, end_at_once)
}


def set_variables(folder: Path, rank: int, port: int, machines: int) -> None:
    """Make this process a rank of torchrun on one of so many machines, as they seem."""
    variables = {
        "RANK": rank,
        "WORLD_SIZE": WORLD,
        "LOCAL_RANK": rank if machines == 1 else 0,
        "GROUP_RANK": 0 if machines == 1 else rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({key: str(value) for key, value in variables.items()})
    error = (folder / f"err{rank}").open("w", buffering=1)
    os.dup2(error.fileno(), 2)
    sys.stderr = error


def start_ranks(target: object, folder: Path, machines: int, *args: object) -> list[int]:
    """Run both ranks until they end, and return their exit codes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def run_rank(rank: int) -> None:
        set_variables(folder, rank, port, machines)
        os._exit(target(folder, *args))  # type: ignore[operator]

    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank,)) for rank in range(WORLD)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(90)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert None not in codes, "ranks hang"
    return [code for code in codes if code is not None]


def run_worker(folder: Path, name: str) -> ExitCode:
    return launch(WORKERS[name], nproc=WORLD, run_dir=folder / "run", timeouts=IMPATIENT)


@pytest.mark.parametrize(
    ("machines", "name", "message"),
    [
        (1, "hang_in_a_forward", "rank 1 .* in: forward of micro-batch 3, chunk 0"),
        pytest.param(
            1, "wait_for_each_other", "in: all_reduce over world", marks=pytest.mark.thorough
        ),
        pytest.param(1, "be_suspended", r"rank 1 .*\(SIGSTOP\)", marks=pytest.mark.thorough),
        pytest.param(2, "hang_in_a_forward", "rank 1 .* in: forward", marks=pytest.mark.thorough),
        (2, "wait_for_each_other", "in: all_reduce over world"),
        pytest.param(2, "be_suspended", r"rank 1 .*\(SIGSTOP\)", marks=pytest.mark.thorough),
    ],
)
def test_a_hang_under_torchrun_is_named_and_ended(
    machines: int, name: str, message: str, tmp_path: Path
) -> None:
    began_s = time.monotonic()
    codes = start_ranks(run_worker, tmp_path, machines, name)
    assert time.monotonic() - began_s < 50
    assert -signal.SIGKILL in codes
    error = "".join((tmp_path / f"err{rank}").read_text() for rank in range(WORLD))
    assert error.count("stopped answering at step 2") == 1
    assert re.search(message, error)
    flights = sorted((tmp_path / "run").glob("flight_record*.json"))
    records = [rank for flight in flights for rank in json.loads(flight.read_text())]
    assert sorted(record["rank"] for record in records) == [0, 1]
    for record in records:
        assert name in record["stack"] or (name == "be_suspended" and record["rank"] == 1)


@pytest.mark.parametrize("machines", [1, 2])
def test_ranks_that_end_leave_no_watcher_and_no_files(machines: int, tmp_path: Path) -> None:
    assert start_ranks(run_worker, tmp_path, machines, "end_at_once") == [0, 0]
    assert not (tmp_path / "run/.launch").exists()


def run_job(folder: Path, plan: Plan) -> ExitCode:
    """Train, and suspend rank 1 at the end of its fourth step."""
    steps = iter(range(1, 1000))

    def sample_and_suspend(meter: DeviceMeter) -> None:
        if next(steps) == 4 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceMeter, "end_step", sample_and_suspend)
        return train(plan, folder / "run")


def test_a_job_that_hangs_under_torchrun_has_an_incident(tmp_path: Path) -> None:
    data = tiny_jobs.write_corpus(tmp_path / "corpus")
    workload = tiny_jobs.build_workload(data, steps=8, hang_timeout_s=6.0)
    plan = tiny_jobs.build_plan(workload, "ep2,mbs1", world_size=WORLD)
    assert -signal.SIGKILL in start_ranks(run_job, tmp_path, 1, plan)
    (incident,) = read_incidents(tmp_path / "run")
    assert (incident.kind, incident.rank, incident.step) == (IncidentKind.HANG, 1, 4)
