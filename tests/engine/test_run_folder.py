"""What lies in the folder of a run, or is done to it: kept, made again, or refused in one line."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiny_jobs
from moewright.api.training import TrainingRequest, _read_given_plan
from moewright.codec import read_json, write_json
from moewright.engine.checkpoint import LocalShard, save_checkpoint, single_process
from moewright.engine.checkpoint.files import write_error
from moewright.engine.observe.record import JsonLinesWriter
from moewright.engine.run import watch
from moewright.engine.run.early_checks import raise_file_limit
from moewright.engine.run.rank_checks import refuse_run_folder
from moewright.engine.run.supervise import _Supervisor
from moewright.engine.run.train import _restore_plan
from moewright.engine.run.worker import FailureKind, RankFailure
from moewright.spec.errors import BadInput
from moewright.spec.plan import Plan
from moewright.spec.run import EvalRecord, IncidentKind
from moewright.spec.workload import DataSpec


def _evaluate(step: int) -> EvalRecord:
    return EvalRecord(step=step, heldout_loss=2.0, unigram_entropy=2.5, tokens=8)


def _read_steps(folder: Path) -> list[int]:
    lines = (folder / "steps.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.parametrize("deed", ["delete", "replace", "nothing"])
@pytest.mark.parametrize("end", ["sync", "close"])
def test_steps_that_somebody_deletes_are_written_again(deed: str, end: str, tmp_path: Path) -> None:
    journal = JsonLinesWriter(tmp_path, first_step=1)
    journal.write_evaluation(_evaluate(1))
    path = tmp_path / "steps.jsonl"
    if deed != "nothing":
        path.unlink()
    if deed == "replace":
        path.write_text("")
    journal.write_evaluation(_evaluate(2))
    if end == "sync":
        journal.sync()
        journal.write_evaluation(_evaluate(3))
    journal.close()
    assert _read_steps(tmp_path) == ([1, 2, 3] if end == "sync" else [1, 2])


def test_of_a_run_folder_that_is_gone_nothing_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    journal = JsonLinesWriter(folder, first_step=1)
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match="No such file"):
        journal.sync()
    journal.close()
    assert not folder.exists()


@pytest.mark.parametrize("name", ["checkpoints", "ledger", "trace", ".launch"])
def test_a_file_where_a_folder_belongs_is_refused(name: str, tmp_path: Path) -> None:
    assert not refuse_run_folder(tmp_path)
    (tmp_path / name).write_text("")
    (reason,) = refuse_run_folder(tmp_path)
    assert reason.field == str(tmp_path / name)


def test_a_folder_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    (reason,) = refuse_run_folder(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")))
    assert "UTF-8" in reason.rule


@pytest.mark.parametrize("name", [".saving-1", ".purged-step-00000001", "step-00000007"])
def test_strays_where_a_save_puts_its_folders_are_taken_away(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("a file")
    (tmp_path / ".saving-2").symlink_to(tmp_path.parent)
    shard = LocalShard(name="w", global_shape=(2,), offsets=(0,), tensor=torch.ones(2))
    comm = single_process()
    path = save_checkpoint(tmp_path, step=7, shards=[shard], extra={}, keep=2, comm=comm)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [path.name]
    assert path.is_dir()


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"{}"])
def test_a_plan_that_was_damaged_while_the_run_went_on_is_written_again(
    content: bytes | None, tmp_path: Path
) -> None:
    plan = tiny_jobs.build_plan(tiny_jobs.build_workload(DataSpec()), "mbs1", world_size=1)
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    _restore_plan(plan, tmp_path)
    assert read_json(Plan, path) == plan
    other = replace(plan, fingerprint="other")
    _restore_plan(other, tmp_path)
    assert read_json(Plan, path) == plan


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_given_plan_goes_on_where_that_of_the_folder_is_damaged(
    is_damaged: bool, tmp_path: Path
) -> None:
    plan = tiny_jobs.build_plan(
        tiny_jobs.build_workload(tiny_jobs.write_corpus(tmp_path, documents=3)),
        "mbs1",
        world_size=1,
    )
    write_json(tmp_path / "given.json", plan)
    folder = tmp_path / "run"
    write_json(folder / "plan.json", replace(plan, model=tiny_jobs.DENSE))
    (folder / "steps.jsonl").touch()
    request = TrainingRequest(path=tmp_path / "given.json", run_dir=folder)
    if not is_damaged:
        with pytest.raises(BadInput, match="another model"):
            _read_given_plan(request, None)
        return
    (folder / "plan.json").write_bytes(b"\xff")
    assert _read_given_plan(request, None) == plan


def test_a_limit_on_the_size_of_files_is_not_told_as_a_full_disk(tmp_path: Path) -> None:
    refusal = str(write_error(tmp_path, OSError(errno.EFBIG, "File too large"), 100))
    assert "limit on the size of files" in refusal
    assert "ulimit -f" in refusal


def test_the_limit_of_open_files_is_raised_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (24, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: limits.update(now=new))
    raise_file_limit(2)
    soft, hard = limits["now"]
    assert 24 < soft <= hard == 4096
    limits["now"] = (24, 24)
    with pytest.raises(BadInput, match="ulimit -n"):
        raise_file_limit(2)


def test_time_in_which_the_watch_did_not_run_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watched = watch.WatchedTime()
    for _ in range(50):
        now[0] += 0.2
        watched.look()
    assert watched.since(100.0) == pytest.approx(10.0)
    now[0] += 3600.0  # the machine sleeps
    watched.look()
    assert watched.since(100.0) == pytest.approx(12.0)
    now[0] += 5.0
    assert watched.since(now[0] - 5.0) == pytest.approx(5.0)
    for _ in range(100):  # a machine on which each look takes long: silence still adds up
        now[0] += 4.0
        watched.look()
    assert watched.since(3715.0) > 190.0


def test_all_start_again_where_going_on_in_place_fails_at_the_same_step(tmp_path: Path) -> None:
    plan = tiny_jobs.build_plan(tiny_jobs.build_workload(DataSpec()), "ep2,mbs1", world_size=2)
    supervisor = _Supervisor(plan, tmp_path, None)
    dead = RankFailure(rank=1, step=7, time_s=0.0, kind=FailureKind.CAUSE, event="was killed")
    hangs = replace(dead, rank=0, event="hangs", cause=IncidentKind.HANG)
    assert supervisor.keeps_ranks(dead)
    assert not supervisor.keeps_ranks(hangs)
    assert supervisor.prepare_restart(hangs)
    assert not supervisor.prepare_restart(hangs)  # now the step has failed twice


def test_with_all_streams_closed_no_file_gets_their_numbers(tmp_path: Path) -> None:
    told = tmp_path / "told"
    code = (
        "import os, sys, moewright.cli.main as main\n"
        "def note(arguments, build_app):\n"
        f"    open({str(told)!r}, 'w').write(str(os.open('/dev/null', os.O_RDONLY)))\n"
        "    return 0\n"
        "main._run_verb = note\n"
        "main.run()\n"
    )
    process = subprocess.Popen(
        ["bash", "-c", f'exec {sys.executable} -c "$1" <&- >&- 2>&-', "bash", code]
    )
    assert process.wait(60) in (0, -signal.SIGPIPE)
    assert int(told.read_text()) >= 3
