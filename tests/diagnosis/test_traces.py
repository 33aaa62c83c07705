"""Traces of known seconds broken down: unions, exposure, idle causes, rates; and damaged files."""

import gzip
import json
import sqlite3
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from sample_traces import (
    A2A,
    COMPUTE_MS,
    EXPOSED_EP_MS,
    HOST_MS,
    KERNELS,
    MS,
    SYNC_MS,
    events,
    kineto,
    nsight,
)

from moewright.cli.main import main
from moewright.diagnosis.traces import intervals as sets
from moewright.diagnosis.traces import trace_stream
from moewright.diagnosis.traces.breakdown import break_down_step
from moewright.diagnosis.traces.capture import KernelKind, collective_in_name, kernel_kind
from moewright.diagnosis.traces.comm_classes import CommClass, classify_channels
from moewright.diagnosis.traces.gaps import IdleCause
from moewright.diagnosis.traces.kineto import read_traces
from moewright.diagnosis.traces.kineto_events import HostEvents
from moewright.diagnosis.traces.nsight import read_nsight
from moewright.diagnosis.traces.rank_skew import measure_rank_skew
from moewright.diagnosis.traces.trace_findings import diagnose_traces
from moewright.diagnosis.traces.trace_waterfall import build_trace_waterfall, find_peak_rate
from moewright.spec.errors import BadInput
from moewright.spec.finding import Cause, Wall
from moewright.spec.hardware import Collective
from moewright.spec.layout import Layout

EXACT = 1e-6  # of a second: times are made in whole microseconds


def spans(*pairs):
    return np.array(pairs, dtype=float).reshape(-1, 2)


def test_sets_of_intervals_are_joined_cut_and_subtracted():
    first = sets.merge(spans((3, 5), (0, 2), (1, 2.5), (4, 4.5), (9, 9)))
    assert first.tolist() == [[0, 2.5], [3, 5]]
    second = spans((2, 4), (4.5, 8))
    assert sets.intersect(first, second).tolist() == [[2, 2.5], [3, 4], [4.5, 5]]
    assert sets.subtract(first, second).tolist() == [[0, 2], [4, 4.5]]
    assert sets.total_s(sets.subtract(first, sets.NO_INTERVALS)) == 4.5
    assert not len(sets.intersect(first, sets.NO_INTERVALS))


@pytest.mark.parametrize("seed", range(5))
def test_sets_agree_with_counting_points(seed):
    dice = np.random.default_rng(seed)
    grid = np.zeros((2, 1000), dtype=bool)
    made = []
    for row in grid:
        ends = np.sort(dice.integers(0, 1000, (40, 2)), axis=1)
        for low, high in ends:
            row[low:high] = True
        made.append(sets.merge(ends.astype(float)))
    assert sets.total_s(sets.intersect(*made)) == (grid[0] & grid[1]).sum()
    assert sets.total_s(sets.subtract(*made)) == (grid[0] & ~grid[1]).sum()
    assert sets.total_s(sets.unite(*made)) == (grid[0] | grid[1]).sum()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (
            "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            KernelKind.COMMUNICATION,
        ),
        (
            "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
            KernelKind.COMMUNICATION,
        ),
        ("void deep_ep::internode::dispatch<false, 8>(int4*)", KernelKind.COMMUNICATION),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", KernelKind.ATTENTION),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7",
            KernelKind.ATTENTION,
        ),
        (
            "void cutlass::device_kernel<"
            "at::cuda::detail::enable_3x_kernel_for_sm9x<GroupProblemShape>>",
            KernelKind.GROUPED_GEMM,
        ),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64", KernelKind.GEMM),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT", KernelKind.GEMM),
        ("Memcpy DtoH (Device -> Pinned)", KernelKind.COPY),
        ("void at::native::elementwise_kernel<128, 4>", KernelKind.OTHER),
    ],
)
def test_kernels_are_known_by_their_names(name, kind):
    assert kernel_kind(name) is kind


