"""The studio's other pages: searches, timetables, comparisons, budgets, and what is taken away."""

import csv
import io
import json
import os
import random
import re
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

import moewright as mw
import sample_run
from moewright.report.document import Document, DocumentSection, Extent, ItemList, tabulate
from moewright.spec.units import format_bytes, format_figures, format_seconds
from moewright.view.page import PAGES, render_page
from sample_run import write_run
from studio_pages import (
    QWEN,
    SEARCH_MS,
    find_faults,
    find_faults_of_size,
    find_uncopied,
    show_folded,
)

pytestmark = [pytest.mark.browser, pytest.mark.waits]

SMALL = "model=Qwen/Qwen3-30B-A3B&on=16xH100&seq_len=4096&global_batch=512&precision=bf16"
TINY = "model=allenai/OLMoE-1B-7B-0924&on=4xH100&seq_len=4096&global_batch=64&precision=bf16"

LAYOUT = "tp2,ep8,mbs1,recompute=layernorm%2Bmoe_act"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Write a run that ended long ago."""
    folder = tmp_path_factory.mktemp("finished")
    write_run(folder, sample_run.record())
    os.utime(folder / "steps.jsonl", (0, 0))
    return folder


@pytest.mark.parametrize("name", [name for name, _ in PAGES])
def test_every_page_is_whole_at_three_sizes_in_both_colours(studio, open_page, run, name):
    """New pages come in by the studio's list of them; the address has what each of them takes."""
    asked = f"{TINY}&layout=ep4&with=tp3,ep8&with=tp1,ep2&tokens=1T&price=2&run={run}"
    page = open_page(f"{studio}{'' if name == 'plan' else name}?{asked}")
    page.locator("main section").first.wait_for()
    page.wait_for_load_state("networkidle", timeout=SEARCH_MS)
    assert page.locator("main .skeleton").count() == 0
    assert page.locator("main h1").count() >= 1
    assert find_uncopied(page) == []
    assert find_faults(page) == []


OVERLAPPING = """() => {
  const page = document.getElementById("content");
  page.append(mw.el("div", {style: "position:relative;height:3rem"},
    mw.el("span", {style: "position:absolute;left:0;top:0"}, "first text"),
    mw.el("span", {style: "position:absolute;left:20px;top:6px"}, "second text")));
  const rule = (text, x) => ({kind: "rule", x, text, colour: "red"});
  page.append(mw.chart("labels", 220, () => ({x: {from: 0, to: 9, show: String},
    y: {from: 0, to: 1, show: String}, marks: [rule("upper", 3), rule("lower", 3)]})));
  const drawn = setInterval(() => {
    const plot = page.querySelector("[aria-label=labels] svg");
    if (!plot) return;
    clearInterval(drawn);
    for (const [text, y] of [["on it", 100], ["below it", 106], ["apart", 160]])
      plot.append(mw.svg("text", {x: 200, y}, text));
    plot.append(mw.svg("text", {x: -30, y: 160}, "outside"));
    page.dataset.drawn = "";
  }, 10);
}"""


def test_texts_upon_each_other_are_found_in_pages_and_in_charts(studio, open_page):
    """A finder that finds nothing proves nothing."""
    page = open_page(f"{studio}share?{TINY}&layout=ep4")
    page.locator("[data-target]").first.wait_for()
    assert find_faults_of_size(page, 1440, 900) == []
    page.evaluate(OVERLAPPING)
    page.locator("#content[data-drawn]").wait_for()
    faults = " ".join(text for _, text in find_faults_of_size(page, 1440, 900))
    assert "overlap: first text AND second text" in faults
    assert "overlap: on it AND below it" in faults
    assert "beyond: outside in labels" in faults
    assert "apart" not in faults
    assert "upper" not in faults  # a chart puts no text of its own upon another


@pytest.mark.usefixtures("screen")
def test_a_drawing_is_copied_as_it_stands(studio, open_page):
    """The picture has the colours of the page, and is twice as wide as on the screen."""
    page = open_page(f"{studio}?{TINY}&layout=tp2,ep4")
    page.locator("svg.grid").first.wait_for()
    size, colours = page.evaluate("""async () => {
        const drawing = document.querySelector("svg.grid"), image = new Image();
        image.src = await mw.paintDrawing(drawing);
        await image.decode();
        const canvas = mw.el("canvas", {width: image.width, height: image.height});
        const pen = canvas.getContext("2d");
        pen.drawImage(image, 0, 0);
        const {data} = pen.getImageData(0, 0, image.width, image.height), colours = new Set();
        for (let at = 0; at < data.length; at += 4) colours.add(data.slice(at, at + 3).join());
        return [image.width / drawing.getBoundingClientRect().width, [...colours]]; }""")
    assert size == pytest.approx(2, rel=0.02)
    assert "255,255,255" in colours
    assert len(colours) >= 4  # the card, two shades of ranks, the line of a node


