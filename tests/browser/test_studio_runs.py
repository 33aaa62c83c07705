"""The studio's page of runs: a folder, a run that goes on, several runs, and a dropped log."""

import os
import re

import pytest

from moewright.codec import format_record
from sample_run import record, step_record, write_run
from studio_pages import find_violations

pytestmark = [pytest.mark.browser, pytest.mark.waits, pytest.mark.usefixtures("screen")]
ITERATION = (
    " [2026-03-01 12:00:{n:02d}] iteration {n:8d}/ 500 | consumed samples: {n:12d} | elapsed time "
    "per iteration (ms): 22420.0 | throughput per GPU (TFLOP/s/GPU): 216.4 | global batch size: "
    "2048 | lm loss: 9.876543E+00 | grad norm: 3.210 |\n"
)


@pytest.fixture
def run(tmp_path):
    """Write a run that ended long ago."""
    folder = tmp_path / "<i>run"
    folder.mkdir()
    write_run(folder, record())
    os.utime(folder / "steps.jsonl", (0, 0))
    return folder


def test_a_run_is_the_page_of_its_report(studio, open_page, run):
    page = open_page(f"{studio}runs?run={run}")
    page.wait_for_selector("#verdict .tile")
    assert page.locator("#verdict .tile b", has_text="1,363").count() == 1
    assert page.locator("main i", has_text="run").count() == 0
    assert page.locator("#run-state").inner_text() == ""


def test_the_page_follows_a_run_that_goes_on(studio, open_page, run):
    page = open_page(f"{studio}runs?run={run}")
    page.wait_for_selector("html[data-stamp]")
    steps = record().steps
    with (run / "steps.jsonl").open("a") as file:
        file.write(format_record(step_record(steps[-1].step + 1)))
    page.get_by_text("The run is going on").wait_for()
    curve = "document.querySelector('#loss svg.plot path[fill=none]').getAttribute('d')"
    count = f"{curve}.split('L').length"
    page.wait_for_function(f"() => {count} === {len(steps) + 1}")


def test_runs_lie_over_each_other(studio, open_page, run, tmp_path):
    second = tmp_path / "second"
    second.mkdir()
    write_run(second, record())
    page = open_page(f"{studio}runs?run={run}&run={second}")
    page.wait_for_selector("html[data-stamp]")
    assert page.locator("text=second").count() > 0


def test_a_dropped_log_asks_for_its_job_and_is_judged_with_it(studio, open_page, tmp_path):
    page = open_page(f"{studio}runs")
    log = tmp_path / "train.log"
    log.write_text("".join(ITERATION.format(n=n) for n in range(1, 30)))
    page.locator("#trace-file").set_input_files(log)
    page.wait_for_selector("html[data-diagnosed]")
    assert "22.4" in page.locator("#content").inner_text()
    missing = page.locator("#file-job label", has=page.locator(".missing"))
    named = [re.match(r"\w+", text)[0] for text in missing.all_inner_texts()]
    assert named == ["Model", "Devices", "Layout"]
    page.locator("#of-model").fill("Qwen3-30B-A3B")
    page.locator("#of-on").fill("16xH100")
    page.locator("#diagnose").click()
    page.get_by_text("layout: is needed beside a model").wait_for(timeout=90_000)
    page.locator("#of-layout").fill("ep8,mbs1,recompute=full")
    page.locator("#diagnose").click()
    page.locator("#verdict h1").wait_for(timeout=90_000)
    assert "Fits" in page.locator("#verdict h1").inner_text()
    assert page.locator("#file-job .missing").count() == 0
    assert "run_layout=ep8" in page.url
    assert find_violations(page) == []
