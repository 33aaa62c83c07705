"""`moewright tune` makes a validated plan from a job file by real runs, which it takes up again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moewright.api.tuning import read_tuning_request, run_trial
from moewright.cli.main import main
from moewright.codec import read_json
from moewright.engine.model.transformer import Transformer
from moewright.engine.observe.display import STEP_LINES
from moewright.intake.hf import build_config
from moewright.spec.plan import Plan
from moewright.tuning.journal import Contract, Label, read_journal
from moewright.tuning.predictions import StepPredictor
from moewright.tuning.trial_runner import trial_workload
from moewright.tuning.trials import TrialLength, TrialRequest
from tiny_jobs import MODEL, write_corpus

pytestmark = pytest.mark.spawn

MACHINE = Path(__file__).parent.parent / "golden" / "machine_2cpu.toml"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    data = write_corpus(folder)
    (folder / "config.json").write_text(json.dumps(build_config(replace(MODEL, max_position=64))))
    path = folder / "job.toml"
    path.write_text(
        f"""
[model]
config = "config.json"
[data]
train = "{data.train}"
heldout = "{data.heldout}"
[layout]
mbs = 1
[tune]
mbs = [1, 8]
[train]
hardware = "{MACHINE}"
seq_len = 32
global_batch = 8
steps = 100
precision = "fp32"
"""
    )
    return path


@pytest.mark.thorough
def test_a_job_is_tuned_by_runs_and_goes_on_from_its_journal(
    job: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    # The budget bounds the time of the test; the assertions hold for any.
    command = ["tune", str(job), "--out", str(out), "--budget-minutes", "0.1"]
    assert main(command) == 0
    output = capfd.readouterr().out
    assert "fit:" in output
    assert "loss" not in output.split("fit:")[0]  # the output of trials lies in their folders
    trials = read_journal(out)
    assert trials[0].outcome.step_s > 0
    plan = read_json(Plan, out / "plan.json")
    report = (out / "report.md").read_text()
    assert plan.workload.steps == 100
    assert read_json(Contract, out / "contract.json").label is Label.TRAINING
    validated = [trial for trial in trials if trial.length is TrialLength.VALIDATE][-1]
    assert validated.point.layout == plan.layout
    assert validated.outcome.steps >= 50
    assert {check.name for check in validated.outcome.checks} == {
        "length",
        "loss",
        "skipped steps",
        "memory",
        "what ran",
    }
    assert all(check.passed for check in validated.outcome.checks), validated.outcome.checks
    assert not list(out.glob("trials/*/checkpoints"))
    for heading in ("## Contract", "## Fit", "## Validate"):
        assert heading in report

    assert main(command) == 0  # every trial has been made: nothing runs
    assert read_journal(out) == trials
    assert (out / "report.md").read_text() == report
    assert main([*command, "--set", "train.seq_len=16"]) == 2
    assert "another contract: its seq_len is 32, not 16" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", "memory"),
        ("broke", "other"),
    ],
)
def test_a_rank_without_memory_is_distinguished_from_one_that_breaks(
    error: str, failure: str, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(error)

    request = read_tuning_request(job, on="", predict=False, overrides=(), tell=print)
    plan = StepPredictor(request.space).build_plan(
        request.space.start, trial_workload(request.space.workload, TrialLength.SCREEN)
    )
    monkeypatch.setattr(Transformer, "forward", fail)
    outcome = run_trial(
        tmp_path,
        STEP_LINES,
        TrialRequest(point=request.space.start, length=TrialLength.SCREEN, repeat=1, plan=plan),
    )
    assert outcome.failure == failure
    assert error in outcome.said
    assert outcome.step_s == 0


def test_predictions_run_nothing_and_say_so(
    job: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", str(job), "--predict", "--on", "8xH100", "--out", str(tmp_path)]) == 0
    report = (tmp_path / "report.md").read_text()
    assert "figures are | predicted" in report
    output = capfd.readouterr().out
    assert "measured" not in report + output
    assert output.count("\n") <= 40
    answer = output[output.index("Winner: ") :].splitlines()
    assert answer[1].startswith("As text: ")
    assert "less time a step (predicted)" in answer[2]
    assert answer[3].endswith("nothing ran: every figure is predicted.")
    assert str(tmp_path / "plan.json") in answer[-1]
    assert not (tmp_path / "journal.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--on", "8xH100"], "--predict"),
        (["--budget-minutes", "-1"], "--budget-minutes"),
        (["--set", "tune.mbs=3"], "tune.mbs"),
        (["--set", "tune.mbs=[0]"], "at least 1"),
        (["--set", "tune.dp=[2]"], "derived"),
        (["--set", "tune.bucket_elements=[0]"], "1..1099511627776"),
        (["--set", "tune.mps=[1]"], "nearest legal value: mbs"),
        (["--set", "layout.mbs=3"], "layout.mbs"),
        (["--set", "data.train=nowhere"], "nowhere"),
        (["--on", "8xH1000", "--predict"], "--on"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    job: Path, options: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", str(job), "--out", str(tmp_path / "out"), *options]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "out").exists()
