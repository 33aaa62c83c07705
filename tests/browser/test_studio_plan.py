"""The studio's page of one plan: its numbers, its sliders, and who may use it."""

import re
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

from studio_pages import QWEN, estimate_json, show_folded

pytestmark = [pytest.mark.browser, pytest.mark.waits, pytest.mark.usefixtures("screen")]

LAYOUT = "tp2,ep8,pp8,vpp2,mbs1,recompute=layernorm+moe_act"
FIGURES = (
    *("step_s", "tokens_per_s_per_device", "mfu", "peak_bytes", "margin_bytes"),
    "bubble_fraction",
)


def address(studio, layout):
    return f"{studio}?{QWEN}&layout={layout.replace('+', '%2B')}"


def wait_for(page, text):
    page.wait_for_function(
        "text => document.getElementById('layout-text')?.textContent === text", arg=text
    )


def test_numbers_equal_those_of_estimate_digit_for_digit(studio, open_page, tmp_path):
    page = open_page(address(studio, LAYOUT))
    page.wait_for_selector("#layout-text")
    estimate = estimate_json(tmp_path, dict(parse_qsl(QWEN)), LAYOUT)["estimate"]
    for name in FIGURES:
        shown = page.locator(f"[data-name='{name}']").get_attribute("data-value")
        assert float(shown) == estimate[name], name
    shown = page.locator("[data-stage]").evaluate_all("all => all.map(n => n.dataset.value)")
    assert list(map(int, shown)) == [
        sum(row["bytes"] for row in ledger["memory"] if row["component"] != "host")
        for ledger in estimate["ledgers"]
    ]
    shown = page.locator("[data-part]").evaluate_all(
        "all => Object.fromEntries(all.map(n => [n.dataset.part, n.dataset.value]))"
    )
    assert {part: float(value) for part, value in shown.items()} == {
        share["part"]: share["seconds"] for share in estimate["shares"]
    }


def test_a_choice_changes_the_layout_and_the_address(studio, open_page):
    page = open_page(address(studio, LAYOUT))
    wait_for(page, "tp2,pp8,vpp2,ep8,mbs1,recompute=layernorm+moe_act")
    chosen = page.locator("#c-ep [aria-checked='true']")
    chosen.focus()
    page.keyboard.press("ArrowRight")
    wait_for(page, "tp2,pp8,vpp2,ep16,mbs1,recompute=layernorm+moe_act")
    assert "ep16" in page.url
    assert chosen.inner_text() == "16"
    page.locator("#c-ep button", has_text=re.compile("^32$")).click()
    wait_for(page, "tp2,pp8,vpp2,ep32,mbs1,recompute=layernorm+moe_act")
    page.keyboard.press("ArrowLeft")
    wait_for(page, "tp2,pp8,vpp2,ep16,mbs1,recompute=layernorm+moe_act")
    page.reload()
    wait_for(page, "tp2,pp8,vpp2,ep16,mbs1,recompute=layernorm+moe_act")


@pytest.mark.usefixtures("screen")
def test_back_takes_choices_back_and_a_bookmark_opens_the_same(studio, open_page):
    text = "tp2,pp8,vpp2,ep{},mbs1,recompute=layernorm+moe_act"
    page = open_page(address(studio, LAYOUT))
    wait_for(page, text.format(8))
    for value in ("32", "4", "16"):
        page.locator("#c-ep button", has_text=re.compile(f"^{value}$")).click()
        wait_for(page, text.format(value))
    page.locator("header nav [data-page='share']").click()
    page.wait_for_selector("#address")
    shared = page.locator("#address").input_value()
    for value in ("16", "4", "32", "8"):
        page.go_back()
        wait_for(page, text.format(value))
        assert page.locator("#c-ep [aria-checked='true']").inner_text() == value
    page.go_forward()
    wait_for(page, text.format(32))
    again = open_page(page.url)
    wait_for(again, text.format(32))
    assert again.locator("#verdict h1").inner_text() == page.locator("#verdict h1").inner_text()
    other = open_page(shared)
    wait_for(other, text.format(16))


def test_an_illegal_step_says_why_and_a_click_mends_it(studio, open_page):
    page = open_page(address(studio, "tp2,pp8,vpp5,ep8,mbs1"))
    rule = page.locator("[data-key='vpp'] .rule")
    rule.locator("button").wait_for()
    assert "divides neither the 94 layers" in rule.inner_text()
    assert "This cannot be done" in page.locator("#verdict").inner_text()
    rule.locator("button").click()
    page.wait_for_selector("#layout-text")
    assert re.search(r"vpp[46]", page.locator("#layout-text").inner_text())


