"""What a newcomer tries in the studio, a task at a time, beside the fifteen in one sitting.

Each is done at three sizes, has its answer in words, and leaves nothing wrong on the page.
"""

import csv
import io
import json
from pathlib import Path

import pytest

from studio_pages import find_faults_of_size, show_controls, show_folded

pytestmark = [pytest.mark.browser, pytest.mark.waits]

TINY = "model=allenai/OLMoE-1B-7B-0924&on=4xH100&seq_len=4096&global_batch=64&precision=bf16"
SMALL = "model=Qwen/Qwen3-30B-A3B&on=16xH100&seq_len=4096&global_batch=512&precision=bf16"
START = f"?{TINY}&layout=ep4"
CLIPBOARD = "navigator.clipboard.writeText = async text => { window.copied = text; }"
CONFIG: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "vocab_size": 32000,
    "intermediate_size": 2048,
    "tie_word_embeddings": False,
}
SCRIPT = "examples/qwen3_30b_16h100.sh"


def enter(page, field, text):
    show_controls(page)
    page.locator(field).fill(text)
    page.locator(field).press("Enter")


def read_copy(page, button):
    page.evaluate(CLIPBOARD)
    button.first.click()
    return page.evaluate("window.copied")


def wait_for_words(page, words, place="main"):
    page.locator(place, has_text=words).first.wait_for()


def ask_for_no_devices(page):
    enter(page, "#in-devices", "0")
    wait_for_words(page, "must be")


def write_a_sequence_as_4k(page):
    enter(page, "#in-seq_len", "4k")
    wait_for_words(page, "4,000 tokens")


def name_a_model_in_small_letters(page):
    enter(page, "#in-model", "olmoe-1b-7b-0924")
    wait_for_words(page, "OLMoE-1B-7B-0924 on 4")


def mistype_a_key_of_the_layout(page):
    enter(page, "#in-layout", "tpp2,ep4")
    wait_for_words(page, "tpp")
    page.get_by_role("button", name="Use tp", exact=True).wait_for()


def ask_for_a_format_that_the_part_has_not(page):
    show_controls(page)
    page.locator("#in-precision").select_option("mxfp8")
    page.get_by_role("button", name="Use fp8", exact=True).click()
    page.locator("#layout-text").wait_for()
    wait_for_words(page, ", fp8")


def ask_for_a_batch_that_does_not_divide(page):
    enter(page, "#in-global_batch", "63")
    page.get_by_role("button", name="Use 64", exact=True).click()
    wait_for_words(page, "global batch 64")


def press_a_choice_that_is_not_legal(page):
    show_controls(page)
    page.locator("#c-vpp .chip.illegal").first.click()
    rule = page.locator("[data-key='vpp'] .rule")
    rule.locator("button").click()
    page.locator("#layout-text").wait_for()


def find_the_answer_by_keyboard(page):
    page.reload()  # a click, as on the folded form, would be where Tab goes on from
    page.locator("#layout-text").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "To the answer"
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash") in ("#content", "")


def copy_the_layout(page):
    page.locator("#layout-text").wait_for()
    text = read_copy(page, page.get_by_label("copy the layout's text"))
    assert text == page.locator("#layout-text").inner_text()


def take_the_ranking_to_a_spreadsheet(page):
    page.locator("header nav [data-page='top']").click()
    page.wait_for_selector("html[data-results='final']", timeout=60_000)
    show_folded(page)
    text = read_copy(page, page.get_by_label("copy Ranked layouts as CSV"))
    rows = list(csv.DictReader(io.StringIO(text)))
    texts = page.locator("tbody.ranking .layout-cell").evaluate_all(
        "all => all.map(cell => cell.dataset.layout)"
    )
    assert [row["layout"] for row in rows] == texts
    assert len(texts) > 2


def see_both_answers_of_a_search(page):
    page.goto(f"{page.url.split('?')[0]}top?{SMALL}")
    page.wait_for_selector("html[data-results='final']", timeout=90_000)
    answers = page.locator("[data-answer]")
    assert answers.count() == 2
    for place in range(2):
        answer = answers.nth(place)
        text = answer.get_attribute("data-answer")
        assert answer.locator(".labels .badge").count() >= 5
        assert answer.locator("svg.grid rect").count() >= 16
        assert answer.locator("code").inner_text() == text
        assert read_copy(page, answer.get_by_label("copy the layout's text")) == text
        order = answer.evaluate(
            "node => [...node.querySelectorAll('.words, .labels, svg, code')]"
            ".map(item => item.tagName)"
        )
        assert order[:4] == ["P", "DIV", "svg", "CODE"]
    assert "nobody published all of them together" in answers.first.inner_text()


def see_what_the_second_plan_changes(page):
    page.locator("header nav [data-page='top']").click()
    page.wait_for_selector("html[data-results='final']", timeout=60_000)
    show_folded(page)
    rows = page.locator("tbody.ranking tr")
    best = page.locator("tr.best")
    assert best.locator(".labels").count() == 0
    assert rows.nth(1).locator(".labels .badge").count() >= 1


def open_the_address_elsewhere(page):
    page.locator("#layout-text").wait_for()
    shown = page.locator("#verdict h1").inner_text()
    page.goto(page.url)
    page.locator("#layout-text").wait_for()
    assert page.locator("#verdict h1").inner_text().split()[0] == shown.split()[0]


def leave_the_tokens_of_a_budget_without_a_unit(page):
    page.locator("header nav [data-page='budget']").click()
    page.locator("#tokens").fill("15")
    page.locator("#budget").click()
    wait_for_words(page, "fewer tokens than any")


