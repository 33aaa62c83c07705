import math
import re
from dataclasses import replace

import pytest

from moewright.diagnosis.compare_ledgers import compare_ledgers
from moewright.diagnosis.engine_run import diagnose_run
from moewright.report.report_page import render_report, write_report
from moewright.spec.errors import BadInput
from moewright.spec.ledger import Component
from sample_run import counted_ledger, ledger, record

SECTIONS = (
    "verdict",
    "loss",
    "ledger",
    "experts",
    "time",
    "memory",
    "plan",
    "constants",
    "findings",
    "sessions",
)


def render_page(run, comparisons=None):
    if comparisons is None:
        comparisons = [compare_ledgers(ledger(rank), counted_ledger(rank)) for rank in (0, 1)]
    return render_report(run, comparisons, diagnose_run(run))


def find_sentence(page):
    return re.search(r'<p class="sentence">(.*?)</p>', page, re.S).group(1)


@pytest.fixture(scope="module")
def page():
    return render_page(record())


def test_sections_come_in_their_order(page):
    assert re.findall(r'<section id="(\w+)"', page) == list(SECTIONS)


def test_verdict_says_learning_time_and_ledger_in_one_sentence(page):
    text = find_sentence(page)
    assert text.startswith(
        "The model trained: its held-out loss after 60 steps is 3.319 nats/token, 2.90 below"
    )
    assert "where 1.29 s was predicted, 14.2% too low" in text
    assert text.endswith("the ledger is exact and saved activations are within 3%.")
    assert len(re.findall(r"\.(?!\d)", text)) == 1


def test_page_asks_for_nothing_from_outside(page):
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#)""", page)
    assert not re.search(r"https?://|//cdn|@import|url\(", page)
    assert "default-src 'none'" in page
    assert len(page) < 120_000


def test_every_compared_line_stands_in_the_page(page):
    comparison = compare_ledgers(ledger(0), counted_ledger(0))
    table = page[page.index("<summary>Rank 0") : page.index("<summary>Rank 1")]
    assert table.count('class="state"') == len(comparison.lines)
    assert table.count(">equal<") == sum(
        line.status == "equal" and line.rule != "listed" for line in comparison.lines
    )
    assert "43,486,543,872" in table
    assert ">within 3%<" in table
    assert "saved softmax statistics are fp32 on this device" in table


def test_a_broken_promise_is_marked_in_text_and_colour_and_in_the_verdict():
    short = replace(ledger(1), comm=ledger(1).comm[1:])
    page = render_page(
        record(),
        [compare_ledgers(ledger(0), counted_ledger(0)), compare_ledgers(short, counted_ledger(1))],
    )
    assert '<section id="verdict" class="bad">' in page
    assert "the ledger differs on 1 of 2 ranks" in find_sentence(page)
    (row,) = [
        line for line in page.splitlines() if 'tr class="bad"' in line and "3,305,760" in line
    ]
    assert "only counted" in row
    assert len(re.findall(r"<details open>", page)) == 2  # the rank that fails is opened as well


def test_activations_out_of_bound_leave_the_ledger_exact_but_the_verdict_bad():
    rows = []
    for row in counted_ledger(0).memory:
        factor = 2 if row.component is Component.ACTIVATIONS else 1
        rows.append(replace(row, bytes=factor * row.bytes))
    doubled = replace(counted_ledger(0), memory=tuple(rows))
    page = render_page(record(), [compare_ledgers(ledger(0), doubled)])
    assert "saved activations exceed 3% on 1 of 1 ranks" in find_sentence(page)
    assert "the ledger differs" not in page


def test_no_learning_and_broken_losses_are_stated():
    run = record()
    flat = replace(run, evals=(replace(run.evals[-1], heldout_loss=6.5),))
    assert "The model did not train" in find_sentence(render_page(flat))
    assert "0.29 above the unigram entropy" in find_sentence(render_page(flat))
    broken = replace(run, steps=(*run.steps[:-1], replace(run.steps[-1], loss=math.nan)))
    page = render_page(broken)
    assert "1 steps had a loss that is no number" in find_sentence(page)
    assert "nan" not in re.search(r'<section id="loss">.*?</section>', page, re.S).group(0)


def test_text_of_files_is_escaped(page):
    assert "&lt;vendor&gt; &amp; co" in page
    run = record()
    evil = replace(
        run, plan=replace(run.plan, model=replace(run.plan.model, name="<script>alert(1)</script>"))
    )
    assert "<script>alert" not in render_page(evil)


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
def test_a_run_with_less_in_it_still_has_every_section(bare):
    page = render_page(bare, ())
    assert re.findall(r'<section id="(\w+)"', page) == list(SECTIONS)
    assert "No ledger was counted in this run." in page


def test_a_long_run_stays_small():
    run = record()
    steps = tuple(replace(run.steps[place % 60], step=place + 1) for place in range(20_000))
    page = render_page(replace(run, steps=steps))
    path = re.search(r'data-label="training loss" stroke="#3f6fa6" d="([^"]*)"', page).group(1)
    assert 1000 < path.count("L") < 2000
    assert len(page) < 400_000


def test_the_report_is_written_where_asked(tmp_path):
    write_report(record(), (), (), tmp_path / "run" / "report.html")
    assert (
        (tmp_path / "run" / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput):
        write_report(record(), (), (), tmp_path / "file" / "report.html")
