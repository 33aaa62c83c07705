"""Chapters of the course: their numbers are the planner's, and a slip of the pen is refused."""

import itertools
import random
import re
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from moewright.api.requests import read_plan_request
from moewright.codec import parse_layout
from moewright.search.search import build_plan
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Collective
from moewright.spec.layout import (
    LAYOUT_FIELDS,
    CpComm,
    CudaGraphScope,
    DispatcherKind,
    Overlap,
    Recompute,
    Schedule,
)
from moewright.spec.ledger import Component, Module
from moewright.spec.options import WorkloadOptions
from moewright.spec.plan import TimePart, Verdict
from moewright.spec.workload import Dtype, Routing
from moewright.view.course.chapter import (
    PictureBlock,
    QuestionBlock,
    RunBlock,
    SandboxBlock,
    list_chapters,
    load_chapter,
    read_chapter,
)
from moewright.view.course.course_pages import (
    list_site_pages,
    load_questions,
    replace_mathematics,
    replace_pictures,
    write_questions,
)
from moewright.view.course.figures import compute_figure
from moewright.view.course.glossary import find_term, list_terms
from moewright.view.course.inline import read_figure
from moewright.view.course.lesson import open_lesson
from moewright.view.course.lesson_html import LessonWriter, ReadingPlace
from moewright.view.course.mathematics import write_mathematics
from moewright.view.course.route_pictures import load_tiny_router

CHAPTERS = list_chapters()
# Tables in which a line is looked up; every other page is split when it grows.
# An entry a term, a row of a publisher, or a verb: nobody reads these pages through.
_LOOKED_UP = ("glossary.md", "accuracy/", "reference/examples.md")
HEAD = """+++
title = "t"
question = "q"
audience = "a"
[settings]
model = "Qwen/Qwen3-30B-A3B"
device = "H100"
devices = 8
seq_len = 4096
global_batch = 64
ep = 8
+++
"""


def list_states(chapter):
    """Return all states of a chapter: a step of every control."""
    keys = [control.key for control in chapter.controls]
    steps = [[step.label for step in control.steps] for control in chapter.controls]
    return [dict(zip(keys, labels, strict=True)) for labels in itertools.product(*steps)]


def write_state(chapter, state):
    """Return the text of a chapter in a state; None where the job is not legal."""
    lesson = open_lesson(chapter, state)
    try:
        assert lesson.plan
    except BadInput:  # not a legal job; what the text asks for may not be refused
        return None
    text = "".join(LessonWriter(lesson=lesson, place=ReadingPlace.STUDIO).write_blocks())
    assert not re.search(r"\bnan\b|\binf\b", text)
    return text


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_is_written_in_states_drawn_at_random(name):
    chapter = load_chapter(name)
    assert write_state(chapter, {}) is not None
    states = list_states(chapter)
    for state in random.sample(states, min(4, len(states))):
        write_state(chapter, state)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_is_written_in_every_state(name):
    chapter = load_chapter(name)
    texts = [write_state(chapter, state) for state in list_states(chapter)]
    assert sum(text is not None for text in texts) > len(texts) / 2


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_has_a_picture_three_questions_a_sandbox_and_a_run(name):
    blocks = load_chapter(name).blocks
    questions = [block for block in blocks if isinstance(block, QuestionBlock)]
    assert sum(not block.is_exercise for block in questions) == 3
    for kind in (PictureBlock, SandboxBlock, RunBlock):
        assert any(isinstance(block, kind) for block in blocks), kind


@pytest.mark.parametrize("name", CHAPTERS)
def test_the_sandbox_opens_the_job_whose_numbers_the_chapter_has(name):
    lesson = open_lesson(load_chapter(name), {})
    query = {key: values[0] for key, values in parse_qs(lesson.address).items()}
    options = WorkloadOptions(
        seq_len=int(query["seq_len"]),
        global_batch=int(query["global_batch"]),
        precision=Dtype(query["precision"]),
    )
    request = read_plan_request(query["model"], query["on"], options)
    layout = parse_layout(query["layout"], world_size=request.hardware.count)
    own = build_plan(request.model, request.workload, request.hardware, layout)
    assert own.estimate == lesson.plan.estimate


def figure_text(expression, **settings):
    lesson = open_lesson(read_chapter("t", HEAD), {}).change(settings)
    return str(compute_figure(lesson, read_figure(expression)))


