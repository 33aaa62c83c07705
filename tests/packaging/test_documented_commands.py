"""Every command that the pages show is one that the program takes: verbs, options and choices."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from moewright.cli.verbs import build_app
from moewright.view.course.chapter import RunBlock, list_chapters, load_chapter

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "start.md",
    ROOT / "docs" / "loop.md",
    ROOT / "docs" / "tuning.md",
    *sorted((ROOT / "docs" / "how_to").glob("*.md")),
)


def _find_commands(page: Path) -> list[list[str]]:
    """Return the words of each command on a page: an indented line, or a quoted cell of a table."""
    text = page.read_text(encoding="utf-8").replace("\\\n", "")
    lines = re.findall(r"^ {4,}moewright (.+)$", text, flags=re.MULTILINE)
    cells = re.findall(r"^\|.*?`moewright ([^`]+)`", text, flags=re.MULTILINE)
    commands = [shlex.split(line, comments=True) for line in (*lines, *cells)]
    return [words[: words.index(">")] if ">" in words else words for words in commands]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_can_be_given(page: Path) -> None:
    app = build_app()
    for words in _find_commands(page):
        app.parse_args(words, print_error=False, exit_on_error=False)


def test_the_pages_show_commands() -> None:
    assert sum(len(_find_commands(page)) for page in PAGES) > 40


@pytest.mark.parametrize("name", list_chapters())
def test_the_command_that_ends_a_chapter_can_be_given(name: str) -> None:
    app = build_app()
    (run,) = (block for block in load_chapter(name).blocks if isinstance(block, RunBlock))
    for line in run.command.splitlines():
        program, *words = shlex.split(line)
        assert program == "moewright"
        app.parse_args(words, print_error=False, exit_on_error=False)
