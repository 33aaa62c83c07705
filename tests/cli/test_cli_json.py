"""`--json -` gives standard output to JSON alone, and what was written is read back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_cli_dryrun import TINY
from test_cli_export import SCRIPT

import sample_run
from moewright.cli.exit_codes import DOES_NOT_FIT, PIPE_CLOSED
from moewright.cli.main import main
from moewright.codec import format_record, write_json
from moewright.spec.record import format_json
from selection import thorough

ROOT = Path(__file__).resolve().parents[2]
JOB = ("Qwen3-30B-A3B", "--on", "8xH100", "--global-batch", "64")
LAYOUT = ("--layout", "ep8,zero3,recompute=full")
LOG = (
    " [2026-03-01 12:00:{n:02d}] iteration {n:8d}/     500 | consumed samples: {n:12d} | "
    "elapsed time per iteration (ms): 22420.0 | throughput per GPU (TFLOP/s/GPU): 216.4 | "
    "global batch size:  2048 | loss scale: 1.0 | number of skipped iterations:   0 | "
    "number of nan iterations:   0 |\n"
)
SWEEP = """
title = "t"
job = { model = "Qwen3-30B-A3B", on = "64xH800", seq_len = 4096, global_batch = 256 }
memory = ["ep8"]
table = [{ title = "t", row = [
  { name = "published", layout = "ep8", tokens = 1.0 },
  { name = "illegal", layout = "ep3" },
] }]
"""

Answer = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write the files that the verbs read."""
    table = ROOT / "tests/published/data/measured_steps.csv"
    lines = table.read_text().splitlines(keepends=True)
    (tmp_path / "runs.csv").write_text("".join(lines[:13]))
    (tmp_path / "job.toml").write_text(TINY)
    (tmp_path / "run.sh").write_text(SCRIPT)
    (tmp_path / "run.log").write_text("".join(LOG.format(n=n) for n in range(1, 20)))
    (tmp_path / "sweep.toml").write_text(SWEEP)
    record = sample_run.record()
    write_json(tmp_path / "run/plan.json", record.plan)
    parts = (*record.sessions, *record.steps, *record.evals)
    (tmp_path / "run/steps.jsonl").write_text("".join(map(format_record, parts)))
    return tmp_path


@pytest.fixture
def answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Answer:
    """Return a call of a verb in that folder, which returns its JSON and what it shows."""
    monkeypatch.chdir(folder)

    def run(*arguments: str, code: int = 0) -> tuple[Any, str]:
        assert main((*arguments, "--json", "-")) == code
        done = capsys.readouterr()
        return json.loads(done.out), done.err

    return run


@pytest.mark.parametrize(
    ("arguments", "keys", "shown"),
    [
        (("plan", *JOB, "--top", "1"), {"model", "layout", "estimate", "fingerprint"}, "verdict"),
        (("estimate", *JOB, *LAYOUT), {"model", "layout", "estimate", "fingerprint"}, "verdict"),
        (("validate", "runs.csv"), {"summary", "rows"}, "rows: "),
        thorough(
            ("fit", "runs.csv", "--on", "H800", "--out", "fitted.toml"),
            {"hardware", "constants", "errors_before", "errors_after", "left_out", "next_run"},
            "wrote fitted.toml",
        ),
        (
            ("bench", "sweep", "sweep.toml", "--predict", "--out", "out"),
            {"spec", "tables", "memory"},
            "wrote out/table.md",
        ),
        (("dryrun", "job.toml", "--rank", "3"), {"ledger", "states_bytes"}, "rank 3 of 1024"),
        (("diagnose", "run"), {"findings", "waterfall", "job", "source"}, "WALL"),
        (("diagnose", "run/plan.json"), {"findings", "waterfall", "job", "source"}, "WALL"),
        (("diagnose", "run.log"), {"findings", "hint", "log"}, "the log alone does not tell"),
        (("report", "run/plan.json"), {"run", "findings", "comparisons"}, "run/report.html"),
        (("export", "--from-flags", "run.sh", "--on", "H200"), {"model", "layout"}, "verdict"),
        (("models",), {"models"}, "Qwen3-30B-A3B"),
        (("hardware",), {"devices"}, "H800 SXM"),
        (("hardware", "8xH100"), {"device", "fabric", "count"}, "H100 SXM"),
    ],
)
def test_json_has_standard_output_alone(
    arguments: tuple[str, ...], keys: set[str], shown: str, answer: Answer
) -> None:
    data, tables = answer(*arguments)
    assert keys <= set(data)
    assert shown in tables


