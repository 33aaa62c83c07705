"""The glossary: docs/glossary.md as entries, which chapters and pages link to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType

from moewright.spec.errors import BadInput, Reason
from moewright.spec.names import closest_match

_ROW = re.compile(r"^\| (?P<words>[^|]+) \| (?P<meaning>[^|]*) \|(?: (?P<source>[^|]*) ?\|)?$")
_MARKS = re.compile(r"<a id=\"[^\"]*\"></a>|\*\*|`")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")


@dataclass(frozen=True, kw_only=True, slots=True)
class GlossaryEntry:
    """Words that mean the same, what they mean, and who coined them."""

    words: tuple[str, ...]
    meaning: str
    source: str
    section: str

    @property
    def anchor(self) -> str:
        """The name of its place on the page of the glossary."""
        return anchor_of_row(self.words[0])


def anchor_of_row(word: str) -> str:
    """Return the anchor of the row whose first word this is."""
    return "term-" + "-".join(re.findall(r"[a-z0-9]+", word.lower()))


def read_glossary(text: str) -> Iterator[GlossaryEntry]:
    """Yield the rows of all tables of the page, in order; marks and links are taken out.

    Names of classes, in backticks, are no words of the field.
    """
    section = ""
    for line in text.splitlines():
        if line.startswith("## "):
            section = line[3:]
        row = _ROW.match(line)
        if row is None or row["words"].strip("- ") in ("", "word", "class") or "`" in row["words"]:
            continue
        words = tuple(word.strip() for word in _plain(row["words"]).split(","))
        source = _plain(row["source"] or "")
        yield GlossaryEntry(
            words=words, meaning=_plain(row["meaning"]), source=source, section=section
        )


def _plain(text: str) -> str:
    return _LINK.sub(r"\1", _MARKS.sub("", text)).strip()


@cache
def load_glossary() -> tuple[GlossaryEntry, ...]:
    """Return the entries of the glossary."""
    file = resources.files(__package__).joinpath("glossary.md")
    return tuple(read_glossary(file.read_text("utf-8")))


@cache
def _index_words() -> Mapping[str, GlossaryEntry]:
    index: dict[str, GlossaryEntry] = {}
    for entry in load_glossary():
        for word in entry.words:
            index.setdefault(word.lower(), entry)
    return MappingProxyType(index)


def list_terms() -> dict[str, dict[str, str]]:
    """Return where each word stands in the glossary and what it means, for the labels of pages."""
    return {
        word.lower(): {"anchor": entry.anchor, "meaning": entry.meaning}
        for entry in load_glossary()
        for word in entry.words
    }


def find_term(word: str) -> GlossaryEntry:
    """Return the entry of a word.

    Raises:
        BadInput: the glossary has no such word.
    """
    words = _index_words()
    entry = words.get(word.lower())
    if entry is None:
        near = closest_match(word, words) or ""
        raise BadInput(Reason(field="glossary", value=word, rule="has no such word", nearest=near))
    return entry