def test_collectives_are_known_by_their_names():
    assert (
        collective_in_name("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL")
        is Collective.REDUCE_SCATTER
    )
    assert collective_in_name("_allgather_base") is Collective.ALL_GATHER
    assert collective_in_name("all_to_allv") is Collective.ALL_TO_ALL
    assert collective_in_name("ncclDevKernel_SendRecv") is None


@pytest.mark.parametrize(("kind", "numbers"), [("Float8_e4m3fn", 1), ("Float4_e2m1fn_x2", 2)])
def test_scaled_products_have_the_flops_of_their_numbers(kind: str, numbers: int) -> None:
    host = HostEvents()
    for key, (name, right) in enumerate(
        (("_scaled_mm_v2", [64, 128]), ("_scaled_grouped_mm_v2", [8, 64, 128]))
    ):
        args = {
            "Input Dims": [[256, 64], right],
            "Input type": [f"c10::{kind}"],
            "External id": key,
        }
        host.add("cpu_op", f"aten::{name}", (0.0, 1e-6), args, "1")
    assert list(host.matrix_flops.values()) == [2 * 256 * 64 * 128 * numbers] * 2
    assert host.grouped_rows == [(256.0, 8)]


def test_a_step_is_taken_apart_into_what_was_put_in(tmp_path):
    (capture,) = read_traces(kineto(tmp_path / "trace.json.gz"))
    part = break_down_step(capture)
    assert (part.rank, part.steps, part.device) == (0, 3, "NVIDIA H100 80GB HBM3")
    comms = {time.comm: time for time in part.comm_times}
    assert part.compute_s == pytest.approx(COMPUTE_MS / 1e3, abs=EXACT)
    assert comms[CommClass.EP].exposed_s == pytest.approx(EXPOSED_EP_MS / 1e3, abs=EXACT)
    assert comms[CommClass.EP].busy_s == pytest.approx(0.020, abs=EXACT)
    assert comms[CommClass.EP].bytes == 2_000_000
    assert comms[CommClass.DP].exposed_s == 0
    idle = dict(part.idle_times)
    # The last step ends with its last kernel.
    assert idle[IdleCause.HOST] == pytest.approx(HOST_MS / 1e3, rel=0.07)
    assert idle[IdleCause.SYNC] == pytest.approx(SYNC_MS / 1e3, rel=0.07)
    assert part.compute_s + part.exposed_s + part.copies_s + part.idle_s == pytest.approx(
        part.step_s, abs=EXACT
    )
    flops = 2 * 4096 * 8192 * (8192 + 12288)
    assert part.known_matrix_flops == flops
    assert part.known_matrix_s == pytest.approx(0.050, abs=EXACT)
    assert part.top_kernels[0].name.startswith("sm90_xmma")


def test_nsight_tells_the_same_seconds_as_kineto(tmp_path):
    of_kineto = break_down_step(read_traces(kineto(tmp_path / "trace.json"))[0])
    of_nsight = break_down_step(read_nsight(nsight(tmp_path / "profile.sqlite"))[0])
    assert of_nsight.compute_s == pytest.approx(of_kineto.compute_s, abs=EXACT)
    assert of_nsight.step_s == pytest.approx(of_kineto.step_s, abs=EXACT)
    assert dict(of_nsight.idle_times) == pytest.approx(dict(of_kineto.idle_times), abs=EXACT)
    # The exchange is told by the NVTX range around its launch; nothing names experts.
    exposed_s = {time.comm: time.exposed_s for time in of_nsight.comm_times}
    assert exposed_s[CommClass.EXCHANGE] == pytest.approx(EXPOSED_EP_MS / 1e3, abs=EXACT)


def test_the_layouts_groups_win_over_descriptions(tmp_path):
    (capture,) = read_traces(kineto(tmp_path / "trace.json"))
    (exchange, how), *_ = [
        (c.comm, c.evidence) for c in classify_channels(capture, Layout(world_size=8, ep=4))
    ]
    assert exchange is CommClass.EP
    assert "layout's ep group" in how


