"""A module of under 100 lines that one module of its folder imports stands in that module.

A folder then has few modules that are about one thing each. What stays apart has a reason: the
program of a process, a family of models (one file each), or a neighbour that would pass 420 lines.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
SMALL_LINES = 100
FULL_LINES = 420
# An import statement, with its names in parentheses or on its line.
IMPORT = re.compile(r"^\s*from (moewright[\w.]*) import (\([^)]*\)|[^\n]*)", flags=re.MULTILINE)


def test_no_small_module_stands_beside_its_only_reader() -> None:
    texts = {
        path.relative_to(SOURCE).with_suffix("").as_posix().replace("/", "."): path.read_text(
            encoding="utf-8"
        )
        for path in SOURCE.rglob("*.py")
        if path.name != "__init__.py"
    }
    assert len(texts) > 500
    readers = defaultdict(set)
    for reader, text in texts.items():
        for package, names in IMPORT.findall(text):
            readers[package].add(reader)
            for name in re.findall(r"\w+", names):
                readers[f"{package}.{name}"].add(reader)
    lines = {module: text.count("\n") for module, text in texts.items()}
    apart = []
    for module, text in texts.items():
        folder = module.rpartition(".")[0]
        if lines[module] >= SMALL_LINES or folder == "moewright.families":
            continue
        if len(readers[module]) != 1 or "\nif __name__ ==" in text:
            continue
        (reader,) = readers[module]
        if reader.rpartition(".")[0] == folder and lines[module] + lines[reader] <= FULL_LINES:
            apart.append((module, reader))
    assert apart == []
