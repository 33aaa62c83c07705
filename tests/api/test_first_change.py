"""The walks of docs/how_to/your_first_change.md, each done in a copy of the tree, and run there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how_to" / "your_first_change.md"
_BLOCK = re.compile(r'^( *)```(\w+)(?: title="([^"]+)")?\n(.*?)^ *```$', re.DOTALL | re.MULTILINE)
# Files that every walk changes besides those of its blocks: changelog and a test.
BESIDE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A block of a walk: a change of a file, a new file, or what is run ("" for its file)."""

    language: str
    file: str
    text: str


def read_walk(title: str) -> list[Block]:
    """Return the blocks of a section of the page."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [
        Block(language=match[2], file=match[3] or "", text=dedent(match[4]))
        for match in _BLOCK.finditer(section)
    ]


def apply_change(path: Path, diff: str) -> None:
    """Replace the lines of a diff without numbers, which must stand once in the file."""
    lines = diff.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if not line.startswith("+"))
    new = "".join(line[1:] for line in lines if not line.startswith("-"))
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{path}: stands {text.count(old)} times:\n{old}"
    path.write_text(text.replace(old, new), encoding="utf-8")


def take_walk(title: str, copy: Path) -> set[str]:
    """Do a walk in a copy of the tree, and return the files that it touches."""
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "docs" / "tools", copy / "docs" / "tools")
    (copy / "docs" / "reference").mkdir()
    touched = {"docs/reference/job_file.md"}
    program = ""
    for block in read_walk(title):
        path = copy / block.file
        if not block.file:
            program = block.text
        elif block.language == "diff":
            apply_change(path, block.text)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        touched.add(block.file)
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    for command in (["docs/tools/job_reference.py"], ["-c", program]):
        done = subprocess.run(
            [sys.executable, *command], cwd=copy, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    return touched - {""}


@pytest.mark.parametrize(
    ("title", "row", "most_files"),
    [
        ("A layout field", "| `dispatch_sms` | `0` | SMs that the kernels", 10),
        ("A dispatcher", "`ncclep`, `gatherep` |", 8),
    ],
)
def test_a_walk_of_the_page_ends_where_it_says(
    title: str, row: str, most_files: int, tmp_path: Path
) -> None:
    touched = take_walk(title, tmp_path)
    assert row in (tmp_path / "docs/reference/job_file.md").read_text(encoding="utf-8")
    # A library that is installed is no file of this tree.
    ours = {file for file in touched if not file.startswith("site/")}
    assert len(ours) + BESIDE <= most_files


def test_a_family_of_known_parts_is_a_record_and_its_row(tmp_path: Path) -> None:
    """The made-up family is read, planned, written, and learns from fresh weights of its names."""
    touched = take_walk("A family", tmp_path)
    families = "src/moewright/families"
    sources = {file for file in touched if file.startswith("src/")}
    assert sources == {f"{families}/tulip.py", f"{families}/table.py"}
