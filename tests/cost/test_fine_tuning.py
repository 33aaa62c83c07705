"""Fine-tuning: what frozen weights and adapters take, by hand and beside pre-training."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moewright.calibration.cells import parse_task
from moewright.cost.estimate import estimate
from moewright.intake import catalogue
from moewright.rules import engine_limits, flops
from moewright.rules.adapters import trained_share
from moewright.rules.parameters import count_parameters
from moewright.spec.errors import BadInput
from moewright.spec.layout import Layout
from moewright.spec.plan import Estimate
from moewright.spec.workload import FineTuningSpec, Task, Workload

MODEL = catalogue.model("Meta-Llama-3-8B")
LAYOUT = Layout(world_size=8, tp=2, sp=True, zero=1)


def workload(task: Task, rank: int = 16) -> Workload:
    return Workload(
        seq_len=4096,
        global_batch=32,
        fine_tuning=FineTuningSpec(task=task, lora_rank=rank),
    )


def plan(task: Task) -> Estimate:
    return estimate(MODEL, workload(task), catalogue.hardware("8xH100"), LAYOUT)


def test_adapters_are_two_matrices_of_their_rank_beside_every_linear() -> None:
    """32 layers of q, k, v, o and of gate, up, down: 16 (in + out) elements each."""
    h, kv, ffn = 4096, 1024, 14336
    layer = 2 * 16 * (h + h) + 2 * 16 * (h + kv) + 3 * 16 * (h + ffn)
    total = count_parameters(MODEL).total
    assert trained_share(MODEL, workload(Task.LORA)) == pytest.approx(32 * layer / total)
    assert trained_share(MODEL, workload(Task.SFT)) == 1


def test_frozen_products_take_four_sixths_and_attention_all() -> None:
    whole = flops.model_flops_per_token(MODEL, 4096)
    frozen = flops.model_flops_per_token(MODEL, 4096, frozen=True)
    core = 6 * MODEL.layers * MODEL.attention.q_width * 4096
    assert frozen == pytest.approx((whole - core) * 4 / 6 + core, rel=1e-6)


def test_lora_has_no_gradients_and_states_of_frozen_weights() -> None:
    full, lora = plan(Task.PRETRAIN), plan(Task.LORA)
    share = trained_share(MODEL, workload(Task.LORA))
    assert full.peak_bytes - lora.peak_bytes > 4 * count_parameters(MODEL).total / LAYOUT.tp
    assert lora.step_s < 0.8 * full.step_s
    assert lora.model_flops_per_step < 0.75 * full.model_flops_per_step
    assert 0 < share < 0.01


def test_sft_is_a_step_of_pre_training() -> None:
    assert plan(Task.SFT).step_s == plan(Task.PRETRAIN).step_s
    assert plan(Task.SFT).peak_bytes == plan(Task.PRETRAIN).peak_bytes


def test_the_engine_refuses_a_task_by_name() -> None:
    reasons = engine_limits.unsupported_model(MODEL, workload(Task.LORA))
    assert [reason.field for reason in reasons] == ["train.task"]


def test_task_words_of_tables() -> None:
    assert parse_task("rl-train").task is Task.SFT
    assert parse_task("").task is Task.PRETRAIN
    with pytest.raises(BadInput, match="must be one of pretrain, sft, lora"):
        parse_task("dpo")


def test_experts_may_have_adapters_too() -> None:
    model = catalogue.model("Qwen3-30B-A3B")
    attention_alone = workload(Task.LORA)
    tuning = replace(attention_alone.fine_tuning, lora_experts=True)
    everywhere = replace(attention_alone, fine_tuning=tuning)
    assert trained_share(model, everywhere) > 10 * trained_share(model, attention_alone)
