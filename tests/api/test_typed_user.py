"""A user's file is checked against the types that the package ships."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from inspect import isfunction
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import moewright as mw

USER_FILE = """
from typing import assert_type

import moewright as mw

plans = mw.plan("Qwen3-30B-A3B", on="8xH100", top=3)
assert plans.best is not None
assert_type(plans.best.layout.ep, int)
assert_type(plans.best.estimate.step_s, float)
own = mw.estimate("Qwen3-30B-A3B", "tp2,ep8", on="16xH100")
assert_type(own.estimate.fit_probability, float)
shown = mw.watch("run.log", on="H100")
assert_type([alarm.text for alarm in shown.alarms], list[str])
change = mw.check("before.toml", "after.toml")
assert_type(change.title(), str)
replays = mw.what_if("trace.json", "gemm=2x")
assert_type([replay.low_s for replay in replays.replays], list[float])
diagnosis = mw.diagnose("runs/x")
assert_type(diagnosis.findings[0].title, str)
mw.plan(17)  # type: ignore[arg-type]
"""


def list_classes(hint: object) -> Iterator[type]:
    """Yield the classes in a type, those of unions, tuples and mappings too."""
    if isinstance(hint, type) and not get_args(hint):
        yield hint
    for part in get_args(hint):
        yield from list_classes(part)


def list_records() -> list[type]:
    """Return the records that an answer of a public function is or holds."""
    functions = [item for name in mw.__all__ if isfunction(item := getattr(mw, name))]
    waiting = [kind for item in functions for kind in list_classes(get_type_hints(item)["return"])]
    records: dict[type, None] = {}
    while waiting:
        kind = waiting.pop()
        if kind in records or not is_dataclass(kind) or not kind.__module__.startswith("moewright"):
            continue
        records[kind] = None
        hints = get_type_hints(kind)
        waiting += [part for field in fields(kind) for part in list_classes(hints[field.name])]
    return list(records)


def write_reader() -> str:
    """Return a file that names every public function and reads every value of every answer."""
    records = list_records()
    lines = ["import moewright as mw"]
    lines += [f"from {kind.__module__} import {kind.__name__}" for kind in records]
    lines += [f"print(mw.{name})" for name in mw.__all__]
    for number, kind in enumerate(records):
        names = [field.name for field in fields(kind)]
        names += [
            name
            for base in kind.__mro__
            for name, value in vars(base).items()
            if isinstance(value, property)
        ]
        lines.append(f"def read_{number}(record: {kind.__name__}) -> None:")
        lines += [f"    print(record.{name})" for name in names if not name.startswith("_")] or [
            "    ..."
        ]
    return "\n".join(lines)


@pytest.mark.thorough
@pytest.mark.parametrize("text", [USER_FILE, write_reader()], ids=["a day's work", "all answers"])
def test_a_users_file_has_no_unknown_types(text: str, tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--disallow-any-expr", str(file)]
    command += ["--config-file", "", "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stdout
