"""Text of a stranger's file is one line without control characters, whichever field holds it."""

from __future__ import annotations

import importlib
import json
import pkgutil
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moewright.spec
from moewright.cli.main import main
from moewright.codec import from_data, read_json, to_data
from moewright.spec.errors import BadInput, Paragraph, has_controls
from moewright.spec.layout import Layout
from moewright.spec.plan import Plan
from moewright.spec.stage_string import StageString, parse_stages
from sample_run import plan

HOSTILE = ("\r", "\n", "\x1b[2J", "\u2028", "\u2029", "\ud800", "\0", "\x85", "\x7f", "\u202e")
# What may be said in several lines; every other text is one.
PARAGRAPHS = {("Incident", "message"), ("Incident", "gave_up")}


def records() -> list[type]:
    """Return every record of spec, which are those that a plan and a run are made of."""
    found = {}
    for module in pkgutil.iter_modules(moewright.spec.__path__):
        names = vars(importlib.import_module(f"moewright.spec.{module.name}"))
        found |= {
            name: cls for name, cls in names.items() if isinstance(cls, type) and is_dataclass(cls)
        }
    return list(found.values())


def holds_text(hint: Any) -> bool:
    return hint in (str, StageString, Paragraph) or any(map(holds_text, get_args(hint)))


TEXTS = [
    (record, field.name, get_type_hints(record)[field.name])
    for record in records()
    for field in fields(record)
    if holds_text(get_type_hints(record)[field.name])
]


def refusal(record: type, field: str, value: Any) -> str:
    """Return the Reason that a value of a field is refused with, whatever else is missing."""
    with pytest.raises(BadInput) as caught:
        from_data(record, {field: value}, where="plan.json")
    (reason,) = (
        reason
        for reason in caught.value.reasons
        if reason.field.startswith(f"plan.json: {field}") and "missing" not in reason.rule
    )
    return str(BadInput(reason))


def with_text(hint: Any, text: str) -> Any:
    """Return the plain data of a field's type with `text` at its first place for text."""
    if get_origin(hint) is tuple:
        items = [item for item in get_args(hint) if item is not Ellipsis]
        return [with_text(item, text) if holds_text(item) else 0 for item in items]
    return text


def test_the_records_of_a_plan_are_looked_at() -> None:
    names = {(record.__name__, field) for record, field, _ in TEXTS}
    assert {("Plan", "fingerprint"), ("Layout", "stages"), ("ModelSpec", "name")} <= names
    assert {("DataSpec", "train"), ("Hardware", "name"), ("Evidence", "formula")} <= names
    paragraphs = {(record.__name__, field) for record, field, hint in TEXTS if hint is Paragraph}
    assert paragraphs == PARAGRAPHS


@pytest.mark.parametrize(
    ("record", "field", "hint"), TEXTS, ids=[f"{cls.__name__}.{name}" for cls, name, _ in TEXTS]
)
def test_no_text_holds_control_characters(record: type, field: str, hint: Any) -> None:
    for hostile in HOSTILE:
        if hint is Paragraph and hostile == "\n":
            continue
        message = refusal(record, field, with_text(hint, f"abc{hostile}import os"))
        assert message.isprintable()
        assert "without control characters" in message
        assert "nearest legal value: abc" in message


@given(st.text(), st.sampled_from(TEXTS))
def test_what_is_read_holds_no_control_characters(text: str, field: tuple[type, str, Any]) -> None:
    record, name, hint = field
    if not has_controls(text) or (hint is Paragraph and "\n" in text):
        return
    assert "without control characters" in refusal(record, name, with_text(hint, text))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Et|t#L", "`#` is none of E t m L"),
        ("Et*999999999|tL", "needs a count"),
        ("E(t|)*100000(t|)*100000L", "spells out more than"),
        ("(" * 200_000, "has more than 100000 symbols"),
        (" , ", "spells no stage"),
    ],
)
def test_a_layout_string_is_parsed_where_it_is_read(text: str, rule: str) -> None:
    with pytest.raises(BadInput) as caught:
        from_data(Layout, {"world_size": 4, "stages": text}, where="plan.json: layout")
    assert str(caught.value).startswith("plan.json: layout.stages=")
    assert rule in str(caught.value)
    assert "nearest legal value: Et*3" in str(caught.value)


@given(st.text("EtmL|()*0123, \r\n"))
def test_a_layout_string_that_is_read_is_of_the_grammar(text: str) -> None:
    try:
        stages = from_data(Layout, {"world_size": 4, "stages": text}, where="").stages
    except BadInput:
        return
    assert stages == text
    assert not text or parse_stages(text)


@pytest.mark.parametrize("target", ["bridge", "torchtitan", "megatron", "slurm"])
@pytest.mark.parametrize(
    "change", [{"fingerprint": "f00\rimport os"}, {"layout": {"stages": "Et|tL\rimport os"}}]
)
def test_no_plan_with_code_in_it_is_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, change: dict[str, Any]
) -> None:
    data = to_data(plan())
    for name, value in change.items():
        data[name] = {**data[name], **value} if isinstance(value, dict) else value
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    assert main(["export", str(path), "--to", target]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert next(iter(change)) in line
    assert r"\r" in line


def test_a_plan_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(to_data(plan())))
    assert read_json(Plan, path) == plan()