def test_pages_write_numbers_as_terminals_do(studio, open_page):
    draws = random.Random(34)
    values = [draws.choice((-1, 1)) * 10 ** draws.uniform(-4, 13) for _ in range(300)]
    values += [0.0, 112.5, 2.345, 999.5, 999.7, 1234.5, 0.9999, 999.6 * 2**30, 1023.9]
    page = open_page(f"{studio}share?{TINY}&layout=ep4")
    for name, write in (
        ("digits", format_figures),
        ("seconds", format_seconds),
        ("bytes", format_bytes),
    ):
        shown = page.evaluate(f"values => values.map(mw.{name})", values)
        assert shown == list(map(write, values)), name


@pytest.mark.usefixtures("screen")
def test_a_bar_of_what_if_leads_to_its_job(studio, open_page):
    page = open_page(f"{studio}?{SMALL}&layout={LAYOUT}")
    bars = page.locator("#what-if a.multiple")
    bars.first.wait_for(state="attached")
    show_folded(page)
    assert page.locator("#what-if h3").all_inner_texts() == [
        *("Devices", "Kind of device", "Memory", "Network", "Precision", "Sequence")
    ]
    assert page.locator("#what-if [aria-current]").count() == 6
    assert "does not multiply in it" in page.locator("#what-if .none").first.inner_text()
    speed = bars.get_by_text("H200").locator("xpath=..").locator("b").inner_text()
    bars.get_by_text("160 GB").click()
    page.locator("#verdict", has_text="H100 SXM with 160GB").wait_for()
    page.go_back()
    page.locator("#what-if [aria-current]", has_text="80 GB").wait_for(state="attached")
    show_folded(page)
    bars.get_by_text("H200").click()
    page.locator("#verdict", has_text="16 × H200").wait_for()
    tile = page.locator("[data-name='tokens_per_s_per_device']")
    assert tile.inner_text() == speed


@pytest.mark.usefixtures("screen")
def test_a_wrong_model_offers_the_nearest_and_words_lead_to_the_glossary(studio, open_page):
    page = open_page(f"{studio}?model=Qwen3-30B-A3&on=16xH100&layout=ep8")
    page.get_by_role("button", name="Use Qwen/Qwen3-30B-A3B").click()
    page.wait_for_selector("#layout-text")
    address = page.locator(".tile a.term", has_text="MFU").get_attribute("href")
    target = open_page(f"{studio.rstrip('/')}{address}")
    assert target.locator(address.partition("/learn/glossary")[2]).count() == 1


@pytest.mark.slow
def test_any_answer_is_a_whole_page(open_page, tmp_path):
    """Tables of any width and length, titles without end, words without a space."""
    draws = random.Random(34)
    names = ("at::native::vectorized_elementwise_kernel<4>", "tp2,pp8,layout='Et*4|(t*5|)*2tL'")

    def text():
        return " ".join(draws.choices((*names, "word", "exposed", "12,345.6"), k=9))

    sections = tuple(
        DocumentSection(
            title=text(),
            lines=(text(),),
            facts=((draws.choice(names), text()),),
            table=tabulate(
                [
                    {f"column {at} of {columns}": draws.choice((7e8, text())) for at in columns}
                    for _ in range(draws.choice((1, 5, 30)))
                ]
            ),
            items=ItemList(items=tuple(text() for _ in range(draws.choice((2, 40))))),
            extent=draws.choice(tuple(Extent)),
        )
        for columns in (range(draws.randint(1, 16)) for _ in range(12))
    )
    path = tmp_path / "answer.html"
    path.write_text(render_page((Document(heading=text(), sections=sections),), "answer"))
    page = open_page(path.as_uri(), offline=True)
    assert page.locator("main section").count() == 13
    assert find_uncopied(page) == []
    assert find_faults(page) == []


@pytest.mark.usefixtures("screen")
def test_a_search_shows_first_results_then_all_and_loads_the_sliders(studio, open_page):
    page = open_page(f"{studio}top?{TINY}&layout=ep4")
    page.wait_for_selector("#search-answer", timeout=20000)
    page.wait_for_selector("html[data-results='final']", timeout=60000)
    best = mw.plan("OLMoE-1B-7B-0924", on="4xH100", global_batch=64, top=10).best
    row = page.locator("tr.best")
    assert row.locator(".layout-cell").get_attribute("data-layout") == best_layout(best)
    show_folded(page)
    if page.locator(".table-box.narrow").count():
        page.get_by_label("sorted by").select_option("peak")
    else:
        page.locator("th button").nth(4).click()
    assert page.locator("th[aria-sort='ascending']").text_content() == "peak"
    row.locator(".pick").click()
    page.wait_for_selector("#layout-text")
    assert page.locator("#layout-text").inner_text() == best_layout(best)