def write_a_price_in_words(page):
    page.locator("header nav [data-page='budget']").click()
    page.locator("#price").fill("cheap")
    page.locator("#budget").click()
    wait_for_words(page, "price")


def compare_with_nothing(page):
    page.locator("header nav [data-page='compare']").click()
    page.locator("#compare").click()
    page.get_by_text("Add A to them").click()
    wait_for_words(page, "Side by side")


def bring_a_config(page):
    show_controls(page)
    page.locator("details.group summary").click()
    file = {"name": "config.json", "mimeType": "application/json"}
    page.locator("#file").set_input_files([{**file, "buffer": json.dumps(CONFIG).encode()}])
    page.locator("#layout-text").wait_for(timeout=60_000)
    page.locator("#drop-state", has_text="is read").wait_for(state="attached")


def bring_a_text_that_is_no_script(page):
    show_controls(page)
    page.locator("details.group summary").click()
    page.locator("#script").fill("hello, is this a script?")
    page.get_by_text("Take the script's layout").click()
    page.locator("#drop-state:not(:empty)").wait_for()
    page.wait_for_function(
        "() => !/reading/.test(document.getElementById('drop-state').textContent)"
    )


def bring_a_script_without_a_model_of_a_name(page):
    show_controls(page)
    page.locator("details.group summary").click()
    page.locator("#script").fill(Path(SCRIPT).read_text())
    page.get_by_text("Take the script's layout").click()
    page.locator("#layout-text", has_text="tp2").wait_for()


def open_a_run_that_is_not_there(page):
    page.locator("header nav [data-page='runs']").click()
    page.locator("#run-folder").fill("runs/nosuch")
    page.locator("#open-run").click()
    wait_for_words(page, "no such")


def watch_a_log_that_is_not_there(page):
    page.locator("header nav [data-page='watch']").click()
    page.locator("#watch-path").fill("nosuch.log")
    page.locator("#watch").click()
    wait_for_words(page, "no such")


def look_a_word_up(page):
    page.locator("#layout-text").wait_for()
    page.locator(".tile a.term", has_text="MFU").click()
    page.locator("dt:target").wait_for()
    assert "MFU" in page.locator("dt:target").inner_text()


def learn_something(page):
    page.locator("header nav [data-page='learn']").click()
    page.locator("main a[href*='/learn/']").first.click()
    page.locator("article[data-chapter] h1").wait_for()
    assert page.locator("article svg[role=img]").count() >= 1


def ask_a_page_that_is_not_there(page):
    # Asked beside the page, for a browser complains of every 404 in its console.
    answer = page.request.get(page.url.split("?")[0] + "nosuchpage")
    assert answer.status == 404
    assert "There is no such page" in answer.text()
    assert 'href="/top"' in answer.text()


def take_a_memory_of_my_own(page):
    page.goto(f"{page.url.split('?')[0]}?{TINY.replace('4xH100', '4xH100 with 160GB')}&layout=ep4")
    page.locator("#layout-text").wait_for()
    wait_for_words(page, "160GB")


def stop_a_search(page):
    page.goto(f"{page.url.split('?')[0]}top?{SMALL}")
    page.locator("#cancel-search").click()
    wait_for_words(page, "Cancelled.")


def start_it_under_slurm(page):
    page.goto(f"{page.url.split('?')[0]}share?{SMALL}&layout=ep8,mbs1,recompute=full")
    page.locator("[data-target='slurm']").click()
    page.locator("pre.file").wait_for()
    text = read_copy(page, page.locator("#export-file").get_by_text("Copy", exact=True))
    assert text.startswith("#!/bin/bash")


def zoom_into_the_timetable(page):
    page.goto(f"{page.url.split('?')[0]}timetable?{TINY}&layout=pp4,ep1,mbs1")
    page.wait_for_selector("html[data-timetable]")
    page.get_by_text("Zoom in").click()
    page.locator("canvas.timetable").focus()
    page.keyboard.press("ArrowRight")
    with page.expect_download() as taken:
        page.get_by_text("Download for Perfetto").click()
    assert json.loads(Path(taken.value.path()).read_text())["traceEvents"]


TASKS = (
    *(ask_for_no_devices, write_a_sequence_as_4k, name_a_model_in_small_letters),
    *(mistype_a_key_of_the_layout, ask_for_a_format_that_the_part_has_not),
    *(ask_for_a_batch_that_does_not_divide, press_a_choice_that_is_not_legal),
    *(find_the_answer_by_keyboard, copy_the_layout, take_the_ranking_to_a_spreadsheet),
    *(see_both_answers_of_a_search, see_what_the_second_plan_changes),
    *(open_the_address_elsewhere, leave_the_tokens_of_a_budget_without_a_unit),
    *(write_a_price_in_words, compare_with_nothing, bring_a_config),
    *(bring_a_text_that_is_no_script, bring_a_script_without_a_model_of_a_name),
    *(open_a_run_that_is_not_there, watch_a_log_that_is_not_there, look_a_word_up),
    *(learn_something, ask_a_page_that_is_not_there, take_a_memory_of_my_own, stop_a_search),
    *(start_it_under_slurm, zoom_into_the_timetable),
)


@pytest.mark.turns
@pytest.mark.parametrize("task", TASKS, ids=[task.__name__ for task in TASKS])
def test_a_newcomer_does_a_task(studio, open_page, screen, task):
    page = open_page(f"{studio}{START}")
    page.set_default_timeout(40_000)
    task(page)
    page.wait_for_timeout(300)
    # What a reader has opened by himself may be scrolled.
    page.evaluate("document.querySelectorAll('details.group').forEach(item => item.open = false)")
    faults = [fault for fault in find_faults_of_size(page, screen, 900) if "high" not in fault[1]]
    assert faults == []
