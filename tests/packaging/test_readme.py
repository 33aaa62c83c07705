"""The README's Python runs as written from a clone, and the files it names exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

# What `make train` leaves is not in a clone.
_MADE_BY_TRAINING = "runs/"


def test_the_python_block_has_ten_lines_and_runs_from_the_root() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in block.splitlines() if line.strip()]) <= 10
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "why not tp8,ep1,mbs4" in done.stdout
    assert "--expert-model-parallel-size 8" in done.stdout


def test_every_file_that_is_linked_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)", README)
    assert len(links) > 20
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing


def test_every_file_that_a_command_names_exists() -> None:
    quoted = re.findall(r"`([^`\n]+)`|^    (.+)$", README, flags=re.MULTILINE)
    words = [word.strip("\"'") for pair in quoted for word in "".join(pair).split()]
    paths = [
        word
        for word in words
        if re.fullmatch(r"[\w./-]+\.(toml|csv|json|sh|md|py|png)", word)
        and not word.startswith(_MADE_BY_TRAINING)
    ]
    assert "examples/qwen3_30b_16h100.sh" in paths
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing


def test_every_command_of_the_readme_is_a_verb() -> None:
    from moewright.cli.verbs import build_app

    verbs = set(build_app())
    named = re.findall(r"`moewright ([a-z]+)", README)
    assert len(named) > 5
    assert set(named) <= verbs
