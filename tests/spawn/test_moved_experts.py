"""Experts that change their ranks while a run goes on: it trains as it would without."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from job_draws import draw_job, find_refusals, list_seeds, plan_draw, take_back
from layout_proof import assert_equal_rows, is_layout_free
from moewright.codec import format_layout, read_run
from moewright.cost.ledger import predict_ledger
from moewright.engine.checkpoint import read_index
from moewright.engine.run.train import train
from moewright.engine.run.worker import ExitCode
from moewright.rules.expert_moves import job_placement
from moewright.rules.job import plan_job
from moewright.spec.plan import Plan, TimePart, TimeShare
from moewright.spec.workload import DataSpec, MatrixUpdate, Routing
from tiny_jobs import VOCABULARY, build_plan, build_workload, read_state, write_corpus

STEPS = 6
EVERY = 2


def _rebalanced(plan: Plan, *, experts_s: float = 1.0, every: int = EVERY) -> Plan:
    """Return a plan that moves experts, whose products take so much of a step."""
    share = TimeShare(part=TimePart.EXPERTS, seconds=experts_s)
    return replace(
        plan,
        workload=replace(plan.workload, rebalance_every=every),
        estimate=replace(plan.estimate, shares=(share,)),
    )


CASES = (
    ("ep2,mbs2", 2, MatrixUpdate.ADAMW),
    ("ep2,etp2,mbs1,zero1,overlap=grad+param", 4, MatrixUpdate.ADAMW),
    ("pp2,ep2,mbs1,dispatcher=dedup,layout='Ett|tL'", 4, MatrixUpdate.ADAMW),
    ("ep2,zero3,mbs2", 4, MatrixUpdate.ADAMW),
    ("tp2,ep2,mbs1,zero1", 4, MatrixUpdate.ADAMW),
    ("cp2,ep2,mbs2", 4, MatrixUpdate.ADAMW),
    ("tp2,ep4,mbs2,dispatcher=allgather,zero0", 4, MatrixUpdate.ADAMW),
    ("ep2,mbs2,recompute=moe,offload=optimizer0.3", 4, MatrixUpdate.MUON),
)


@pytest.mark.turns
@pytest.mark.parametrize(("text", "world", "update"), CASES, ids=[case[0] for case in CASES])
def test_a_run_whose_experts_move_equals_the_run_whose_experts_stay(
    text: str, world: int, update: MatrixUpdate, tmp_path: Path
) -> None:
    workload = build_workload(write_corpus(tmp_path / "corpus"), steps=STEPS)
    workload = replace(workload, optimizer=replace(workload.optimizer, matrix_update=update))
    plan = build_plan(workload, text, world_size=world)
    assert train(plan, tmp_path / "stays") is ExitCode.DONE
    assert train(_rebalanced(plan), tmp_path / "moves") is ExitCode.DONE

    stays, moves = read_run(tmp_path / "stays"), read_run(tmp_path / "moves")
    assert sum(step.moves.experts for step in moves.steps) > 0
    for step in moves.steps:
        assert step.moves.sent_bytes == step.moves.expected_bytes
        assert bool(step.moves.experts) <= (step.step > EVERY and step.step % EVERY == 1)
    for actual, expected in zip(moves.steps, stays.steps, strict=True):
        assert actual.loss == pytest.approx(expected.loss, rel=1e-5)
        assert actual.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert [load.counts for load in actual.loads] == [load.counts for load in expected.loads]
    before, after = (read_state(tmp_path / run, STEPS) for run in ("stays", "moves"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=1e-3, atol=1e-5)


def _draw_moving(seed: str, data: DataSpec) -> Plan:
    """Draw a plan whose experts may move; its loads are learned, of tokens that are data's."""
    for number in count():
        plan = plan_draw(draw_job(f"{seed}.{number}", worlds=(2, 4, 4, 4)))
        model = replace(plan.model, vocab_size=VOCABULARY + 1)
        if model.moe is None or plan.layout.ep == 1 or not is_layout_free(plan_job(plan)):
            continue
        workload = replace(
            plan.workload,
            routing=Routing.LEARNED,
            rebalance_every=EVERY,
            steps=STEPS,
            eval_batches=1,
            ledger_step=1,
            optimizer=replace(plan.workload.optimizer, lr=1e-2, warmup_steps=2, decay_steps=STEPS),
            data=replace(data, documents=plan.workload.data.documents),
        )
        job = replace(plan_job(plan), model=model, workload=workload)
        while job.workload.rebalance_every and (reasons := find_refusals(job)):
            job = take_back(job, reasons[0])
        if job.layout.ep > 1 and job.workload.rebalance_every and is_layout_free(job):
            base = build_plan(job.workload, "", world_size=job.layout.world_size, model=job.model)
            return replace(base, layout=job.layout)
    raise AssertionError