def test_ranks_that_wait_for_one_another_are_found(tmp_path):
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank in range(4):
        path = kineto(folder / f"rank{rank}.json", rank=rank)
        data = json.loads(path.read_text())
        for event in data["traceEvents"]:
            if rank == 2 and event["name"].startswith("ncclDevKernel_SendRecv"):
                event["ts"] += 15 * MS  # it comes last
                event["dur"] -= 15 * MS
        path.write_text(json.dumps(data))
    captures = read_traces(folder)
    parts = tuple(break_down_step(capture) for capture in captures)
    skew = measure_rank_skew(captures, parts)
    assert [capture.rank for capture in captures] == [0, 1, 2, 3]
    (waiting,) = skew.waiting
    assert waiting.comm is CommClass.EP
    assert waiting.seconds == pytest.approx(0.015 * 3 / 4, abs=EXACT)


def test_the_verdict_names_the_wall_and_the_waterfall_closes(tmp_path):
    parts = (break_down_step(read_traces(kineto(tmp_path / "trace.json"))[0]),)
    peak = find_peak_rate(parts, None)
    assert peak.flops == pytest.approx(989e12, rel=0.01)
    findings = diagnose_traces(parts, None, None, peak)
    assert (findings[0].wall, findings[0].cause) in ((Wall.HOST, Cause.HOST_OTHER),)
    assert any(fix.megatron for fix in findings[0].fixes)
    fall = build_trace_waterfall(parts, None, None, peak)
    assert fall.ideal_s + sum(drop.seconds for drop in fall.drops) == pytest.approx(fall.measured_s)
    assert abs(fall.drops[-1].seconds) < 1e-6  # nothing is unexplained in a trace that was made


def test_damaged_traces_give_what_is_whole(tmp_path):
    text = kineto(tmp_path / "whole.json").read_text()
    spoilt = text.replace(
        '"Process Group Description": "EXPERT_MODEL_PARALLEL_GROUP"',
        '"Process Group Description": ',
    )
    (tmp_path / "a.json").write_text(spoilt.replace('"dur": 5,', '"dur": -nan,'))
    (capture,) = read_traces(tmp_path / "a.json")
    assert break_down_step(capture).compute_s == pytest.approx(COMPUTE_MS / 1e3, abs=EXACT)
    (tmp_path / "b.json").write_text(text[: int(0.8 * len(text))])
    assert break_down_step(read_traces(tmp_path / "b.json")[0]).compute_s > 0
    (tmp_path / "c.json").write_text(json.dumps(events()))  # a bare list
    assert break_down_step(read_traces(tmp_path / "c.json")[0]).steps == 1
    bare = [
        {k: v for k, v in event.items() if k in ("ph", "cat", "name", "ts", "dur")}
        for event in events()
    ]
    (tmp_path / "d.json").write_text(json.dumps(bare))
    assert (
        dict(break_down_step(read_traces(tmp_path / "d.json")[0]).idle_times)[IdleCause.UNKNOWN] > 0
    )


