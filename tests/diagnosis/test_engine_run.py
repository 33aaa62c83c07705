"""Findings of the engine's own runs: the wall, its evidence, and the critical rank."""

from dataclasses import replace

import pytest

from moewright.diagnosis.compare_ledgers import compare_ledgers
from moewright.diagnosis.engine_run import build_run_waterfall, diagnose_run, find_critical_rank
from moewright.diagnosis.priced_fixes import FixContext, Trainer, find_fixes
from moewright.diagnosis.utilization import describe_use
from moewright.rules.steady_steps import median_phase_seconds, median_step_s, steady_steps
from moewright.spec.finding import Basis, Cause, Wall
from moewright.spec.ledger import (
    Ledger,
    Module,
    StepPhase,
    StorageBytes,
    StorageMoment,
    StorageRow,
    TimeRow,
)
from moewright.spec.run import DeviceSample, GroupWait, HostTime, RankTiming
from sample_run import plan, record

OURS = FixContext(trainer=Trainer.OURS)


def set_phases(run, **seconds):
    """Return the run with these phases of every step set, its other phases kept."""

    def phases(step):
        kept = {row.phase: row.seconds for row in step.phases} | {
            StepPhase(name): s for name, s in seconds.items()
        }
        return tuple(TimeRow(phase=phase, seconds=s) for phase, s in kept.items())

    steps = [replace(step, phases=phases(step)) for step in run.steps]
    return replace(
        run, steps=tuple(replace(s, step_s=sum(row.seconds for row in s.phases)) for s in steps)
    )


def test_warm_up_and_the_counted_step_of_each_session_are_left_out_of_medians():
    # Sessions start at steps 1 and 31; the ledger is taken on each session's third step.
    run = record()
    left_out = {step.step for step in run.steps} - {step.step for step in steady_steps(run)}
    assert left_out == {1, 2, 3, 31, 32, 33}
    short = replace(run, steps=run.steps[:2])
    assert steady_steps(short) == short.steps
    assert median_step_s(replace(run, steps=())) == 0


def test_phase_medians_sum_near_the_median_step():
    run = record()
    assert sum(seconds for _, seconds in median_phase_seconds(run)) == pytest.approx(
        median_step_s(run), rel=1e-6
    )


def test_a_run_that_computes_most_of_its_step_is_told_so_with_numbers():
    finding = diagnose_run(record())[0]
    assert finding.wall is Wall.COMPUTE
    assert 0.8 < finding.share < 0.95
    assert "forward 442 ms" in finding.evidence[0]
    assert find_fixes(finding, OURS)


def test_slow_gradient_reduction_is_the_first_finding_and_its_fixes_come_first():
    first = diagnose_run(set_phases(record(), grad_reduce=2.0))[0]
    assert first.wall is Wall.COMMUNICATION
    assert first.share > 0.5
    assert "gradient reduction 2 s" in first.evidence[1]
    assert "predicted where phases do not tell it" in first.evidence[0]
    assert "overlap the reduction" in find_fixes(first, OURS)[0].text


def test_waiting_for_data_is_a_host_wall():
    assert diagnose_run(set_phases(record(), data=3.0))[0].wall is Wall.HOST


def test_memory_near_capacity_comes_before_time():
    run = record()
    estimate = replace(run.plan.estimate, capacity_bytes=int(run.plan.estimate.peak_bytes * 1.02))
    findings = diagnose_run(replace(run, plan=replace(run.plan, estimate=estimate)))
    assert [finding.wall for finding in findings[:2]] == [Wall.MEMORY, Wall.COMPUTE]
    assert findings[0].share == pytest.approx(1 / 1.02, rel=0.02)
    assert "expandable_segments" in find_fixes(findings[0], OURS)[0].setting


def test_a_hot_expert_rank_is_named_with_its_factor_and_layer():
    run = record()
    hot = (3000,) * 8 + (1000,) * 8  # rank 0 of two holds the first eight experts: 1.5 x the mean
    steps = tuple(
        replace(s, loads=tuple(replace(load, counts=hot, rank_counts=()) for load in s.loads))
        for s in run.steps
    )
    findings = diagnose_run(replace(run, steps=steps))
    assert "1.50 x the mean" in findings[0].title
    alone = replace(run, steps=steps, plan=plan(ep=1))
    assert all("expert rank" not in finding.title for finding in diagnose_run(alone))


def test_a_run_without_steps_has_no_findings():
    assert diagnose_run(replace(record(), steps=())) == ()


def test_the_waterfall_of_a_run_closes_and_says_what_was_measured():
    run = record()
    fall = build_run_waterfall(run, find_critical_rank(run), run.plan)
    assert fall.ideal_s + sum(drop.seconds for drop in fall.drops) == pytest.approx(fall.measured_s)
    assert abs(fall.drops[-1].seconds) < 1e-9  # all of a step belongs to some part
    assert {drop.basis for drop in fall.drops} == set(Basis)


