"""Code 1 of every verb, and files that cannot be read or written, which are code 2.

A full disk behind standard output is what any user can meet with any verb: /dev/full is one. Files
whose reading fails are links to a file of /proc that nobody can read from its beginning.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moewright.api import verifying
from moewright.cli.exit_codes import FAILED, exit_meanings
from moewright.cli.main import main
from moewright.cli.verbs import build_app, list_verbs
from moewright.cost.ledger import predict_rank_ledger
from moewright.rules.job import Job
from moewright.spec.ledger import Ledger

VERBS = dict(list_verbs(build_app()))
UNREADABLE = Path("/proc/self/mem")
# Answers that are there within a second, of verbs that read nothing.
QUICK = (
    "models",
    "hardware 8xH100",
    "completion bash",
    "estimate Qwen3-30B-A3B --on 16xH100 --layout ep8",
)
# What a verb reads, with a file that cannot be in its place.
READS = {
    "plan": "plan x.toml",
    "estimate": "estimate x.toml",
    "budget": "budget x.toml --tokens 1T",
    "design": "design --on 8xH100 --days 1 --like x.json",
    "validate": "validate x.csv",
    "fit": "fit x.csv --on H800 --out fit.toml",
    "train": "train x.toml --out run",
    "verify": "verify x.toml --out run",
    "dryrun": "dryrun x.toml --rank 0",
    "diagnose": "diagnose x.log",
    "watch": "watch x.log --once",
    "compare": "compare x.log",
    "check": "check x.toml x.toml",
    "tune": "tune x.toml --predict --out run",
    "export": "export x.json --to megatron",
    "bench sweep": "bench sweep x.toml --predict --out run",
    "data build": "data build x.jsonl --out data",
    "hardware": "hardware 2xx.toml",
}


@pytest.mark.parametrize("command", [*(f"{verb} --help" for verb in VERBS), *QUICK])
def test_what_no_disk_takes_ends_with_1(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115 - what is left in it can never be written
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        code = main(command.split())
    with suppress(OSError):
        full.close()
    assert code == FAILED
    assert capsys.readouterr().err == "moewright: system: No space left on device\n"


def test_every_verb_says_what_1_means() -> None:
    assert all(FAILED in exit_meanings(verb) for verb in VERBS)


@pytest.mark.parametrize("verb", READS)
def test_a_file_that_cannot_be_read_is_named_with_code_2(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for suffix in ("toml", "json", "jsonl", "csv", "log"):
        os.symlink(UNREADABLE, f"x.{suffix}")
    assert main(READS[verb].split()) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "x." in line
    assert "Input/output error" in line


@pytest.mark.parametrize("command", QUICK)
def test_a_file_that_cannot_be_written_is_named_with_code_2(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if command.startswith("completion"):
        pytest.skip("writes no file")
    (tmp_path / "file").touch()
    assert main([*command.split(), "--json", str(tmp_path / "file" / "answer.json")]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "answer.json: cannot be written" in line


JOB = """
[model]
config = "{model}"
[layout]
ep = 1
[train]
nproc = {nproc}
hardware = "H100"
seq_len = {seq_len}
global_batch = 8
"""


@pytest.mark.slow
def test_a_count_that_is_not_its_prediction_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def predict(job: Job, **rank: Any) -> Ledger:
        ledger = predict_rank_ledger(job, **rank)
        first, *others = ledger.flops
        return replace(ledger, flops=(replace(first, flops=first.flops + 1), *others))

    monkeypatch.setattr(verifying, "predict_rank_ledger", predict)
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(model="recipes/quickstart/config.json", nproc=1, seq_len=32))
    (tmp_path / "recipes").symlink_to(Path(__file__).parents[2] / "recipes")
    assert main(["dryrun", str(path), "--rank", "0"]) == FAILED
    assert "differs" in capsys.readouterr().out


@pytest.mark.slow
def test_tuning_of_what_fits_nowhere_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(model="DeepSeek-V3", nproc=8, seq_len=4096))
    assert main(["tune", str(path), "--predict", "--out", str(tmp_path / "tune")]) == FAILED
    assert "no layout was found valid" in capsys.readouterr().out
