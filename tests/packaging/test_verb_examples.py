"""Every verb has a page, an example with its output, JSON with named keys, and exit codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.tools import command_reference
from docs.tools.verb_examples import (
    EXAMPLES,
    list_options,
    prepare_folder,
    read_page,
    render_example,
    run_example,
    write_command,
)
from moewright.cli.exit_codes import describe_exits, exit_meanings
from moewright.cli.main import main
from moewright.cli.verbs import build_app, list_verbs

VERBS = dict(list_verbs(build_app()))
REFERENCE = "".join(
    path.read_text(encoding="utf-8") for path in command_reference.FOLDER.glob("command_line_*.md")
)
# What a stable example reads that another one wrote.
NEEDS = {"export": "estimate"}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_has_a_page_an_example_json_and_exit_codes(verb: str) -> None:
    part = re.search(rf"^###? moewright {verb}\n(.*?)(?=^##|\Z)", REFERENCE, flags=re.M | re.S)
    assert part is not None
    assert describe_exits(verb) in part[1]
    section = read_page()[verb]
    assert f"    {write_command(verb)}\n\n```\n" in section, (
        "run: python -m docs.tools.verb_examples"
    )
    assert f"\nExit code {EXAMPLES[verb].code}. " in section
    assert EXAMPLES[verb].code in exit_meanings(verb)
    assert {0, 1, 2} <= exit_meanings(verb).keys()
    keys = re.findall(r"^Exit code \d\. `--json`: (.+)\.$", section, flags=re.MULTILINE)
    assert bool(keys) != bool(EXAMPLES[verb].no_json)
    assert not keys or "--json" in list_options(VERBS[verb])


def test_examples_are_of_verbs() -> None:
    assert EXAMPLES.keys() == VERBS.keys() == read_page().keys()


@pytest.mark.parametrize("verb", VERBS)
def test_an_option_that_is_misspelt_is_one_line_with_the_nearest(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in list_options(VERBS[verb]) or ("--help",):
        misspelt = f"{option[:-1]}{option[-1] * 3}"
        assert main([*verb.split(), misspelt]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        assert option in line.removeprefix(misspelt), (verb, option, line)


@pytest.mark.slow
@pytest.mark.parametrize("verb", [verb for verb, item in EXAMPLES.items() if item.is_stable])
def test_an_example_prints_what_its_page_shows(verb: str, tmp_path: Path) -> None:
    prepare_folder(tmp_path)
    if verb in NEEDS:
        run_example(NEEDS[verb], tmp_path)
    answer = run_example(verb, tmp_path)
    section = read_page()[verb]
    assert section.strip() == render_example(verb, answer).removeprefix("## ").strip()
