"""The language of the source: class names, identifiers, docstrings, conditionals, imports.

They are rules of CONTRIBUTING.md ("The language") that ruff does not check.
"""

from __future__ import annotations

import ast
import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from functools import cache
from pathlib import Path

import grimp
import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"

# Pronouns and participles say nothing about what a name stands for.
_PRONOUNS = ("one", "each", "mine", "theirs", "ours", "there", "here", "way", "beside")
_PARTICIPLES = ("found", "said", "held", "given", "asked", "known")
VAGUE_NAMES = frozenset((*_PRONOUNS, *_PARTICIPLES))
# `said` is a key of the journal of tuning, so that these records and what reads them have it.
SERIALISED_NAME = "said"
SERIALISED_IN = ("TrialOutcome", "ValidationCheck")

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def list_nodes() -> tuple[tuple[str, ast.AST], ...]:
    """List every node of the source with the path of its module under src."""
    nodes: list[tuple[str, ast.AST]] = []
    gc.disable()  # it would pass over all nodes again and again, and finds no rubbish among them
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes.extend((str(path.relative_to(SOURCE)), node) for node in ast.walk(tree))
    gc.enable()
    return tuple(nodes)


@pytest.fixture(scope="module", autouse=True)
def _forget_nodes() -> Iterator[None]:
    """Let go of the nodes, 265 MB that every rank a later test forks would map too."""
    yield
    list_nodes.cache_clear()


def list_names(node: ast.AST) -> Iterator[str]:
    """List the identifiers that stand in a node itself: what it binds, reads or passes."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.keyword(arg=str(name)) | ast.ExceptHandler(name=str(name)):
            yield name
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name
        case ast.alias(name=name, asname=alias):
            yield from (alias or name).split(".")
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            yield from names


def list_serialised_fields() -> list[ast.Name]:
    """List where the records of the journal declare the field `said`."""
    return [
        statement.target
        for _, node in list_nodes()
        if isinstance(node, ast.ClassDef) and node.name in SERIALISED_IN
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and statement.target.id == SERIALISED_NAME
    ]


def find_circles(imports: Mapping[str, Set[str]]) -> list[set[str]]:
    """Find the modules that import each other: Tarjan's strongly connected components.

    R. Tarjan, "Depth-first search and linear graph algorithms", SIAM J. Comput. 1 (1972). A module
    that imports itself is a circle too.
    """
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    circles: list[set[str]] = []

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for imported in sorted(imports[module]):
            if imported not in index:
                visit(imported)
                lowest[module] = min(lowest[module], lowest[imported])
            elif imported in stack:
                lowest[module] = min(lowest[module], index[imported])
        if lowest[module] == index[module]:
            start = stack.index(module)
            component = set(stack[start:])
            del stack[start:]
            if len(component) > 1 or module in imports[module]:
                circles.append(component)

    for module in sorted(imports):
        if module not in index:
            visit(module)
    return circles


@pytest.mark.core
def test_a_class_name_is_used_once_in_the_package() -> None:
    places = defaultdict(list)
    for path, node in list_nodes():
        if isinstance(node, ast.ClassDef):
            places[node.name].append(f"{path}:{node.lineno}")
    repeated = {name: lines for name, lines in places.items() if len(lines) > 1}
    assert len(places) > 300
    assert not repeated


def test_no_identifier_is_a_pronoun_or_a_bare_participle() -> None:
    declared = list_serialised_fields()
    assert len(declared) == len(SERIALISED_IN)
    vague = []
    for path, node in list_nodes():
        for name in VAGUE_NAMES.intersection(list_names(node)):
            reads_field = isinstance(node, ast.Attribute | ast.keyword)
            if name != SERIALISED_NAME or not (reads_field or node in declared):
                vague.append(f"{path}:{getattr(node, 'lineno', 1)}: {name}")
    assert not vague


def test_no_docstring_begins_with_of() -> None:
    wrong = [
        f"{path}:{getattr(node, 'lineno', 1)}"
        for path, node in list_nodes()
        if isinstance(node, Documented) and (ast.get_docstring(node) or "").startswith("Of ")
    ]
    assert not wrong


def test_no_conditional_expression_contains_another() -> None:
    nested = [
        f"{path}:{node.lineno}"
        for path, node in list_nodes()
        if isinstance(node, ast.IfExp)
        and any(isinstance(inner, ast.IfExp) for inner in ast.walk(node) if inner is not node)
    ]
    assert not nested


def test_circles_of_imports_are_noticed() -> None:
    imports = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": set(), "f": {"f"}}
    assert sorted(map(sorted, find_circles(imports))) == [["a", "b", "c"], ["f"]]


def test_the_modules_of_the_package_import_each_other_in_no_circle() -> None:
    """Imports inside functions and for type checkers count too.

    The package itself may import `moewright.api.face` when a name of its face is first used,
    because no module below imports the face.
    """
    graph = grimp.build_graph("moewright", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 300
    assert not find_circles(imports)


def test_a_dispatcher_is_named_by_its_record_and_its_binding_alone() -> None:
    """What else asks for a dispatcher asks for its facts, so that a new one is known everywhere."""
    named = {
        path
        for path, node in list_nodes()
        if isinstance(node, ast.Attribute) and node.attr.isupper()
        if isinstance(node.value, ast.Name) and node.value.id == "DispatcherKind"
    }
    assert named == {"moewright/spec/layout.py", "moewright/engine/dispatch/deepep.py"}
