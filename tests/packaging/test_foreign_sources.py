"""Every verb has a test beside something that nobody here wrote, and the page names it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.tools.foreign_sources import FOREIGN_SOURCES, PAGE, render_page
from moewright.cli.verbs import build_app, list_verbs

TESTS = Path(__file__).parents[1]
MAKEFILE = (TESTS.parent / "Makefile").read_text(encoding="utf-8")


def test_every_verb_is_held_beside_something_of_others() -> None:
    assert sorted(FOREIGN_SOURCES) == sorted(verb for verb, _ in list_verbs(build_app()))
    assert PAGE.read_text(encoding="utf-8") == render_page(), "run: make docs"


@pytest.mark.parametrize("verb", FOREIGN_SOURCES)
def test_what_holds_it_is_there(verb: str) -> None:
    test = FOREIGN_SOURCES[verb].test
    file, _, name = test.partition("::")
    if test.startswith("make "):
        assert re.search(rf"^{test.removeprefix('make ')}:", MAKEFILE, flags=re.MULTILINE)
    else:
        text = (TESTS / file).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {name}\(", text, flags=re.MULTILINE)
