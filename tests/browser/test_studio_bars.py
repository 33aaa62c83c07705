"""How long the studio takes, and whether a newcomer gets through fifteen tasks.

Bars are of two idle cores as fast as the one on which `REFERENCE_S` was taken. A slower machine, or
one with other work, has longer: as much as a fixed piece of work takes longer on both its cores.
"""

import multiprocessing
import time
from pathlib import Path

import pytest

from studio_pages import QWEN

pytestmark = pytest.mark.browser

MOVES = 20
TASK_MS = 120_000
# A series of measurements is repeated when something else took the machine meanwhile.
SERIES = 3
REFERENCE_S = 0.25
REFERENCE_ROUNDS = 20_000_000


def work():
    for _ in range(REFERENCE_ROUNDS):
        pass


def measure_slowness():
    """Return how many times longer than on the reference two processes work at once."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=work) for _ in range(2)]
    start_s = time.perf_counter()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(1.0, (time.perf_counter() - start_s) / REFERENCE_S)


def assert_within(most_ms, measure):
    """Assert that one of a few series of measurements is within a bar on this machine."""
    series = []
    for _ in range(SERIES):
        before = measure_slowness()
        waited_ms = measure()
        slowness = max(before, measure_slowness())
        series.append((waited_ms, slowness))
        if waited_ms < most_ms * slowness:
            return
    pytest.fail(f"more than {most_ms} ms; milliseconds and slowness of each series: {series}")


@pytest.mark.serial
@pytest.mark.parametrize(
    ("layout", "most_ms"),
    [("tp2,ep8,pp8,vpp2,mbs1,recompute=full", 300), ("tp2,ep8,pp32,vpp3,mbs1,recompute=full", 600)],
)
def test_a_slider_is_painted_soon(studio, open_page, layout, most_ms):
    """The 95th percentile of the time from a slider's input to the frame with its answer."""
    page = open_page(f"{studio}?{QWEN}&layout={layout}")
    page.wait_for_selector("#layout-text")

    def measure():
        waits = page.evaluate(
            """async moves => { const waits = [], slider = document.getElementById('c-ep');
            for (let move = 0; move < moves; move += 1) {
                const before = studio.answered, start = performance.now();
                slider.value = String(2 + move % 3);
                slider.dispatchEvent(new Event('input'));
                while (studio.answered === before || studio.answered !== studio.wanted
                       || document.documentElement.dataset.frame !== String(studio.answered))
                    await new Promise(requestAnimationFrame);
                waits.push(performance.now() - start);
            } return waits; }""",
            MOVES,
        )
        return sorted(waits)[int(0.95 * len(waits)) - 1]

    assert_within(most_ms, measure)


@pytest.mark.serial
def test_first_results_of_a_search_come_soon(studio, open_page):
    def measure():
        page = open_page(f"{studio}top?{QWEN}&layout=ep8")
        page.wait_for_selector("html[data-results]", timeout=TASK_MS)
        return page.evaluate("performance.now()")

    assert_within(2000, measure)


@pytest.mark.waits
def test_a_newcomer_gets_through_his_tasks(studio, open_page):
    """Each of fifteen tasks is a few clicks from the last, and has its answer in words."""
    page = open_page(f"{studio}?model=Qwen/Qwen3-30B-A3B&on=16xH100&global_batch=512")
    page.set_default_timeout(TASK_MS)

    def read(selector):
        page.wait_for_selector(selector)
        return page.locator(selector).first.inner_text()

    def go_to(name):
        page.locator(f"header nav [data-page='{name}']").click()

    def enter(field, text, *, until):
        page.locator(field).fill(text)
        page.locator(field).press("Enter")
        page.locator(until[0], has_text=until[1]).first.wait_for()

    assert "Fits" in read("#verdict h1")  # 1 does it fit? (the page has looked for the best)
    assert "a step takes" in read("#verdict")  # 2 how fast is it?
    enter("#in-layout", "tp1,ep8,mbs1", until=("#layout-text", "tp1,pp1,ep8,mbs1"))
    first = read("#verdict h1")
    page.get_by_role("button", name="full", exact=True).click()  # 3 does recompute help?
    page.locator("#layout-text", has_text="full").wait_for()
    assert "Fits" in read("#verdict h1") != first
    enter("#in-devices", "8", until=("#verdict", "on 8 ×"))  # 4 and on half the devices?
    enter("#in-seq_len", "8192", until=("#verdict", "8,192"))  # 5 and longer sequences?
    assert page.locator("[data-stage]").count() == 1  # 6 which stage is fullest?
    assert "Nearest published" in read("#content")  # 7 how sure is it?
    go_to("compare")
    page.locator("#with-0").fill("tp1,ep8,mbs1,recompute=full,overlap=ep")
    page.locator("#with-1").fill("tp3,ep8")
    page.locator("#compare").click()
    assert "must divide" in read("section:has-text('Why not C')")  # 8 why not tp3?
    assert page.locator("[data-change]").count() > 1  # 9 what does overlap of EP buy?
    go_to("timetable")
    assert "Idle" in read("#timetable h1")  # 10 how large is the bubble?
    go_to("top")
    page.wait_for_selector("html[data-results='final']")  # 11 what else is good?
    page.locator("tr.best button").click()
    page.wait_for_selector("#layout-text")
    go_to("budget")
    page.locator("#tokens").fill("100B")
    page.locator("#budget").click()
    page.wait_for_selector("[data-fewest]:not([data-fewest='0'])")
    assert "fewest" in read("[data-fewest]")  # 12 the fewest devices?
    assert "days" in read("#content")  # 13 how many days?
    go_to("plan")
    page.locator("details.group summary").click()
    page.locator("#script").fill(Path("examples/qwen3_30b_16h100.sh").read_text())
    page.get_by_text("Take the script's layout").click()  # 14 is this script good?
    page.locator("#layout-text", has_text="tp2,pp1,ep8,mbs1").wait_for()
    assert read("#verdict h1")
    go_to("share")
    page.locator("[data-target='slurm']").click()
    page.locator("#export-file").get_by_text("job").first.wait_for()  # 15 how do I start it?
    page.locator("[data-target='megatron']").click()
    assert "--tensor-model-parallel-size 2" in read("pre.file")
