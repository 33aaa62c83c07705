"""Damaged, odd and large traces: read as far as they are whole, or refused in one line."""

import gzip
import json
import resource
import sqlite3
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from sample_traces import COMPUTE_MS, events, kineto, nsight

from moewright.cli.main import main
from moewright.codec.foreign import budget, read_apart
from moewright.diagnosis.traces import trace_stream
from moewright.diagnosis.traces.breakdown import break_down_step
from moewright.diagnosis.traces.kineto import read_traces
from moewright.diagnosis.traces.trace_files import read_captures
from moewright.diagnosis.traces.trace_stream import TraceStream
from moewright.spec.errors import BadInput
from moewright.spec.units import GIB

COMPUTE_S = COMPUTE_MS / 1e3
HOSTILE = (
    {"ts": 1e300, "dur": 5},
    {"ts": float("inf"), "dur": 5},
    {"ts": 10**400, "dur": 5},
    {"ts": 8e15, "dur": 5},
    {"ts": 1e6, "dur": float("inf")},
    {"ts": [], "dur": {}},
    {"ts": 1e6, "dur": 0, "name": ["x"], "args": 7},
    {"ts": 1e6, "dur": 0, "name": "\ud800\u202e", "args": {"stream": {}, "device": 0}},
    {"ts": 1e6, "dur": 0, "args": {"correlation": [1], "External id": {}, "device": 0}},
    {"ts": 1e6, "dur": 0, "args": {"correlation": 10**400, "device": 0}},
    {"ts": 1e6, "dur": 0, "cat": "gpu_memcpy", "args": {"bytes": 10**400, "device": 0}},
    {"ts": 1e6, "dur": 0, "cat": ["kernel"]},
    {"ts": 1e6, "dur": 0, "cat": "cpu_op", "name": "aten::mm", "args": {"Input Dims": ["a"]}},
    {
        "ts": 1e6,
        "dur": 0,
        "cat": "cpu_op",
        "name": "aten::mm",
        "args": {"Input Dims": [[10**200], [10**200]]},
    },
    {
        "ts": 1e6,
        "dur": 0,
        "name": "ncclKernel_AllReduce",
        "args": {"In msg nelems": 10**400, "Group size": 1e999, "device": 0},
    },
)


@pytest.mark.turns
@pytest.mark.parametrize("odd", range(len(HOSTILE)))
def test_wrong_and_huge_fields_spoil_nothing_else(odd, tmp_path):
    path = kineto(
        tmp_path / "t.json", extra=({"ph": "X", "cat": "kernel", "name": "k", **HOSTILE[odd]},)
    )
    captures = read_traces(path)
    part = break_down_step(next(c for c in captures if len(c.kernels.names) > 2))
    assert part.compute_s == pytest.approx(COMPUTE_S, rel=1e-3)
    assert main(["diagnose", str(path)]) == 0


def test_a_mark_of_the_byte_order_is_no_damage(tmp_path):
    path = kineto(tmp_path / "t.json")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert break_down_step(read_traces(path)[0]).compute_s == pytest.approx(COMPUTE_S)


@pytest.mark.parametrize("piece", [64, 1000, 4096])
def test_pieces_of_any_size_give_the_same_events(piece, tmp_path, monkeypatch):
    path = kineto(tmp_path / "t.json")
    whole = json.loads(path.read_text())
    monkeypatch.setattr(trace_stream, "_PIECE_BYTES", piece)
    for form in (path.read_bytes(), gzip.compress(path.read_bytes())):
        (tmp_path / "p.json").write_bytes(form)
        events_read, stream = read_stream(tmp_path / "p.json")
        assert events_read == whole["traceEvents"]
        assert stream.metadata == {**whole, "traceEvents": []}
        assert (stream.is_cut, stream.unreadable) == (False, 0)


@read_apart
def read_stream(path):
    with budget(str(path), path.stat().st_size):
        stream = TraceStream(path)
        read = [event for batch in stream.batches() for event in batch]
    return read, SimpleNamespace(
        metadata=stream.metadata, is_cut=stream.is_cut, unreadable=stream.unreadable
    )


