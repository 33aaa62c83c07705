"""Published recipes, and what else a launch file says of a run beyond its plan."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

import moewright as mw
from megatron_cases import build_plan, catalogue_model, parse_flags
from moewright.api.running import export, settle_run
from moewright.codec import parse_layout
from moewright.exporters.bridge import render_bridge_recipe
from moewright.exporters.megatron.script import all_flags, render_megatron_script
from moewright.exporters.recipes import apply_recipe, find_recipe, list_recipes
from moewright.intake import catalogue
from moewright.rules.goodput import expected_work_ratio
from moewright.spec.errors import BadInput
from moewright.spec.options import RunOptions
from moewright.spec.workload import LossSpec, OptimizerSpec, RouterTraining, Workload

WORKLOAD = Workload(seq_len=4096, global_batch=256, steps=10_000)
KEYS = {item.name for part in (OptimizerSpec, LossSpec, RouterTraining) for item in fields(part)}


def planned(name="Qwen/Qwen3-30B-A3B", text="tp2,ep8", world=32, **work):
    return build_plan(name, parse_layout(text, world_size=world), replace(WORKLOAD, **work))


def flags_of(plan, **options):
    plan, files = settle_run(plan, RunOptions(**options))
    return parse_flags(all_flags(plan, files))


def test_every_recipe_has_a_source_and_keys_of_a_job() -> None:
    names = set(catalogue.model_names())
    families = {catalogue_model(name).family for name in names} | {"*"}
    for recipe in list_recipes():
        assert recipe.source
        assert recipe.train.keys() <= KEYS
        assert set(recipe.families) <= families
        assert bool(recipe.models) != bool(recipe.families)
    assert list_recipes()[-1].families == ("*",)


@pytest.mark.parametrize("name", catalogue.model_names())
def test_with_its_recipe_no_router_trains_without_balance(name) -> None:
    model = catalogue_model(name)
    loss = apply_recipe(WORKLOAD, model).loss
    coefficients = (loss.aux_coeff, loss.seq_aux_coeff, loss.global_aux_coeff)
    if model.moe is None:
        assert not any(coefficients)
        assert not loss.z_coeff
    else:
        assert sum(map(bool, coefficients)) + model.moe.router.selection_bias >= 1


def test_a_recipe_fills_what_a_plan_leaves_and_keeps_what_it_says() -> None:
    deepseek = catalogue_model("deepseek-ai/DeepSeek-V3")
    filled = apply_recipe(WORKLOAD, deepseek)
    assert filled.optimizer.lr == 2.2e-4
    assert filled.optimizer.warmup_steps == 2000
    assert (filled.loss.seq_aux_coeff, filled.loss.mtp_coeff) == (1e-4, 0.3)
    said = replace(WORKLOAD, optimizer=OptimizerSpec(lr=1e-4), loss=LossSpec(aux_coeff=0.02))
    kept = apply_recipe(said, deepseek)
    assert (kept.optimizer.lr, kept.loss.aux_coeff, kept.loss.seq_aux_coeff) == (1e-4, 0.02, 0)
    short = apply_recipe(replace(WORKLOAD, steps=100), deepseek)
    assert short.optimizer.warmup_steps == 10
    assert find_recipe(catalogue_model("mistralai/Mixtral-8x7B-v0.1")).train["aux_coeff"] == 0.01


def test_options_of_a_run_reach_megatron_and_leave_nothing_to_do() -> None:
    options = {
        "data": "0.7 /d/a 0.3 /d/b",
        "eval_data": "/d/held",
        "tokenizer": "Qwen/Qwen3-30B-A3B",
        "save": "/ckpt/q",
        "save_interval": 250,
        "load": "/ckpt/base",
        "wandb": "project",
        "recipe": True,
    }
    flags = flags_of(planned(), **options)
    assert flags["--train-data-path"] == ("0.7", "/d/a", "0.3", "/d/b")
    assert flags["--valid-data-path"] == ("/d/held",)
    assert flags["--eval-interval"] == ("500",)
    assert flags["--tokenizer-model"] == ("Qwen/Qwen3-30B-A3B",)
    assert flags["--padded-vocab-size"] == ("151936",)
    assert "--null-tokenizer-eod-id" not in flags
    assert flags["--save"] == flags["--load"] == ("/ckpt/q",)
    assert flags["--pretrained-checkpoint"] == ("/ckpt/base",)
    assert flags["--save-interval"] == ("250",)
    assert "--exit-signal-handler" in flags
    assert flags["--wandb-exp-name"] == ("q",)
    assert flags["--moe-router-load-balancing-type"] == ("global_aux_loss",)
    plan, files = settle_run(planned(), RunOptions(**options))
    assert "TODO" not in render_megatron_script(plan, files)
    recipe = render_bridge_recipe(plan, files)
    assert "tokenizer_model='Qwen/Qwen3-30B-A3B'" in recipe
    assert "pretrained_checkpoint='/ckpt/base'" in recipe
    assert "wandb_project='project'" in recipe


def test_weights_without_checkpoints_are_only_read() -> None:
    flags = flags_of(planned(), load="/ckpt/base")
    assert flags["--load"] == ("/ckpt/base",)
    assert "--finetune" in flags
    assert "--save" not in flags


def test_saves_are_as_far_apart_as_loses_least() -> None:
    """The interval in the script is within a step of the one with the least expected work."""
    plan = mw.estimate("Qwen3-30B-A3B", "tp2,ep8,pp2", on="1024xH100", global_batch=1024)
    settled, files = settle_run(plan, RunOptions(save="/ckpt"))
    steps = settled.workload.checkpoint.every_steps
    (remark,) = files.remarks
    assert f"every {steps:,} steps" in remark
    assert "fail every 49 h" in remark
    step_s = plan.estimate.step_s
    costs = {
        other: expected_work_ratio(other * step_s, 49.5 * 3600, 1.0, 0.0)
        for other in range(max(1, steps // 2), 2 * steps)
    }
    assert costs[steps] <= 1.0001 * min(costs.values())
    few, _ = settle_run(replace(plan, hardware=catalogue.hardware("64xH100")), RunOptions(save="c"))
    assert few.workload.checkpoint.every_steps > 3 * steps


@pytest.mark.parametrize(
    ("options", "to", "field"),
    [
        ({"save_interval": 0}, "megatron", "--save-interval=0"),
        ({"eval_data": "/d/held"}, "megatron", "--eval=/d/held"),
        ({"data": "0.7 a 0.3"}, "megatron", "--data=0.7 a 0.3"),
        ({"data": "/d/a"}, "torchrun", "--data, --save, --recipe"),
        ({"data": "/d/a"}, "torchtitan", "data.train=/d/a"),
    ],
)
def test_what_a_run_cannot_have_is_refused_by_its_option(options, to, field) -> None:
    job = "job.toml" if to == "torchrun" else ""
    layout = "zero3,ep8" if to == "torchtitan" else "tp2,ep8"
    with pytest.raises(BadInput) as caught:
        export(planned(text=layout), to=to, job=job, run=RunOptions(**options))
    assert str(caught.value.reasons[0]).startswith(field)


def test_an_image_is_for_what_starts_containers() -> None:
    with pytest.raises(BadInput, match=r"--image=x:1: says nothing to megatron"):
        export(planned(), to="megatron", image="x:1")
    assert "--container-image=x:1 " in export(planned(), to="slurm", image="x:1")