def test_figures_are_those_of_the_estimate():
    lesson = open_lesson(read_chapter("t", HEAD), {})
    estimate = lesson.plan.estimate
    assert figure_text("step * 1000 : number") == f"{1000 * estimate.step_s:,.0f}"
    assert figure_text("mfu") == f"{estimate.mfu:.0%}"
    more = lesson.change({"mbs": "2"}).plan.estimate
    saved = compute_figure(lesson, read_figure('at("mbs=2", peak) - peak')).number
    assert saved == more.peak_bytes - estimate.peak_bytes
    parts = ("weights", "gradients", "master", "moments")
    total = compute_figure(lesson, read_figure("memory.states")).number
    assert total == sum(
        compute_figure(lesson, read_figure(f"memory.{part}")).number for part in parts
    )


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("It takes 80 GiB.", "80 is written, not computed"),
        ("A share of 12 % is lost.", "12 % is written"),
        ("It is {{peek}}.", "peak"),
        ("It is {{memory.states_of}}.", "no such figure"),
        ("It is {{peak : miles}}.", "a unit is one of"),
        ("It is {{__import__('os')}}.", "no arithmetic"),
        ('It is {{at("tq=2", peak)}}.', "tq"),
        ('It is {{at("ep=7", peak)}}.', "ep"),
        ("It is {{peak / layout.pp * 0 + peak / (1 - 1)}}.", "divides by zero"),
        ("It is {{peak.", "{{ opens or closes nothing"),
        ("The [[experrt]] waits.", "has no such word"),
        ("Look at $\\frob x$.", "\\frob is not known"),
        ("Look at $\\frac{a}{b$.", "no } closes"),
        ("Look at $\\left(a$.", "no \\right closes"),
        ("Look at $\\left x$.", "a bracket is one of"),
        ("::: pictur device\n:::", "there is no directive pictur"),
        ("::: picture devise\n:::", "device"),
        ("::: picture device\nnever ends", "no ::: ends this block"),
        ("::: controls ep\n:::", "ep"),
        ("::: question\nHow much?\nhint: Look.\n:::", "a question has hint:"),
        ("> quoted", "is neither a paragraph"),
        ("**half bold", "** opens or closes nothing"),
    ],
)
def test_a_slip_of_the_pen_is_refused_in_one_line(text, word):
    with pytest.raises(BadInput) as refusal:
        LessonWriter(
            lesson=open_lesson(read_chapter("t", HEAD + text), {}), place=ReadingPlace.SITE
        ).write_blocks()
    assert word in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_names_with_digits_and_cited_figures_are_no_numbers_of_ours():
    text = (
        "1F1B and ZeRO-1 in bf16 on an H100; [1,461 tokens a second](https://a.example) measured."
    )
    assert read_chapter("t", HEAD + text).blocks


def test_a_chapter_that_does_not_exist_names_the_nearest():
    with pytest.raises(BadInput, match="memory"):
        load_chapter("memori")
    with pytest.raises(BadInput, match="takes"):
        open_lesson(load_chapter("memory"), {"layers": "13"})


def test_every_page_of_the_site_is_written():
    pages = dict(list_site_pages())
    assert set(pages) == {"learn/index.md", *(f"learn/{name}.md" for name in CHAPTERS)}
    for text in pages.values():
        assert "{{" not in text
        assert ":::" not in text


def test_formulas_are_written_as_mathml_and_code_stays():
    fraction = "<mfrac><mi>a</mi><mrow><mi>b</mi><mo>+</mo><mn>1</mn></mrow></mfrac>"
    assert fraction in write_mathematics("\\frac{a}{b+1}")
    assert "<munderover><mo>∑</mo>" in write_mathematics("\\sum_{i}^{n} x_i")
    assert replace_mathematics("`$x$` costs $5 and $6") == "`$x$` costs $5 and $6"
    assert "<mn>6</mn>" in replace_mathematics("takes $6 + x$ bytes")
    assert replace_mathematics("so $x^2$ is") == (
        "so <math><mrow><msup><mi>x</mi><mn>2</mn></msup></mrow></math> is"
    )


def test_ten_questions_are_answered_each_from_a_chapter():
    questions = load_questions()
    assert len(questions) == 10
    assert {question.chapter for question in questions} == set(CHAPTERS)
    assert "{{" not in write_questions(ReadingPlace.SITE)


