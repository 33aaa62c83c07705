"""What a fit leaves open of own runs is carried over to runs that make the same choices."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from pathlib import Path

import pytest

from moewright.calibration.fit import MeasuredRun
from moewright.calibration.own_runs import carry_over, choose_telling_runs, weigh_own_runs
from moewright.cli.main import main
from moewright.codec import parse_layout
from moewright.cost.estimate import estimate
from moewright.cost.evidence import (
    is_shared_by_layouts,
    job_choices,
    job_factor,
    layout_choices,
    list_choices,
)
from moewright.cost.time.repricing import RepriceableStep
from moewright.intake import catalogue
from moewright.rules.job import Job
from moewright.spec.hardware import Hardware
from moewright.spec.workload import Routing, Workload

MODEL = catalogue.model("Qwen3-30B-A3B")
HARDWARE = catalogue.hardware("16xH100")
WORK = Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=256)
NEAR = "ep8,mbs2"
FAR = "tp2,pp4,ep4,mbs1,recompute=full,dispatcher=deepep,zero0"


def measured(text: str, ratio: float) -> MeasuredRun:
    """Return a run of a layout that took so much of its predicted time."""
    layout = parse_layout(text, world_size=16)
    prepared = RepriceableStep(MODEL, WORK, HARDWARE, layout)
    job = Job(model=MODEL, workload=WORK, layout=layout)
    return MeasuredRun(
        id=text,
        prepared=prepared,
        hardware=HARDWARE,
        measured_s=ratio * prepared.step_s(()),
        choices=list_choices(job, HARDWARE),
    )


def carried(runs: tuple[MeasuredRun, ...], text: str) -> float:
    own_runs = weigh_own_runs(runs, [run.prepared.step_s(()) for run in runs], source="test")
    return log(carry_over(own_runs, measured(text, 1.0)))


def test_a_run_speaks_for_itself_and_a_little_less_for_other_layouts() -> None:
    slow = (measured(NEAR, 1.3),)
    same, near, far = (carried(slow, text) for text in (NEAR, "ep8,mbs4", FAR))
    assert 0.8 * log(1.3) < same < log(1.3)
    assert near == pytest.approx(same)  # micro-batches above 1 are one choice
    assert 0.5 * same < far < same


def test_a_run_says_little_of_other_models_and_parts() -> None:
    (own,) = weigh_own_runs((measured(NEAR, 1.3),), [measured(NEAR, 1.0).measured_s], source="test")
    layout = parse_layout(NEAR, world_size=16)
    for name, on in (("DeepSeek-V3", "16xH100"), ("Qwen3-30B-A3B", "16xGB200")):
        job = Job(model=catalogue.model(name), workload=WORK, layout=layout)
        hardware = replace(catalogue.hardware(on), own_runs=(own,))
        assert 0 < log(job_factor(job, hardware)) < 0.7 * carried((measured(NEAR, 1.3),), NEAR)


def test_runs_are_chosen_that_lie_among_the_others_and_apart_from_each_other() -> None:
    texts = (NEAR, "ep8,mbs4", "ep8,mbs8", FAR, FAR.replace("ep4", "ep2"))
    choices = [measured(text, 1.0).choices for text in texts]
    first, second = choose_telling_runs(choices, 2)
    assert first < 3 <= second
    assert choose_telling_runs(choices, 9) == tuple(range(5))


def test_opposite_runs_of_a_job_leave_the_order_of_its_layouts() -> None:
    """Runs that disagree are drawn to their mean: a run alone tells little of an order."""
    runs = (measured(NEAR, 1.1), measured(FAR, 1 / 1.1))
    assert abs(carried(runs, NEAR) - carried(runs, FAR)) < 0.8 * log(1.21)


def test_every_choice_of_a_job_but_its_devices_and_network_is_of_all_its_layouts() -> None:
    choices = tuple(job_choices(MODEL, WORK, HARDWARE))
    apart = [choice for choice in choices if not is_shared_by_layouts(choice)]
    assert [choice.split("~")[0].split("=")[0] for choice in apart] == ["devices", "network"]
    layout = parse_layout(FAR, world_size=16)
    assert not any(map(is_shared_by_layouts, layout_choices(layout, HARDWARE)))


def test_runs_that_agree_are_believed_more_than_one() -> None:
    one = carried((measured(NEAR, 1.3),), NEAR)
    two = carried((measured(NEAR, 1.3), measured("ep8,mbs4", 1.3)), NEAR)
    assert one < two < log(1.3)
    assert carried((), NEAR) == 0


def test_a_wild_run_is_taken_for_its_own_in_part() -> None:
    assert carried((measured(NEAR, 20.0),), NEAR) < 0.6


def with_own_run(ratio: float) -> Hardware:
    runs = (measured(NEAR, ratio),)
    own_runs = weigh_own_runs(runs, [runs[0].prepared.step_s(())], source="test")
    return replace(HARDWARE, own_runs=own_runs)


def test_an_estimate_says_what_own_runs_add_and_its_parts_still_sum() -> None:
    layout = parse_layout(NEAR, world_size=16)
    plain = estimate(MODEL, WORK, HARDWARE, layout)
    slow = estimate(MODEL, WORK, with_own_run(1.3), layout)
    factor = slow.step_s / plain.step_s
    assert factor == pytest.approx(exp(carried((measured(NEAR, 1.3),), NEAR)))
    assert sum(share.seconds for share in slow.shares) == pytest.approx(slow.step_s)
    for ledger in slow.ledgers:
        assert sum(row.seconds for row in ledger.time) == pytest.approx(slow.step_s)
    assert slow.peak_bytes == plain.peak_bytes
    (stated,) = (each for each in slow.assumptions if each.name == "own_runs")
    assert stated.value == f"{100 * (factor - 1):+.1f} % of the step"
    assert not any(each.name == "own_runs" for each in plain.assumptions)


TABLE = """id,model,hardware,num_gpus,precision,seq_len,gbs,mbs,tp,pp,ep,recompute_granularity,\
cuda_graph,dispatcher,force_balance,time_per_iter_s
a,Qwen3-30B-A3B,H100,16,bf16,4096,1024,1,1,1,8,none,none,alltoall,true,{a}
b,Qwen3-30B-A3B,H100,16,bf16,4096,1024,2,1,1,8,none,none,alltoall,true,{b}
""".replace("\\\n", "")


def test_fit_writes_own_runs_that_a_plan_takes(tmp_path: Path) -> None:
    table, out = tmp_path / "t.csv", tmp_path / "fitted.toml"
    table.write_text(TABLE.format(a=36.0, b=34.0))
    assert main(["fit", str(table), "--on", "H100", "--out", str(out)]) == 0
    hardware = catalogue.hardware(f"16x{out}")
    assert [run.weight.source for run in hardware.own_runs] == ["a, t.csv", "b, t.csv"]
    work = Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=1024)
    alone = replace(hardware, own_runs=())
    measured_s = {"ep8,mbs1": 36.0, "ep8,mbs2": 34.0}
    errors = [
        sum(
            abs(log(estimate(MODEL, work, on, parse_layout(text, world_size=16)).step_s / seconds))
            for text, seconds in measured_s.items()
        )
        for on in (hardware, alone)
    ]
    assert errors[0] < errors[1]