def best_layout(plan):
    from moewright.codec import format_layout

    return format_layout(plan.layout)


@pytest.mark.usefixtures("screen")
def test_the_bubble_of_the_timetable_is_the_estimates(studio, open_page):
    page = open_page(
        f"{studio}timetable?{QWEN}&layout=tp2,ep8,pp32,vpp3,mbs1,recompute=layernorm%2Bmoe_act"
    )
    page.wait_for_selector("html[data-timetable]", timeout=20000)
    idle_s, bubble_s = page.locator("[data-idle]").evaluate(
        "node => [Number(node.dataset.idle), Number(node.dataset.bubble)]"
    )
    assert idle_s == pytest.approx(bubble_s, rel=1e-9)
    canvas = page.locator("canvas.timetable")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 30)
    assert page.locator(".tip:visible").inner_text()
    canvas.focus()
    page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.locator("#memory-rank").input_value() == "1"


@pytest.mark.usefixtures("screen")
def test_changes_sum_to_the_difference_and_an_illegal_layout_says_why(studio, open_page):
    query = f"{SMALL}&layout={LAYOUT}&with=tp1,ep8,mbs1,recompute=full&with=tp3,ep8"
    page = open_page(f"{studio}compare?{query}")
    page.get_by_text("C beside A").wait_for()
    changes = page.locator("[data-change][data-plan='B']").evaluate_all(
        "all => all.map(node => Number(node.dataset.value))"
    )
    job = {"on": "16xH100", "global_batch": 512}
    first = mw.estimate("Qwen3-30B-A3B", "tp2,ep8,mbs1,recompute=select", **job)
    second = mw.estimate("Qwen3-30B-A3B", "tp1,ep8,mbs1,recompute=full", **job)
    difference = second.estimate.step_s - first.estimate.step_s
    assert sum(changes) == pytest.approx(difference, abs=1e-9)
    page.evaluate("navigator.clipboard.writeText = async text => { window.copied = text; }")
    page.locator("section", has_text="Side by side").get_by_text("CSV", exact=True).click()
    copied = list(csv.DictReader(io.StringIO(page.evaluate("window.copied"))))
    texts = page.locator(".layout-cell").evaluate_all("all => all.map(one => one.dataset.layout)")
    assert [row["layout"] for row in copied] == texts  # and not the words of a button
    assert "must divide" in page.locator("section", has_text="C beside A").last.inner_text()


@pytest.mark.usefixtures("screen")
def test_a_budget_names_the_fewest_devices(studio, open_page):
    page = open_page(f"{studio}budget?{TINY}&layout=ep4&tokens=1T&price=2")
    page.wait_for_selector("[data-fewest]:not([data-fewest='0'])", timeout=120000)
    fewest = int(page.locator("[data-fewest]").get_attribute("data-fewest"))
    plans = mw.plan("OLMoE-1B-7B-0924", on="4xH100", global_batch=64, fewest=True, top=1)
    assert fewest == plans.best.hardware.count
    assert "your price" in page.locator("#budget-answer").inner_text()
    assert page.locator("tbody tr").count() >= 4
    assert "logarithmic" in page.locator("main").inner_text()


def _add_steps(log, steps, step_s):
    """Add steps as Megatron-LM prints them, with 0.3 % of noise, and timers of level 1."""
    with log.open("a") as file:
        for step in steps:
            ms = 1000 * step_s * (1 + 0.003 * random.Random(step).gauss(0, 1))
            file.write(
                f" iteration {step:8d}/ 5000 | consumed samples: {512 * step} |"
                f" elapsed time per iteration (ms): {ms:.1f} | learning rate: 1.0E-04 |"
                " global batch size:   512 | lm loss: 3.65E+00 |\n"
                "(min, max) time across ranks (ms):\n"
                f"    {'forward-backward ':.<48}: ({0.95 * ms:.2f}, {0.96 * ms:.2f})\n"
                f"    {'all-grads-sync ':.<48}: ({ms / 10:.2f}, {ms / 9:.2f})\n"
            )


@pytest.mark.slow
@pytest.mark.usefixtures("screen")
def test_a_watched_log_is_followed_beside_its_band(studio, open_page, tmp_path):
    log = tmp_path / "run.log"
    _add_steps(log, range(1, 201), 27.1)
    job = "run_model=Qwen3-30B-A3B&run_on=16xH100&run_layout=tp2,ep8,recompute=select"
    page = open_page(f"{studio}watch?log={log}&{job}")
    page.wait_for_selector("h1:has-text('step 200')", timeout=60000)
    shown = page.locator("main").text_content()
    parts = ("step 200", "Step time", "trainer", "forward-backward", "all-grads-sync")
    places = list(map(shown.index, parts))
    assert places == sorted(places)
    assert "least in 95 of 100 cases" in shown
    page.locator("main svg.plot").wait_for()
    _add_steps(log, range(201, 301), 28.5)
    page.wait_for_selector("h1:has-text('1 alarm')", timeout=60000)
    text = page.locator("main").text_content()
    assert "from step 201 on steps are slower" in text
    assert "days at the pace" in text


