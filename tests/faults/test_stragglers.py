"""Ranks that compute slower than their peers are named while the run goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import tiny_jobs
from moewright.codec import read_incidents
from moewright.engine.optim.distributed_optimizer import DistributedOptimizer
from moewright.engine.run.stragglers import Pace, find_slow_ranks, time_product
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.report.incident_section import build_incident_section
from moewright.spec.run import IncidentKind


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


def test_the_product_is_timed() -> None:
    assert 0 < time_product(torch.device("cpu"), size=64) < 1


@pytest.mark.spawn
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
    section = build_incident_section((incident,))
    assert section is not None
    assert section.summary == "1 incident."
    assert section.rows[0].way_on == "has gone on meanwhile"
