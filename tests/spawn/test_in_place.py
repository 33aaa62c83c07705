"""Runs that go on in place: a rank dies, another process takes its place, the others stay."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from test_supervise import list_ranks, start_supervisor, wait_until
from test_train_run import wait_for_step

import tiny_jobs
from moewright.codec import read_incidents, read_run
from moewright.diagnosis.compare_ledgers import AgreementRule, compare_ranks
from moewright.engine.run.peer_copies import find_common_step
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.spec.ledger import Component
from moewright.spec.plan import Plan
from moewright.spec.run import IncidentKind
from moewright.spec.workload import DataSpec, SaveMode
from tiny_jobs import read_steps

pytestmark = pytest.mark.spawn


def make_plan(
    data: DataSpec,
    layout: str,
    *,
    steps: int = 24,
    every: int = 1,
    save_every: int = 0,
    hang_timeout_s: float = 0.0,
) -> Plan:
    workload = tiny_jobs.build_workload(data, steps=steps)
    checkpoint = replace(
        workload.checkpoint,
        every_steps=save_every,
        mode=SaveMode.ASYNC if save_every else SaveMode.SYNC,
        peer_every_steps=every,
    )
    workload = replace(workload, checkpoint=checkpoint, hang_timeout_s=hang_timeout_s)
    return tiny_jobs.build_plan(workload, layout, world_size=4)


def wait_for_way_on(run_dir: Path, count: int = 1) -> None:
    def has_gone_on() -> bool:
        incidents = read_incidents(run_dir)
        return len(incidents) >= count and bool(incidents[-1].resumed_step)

    wait_until(has_gone_on)


def refuse_other_losses(run_dir: Path, whole: Path) -> None:
    for own, expected in zip(read_steps(run_dir), read_steps(whole), strict=True):
        assert own["step"] == expected["step"]
        assert own["loss"] == pytest.approx(expected["loss"], rel=1e-6), own["step"]


def test_healthy_ranks_stay_when_one_dies(data: DataSpec, tmp_path: Path) -> None:
    """Four ranks and a spare process; no checkpoint is written before the end."""
    plan = make_plan(data, "ep2,mbs1,zero1", steps=16)
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert train(plan, whole) is ExitCode.DONE
    process = start_supervisor(plan, run_dir)
    wait_for_step(run_dir, 6)
    before = list_ranks(process)
    assert len(before) == 5
    os.kill(before[2], signal.SIGKILL)
    wait_for_way_on(run_dir)
    after = list_ranks(process)
    process.join(60)
    assert process.exitcode == ExitCode.DONE
    assert set(after) >= {*before} - {before[2]}
    (incident,) = read_incidents(run_dir)
    assert (incident.kind, incident.rank, incident.gave_up) == (IncidentKind.CRASH, 2, "")
    assert incident.step - incident.resumed_step <= 2
    assert incident.repeated_steps <= 2
    assert incident.down_s < 10
    refuse_other_losses(run_dir, whole)
    comparisons = compare_ranks(read_run(run_dir))
    assert all(comparison.keeps_rules for comparison in comparisons)
    for comparison in comparisons:  # two copies of its own state, and of the rank before
        (line,) = (line for line in comparison.lines if line.key[0] == Component.HOST)
        assert line.rule is AgreementRule.EXACT
        assert line.predicted == line.counted > 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "ranks", "number", "save_every", "source"),
    [
        ("tp2,ep2,mbs1", (0,), signal.SIGKILL, 0, 1),
        ("ep2,mbs1,zero3", (1,), signal.SIGKILL, 0, 1),
        ("ep2,mbs1,zero2", (3,), signal.SIGKILL, 3, 1),
        ("tp2,pp2,ep2,layout='Et*2|tL'", (2,), signal.SIGKILL, 2, 1),
        ("cp2,ep2,mbs1,zero1,overlap=grad+param", (1,), signal.SIGSTOP, 0, 1),
        ("ep2,mbs1,zero1", (0, 2), signal.SIGKILL, 0, 1),
        ("ep2,mbs1,zero1", (1, 2), signal.SIGKILL, 4, 0),  # the copy of rank 1 was in rank 2
    ],
)
def test_ranks_stay_in_any_layout(
    data: DataSpec,
    tmp_path: Path,
    layout: str,
    ranks: Sequence[int],
    number: signal.Signals,
    save_every: int,
    source: int,
) -> None:
    """`source`: 1 where at most two steps are done again, 0 where a checkpoint is read."""
    plan = make_plan(data, layout, save_every=save_every, hang_timeout_s=2.0)
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert train(plan, whole) is ExitCode.DONE
    process = start_supervisor(plan, run_dir)
    wait_for_step(run_dir, 9)
    before = list_ranks(process)
    for rank in ranks:
        os.kill(before[rank], number)
    wait_for_way_on(run_dir)
    after = list_ranks(process)
    process.join(60)
    assert process.exitcode == ExitCode.DONE
    assert set(after) >= {*before} - {before[rank] for rank in ranks}
    (incident,) = read_incidents(run_dir)
    assert incident.rank in ranks
    if source:
        assert incident.step - incident.resumed_step <= 2
    else:
        assert incident.resumed_step % save_every == 1
    refuse_other_losses(run_dir, whole)
    comparisons = compare_ranks(read_run(run_dir))
    assert all(comparison.is_exact and comparison.keeps_rules for comparison in comparisons)


@pytest.mark.thorough
def test_all_start_again_when_the_next_rank_dies_soon(data: DataSpec, tmp_path: Path) -> None:
    plan = make_plan(data, "ep2,mbs1,zero1", steps=40, save_every=3)
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert train(plan, whole) is ExitCode.DONE
    process = start_supervisor(plan, run_dir)
    wait_for_step(run_dir, 8)
    first = list_ranks(process)
    os.kill(first[1], signal.SIGKILL)
    wait_for_way_on(run_dir)
    second = list_ranks(process)
    time.sleep(0.2)
    os.kill(second[0], signal.SIGKILL)
    wait_for_way_on(run_dir, 2)
    third = list_ranks(process)
    assert {*first} & {*second}
    assert not {*second} & {*third}
    process.join(60)
    assert process.exitcode == ExitCode.DONE
    refuse_other_losses(run_dir, whole)


@pytest.mark.thorough
def test_a_rank_may_die_at_any_moment(data: DataSpec, tmp_path: Path) -> None:
    """One rank after the other is killed, at moments that fall into every part of a step."""
    plan = make_plan(data, "ep2,mbs1,zero1", steps=160)
    whole = tmp_path / "whole"
    assert train(plan, whole) is ExitCode.DONE
    run_dir = tmp_path / "run"
    process = start_supervisor(plan, run_dir)
    for number in range(10):
        wait_for_step(run_dir, 12 * (number + 1))
        before = list_ranks(process)
        time.sleep(0.013 * number)
        os.kill(before[number % 4], signal.SIGKILL)
        wait_for_way_on(run_dir, number + 1)
        assert len({*before} & {*list_ranks(process)}) == 4
    process.join(60)
    assert process.exitcode == ExitCode.DONE
    incidents = read_incidents(run_dir)
    assert len(incidents) == 10
    assert max(incident.step - incident.resumed_step for incident in incidents) <= 2
    refuse_other_losses(run_dir, whole)
    shutil.rmtree(run_dir)


@pytest.mark.parametrize(
    ("own", "held", "step"),
    [
        (((6, 5), (6, 5), (6, 5)), ((6, 5), (6, 5), (6, 5)), 6),
        (((6, 5), (-1, -1), (6, 5)), ((6, 5), (-1, -1), (6, 5)), 6),  # rank 2 has rank 1's
        (((6, 5), (-1, -1), (6, 5)), ((6, 5), (-1, -1), (-1, 5)), 5),  # it died while copying
        (((6, 5), (-1, -1), (-1, -1)), ((6, 5), (-1, -1), (-1, -1)), -1),
        (((-1, -1),) * 3, ((-1, -1),) * 3, -1),
    ],
)
def test_the_newest_step_of_which_every_state_is_left(
    own: Sequence[Sequence[int]], held: Sequence[Sequence[int]], step: int
) -> None:
    views = [{"own": first, "neighbour": second} for first, second in zip(own, held, strict=True)]
    assert find_common_step(views) == step
