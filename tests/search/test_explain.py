"""Sentences on a plan: what they say is what the estimate says."""

from dataclasses import replace

import moewright as mw
from moewright.cost.estimate import estimate
from moewright.cost.evidence import count_runs_in
from moewright.search.explain import explain_precision, explain_unused
from moewright.spec.units import format_seconds
from moewright.spec.workload import Dtype


def test_the_next_step_of_interleaving_and_context_is_said_with_its_own_estimate():
    job = {"on": "256xH800", "global_batch": 512}
    plan = mw.estimate("Qwen3-235B-A22B", "tp2,ep8,pp8,vpp2,mbs1,recompute=full", **job)
    interleaved, context = explain_unused(plan)
    for line, layout in (
        (interleaved, "tp2,ep8,pp8,vpp3,mbs1,recompute=full"),
        (context, "tp2,ep8,pp8,vpp2,cp2,mbs1,recompute=full"),
    ):
        other = mw.estimate("Qwen3-235B-A22B", layout, **job).estimate
        assert f"takes {format_seconds(other.step_s)} a step" in line
        word = "faster" if other.step_s < plan.estimate.step_s else "slower"
        assert f"% {word} than the first" in line
    assert "bubble -" in interleaved
    whole = mw.estimate("Qwen3-30B-A3B", "ep8,mbs1,recompute=full", on="16xH100")
    assert [line.split(":")[0] for line in explain_unused(whole)] == ["One step further, cp2"]


def test_a_plan_in_16_bits_names_the_fastest_format_that_somebody_ran_on_the_part():
    plan = mw.estimate("Qwen3-30B-A3B", "ep8,mbs1,recompute=full", on="8xB200")
    (line,) = explain_precision(plan)
    name = line.split()[1]
    assert count_runs_in(Dtype(name), plan.hardware)
    other = mw.estimate("Qwen3-30B-A3B", plan.layout, on="8xB200", precision=name).estimate
    assert f"takes {format_seconds(other.step_s)} a step" in line
    alone = mw.estimate("Qwen3-30B-A3B", "ep8,mbs1,recompute=full", on="16xA100")
    assert explain_precision(alone) == ()  # it multiplies in no format of 8 bits


def test_four_bits_are_said_with_the_layers_that_recipes_leave_in_sixteen():
    layout = "ep8,mbs1,recompute=full"
    plan = mw.estimate("Qwen3-30B-A3B", layout, on="8xB200", precision="nvfp4")
    _, line = explain_precision(plan)
    assert " train.bf16_last_layers = 8 " in line  # a job's key; 0.16 of 48
    trainer = replace(plan.workload.trainer, bf16_last_layers=8)
    workload = replace(plan.workload, trainer=trainer)
    other = estimate(plan.model, workload, plan.hardware, plan.layout)
    assert f"{format_seconds(other.step_s)} a step" in line
    assert other.step_s > plan.estimate.step_s
    assert "slower" in line
    assert len(explain_precision(replace(plan, workload=workload, estimate=other))) == 1


def test_a_step_further_spreads_layers_anew_or_names_the_rule_that_forbids_it():
    uneven = "pp4,ep1,mbs1,graphs=full,layout='Et*7|(t*7|)*2t*6L'"
    plan = mw.estimate("DeepSeek-V2-Lite", uneven, on="8xH100", global_batch=64)
    interleaved, _ = explain_unused(plan)
    chunks = "pp4,ep1,vpp2,mbs1,graphs=full,layout='Et*3|(t*4|)*4(t*3|)*2t*2L'"
    other = mw.estimate("DeepSeek-V2-Lite", chunks, on="8xH100", global_batch=64).estimate
    assert f"vpp2: it takes {format_seconds(other.step_s)} a step" in interleaved
    full = mw.estimate("gpt-oss-20b", "tp4,pp2,ep4,mbs1", on="8xH100", global_batch=32)
    _, context = explain_unused(full)
    assert context == (
        "One step further, cp2: tp * cp = 8 must divide the 4 ranks of a pipeline stage "
        "(world_size / pp)."
    )
