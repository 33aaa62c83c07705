"""Ranks that compute slower than their peers are named while the run goes on.

recorded_steps.csv has steps of both ranks of tests/faults/harness.py's job on two cores at a load
of 4 to 8: of healthy ranks with train.check_every = 1 and without, and of a rank that ran for a
third of the time.
"""

from __future__ import annotations

import csv
import random
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

import tiny_jobs
from moewright.codec import read_incidents
from moewright.engine.optim.distributed_optimizer import DistributedOptimizer
from moewright.engine.run.corruption import StateGuard
from moewright.engine.run.step import BackwardResult
from moewright.engine.run.stragglers import (
    WINDOW_STEPS,
    WINDOWS,
    Pace,
    build_pace,
    count_slow_windows,
    find_slow_ranks,
    median_pace,
    time_product,
)
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.report.run_sections import list_incidents
from moewright.spec.run import HostTime, IncidentKind

RECORDED = Path(__file__).with_name("recorded_steps.csv")


def make_paces(*seconds: float, rows: tuple[float, ...] = (), stages: int = 1) -> list[Pace]:
    return [
        Pace(
            stage=number * stages // len(seconds),
            seconds=value,
            queued_s=0.0,
            rows=rows[number] if rows else 100.0,
        )
        for number, value in enumerate(seconds)
    ]


def test_a_rank_is_compared_with_its_peers() -> None:
    assert find_slow_ranks(make_paces(1.0, 1.2, 1.1, 1.0)) == {}
    assert list(find_slow_ranks(make_paces(1.0, 1.0, 1.5, 1.0))) == [2]
    # Another stage has other work.
    assert find_slow_ranks(make_paces(1.0, 1.1, 2.0, 2.1, stages=2)) == {}
    assert list(find_slow_ranks(make_paces(1.0, 1.4, 2.0, 2.1, stages=2))) == [1]
    assert find_slow_ranks(make_paces(1.0, 2.0, stages=2)) == {}


def test_more_rows_than_the_peers_have_are_no_slowness() -> None:
    rows = (100.0, 160.0, 90.0)
    assert find_slow_ranks(make_paces(1.0, 1.6, 1.0, rows=rows)) == {}
    (text,) = find_slow_ranks(make_paces(1.0, 2.5, 1.0, rows=rows)).values()
    assert "2.50 times the 1000.0 ms of its peers (median), with 1.68 times" in text


@cache
def read_recorded(run: str) -> tuple[list[Pace], ...]:
    """Return the paces of the steps of each rank."""
    ranks: tuple[list[Pace], ...] = ([], [])
    with RECORDED.open() as stream:
        for row in csv.DictReader(stream):
            if row["run"] == run:
                host = HostTime(
                    running_s=1e-3 * float(row["running_ms"]),
                    queued_s=1e-3 * float(row["queued_ms"]),
                    asleep_s=1e-3 * float(row["asleep_ms"]),
                )
                pace = build_pace(host, stage=0, rows=float(row["rows"]))
                ranks[int(row["rank"])].append(pace)
    return ranks


def find_named(steps_by_rank: Sequence[Sequence[Pace]]) -> dict[int, int]:
    """Return the ranks that are told of, and after how many steps first."""
    named: dict[int, int] = {}
    windows: dict[int, int] = {}
    for end in range(WINDOW_STEPS, len(steps_by_rank[0]) + 1, WINDOW_STEPS):
        paces = [median_pace(steps[end - WINDOW_STEPS : end]) for steps in steps_by_rank]
        windows = count_slow_windows(windows, find_slow_ranks(paces))
        for rank, count in windows.items():
            if count == WINDOWS:
                named.setdefault(rank, end)
    return named


@pytest.mark.parametrize("run", ["healthy", "not checked"])
def test_no_healthy_rank_is_ever_named(run: str) -> None:
    """Two windows of recorded steps, in pieces of five that are drawn for both ranks alike."""
    ranks = read_recorded(run)
    rng = random.Random(run)
    for _ in range(500):
        starts = rng.choices(range(len(ranks[0]) - 4), k=WINDOWS * WINDOW_STEPS // 5)
        drawn = [[step for start in starts for step in rank[start : start + 5]] for rank in ranks]
        assert find_named(drawn) == {}


def test_a_slow_rank_is_named_after_two_windows_though_the_run_is_checked() -> None:
    """The rank was slowed down in the midst of the first window."""
    assert find_named(read_recorded("slow")) == {0: WINDOWS * WINDOW_STEPS}


@pytest.mark.spawn
def test_the_wait_for_a_peer_of_a_checked_step_is_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is late with its sums of a step that was repeated."""
    take_pass = StateGuard._take_pass

    def take_pass_late(self: StateGuard, backward: BackwardResult) -> dict[str, str]:
        time.sleep(0.2 if self._rank == 1 else 0.0)
        return take_pass(self, backward)

    monkeypatch.setattr(StateGuard, "_take_pass", take_pass_late)
    data = tiny_jobs.write_corpus(tmp_path / "corpus")
    workload = tiny_jobs.build_workload(data, steps=4, check_every=1)
    plan = tiny_jobs.build_plan(workload, "ep2,mbs4", world_size=2)
    assert train(plan, tmp_path / "run") is ExitCode.DONE
    *_, last = tiny_jobs.read_steps(tmp_path / "run")  # of rank 0
    (world_s,) = (wait["seconds"] for wait in last["waits"] if wait["group"] == "world")
    assert world_s >= 0.15
    assert last["host"]["asleep_s"] < 0.1


def test_the_product_is_timed() -> None:
    assert 0 < time_product(torch.device("cpu"), size=64) < 1


@pytest.mark.spawn
@pytest.mark.serial
def test_a_slow_rank_is_named_once_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    update = DistributedOptimizer.update

    def update_slowly(self: DistributedOptimizer, *, lr: float, scale: float) -> None:
        if self._runtime.mesh.rank == 1:
            time.sleep(0.06)
        update(self, lr=lr, scale=scale)

    monkeypatch.setattr(DistributedOptimizer, "update", update_slowly)
    data = tiny_jobs.write_corpus(tmp_path / "corpus")
    plan = tiny_jobs.build_plan(tiny_jobs.build_workload(data, steps=36), "ep2,mbs4", world_size=2)
    run_dir = tmp_path / "run"
    assert train(plan, run_dir) is ExitCode.DONE
    (incident,) = read_incidents(run_dir)
    assert (incident.kind, incident.rank) == (IncidentKind.SLOW, 1)
    assert incident.message.startswith(f"rank 1 is slow at step {incident.step}: ")
    assert 20 <= incident.step <= 24
    assert incident.message in capfd.readouterr().err
    (section,) = list_incidents((incident,))
    assert section.lines == ("1 incident.",)
    assert section.table is not None
    assert "has gone on meanwhile" in section.table.rows[0].cells
