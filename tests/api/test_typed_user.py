"""A user's file is checked against the types that the package ships."""

from __future__ import annotations

import enum
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from inspect import Parameter, isfunction, signature
from pathlib import Path
from time import time
from types import NoneType, UnionType
from typing import Any, Literal, Union, Unpack, get_args, get_origin, get_type_hints, is_typeddict

import pytest

import moewright as mw
from moewright.api import face
from moewright.spec.record import Record

ROOT = Path(__file__).parents[2]
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


def list_functions() -> dict[str, Callable[..., Any]]:
    """Return the public functions by name."""
    return {name: item for name in mw.__all__ if isfunction(item := getattr(mw, name))}


def list_classes(hint: object) -> Iterator[type]:
    """Yield the classes in a type, those of unions, tuples and mappings too."""
    if isinstance(hint, type) and not get_args(hint):
        yield hint
    for part in get_args(hint):
        yield from list_classes(part)


def list_records() -> list[type]:
    """Return the records that an answer of a public function is or holds."""
    functions = list_functions().values()
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


LITERALS: Mapping[object, str] = {
    str: '"text"',
    bool: "True",
    int: "3",
    float: "0.5",
    Path: 'pathlib.Path("file")',
    NoneType: "None",
}


def name_type(hint: object) -> str:
    """Return a type as an annotation with the modules of all names."""
    if isinstance(hint, type) and not get_args(hint):
        return f"{hint.__module__}.{hint.__qualname__}".removeprefix("builtins.")
    return repr(hint)


class CallWriter:
    """The calls of public functions with drawn arguments; what only code makes is a parameter."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._modules = {"collections.abc", "pathlib", "typing"}
        self._parameters: dict[str, str] = {}

    def write(self) -> str:
        """Return a file that calls every function a few times, and asserts each answer's type."""
        lines = []
        for name, function in list_functions().items():
            for number in range(4):
                self._parameters = {}
                call = f"mw.{name}({', '.join(self._write_arguments(function))})"
                answer = self._name(get_type_hints(function)["return"])
                taken = ", ".join(f"{key}: {kind}" for key, kind in self._parameters.items())
                lines += [f"def {name}_{number}({taken}) -> None:"]
                lines += [f"    typing.assert_type({call}, {answer})"]
        imports = [f"import {module}" for module in sorted(self._modules)]
        return "\n".join(["import moewright as mw", *imports, *lines]) + "\n"

    def _name(self, hint: object) -> str:
        self._modules |= {kind.__module__ for kind in list_classes(hint)} - {"builtins", "types"}
        return name_type(hint)

    def _write_arguments(self, function: Callable[..., Any]) -> Iterator[str]:
        hints = get_type_hints(function)
        for name, parameter in signature(function).parameters.items():
            hint = hints[name]
            if parameter.kind is Parameter.VAR_KEYWORD:
                (keys,) = get_args(hint)
                assert get_origin(hint) is Unpack
                assert is_typeddict(keys)
                for key, kind in get_type_hints(keys).items():
                    if self._rng.random() < 0.3:
                        yield f"{key}={self._write_value(kind)}"
            elif parameter.kind is Parameter.VAR_POSITIONAL:
                yield from (self._write_value(hint) for _ in range(self._rng.randint(1, 2)))
            elif parameter.default is Parameter.empty and parameter.kind < Parameter.KEYWORD_ONLY:
                yield self._write_value(hint)
            elif parameter.default is Parameter.empty or self._rng.random() < 0.5:
                yield f"{name}={self._write_value(hint)}"

    def _write_value(self, hint: Any) -> str:
        """Return an expression of a type: a literal, or a parameter that has it."""
        origin, parts = get_origin(hint), get_args(hint)
        if hint in LITERALS:
            return LITERALS[hint]
        if origin in (Union, UnionType):
            return self._write_value(self._rng.choice(parts))
        if origin is Literal:
            return repr(self._rng.choice(parts))
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return f"{self._name(hint)}.{self._rng.choice(list(hint)).name}"
        if origin is tuple:
            return f"({', '.join(self._write_value(part) for part in parts if part is not ...)},)"
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return f"{{{self._write_value(parts[0])}: {self._write_value(parts[1])}}}"
        if origin is not None and len(parts) == 1:
            return f"[{self._write_value(parts[0])}]"
        name = f"value_{len(self._parameters)}"
        self._parameters[name] = self._name(hint)
        return name


def test_every_answer_is_a_record_that_the_page_of_the_api_names() -> None:
    """So it has frames and charts, and a user can read of it and name its type."""
    page = (ROOT / "docs/reference/api.md").read_text()
    for name, function in list_functions().items():
        for kind in list_classes(get_type_hints(function)["return"]):
            if kind.__module__ == "builtins":
                continue
            assert issubclass(kind, Record), name
            place = face.__name__ if kind.__name__ in face.__all__ else kind.__module__
            assert f"::: {place}.{kind.__name__}\n" in page, kind
        assert f"::: moewright.api.face.{name}\n" in page


# How a user's own program is checked: nothing in it may be of an unknown type.
TEXTS = {
    "a day's work": USER_FILE,
    "all answers": write_reader(),
    "all calls": CallWriter(int(time() // 86_400)).write(),
}


@pytest.mark.thorough
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_users_file_has_no_unknown_types(text: str, tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--disallow-any-expr", str(file)]
    command += ["--config-file", "", "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stdout
