"""Trials as jobs of a queue: what becomes of lost, full, slow, failed and forgotten ones."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import moewright as mw
import stand_in_slurm
from moewright.cli.main import main
from moewright.codec import read_json
from moewright.launching.launched_trials import LaunchedTrials, TrialStoppedError, launch_trials
from moewright.launching.trial_jobs import LocalQueue, SlurmQueue
from moewright.spec.errors import BadInput
from moewright.spec.options import Launcher, TrialPlace, TrialTrainer
from moewright.spec.plan import Plan
from moewright.tuning.journal import read_journal
from moewright.tuning.trial_runner import trial_workload
from moewright.tuning.trials import WARM_UP_STEPS, TrialFailure, TrialLength, TrialOutcome

PRETRAIN = Path(__file__).parents[1] / "stand_in_pretrain_gpt.py"
POLL_S = 0.05
MEGATRON = TrialPlace(
    launcher=Launcher.SLURM, trainer=TrialTrainer.MEGATRON, megatron=PRETRAIN, at_once=2
)


@pytest.fixture(scope="module")
def base() -> Plan:
    return mw.estimate("Qwen3-30B-A3B", "ep8,mbs2", on="8xH100", global_batch=64)


def trial_plan(base: Plan, length: TrialLength = TrialLength.SCREEN, **layout: object) -> Plan:
    return replace(
        base,
        workload=trial_workload(base.workload, length),
        layout=replace(base.layout, **layout),  # type: ignore[arg-type]
    )


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "slurm"
    commands = stand_in_slurm.install(folder)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(SlurmQueue, "poll_s", POLL_S)
    return folder


def run(base: Plan, folder: Path) -> tuple[LaunchedTrials, TrialOutcome]:
    trials = LaunchedTrials(folder, MEGATRON, SlurmQueue(print))
    return trials, trials.run(trial_plan(base), "t", TrialLength.SCREEN)


def test_a_log_gives_the_step_the_memory_and_the_walls_of_a_trial(
    base: Plan, tmp_path: Path, slurm: Path
) -> None:
    _, outcome = run(base, tmp_path)
    assert outcome.failure is TrialFailure.NONE
    assert outcome.step_s == pytest.approx(0.9 * 1.18, rel=0.02)  # as planted for ep8, mbs2
    assert outcome.steps == 8
    assert outcome.peak_bytes == pytest.approx((12 + 7.5 + 28) * 2**30, rel=1e-6)
    assert outcome.findings
    assert outcome.waterfall.measured_s == outcome.step_s
    script = (tmp_path / "trials" / "t" / "trial.sh").read_text()
    assert "#SBATCH --gpus-per-node=8" in script
    assert f"--train-iters {WARM_UP_STEPS + 8}" in script


def test_memory_and_crashes_are_told_apart(
    base: Plan, tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = LaunchedTrials(tmp_path, MEGATRON, SlurmQueue(print))
    outcome = trials.run(trial_plan(base, mbs=8), "oom", TrialLength.SCREEN)
    assert outcome.failure is TrialFailure.MEMORY
    assert "Tried to allocate 2.50 GiB" in outcome.said
    monkeypatch.setenv("STAND_IN_CRASH", "--micro-batch-size=2")
    outcome = trials.run(trial_plan(base), "crash", TrialLength.SCREEN)
    assert outcome.failure is TrialFailure.OTHER
    assert "illegal memory access" in outcome.said


@pytest.mark.parametrize(
    ("state", "failure"),
    [("OUT_OF_MEMORY", TrialFailure.MEMORY), ("TIMEOUT", TrialFailure.OTHER)],
)
def test_limits_of_the_scheduler_are_failures_of_the_trial(
    state: str, failure: TrialFailure, base: Plan, tmp_path: Path, slurm: Path
) -> None:
    (slurm / "fate").write_text(state)
    _, outcome = run(base, tmp_path)
    assert outcome.failure is failure
    assert len(stand_in_slurm.states(slurm)) == 1


def test_a_job_that_is_lost_is_submitted_again(base: Plan, tmp_path: Path, slurm: Path) -> None:
    (slurm / "fate").write_text("NODE_FAIL")
    _, outcome = run(base, tmp_path)
    assert outcome.failure is TrialFailure.NONE
    first, *rest = stand_in_slurm.states(slurm).values()
    assert first == "NODE_FAIL"
    assert len(rest) == 1


def test_a_full_queue_is_waited_for(base: Plan, tmp_path: Path, slurm: Path) -> None:
    (slurm / "limit").write_text("0")
    told: list[str] = []

    def make_room(line: str) -> None:
        told.append(line)
        (slurm / "limit").unlink()

    trials = LaunchedTrials(tmp_path, MEGATRON, SlurmQueue(make_room))
    outcome = trials.run(trial_plan(base), "t", TrialLength.SCREEN)
    assert outcome.failure is TrialFailure.NONE
    assert len(told) == 1
    assert "QOSMaxSubmitJobPerUserLimit" in told[0]


def test_a_trial_far_behind_the_incumbent_is_ended_early(
    base: Plan, tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_STEP_S", "0.1")
    trials = LaunchedTrials(tmp_path, MEGATRON, SlurmQueue(print))
    plan = trial_plan(base, TrialLength.VALIDATE)
    outcome = trials.run(plan, "t", TrialLength.VALIDATE, 0.6)
    assert outcome.failure is TrialFailure.NONE
    assert 3 <= outcome.steps < 50
    assert outcome.step_s == pytest.approx(0.9 * 1.18, rel=0.02)
    assert list(stand_in_slurm.states(slurm).values()) == ["CANCELLED by 0"]


def test_a_program_that_was_killed_takes_up_its_jobs(
    base: Plan, tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_STEP_S", "0.02")
    killed = LaunchedTrials(tmp_path, MEGATRON, SlurmQueue(print))
    killed.submit_ahead([(trial_plan(base), name) for name in ("t", "u", "v")])
    assert list(stand_in_slurm.states(slurm)) == ["100_0", "100_1", "100_2"]
    script = next((tmp_path / "trials").glob("array-*/trial.sh")).read_text()
    assert "#SBATCH --array=0-2%2\n" in script  # as many as may run at once
    del killed
    trials, outcome = run(base, tmp_path)
    assert outcome.failure is TrialFailure.NONE
    assert trials.run(trial_plan(base), "u", TrialLength.SCREEN).steps == 8
    assert len(stand_in_slurm.states(slurm)) == 3


def test_a_task_of_an_array_is_submitted_again_alone(
    base: Plan, tmp_path: Path, slurm: Path
) -> None:
    (slurm / "fate").write_text("NODE_FAIL")  # of the first
    trials = LaunchedTrials(tmp_path, MEGATRON, SlurmQueue(print))
    trials.submit_ahead([(trial_plan(base), "t"), (trial_plan(base, mbs=1), "u")])
    assert trials.run(trial_plan(base), "t", TrialLength.SCREEN).steps == 8
    slower = trials.run(trial_plan(base, mbs=1), "u", TrialLength.SCREEN)
    assert slower.step_s == pytest.approx(0.9 * 1.45, rel=0.02)
    assert list(stand_in_slurm.states(slurm)) == ["100_0", "100_1", "102"]


@pytest.mark.parametrize(("file", "content"), [("no_arrays", ""), ("limit", "2")])
def test_trials_are_jobs_of_their_own_where_no_array_is_taken(
    file: str, content: str, base: Plan, tmp_path: Path, slurm: Path
) -> None:
    (slurm / file).write_text(content)
    trials = LaunchedTrials(tmp_path, MEGATRON, SlurmQueue(print))
    trials.submit_ahead([(trial_plan(base), name) for name in ("t", "u", "v")])
    assert list(stand_in_slurm.states(slurm)) == ["100", "101"]  # as many as may run at once
    assert trials.run(trial_plan(base), "u", TrialLength.SCREEN).steps == 8


def test_trials_that_ask_for_other_nodes_are_no_tasks_of_the_array(
    base: Plan, tmp_path: Path, slurm: Path
) -> None:
    two_nodes = mw.estimate("Qwen3-30B-A3B", "ep8,mbs2", on="16xH100", global_batch=64)
    names = [(trial_plan(base), "t"), (trial_plan(two_nodes), "u"), (trial_plan(base), "v")]
    trials = LaunchedTrials(tmp_path, MEGATRON, SlurmQueue(print))
    trials.submit_ahead(names)
    assert list(stand_in_slurm.states(slurm)) == ["100_0", "100_1"]
    assert trials.run(trial_plan(two_nodes), "u", TrialLength.SCREEN).steps == 8
    assert "--nodes=2" in (tmp_path / "trials" / "u" / "trial.sh").read_text()


def test_an_interrupt_cancels_what_is_in_the_queue(
    base: Plan, tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_STEP_S", "5")

    def interrupt() -> None:
        while list(stand_in_slurm.states(slurm).values()) != ["RUNNING"] * 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()

    def run_two() -> None:
        with launch_trials(tmp_path, MEGATRON, print) as trials:
            trials.submit_ahead([(trial_plan(base), "ahead")])
            trials.run(trial_plan(base), "t", TrialLength.SCREEN)

    with pytest.raises(TrialStoppedError):
        run_two()
    assert list(stand_in_slurm.states(slurm).values()) == ["CANCELLED by 0"] * 2


def test_what_the_scheduler_refuses_names_its_options(
    base: Plan, tmp_path: Path, slurm: Path
) -> None:
    refusal = "#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpu' >&2; exit 1\n"
    (slurm / "bin" / "sbatch").write_text(refusal)
    with pytest.raises(BadInput, match="invalid partition specified: gpu"):
        run(base, tmp_path)


def living_processes(group: int) -> list[str]:
    """Return the processes of a group; a machine may keep those that ended, as zombies."""
    states = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            state, _, pgrp, *_ = path.read_text().rpartition(")")[2].split()
            if int(pgrp) == group and state != "Z":
                states.append(state)
    return states


def test_a_local_trial_leaves_no_process_behind(
    base: Plan, tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_STEP_S", "0.05")
    place = replace(MEGATRON, launcher=Launcher.LOCAL, at_once=1)
    trials = LaunchedTrials(tmp_path, place, LocalQueue())
    plan = trial_plan(base, TrialLength.VALIDATE)
    outcome = trials.run(plan, "t", TrialLength.VALIDATE, hopeless_s=0.6)
    assert 3 <= outcome.steps < 50
    job = json.loads((tmp_path / "trials" / "t" / "job.json").read_text())["job"]
    assert not living_processes(int(job.partition(":")[0]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--trainer", "megatron"], "--megatron is needed"),
        (["--launcher", "torchrun", "--at-once", "2"], "would slow each other"),
        (["--launcher", "slurm", "--at-once", "0"], "must be in 1..64"),
        (["--sbatch", "--time 5"], "needs --launcher slurm"),
        (["--megatron-args", "--bf16"], "needs --trainer megatron"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, TUNE_FEW)
    assert main(["tune", str(job), "--out", str(tmp_path / "out"), *options]) == 2
    assert said in capsys.readouterr().err.replace("--megatron: is", "--megatron is")
    assert not (tmp_path / "out").exists()


TUNE_FEW = """
ep = [8, 16]
mbs = [1, 4]
"""
TUNE_ALL = """
tp = [1, 2, 4]
pp = [1, 2]
ep = [4, 8, 16]
mbs = [1, 2, 4, 8]
recompute = ["none", "moe_act+layernorm", "full"]
"""


def write_job(folder: Path, tune: str) -> Path:
    """Write a job of 16 H100 that starts at tp4, ep16, full recompute."""
    path = folder / "job.toml"
    path.write_text(
        f"""
