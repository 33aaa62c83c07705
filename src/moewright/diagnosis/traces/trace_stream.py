"""Trace files read piece by piece: their events in batches, and what stands around them.

A file of gigabytes is never in memory as a whole. What a killed or faulty writer left is repaired,
and what cannot be read is counted.
"""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from moewright.codec.files import as_table, read_pieces
from moewright.codec.foreign import require_budget
from moewright.spec.errors import BadInput, Reason
from moewright.spec.units import GIB, MIB, format_bytes, plural

EXPECTED_FILE = "the .json of torch.profiler"
_LARGEST_TRACE_BYTES = 16 * GIB
_LARGEST_HEAD = 64 * MIB  # letters before the events: what is longer is no trace
_LARGEST_EVENT = 4 * MIB
_PIECE_BYTES = 4 * MIB
_GZIP_MAGIC = b"\x1f\x8b"
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
# Between an event and the next; the names are those with which events begin.
_BOUNDARY = re.compile(r'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|ts|tid|dur|args|id|bp)")')
_SEPARATORS = ", \t\r\n"
_SEPARATED = re.compile(f"[{_SEPARATORS}]*")
_TAIL_LETTERS = 1 << 16  # among the last of a piece, where a boundary is looked for
_DAMAGE = (ValueError, RecursionError)


