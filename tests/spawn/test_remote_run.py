"""Runs whose checkpoints are copied elsewhere: they go on from a copy, and need none."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import tiny_jobs
from moewright.codec import read_incidents, read_run
from moewright.engine.checkpoint.remote import RemoteFolder
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.report.run_sections import build_verdict
from moewright.spec.errors import BadInput
from moewright.spec.plan import Plan
from moewright.spec.run import IncidentKind
from moewright.spec.units import plural
from moewright.spec.workload import CheckpointSpec, DataSpec, SaveMode

pytestmark = pytest.mark.spawn


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return tiny_jobs.write_corpus(tmp_path_factory.mktemp("corpus"))


def make_plan(data: DataSpec, copies: Path, *, seed: int = 1234) -> Plan:
    workload = replace(
        tiny_jobs.build_workload(data, steps=8, seed=seed),
        checkpoint=CheckpointSpec(
            every_steps=2, keep=1, mode=SaveMode.ASYNC, copy_to=str(copies), copy_keep=9
        ),
    )
    return tiny_jobs.build_plan(workload, "ep2,mbs1", world_size=2)


def read_losses(run_dir: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in tiny_jobs.read_steps(run_dir)}


def test_a_run_goes_on_elsewhere_from_a_copy(
    data: DataSpec, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copies = tmp_path / "copies"
    plan = make_plan(data, copies)
    assert train(plan, tmp_path / "first") is ExitCode.DONE
    steps = RemoteFolder(str(copies)).list_steps()
    assert steps[-1] == 8  # the last one always; one that waits is left out for a newer one
    for step in (6, 8):
        shutil.rmtree(copies / f"step-{step:08d}", ignore_errors=True)
    last = max(step for step in steps if step < 6)  # the first one is always among them
    assert train(plan, tmp_path / "second") is ExitCode.DONE
    assert f"step-{last:08d} came from" in capfd.readouterr().err
    assert train(plan, tmp_path / "done") is ExitCode.DONE  # the copy has all steps
    assert read_run(tmp_path / "done").plan == plan
    whole = read_losses(tmp_path / "first")
    assert read_losses(tmp_path / "second") == whole  # the records came with the checkpoint
    ages = [step.copy_age for step in read_run(tmp_path / "first").steps]
    assert ages[0] == 1  # a loss of the machine would cost all of it
    assert ages[-1] <= 8
    assert read_run(tmp_path / "second").steps[-1].copied_step >= last
    # The last copy ends after the last step, whose line is older.
    assert read_run(tmp_path / "second").copied_step == 8
    (tile,) = (
        tile
        for tile in build_verdict(read_run(tmp_path / "first"), ()).tiles
        if tile.label == "Newest copy elsewhere"
    )
    assert tile.note == f"in the end; at worst {plural(max(ages), 'step')} old"
    other = make_plan(data, copies, seed=5)
    with pytest.raises(BadInput, match="seed"):
        train(other, tmp_path / "third")
    assert not list((tmp_path / "third/checkpoints").glob("step-*"))


def test_copies_that_fail_do_not_end_a_run(
    data: DataSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail(self: RemoteFolder, *_: object, **options: object) -> None:
        raise ConnectionError("the bucket is gone")

    monkeypatch.setattr(RemoteFolder, "upload", fail)
    assert train(make_plan(data, tmp_path / "copies"), tmp_path / "run") is ExitCode.DONE
    told = capfd.readouterr()
    assert "step-00000008 was not copied" in told.err
    assert "copy 8 steps old" in told.out
    assert not list((tmp_path / "run/checkpoints").glob(".copying*"))
    (incident,) = read_incidents(tmp_path / "run")  # of one outage
    assert incident.kind is IncidentKind.COPY
    assert "the bucket is gone" in incident.message
    assert not incident.kind.ends_ranks


def test_a_destination_that_cannot_be_written_is_refused_before_the_first_step(
    data: DataSpec, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    plan = make_plan(data, tmp_path / "file" / "copies")
    with pytest.raises(BadInput, match=r"checkpoint\.copy_to=.*cannot be (written|listed)"):
        train(plan, tmp_path / "run")
    assert not (tmp_path / "run" / "plan.json").exists()
    # A run that stands somewhere goes on: its machine may have little time left.
    without = replace(plan.workload.checkpoint, copy_to="")
    begun = replace(plan, workload=replace(plan.workload, checkpoint=without))
    assert train(begun, tmp_path / "run") is ExitCode.DONE
    assert train(plan, tmp_path / "run", extend=True) is ExitCode.DONE
    assert "going on without" in capfd.readouterr().err
    incidents = read_incidents(tmp_path / "run")
    assert [incident.kind for incident in incidents] == [IncidentKind.COPY] * len(incidents)
    assert incidents[0].step == 8
