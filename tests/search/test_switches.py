"""What switches of a job make of its step and its peak."""

from __future__ import annotations

from dataclasses import replace

import pytest

import moewright as mw
from moewright.cli.main import main
from moewright.search.switches import explain_switches, list_switches
from moewright.spec.units import format_bytes, format_seconds
from moewright.spec.workload import Dtype, ExpertKernels, NarrowedProducts, Routing

NEAR_COPY = (
    "pp2,vpp8,ep32,mbs1,dispatcher=hybridep,graphs=full,overlap=ep+grad+param,"
    "recompute=mla_up_proj,layout='Et*4|(t*4|)*14tmL'"
)


def test_a_near_copy_of_a_vendors_recipe_names_the_switches_between_the_two():
    plan = mw.estimate(
        "DeepSeek-V3", NEAR_COPY, on="256xGB300", precision="mxfp8", global_batch=4096
    )
    (line,) = explain_switches(plan)
    assert [name for name in ("an even load", "bf16 gradients", "fused experts") if name in line]
    optimizer = replace(plan.workload.optimizer, moment_dtype=Dtype.BF16)
    trainer = replace(
        plan.workload.trainer,
        expert_kernels=ExpertKernels.FUSED,
        narrowed=(NarrowedProducts.HEAD,),
    )
    workload = replace(
        plan.workload,
        routing=Routing.BALANCED,
        grad_dtype=Dtype.BF16,
        optimizer=optimizer,
        trainer=trainer,
    )
    everything = mw.estimate(replace(plan, workload=workload)).estimate
    assert f"together {format_seconds(everything.step_s)} a step" in line
    assert f"a peak of {format_bytes(everything.peak_bytes)}" in line
    assert everything.step_s < 0.8 * plan.estimate.step_s
    assert "plan --try bf16-gradients bf16-moments fused-experts" in line


def test_a_plan_in_8_bits_says_them_without_being_asked(capsys: pytest.CaptureFixture[str]):
    fixed = ["--layout", "tp1,pp1,ep8,mbs1,recompute=none,offload=none"]
    main(["plan", "Qwen3-30B-A3B", "--on", "8xB200", *fixed, "--precision", "mxfp8"])
    assert "As vendors' benchmarks set the job" in capsys.readouterr().out.replace("\n", " ")


def test_what_is_set_already_is_not_said_again():
    plan = mw.estimate("Qwen3-30B-A3B", "ep8,mbs1", on="16xH100", load="balanced")
    assert [switch.name for switch in list_switches(plan.model, plan.workload)] == [
        "bf16 gradients",
        "bf16 moments",
    ]
    dense = mw.estimate("Meta-Llama-3-8B", "tp2,mbs1", on="8xH100")
    assert "an even load" not in " ".join(explain_switches(dense))


def test_a_plan_prices_switches_only_where_they_are_shown():
    plans = mw.plan("Qwen3-30B-A3B", on="16xH100", layout="ep8,mbs1")
    assert plans.best is not None
    assert explain_switches(plans.best)
    assert not [line for line in plans.why if "vendors" in line]
