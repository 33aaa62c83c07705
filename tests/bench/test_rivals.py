"""Other planners are asked what they can express, and scored like ours on the same runs."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.rivals.__main__ import LLM_ANALYSIS, RivalAnswers, _page_parts
from benchmarks.rivals.answers import answer_cases
from benchmarks.rivals.cases import build_case
from benchmarks.rivals.predict_llm_analysis import refuse as refuse_llm_analysis
from benchmarks.rivals.predict_simumax import refuse as refuse_simumax
from moewright.calibration.measured_row import MeasuredRow
from moewright.calibration.table import read_table

DATA = Path(__file__).parents[1] / "published" / "data"


@pytest.fixture(scope="module")
def rows() -> dict[str, MeasuredRow]:
    table = read_table(DATA / "measurements.csv")
    return {row.id: row for row in table.rows if row.speed}


@pytest.mark.thorough
def test_a_case_is_plain_data_with_the_figures_of_the_source(rows):
    case = json.loads(json.dumps(build_case(rows["seed000-001"])))
    assert (case["seq_len"], case["global_batch"], case["precision"]) == (4096, 2048, "bf16")
    assert case["model"]["layers"] == 94
    assert case["model"]["expert_ffn"] == 1536
    layout = case["layout"]
    assert (layout["tp"], layout["pp"], layout["vpp"], layout["ep"]) == (2, 32, 3, 8)
    assert layout["recompute"] == ["layernorm", "moe_act"]
    assert case["device"]["bf16_flops"] == pytest.approx(989e12, rel=1e-3)  # NVIDIA's datasheet


@pytest.mark.thorough
@pytest.mark.parametrize("refuse", [refuse_simumax, refuse_llm_analysis])
def test_a_rival_refuses_what_it_cannot_express(rows, refuse):
    case = build_case(rows["seed000-001"])
    assert refuse(case) == ""
    assert "8 bits" in refuse({**case, "precision": "fp8"})
    assert "capacities" in refuse(build_case(rows["seed000-013"]))
    offloads = {**case["layout"], "offload": ["moe_act"]}
    assert refuse({**case, "layout": offloads}) == "offload"


def test_a_failure_of_a_rival_is_its_answer(monkeypatch, capsys):
    def predict(case):
        if case["id"] == "b":
            raise ValueError("no such schedule")
        return 2.0

    cases = "".join(json.dumps({"id": name}) + "\n" for name in "abc")
    monkeypatch.setattr("sys.stdin", io.StringIO(cases))
    answer_cases(lambda case: "offload" if case["id"] == "c" else "", predict)
    first, second, third = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["step_s"] == 2.0
    assert second["refused"] == "fails: ValueError: no such schedule"
    assert third == {"id": "c", "refused": "offload"}


@pytest.mark.thorough
def test_a_rival_and_ours_are_scored_on_the_same_runs(rows):
    """Twice the seconds of every run is half its speed; a level of other publishers mends that."""
    measured = {id_: row for id_, row in rows.items() if row.model.moe}
    few = list(measured.values())[:40]
    step_s = {
        row.id: 2
        * row.workload.global_batch
        * row.workload.seq_len
        / row.layout.world_size
        / row.speed.tokens_per_s_per_device
        for row in few
    }
    answers = RivalAnswers(
        rival=replace(LLM_ANALYSIS, name="a rival"),
        commit="abc of a day",
        step_s=step_s,
        cpu_s=[0.5],
        refusals={},
    )
    own = {row.id: 1.1 * row.speed.tokens_per_s_per_device for row in measured.values()}
    page = "".join(_page_parts(list(measured.values()), own, [answers]))
    runs = "MoE that a rival expresses"
    assert (
        f"| {runs} | a rival, as it comes | 40 | 50.0 % | 50.0 % | 1.00 | 0.0 % | 0.5 s |" in page
    )
    assert f"| {runs} | a rival, with a level | 40 | 0.0 % | 0.0 % | 1.00 | 0.0 % |  |" in page
    assert f"| {runs} | moewright | 40 | 10.0 % | 10.0 % | 1.00 | 0.0 % |  |" in page
