"""The border for foreign input: a fork that is ended, a budget without which nothing is read."""

from __future__ import annotations

import ast
import gzip
import re
import socket
import struct
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest

import moewright
from moewright.codec import foreign, parse_toml
from moewright.codec.foreign import BeyondBudget, budget, read_apart
from moewright.engine.data.records import read_rows
from moewright.spec.errors import BadInput, Reason

# Libraries that unpack or run what strangers wrote.
_READERS = {
    *("gzip", "bz2", "lzma", "zlib", "zipfile", "tarfile", "pickle", "sqlite3"),
    *("pyarrow", "tokenizers", "jinja2", "sentencepiece", "dill", "marshal", "shelve"),
}
# They ask a library for its version alone.
_VERSIONS_ALONE = {"engine/data/build_corpus.py", "engine/data/build_chats.py"}
# It unpacks an address, whose letters and bytes it bounds by itself.
_BOUNDED = {"studio/queries.py"}
# Parsers of text, and who uses them without a budget: files of ours alone, or text that is short.
_TEXT_READERS = {"csv", "tomllib", "yaml", "xml", "configparser", "plistlib"}
_OWN_TEXT = {
    **dict.fromkeys(("codec/yaml_text.py",), "is called by readers with a budget"),
    **dict.fromkeys(("intake/job.py",), "reads a value of the command line"),
    **dict.fromkeys(("spec/quoting.py", "report/check_document.py"), "writes"),
    **dict.fromkeys(
        (
            *("cost/calendar_time.py", "cost/loss_laws.py", "cost/evidence.py"),
            *("diagnosis/published.py", "diagnosis/traces/trace_waterfall.py"),
            *("exporters/bridge.py", "intake/megatron/dialects.py"),
            *("intake/megatron/packaged_tables.py", "intake/megatron/unread.py"),
            *("view/course/chapter.py", "view/course/course_pages.py"),
        ),
        "reads the package's own data",
    ),
}
_SOURCE = Path(moewright.__file__).parent


def _list_libraries(path: Path, wanted: Collection[str] = _READERS) -> set[str]:
    names: set[str] = set()
    text = path.read_text("utf-8")
    if not any(name in text for name in (*wanted, "torch.load")):
        return names
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
            names.add("pickle")
    return names & set(wanted)


@read_apart
def _read_in_a_thread() -> int:
    with ThreadPoolExecutor(max_workers=1) as threads:
        return threads.submit(_read_within_a_budget).result()


def _read_within_a_budget() -> int:
    with budget("a thread's input", 1):
        return 1


def test_threads_of_a_fork_have_its_border() -> None:
    """Tokenizers read the text that they learn from in a thread of theirs."""
    assert _read_in_a_thread() == 1


def test_nothing_reads_foreign_input_past_the_border() -> None:
    """Who imports such a reader works under a budget, which there is in a fork alone."""
    past = []
    users = 0
    for path in sorted(_SOURCE.rglob("*.py")):
        name = path.relative_to(_SOURCE).as_posix()
        if name == "codec/foreign.py" or not _list_libraries(path):
            continue
        users += 1
        text = path.read_text("utf-8")
        if name not in _VERSIONS_ALONE | _BOUNDED and "budget(" not in text:
            past.append(f"{name}: {sorted(_list_libraries(path))}")
        if name in _VERSIONS_ALONE:
            uses = re.findall(r"\b(?:tokenizers|jinja2)\.(\w+)", text)
            assert set(uses) <= {"__version__"}, name
        if name in _BOUNDED:
            uses = re.findall(r"\bzlib\.(\w+)", text)
            assert set(uses) <= {"compress", "decompressobj", "error"}, name
            assert "decompress(data, _MOST_BYTES)" in text, name
    assert not past
    assert users > 8


def test_files_of_text_are_parsed_by_the_codec_or_within_a_budget() -> None:
    """A new user of a parser reads with the codec, whose files are bounded, or at the border."""
    users = {
        path.relative_to(_SOURCE).as_posix()
        for path in _SOURCE.rglob("*.py")
        if _list_libraries(path, _TEXT_READERS) and "budget(" not in path.read_text("utf-8")
    }
    assert users == set(_OWN_TEXT)


def test_what_a_fork_returns_and_raises_comes_back() -> None:
    values = {"a": np.arange(3), "b": ("c", None)}
    told = []

    @read_apart
    def work(kind: str, *, report_progress: object) -> object:
        with budget("file.x", 10):
            pass
        report_progress("half", 1)  # type: ignore[operator]
        if kind == "refusal":
            raise BadInput(Reason(field="a", rule="b", nearest="c"), Reason(field="d", rule="e"))
        if kind == "bug":
            raise KeyError("x")
        return values

    back = work("value", report_progress=lambda *args: told.append(args))
    assert isinstance(back, dict)
    assert np.array_equal(back["a"], values["a"])
    assert told == [("half", 1)]
    with pytest.raises(BadInput, match="a: b; nearest legal value: c") as caught:
        work("refusal", report_progress=lambda *args: None)
    assert len(caught.value.reasons) == 2
    with pytest.raises(KeyError):
        work("bug", report_progress=lambda *args: None)


