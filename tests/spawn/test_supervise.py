"""Runs that look after themselves: started again, given up, and moved to fewer ranks and back."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from test_train_run import child_processes, losses, wait_for_step

import tiny_jobs
from moewright.api.reporting import build_report, write_page
from moewright.api.training import plan_for_ranks
from moewright.codec import parse_layout, read_incidents, read_run
from moewright.diagnosis.compare_ledgers import compare_ranks
from moewright.engine.run import supervise as supervise_module
from moewright.engine.run.launch import LaunchHooks
from moewright.engine.run.run_records import note_failure
from moewright.engine.run.supervise import RETURN_SIGNAL, Elasticity, supervise
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode, FailureKind, RankFailure
from moewright.rules.goodput import Interruptions, simulate_failures
from moewright.spec.plan import Plan
from moewright.spec.run import IncidentKind
from moewright.spec.workload import DataSpec
from tiny_jobs import read_steps

pytestmark = pytest.mark.spawn


def make_plan(
    data: DataSpec, *, world_size: int = 2, layout: str = "ep2,mbs1", steps: int = 20
) -> Plan:
    workload = tiny_jobs.build_workload(data, steps=steps)
    checkpoint = replace(workload.checkpoint, every_steps=4)
    return tiny_jobs.build_plan(
        replace(workload, checkpoint=checkpoint), layout, world_size=world_size
    )


Event = tuple[int, int, IncidentKind] | ExitCode | None


class Script:
    """A stand-in for `train`: its starts end as the script says, on the ranks that it notes.

    An event is the rank, the step and the kind of a failure; an exit code; or None, for ranks that
    run until they are asked to stop.
    """

    def __init__(self, *events: Event) -> None:
        self._events = list(events)
        self.starts: list[tuple[int, ...]] = []
        self.on_run: Callable[[], None] = lambda: None

    def train(
        self,
        plan: Plan,
        run_dir: Path,
        *,
        hooks: LaunchHooks,
        local_ranks: Sequence[int],
        **_: bool,
    ) -> ExitCode:
        self.starts.append(tuple(local_ranks))
        event = self._events.pop(0)
        if isinstance(event, ExitCode):
            return event
        if event is None:
            self.on_run()
            while not hooks.wants_stop(False):
                time.sleep(0.01)
            return ExitCode.STOPPED
        rank, step, cause = event
        failure = RankFailure(
            rank=rank,
            step=step,
            time_s=0.0,
            kind=FailureKind.CAUSE,
            cause=cause,
            event="failed",
        )
        note_failure(run_dir, plan.layout, failure)
        hooks.report_failure(failure)
        return ExitCode.RANK_FAILED


CRASH = IncidentKind.CRASH
ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("events", "code", "reason"),
    [
        (((1, 7, CRASH), ExitCode.STOPPED), ExitCode.STOPPED, ""),
        (((1, 7, CRASH), (1, 9, CRASH), ExitCode.DONE), ExitCode.DONE, ""),
        (
            ((1, 7, CRASH), (0, 7, IncidentKind.HANG)),
            ExitCode.RANK_FAILED,
            "gave up: step 7 has failed twice in a row",
        ),
        (
            ((1, 7, CRASH), (1, 0, CRASH), (1, 0, CRASH)),
            ExitCode.RANK_FAILED,
            "gave up: two starts in a row have failed before their first step",
        ),
        (
            ((1, 7, IncidentKind.NOT_FINITE), (1, 7, IncidentKind.NOT_FINITE)),
            ExitCode.RANK_FAILED,
            "gave up: step 7 was not finite twice, and is not skipped, for its gradients alone are "
            "not at fault",
        ),
    ],
)
def test_ranks_start_again_until_the_same_step_fails_twice(
    events: tuple[Event, ...],
    code: ExitCode,
    reason: str,
    data: DataSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = Script(*events)
    delays: list[float] = []
    monkeypatch.setattr(supervise_module, "train", script.train)
    monkeypatch.setattr(time, "sleep", delays.append)
    assert supervise(make_plan(data, world_size=4), tmp_path) is code
    assert script.starts == [ALL] * len(events)
    failures = sum(isinstance(event, tuple) for event in events)
    assert delays == [0.0, 1.0, 2.0][: failures - bool(reason)]  # no checkpoint comes
    incidents = read_incidents(tmp_path)
    assert len(incidents) == failures
    assert incidents[-1].gave_up == reason
    assert reason in capfd.readouterr().err


@pytest.mark.parametrize(
    ("distance", "saves", "starts"), [(3, True, 10), (30, False, 10), (30, True, 25)]
)
def test_starts_that_come_to_little_are_limited_though_each_fails_at_another_step(
    distance: int,
    saves: bool,
    starts: int,
    data: DataSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each start fails `distance` steps further than the last one."""
    steps = range(99 + distance, 99 + distance * 26, distance)
    script = Script(*[(1, step, CRASH) for step in steps], ExitCode.DONE)
    monkeypatch.setattr(supervise_module, "train", script.train)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    saved = iter((99, *(step - 1 for step in steps)))
    monkeypatch.setattr(supervise_module, "latest_step", lambda _: next(saved) if saves else 50)
    is_done = starts == len(steps)
    code = supervise(make_plan(data, world_size=4), tmp_path)
    assert code is (ExitCode.DONE if is_done else ExitCode.RANK_FAILED)
    assert len(script.starts) == starts + is_done
    gave_up = read_incidents(tmp_path)[-1].gave_up
    assert ("10 starts in a row" in gave_up) != is_done