def test_what_the_small_model_routed_is_whole():
    router = load_tiny_router()
    rows = router.token_count * router.top_k
    for layer in range(router.layers):
        for token, word in enumerate(router.words):
            assert sum(router.probabilities[layer][token]) == pytest.approx(1, abs=1e-3)
            assert sum(router.weights(layer, token)) == pytest.approx(1)
            assert len({*router.choose(layer, token)}) == router.top_k
            if word.isalpha():
                assert load_chapter("route").control("token").steps[token].label == word
    steps = load_chapter("imbalance").control("balance").steps
    assert set(router.counts) == {step.settings["balance"] for step in steps}
    for layers in router.counts.values():
        assert {sum(counts) for counts in layers} == {rows}
        for counts in layers:
            assert max(counts) <= router.token_count
            assert router.dropped_share(counts, 0) == 0
            shares = [router.dropped_share(counts, factor) for factor in (1, 1.25, 1.5, 2)]
            assert shares == sorted(shares, reverse=True)
            assert shares[0] > 0.1


@pytest.mark.parametrize("balance", ["bias", "loss"])
def test_what_balances_makes_every_layer_more_even(balance):
    router = load_tiny_router()
    for counts, uneven in zip(router.counts[balance], router.counts["none"], strict=True):
        assert max(counts) < max(uneven)


@pytest.mark.parametrize(
    ("enum", "prefix"),
    [
        (Component, "component "),
        (Module, "module "),
        (TimePart, "time "),
        (Collective, "collective "),
        (DispatcherKind, "dispatcher="),
        (Recompute, "recompute="),
        (Overlap, "overlap="),
        (CudaGraphScope, "graphs="),
        (CpComm, "cp_comm="),
        (Verdict, "verdict "),
        (Routing, "routing "),
        (Schedule, ""),
    ],
)
def test_every_value_of_an_enum_is_a_word_of_the_glossary(enum, prefix):
    for member in enum:
        assert find_term(f"{prefix}{member.value}").meaning


@pytest.mark.parametrize(
    "field", [field for field in LAYOUT_FIELDS if field.facts.label], ids=lambda field: field.name
)
def test_every_control_of_the_studio_is_a_word_of_the_glossary(field):
    """The name above its values leads there: by its label, or by its key."""
    terms = list_terms()
    assert field.facts.label.lower() in terms or field.name in terms


def test_no_page_of_the_documentation_has_more_than_four_thousand_words():
    docs = Path(__file__).resolve().parents[2] / "docs"
    for page in sorted(docs.rglob("*.md")):
        name = page.relative_to(docs).as_posix()
        most = 5000 if page.parent.name == "log" else 4000  # entries come in at the top of these
        if not name.startswith(_LOOKED_UP):
            assert len(page.read_text("utf-8").split()) <= most, f"split {name}"


def test_pages_of_the_documentation_have_pictures_and_formulas_that_can_be_written():
    docs = Path(__file__).resolve().parents[2] / "docs"
    formulas = 0
    for page in (*sorted(docs.glob("*.md")), docs / "gpu" / "expected.md"):
        text = page.read_text("utf-8")
        written = replace_pictures(replace_mathematics(text))
        assert not re.search("<!-- (course|picture|bars):", written), page.name
        if page.name.startswith("formulas"):
            assert "$" not in re.sub(r"`[^`]*`", "", written), page.name
            formulas += written.count("<math")
        assert "/view/course/chapters/" not in written, page.name
    assert formulas >= 150


def test_every_page_of_understand_has_a_picture():
    root = Path(__file__).resolve().parents[2]
    site = (root / "mkdocs.yml").read_text("utf-8")
    part = site.partition("- Understand:")[2].partition("- Decisions:")[0]
    pages = re.findall(r"^ {6}- .*: (\S+\.md)$", part, re.MULTILINE)
    assert len(pages) >= 12
    for page in pages:
        text = replace_pictures((root / "docs" / page).read_text("utf-8"))
        assert "<svg" in text or ".svg)" in text, f"{page} has no picture"


def test_bars_are_drawn_of_the_table_before_them():
    table = "| card | step | model |\n|---|---|---|\n| a | 1,200.5 ms | m |\n| b | 300 ms | m |\n"
    written = replace_pictures(f"{table}\n<!-- bars: step by card in model -->")
    widths = [float(width) for width in re.findall(r'<rect[^>]* width="([\d.]+)"', written)]
    assert widths[0] / widths[1] == pytest.approx(1200.5 / 300, rel=1e-2)
    for text, word in [
        (f"{table}\n<!-- bars: steep by card in model -->", "the table has card, step, model"),
        (f"{table}\n<!-- bars: model by card in step -->", "has no number"),
        ("<!-- picture: mixer: words -->", "mixers"),
        ("<!-- course: memory timetable -->", "no such picture"),
    ]:
        with pytest.raises(BadInput, match=word):
            replace_pictures(text)