def test_a_reader_outside_of_the_border_does_not_read() -> None:
    with pytest.raises(RuntimeError, match="without the border"), budget("file.x"):
        pass


@read_apart
def _work_within_work(outer_s: float, inner_s: float) -> str:
    """Return what the outer piece is called once an inner one has ended; spin in the inner one."""
    with budget("outer.x"):
        with budget("inner.x"):
            ends_s = time.process_time() + inner_s
            while time.process_time() < ends_s:
                pass
        ends_s = time.process_time() + outer_s
        while time.process_time() < ends_s:
            pass
    return "done"


@pytest.mark.parametrize(("outer_s", "inner_s"), [(0.0, 9.0), (9.0, 0.0), (0.3, 0.3)])
def test_a_piece_within_a_piece_takes_of_its_time(
    outer_s: float, inner_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an inner piece nor what stands behind it goes on without the outer one's limit."""
    monkeypatch.setattr(foreign, "CPU_S", 0.5)
    with pytest.raises(BeyondBudget, match=r"\.x: takes more than 0 s of processor time"):
        _work_within_work(outer_s, inner_s)
    assert _work_within_work(0.0, 0.0) == "done"


@read_apart
def _do_harm(kind: str) -> Any:
    with budget("evil.x", 600):
        if kind == "backtracks":
            re.match("(a+)+b", "a" * 60)
        elif kind == "allocates":
            bytearray(3 << 30)
        elif kind == "calls home":
            socket.create_connection(("127.0.0.1", 9), timeout=1)
        elif kind == "nests":
            jinja2.Environment().from_string("{{ " + "[" * 9000 + "]" * 9000 + " }}")
        elif kind == "dies":
            import os

            os.abort()
        elif kind == "confuses a library":
            struct.unpack("<q", b"\0")
        elif kind == "returns what is too deep":
            return _nest(100_000)
    return kind


def _nest(depth: int) -> Any:
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested]
    return nested


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("backtracks", "evil.x: takes more than 1 s of processor time to be read"),
        ("allocates", "evil.x: needs more than 1 GiB of memory to be read"),
        ("nests", "evil.x: is nested too deep to be read"),
        (
            "confuses a library",
            r"evil.x: cannot be read \(error: unpack requires a buffer of 8 bytes\)",
        ),
        ("returns what is too deep", "evil.x: is nested too deep, or holds too much, to be read"),
        ("dies", "evil.x: needs more than 1 GiB of memory to be read"),
    ],
)
def test_a_hostile_input_ends_in_one_line(
    kind: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "CPU_S", 1.0)
    started = time.process_time()
    with pytest.raises(BadInput, match=message):
        _do_harm(kind)
    assert time.process_time() - started < 2  # of this process, which waits


@read_apart
def _count_rows(path: Path) -> int:
    return sum(1 for _ in read_rows(path, keeps_broken=True))


def _write_blank_lines(folder: Path) -> Path:
    path = folder / "blank.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n" * 3_000_000))
    return path


def _write_short_rows(folder: Path) -> Path:
    """Write a table whose every row lacks most of very many columns."""
    path = folder / "wide.csv"
    path.write_text(",".join(f"c{number}" for number in range(9000)) + "\n" + "a\n" * 3000)
    return path


@pytest.mark.parametrize("write", [_write_blank_lines, _write_short_rows])
def test_pieces_of_a_file_have_no_more_time_than_the_file(
    write: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece is done in no time, and there are very many of them in a few bytes."""
    monkeypatch.setattr(foreign, "CPU_S", 0.2)
    monkeypatch.setattr(foreign, "CPU_S_PER_FILE_BYTE", 0.0)
    with pytest.raises(BadInput, match=r"after line .*: takes more than 0 s of processor time"):
        _count_rows(write(tmp_path))


def test_keys_of_toml_without_end_have_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is looked up from the first one; quotes and blanks hide how many there are."""
    monkeypatch.setattr(foreign, "CPU_S", 0.1)
    with pytest.raises(BadInput, match=r"j\.toml: (takes|needs) more than"):
        parse_toml('"a b"' + ' . "a b"' * 20_000 + " = 1", where="j.toml")


def test_there_is_no_network_inside() -> None:
    with pytest.raises(BadInput, match="PermissionError"):
        _do_harm("calls home")
    socket.socket().close()  # outside there is
