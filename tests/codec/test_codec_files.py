"""JSON and TOML files: they read back, faults are one line, writes are whole."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import stat
from pathlib import Path

import pytest

from moewright.codec import (
    read_bytes,
    read_json,
    read_json_data,
    read_toml,
    read_toml_data,
    write_json,
    write_text,
    write_toml,
)
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Curve
from moewright.spec.layout import Layout
from moewright.spec.units import SourceKind
from moewright.spec.workload import Workload

CURVE = Curve(points=((1.0, 2.5), (3.0, 1e12)), kind=SourceKind.MEASURED, source='here, "quoted"')


def test_json_and_toml_read_back(tmp_path: Path) -> None:
    write_json(tmp_path / "deep" / "curve.json", CURVE)
    write_toml(tmp_path / "curve.toml", CURVE)
    assert read_json(Curve, tmp_path / "deep" / "curve.json") == CURVE
    assert read_toml(Curve, tmp_path / "curve.toml") == CURVE


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"seq_len": 1, "seq_len": 2}', 'key "seq_len" stands twice'),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b'{"seq_len": NaN}', "holds NaN"),
        (b'{"seq_len": -Infinity}', "holds -Infinity"),
        (b'{"seq_len": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"seq_len": 1e999, "global_batch": 2}', "seq_len=inf: must be a whole number"),
        (b"\x80\x04\x95pickle", "is not text in UTF-8 (byte 0)"),
        (b"\x00\x01\x02", "is not JSON"),
        (b"", "is not JSON"),
        (b'{"seq_len": 1', "at line 1, column"),
        (b"[]", "must be a table"),
        (b"3", "must be a table"),
    ],
)
def test_malformed_json_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "w.json"
    path.write_bytes(content)
    with pytest.raises(BadInput) as refusal:
        read_json(Workload, path)
    assert message in str(refusal.value)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = 1\na = 2\n", "is not TOML"),
        (b"a = " + b"[" * 100_000, "nested too deeply"),
        (b"a" + b".a" * 3000 + b" = 1", "is nested too deeply"),
        (b'"a b"' + b' . "a b"' * 400 + b" = 1", "is nested too deeply"),
        (b"a = 1\n" * 700_000, "more than the 4,194,304 characters of TOML"),
        (b"\xff\xfe", "is not text in UTF-8"),
        (b"seq_len = " + b"9" * 5000, "too many digits"),
        (b"seq_len = nan\nglobal_batch = 1\n", "must be a whole number"),
        (b"seq_len = 1\nglobal_batch = 1\nload_factor = inf\n", "must be a finite number"),
        (b"seq_len = 1\nglobal_batch = 1979-05-27\n", "must be a whole number"),
    ],
)
def test_malformed_toml_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "w.toml"
    path.write_bytes(content)
    with pytest.raises(BadInput) as refusal:
        read_toml(Workload, path)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_missing_folder_and_special_files(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("")
    os.mkfifo(tmp_path / "pipe")
    cases = [
        (tmp_path / "jbo.toml", f"no such file; nearest legal value: {tmp_path / 'job.toml'}"),
        (tmp_path / "nowhere" / "x.toml", "no such file"),
        (tmp_path, "is a folder"),
        (tmp_path / "pipe", "is not a regular file"),
        (Path("a\0b"), "a"),
        (tmp_path / ("n" * 300), "n"),
    ]
    for path, message in cases:
        with pytest.raises(BadInput) as refusal:
            read_toml_data(path)
        assert message in str(refusal.value)


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json_data(tmp_path / "x.json") == {"a": 1}


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    write_json(path, Layout(world_size=1))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadInput, match="No space left on device"):
        write_json(path, Layout(world_size=2))
    assert json.loads(path.read_text())["world_size"] == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_unwritable_targets_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "under.json", tmp_path):
        with pytest.raises(BadInput, match="cannot be written"):
            write_text(path, "text")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_written_files_are_readable_by_others(tmp_path: Path) -> None:
    write_text(tmp_path / "page.html", "x")
    assert stat.S_IMODE((tmp_path / "page.html").stat().st_mode) == 0o644


def test_what_has_no_end_is_not_opened(tmp_path: Path) -> None:
    """A device, a pipe and a link to one are refused by their kind, before a byte is read."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link.json").symlink_to("/dev/zero")
    for path in (Path("/dev/zero"), tmp_path / "pipe", tmp_path / "link.json"):
        with pytest.raises(BadInput, match="is not a regular file"):
            read_json_data(path)


def test_no_more_than_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"12345")
    assert read_bytes(path, limit_bytes=5) == b"12345"
    with pytest.raises(BadInput, match="is larger than the 4 B that are read"):
        read_bytes(path, limit_bytes=4)
    os.truncate(path, 1 << 40)  # a hole of a TiB on the disk
    with pytest.raises(BadInput, match="is larger than"):
        read_bytes(path, limit_bytes=1 << 20)


def test_what_a_killed_process_left_is_taken_over(tmp_path: Path) -> None:
    """A process is killed in the midst of a write; the next write leaves nothing of it."""
    path = tmp_path / "plan.json"

    def write_and_die() -> None:
        os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
        write_text(path, "x" * 10_000)

    process = multiprocessing.get_context("fork").Process(target=write_and_die)
    process.start()
    process.join()
    assert [entry.name for entry in tmp_path.iterdir()] == [".plan.json.0.part"]
    write_text(path, "short")
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]
    assert path.read_text() == "short"
    assert path.stat().st_mode & 0o777 == 0o644


def test_two_processes_write_a_file_at_the_same_time(tmp_path: Path) -> None:
    """Each reader sees one of the texts as a whole, whoever comes last."""
    path = tmp_path / "plan.json"
    texts = [letter * size for letter, size in (("a", 50_000), ("b", 10), ("c", 200_000))]

    def write_often(text: str) -> None:
        for _ in range(40):
            write_text(path, text)

    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_often, args=(text,)) for text in texts]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            assert path.read_text() in texts
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]
