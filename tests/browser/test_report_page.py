"""The report of a run in a real browser: from file://, without a network, at three widths."""

import pytest

from diagnosis.sample_traces import kineto
from moewright.api.diagnosing import diagnose, view_diagnosis
from moewright.diagnosis.compare_ledgers import compare_ledgers
from moewright.diagnosis.engine_run import build_run_waterfall, diagnose_run, find_critical_rank
from moewright.view.page import render_page
from moewright.view.run_view import RunsView, build_run_view
from sample_run import counted_ledger, ledger, record
from studio_pages import find_faults

pytestmark = [pytest.mark.browser, pytest.mark.waits]

SECTIONS = (
    *("verdict", "findings", "loss", "experts", "time", "memory", "plan", "ledger"),
    *("constants", "sessions"),
)


def shown(name):
    run = record()
    return build_run_view(
        run,
        [compare_ledgers(ledger(rank), counted_ledger(rank)) for rank in (0, 1)],
        diagnose_run(run),
        build_run_waterfall(run, find_critical_rank(run), run.plan),
        name=name,
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "report.html"
    path.write_text(render_page((shown("<b>quick</b>"),), "report"))
    return path


def test_sections_come_in_their_order_and_nothing_sticks_out(report, open_page):
    page = open_page(report.as_uri())
    names = page.locator("main > section").evaluate_all("all => all.map(node => node.id)")
    assert names == list(SECTIONS)
    for name in SECTIONS[:7]:
        assert page.locator(f"#{name}").bounding_box()["height"] > 60, name
    assert page.locator("main b", has_text="<b>quick</b>").count() == 0
    assert page.locator("p", has_text="<b>quick</b>").count() == 1
    assert find_faults(page) == []


def test_key_numbers_stand_in_the_first_screen(report, open_page):
    page = open_page(report.as_uri())
    for text in ("3.319", "1,363", "66.8%", "338 MiB", "exact"):
        tile = page.locator("#verdict .tile b", has_text=text)
        assert tile.bounding_box()["y"] < 900


def test_constants_and_ledger_are_folded_and_open(report, open_page):
    page = open_page(report.as_uri())
    assert page.locator("#constants table").is_hidden()
    page.locator("#constants summary").click()
    assert page.locator("#constants table").is_visible()
    page.locator("#ledger summary").first.click()
    mark = page.locator("#ledger .state", has_text="equal").first
    assert mark.is_visible()
    assert page.evaluate(
        "getComputedStyle(document.querySelector('#ledger .good.state')).color"
    ) == ("rgb(25, 105, 63)")


def test_the_read_out_names_the_evaluations_own_step(report, open_page):
    page = open_page(report.as_uri())
    dot = page.locator("#loss svg.plot circle").first
    dot.hover()
    first = record().evals[0]
    text = page.locator("#loss .chart").inner_text()
    assert f"held-out, step {first.step}: {first.heldout_loss:.3f}" in text
    legend = page.locator("#loss .legend button", has_text="training")
    legend.click()
    assert legend.get_attribute("aria-pressed") == "false"


def test_runs_lie_over_each_other(open_page, tmp_path):
    runs = (shown("first"), shown("second"))
    path = tmp_path / "both.html"
    path.write_text(render_page((RunsView(runs=runs),), "runs"))
    page = open_page(path.as_uri())
    names = page.locator(".legend").first.locator("button").all_inner_texts()
    kinds = ("training", "held-out")
    assert names == [f"{name}: {kind}" for name in ("first", "second") for kind in kinds]


def test_a_trace_is_drawn_by_rank_and_over_time(tmp_path, open_page):
    for rank in range(2):
        kineto(tmp_path / f"rank{rank}.json", rank=rank)
    path = tmp_path / "diagnosis.html"
    path.write_text(render_page((view_diagnosis(diagnose(tmp_path)),), "trace"))
    page = open_page(path.as_uri())
    names = page.locator("main > section").evaluate_all("all => all.map(node => node.id)")
    assert names == ["findings", "ranks", "worst-step"]
    assert page.locator("#rank-heat .cells i").count() == 2 * page.locator(".heatrow").count()
    drawn = """() => {
        const canvas = document.querySelector("#worst-step canvas");
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        return new Set(new Uint32Array(data.buffer)).size;
    }"""
    assert page.evaluate(drawn) > 4  # lanes of several colours, and their names
    assert find_faults(page) == []
