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


def parse_yaml(text: str, *, where: str) -> Any:
    """Return mappings, lists and texts of the first document; 1e-5, true and null stay texts.

    Raises:
        BadInput: it is no YAML, or a tag asks for an object.
    """
    loader = None
    try:
        loader = _TextLoader(text)
        if loader.check_data():
            return loader.get_data()
        return None
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
