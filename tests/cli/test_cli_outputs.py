"""Verbs that turn a plan or a run into something to read elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moewright.cli.exit_codes import DOES_NOT_FIT
from moewright.cli.main import main

LAYOUT = "tp2,ep8,pp8,vpp4,mbs1"
JOB = ["Qwen3-235B-A22B", "--on", "256xH800", "--global-batch", "2048", "--layout", LAYOUT]


def test_a_plan_becomes_a_megatron_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    assert main(["estimate", *JOB, "--json", str(plan)]) == DOES_NOT_FIT
    capsys.readouterr()
    assert main(["export", str(plan), "--to", "megatron"]) == 0
    script = capsys.readouterr().out
    for flag in (
        "--expert-model-parallel-size 8",
        "--expert-tensor-parallel-size 1",
        "--sequence-parallel",
    ):
        assert flag in script
    assert main(["export", str(plan), "--to", "torchrun", "--job", "job.toml"]) == 0
    assert "--nnodes 32 --nproc-per-node 8" in capsys.readouterr().out
    assert main(["export", str(plan), "--to", "torchrun"]) == 2
    assert "--job" in capsys.readouterr().err


def test_a_timetable_becomes_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    assert main(["estimate", *JOB, "--trace", str(trace)]) == DOES_NOT_FIT
    events = json.loads(trace.read_text())["traceEvents"]
    # 128 micro-batches of 4 chunks on 8 ranks, each once forward and once backward
    assert sum(event["ph"] == "X" for event in events) == 2 * 128 * 4 * 8


def test_an_unknown_target_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "plan.json"), "--to", "megatro"]) == 2
    message = capsys.readouterr().err
    assert "megatron" in message
    assert message.count("\n") == 1


def test_a_measured_load_is_shown_beside_even_routing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Experts 0-15 get 1.5 x their even share in every second layer: 1.25 x in the mean."""
    load = tmp_path / "load.csv"
    even = ",".join(["14"] * 128)
    hot = ",".join(["21"] * 16 + ["13"] * 112)
    load.write_text("\n".join([even, hot] * 47))
    assert main(["estimate", *JOB, "--load", str(load)]) == DOES_NOT_FIT
    output = capsys.readouterr().out
    assert "the busiest of 8 expert ranks gets 1.25 x its even share of tokens" in output
    assert "most in layer 1, 1.5 x" in output
    load.write_text(even)
    assert main(["estimate", *JOB, "--load", str(load)]) == 2
    assert "each of the 94 layers with experts" in capsys.readouterr().err


def test_keys_of_layout_that_no_layout_can_have_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(("plan", "Qwen3-30B-A3B", "--on", "16xH100", "--layout", "tp3")) == 2
    assert "--layout tp=3: tp * cp = 3 must divide" in capsys.readouterr().err


def test_a_budget_by_the_calendar_is_a_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = tmp_path / "budget.json"
    job = ["budget", "OLMoE-1B-7B-0924", "--on", "8xH200", "--tokens", "1T", "--global-batch", "64"]
    operations = ["--devices", "8", "--mtbf", "6", "--grid", "0.4", "--price", "2", "--deadline"]
    assert main([*job, *operations, "1", "--json", str(answer), "-v"]) == 0
    output = capsys.readouterr().out
    (line,) = json.loads(answer.read_text())["lines"]
    calendar = line["calendar"]
    assert f"{calendar['goodput']:.1%}" in output
    assert f"{calendar['cost']:,.0f}" in output
    assert "Failures by part, expected" in output
    assert "No number of devices above ends within 1 days." in output
    assert calendar["mtbf_s"] == 6 * 3600
    assert calendar["cost"] == pytest.approx(2 * calendar["device_hours"])
