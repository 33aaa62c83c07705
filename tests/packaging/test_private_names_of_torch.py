"""One module takes private names from torch, so that a new torch breaks nothing elsewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

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