@pytest.mark.parametrize("seed", list_seeds(quick=0, often=2))
def test_a_drawn_run_stopped_behind_a_move_goes_on_as_one_process_does(
    seed: str, tmp_path: Path
) -> None:
    plan = _draw_moving(seed, write_corpus(tmp_path / "corpus"))
    print(plan.model, format_layout(plan.layout), plan.workload)
    moving = _rebalanced(plan)
    stays = replace(plan, workload=replace(plan.workload, rebalance_every=0))
    mbs = f"mbs{plan.layout.mbs}"
    alone = build_plan(stays.workload, mbs, world_size=1, model=plan.model)
    assert train(alone, tmp_path / "alone") is ExitCode.DONE
    assert train(stays, tmp_path / "stays") is ExitCode.DONE
    for steps in (EVERY, STEPS):
        first = replace(moving, workload=replace(moving.workload, steps=steps))
        assert train(first, tmp_path / "moves") is ExitCode.DONE

    moves = read_run(tmp_path / "moves").steps
    assert len(moves) == STEPS
    print("moved", [step.moves.experts for step in moves])
    # What was moved right before the run stopped is told by the step after it went on.
    extra = read_index(tmp_path / "moves/checkpoints" / f"step-{EVERY:08d}").extra
    begun = [list(slots) for slots in job_placement(plan_job(plan)).values()]
    changed = sum(
        old != new
        for slots, order in zip(begun, extra["expert_placement"], strict=True)
        for old, new in zip(slots, order, strict=True)
    )
    assert moves[EVERY].moves.experts == changed
    for step in moves:
        assert step.moves.sent_bytes == step.moves.expected_bytes
    after = read_state(tmp_path / "moves", STEPS)
    for other in ("stays", "alone"):
        for actual, expected in zip(moves, read_run(tmp_path / other).steps, strict=True):
            assert actual.loss == pytest.approx(expected.loss, rel=1e-5), (other, actual.step)
            assert actual.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
            loads = [load.counts for load in expected.loads]
            assert [load.counts for load in actual.loads] == loads, (other, actual.step)
    # One process sums in another order, which Muon and Adam blow up where a gradient is near zero:
    # weights are held beside the run of the same layout that moves nothing.
    before = read_state(tmp_path / "stays", STEPS)
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=1e-3, atol=1e-5)


def test_a_run_goes_on_with_the_experts_where_its_checkpoint_has_them(tmp_path: Path) -> None:
    """Its own ranks, others, and a job that moves nothing train on as the whole run does."""
    data = write_corpus(tmp_path / "corpus")
    whole = build_workload(data, steps=STEPS + 2)
    whole = replace(whole, optimizer=replace(whole.optimizer, decay_steps=STEPS + 2))
    assert train(build_plan(whole, "ep2,mbs2", world_size=2), tmp_path / "whole") is ExitCode.DONE
    moved = tmp_path / "moved"
    first = _rebalanced(build_plan(replace(whole, steps=3), "ep2,mbs2", world_size=2))
    assert train(first, moved) is ExitCode.DONE
    again = _rebalanced(
        build_plan(replace(whole, steps=STEPS), "ep2,mbs2", world_size=2), every=100
    )
    assert train(again, moved) is ExitCode.DONE
    record = read_run(moved)
    assert record.selection is not None
    assert record.selection.slots[0] != tuple(range(8))
    for rank, counted in enumerate(record.ledgers):
        predicted = predict_ledger(again, rank=rank, selection=record.selection)
        assert_equal_rows(predicted, counted)
    wider = build_plan(replace(whole, steps=STEPS + 1), "ep4,mbs2", world_size=4)
    assert train(_rebalanced(wider, every=100), moved) is ExitCode.DONE
    last = build_plan(replace(whole, steps=STEPS + 2), "mbs2", world_size=2)
    assert train(last, moved) is ExitCode.DONE
    for actual, expected in zip(
        read_run(moved).steps, read_run(tmp_path / "whole").steps, strict=True
    ):
        assert actual.loss == pytest.approx(expected.loss, rel=1e-5)


def test_experts_stay_where_their_moves_do_not_pay(tmp_path: Path) -> None:
    workload = build_workload(write_corpus(tmp_path / "corpus"), steps=3)
    plan = build_plan(workload, "ep2,mbs2", world_size=2)
    assert train(_rebalanced(plan, experts_s=1e-7), tmp_path / "run") is ExitCode.DONE
    assert not any(step.moves.experts for step in read_run(tmp_path / "run").steps)