def test_a_trace_that_was_cut_off_says_so(tmp_path):
    whole = gzip.compress(json.dumps({"traceEvents": events() * 200}).encode())
    for name, content in (("w.json", whole), ("c.json", whole[: len(whole) // 2])):
        (tmp_path / name).write_bytes(content)
    whole_notes, cut_notes = (
        read_traces(tmp_path / name)[0].notes for name in ("w.json", "c.json")
    )
    assert "c.json was cut off" in cut_notes[-1]
    assert cut_notes[:-1] == whole_notes


def test_a_trace_that_was_cut_off_keeps_what_stands_before_its_events(tmp_path):
    data = {"deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}]}
    text = json.dumps({**data, "traceEvents": events()})
    (tmp_path / "c.json").write_text(text[: int(0.8 * len(text))])
    (capture,) = read_traces(tmp_path / "c.json")
    assert "A100" in capture.device


def test_a_rank_that_was_cut_off_is_left_out_of_the_mean(tmp_path):
    text = json.dumps({"traceEvents": events()})
    for name, content in (("0.json", text), ("1.json", text[: len(text) // 3])):
        (tmp_path / name).write_text(content)
    (capture,) = read_traces(tmp_path)
    (alone,) = read_traces(tmp_path / "0.json")
    assert replace(break_down_step(capture), notes=()) == break_down_step(alone)
    assert any("1.json: was cut off" in note for note in capture.notes)
    (tmp_path / "0.json").unlink()
    assert len(read_traces(tmp_path)) == 1


def test_a_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_stream, "_LARGEST_TRACE_BYTES", 1 << 20)
    (tmp_path / "t.json").write_bytes(gzip.compress(b" " * (1 << 22)))
    with pytest.raises(BadInput, match="holds more than the 1 MiB"):
        read_traces(tmp_path / "t.json")


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"hello", "no JSON"),
        (b"{}", "no traceEvents"),
        (b'{"traceEvents": []}', "holds no event"),
        (b'{"traceEvents": 3}', "no traceEvents"),
        (b'{"traceEvents": [1, null, {"ph": "X"}]}', "holds no event"),
        (b"\x1f\x8bnonsense", "cannot be read"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path, content, rule, capsys):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=rule):
        read_traces(path)
    assert main(["diagnose", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_hosts_side_of_a_gpu_alone_is_refused(tmp_path):
    alone = [
        event for event in events() if event["cat"] not in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    (tmp_path / "t.json").write_text(
        json.dumps({"traceEvents": alone, "deviceProperties": [{"id": 0}]})
    )
    with pytest.raises(BadInput, match="no work of a GPU"):
        read_traces(tmp_path / "t.json")


def test_what_is_no_export_of_nsight_is_refused(tmp_path):
    (tmp_path / "a.sqlite").write_bytes(b"SQLite format 3\0" + b"x" * 100)
    with pytest.raises(BadInput, match="Nsight"):
        read_nsight(tmp_path / "a.sqlite")


def test_an_export_without_a_kernel_is_refused(tmp_path):
    """Its table may be there, and hold no row; or rows of more devices than a machine has."""
    path = nsight(tmp_path / "a.sqlite")
    table = "CUPTI_ACTIVITY_KIND_KERNEL"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(f"DELETE FROM {table}")
    with pytest.raises(BadInput, match="holds no kernels"):
        read_nsight(path)
    with closing(sqlite3.connect(path)) as database, database:
        database.executemany(
            f"INSERT INTO {table} (start, end, deviceId, streamId) VALUES (1, 2, ?, 7)",
            [(number,) for number in range(300)],
        )
    with pytest.raises(BadInput, match="300 processes and devices; nearest legal value: 256"):
        read_nsight(path)


def test_an_unnamed_group_is_guessed_and_says_so(tmp_path):
    bare = {key: value for key, value in A2A.items() if key != "Process Group Description"}
    extra = {
        "ph": "X",
        "cat": "kernel",
        "name": KERNELS[1][0],
        "ts": 1e6 + 61 * MS,
        "dur": 100,
        "args": bare | {"stream": 30},
    }
    (capture,) = read_traces(kineto(tmp_path / "t.json", extra=(extra,)))
    assert any("guessed" in channel.evidence for channel in classify_channels(capture, None))


def test_the_command_prints_parts_walls_and_waterfall(tmp_path, capsys):
    assert main(["diagnose", str(kineto(tmp_path / "trace.json"))]) == 0
    out = capsys.readouterr().out
    for text in (
        "exposed EP",
        "idle: host work",
        "WALL: host",
        "from ideal to measured",
        "unexplained",
        "Megatron: ",
    ):
        assert text in out
    assert main(["diagnose", str(nsight(tmp_path / "p.sqlite"))]) == 0
    job = ["--model", "Qwen3-30B-A3B", "--on", "8xH100", "--layout", "ep8", "--global-batch", "128"]
    assert main(["diagnose", str(tmp_path / "trace.json"), *job, "-v"]) == 0
    out = capsys.readouterr().out
    assert "predicted: step" in out
    assert "it is not the job that ran" in out  # a step of 100 ms cannot hold its FLOPs
