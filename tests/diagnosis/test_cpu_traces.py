"""Traces of programs on the CPU: what is work, what a wait and what neither.

They are written by hand and by torch's profiler.
"""

import gzip
import json
import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from moewright.cli.main import main
from moewright.diagnosis.traces.breakdown import break_down_step
from moewright.diagnosis.traces.capture import KernelKind
from moewright.diagnosis.traces.comm_classes import CommClass
from moewright.diagnosis.traces.gaps import IdleCause
from moewright.diagnosis.traces.kineto import read_traces
from moewright.diagnosis.traces.rank_skew import measure_rank_skew
from moewright.diagnosis.traces.trace_findings import diagnose_traces
from moewright.diagnosis.traces.trace_waterfall import find_peak_rate
from moewright.spec.finding import Wall
from moewright.spec.layout import Layout

STEPS = 3


def event(name, start, length, *, cat="cpu_op", pid=0, tid=1, **args):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": 1e6 + 1000 * start,
        "dur": 1000 * length,
        "args": args,
    }


def test_a_thread_that_sends_messages_works_too(tmp_path):
    """Gloo's ranges of messages lie on the thread that asks, those of collectives on its own."""
    events = [
        event("ProfilerStep#4", 0, 100, cat="user_annotation"),
        event("aten::mm", 5, 20),
        event("wait:pp", 30, 10, cat="user_annotation"),
        event("c10d::recv_", 31, 1, **{"Concrete Inputs": ["", "", "1", "0"]}),
        event("gloo:recv", 32, 8),
        event("aten::mm", 50, 20),
    ]
    (tmp_path / "a.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    (capture,) = read_traces(tmp_path / "a.json")
    assert list(capture.kernels.names).count("aten::mm") == 1
    assert len(capture.kernels.start_s) == 3
    (message,) = capture.messages
    assert (message.is_send, message.peer) == (False, 1)


def step(pid=0, late=0.0):
    """Return events of 100 ms.

    They are a product of 20 inside a linear of 22, 10 of a Python function's own, 30 of a wait and
    5 of loading.
    """
    process = {"pid": pid}
    return [
        event("ProfilerStep#4", 0, 100, cat="user_annotation", **process),
        event("aten::linear", 5, 22, **process),
        event("aten::mm", 6, 20, **{**process, "Input Dims": [[8, 4], [4, 2]], "External id": 7}),
        event("aten::as_strided", 7, 1, **process),
        event("SwiGlu", 30, 15, **process),
        event("aten::silu", 32, 5, **process),
        event("c10d::alltoall_base_", 50, 2, **process),
        event("wait:ep", 52 + late, 30 - late, cat="user_annotation", **process),
        event("gloo:all_to_all", 50, 32, cat="user_annotation", tid=9, **process),
        event("data", 90, 5, cat="user_annotation", **process),
        event("aten::add", 99, 1, **process),
    ]


def write(path, events, **metadata):
    path.write_text(json.dumps({"traceEvents": events, **metadata}))
    return path


def test_operations_stand_for_kernels_and_waits_for_communication(tmp_path):
    (capture,) = read_traces(write(tmp_path / "rank3.json", step()))
    part = break_down_step(capture)
    assert capture.rank == 3
    assert dict(part.kind_times) == pytest.approx({KernelKind.GEMM: 0.020, KernelKind.OTHER: 0.006})
    assert [(comm.comm, round(comm.exposed_s, 6), comm.calls) for comm in part.comm_times] == [
        (CommClass.EP, 0.030, 1)
    ]
    assert dict(part.idle_times)[IdleCause.DATA] == pytest.approx(0.005)
    assert (
        part.compute_s + part.exposed_s + part.idle_s
        == pytest.approx(part.step_s)
        == pytest.approx(0.1)
    )
    assert part.known_matrix_flops == 2 * 8 * 4 * 2


def test_a_file_of_several_ranks_is_taken_apart_and_late_ranks_are_told_from_the_link(tmp_path):
    named = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"rank {rank}: python"}}
        for pid, rank in ((0, 0), (1000, 1))
    ]
    captures = read_traces(
        write(tmp_path / "trace.json", [*named, *step(0), *step(1000, late=25.0)])
    )
    assert [capture.rank for capture in captures] == [0, 1]
    layout = Layout(world_size=2, ep=2)
    parts = tuple(break_down_step(capture, layout) for capture in captures)
    skew = measure_rank_skew(captures, parts, layout)
    (waiting,) = skew.waiting
    assert waiting.comm is CommClass.EP
    assert waiting.seconds == pytest.approx(0.0125)


def test_an_engines_replays_are_its_layers_inside_backward(tmp_path):
    ranges = [
        event("layers.0", 4, 10, cat="user_annotation"),
        event("backward", 28, 20, cat="user_annotation"),
        event("layers.0", 30, 15, cat="user_annotation"),
    ]
    part = break_down_step(read_traces(write(tmp_path / "t.json", [*step(), *ranges]))[0])
    assert part.recompute_s == pytest.approx(0.005)


def _loop(rank: int, folder: Path) -> None:
    """Train with data parallelism over gloo; rank 1 sleeps before each step."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=(folder / "store").as_uri(), rank=rank, world_size=2
    )
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    window = schedule(wait=1, warmup=1, active=STEPS)
    with profile(
        activities=[ProfilerActivity.CPU], schedule=window, record_shapes=True
    ) as profiler:
        for _ in range(2 + STEPS):
            with record_function("get_batch"):
                x = torch.randn(64, 256)
                if rank == 1:
                    torch.ones(1).mul_(2)
                    multiprocessing.Event().wait(0.05)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(str(folder / f"rank{rank}.json.gz"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    ranks = [
        multiprocessing.get_context("fork").Process(target=_loop, args=(rank, folder))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    return folder


@pytest.mark.spawn
def test_what_the_profiler_writes_of_a_plain_loop_is_read(plain, capsys):
    captures = read_traces(plain)
    assert [capture.rank for capture in captures] == [0, 1]
    parts = tuple(break_down_step(capture) for capture in captures)
    for part in parts:
        assert part.steps == STEPS
        assert {KernelKind.GEMM, KernelKind.OTHER} <= set(dict(part.kind_times))
        assert part.known_matrix_flops == pytest.approx(
            2 * 64 * (256 * 512 * 2 + 512 * 8 * 3), rel=1e-6
        )
        assert part.compute_s + part.exposed_s + part.idle_s + part.copies_s == pytest.approx(
            part.step_s, rel=0.01
        )
    assert dict(parts[1].idle_times)[IdleCause.DATA] > 0.04
    assert parts[0].exposed_s > 0
    skew = measure_rank_skew(captures, parts)
    findings = diagnose_traces(parts, skew, None, find_peak_rate(parts, None))
    assert findings[0].wall in (Wall.HOST, Wall.COMMUNICATION)
    assert main(["diagnose", str(plain)]) == 0
    assert "2 ranks, CPU" in capsys.readouterr().out


@pytest.mark.spawn
def test_a_trace_cut_off_anywhere_is_read_or_refused_in_one_line(plain, tmp_path, capsys):
    whole = (plain / "rank0.json.gz").read_bytes()
    text = gzip.decompress(whole)
    for share in (0.001, 0.3, 0.9):
        for name, data in (("cut.json.gz", whole), ("cut.json", text)):
            (tmp_path / name).write_bytes(data[: int(share * len(data))])
            code = main(["diagnose", str(tmp_path / name)])
            assert capsys.readouterr().err.count("\n") == {0: 0, 2: 1}[code]