class TraceStream:
    """The events of a trace file, and, once they are all read, what else the file says.

    `metadata` is what stands beside the events; `is_cut` says that the file breaks off, and
    `unreadable` how many pieces between whole events were no JSON. `report_read` is called with
    the bytes of the file that have been read, again and again.
    """

    def __init__(
        self, path: Path, report_read: Callable[[int], None] = lambda _nbytes: None
    ) -> None:
        self.path = path
        self._report_read = report_read
        self.metadata: Mapping[str, Any] = {}
        self.is_cut = False
        self.unreadable = 0
        self._decoder = json.JSONDecoder()

    @property
    def notes(self) -> tuple[str, ...]:
        """Say what of the file could not be read."""
        notes = []
        if self.is_cut:
            name = self.path.name
            notes.append(f"{name} was cut off: events after its last complete one are missing")
        if self.unreadable:
            text = f"no JSON, and left out: {plural(self.unreadable, 'event')}"
            notes.append(f"{self.path.name}: {text}")
        return tuple(notes)

    def batches(self) -> Iterator[list[Any]]:
        """Yield the events in lists, in the order of the file.

        Raises:
            BadInput: the file cannot be read, is too large, or holds no trace.
        """
        texts = self._texts()
        head, rest = self._read_head(texts)
        has_ended = False
        while not has_ended:
            text = next(texts, "")
            rest += text
            events, rest, has_ended = self._take_events(rest, is_last=not text)
            yield events
            if not text:
                break
        self.is_cut = self.is_cut or not has_ended
        if head.lstrip().startswith("{"):
            self._read_metadata(head, rest + self._read_tail(texts) if has_ended else "")

    def copy_with(self, events: Iterable[str]) -> Iterator[str]:
        """Yield the text of the file, piece by piece, with more events in front of its own.

        `events` are JSON. A file that breaks off ends with its last whole event, and is closed.

        Raises:
            BadInput: the file cannot be read, is too large, or holds no trace.
        """
        texts = self._texts()
        head, rest = self._read_head(texts)
        separator = head
        for event in events:
            yield separator + event
            separator = ",\n"
        rest = separator + rest
        for text in texts:
            rest += text
            end = max((match.start() + 1 for match in _find_boundaries(rest)), default=0)
            if not end and len(rest) > _LARGEST_HEAD:
                end = len(rest)
            yield rest[:end]
            rest = rest[end:]
        last, _, has_ended = self._take_one_by_one(rest, is_last=True)
        if has_ended:
            yield rest
        else:
            yield from ("," + json.dumps(event) for event in last)
            yield "]}" if head.lstrip().startswith("{") else "]"

    def _read_head(self, texts: Iterator[str]) -> tuple[str, str]:
        """Return the text up to the first event, and what was read beyond it."""
        head = ""
        for text in texts:
            head += text
            start = _find_events(head)
            if start:
                return head[:start], head[start:]
            if len(head) > _LARGEST_HEAD:
                raise self._refuse("is not a trace: it has no traceEvents")
        raise self._refuse(self._why_no_trace(head))

    def _refuse(self, rule: str) -> BadInput:
        return BadInput(Reason(field=str(self.path), rule=rule, nearest=EXPECTED_FILE))

    def _why_no_trace(self, text: str) -> str:
        if self.is_cut:
            return "was cut off before its first event"
        try:
            json.loads(_repair_values(text))
        except _DAMAGE:
            return "is not a trace: no JSON"
        return "is not a trace: it has no traceEvents"

    def _texts(self) -> Iterator[str]:
        """Yield the text of the file, unpacked; a mark of the byte order is left out."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        is_first = True
        for piece in self._unpacked():
            text = decoder.decode(piece)
            if is_first and text:
                text = text.removeprefix("\ufeff")
                is_first = False
            if text:
                yield text

    def _unpacked(self) -> Iterator[bytes]:
        total_bytes = 0
        for piece in self._members():
            total_bytes += len(piece)
            if total_bytes > _LARGEST_TRACE_BYTES:
                limit = format_bytes(_LARGEST_TRACE_BYTES)
                raise self._refuse(f"holds more than the {limit} that are read")
            yield piece

    def _members(self) -> Iterator[bytes]:
        """Yield the bytes of the file; of a gzip file, those of all its members."""
        require_budget(str(self.path))
        pieces = self._pieces()
        first = next(pieces, b"")
        if first[:2] != _GZIP_MAGIC:
            yield first
            yield from pieces
            return
        member = zlib.decompressobj(wbits=31)
        packed = first
        while True:
            try:
                unpacked = member.decompress(packed, _PIECE_BYTES)
            except zlib.error as error:
                raise self._refuse(f"cannot be read: {error}") from None
            if unpacked:
                yield unpacked
            packed = member.unconsumed_tail
            if member.eof:
                packed = member.unused_data or next(pieces, b"")
                if packed[:2] != _GZIP_MAGIC:
                    return
                member = zlib.decompressobj(wbits=31)
            elif not packed:
                packed = next(pieces, b"")
                if not packed:
                    self.is_cut = True
                    return

    def _pieces(self) -> Iterator[bytes]:
        read_bytes = 0
        for piece in read_pieces(self.path, piece_bytes=_PIECE_BYTES):
            read_bytes += len(piece)
            self._report_read(read_bytes)
            yield piece

    def _take_events(self, text: str, *, is_last: bool) -> tuple[list[Any], str, bool]:
        """Return the whole events of a text, what is left of it, and whether the events ended."""
        boundaries = [match.end() for match in _find_boundaries(text)]
        if boundaries and not is_last:
            end = boundaries[-1]
            whole = "[" + text[:end].rstrip().removesuffix(",").lstrip(_SEPARATORS) + "]"
            for repair in (str, _repair_values):
                try:
                    return json.loads(repair(whole)), text[end:], False
                except _DAMAGE:
                    continue
        return self._take_one_by_one(text, is_last=is_last)

    def _take_one_by_one(self, text: str, *, is_last: bool) -> tuple[list[Any], str, bool]:
        """Take events singly: around the end of the list, and where something is damaged."""
        events: list[Any] = []
        position = 0
        while True:
            position = _skip_separators(text, position)
            if position >= len(text):
                return events, "", False
            if text[position] == "]":
                return events, text[position + 1 :], True
            try:
                event, position = self._decoder.raw_decode(text, position)
            except _DAMAGE:
                match = _BOUNDARY.search(text, position)
                if match is None and not is_last and len(text) - position < _LARGEST_EVENT:
                    return events, text[position:], False
                end = match.end() if match is not None else len(text)
                repaired = _repair_values(text[position:end])
                try:
                    event, used = self._decoder.raw_decode(repaired)
                except _DAMAGE:
                    if match is None:
                        self.is_cut = True
                        return events, "", False
                    self.unreadable += 1
                    position = end
                    continue
                text = repaired[used:] + text[end:]
                position = 0
            events.append(event)

    def _read_tail(self, texts: Iterator[str]) -> str:
        tail = ""
        for text in texts:
            tail += text
            if len(tail) > _LARGEST_HEAD:
                return ""
        return tail

    def _read_metadata(self, head: str, tail: str) -> None:
        for text in (f"{head}]{tail}", f"{head}]}}"):
            try:
                metadata = json.loads(_repair_values(text))
            except _DAMAGE:
                continue
            self.metadata = as_table(metadata)
            return


def _find_events(text: str) -> int:
    """Return where the first event stands; 0: not here."""
    if text.lstrip()[:1] == "[":
        return text.index("[") + 1
    match = _EVENTS.search(text)
    return match.end() if match else 0


def _find_boundaries(text: str) -> Iterator[re.Match[str]]:
    """Find where an event ends and the next begins, near the end of a text."""
    return _BOUNDARY.finditer(text, max(0, len(text) - _TAIL_LETTERS))


def _skip_separators(text: str, position: int) -> int:
    match = _SEPARATED.match(text, position)
    return position if match is None else match.end()


def _repair_values(text: str) -> str:
    """Write null for values that kineto leaves empty, and for nan and inf, which JSON lacks."""
    text = re.sub(r":\s*(?=[,}])", ": null", text)
    return re.sub(
        r"(:\s*)[-+]?(nan|inf)(?:\(\w*\))?(?=\s*[,}\]])", r"\1null", text, flags=re.IGNORECASE
    )
