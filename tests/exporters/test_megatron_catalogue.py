"""Every model of the catalogue, and recorded verdicts of Megatron-LM's own code on our commands.

`make megatron` makes the verdicts (tests/megatron). A command that changes needs a new one.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_cases import REFUSED_MODELS, build_plan, parse_flags, refusals
from moewright.exporters.megatron.script import all_flags
from moewright.intake import catalogue
from moewright.spec.layout import Layout
from moewright.spec.workload import Workload

sys.path.append(str(Path(__file__).parents[1] / "megatron"))

from cases import case_plan, digest, our_rules, read_verdicts

ROWS = read_verdicts()


def label(row):
    return " ".join(row[name] for name in ("kind", "model", "machine", "workload", "layout"))


def test_these_models_are_refused_for_these_reasons_and_no_others():
    workload = Workload(seq_len=4096, global_batch=64)
    reasons = {
        name: refusals(build_plan(name, Layout(world_size=8), workload))
        for name in catalogue.model_names()
    }
    assert {
        name: model_reasons[0].field for name, model_reasons in reasons.items() if model_reasons
    } == REFUSED_MODELS


def test_what_is_new_in_deepseek_v4_is_refused_whatever_the_engine_runs():
    plan = build_plan(
        "DeepSeek-V4-Flash", Layout(world_size=8), Workload(seq_len=4096, global_batch=64)
    )
    fields = {
        reason.field for reason in refusals(replace(plan, model=replace(plan.model, mtp_layers=0)))
    }
    assert fields >= {
        "model.attention.kind",
        "model.residual_streams",
        "model.activation_limit",
        "model.moe.router.hash_layers",
    }


def test_every_recorded_verdict_is_about_the_command_that_is_written_today():
    changed = [label(row) for row in ROWS if digest(case_plan(row)) != row["command"]]
    assert not changed, "run `make megatron`"


def test_we_refuse_what_megatron_refuses_and_nothing_else():
    differing = [
        label(row) for row in ROWS if bool(our_rules(case_plan(row))) != bool(row["refusal"])
    ]
    assert not differing


def test_every_best_plan_starts():
    best = [row for row in ROWS if row["kind"] == "best plan"]
    assert len(best) > 250
    assert not [label(row) for row in best if row["refusal"]]


@pytest.mark.parametrize("kind", ["best plan", "random", "by hand"])
def test_every_option_is_one_that_megatron_parses(kind):
    for row in ROWS:
        if row["kind"] == kind:
            parse_flags(all_flags(case_plan(row)))
