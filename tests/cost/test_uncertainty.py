"""Intervals, probabilities of fitting, and the evidence behind an estimate."""

from __future__ import annotations

from dataclasses import replace
from math import log, sqrt

import pytest

from docs.tools import measured_choices
from moewright.codec import parse_layout
from moewright.cost.estimate import estimate
from moewright.cost.evidence import (
    MeasuredChoices,
    fit_probability,
    judge_evidence,
    list_choices,
    needed_margin,
    peak_interval,
    step_interval,
)
from moewright.intake import catalogue
from moewright.rules.job import Job
from moewright.spec.plan import EvidenceGrade
from moewright.spec.workload import Workload

RUNS = MeasuredChoices(
    runs=((frozenset({"part=A", "tp", "pp"}), 3), (frozenset({"part=A", "ep"}), 1))
)
WORKLOAD = Workload(seq_len=4096, global_batch=2048)


@pytest.mark.parametrize(
    ("choices", "grade", "runs", "formula"),
    [
        (["part=A", "tp"], EvidenceGrade.MEASURED, 3, ()),
        (["part=A"], EvidenceGrade.MEASURED, 4, ()),
        (["part=A", "tp", "ep"], EvidenceGrade.STACKED, 0, ("tp with ep",)),
        (["part=A", "cp"], EvidenceGrade.FORMULA, 0, ("cp",)),
        (["cp", "tp", "ep"], EvidenceGrade.FORMULA, 0, ("cp", "tp with ep")),
    ],
)
def test_evidence_names_what_no_run_made_alone_or_together(
    choices: list[str], grade: EvidenceGrade, runs: int, formula: tuple[str, ...]
) -> None:
    evidence = RUNS.support(choices)
    assert (evidence.grade, evidence.runs, evidence.formula) == (grade, runs, formula)


def test_pairs_that_stand_in_different_runs_are_combined() -> None:
    pairs = ({"a", "b"}, {"b", "c"}, {"a", "c"})
    runs = MeasuredChoices(runs=tuple((frozenset(pair), 1) for pair in pairs))
    assert runs.support("abc").grade is EvidenceGrade.COMBINED


def test_a_published_job_is_measured_and_one_with_rare_choices_is_wider() -> None:
    model = catalogue.model("Qwen3-235B-A22B")
    hardware = catalogue.hardware("256xH800")
    usual = parse_layout("tp2,ep8,pp8,vpp4,mbs1,recompute=select", world_size=256)
    rare = replace(usual, offload=parse_layout("offload=expert_fc1", world_size=1).offload)
    measured = estimate(model, WORKLOAD, hardware, usual)
    stacked = estimate(model, WORKLOAD, hardware, rare)
    assert measured.evidence.grade is EvidenceGrade.MEASURED
    assert stacked.evidence.formula
    assert stacked.step_sd > measured.step_sd
    assert stacked.step_s * 1.0 < stacked.step_interval_80[1] < stacked.step_interval_95[1]


@pytest.mark.thorough
def test_the_choices_that_ship_are_those_of_the_published_tables() -> None:
    written = measured_choices.FILE.read_text()
    assert written == measured_choices.render_file(), "run `make evidence`"


def test_every_choice_of_a_layout_counts() -> None:
    model = catalogue.model("Qwen3-235B-A22B")
    hardware = catalogue.hardware("256xH800")
    usual = parse_layout("ep8", world_size=256)
    changes = ("tp2", "pp4", "offload=moe_act", "overlap=ep", "graphs=attn", "zero3", "mbs2")
    seen = {list_choices(Job(model=model, workload=WORKLOAD, layout=usual), hardware)}
    for text in changes:
        layout = parse_layout(f"ep8,{text}", world_size=256)
        seen.add(list_choices(Job(model=model, workload=WORKLOAD, layout=layout), hardware))
    assert len(seen) == len(changes) + 1


def test_a_cpu_rests_on_its_own_rates() -> None:
    model = catalogue.model("Qwen3-30B-A3B")
    hardware = catalogue.hardware("2xtests/golden/machine_2cpu.toml")
    layout = parse_layout("", world_size=2)
    evidence = judge_evidence(Job(model=model, workload=WORKLOAD, layout=layout), hardware)
    assert evidence.grade is EvidenceGrade.COMBINED
    assert evidence.measured


def test_intervals_are_the_quantiles_of_their_distributions() -> None:
    low, high = step_interval(10.0, 0.1, 0.95)
    assert log(high / 10) == pytest.approx(0.1 * 2.776445, rel=1e-6)
    assert low * high == pytest.approx(100)
    assert peak_interval(100.0, 10.0, 0.8) == pytest.approx((84.66794, 115.33206), rel=1e-6)
    assert peak_interval(1.0, 10.0, 0.8)[0] == 0


def test_the_needed_margin_is_where_the_probability_is_reached() -> None:
    for probability in (0.5, 0.9, 0.99):
        margin = float(needed_margin(3.0, probability))
        assert fit_probability(margin, 3.0) == pytest.approx(probability, abs=1e-9)
    assert fit_probability(0, 0) == 1
    assert fit_probability(-1, 0) == 0
    assert fit_probability(1.0, sqrt(2)) == pytest.approx(0.7602, abs=1e-4)
