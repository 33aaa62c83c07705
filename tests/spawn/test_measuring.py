"""The profiler window, collection of garbage at given steps, and a sweep of real trials."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import tiny_jobs
from moewright.cli.main import main
from moewright.codec import read_run
from moewright.diagnosis.traces.kineto import read_traces
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.spec.workload import ProfileSpec

pytestmark = pytest.mark.spawn

MACHINE = Path(__file__).parent.parent / "golden" / "machine_2cpu.toml"
CONFIG = Path(__file__).parents[2] / "recipes" / "quickstart" / "config.json"


@pytest.mark.turns
def test_a_window_of_steps_is_written_with_modules_and_a_track_for_each_rank(
    tmp_path: Path,
) -> None:
    data = tiny_jobs.write_corpus(tmp_path / "corpus")
    window = ProfileSpec(start=3, end=5, ranks=(0, 1))
    workload = tiny_jobs.build_workload(data, steps=6, profile=window, gc_every_steps=3)
    folder = tmp_path / "run"
    assert train(tiny_jobs.build_plan(workload, "ep2,mbs4", world_size=2), folder) is ExitCode.DONE
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    event_names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {
        "ProfilerStep#3",
        "ProfilerStep#4",
        "forward",
        "backward",
        "layers.0.attention",
        "layers.2.moe",
    } <= event_names
    assert {"ProfilerStep#2", "ProfilerStep#5"} & event_names == set()
    assert {event["pid"] // 1000 for event in events if "pid" in event} == {0, 1}
    by_rank = read_traces(folder / "trace")
    merged = read_traces(folder / "trace.json")
    assert [capture.rank for capture in by_rank] == [capture.rank for capture in merged] == [0, 1]
    for capture, merged_capture in zip(by_rank, merged, strict=True):
        assert len(capture.steps) == 2
        assert len(capture.kernels.name_index) == len(merged_capture.kernels.name_index) > 100
        assert "ep" in {channel.group for channel in capture.channels}
    steps = read_run(folder).steps
    # Garbage is collected at these steps and before the counted step's census, not between them.
    counted_step = 1 + workload.ledger_step
    collected = [step.host.collecting_s > 0 for step in steps]
    assert collected == [step.step % 3 == 0 or step.step == counted_step for step in steps]
    assert steps[0].samples_per_s == pytest.approx(8 / steps[0].step_s)
    assert {wait.group for wait in steps[-1].waits} >= {"ep"}


def test_a_sweep_runs_each_row_once_and_says_what_cannot_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tiny_jobs.write_corpus(tmp_path / "corpus")
    (tmp_path / "job.toml").write_text(
        f'[model]\nconfig = "{CONFIG}"\n'
        f'[data]\ntrain = "{data.train}"\nheldout = "{data.heldout}"\n'
        f'tokenizer = "{data.tokenizer}"\n'
        f'[train]\nnproc = 1\nhardware = "{MACHINE}"\nseq_len = 32\nglobal_batch = 4\n'
        'steps = 3\nprecision = "fp32"\neval_batches = 1\n'
    )
    (tmp_path / "sweep.toml").write_text(
        'title = "rows"\n[job]\nfile = "job.toml"\n[[table]]\ntitle = "micro-batches"\n'
        '[[table.row]]\nname = "one"\nlayout = "mbs1"\n'
        '[[table.row]]\nname = "graphs"\nlayout = "mbs2,zero2,graphs=attn"\n'
    )
    command = ["bench", "sweep", str(tmp_path / "sweep.toml"), "--out", str(tmp_path / "out")]
    assert main(command) == 0
    assert "running one" in capsys.readouterr().out
    with (tmp_path / "out" / "table.csv").open() as file:
        plain_row, graphs_row = csv.DictReader(file)
    assert float(plain_row["tokens/GPU/s"]) > 0
    assert float(plain_row["predicted tokens/GPU/s"]) > 0
    assert "graphs" in graphs_row["configuration"]
    assert graphs_row["time/iter (s)"] == "-"
    assert main(command) == 0
    assert "running" not in capsys.readouterr().out  # both trials are finished
