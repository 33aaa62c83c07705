"""The report in a real browser: from file://, without a network, at two widths."""

import shutil
from pathlib import Path

import pytest

from moewright.diagnosis.compare_ledgers import compare_ledgers
from moewright.diagnosis.engine_run import diagnose_run
from moewright.report.report_page import write_report
from sample_run import counted_ledger, ledger, record

pytestmark = pytest.mark.browser

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
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


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with sync_api.sync_playwright() as player:
        opened = player.chromium.launch(executable_path=CHROMIUM, args=list(ARGS))
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    run = record()
    path = tmp_path_factory.mktemp("run") / "report.html"
    write_report(
        run,
        [compare_ledgers(ledger(rank), counted_ledger(rank)) for rank in (0, 1)],
        diagnose_run(run),
        path,
    )
    return path


@pytest.fixture(params=[1280, 420], ids=["desktop", "phone"])
def page(browser, report, request):
    context = browser.new_context(viewport={"width": request.param, "height": 900}, offline=True)
    requests = []
    complaints = []
    page = context.new_page()
    page.on("request", lambda request_: requests.append(request_.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(report.as_uri())
    yield page
    assert requests == [report.as_uri()]
    assert complaints == []
    context.close()


def test_every_section_is_seen_and_nothing_sticks_out_sideways(page):
    for name in SECTIONS:
        box = page.locator(f"#{name}").bounding_box()
        assert box["height"] > 60, name
    width = page.evaluate("document.documentElement.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_key_numbers_stand_in_the_first_screen(page):
    for text in ("3.319", "1,363", "66.8%", "338 MiB", "exact"):
        tile = page.locator("#verdict .tile b", has_text=text)
        assert tile.is_visible()
        assert tile.bounding_box()["y"] < 900


def test_curves_span_their_plots(page):
    plots = page.locator(".canvas")
    assert plots.count() == 2
    for index in range(2):
        canvas = plots.nth(index).bounding_box()
        for curve in plots.nth(index).locator(".curve").all():
            box = curve.bounding_box()
            assert box["width"] > 0.5 * canvas["width"]
            assert box["height"] > 0.05 * canvas["height"]
            assert box["y"] >= canvas["y"] - 2
            assert box["y"] + box["height"] <= canvas["y"] + canvas["height"] + 2
    assert page.locator("#loss .dots").count() == 1
    assert page.locator("#loss .leveltext", has_text="unigram entropy 6.214").is_visible()
    assert page.locator("#loss .xlabel").inner_text() == "step"
    assert page.locator("#loss .ylabel").inner_text() == "loss, nats per token"


def test_heat_cells_fill_their_rows_and_differ_in_colour(page):
    experts, ranks = page.locator("#experts .heat").all()
    cells = experts.locator(".cells i")
    assert cells.count() == 6 * 16
    assert ranks.locator(".cells i").count() == 6 * 2
    box = cells.nth(37).bounding_box()
    assert box["width"] > 8
    assert box["height"] > 12
    colours = page.evaluate(
        "[...document.querySelectorAll('#experts .cells i')]"
        ".map(i => getComputedStyle(i).backgroundColor)"
    )
    assert len(set(colours)) >= 5


def test_bars_are_as_long_as_their_values(page):
    lengths = [
        bar.bounding_box()["width"]
        for bar in page.locator("#time .stack").first.locator(".bar").all()
    ]
    assert len(lengths) == 2
    # Predicted phases over measured ones.
    assert lengths[0] / lengths[1] == pytest.approx(1.395 / 1.5065, rel=0.02)
    totals = [bar.bounding_box()["width"] for bar in page.locator("#memory .bar").all()]
    assert len(totals) == 4
    # By component and by module the bytes have the same sum.
    assert totals[0] == pytest.approx(totals[2], abs=1)
    assert totals[1] == pytest.approx(totals[3], abs=1)


def test_pointing_at_a_curve_reads_its_values(page):
    canvas = page.locator("#loss .canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 39 / 59, box["y"] + box["height"] / 2)
    text = page.locator("#loss .readout").inner_text()
    assert text.startswith("step 40: training loss 3.3")
    assert "held-out loss 3.5" in text


def test_ledger_marks_are_text_and_colour(page):
    mark = page.locator("#ledger .state", has_text="equal").first
    assert mark.is_visible()
    colour = page.evaluate("getComputedStyle(document.querySelector('#ledger .good .state')).color")
    assert colour == "rgb(36, 113, 63)"
