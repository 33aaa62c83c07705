"""What pages show of a trace: parts of every rank, and the longest step over time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diagnosis.sample_traces import COMPUTE_MS, EXPOSED_EP_MS, MS, kineto
from moewright.api.diagnosing import diagnose, view_diagnosis
from moewright.cli.main import main
from moewright.view.page import render_page


def write_ranks(folder: Path) -> Path:
    """Write two ranks of four steps, of which the third takes 30 ms longer on rank 1."""
    for rank in range(2):
        path = kineto(folder / f"rank{rank}.json", steps=4, rank=rank)
        trace = json.loads(path.read_text())
        for event in trace["traceEvents"]:
            step = int((event["ts"] - 1e6 + MS) // (100 * MS))
            if rank and step > 2:
                event["ts"] += 30 * MS
            if rank and step == 2 and event["ts"] == 1e6 + 285 * MS:
                event["dur"] += 30 * MS  # the last kernel of the step
        path.write_text(json.dumps(trace))
    return folder


def test_the_parts_of_a_rank_are_its_step_and_the_longest_step_is_covered_once(
    tmp_path: Path,
) -> None:
    diagnosis = diagnose(write_ranks(tmp_path))
    trace = view_diagnosis(diagnosis).trace
    assert trace is not None
    assert trace.ranks == (0, 1)
    for index, breakdown in enumerate(diagnosis.breakdowns):
        total_s = sum(part.seconds[index] for part in trace.parts)
        assert total_s == pytest.approx(breakdown.step_s, rel=1e-3)
    worst = trace.worst
    assert worst is not None
    assert (worst.rank, worst.number) == (1, 3)
    assert worst.length_s == pytest.approx(0.130)
    assert worst.start_s == pytest.approx(0.201)  # the first mark begins 1 ms before the device
    seconds = {lane.part: sum(length for _, length in lane.spans) for lane in worst.lanes}
    assert seconds["compute"] == pytest.approx((COMPUTE_MS + 30) / 1e3)
    assert seconds["exposed EP"] == pytest.approx(EXPOSED_EP_MS / 1e3)
    assert sum(seconds.values()) == pytest.approx(worst.length_s)
    assert worst.lanes[0].spans[0] == pytest.approx((0.0, 0.020))


def test_the_page_of_a_trace_holds_ranks_and_the_longest_step(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    write_ranks(folder)
    page = tmp_path / "page.html"
    assert main(["diagnose", str(folder), "--html", str(page), "--json", str(tmp_path / "j")]) == 0
    text = page.read_text()
    records = json.loads(text.partition('id="records">')[2].partition("</script>")[0])
    assert [part["part"] for part in records[0]["trace"]["parts"]][:2] == ["compute", "exposed EP"]
    assert records[0]["waterfall"]["drops"]
    assert json.loads((tmp_path / "j").read_text())["worst_step"]["number"] == 3


def test_exposed_communication_is_told_with_its_times(tmp_path: Path) -> None:
    diagnosis = diagnose(kineto(tmp_path / "t.json", steps=3))
    (exchange,) = (finding for finding in diagnosis.findings if "EP communication" in finding.title)
    assert "10 ms exposed from 0.021000 s on (measured)" in exchange.evidence


def test_a_page_without_a_trace_has_no_panels_of_ranks(tmp_path: Path) -> None:
    log = tmp_path / "t.log"
    line = " iteration {}/ 100 | elapsed time per iteration (ms): 900.0 | global batch size: 8 |\n"
    log.write_text("".join(line.format(number) for number in range(1, 9)))
    view = view_diagnosis(diagnose(log))
    assert view.trace is None
    assert '"trace":null' in render_page((view,), "log")