def test_an_illegal_choice_keeps_the_page_and_shows_its_rule_beside_it(studio, open_page):
    page = open_page(address(studio, LAYOUT))
    page.wait_for_selector("#layout-text")
    page.locator("#c-vpp button", has_text=re.compile("^5$")).click()
    rule = page.locator("[data-key='vpp'] .rule")
    rule.locator("button").wait_for()
    assert "This cannot be done" in page.locator("#verdict").inner_text()
    assert page.locator("#content .cards.stale .chart").count() == 2  # the figures are still there
    rule.locator("button").click()
    page.wait_for_selector("#layout-text")
    assert page.locator(".stale").count() == 0


@pytest.mark.parametrize(
    ("key", "value", "rule"), [("cp", "32", "tp"), ("overlap", "param", "overlap")]
)
def test_a_choice_that_breaks_any_rule_is_told_so_where_it_was_made(
    studio, open_page, key, value, rule
):
    """The rule may be another key's, or of a set, which has no nearest value."""
    page = open_page(address(studio, LAYOUT))
    page.wait_for_selector("#layout-text")
    page.locator(f"#c-{key} button", has_text=re.compile(f"^{value}$")).click()
    told = page.locator(f"[data-key='{key}'] .rule")
    told.locator("button").wait_for()
    assert told.inner_text().startswith(f"{rule}: ")
    assert page.locator("#content .cards.stale .chart").count() == 2
    told.locator("button").click()
    page.wait_for_selector("#layout-text")
    assert told.inner_text() == ""


def test_only_the_newest_answer_is_painted(studio, open_page):
    page = open_page(address(studio, LAYOUT))
    page.wait_for_selector("#layout-text")
    page.evaluate(
        """() => { window.painted = []; const paint = studio.paint;
        studio.paint = record => { window.painted.push(record.job.layout); paint(record); };
        for (const ep of [1, 2, 4, 8, 16, 32])
            studio.go({layout: `tp2,pp8,ep${ep},mbs1`}, undefined, true); }"""
    )
    wait_for(page, "tp2,pp8,ep32,mbs1")
    page.wait_for_timeout(200)
    assert page.evaluate("window.painted") == ["tp2,pp8,ep32,mbs1"]


def test_a_table_is_copied_as_markdown(studio, open_page):
    page = open_page(address(studio, LAYOUT))
    page.wait_for_selector("#layout-text")
    page.evaluate(
        "navigator.clipboard.writeText = async text => { window.copied = text; }"  # headless: none
    )
    panel = page.locator("section", has=page.get_by_text("Nearest published measurements"))
    show_folded(page)
    panel.get_by_text("Markdown").click()
    head, rule, *rows = page.evaluate("window.copied").splitlines()
    assert head == "| run | differs in | measured | predicted | error |"
    assert rule == "| --- | --- | --- | --- | --- |"
    assert len(rows) == 3
    assert all(row.count(" | ") == 4 for row in rows)


def test_a_pasted_script_gives_the_sliders_its_layout(studio, open_page):
    script = Path("examples/qwen3_30b_16h100.sh").read_text()
    page = open_page(f"{studio}?model=Qwen/Qwen3-30B-A3B&on=16xH100&layout=ep8")
    page.wait_for_selector("#layout-text")
    page.locator("details.group summary").click()
    page.locator("#script").fill(script)
    page.get_by_text("Take the script's layout").click()
    wait_for(page, "tp2,pp1,ep8,mbs1,recompute=layernorm+moe_act")
    assert page.locator("#c-tp [aria-checked='true']").inner_text() == "2"
    assert "512" in page.locator("#verdict").inner_text()


def test_hostile_names_are_shown_as_text(studio, open_page):
    name = "%3Cimg src=x onerror=alert(1)%3E"
    page = open_page(f"{studio}?model={name}&on=8xH100&layout=%3Cb%3Ehi")
    page.wait_for_selector("#verdict.refused")
    assert "<img src=x" in page.locator("#verdict").inner_text()
    assert page.locator("#content img").count() == 0


def test_a_slow_layout_is_judged_beside_the_best_and_one_click_changes_it(studio, open_page):
    page = open_page(f"{studio}?model=Qwen3-30B-A3B&on=16xH100&layout=tp8,ep8,mbs1")
    page.wait_for_selector("#verdict[data-quality='slow']", timeout=60_000)
    headline = page.locator("#verdict h1")
    assert re.fullmatch(r"Fits, but is [\d.]+ x slower than the best", headline.inner_text())
    assert "one change, with tp1" in page.locator("#judgement").inner_text()
    assert "published run" in page.locator("#judgement").inner_text()
    assert page.locator("#load-best").count() == 1
    page.locator("#load-change").click()
    wait_for(page, "tp1,pp1,ep8,mbs1,recompute=full")
    page.wait_for_selector("#verdict[data-quality='slow']")
    page.locator("#load-best").click()
    page.wait_for_selector("#verdict[data-quality='good']")
    assert "the best that fits" in page.locator("#judgement").inner_text()