def test_waits_are_taken_from_the_rank_that_waits_least_and_a_crowd_is_left_out():
    run = record()
    phases = run.steps[-1].phases

    def timing(rank, waits, queued):
        host = HostTime(running_s=0.8, queued_s=queued)
        groups = tuple(GroupWait(group=group, seconds=seconds) for group, seconds in waits.items())
        return RankTiming(rank=rank, steps=9, phases=phases, waits=groups, host=host)

    idle = replace(run, paces=(timing(0, {"ep": 0.5}, 0.0), timing(1, {"ep": 0.3}, 0.0)))
    assert (find_critical_rank(idle).rank, dict(find_critical_rank(idle).waits)) == (
        1,
        {Cause.EP: 0.3},
    )
    assert find_critical_rank(idle).mean_late_wait_s == pytest.approx(0.1)
    total = sum(row.seconds for row in phases)
    crowded = replace(run, paces=(timing(0, {"ep": 0.5}, total / 2), timing(1, {"ep": 0.3}, 0.0)))
    # Its peer had a core half of the time.
    assert find_critical_rank(crowded).waits[Cause.EP] == pytest.approx(0.15)
    assert find_critical_rank(crowded).no_core_s > 0


def test_the_link_is_told_from_late_ranks_by_what_the_last_rank_waits():
    run = record()
    phases = run.steps[-1].phases

    def timing(rank, waits, link, queued=0.0):
        return RankTiming(
            rank=rank,
            steps=9,
            phases=phases,
            waits=(GroupWait(group="ep", seconds=waits),),
            host=HostTime(running_s=0.8, queued_s=queued),
            links=(GroupWait(group="ep", seconds=link),),
        )

    critical = find_critical_rank(replace(run, paces=(timing(0, 0.5, 0.1), timing(1, 0.3, 0.1))))
    assert dict(critical.waits) == {Cause.EP: 0.1}
    assert critical.late_wait_s == pytest.approx(0.2)
    assert critical.mean_late_wait_s == pytest.approx(0.3)
    crowded = find_critical_rank(
        replace(run, paces=(timing(0, 0.5, 0.1, 0.15), timing(1, 0.3, 0.1, 0.15)))
    )
    assert crowded.mean_late_wait_s == pytest.approx(0.15)  # each peer had no core for as long


def test_goals_of_busy_full_and_quiet_devices_are_judged():
    idle = DeviceSample(resident_share=0.62, used_bytes=3 << 30, peak_allocated_bytes=0)
    timings = [
        RankTiming(rank=rank, steps=3, phases=(), waits=(), host=HostTime(), device=sample)
        for rank, sample in enumerate((replace(idle, resident_share=0.95), idle))
    ]
    run = replace(record(), paces=tuple(timings))
    critical = find_critical_rank(record())
    waits = {Cause.EP: 0.3 * critical.step_s}
    lines = list(describe_use(run, replace(critical, waits=waits, late_wait_s=0.0)))
    assert lines[0] == "utilisation 62% on rank 1, the least busy, below the 90% to aim at"
    assert lines[1] == "memory 3 GiB of 4 GiB on rank 0, below the 80% to aim at"
    assert lines[2].endswith("30% of the step on rank 0, above the 20% to aim at")
    assert not list(describe_use(record(), replace(critical, waits={})))


def test_storages_that_no_row_lists_are_a_finding_with_their_place_and_no_wall():
    run = record()
    weighed = StorageBytes(resident=100, kept=5000, peak=6000, left=100)
    place = "engine/model/moe.py:7 in forward (aten.clone.default)"
    row = StorageRow(moment=StorageMoment.KEPT, module=Module.EXPERTS, place=place, bytes=4000)
    counted = Ledger(rank=0, pp_rank=0, storages=weighed, unlisted=(row,))
    listed = StorageBytes(resident=100, kept=1000, peak=1000, left=100)
    allowance = StorageBytes(resident=10, kept=50, peak=9000, left=10)
    predicted = Ledger(rank=0, pp_rank=0, storages=listed, allowance=allowance)
    comparison = compare_ledgers(predicted, counted)
    assert not comparison.is_accounted
    findings = diagnose_run(run, [comparison])
    (finding,) = (finding for finding in findings if finding.cause is Cause.UNLISTED)
    assert finding is not findings[0]
    assert finding.title == "Rank 0 holds 3.91 KiB that no row of the ledger lists"
    assert finding.evidence[-1] == f"3.91 KiB of experts: {place}"
    assert find_fixes(finding, OURS)
    within = replace(predicted, allowance=replace(allowance, kept=4000))
    assert compare_ledgers(within, counted).is_accounted
