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


@pytest.mark.thorough
def test_a_family_of_known_parts_is_a_record_and_its_row(tmp_path: Path) -> None:
    """The made-up family is read, planned, written, and learns from fresh weights of its names."""
    touched = take_walk("A family", tmp_path)
    families = "src/moewright/families"
    sources = {file for file in touched if file.startswith("src/")}
    assert sources == {f"{families}/tulip.py", f"{families}/table.py"}


TWO_RANKS = """
import sys

import torch
import torch.distributed as dist

from moewright.engine.comm.collectives import Group
from moewright.engine.dispatch.deepep import open_library, verify_library
from moewright.engine.dispatch.interface import LibrarySizes
from moewright.engine.observe.counters import Counters
from moewright.spec.layout import DispatcherKind

sys.path.append("site")
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
counters = Counters()
group = Group(name="ep", ranks=(0, 1), index=rank, handle=dist.group.WORLD, counters=counters)
alone = Group(name="etp", ranks=(rank,), index=0, handle=None, counters=counters)
sizes = LibrarySizes(experts=4, hidden=8, max_tokens=64, nvlink_domain_size=2)
kind = DispatcherKind.GATHEREP
library = open_library(kind, group, sizes, torch.device("cpu"))
verify_library(library, kind, alone, experts=4, hidden=8, like=torch.zeros(1))
print("equal to the plain all-to-all", flush=True)
"""


@pytest.mark.thorough
def test_the_dispatcher_of_the_walk_moves_tokens_between_two_ranks(tmp_path: Path) -> None:
    take_walk("A dispatcher", tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_RANKS, str(rank), str(tmp_path / "store")],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        output, _ = process.communicate(timeout=120)
        assert "equal to the plain all-to-all" in output


def test_a_cost_formula_is_a_line_for_its_bytes_and_one_for_its_seconds(tmp_path: Path) -> None:
    """Estimates and scores have the made-up terms."""
    touched = take_walk("A cost formula", tmp_path)
    sources = {file for file in touched if file.startswith("src/")}
    cost = "src/moewright/cost"
    assert sources == {f"{cost}/memory/peak_terms.py", f"{cost}/time/step_tail.py"}


def test_a_view_is_a_record_and_its_page(tmp_path: Path) -> None:
    """The studio answers for the made-up page."""
    pytest.importorskip("starlette", reason="the studio extra is not installed")
    touched = take_walk("A view", tmp_path)
    assert len({file for file in touched if file.startswith("src/")}) <= 5
