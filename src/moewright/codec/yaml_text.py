"""YAML text as plain data whose scalars stay the text that somebody wrote."""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from moewright.spec.errors import BadInput, Reason


class _TextLoader(Reader, Scanner, Parser, Composer, SafeConstructor, BaseResolver):
    """A loader that makes no numbers, dates or booleans of scalars, and no objects of tags."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        BaseResolver.__init__(self)


_TextLoader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile("^<<$"), ["<"])


# Values that aliases may repeat: whoever reads the data walks through each of them again.
_MOST_REPEATS = 100_000


def parse_yaml(text: str, *, where: str) -> Any:
    """Return mappings, lists and texts of the first document; 1e-5, true and null stay texts.

    Raises:
        BadInput: it is no YAML, a tag asks for an object, or aliases repeat values without end.
    """
    loader = None
    try:
        loader = _TextLoader(text)
        if not loader.check_node():
            return None
        node = loader.get_node()
        _refuse_many_repeats(node, limit=len(text) + _MOST_REPEATS, where=where)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = ""
        if mark is not None:
            place = f" at line {mark.line + 1}"
        rule = f"is not YAML that is read: {error.problem}{place}"
    except (yaml.YAMLError, ValueError) as error:
        rule = f"is not YAML: {' '.join(str(error).split())[:100]}"
    except RecursionError:
        rule = "is nested too deeply"
    finally:
        if loader is not None:
            loader.dispose()
    raise BadInput(Reason(field=where, rule=rule))


def _refuse_many_repeats(root: yaml.Node, *, limit: int, where: str) -> None:
    """Refuse a graph that is a tree of more than `limit` values, or of endlessly many.

    Ten aliases of ten aliases of ten are a line each, and a thousand values.
    """
    values: dict[int, int] = {}  # of a node and all below it
    unfinished: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting[-1]
        below = _list_below(node)
        if id(node) in values:
            waiting.pop()
        elif id(node) not in unfinished:
            unfinished.add(id(node))
            waiting += below
        elif all(id(child) in values for child in below):
            values[id(node)] = 1 + sum(values[id(child)] for child in below)
            if values[id(node)] > limit:
                rule = f"has aliases that repeat more than {_MOST_REPEATS:,} values"
                raise BadInput(Reason(field=where, rule=rule))
        else:
            line = node.start_mark.line + 1
            raise BadInput(Reason(field=where, rule=f"has an alias of itself at line {line}"))


def _list_below(node: yaml.Node) -> list[yaml.Node]:
    match node:
        case yaml.MappingNode(value=pairs):
            return [child for pair in pairs for child in pair]
        case yaml.SequenceNode(value=children):
            return list(children)
    return []
