"""Counts on the command line, as people write them: 4096, 128k, 4Ki."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moewright.cli.main import main
from moewright.intake.job import read_job

RECIPE = Path(__file__).resolve().parents[2] / "recipes/quickstart_2cpu_bf16.toml"
JOB = ("Qwen3-30B-A3B", "--on", "8xH100", "--layout", "ep8,zero3,recompute=full")


@pytest.mark.parametrize(
    ("seq_len", "global_batch", "expected"),
    [("4096", "64", (4096, 64)), ("4Ki", "1.024k", (4096, 1024)), ("2_048", "1k", (2048, 1000))],
)
def test_a_count_is_read(
    seq_len: str,
    global_batch: str,
    expected: tuple[int, int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--seq-len", seq_len, "--global-batch", global_batch, "--json", "-")
    assert main(("estimate", *JOB, *options)) == 0
    workload = json.loads(capsys.readouterr().out)["workload"]
    assert (workload["seq_len"], workload["global_batch"]) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seq-len", "128q"), "--seq-len=128q: must be a whole number such as 4096, 128k"),
        (("--seq-len", "0.5"), "--seq-len=0.5: must be a whole number"),
        (("--seq-len", "-1"), "--seq-len=-1: must be in 1.."),
        (("--seq-len", "15T"), "--seq-len=15000000000000: must be in 1.."),
        (("--global-batch", "many"), "--global-batch=many: must be a whole number"),
    ],
)
def test_what_is_no_count_is_refused(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(("estimate", *JOB, *options)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_overrides_of_a_job_take_counts() -> None:
    changes = ("train.steps=10k", "train.seq_len=1Ki", "checkpoint.every_steps=1k")
    job = read_job(RECIPE, changes)
    assert (job.workload.steps, job.workload.seq_len) == (10_000, 1024)
    assert job.workload.checkpoint.every_steps == 1000


def test_an_override_that_is_no_count_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("train", str(RECIPE), "--set", "train.steps=10q")) == 2
    assert "--set train.steps=10q: must be a whole number" in capsys.readouterr().err
