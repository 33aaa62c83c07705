"""Trials on a real Slurm of two nodes: `make slurm`.

Tunes our engine over two nodes, then the stand-in for Megatron-LM's trainer, of which every point's
step is planted; on the way a job is cancelled by another hand, a node is lost, the nodes are
occupied, and the tuning itself is killed. The rows of a sweep run as one job array. Prints what
held and ends with 1 where something did not. `python tests/slurm/run.py sweep` runs a part.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from launching.test_launched_trials import PRETRAIN, TUNE_ALL, write_job
from moewright.codec import read_json, read_toml, write_toml
from moewright.intake.hf import build_config
from moewright.spec.hardware import Hardware
from moewright.spec.plan import Plan
from moewright.tuning.journal import read_journal
from moewright.tuning.sweep import read_trials
from slurm.cluster import Cluster, enter_namespace
from tiny_jobs import MODEL, write_corpus

TESTS = Path(__file__).parents[1]
POINTS = 216  # of TUNE_ALL
_LONG_S = 600.0


class Report:
    """What was tried, and whether it held."""

    def __init__(self) -> None:
        self.failed = 0

    def check(self, holds: bool, text: str) -> None:
        print(f"{'held  ' if holds else 'FAILED'} {text}", flush=True)
        self.failed += not holds


def tune(
    cluster: Cluster, job: Path, out: Path, *options: str, **environment: str
) -> subprocess.Popen[bytes]:
    """Start a tuning whose trials are jobs of the cluster."""
    words = (sys.executable, "-m", "moewright", "tune", str(job), "--out", str(out))
    words += ("--launcher", "slurm", "--sbatch", "--time=10", *options)
    log = out.with_suffix(".log").open("ab")
    return subprocess.Popen(
        words, env=cluster.environment | environment, stdout=log, stderr=log, start_new_session=True
    )


def write_engine_job(folder: Path) -> Path:
    """Write a job of our engine with one rank on each of two nodes."""
    data = write_corpus(folder)
    machine = read_toml(Hardware, TESTS / "golden" / "machine_2cpu.toml")
    fabric = replace(machine.fabric, devices_per_node=1, domain_size=1)
    write_toml(folder / "machine.toml", replace(machine, fabric=fabric))
    config = build_config(replace(MODEL, max_position=64))
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "engine.toml"
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
nproc = 2
hardware = "machine.toml"
seq_len = 32
global_batch = 16
steps = 100
precision = "fp32"
"""
    )
    return path


def wait_until(is_true: Callable[[], bool], seconds: float = _LONG_S) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if is_true():
            return True
        time.sleep(0.2)
    return False


def prove_engine(cluster: Cluster, folder: Path, report: Report) -> None:
    """Tune our engine over two nodes."""
    out = folder / "engine"
    began = time.monotonic()
    code = tune(cluster, write_engine_job(folder), out).wait(_LONG_S)
    trials = read_journal(out) if (out / "journal.jsonl").exists() else ()
    took = f"{len(trials)} trials in {time.monotonic() - began:.0f} s"
    report.check(code == 0, f"our engine is tuned over two nodes: {took}")
    scripts = [path.read_text() for path in out.glob("trials/*/trial.sh")]
    report.check(
        bool(scripts) and all("#SBATCH --nodes=2" in text for text in scripts),
        "each of its trials was a job of two nodes",
    )
    report.check(
        all(check.passed for trial in trials for check in trial.outcome.checks),
        "its validation passed: loss, memory, ledgers of both ranks",
    )