def replan(plan: Plan, count: int) -> Plan | None:
    """Return a plan of 2 ranks or of 1; none of 3."""
    layouts = {2: "ep2,mbs1", 1: "mbs1"}
    if count not in layouts:
        return None
    return replace(plan, layout=parse_layout(layouts[count], world_size=count))


def test_ranks_that_are_gone_are_left_out_and_tried_again(
    data: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 fails for good; it is still gone when all are tried, and back the second time."""
    script = Script(
        (1, 7, CRASH),
        (1, 0, CRASH),
        None,
        (1, 0, CRASH),
        (1, 11, CRASH),
        None,
        (3, 20, CRASH),
        ExitCode.DONE,
    )
    script.on_run = partial(os.kill, os.getpid(), RETURN_SIGNAL)
    plan = make_plan(data, world_size=4)
    monkeypatch.setattr(supervise_module, "train", script.train)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    elasticity = Elasticity(replan=partial(replan, plan), min_ranks=2)
    assert supervise(plan, tmp_path, elasticity=elasticity) is ExitCode.DONE
    few = (0, 2)
    assert script.starts == [ALL, ALL, few, ALL, few, few, ALL, ALL]
    kinds = [incident.kind for incident in read_incidents(tmp_path)]
    assert kinds == [CRASH, CRASH, IncidentKind.RETURN, CRASH, CRASH, IncidentKind.RETURN, CRASH]


def test_too_few_ranks_end_the_run(
    data: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script((1, 7, CRASH), (1, 0, CRASH), (1, 0, CRASH))
    plan = make_plan(data)
    monkeypatch.setattr(supervise_module, "train", script.train)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    elasticity = Elasticity(replan=partial(replan, plan), min_ranks=2)
    assert supervise(plan, tmp_path, elasticity=elasticity) is ExitCode.RANK_FAILED
    assert "two starts" in read_incidents(tmp_path)[-1].gave_up


def start_supervisor(
    plan: Plan, run_dir: Path, elasticity: Elasticity | None = None
) -> multiprocessing.process.BaseProcess:
    def run_job() -> None:
        os._exit(supervise(plan, run_dir, elasticity=elasticity))

    process = multiprocessing.get_context("fork").Process(target=run_job)
    process.start()
    return process


def list_ranks(process: multiprocessing.process.BaseProcess) -> list[int]:
    assert process.pid is not None
    return sorted(child_processes(process.pid))


def wait_until(condition: Callable[[], bool], *, limit_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.thorough  # a case of the fault matrix does the same in `make test`
def test_a_supervised_run_goes_on_by_itself_after_a_kill(data: DataSpec, tmp_path: Path) -> None:
    plan = make_plan(data)
    whole = tmp_path / "whole"
    run_dir = tmp_path / "run"
    assert train(plan, whole) is ExitCode.DONE
    process = start_supervisor(plan, run_dir)
    wait_for_step(run_dir, 6)
    os.kill(list_ranks(process)[1], signal.SIGKILL)
    process.join(60)
    assert process.exitcode == ExitCode.DONE
    assert losses(run_dir) == losses(whole)
    (incident,) = read_incidents(run_dir)
    assert (incident.kind, incident.rank, incident.gave_up) == (CRASH, 1, "")
    assert "rank 1 was killed by SIGKILL at step" in incident.message
    assert incident.resumed_step % 4 == 1
    done = incident.step - 1
    assert done - 1 <= incident.resumed_step - 1 + incident.repeated_steps <= done + 1
    assert 0 < incident.down_s < 30
    page = write_page(build_report(run_dir), tmp_path / "report.html").read_text()
    assert "1 incident; " in page
    assert incident.message in page


def has_gone_on(run_dir: Path, *, incidents: int) -> bool:
    noted = read_incidents(run_dir)
    return len(noted) == incidents and noted[-1].resumed_step > 0


@pytest.mark.thorough
def test_the_calendar_of_a_killed_run_is_that_of_the_goodput_model(
    data: DataSpec, tmp_path: Path
) -> None:
    """Steps, saves and recoveries are measured; what is done again and the whole are modelled."""
    interval, kills, steps = 20, (37, 75, 118), 160
    workload = make_plan(data, steps=steps).workload
    checkpoint = replace(workload.checkpoint, every_steps=interval)
    plan = tiny_jobs.build_plan(replace(workload, checkpoint=checkpoint), "ep2,mbs1", world_size=2)
    process = start_supervisor(plan, tmp_path)
    wait_for_step(tmp_path, 1)
    began_s = start_s = time.monotonic()
    for number, step in enumerate(kills):
        wait_for_step(tmp_path, step)
        os.kill(list_ranks(process)[1], signal.SIGKILL)
        wait_until(partial(has_gone_on, tmp_path, incidents=number + 1))
        start_s = time.monotonic()
    wait_for_step(tmp_path, steps)
    ended_s = time.monotonic()
    process.join(120)
    assert process.exitcode == ExitCode.DONE
    incidents = read_incidents(tmp_path)
    kept_s = [record["step_s"] for record in read_steps(tmp_path)]
    repeated_s = sum(incident.repeated_s for incident in incidents)
    done = steps + sum(incident.repeated_steps for incident in incidents)
    step_s = (sum(kept_s) + repeated_s) / done
    # The last start is not killed: what it takes beyond its steps are its saves.
    last = incidents[-1].resumed_step
    saves = (steps - 1) // interval - last // interval
    save_s = max(0.0, ended_s - start_s - sum(kept_s[last:])) / saves
    lives_s: list[float] = []
    for start, incident in zip((0, 20, 60), incidents, strict=True):
        steps_done = incident.step - 0.5 - start
        saves_done = (incident.step - 1) // interval - start // interval
        lives_s += [steps_done * step_s + saves_done * save_s, inf]  # recoveries do not fail
    lives = iter([*lives_s, inf])
    # Incidents are over at the end of a step, which the model has among those of the job.
    recovery_s = fmean(incident.down_s for incident in incidents) - step_s
    (predicted_s,) = simulate_failures(
        steps * step_s,
        Interruptions(mtbf_s=inf, recovery_s=recovery_s, save_s=save_s),
        interval * step_s,
        traces=1,
        draw_lives=lambda count: np.full(count, next(lives)),
    )
    assert ended_s - began_s + step_s == pytest.approx(predicted_s, rel=0.05)


@pytest.mark.thorough
def test_a_run_goes_on_with_the_ranks_that_are_left_and_back(
    data: DataSpec, tmp_path: Path
) -> None:
    """Rank 3 of 4 is killed whenever it comes; then it is let live, and called back.

    Losses are those of the run without a fault, and ledgers are exact in every layout.
    """
    plan = plan_for_ranks(make_plan(data, world_size=4, steps=200), 4)
    assert plan is not None
    whole = tmp_path / "whole"
    run_dir = tmp_path / "run"
    assert train(plan, whole) is ExitCode.DONE
    process = start_supervisor(
        plan, run_dir, Elasticity(replan=partial(plan_for_ranks, plan), min_ranks=2)
    )
    wait_for_step(run_dir, 6)
    shutil.copytree(run_dir, tmp_path / "first", ignore=shutil.ignore_patterns("checkpoints"))
    killed_s = time.monotonic()
    for _ in range(2):
        wait_until(lambda: len(list_ranks(process)) == 4)
        os.kill(list_ranks(process)[3], signal.SIGKILL)
        wait_until(lambda: len(list_ranks(process)) < 4)
    wait_until(lambda: len(read_incidents(run_dir)) == 2)
    wait_until(lambda: bool(read_incidents(run_dir)[-1].resumed_step))
    assert time.monotonic() - killed_s < 20
    assert len(list_ranks(process)) in (2, 3)
    resumed_step = read_incidents(run_dir)[-1].resumed_step
    wait_for_step(run_dir, resumed_step + 4)
    shutil.copytree(run_dir, tmp_path / "second", ignore=shutil.ignore_patterns("checkpoints"))
    assert process.pid is not None
    os.kill(process.pid, RETURN_SIGNAL)
    wait_until(lambda: len(list_ranks(process)) == 4)
    process.join(120)
    assert process.exitcode == ExitCode.DONE
    for own, expected in zip(read_steps(run_dir), read_steps(whole), strict=True):
        assert own["step"] == expected["step"]
        assert own["loss"] == pytest.approx(expected["loss"], rel=1e-5), own["step"]
    *_, returned = read_incidents(run_dir)
    assert returned.kind is IncidentKind.RETURN
    assert returned.next_world_size == 4
    worlds = []
    for folder in (tmp_path / "first", tmp_path / "second", run_dir):
        record = read_run(folder)
        worlds.append(record.plan.layout.world_size)
        comparisons = compare_ranks(record)
        assert len(comparisons) == worlds[-1]
        assert all(comparison.is_exact for comparison in comparisons)
    assert worlds[0] == worlds[2] == 4
    assert worlds[1] in (2, 3)
