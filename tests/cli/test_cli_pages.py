"""Answers as one page, and answers that come first: at most forty lines without -v."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import sample_run
from moewright.cli.main import main
from moewright.report import console
from moewright.view.page import render_page
from sample_run import write_run

SMALL = ["OLMoE-1B-7B-0924", "--on", "4xH100", "--global-batch", "64"]


def read_kinds(page: Path) -> list[str]:
    """Return the kinds of the records that a page holds."""
    text = page.read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"""(?:src|href)\s*=\s*["']https?:""", text)
    records = text.partition('id="records">')[2].partition("</script>")[0]
    return [record["kind"] for record in json.loads(records)]


def test_plans_and_estimates_are_pages_too(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["plan", *SMALL, "--html", str(page)]) == 0
    assert read_kinds(page) == ["SearchView", "PlanView"]
    assert main(["estimate", *SMALL, "--layout", "ep4", "--html", str(page)]) in (0, 3)
    assert read_kinds(page) == ["PlanView", "TimetableView"]
    job = [SMALL[0], "--on", "1xL40S", "--seq-len", "16k", "--global-batch", "4"]
    assert main(["plan", *job, "--layout", "mbs4,recompute=none", "--html", str(page)]) == 2
    assert read_kinds(page) == ["Misfit"]


@pytest.mark.thorough
def test_a_diagnosis_and_a_score_are_pages_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", sample_run.record())
    page = tmp_path / "page.html"
    assert main(["diagnose", str(tmp_path / "run"), "--html", str(page)]) == 0
    assert read_kinds(page) == ["DiagnosisView"]
    capsys.readouterr()
    table = "tests/published/data/measured_steps.csv"
    assert main(["validate", table, "--html", str(page)]) == 0
    assert read_kinds(page) == ["Document"]
    assert len(capsys.readouterr().out.splitlines()) <= 40


def test_a_plan_takes_forty_lines_of_eighty_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layouts are long; what changes beside the first is told by the keys that differ."""
    monkeypatch.setattr(console, "PIPED_WIDTH", 80)
    assert main(["plan", "Qwen3-30B-A3B", "--on", "8xH100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(-(-len(line) // 80) for line in lines) <= 40
    layouts = [line.strip() for line in lines if line.startswith("    ")]
    assert all(line.count("'") in (0, 2) for line in layouts)  # lines end between keys
    better = next(line for line in lines if line.startswith("With 1 GiB more memory"))
    assert "dispatcher" not in better


@pytest.mark.turns
@pytest.mark.parametrize(
    "layout", ["tp2,ep8,pp8,mbs1,recompute=select", "tp2,ep8,pp32,vpp3,mbs1,recompute=select"]
)
def test_an_estimate_takes_forty_lines_and_v_has_the_rest(
    layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["Qwen3-235B-A22B", "--on", "256xH800", "--global-batch", "2048", "--layout", layout]
    assert main(["estimate", *job]) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) <= 40
    assert "smaller parts" in short
    assert main(["estimate", *job, "-v"]) == 0
    whole = capsys.readouterr().out
    assert "datasheet" in whole
    assert len(whole.splitlines()) > len(short.splitlines()) + 20


def test_a_diagnosis_says_the_wall_and_its_best_fixes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", sample_run.record())
    assert main(["diagnose", str(tmp_path / "run")]) == 0
    short = capsys.readouterr().out.splitlines()
    assert len(short) <= 40
    assert sum(line.startswith("WALL: ") for line in short) == 1
    assert main(["diagnose", str(tmp_path / "run"), "-v"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > len(short)


def test_a_page_without_records_is_a_page() -> None:
    assert "<main" in render_page((), "empty")
