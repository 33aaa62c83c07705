"""Names in files reach neither the terminal nor a spreadsheet as commands."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moewright.cli
from moewright.cli.answers import print_now
from moewright.cli.main import main
from moewright.intake.hf import read_config
from moewright.spec.errors import BadInput, Reason, escape_controls
from moewright.spec.quoting import Csv

HOSTILE = "a\x1b[2J\u202eb\x07\ud800"


@given(st.text())
def test_what_is_escaped_prints(text: str) -> None:
    escaped = escape_controls(text)
    assert escaped.isprintable()
    assert escape_controls(escaped) == escaped
    escaped.encode()


def test_a_refusal_is_one_line_that_prints() -> None:
    text = str(BadInput(Reason(field=HOSTILE, rule="is\nno name", value="\x9b31m")))
    assert text == r"a\x1b[2J\u202eb\x07\ud800=\x9b31m: is no name"


def test_the_name_of_a_folder_is_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "evil\x1b]0;title\x07"
    folder.mkdir()
    config = Path("recipes/quickstart/config.json").read_text()
    (folder / "config.json").write_text(config)
    assert read_config(folder).name == r"evil\x1b]0;title\x07"
    arguments = ["estimate", str(folder), "--on", "8xH100", "--layout", "ep8"]
    assert main(arguments) == 0
    (folder / "config.json").write_text(json.dumps({"model_type": HOSTILE}))
    assert main(arguments) == 2
    captured = capsys.readouterr()
    for text in (captured.out, captured.err):
        assert all(line.isprintable() for line in text.splitlines())


def test_verbs_tell_people_what_they_do_by_one_function() -> None:
    """A bare print would not wrap on a terminal; what is written to a stream or piecewise may."""
    folder = Path(moewright.cli.__path__[0])
    bare = [
        f"{path.name}:{node.lineno}"
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
        and not {"file", "end"} & {keyword.arg for keyword in node.keywords}
        and (path.name, bool(node.args)) not in {("answers.py", True), ("chat.py", False)}
    ]
    assert bare == []


def test_a_told_line_stands_below_its_first_word_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "wall     memory (dispatcher): " + "a title of several words, " * 6 + "end"
    print_now(line)
    assert capsys.readouterr().out == f"{line}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    print_now(line)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2
    assert all(len(part) <= 80 for part in lines)
    assert all(part.startswith(" " * 9) and part[9] != " " for part in lines[1:])
    assert " ".join(" ".join(lines).split()) == " ".join(line.split())


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        ("=1+1", "'=1+1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("+x", "'+x"),
        ("-cmd", "'-cmd"),
        ("-1.5", "-1.5"),
        ("+3%", "+3%"),
        ("-", "-"),
        ("tp2,ep8", "tp2,ep8"),
    ],
)
def test_no_cell_is_a_formula(cell: str, written: str) -> None:
    assert Csv.quote(cell) == written