@pytest.mark.parametrize("piece", [300, 1 << 22])
def test_an_event_that_is_no_json_is_counted_and_the_rest_is_read(piece, tmp_path, monkeypatch):
    monkeypatch.setattr(trace_stream, "_PIECE_BYTES", piece)
    monkeypatch.setattr(trace_stream, "_LARGEST_EVENT", 2000)
    lines = [json.dumps(event) for event in events()]
    lines[5] = lines[5].replace('"ts":', '"ts" 5 oops')
    text = '{"traceEvents": [' + ",\n".join(lines) + '], "traceName": "x"}'
    (tmp_path / "t.json").write_text(text)
    read, stream = read_stream(tmp_path / "t.json")
    assert (len(read), stream.unreadable) == (len(lines) - 1, 1)
    assert stream.metadata["traceName"] == "x"
    assert any(
        "no JSON, and left out: 1 event" in note
        for note in read_traces(tmp_path / "t.json")[0].notes
    )


def test_a_cut_rank_and_another_json_in_a_folder_are_left_out_and_named(tmp_path, capsys):
    for rank in range(2):
        kineto(tmp_path / f"rank{rank}.json.gz", rank=rank)
    (tmp_path / "config.json").write_text('{"model": 1}')
    cut = (tmp_path / "rank1.json.gz").read_bytes()
    (tmp_path / "rank2.json.gz").write_bytes(cut[:12])
    captures = read_traces(tmp_path)
    assert [capture.rank for capture in captures] == [0, 1]
    assert main(["diagnose", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "config.json" in out
    assert "rank2.json.gz" in out


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (" " * 5000, "was cut off before its first event"),
        (
            json.dumps({"deviceProperties": [{"id": 0}], "traceEvents": []})[:-2],
            "was cut off before any work of a GPU",
        ),
    ],
)
def test_a_cut_file_without_work_says_that_it_is_cut(text, rule, tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(text.encode())[:-8])
    with pytest.raises(BadInput, match=rule):
        read_traces(path)


def test_reports_of_nsight_and_folders_of_exports(tmp_path, capsys):
    (tmp_path / "p.nsys-rep").write_bytes(b"anything")
    assert main(["diagnose", str(tmp_path / "p.nsys-rep")]) == 2
    error = capsys.readouterr().err
    assert "nsys export --type sqlite" in error
    assert error.count("\n") == 1
    for rank in range(2):
        nsight(tmp_path / f"rank{rank}.sqlite")
    assert main(["diagnose", str(tmp_path)]) == 0
    assert "2 ranks" in capsys.readouterr().out


def test_an_export_whose_view_never_ends_is_refused(tmp_path):
    path = tmp_path / "endless.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE StringIds (id, value)")
        database.execute(
            "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS WITH RECURSIVE t(start, end, deviceId) AS "
            "(SELECT 1, 2, 0 UNION ALL SELECT start + 1, end + 1, 0 FROM t) SELECT * FROM t"
        )
    with pytest.raises(BadInput, match="a view takes more work than its bytes"):
        read_captures(path)


def test_a_device_that_is_not_read_is_no_cpu(tmp_path, capsys):
    call = {"ph": "X", "name": "launch", "ts": 1, "dur": 5, "args": {}}
    operation = {**call, "cat": "cpu_op", "name": "aten::mm"}
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [operation, {**call, "cat": "mtia_runtime"}]}))
    assert main(["diagnose", str(path)]) == 2
    assert "not read (mtia_runtime)" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_large_trace_stays_within_a_gibibyte_and_is_read_at_20_megabytes_a_second(tmp_path):
    path = tmp_path / "large.json"
    text = ",\n".join(json.dumps(event) for event in events())
    with path.open("w") as stream:
        stream.write('{"traceEvents": [\n')
        for _ in range(round(200e6 / len(text))):
            stream.write(text + ",\n")
        stream.write(text + "]}")

    def limit_memory() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (GIB, GIB))

    start = time.process_time()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "moewright", "diagnose", str(path)]
    done = subprocess.run(command, capture_output=True, check=False, preexec_fn=limit_memory)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    seconds = after.ru_utime - before.ru_utime + time.process_time() - start
    assert path.stat().st_size / seconds > 20e6
