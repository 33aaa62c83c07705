from __future__ import annotations

from pathlib import Path

import pytest

import sample_run
from moewright.cli.main import main
from sample_run import write_run


def test_a_run_becomes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", sample_run.record())
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "quickstart-moe" in page
    assert capsys.readouterr().out == f"wrote {tmp_path}/run/report.html\n"


def test_the_page_goes_where_it_is_asked(tmp_path: Path) -> None:
    write_run(tmp_path / "run", sample_run.record(steps=3))
    assert (
        main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "deep" / "page.html")]) == 0
    )
    assert (tmp_path / "deep" / "page.html").stat().st_size > 1000
    assert not (tmp_path / "run" / "report.html").exists()
