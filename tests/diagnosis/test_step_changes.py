"""What changed between two traces, logs or runs; phases, layers, bandwidths and spread of steps."""

import gzip
import json
from dataclasses import replace

import pytest
from sample_traces import A2A, MS, kineto, nsight
from test_megatron_log import text_with_timers

import moewright as mw
from moewright.cli.main import main
from moewright.codec import write_json
from moewright.codec.run_files import format_record
from moewright.diagnosis.traces import trace_stream
from moewright.diagnosis.traces.kineto import read_traces
from moewright.diagnosis.traces.step_details import ChangeLevel, LayerPhase, detail_step
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Collective
from sample_run import record

EXACT = 1e-6
PROCESSES = range(1 << 24, (1 << 24) + 64)  # of the findings


def kernel(name, start, length, *, launched=None, stream=7, **args):
    made = {"device": 0, "stream": stream, "correlation": round(start * 1000), **args}
    event = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "args": made}
    yield {**event, "ts": start * MS, "dur": length * MS}
    call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9}
    launched = start if launched is None else launched
    yield {
        **call,
        "ts": launched * MS,
        "dur": 5,
        "args": {"correlation": round(start * 1000)},
    }


def span(name, start, length):
    event = {"ph": "X", "cat": "user_annotation", "name": name, "pid": 9, "tid": 9}
    return {**event, "ts": start * MS, "dur": length * MS}


def capture_of(path, *groups):
    path.write_text(json.dumps({"traceEvents": [event for group in groups for event in group]}))
    (capture,) = read_traces(path)
    return capture


def test_a_slower_exchange_and_a_new_kernel_are_what_changed(tmp_path):
    before = kineto(tmp_path / "a.json")
    after = kineto(tmp_path / "b.json")
    data = json.loads(after.read_text())
    for event in data["traceEvents"]:
        if event["name"].startswith("ncclDevKernel_SendRecv"):
            event["dur"] += 45 * MS  # from 20 to 85 ms, beyond the product that hid its end
    for start in (1000, 1100, 1200):
        data["traceEvents"] += kernel("new_kernel", start + 66, 2)
    after.write_text(json.dumps(data))
    changes = mw.compare_steps(before, after)
    step, *rest = changes.changes
    by_name = {(change.level, change.name): change.change_s for change in rest}
    # It is alone at 60-70 and 75-85, less the new kernel.
    assert by_name[ChangeLevel.PART, "exposed EP"] == pytest.approx(0.018, abs=EXACT)
    assert by_name[ChangeLevel.KERNEL, "new_kernel"] == pytest.approx(0.002, abs=EXACT)
    parts_s = sum(c.change_s for c in rest if c.level is ChangeLevel.PART)
    assert parts_s == pytest.approx(step.change_s, abs=EXACT)
    kernels = [c.change_s for c in rest if c.level is ChangeLevel.KERNEL]
    assert kernels == sorted(kernels, key=abs, reverse=True)
    assert kernels[0] == pytest.approx(0.045, abs=EXACT)


def test_logs_and_runs_are_compared_by_what_they_hold(tmp_path, capsys):
    for name, load in (("a.log", 20.0), ("b.log", 4000.0)):
        (tmp_path / name).write_text(text_with_timers(load=load))
    changes = mw.compare_steps(tmp_path / "a.log", tmp_path / "b.log").changes
    assert (changes[1].level, changes[1].name) == (ChangeLevel.TIMER, "batch-generator")
    assert changes[1].change_s == pytest.approx(3.98)
    assert main(["diagnose", str(tmp_path / "a.log"), str(tmp_path / "b.log")]) == 0
    assert "batch-generator" in capsys.readouterr().out
    trace = kineto(tmp_path / "t.json")
    with pytest.raises(BadInput, match="both must be of one kind"):
        mw.compare_steps(trace, tmp_path / "a.log")
    with pytest.raises(BadInput, match="no such"):
        mw.compare_steps(trace, tmp_path / "none.json")