[model]
architectures = ["Qwen3MoeForCausalLM"]
model_type = "qwen3_moe"
hidden_size = 2048
num_hidden_layers = 16
num_attention_heads = 16
num_key_value_heads = 4
head_dim = 128
attention_bias = false
num_experts = 64
num_experts_per_tok = 8
moe_intermediate_size = 1024
intermediate_size = 8192
decoder_sparse_step = 1
mlp_only_layers = []
norm_topk_prob = true
hidden_act = "silu"
rms_norm_eps = 1e-6
rope_theta = 10000.0
max_position_embeddings = 4096
vocab_size = 65536
tie_word_embeddings = false
initializer_range = 0.02
[layout]
mbs = 1
ep = 16
tp = 4
recompute = "full"
[tune]{tune}
[train]
nproc = 16
hardware = "H100"
seq_len = 4096
global_batch = 256
steps = 200
precision = "bf16"
"""
    )
    return path


@pytest.mark.parametrize(
    ("tune", "points"),
    [(TUNE_FEW, 0), pytest.param(TUNE_ALL, 216, marks=pytest.mark.thorough)],
)
def test_the_planted_best_is_found_in_a_fifth_of_the_runs(
    tune: str, points: int, tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    command = ["tune", str(write_job(tmp_path, tune)), "--out", str(out)]
    command += ["--launcher", "slurm", "--trainer", "megatron", "--megatron", str(PRETRAIN)]
    command += ["--at-once", "2"]
    assert main(command) == 0
    layout = read_json(Plan, out / "plan.json").layout
    assert (layout.ep, layout.mbs) == (8, 4)
    journal = read_journal(out)
    if points:
        assert (layout.tp, layout.pp) == (1, 1)
        assert len(journal) <= points / 5
    # The same command takes everything from the journal.
    jobs = len(stand_in_slurm.states(slurm))
    assert main(command) == 0
    assert read_journal(out) == journal
    assert len(stand_in_slurm.states(slurm)) == jobs


def test_the_rows_of_a_sweep_are_jobs(
    tmp_path: Path,
    slurm: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sweep = tmp_path / "sweep.toml"
    rows = "".join(
        f'[[table.row]]\nname = "mbs{mbs}"\nlayout = "ep8,mbs{mbs}"\n' for mbs in (1, 2, 8)
    )
    sweep.write_text(
        'title = "micro-batches"\n[job]\nmodel = "Qwen3-30B-A3B"\non = "8xH100"\n'
        f'seq_len = 4096\nglobal_batch = 64\n[[table]]\ntitle = "mbs"\n{rows}'
    )
    command = ["bench", "sweep", str(sweep), "--out", str(tmp_path / "out"), "--json", "-"]
    command += ["--launcher", "slurm", "--trainer", "megatron", "--megatron", str(PRETRAIN)]
    assert main([*command, "--at-once", "3"]) == 0
    answer = json.loads(capsys.readouterr().out)
    first, second, failed = answer["tables"]["mbs"]
    assert first["trial"]["time_s"] == pytest.approx(0.9 * 1.45, rel=0.02)
    assert second["trial"]["tokens"] == pytest.approx(64 * 4096 / 8 / (0.9 * 1.18), rel=0.02)
    assert failed["trial"]["failed"].startswith("memory: ")
    assert list(stand_in_slurm.states(slurm)) == ["100_0", "100_1", "100_2"]
