import json
import math
import re
from dataclasses import replace

import pytest

from moewright.api.reporting import RunReport, view_run
from moewright.diagnosis.compare_ledgers import compare_ledgers
from moewright.diagnosis.engine_run import (
    build_run_waterfall,
    diagnose_run,
    find_critical_rank,
)
from moewright.report.document import Tone
from moewright.rules.steady_steps import median_step_s
from moewright.spec.ledger import Component
from moewright.view.page import render_page
from moewright.view.run_view import RunsView, build_run_view, thin_points
from sample_run import counted_ledger, ledger, record


def list_rows(section):
    """Return the cells of all tables of a rank."""
    return [row.cells for part in section.sections if part.table for row in part.table.rows]


def build(run, comparisons=None):
    if comparisons is None:
        comparisons = [compare_ledgers(ledger(rank), counted_ledger(rank)) for rank in (0, 1)]
    findings = diagnose_run(run)
    waterfall = None
    if findings:
        waterfall = build_run_waterfall(run, find_critical_rank(run), run.plan)
    return build_run_view(run, comparisons, findings, waterfall)


@pytest.fixture(scope="module")
def shown():
    return build(record())


def test_the_verdict_says_learning_time_and_ledger_in_one_sentence(shown):
    text = shown.verdict.sentence
    assert text.startswith(
        "The model trained: its held-out loss after 60 steps is 3.319 nats/token, 2.90 below"
    )
    assert "where 1.29 s was predicted, 14.2% too low" in text
    assert text.endswith("the ledger is exact and saved activations are within 3%.")
    assert len(re.findall(r"\.(?!\d)", text)) == 1


def test_what_can_be_done_stands_first_and_what_cannot_stands_apart():
    run = record()
    view = view_run(RunReport(run=run, findings=diagnose_run(run), comparisons=())).diagnosis
    assert view.advice.title == "change: nothing that is planned here makes it faster"
    excluded = []
    for wall in view.walls:
        (body,) = wall.sections
        assert not any("not here" in line for line in body.lines)
        excluded += [part for part in body.sections if "cannot be made" in part.title]
    assert any("not here" in line for part in excluded for line in part.lines)


def test_a_step_takes_one_time_on_the_whole_page(shown):
    step_s = median_step_s(record())
    assert shown.step_s == step_s
    assert sum(item.observed for item in shown.phases) == pytest.approx(step_s, rel=1e-12)
    waterfall = shown.diagnosis.waterfall
    assert waterfall.measured_s == step_s
    drops = sum(drop.seconds for drop in waterfall.drops)
    assert waterfall.ideal_s + drops == pytest.approx(step_s, rel=1e-12)
    titles = [part.title for section in shown.ledgers for part in section.sections]
    assert not any("econds" in title for title in titles)


def test_every_compared_line_but_times_stands_in_the_ledger(shown):
    comparison = compare_ledgers(ledger(0), counted_ledger(0))
    rows = list_rows(shown.ledgers[0])
    assert len(rows) == sum(line.section != "time" for line in comparison.lines)
    assert "43,486,543,872" in {counted for _, _, counted, _, _ in rows}
    notes = shown.ledgers[0].sections[-1].items.items
    assert any("saved softmax statistics are fp32 on this device" in note for note in notes)


def test_a_broken_promise_is_marked_in_the_ledger_and_the_verdict():
    short = replace(ledger(1), comm=ledger(1).comm[1:])
    shown = build(
        record(),
        [compare_ledgers(ledger(0), counted_ledger(0)), compare_ledgers(short, counted_ledger(1))],
    )
    assert shown.verdict.tone == "bad"
    assert "the ledger differs on 1 of 2 ranks" in shown.verdict.sentence
    assert [table.tone for table in shown.ledgers] == ["good", "bad"]
    (mark,) = [
        mark
        for _, _, counted, _, mark in list_rows(shown.ledgers[1])
        if mark.tone == "bad" and counted == "3,305,760"
    ]
    assert mark.text == "only counted"


def test_activations_out_of_bound_leave_the_ledger_exact_but_the_verdict_bad():
    rows = []
    for row in counted_ledger(0).memory:
        factor = 2 if row.component is Component.ACTIVATIONS else 1
        rows.append(replace(row, bytes=factor * row.bytes))
    doubled = replace(counted_ledger(0), memory=tuple(rows))
    sentence = build(record(), [compare_ledgers(ledger(0), doubled)]).verdict.sentence
    assert "saved activations exceed 3% on 1 of 1 ranks" in sentence
    assert "the ledger differs" not in sentence


def test_no_learning_and_broken_losses_are_stated():
    run = record()
    flat = replace(run, evals=(replace(run.evals[-1], heldout_loss=6.5),))
    assert "The model did not train" in build(flat).verdict.sentence
    assert "0.29 above the unigram entropy" in build(flat).verdict.sentence
    rising = replace(run.steps[-1], lr=2 * run.steps[-2].lr)
    short = build(replace(flat, steps=(*run.steps[:-1], rising)))
    assert "Too early to say whether the model trains" in short.verdict.sentence
    assert short.verdict.tone is not Tone.BAD
    broken = replace(run, steps=(*run.steps[:-1], replace(run.steps[-1], loss=math.nan)))
    shown = build(broken)
    assert "1 step had a loss that is no number" in shown.verdict.sentence
    records = render_page((shown,), "run").partition('id="records">')[2].partition("</script>")[0]
    assert json.loads(records)[0]["losses"][-1][1] is None


def test_text_of_files_cannot_end_its_element():
    run = record()
    evil = replace(run, plan=replace(run.plan, model=replace(run.plan.model, name="</script><b>x")))
    page = render_page((build(evil),), "</title><b>x")
    assert "</script><b>" not in page
    assert "</title><b>" not in page
    assert "default-src 'none'" in page


@pytest.mark.parametrize(
    "bare",
    [
        replace(record(), steps=(), evals=(), ledgers=(), sessions=()),
        replace(record(), evals=()),
        replace(record(steps=1), evals=()),
        replace(
            record(), steps=tuple(replace(step, loads=(), phases=()) for step in record().steps)
        ),
    ],
    ids=["nothing ran", "no held-out data", "one step", "dense model"],
)
def test_a_run_with_less_in_it_still_has_a_page(bare):
    shown = build(bare, ())
    assert not shown.is_counted
    page = render_page((shown, RunsView(runs=(shown,))), "report")
    assert page.count(shown.name) >= 2  # in both records


def test_loads_are_over_the_mean_of_their_layer(shown):
    assert len(shown.experts.layers) == 6
    for layer in shown.experts.layers:
        assert sum(layer.experts) / 16 == pytest.approx(1.0)
        assert len(layer.ranks) == 2
        assert layer.hottest[0][0] == 1
    assert len(shown.experts.routers.rows) == 6


def test_a_long_curve_is_thinned_and_keeps_its_spikes():
    run = record()
    steps = tuple(replace(run.steps[place % 60], step=place + 1) for place in range(20_000))
    shown = build(replace(run, steps=steps))
    assert 1000 < len(shown.losses) <= 2000
    points = [(float(place), 0.0) for place in range(9999)]
    points[1234] = (1234.0, 7.0)
    assert (1234.0, 7.0) in thin_points(points, 100)
    assert thin_points(points[:50], 100) == tuple(points[:50])
