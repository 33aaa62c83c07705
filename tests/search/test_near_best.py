"""The two answers of a search, ties, and what is expected of a pick."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import moewright as mw
from moewright.api.planning import Plans
from moewright.api.recommending import find_published_figure
from moewright.codec import read_json, write_json
from moewright.cost.evidence import count_proofs, layout_choices, read_measured_choices
from moewright.diagnosis.published import Nearness, find_nearest_runs, find_published_run
from moewright.rules.job import plan_job
from moewright.search.candidates import Candidate, select_best
from moewright.search.ranking import NearBest, ProvenChoices, bound_s
from moewright.search.screening import Screener
from moewright.search.search import find_best_plan
from moewright.search.space import build_search_space, degree_groups
from moewright.spec.layout import Layout
from moewright.spec.plan import Plan


@pytest.fixture(scope="module")
def plans() -> Plans:
    return mw.plan("Qwen3-30B-A3B", on="16xH100", global_batch=256)


def test_both_answers_are_written_and_read(plans: Plans, tmp_path: Path) -> None:
    best = plans.best
    assert best is not None
    assert best.fast is not None
    assert best.fast.layout == best.layout
    assert best.fast.expected_step_s > best.fast.step_s == best.estimate.step_s
    assert best.fast.published is not None
    speed = best.fast.tokens_per_s_per_device
    assert best.fast.published.ratio == speed / best.fast.published.tokens_per_s_per_device
    assert best.proven is not None
    assert best.proven.runs > 0
    assert best.proven.trainers
    write_json(tmp_path / "plan.json", best)
    assert read_json(Plan, tmp_path / "plan.json") == best


def test_a_run_that_was_forced_to_an_even_load_stands_beside_an_even_load_too() -> None:
    text = "pp8,vpp4,ep16,mbs1,dispatcher=hybridep,recompute=mla_up_proj,layout='Et*3|(t*2|)*29m|L'"
    job = {"on": "256xGB300", "global_batch": 4096}
    figures = []
    for load in (None, "balanced"):
        plan = mw.estimate("DeepSeek-V3", text, load=load, **job)
        figures.append(find_published_figure(plan, plan.estimate.tokens_per_s_per_device))
    learned, even = figures
    assert learned.id == even.id
    assert find_published_run(learned.id).is_balanced
    assert learned.even_ratio == pytest.approx(even.ratio)
    assert even.even_ratio == 0  # nothing else to stand beside


def test_a_run_of_no_stated_precision_does_not_differ_in_it() -> None:
    plan = mw.estimate("Qwen3-30B-A3B", "ep8,mbs1,recompute=full", on="8xB200")
    (run,) = find_nearest_runs(plan, 1)
    assert run.precision == ""
    assert run.nearness is Nearness.SAME


def test_the_proven_answer_made_the_choices_of_a_run_on_the_part(plans: Plans) -> None:
    proven = plans.proven
    assert proven is not None
    names = set(layout_choices(proven.layout, proven.hardware))
    runs = [made for made, _ in read_measured_choices().runs if "part=H100" in made]
    assert any(names <= made for made in runs if "moe" in made)
    assert count_proofs(plan_job(proven), proven.hardware) == plans.best.proven.runs
    faster = [
        candidate
        for candidate in plans.search.near_best
        if count_proofs(replace(plan_job(proven), layout=candidate.layout), proven.hardware)
    ]
    rule = plans.best.rule
    assert all(
        candidate.bound_s >= bound_s(proven.estimate, rule) * (1 - 1e-9) for candidate in faster
    )


def test_masks_of_groups_say_what_each_layout_says(plans: Plans) -> None:
    first = plans.plans[0]
    space = build_search_space(first.model, first.workload, first.hardware, "tp1,cp1,etp1,mbs1")
    screener = Screener(space)
    wish = ProvenChoices(space, screener).wish()
    seen = set()
    for group in degree_groups(space):
        for bounded in screener.bound(group):
            scores = screener.score(bounded, room_bytes=float("inf"), below_s=float("inf"))
            assert scores is not None
            mask = wish.mask(scores)
            for place in list(product(*map(range, scores.legal.shape)))[::41]:
                layout = screener.layout(scores, *place)
                job = replace(plan_job(first), layout=layout)
                proofs = count_proofs(job, space.hardware)
                assert bool(mask[place]) == bool(proofs)
                assert not proofs or wish.may_hold(bounded)
                seen.add(bool(proofs))
    assert seen == {True, False}


@pytest.mark.thorough
def test_one_layout_alone_is_expected_to_take_what_is_estimated() -> None:
    text = "tp1,cp1,etp1,pp1,ep8,mbs1,recompute=full,dispatcher=alltoall,overlap=none,graphs=none"
    best = mw.plan("Qwen3-30B-A3B", on="16xH100", layout=f"{text},offload=none,zero1").best
    assert best is not None
    assert best.fast is not None
    assert best.fast.expected_step_s == pytest.approx(best.fast.step_s, rel=1e-12)


def test_the_first_plan_is_the_simplest_of_those_that_tie(plans: Plans) -> None:
    result = plans.search
    first = plans.plans[0]
    space = build_search_space(first.model, first.workload, first.hardware, "")
    fastest = min(result.near_best, key=lambda candidate: candidate.bound_s)
    near_best = NearBest(space, result.near_best)
    assert near_best.put_simplest_first(result.near_best)[0].layout == first.layout
    assert bound_s(first.estimate, result.rule) < 1.05 * fastest.bound_s


def test_what_is_expected_of_the_first_plan_does_not_depend_on_how_many_are_shown() -> None:
    plans = [
        mw.plan("OLMoE-1B-7B-0924", on="8xA100-80G", global_batch=256, top=top).best
        for top in (1, 5, 20)
    ]
    assert all(plan is not None and plan.fast == plans[0].fast for plan in plans)
    assert len({plan.layout for plan in plans}) == 1
    first = plans[0]
    assert find_best_plan(first.model, first.workload, first.hardware).layout == first.layout


@pytest.mark.parametrize("seed", range(20))
def test_what_few_candidates_leave_is_what_is_left_of_many(seed: int) -> None:
    generator = random.Random(seed)
    candidates = [
        Candidate(
            layout=Layout(world_size=64, tp=2 ** generator.randrange(7), zero=place % 4),
            step_s=1.0,
            bound_s=generator.random(),
            uncovered_s=0.0,
            peak_bytes=0.0,
            sd_bytes=0.0,
            is_safe=True,
        )
        for place in range(generator.randrange(1, 80))
    ]
    few = generator.randrange(1, 20)
    many, _ = select_best(candidates, few + generator.randrange(20))
    assert select_best(many, few) == select_best(candidates, few)