def test_the_command_tells_what_changed(tmp_path, capsys):
    before = kineto(tmp_path / "a.json")
    after = kineto(tmp_path / "b.json", extra=tuple(kernel("slow_kernel", 1261, 8)))
    assert main(["diagnose", str(before), str(after), "--json", str(tmp_path / "c.json")]) == 0
    out = capsys.readouterr().out
    assert "a step takes" in out
    assert "slow_kernel" in out
    told = json.loads((tmp_path / "c.json").read_text())["changes"]
    assert told[0]["name"] == "step"


def test_phases_come_from_names_of_kernels_and_of_ranges(tmp_path):
    capture = capture_of(
        tmp_path / "t.json",
        kernel("flash_fwd_kernel", 0, 10),
        kernel("fused_topk_with_score_kernel", 10, 1),
        kernel("void deep_ep::internode::dispatch<8>", 11, 5, stream=20),
        kernel("grouped_gemm_kernel", 16, 20),
        kernel("void deep_ep::internode::combine<8>", 36, 6, stream=20),
        # nothing in their names: the range around the launch tells it
        [span("TEGroupedExperts.forward", 50, 2)],
        kernel("vectorized_elementwise_kernel", 60, 3, launched=51),
        kernel("void at::native::permute_axes", 70, 9),
    )
    phases = {row.phase: row.seconds for row in detail_step(capture).phases}
    assert phases == pytest.approx(
        {
            LayerPhase.ATTENTION: 0.010,
            LayerPhase.ROUTER: 0.001,
            LayerPhase.DISPATCH: 0.005,
            LayerPhase.EXPERTS: 0.023,
            LayerPhase.COMBINE: 0.006,
        }
    )


def test_layers_take_what_their_ranges_launch(tmp_path):
    capture = capture_of(
        tmp_path / "t.json",
        [span(f"nn.Module: TransformerLayer_{layer}", 10 * layer, 9) for layer in range(3)],
        *(kernel("some_kernel", 10 * layer + 5, 1 + layer) for layer in range(3)),
    )
    layers = {row.layer: row.seconds for row in detail_step(capture).layers}
    assert layers == pytest.approx({0: 0.001, 1: 0.002, 2: 0.003})


def test_bandwidths_are_those_of_nccl_tests(tmp_path):
    gather = {**A2A, "Collective name": "_allgather_base", "Process Group Description": "TP"}
    capture = capture_of(
        tmp_path / "t.json",
        kernel("ncclDevKernel_SendRecv", 0, 1, stream=20, **A2A),
        kernel("ncclDevKernel_AllGather_RING_LL", 10, 2, stream=24, **gather),
    )
    rates = {rate.op: rate for rate in detail_step(capture).collectives}
    # 2 MB handed in by each of four ranks
    assert rates[Collective.ALL_TO_ALL].bus_Bps == pytest.approx(2e6 * 3 / 4 / 1e-3)
    assert rates[Collective.ALL_GATHER].bus_Bps == pytest.approx(4 * 2e6 * 3 / 4 / 2e-3)


def test_the_command_shows_phases_bandwidths_and_spread(tmp_path, capsys):
    assert main(["diagnose", str(kineto(tmp_path / "t.json")), "-v"]) == 0
    out = capsys.readouterr().out
    assert "EP all_to_all" in out
    assert "3 steps of 100 ms to 100 ms" in out


def test_runs_of_the_engine_are_compared_by_phase(tmp_path):
    run = record()
    for name, factor in (("a", 1), ("b", 2)):
        write_json(tmp_path / name / "plan.json", run.plan)
        steps = [
            replace(
                step,
                step_s=factor * step.step_s,
                phases=tuple(replace(row, seconds=factor * row.seconds) for row in step.phases),
            )
            for step in run.steps
        ]
        lines = map(format_record, (*run.sessions, *steps))
        (tmp_path / name / "steps.jsonl").write_text("".join(lines))
    step, *phases = mw.compare_steps(tmp_path / "a", tmp_path / "b").changes
    assert step.after_s == pytest.approx(2 * step.before_s)
    assert sum(phase.change_s for phase in phases) == pytest.approx(step.change_s, rel=1e-6)