def prove_megatron(cluster: Cluster, folder: Path, report: Report) -> None:
    """Tune a planted cost surface, with everything in its way that a cluster has."""
    out = folder / "megatron"
    options = ("--trainer", "megatron", "--megatron", str(PRETRAIN), "--at-once", "2")
    job = write_job(folder, TUNE_ALL)
    pace = {"STAND_IN_STEP_S": "0.1"}

    # The nodes are taken by somebody else.
    wrap = ("--exclusive", "--nodes=2", "--wrap", "sleep 600", "--output=/dev/null")
    blocker = cluster.call("sbatch", "--parsable", *wrap).strip()
    cluster.wait(lambda: cluster.jobs().get(blocker) == "RUNNING", "a job that holds the nodes")
    tuning = tune(cluster, job, out, *options, **pace)
    waited = wait_until(lambda: "PENDING" in cluster.jobs().values())
    report.check(waited and tuning.poll() is None, "trials wait while others hold the nodes")
    cluster.call("scancel", blocker)

    # A job is cancelled by another hand.
    def running() -> list[str]:
        return [number for number, state in cluster.jobs().items() if state == "RUNNING"]

    wait_until(lambda: bool(running()) and running() != [blocker])
    victim = next(iter(running()), "")
    cluster.call("scancel", victim)
    lines = len(read_journal(out)) if (out / "journal.jsonl").exists() else 0
    grows = wait_until(lambda: len(read_journal(out)) > lines)
    report.check(
        grows and tuning.poll() is None, f"job {victim} was cancelled, its trial ran again"
    )

    # The tuning is killed while a trial runs; the same command goes on.
    wait_until(lambda: bool(running()))
    os.killpg(tuning.pid, signal.SIGKILL)
    tuning.wait()
    before = read_journal(out)
    alive = job_numbers(cluster)
    tuning = tune(cluster, job, out, *options, **pace)
    wait_until(lambda: len(read_journal(out)) > len(before))
    report.check(read_journal(out)[: len(before)] == before, "a killed tuning keeps its journal")
    first = job_numbers(cluster) - alive
    report.check(len(first) <= 2, "and takes up the jobs that it left in the queue")

    # A node goes away while a trial runs, and comes back.
    wait_until(lambda: bool(running()))
    lines = len(read_journal(out))
    cluster.kill_node("node2")
    cluster.call("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=lost")
    time.sleep(3)
    cluster.start_node("node2")
    cluster.call("scontrol", "update", "NodeName=node2", "State=RESUME")
    grows = wait_until(lambda: len(read_journal(out)) > lines)
    report.check(grows, "a node was lost under a trial, which ran again")
    code = tuning.wait(_LONG_S)
    report.check(code == 0, "the tuning ended by itself")

    journal = read_journal(out)
    layout = read_json(Plan, out / "plan.json").layout
    report.check(
        (layout.tp, layout.pp, layout.ep, layout.mbs) == (1, 1, 8, 4),
        f"it found the planted best: {read_json(Plan, out / 'plan.json').layout}",
    )
    text = f"in {len(journal)} runs of {POINTS} points: {len(journal) / POINTS:.0%}"
    report.check(len(journal) <= POINTS / 5, text)
    arrays = list(out.glob("trials/array-*/trial.sh"))
    report.check(bool(arrays), f"{len(arrays)} times trials were the tasks of a job array")
    check_no_job_left(cluster, report)


def prove_sweep(cluster: Cluster, folder: Path, report: Report) -> None:
    """Run the rows of a sweep as one job array, of which a waiting task is cancelled."""
    out = folder / "sweep"
    path = write_sweep(folder)
    words = (sys.executable, "-m", "moewright", "bench", "sweep", str(path), "--out", str(out))
    words += ("--launcher", "slurm", "--sbatch", "--time=10", "--trainer", "megatron")
    words += ("--megatron", str(PRETRAIN), "--at-once", "2")
    environment = cluster.environment | {"STAND_IN_STEP_S": "0.3"}
    before = job_numbers(cluster)
    with out.with_suffix(".log").open("ab") as log:
        sweep = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
        wait_until(lambda: "RUNNING" in cluster.jobs().values())
        tasks = cluster.jobs()
        report.check(len(job_numbers(cluster) - before) == 1, f"six rows are one array: {tasks}")
        number = max(job_numbers(cluster) - before)
        cluster.call("scancel", f"{number}_5")
        most = 0
        while sweep.poll() is None:
            most = max(most, list(cluster.jobs().values()).count("RUNNING"))
            time.sleep(0.2)
    report.check(most == 2, f"{most} of them ran at the same time")
    report.check(sweep.returncode == 0, "the sweep ended by itself")
    trials = read_trials(out)
    times = [f"{trial.layout} {trial.time_s or 0:.2f} s" for trial in trials]
    report.check(len(trials) == 6 and not any(trial.failed for trial in trials), "; ".join(times))
    tasks = cluster.jobs()
    again = job_numbers(cluster) - before - {number}
    report.check(len(again) == 1, f"task 5 was cancelled while it waited, and ran as job {again}")
    check_no_job_left(cluster, report)


def job_numbers(cluster: Cluster) -> set[str]:
    """Return the numbers of the jobs that the controller knows; an array has one."""
    return {number.partition("_")[0] for number in cluster.jobs()}


def check_no_job_left(cluster: Cluster, report: Report) -> None:
    left = [state for state in cluster.jobs().values() if state in ("RUNNING", "PENDING")]
    report.check(not left, "no job is left in the queue")


def write_sweep(folder: Path) -> Path:
    """Write a sweep of six layouts, of which one fills a node."""
    layouts = ("ep8,mbs1", "ep8,mbs2", "ep4,mbs1", "ep4,mbs2", "tp2,ep8,mbs1", "tp2,ep8,mbs2")
    rows = "".join(f'[[table.row]]\nname = "{text}"\nlayout = "{text}"\n' for text in layouts)
    path = folder / "sweep.toml"
    path.write_text(
        'title = "six layouts"\n[job]\nmodel = "Qwen3-30B-A3B"\non = "8xH100"\n'
        f'seq_len = 4096\nglobal_batch = 64\n[[table]]\ntitle = "layouts"\n{rows}'
    )
    return path


PARTS = {"sweep": prove_sweep, "megatron": prove_megatron, "engine": prove_engine}


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="moewright-slurm-"))
    cluster = Cluster(folder / "slurm")
    report = Report()
    try:
        cluster.start()
        print(cluster.call("sinfo", "--version").strip(), cluster.node_states(), flush=True)
        for name in sys.argv[1:] or PARTS:
            PARTS[name](cluster, folder, report)
    finally:
        cluster.stop()
        if report.failed:
            print(f"what it left: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if report.failed else 0


if __name__ == "__main__":
    enter_namespace()
    sys.exit(main())
