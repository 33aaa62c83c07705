"""A run beside its prediction and published runs: classes that sum, sources, what closes gaps."""

import json
import re

import pytest
from sample_traces import kineto

import moewright as mw
import sample_run
from diagnosis.test_megatron_log import log, text_with_timers
from moewright.cli.main import main
from moewright.codec import parse_layout
from moewright.diagnosis.published import Nearness, find_nearest_runs
from moewright.diagnosis.run_comparison import StepClass, compare_with_published
from moewright.spec.errors import BadInput
from moewright.spec.layout import LAYOUT_FIELDS

LAYOUT = "tp2,ep8,pp32,vpp3,mbs1,recompute=select,layout='E|(t|)*94L'"
JOB = ["--model", "Qwen3-235B-A22B", "--on", "256xH800", "--global-batch", "2048"]


@pytest.mark.thorough
def test_a_slow_log_stands_beside_the_published_runs_of_its_job(tmp_path, capsys):
    path = tmp_path / "run.log"
    path.write_text(log(ms=40000.0, tflops=121.3))
    answer, page = tmp_path / "a.json", tmp_path / "a.html"
    command = ["compare", str(path), *JOB, "--layout", LAYOUT]
    assert main([*command, "--json", str(answer), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 40
    # The published table has 22.42 s for this layout of this job: 1,461.56 tokens/s.
    assert re.search(r"seed000-001: Qwen3-235B-A22B, 256 x H800 +1,462 .* the same job", out)
    assert "Pai-Megatron-Patch commit 2b201af" in out
    data = json.loads(answer.read_text())
    assert data["measured"] == pytest.approx(2048 * 4096 / 256 / 40, rel=1e-9)
    near = max(item["run"]["measured"] for item in data["nearest"])
    assert f"this run has {data['measured'] / near:.2f} of " in out
    assert data["closers"][0]["gap"] == StepClass.UNEXPLAINED
    assert "Pai-Megatron-Patch commit 2b201af" in page.read_text()


@pytest.mark.core
def test_timers_say_where_the_gap_lies_and_the_first_change_closes_it(tmp_path, capsys):
    path = tmp_path / "run.log"
    text = text_with_timers(sync=9000.0).replace("(150.00, 9000.00)", "(9000.00, 9000.00)")
    path.write_text(text.replace("2048", "512"))
    small = ["--model", "Qwen3-30B-A3B", "--on", "16xH100", "--layout", "ep8,pp2"]
    small += ["--load", "balanced"]
    assert main(["compare", str(path), *small, "--global-batch", "512", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    first = data["gaps"][0]
    assert first["name"] == StepClass.DP
    assert first["is_measured"]
    assert 9.0 <= first["measured_s"] <= 9.1
    assert StepClass.DP in data["headline"]
    evidence = data["advice"]["changes"][0]["evidence"]
    assert evidence.startswith("exposed DP communication")
    assert "(measured)" in evidence


@pytest.mark.thorough
def test_classes_sum_to_the_step_on_both_sides(tmp_path):
    sample_run.write_run(tmp_path / "run", sample_run.record())
    (tmp_path / "run.log").write_text(text_with_timers().replace("2048", "128"))
    plan = mw.estimate("Qwen3-30B-A3B", "ep8", on="8xH100")
    for path, stated in (
        (tmp_path / "run", None),
        (tmp_path / "run.log", plan),
        (kineto(tmp_path / "trace.json"), plan),
    ):
        comparison = mw.compare_run(path, plan=stated)
        gaps = comparison.gaps
        predicted_s = comparison.job.estimate.step_s
        assert sum(gap.measured_s for gap in gaps) == pytest.approx(comparison.measured_step_s)
        assert sum(gap.predicted_s for gap in gaps) == pytest.approx(predicted_s, rel=1e-6)
        assert [gap.gap_s for gap in gaps] == sorted((gap.gap_s for gap in gaps), reverse=True)


def test_a_published_layout_that_is_predicted_faster_is_a_way_to_close_the_gap():
    slow = mw.estimate("Qwen3-235B-A22B", "tp8,ep8,pp8", on="256xH800", global_batch=2048)
    comparison = compare_with_published(slow, 1.5 * slow.estimate.step_s, None)
    closers = [closer for closer in comparison.closers if closer.source]
    assert closers
    for closer in closers:
        name, text = re.match(r"the layout of (\S+), (\S+): ", closer.fix.text).groups()
        run = next(item.run for item in comparison.nearest if item.run.id == name)
        assert closer.source == run.source
        other = mw.estimate("Qwen3-235B-A22B", text, on="256xH800", global_batch=2048)
        assert other.estimate.step_s < slow.estimate.step_s


@pytest.mark.parametrize(
    ("degrees", "choices"),
    [
        ("cp2,ep8", "cp_comm=a2a,recompute=uniform4"),
        ("cp2,ep8", "cp_comm=allgather,recompute=block3"),
        ("ep8", "rank_capacity=3"),
        ("ep8", "offload=core_attn+layers0.5"),
        ("ep8", "offload=optimizer0.5,overlap=grad"),
        ("ep8", "capacity=1.25,capacity_fill=padded"),
        ("ep16", "dispatcher=dedup,ep_node8"),
    ],
)
def test_a_published_layout_brings_its_degrees_and_leaves_all_other_choices(degrees, choices):
    own = mw.estimate(
        "Qwen3-30B-A3B", f"{degrees},{choices}", on="64xH100", seq_len=32768, global_batch=64
    )
    comparison = compare_with_published(own, 1.5 * own.estimate.step_s, None)
    for closer in comparison.closers:
        match = re.match(r"the layout of (\S+), (\S+): ", closer.fix.text)
        if not match:
            continue
        layout = parse_layout(match[2], world_size=64)
        changed = {
            field.name
            for field in LAYOUT_FIELDS
            if getattr(layout, field.name) != getattr(own.layout, field.name)
        }
        groups = {field.facts.group for field in LAYOUT_FIELDS if field.name in changed}
        assert changed
        assert changed == {"cp", "cp_comm"} or groups <= {"degrees", "pipeline"}


def test_nearness_counts_what_two_jobs_share():
    alike = mw.estimate("OLMoE-1B-7B-0924", "ep4", on="4xA100")
    for run in find_nearest_runs(alike, 5):
        shared = ("another model" not in run.differs) + ("another device" not in run.differs)
        assert run.nearness is (Nearness.FAR, Nearness.RELATED, Nearness.NEAR)[shared]
    far = compare_with_published(sample_run.plan(), 2.0, None)
    assert all(item.expected == 0 for item in far.nearest)
    assert far.standing == ""


def test_what_has_no_job_is_refused_with_what_to_say(tmp_path, capsys):
    path = tmp_path / "run.log"
    path.write_text(log(steps=12))
    assert main(["compare", str(path)]) == 2
    assert "--model, --on and --layout" in capsys.readouterr().err
    path.write_text("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.")
    with pytest.raises(BadInput, match="no timed step"):
        mw.compare_run(path, plan=sample_run.plan())