def split_off_findings(path):
    """Return the events of a diagnosis, and the trace that they were added to."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    trace = json.loads(text)
    own = [event for event in trace["traceEvents"] if event.get("pid") not in PROCESSES]
    added = [event for event in trace["traceEvents"] if event.get("pid") in PROCESSES]
    return added, {**trace, "traceEvents": own}


def test_the_findings_are_tracks_on_the_clock_of_the_trace(tmp_path, capsys):
    trace = kineto(tmp_path / "t.json", rank=2)
    track = tmp_path / "track.json"
    assert main(["diagnose", str(trace), "--perfetto", str(track)]) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    added, written = split_off_findings(track)
    assert written == json.loads(trace.read_text())
    named = [event for event in added if event["name"] == "thread_name"]
    names = {event["tid"]: event["args"]["name"] for event in named}
    spans = [event for event in added if event["ph"] == "X"]
    assert len({event["pid"] for event in spans}) == 1
    findings = mw.diagnose(trace).findings
    told = [event["name"] for event in spans if names[event["tid"]] == "findings"]
    assert [text.split(": ", 1)[1] for text in told] == [finding.title for finding in findings]
    exposed = [event for event in spans if names[event["tid"]] == "exposed EP"]
    assert [(event["ts"], event["dur"]) for event in exposed] == [
        (pytest.approx(1e6 + step * 100 * MS + 20 * MS), pytest.approx(10 * MS))
        for step in range(3)
    ]
    gaps = [event["name"] for event in spans if names[event["tid"]] == "longest gaps"]
    assert any("idle: host work" in name for name in gaps)
    log = tmp_path / "a.log"
    log.write_text(text_with_timers())
    assert main(["diagnose", str(log), "--perfetto", str(track)]) == 2


def test_each_trace_of_a_folder_is_written_with_its_findings(tmp_path, capsys):
    for rank in range(2):
        folder = tmp_path / "traces" / f"host{rank}"
        folder.mkdir(parents=True)
        kineto(folder / "trace.json", rank=rank)
    written = tmp_path / "written"
    assert main(["diagnose", str(tmp_path / "traces"), "--perfetto", str(written)]) == 0
    for rank in range(2):
        name = f"host{rank}/trace.json"
        added, trace = split_off_findings(written / name)
        assert added[0]["args"]["name"] == f"moewright diagnose: rank {rank}"
        assert trace == json.loads((tmp_path / "traces" / name).read_text())
    capsys.readouterr()
    inside = tmp_path / "traces" / "written"
    assert main(["diagnose", str(tmp_path / "traces"), "--perfetto", str(inside)]) == 2
    assert "lies among the traces" in capsys.readouterr().err
    alone = tmp_path / "traces" / "host0" / "trace.json"
    assert main(["diagnose", str(alone), "--perfetto", str(alone)]) == 2
    assert "is the trace itself" in capsys.readouterr().err


@pytest.mark.parametrize("cut", [0.5, 0.9, 1.0])
def test_a_cut_trace_is_closed_where_its_findings_are_added(tmp_path, monkeypatch, cut):
    # Pieces that end within events, so that the copy has to find where they end.
    monkeypatch.setattr(trace_stream, "_PIECE_BYTES", 1000)
    text = kineto(tmp_path / "t.json").read_text()
    (tmp_path / "t.json").write_text(text[: round(cut * len(text))])
    target = tmp_path / "t2.json.gz"
    mw.diagnose(tmp_path / "t.json", perfetto=target)
    _, trace = split_off_findings(target)
    whole = json.loads(text)["traceEvents"]
    kept = len(trace["traceEvents"])
    assert trace["traceEvents"] == whole[:kept]
    assert kept == pytest.approx(cut * len(whole), rel=0.1)
    assert cut < 1 or trace == json.loads(text)


def test_the_tracks_of_an_export_of_nsight_stand_alone(tmp_path):
    mw.diagnose(nsight(tmp_path / "a.sqlite"), perfetto=tmp_path / "a.json")
    added, trace = split_off_findings(tmp_path / "a.json")
    assert added
    assert trace == {"traceEvents": []}