def test_the_hint_of_a_diagnosis_is_printed_last(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(("diagnose", str(folder / "run.log"))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "iterations" in lines[0]
    assert lines[-1].startswith("the log alone does not tell")


def test_a_file_holds_what_standard_output_has(
    folder: Path, answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    data, _ = answer("estimate", *JOB, *LAYOUT)
    assert main(("estimate", *JOB, *LAYOUT, "--json", "plan.json")) == 0
    assert capsys.readouterr().out.endswith("wrote plan.json\n")
    assert json.loads((folder / "plan.json").read_text()) == data


@pytest.mark.turns
@pytest.mark.parametrize(
    "arguments",
    [("estimate", *JOB, *LAYOUT), ("plan", *JOB, "--top", "1"), ("validate", "runs.csv")],
    ids=lambda arguments: arguments[0],
)
def test_the_files_of_an_answer_are_written_although_its_reader_stops_early(
    arguments: tuple[str, ...], folder: Path
) -> None:
    """As `head` does: it closes the pipe, and the program ends in silence."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = (
        sys.executable,
        "-m",
        "moewright",
        *arguments,
        "--json",
        "a.json",
        "--html",
        "a.html",
    )
    done = subprocess.run(
        command, cwd=folder, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (PIPE_CLOSED, "")
    assert json.loads((folder / "a.json").read_text())
    assert "<html" in (folder / "a.html").read_text()


def test_a_refusal_leaves_standard_output_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("plan", "Qwen3-235B-A22B", "--on", "1xH100", "--json", "-")) == 2
    assert capsys.readouterr().out == ""


def test_what_is_printed_meanwhile_leaves_standard_output_to_json() -> None:
    program = (
        "import os, subprocess\n"
        "from pathlib import Path\n"
        "from moewright.cli.answers import reserve_stdout\n"
        "with reserve_stdout(Path('-')):\n"
        "    print('engine')\n"
        "    subprocess.run(['echo', 'rank'], check=True)\n"
        "print('json')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "json\n"
    assert set(done.stderr.split()) == {"engine", "rank"}


def test_numbers_that_json_has_not_are_null() -> None:
    assert json.loads(format_json({"loss": float("nan"), "rates": [float("inf"), 1.5]})) == {
        "loss": None,
        "rates": [None, 1.5],
    }


@pytest.mark.thorough
def test_a_plan_is_estimated_again_in_another_layout(folder: Path, answer: Answer) -> None:
    plan, _ = answer("plan", *JOB, "--top", "1")
    (folder / "plan.json").write_text(json.dumps(plan))
    again, _ = answer("estimate", "plan.json")
    assert again["estimate"] == plan["estimate"]
    other, _ = answer("estimate", "plan.json", "--layout", "tp2,ep8,zero3,recompute=full")
    assert other["layout"]["tp"] == 2
    assert other["workload"] == plan["workload"]
    longer, _ = answer("estimate", "plan.json", "--seq-len", "2k")
    assert longer["workload"]["seq_len"] == 2000


def test_a_layout_that_does_not_fit_is_exit_code_3(answer: Answer) -> None:
    job = ("Qwen3-235B-A22B", "--on", "8xH100")
    plan, _ = answer("estimate", *job, "--layout", "ep8", code=DOES_NOT_FIT)
    assert plan["estimate"]["verdict"] == "oom"
    assert DOES_NOT_FIT == 3


def test_help_documents_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["estimate", "--help"])
    page = " ".join(capsys.readouterr().out.split())
    assert "3 the layout does not fit" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", *JOB, "--json", "--top", "3"), '--json=--top: needs a path, or "-"'),
        (("plan", *JOB, "--json"), "--json"),
        (
            ("export", "--from-flags", "run.sh", "--to", "megatron", "--json", "-"),
            "standard output takes the launch file",
        ),
        (("export", "plan.json", "--to", "megatron", "--json", "-"), "is a plan already"),
    ],
)
def test_json_that_cannot_be_written_is_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    done = capsys.readouterr()
    assert message in done.err
    assert done.err.count("\n") == 1
    assert done.out == ""


def test_a_pipe_that_closes_early_is_no_traceback() -> None:
    program = "from moewright.cli.main import run; run()"
    line = f"{sys.executable} -c '{program}' models --json - | head -c 10"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.stdout == '{\n "models'
    assert "Traceback" not in done.stderr
