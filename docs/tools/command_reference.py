"""Write the pages of the command line: every verb with its options, from the program's own help.

`make docs` runs it, and a test compares the pages with what it would write, so that neither can
drift from the command line.
"""

from __future__ import annotations

import re
from pathlib import Path

from docs.tools.verb_examples import EXAMPLES
from moewright.cli.exit_codes import describe_exits
from moewright.cli.verbs import build_app, list_verbs

FOLDER = Path(__file__).parents[1] / "reference"

_INTRODUCTION = """# The command line

`moewright VERB --help` prints the same text. This page is made from it.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | standard output full, memory out; `dryrun`, `verify`: a difference; `tune`: none is valid |
| 2 | input or a file that cannot be used; a line on stderr says what, and the nearest legal one |
| 3 | a rank failed; `estimate`: the layout does not fit; `check`: it fitted before the change |
| 4 | `check`: a budget is broken |
| 5 | `watch`: there was an alarm |
| 130 | interrupted |
| 141 | the reader of the output closed it |
| 143 | saved and ended on SIGTERM |

Text output is for people; `--json PATH` writes the same as data, and `--json -` gives standard
output to the data alone: tables go to standard error. `python -m moewright` starts the same
program. [What each verb is held beside](foreign_sources.md) lists tests against what others wrote.
"""
# A page of verbs: its title and the verbs. Every verb of the program stands on one of them.
_PAGES = {
    "command_line_plan.md": (
        "Verbs that plan",
        "plan estimate budget design models hardware",
    ),
    "command_line_scripts.md": ("Verbs for other trainers' launch scripts", "capture export check"),
    "command_line_run.md": (
        "Verbs that train",
        "data train finetune chat dryrun verify upcycle convert",
    ),
    "command_line_measure.md": ("Verbs that measure", "tune bench fit validate"),
    "command_line_watch.md": (
        "Verbs that look at runs and serve",
        "report diagnose watch forecast compare studio mcp completion",
    ),
}


def render_pages() -> dict[str, str]:
    """Return the text of every page by its name: the list of verbs, and the pages of verbs."""
    text = build_app().generate_docs(usage_name="moewright")
    text = text[text.index("**Commands**") :]
    # A usage line names the program that asks: "moewright plan -m docs.tools.command_reference".
    text = re.sub(r"^(moewright .*?) -m [\w.]+", r"\1", text, flags=re.MULTILINE)
    listed, *sections = re.split(r"^(?=## moewright )", text, flags=re.MULTILINE)
    verbs = {section.split(maxsplit=3)[2]: section for section in sections}
    pages = {verb: page for page, (_, names) in _PAGES.items() for verb in names.split()}
    listed = re.sub(r"\(#(moewright-(\w+))\)", lambda link: f"({pages[link[2]]}#{link[1]})", listed)
    written = {"command_line.md": f"{_INTRODUCTION}\n{listed}"}
    for page, (title, names) in _PAGES.items():
        body = "".join(_add_exits(verbs.pop(verb)) for verb in names.split())
        written[page] = f"# {title}\n\nOf [the command line](command_line.md).\n\n{body}"
    assert not verbs, f"no page has {', '.join(verbs)}"
    return {page: _strip(text) for page, text in written.items()}


def _add_exits(section: str) -> str:
    """Return the section of a verb, or of a group of verbs, with the exit codes below each."""
    parts = re.split(r"^(?=###? moewright )", section, flags=re.MULTILINE)
    return "".join(map(_add_exits_of_verb, parts))


def _add_exits_of_verb(part: str) -> str:
    verb = part.partition("\n")[0].lstrip("#").strip().removeprefix("moewright ")
    if verb not in dict(list_verbs(build_app())):  # the heading of a group
        return part
    exits = describe_exits(verb)
    if verb in EXAMPLES:
        exits += f" [An example with its output](examples.md#{verb.replace(' ', '-')})."
    return f"{part.rstrip()}\n\n{exits}\n\n"


def _strip(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip() + "\n"


if __name__ == "__main__":
    for page, text in render_pages().items():
        (FOLDER / page).write_text(text, encoding="utf-8")
