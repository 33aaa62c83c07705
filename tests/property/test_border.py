"""Text of records stays text wherever it leaves: in exports, pages, tables and lines.

The records are built here, past the checks of what is read, so that the border itself is tested.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import moewright as mw
from moewright.report.document import render_markdown
from moewright.report.sweep_table import build_sweep_document, render_csv, render_svg
from moewright.spec.errors import BadInput, Reason, escape_controls, has_controls
from moewright.spec.plan import Plan
from moewright.spec.quoting import Csv, Html, Json, Markdown, Python, Shell, Toml, Yaml
from moewright.spec.record import render_html_table
from moewright.tuning.sweep import SweepRow, SweepRowSpec
from moewright.view.page import render_page

PLAIN = "abc"
# What ends a comment, a word, a constant, a cell or an element somewhere, beside any text at all.
PAYLOADS = (
    *("\rimport os", "\nimport os", "\u2028import os", "\x0cimport os", "\x85import os"),
    *("'; touch x; '", '"; touch x; "', "$(touch x)", "`touch x`", "${IFS}x", "a\\", "\\'", "# x"),
    *("'''", '"""', "{0}", "{}", "%s", "]]>", "</script><script>x", "<b onload=x>", "&lt;", "-->"),
    *("=1+1", "@SUM(A1)", "+cmd", "-cmd", "＝1", " =1", "a,b", 'a"b', "a|b", "a\tb", "- a", ": a"),
    *("!!python/object:x", "*a", "&a", "[a]", "\x1b[2J", "\u202eb", "\ud800", "\x00", "\x7f", "~"),
)
hostile_text = st.one_of(st.sampled_from(PAYLOADS), st.text(min_size=1, max_size=12)).flatmap(
    lambda payload: st.sampled_from((payload, f"abc{payload}", f"abc{payload}def"))
)
TARGETS = ("megatron", "bridge", "torchtitan", "slurm", "k8s", "torchrun")


def plans() -> dict[str, Plan]:
    return {
        "moe": mw.estimate("Qwen3-30B-A3B", "ep8,recompute=full", on="8xH100"),
        "dense": mw.estimate("meta-llama/Llama-3.1-8B", "zero3", on="8xH100"),
    }


PLANS = plans()


