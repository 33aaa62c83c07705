"""What the pages show of the planner's answers is what it answers."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_documented_commands import PAGES, ROOT

from moewright.cli.main import main

# Verbs whose answer is the same on any machine, where they read nothing but files of a clone.
PLANNING = ("plan", "estimate", "budget", "check", "validate", "design", "export")
# Files that a reader has made before: his runs, commits, scripts.
_MADE = re.compile(r"\b(runs|HF_DIR|job\.toml|plan\.json|cluster\.toml|run\w*\.\w+|lengths|main)\b")


def list_outputs(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of a page that plan, with the lines of the block below each."""
    lines = page.read_text(encoding="utf-8").replace("\\\n", "").split("\n")
    command = ""
    for number, line in enumerate(lines):
        if line.startswith("    moewright "):
            command = line.strip()
        elif line == "```" and command:
            end = lines.index("```", number + 1)
            verb = command.split()[1]
            if verb in PLANNING and not _MADE.search(command):
                yield command, lines[number + 1 : end]
            command = ""
        elif line.startswith(("```", "#")):
            command = ""


OUTPUTS = [
    pytest.param(command, lines, id=f"{page.stem}: {command}"[:80])
    for page in PAGES
    for command, lines in list_outputs(page)
]


def test_pages_show_outputs() -> None:
    assert len(OUTPUTS) >= 5


@pytest.mark.slow
@pytest.mark.parametrize(("command", "lines"), OUTPUTS)
def test_the_output_of_a_page_is_what_is_printed(
    command: str,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Lines may be left out, and parts of lines where three points stand."""
    monkeypatch.chdir(ROOT)
    main(shlex.split(command)[1:])
    done = capsys.readouterr()
    printed = " ".join((done.out + done.err).split())
    parts = [" ".join(part.split()) for line in lines for part in line.split("...")]
    assert [part for part in parts if part not in printed] == []
