"""How long the studio takes, and whether a newcomer gets through fifteen tasks."""

import pytest

from studio_pages import QWEN

pytestmark = [pytest.mark.browser, pytest.mark.thorough, pytest.mark.serial]

# From a slider's input to the frame with its answer, in seconds, on two idle cores.
MOVES = 20


@pytest.mark.parametrize(
    ("layout", "most_ms"),
    [("tp2,ep8,pp8,vpp2,mbs1,recompute=full", 300), ("tp2,ep8,pp32,vpp3,mbs1,recompute=full", 600)],
)
def test_a_slider_is_painted_soon(studio, open_page, layout, most_ms):
    page = open_page(f"{studio}?{QWEN}&layout={layout}")
    page.wait_for_selector("#layout-text")
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
    slowest = sorted(waits)[int(0.95 * len(waits)) - 1]
    assert slowest < most_ms, waits


def test_first_results_of_a_search_come_soon(studio, open_page):
    page = open_page(f"{studio}top?{QWEN}&layout=ep8")
    page.wait_for_selector("html[data-results]", timeout=20000)
    waited_ms = page.evaluate("performance.now()")
    assert waited_ms < 2000


def test_a_newcomer_gets_through_his_tasks(studio, open_page, tmp_path):
    """Each task is a few clicks from the first page, and has its answer in words."""
    page = open_page(f"{studio}?model=Qwen/Qwen3-30B-A3B&on=16xH100&global_batch=512")
    page.set_default_timeout(60_000)

    def say(selector):
        page.wait_for_selector(selector)
        return page.locator(selector).first.inner_text()

    def go_to(name):
        page.locator(f"header nav [data-page='{name}']").click()

    assert "Fits" in say("#verdict h1")  # 1 which layout, does it fit? (searched by itself)
    assert "a step takes" in say("#verdict")  # 2 how fast?
    page.locator("#in-layout").fill("tp1,ep8,mbs1")
    page.locator("#in-layout").press("Enter")
    page.wait_for_function("document.getElementById('layout-text').textContent.includes('tp1')")
    assert say("#verdict h1")  # 3 and my own layout?
    page.get_by_role("button", name="full", exact=True).click()
    page.wait_for_function("document.getElementById('layout-text').textContent.includes('full')")
    assert "Fits" in say("#verdict h1")  # 4 does recompute help?
    page.locator("#in-devices").fill("8")
    page.locator("#in-devices").press("Enter")
    page.wait_for_function("document.querySelector('#verdict').textContent.includes('on 8 ×')")
    page.locator("#in-seq_len").fill("8192")
    page.locator("#in-seq_len").press("Enter")
    page.wait_for_function("document.querySelector('#verdict').textContent.includes('8,192')")  # 6
    assert page.locator("[data-stage]").count() == 1  # 7 which stage is fullest?
    assert "Nearest published" in page.locator("#content").inner_text()  # 8 how sure?
    go_to("compare")
    page.locator("#with-0").fill("tp2,ep8,mbs1,recompute=full")
    page.locator("#with-1").fill("tp3,ep8")
    page.locator("#compare").click()
    assert "must divide" in say("section:has-text('Why not C')")  # 9, 10 why not tp2, tp3?
    go_to("timetable")
    assert "Idle" in say("#timetable h1")  # 11 how large is the bubble?
    go_to("top")
    page.wait_for_selector("html[data-results='final']")  # 12 what else is good?
    page.locator("tr.best button").click()
    page.wait_for_selector("#layout-text")
    go_to("budget")
    page.locator("#tokens").fill("100B")
    page.locator("#budget").click()
    page.wait_for_selector("[data-fewest]:not([data-fewest='0'])")
    assert "fewest" in say("[data-fewest]")  # 13 the fewest devices, 14 how many days?
    go_to("share")
    page.locator("[data-target='slurm']").click()
    assert "#SBATCH" in say("pre.file")  # 15 export it