def text_fields(record: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the place of each free text of a record and of the records in it."""
    for field in fields(record):
        value = getattr(record, field.name)
        if is_dataclass(value):
            yield from text_fields(value, (*path, field.name))
        elif type(value) is str:
            yield (*path, field.name)


def with_text(record: Any, path: tuple[str, ...], text: str) -> Any:
    name, *rest = path
    value = with_text(getattr(record, name), tuple(rest), text) if rest else text
    return replace(record, **{name: value})


def export(plan: Plan, target: str, job: str = "", *, run_dir: str = ".", image: str = "") -> str:
    """Return an export; "" where it is refused, in one line that prints."""
    options = {"job": job, "run_dir": run_dir, "image": image or PLAIN * (target == "k8s")}
    try:
        return mw.export(plan, to=target, **options)
    except BadInput as error:
        refusal = str(error)
    assert refusal.isprintable()
    return ""


def structure(target: str, text: str) -> Any:
    """Return what a reader of the target makes of a file, with the place of each text open."""
    if target in ("bridge", "torchtitan"):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                node.value = ""
        return ast.dump(tree)
    if target == "k8s":
        return [outline(part) for part in yaml.safe_load_all(text)]
    # shlex joins lines and leaves comments out, as a shell does.
    words = shlex.split(text.replace("\\\n", ""), comments=True)
    return len(words)


def outline(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: outline(value) for key, value in data.items()}
    if isinstance(data, list):
        return [outline(item) for item in data]
    return type(data)


CASES = [
    (name, target, job, path)
    for name, plan in PLANS.items()
    for target in TARGETS
    for job in ("", "job.toml")
    if export(plan, target, job)
    for path in text_fields(plan)
    if export(with_text(plan, path, PLAIN), target, job)
]


def test_the_fields_that_the_fault_was_in_are_looked_at() -> None:
    paths = {(target, path) for _, target, _, path in CASES}
    assert {("bridge", ("fingerprint",)), ("torchtitan", ("fingerprint",))} <= paths
    assert ("megatron", ("model", "name")) in paths
    assert {target for target, _ in paths} == set(TARGETS)


@settings(max_examples=300)
@given(st.sampled_from(CASES), hostile_text)
def test_an_export_has_the_structure_that_plain_text_gives(
    case: tuple[str, str, str, tuple[str, ...]], text: str
) -> None:
    name, target, job, path = case
    exported = export(with_text(PLANS[name], path, text), target, job)
    if not exported:
        return
    assert not any(map(has_controls, exported.split("\n")))
    plain = export(with_text(PLANS[name], path, PLAIN), target, job)
    assert structure(target, exported) == structure(target, plain)


@settings(max_examples=150)
@given(st.sampled_from(["slurm", "k8s", "torchrun"]), hostile_text)
def test_names_of_files_and_images_are_words(target: str, text: str) -> None:
    image = text if target == "k8s" else ""
    exported = export(PLANS["moe"], target, text, run_dir=text, image=image)
    if exported:
        plain = export(PLANS["moe"], target, PLAIN, run_dir=PLAIN)
        assert structure(target, exported) == structure(target, plain)


def test_bash_reads_what_is_exported() -> None:
    for payload in PAYLOADS:
        plan = replace(PLANS["moe"], fingerprint=payload)
        plan = replace(plan, model=replace(plan.model, name=f"o/{payload}"))
        for target, job in (("megatron", ""), ("slurm", ""), ("slurm", "job.toml")):
            script = export(plan, target, job)
            if script:
                subprocess.run(["bash", "-n"], input=script.encode(), check=True)


@given(hostile_text)
def test_a_shells_words_are_those_given(text: str) -> None:
    if has_controls(text):
        with pytest.raises(BadInput, match="control characters"):
            Shell.write("{}", text)
        return
    assert shlex.split(Shell.write("echo {} {}", text, PLAIN)) == ["echo", text, PLAIN]


@given(hostile_text)
def test_constants_come_back_as_they_were(text: str) -> None:
    assert ast.literal_eval(Python.write("[{}, {}]", text, [text, None])) == [text, [text, None]]
    assert json.loads(Json.dump({"a": text})) == {"a": text}
    if not any("\ud800" <= letter <= "\udfff" for letter in text):
        assert yaml.safe_load(Yaml.dump({"a": text, "b": [text, {"c": text}]})) == {
            "a": text, "b": [text, {"c": text}]
        }  # fmt: skip
        assert tomllib.loads(Toml.dump({"a": text, "b": {"c": [text]}})) == {
            "a": text, "b": {"c": [text]}
        }  # fmt: skip


@given(hostile_text)
def test_a_comment_is_one_line(text: str) -> None:
    for target in (Shell, Python):
        comment = target.comment("plan {}", text)
        assert comment.isprintable()
        assert len(comment.splitlines()) == 1
    assert not ast.parse(Python.lines([Python.comment("plan {}", text)])).body


class Tags(HTMLParser):
    """The tags and attributes of a page, and the text outside of scripts."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[Any] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, [name for name, _ in attrs]))

    def handle_data(self, data: str) -> None:
        self.text += data


def read_tags(page: str) -> Tags:
    parser = Tags()
    parser.feed(page)
    parser.close()
    return parser


@settings(max_examples=100)
@given(hostile_text)
def test_a_page_has_no_tags_of_its_text(text: str) -> None:
    row = {text: text, "number": 3}
    for render in (
        lambda text: render_html_table(text, [{text: text, "number": 3}]),
        lambda text: Html.write('<p title="{}">{}</p>', text, text),
        lambda text: render_svg({text: [sweep_row(text)]}),
    ):
        assert read_tags(render(text)).tags == read_tags(render(PLAIN)).tags
    assert escape_controls(text) in read_tags(render_html_table("", [row])).text or "\n" in text
    data = Html.embed({"name": text})
    assert not {"<", ">", "&", "\u2028", "\u2029"} & set(data)
    assert json.loads(data) == {"name": text}


def test_a_file_of_a_page_has_no_tags_of_its_text() -> None:
    plain = read_tags(render_page((), PLAIN)).tags
    for payload in PAYLOADS:
        assert read_tags(render_page((), payload)).tags == plain


def sweep_row(text: str) -> SweepRow:
    spec = SweepRowSpec(name=text, layout="tp1")
    return SweepRow(
        spec=spec,
        seq_len=1,
        global_batch=1,
        devices=1,
        predicted=None,
        refusal="",
        measured=None,
        trial=None,
    )


def sweep_markdown(text: str) -> str:
    return render_markdown(build_sweep_document(text, {text: [sweep_row(text)]}, {}))


@given(hostile_text)
def test_a_table_has_the_rows_and_cells_that_plain_text_gives(text: str) -> None:
    rows = list(csv.reader(io.StringIO(render_csv({text: [sweep_row(text)]}))))
    plain = list(csv.reader(io.StringIO(render_csv({PLAIN: [sweep_row(PLAIN)]}))))
    assert [len(row) for row in rows] == [len(row) for row in plain]
    for cell in rows[1][:2]:
        assert not cell.lstrip().startswith(("=", "@", "＝", "＋", "＠", "－"))
        assert cell.isprintable()
    markdown = sweep_markdown(text)
    assert len(markdown.split("\n")) == len(sweep_markdown(PLAIN).split("\n"))
    assert markdown.replace("\\|", "").count("|") == sweep_markdown("x").count("|")


@given(hostile_text)
def test_a_refusal_is_one_line_that_prints(text: str) -> None:
    reason = Reason(field=text, rule=text, value=text, nearest=text)
    assert str(BadInput(reason)).isprintable()


def test_no_text_becomes_a_target_but_by_its_writer() -> None:
    for target in (Shell, Python, Yaml, Toml, Json, Html, Markdown, Csv):
        with pytest.raises(TypeError, match="made by write"):
            target("rm -rf x")
    with pytest.raises(TypeError, match="quotes by itself"):
        Shell.write("{!r}", "x")
