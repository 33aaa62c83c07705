"""Write docs/reference/command_line.md: every verb with its options, from the program's own help.

`make docs` runs it, and a test compares the page with what it would write, so that neither can
drift from the command line.
"""

from __future__ import annotations

import re
from pathlib import Path

from moewright.cli.verbs import build_app

PAGE = Path(__file__).parents[1] / "reference" / "command_line.md"

_INTRODUCTION = """# The command line

`moewright VERB --help` prints the same text. This page is made from it.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | a file cannot be read or written; `dryrun` found a difference; `tune` found nothing valid |
| 2 | input that cannot be used; one line on stderr says what, and the nearest legal value |
| 3 | a rank failed; `estimate`: the layout does not fit; `check`: it fitted before the change |
| 4 | `check`: a budget is broken |
| 5 | `watch`: there was an alarm |
| 130 | interrupted |
| 141 | the reader of the output closed it |
| 143 | saved and ended on SIGTERM |

Text output is for people; `--json PATH` writes the same as data, and `--json -` gives standard
output to the data alone: tables go to standard error. `python -m moewright` starts the same
program.
"""


def render_page() -> str:
    """Return the text of the page."""
    text = build_app().generate_docs(usage_name="moewright")
    verbs = text[text.index("**Commands**") :]
    # A usage line names the program that asks: "moewright plan -m docs.tools.command_reference".
    verbs = re.sub(r"^(moewright .*?) -m [\w.]+", r"\1", verbs, flags=re.MULTILINE)
    lines = (line.rstrip() for line in f"{_INTRODUCTION}\n{verbs}".splitlines())
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(render_page(), encoding="utf-8")
