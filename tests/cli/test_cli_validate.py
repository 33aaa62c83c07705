"""`moewright validate` on a small table: report, JSON, calibration on other rows, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moewright.cli.main import main

HEADER = (
    "id,source,model,hardware,num_gpus,precision,seq_len,gbs,mbs,tp,pp,ep,recompute_granularity,"
    "cuda_graph,force_balance,time_per_iter_s,peak_memory_gb,peak_memory_kind,oom"
)
ROWS = (
    "a-1,page,Qwen3-30B-A3B,H100,16,bf16,4096,64,1,1,1,16,full,none,true,2.4,,,false",
    "a-2,page,Qwen3-30B-A3B,H100,16,bf16,4096,64,1,1,1,8,full,none,true,2.2,40.5,GiB allocated,"
    "false",
    "a-3,page,Qwen3-30B-A3B,H100,16,bf16,4096,64,1,1,2,8,full,none,true,2.6,,,false",
    "a-4,page,Qwen3-30B-A3B,H100,16,bf16,4096,64,4,1,1,16,none,none,true,,,,true",
    "b-1,page,Qwen3-30B-A3B,H800,16,bf16,4096,64,2,1,1,8,full,none,true,2.5,,,false",
    "b-2,page,nobody/Model-1B,H800,16,bf16,4096,64,2,1,1,8,full,none,true,2.5,,,false",
)
KEYS = {
    "id",
    "measured_tokens_per_s_per_gpu",
    "predicted_tokens_per_s_per_gpu",
    "measured_peak_memory_gb",
    "predicted_peak_memory_gb",
    "verdict",
    "measured_oom",
    "publisher",
    "stated",
    "interval_80",
    "interval_95",
    "peak_interval_80",
    "peak_interval_95",
    "calibration",
    "skipped",
}


def write_table(folder: Path, *rows: str) -> str:
    path = folder / f"runs{len(rows)}.csv"
    path.write_text("\n".join((HEADER, *rows)) + "\n", encoding="utf-8")
    return str(path)


def validate(folder: Path, *arguments: str) -> dict[str, dict[str, object]]:
    """Run the verb and return the rows of its JSON report, by id."""
    out = folder / "report.json"
    assert main(("validate", *arguments, "--json", str(out))) == 0
    report = json.loads(out.read_text(encoding="utf-8"))
    assert set(report) == {"summary", "rows"}
    return {row["id"]: row for row in report["rows"]}


def test_report_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = validate(tmp_path, write_table(tmp_path, *ROWS))
    assert list(rows) == ["a-1", "a-2", "a-3", "a-4", "b-1", "b-2"]
    assert all(set(row) == KEYS for row in rows.values())
    assert rows["a-1"]["measured_tokens_per_s_per_gpu"] == pytest.approx(64 * 4096 / 2.4 / 16)
    assert rows["a-2"]["measured_peak_memory_gb"] == 40.5
    assert (rows["a-1"]["verdict"], rows["a-4"]["verdict"]) == ("fits", "oom")
    assert rows["a-4"]["measured_oom"] is True
    assert rows["b-2"]["verdict"] is None
    assert "is neither a known model" in str(rows["b-2"]["skipped"])
    shown = capsys.readouterr().out
    assert "6 rows: 5 scored, 1 skipped" in shown
    assert "all that decides is stated" in shown


def test_constants_of_other_rows(tmp_path: Path) -> None:
    """Runs twice as slow as the first table's teach constants that predict slower steps."""
    slow = tuple(
        row.replace(",2.4,", ",6.0,").replace(",2.2,", ",5.5,").replace(",2.6,", ",6.5,")
        for row in ROWS[:3]
    )
    table = write_table(tmp_path, *ROWS)
    plain = validate(tmp_path, table)
    fitted = validate(tmp_path, table, "--fit-on", write_table(tmp_path, *slow))
    plain_rate = float(str(plain["b-1"]["predicted_tokens_per_s_per_gpu"]))
    fitted_rate = float(str(fitted["b-1"]["predicted_tokens_per_s_per_gpu"]))
    assert fitted_rate < 0.9 * plain_rate
    assert str(fitted["b-1"]["calibration"]).startswith("constants fitted on 3 rows of runs3.csv")


def test_leaving_out_a_group(tmp_path: Path) -> None:
    rows = validate(tmp_path, write_table(tmp_path, *ROWS), "--leave-out", "id")
    assert str(rows["a-1"]["calibration"]).startswith("constants fitted on 3 rows, without id=a-1")
    assert str(rows["a-4"]["calibration"]).startswith("constants fitted on 4 rows, without id=a-4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--leave-out", "colour"), "--leave-out=colour: is no column of the table"),
        (("--leave-out", "model"), "leaves 0 timed rows for a-1; a fit needs 3"),
        (
            ("--leave-out", "id", "--fit-on", "x.csv"),
            "so does --leave-out; nearest legal value: one of the two",
        ),
        (("--fit-on", "none.csv"), "table=none.csv: No such file"),
    ],
)
def test_refusals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(("validate", write_table(tmp_path, *ROWS), *arguments)) == 2
    assert message in capsys.readouterr().err