@pytest.mark.thorough
def test_a_design_draws_its_shapes_beside_published_models(studio, open_page):
    page = open_page(f"{studio}design?model=Qwen3-30B-A3B&on=8xH100&days=7&max_total=8B")
    page.wait_for_selector("h1:has-text('7 days on 8')", timeout=120000)
    text = page.locator("main").text_content()  # the table of published models is folded
    answer = mw.design(on="8xH100", days=7, max_total="8B")
    assert answer.chosen.model.name in text
    assert answer.published
    assert all(shape.model.name in text for shape in answer.published)
    drawn = page.locator("main svg.plot svg path").evaluate_all(
        "all => all.map(path => (path.getAttribute('d').match(/a/g) || []).length / 2)"
    )
    assert sum(drawn) > len(answer.published)  # a circle is two arcs
    page.locator("summary:has-text('Compare attention')").click()
    page.locator("#kv_heads").fill("0")
    page.locator("#design").click()
    page.wait_for_selector("text=--kv-heads", timeout=60000)
    assert page.locator("#kv_heads").input_value() == "0"  # and it is not folded away
    assert page.locator("#kv_heads").is_visible()
    page.locator("#kv_heads").fill("")
    page.locator("#max_total").fill("lots")
    page.locator("#design").click()
    page.wait_for_selector("text=--max-total", timeout=60000)


def test_what_is_taken_away_opens_alone(studio, open_page, tmp_path):
    page = open_page(f"{studio}share?{SMALL}&layout={LAYOUT}")
    with page.expect_download() as taken:
        page.locator("#get-page").click()
    taken.value.save_as(tmp_path / "page.html")
    with page.expect_download() as taken:
        page.locator("#get-plan").click()
    plan = json.loads(Path(taken.value.path()).read_text())
    job = dict(parse_qsl(SMALL))
    own = mw.estimate(job["model"], "tp2,ep8,mbs1,recompute=select", on=job["on"], global_batch=512)
    assert plan["estimate"]["step_s"] == own.estimate.step_s
    with page.expect_download() as taken:
        page.locator("#get-card").click()
    assert f"{own.estimate.mfu:.1%}" in Path(taken.value.path()).read_text()
    page.locator("[data-target='slurm']").click()
    page.wait_for_selector("pre.file")
    assert "#SBATCH" in page.locator("pre.file").inner_text()
    page.locator("[data-target='torchrun']").click()
    page.wait_for_selector("#export-file .error")
    assert "needs the job file" in page.locator("#export-file").inner_text()
    page.locator("[data-target='k8s']").click()
    assert "needs the container image" in page.locator("#export-file").inner_text()
    page.locator("#export-image").fill("registry/trainer:7")
    page.locator("[data-target='k8s']").click()
    page.wait_for_selector("pre.file")
    assert 'image: "registry/trainer:7"' in page.locator("pre.file").inner_text()
    for picture in ("memory.png", "step.svg"):
        with page.expect_download() as taken:
            page.locator(f"[data-picture='{picture}']").click()
        assert Path(taken.value.path()).stat().st_size > 3000
    alone = open_page((tmp_path / "page.html").as_uri(), offline=True)
    shown = alone.locator("[data-name='step_s']").get_attribute("data-value")
    assert float(shown) == own.estimate.step_s
    alone.locator("svg.plot").nth(2).wait_for()  # memory, the step, memory over the step
    word = alone.locator(".tile a.term", has_text="MFU")
    assert "FLOP" in word.get_attribute("title")
    word.click()
    meaning = alone.locator("#glossary dt:target + dd")
    assert meaning.is_visible()
    assert meaning.inner_text() == word.get_attribute("title")
    assert find_faults(alone) == []


@pytest.mark.usefixtures("screen")
def test_where_nothing_fits_the_page_says_how_near_it_is_and_what_would_fit(studio, open_page):
    page = open_page(f"{studio}top?model=Mixtral-8x22B-v0.1&on=2xH100&seq_len=4096&global_batch=32")
    page.wait_for_selector("[data-enough]", timeout=SEARCH_MS)
    assert "Nothing fits 2 × H100" in page.locator("#verdict h1").inner_text()
    assert re.search(r"lacks [\d.]+ GiB a device", page.locator("#verdict").inner_text())
    count = page.locator("[data-enough]").get_attribute("data-enough")
    page.get_by_role("button", name=f"Plan for {count}").click()
    page.wait_for_selector("#layout-text", timeout=30_000)
    assert f"on={count}xH100" in page.url
