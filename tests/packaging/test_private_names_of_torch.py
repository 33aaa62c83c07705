"""One module takes private names from torch, so that a new torch breaks nothing elsewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

# Private by their spelling alone: functions of the standard library that are documented.
PYTHON_NAMES = {"_exit", "_getframe", "_asdict"}
SOURCE = Path(__file__).resolve().parents[2] / "src" / "moewright"


def private_names(text: str) -> Iterator[str]:
    """Yield the private names that a module imports from torch or reads as its attributes."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                yield from _private(f"{module}.{alias.name}" for alias in names)
            case ast.Import(names=names):
                yield from _private(alias.name for alias in names)
            case ast.Attribute():
                yield from _private((ast.unparse(node),))


def _private(names: Iterator[str] | tuple[str, ...]) -> Iterator[str]:
    for name in names:
        root, *parts = name.split(".")
        if (
            root == "torch"
            and name.replace(".", "").isidentifier()
            and any(part[:1] == "_" and part[:2] != "__" for part in parts)
        ):
            yield name


def foreign_members(text: str) -> Iterator[str]:
    """Yield the private members that a module reads of other things than itself and its class."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr[:1] == "_" and node.attr[:2] != "__":
            yield node.attr


def own_names(text: str) -> Iterator[str]:
    """Yield the names that a module defines: functions, classes, variables and members."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.FunctionDef(name=str(name)) | ast.ClassDef(name=str(name)):
                yield name
            case ast.AsyncFunctionDef(name=str(name)):
                yield name
            case ast.Attribute(attr=str(name), ctx=ast.Store()):
                yield name
            case ast.Name(id=str(name), ctx=ast.Store()):
                yield name


def test_no_other_module_reads_a_private_member_of_a_torch_object() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    known = {name for text in texts.values() for name in own_names(text)} | PYTHON_NAMES
    found = {
        f"{path.relative_to(SOURCE)}: {name}"
        for path, text in texts.items()
        if path.is_relative_to(SOURCE / "engine") and path.name != "torch_private.py"
        for name in foreign_members(text)
        if name not in known
    }
    assert not found


def test_no_other_module_takes_a_private_name() -> None:
    found = {
        f"{path.relative_to(SOURCE)}: {name}"
        for path in SOURCE.rglob("*.py")
        if path.name != "torch_private.py"
        for name in private_names(path.read_text(encoding="utf-8"))
    }
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        "from torch.utils._pytree import tree_map",
        "from torch.overrides import _get_current_function_mode",
        "def read():\n    import torch._dynamo.utils",
        "torch._foreach_norm([])",
        "torch.ops.mkldnn._linear_pointwise(x)",
    ],
)
def test_a_private_name_is_seen_however_it_is_taken(text: str) -> None:
    assert list(private_names(text))


def test_public_names_are_not() -> None:
    assert not list(
        private_names("import torch\ntorch.__version__\nself._torch.cat\ntorch.cat(self._x).y")
    )
