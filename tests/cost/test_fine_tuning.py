"""Fine-tuning: what frozen weights and adapters take, by hand and beside pre-training."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from moewright.calibration.cells import parse_task
from moewright.codec import parse_layout
from moewright.cost.estimate import estimate
from moewright.cost.symbols import build_symbols
from moewright.cost.time.elementwise import adapter_rows
from moewright.intake import catalogue
from moewright.rules.adapters import adapter_parameters, is_trained, trained_share
from moewright.rules.expert_load import RankLoad
from moewright.rules.job import Job
from moewright.rules.limits import engine_limits
from moewright.rules.packed_base import is_packed
from moewright.rules.saved.recompute import is_kept, saved_tensors
from moewright.rules.shapes import flops
from moewright.rules.shapes.parameters import count_parameters
from moewright.rules.shapes.shards import local_shape, stage_parameters
from moewright.search.search import search
from moewright.spec.errors import BadInput
from moewright.spec.hardware import Constant, DeviceKind
from moewright.spec.layout import Layout
from moewright.spec.ledger import Component
from moewright.spec.plan import Estimate
from moewright.spec.units import Sourced, SourceKind
from moewright.spec.workload import (
    AdapterTarget,
    BaseQuantization,
    FineTuningSpec,
    FrozenPart,
    Routing,
    Task,
    Workload,
)

MODEL = catalogue.model("Meta-Llama-3-8B")
LAYOUT = Layout(world_size=8, tp=2, sp=True, zero=1)


def workload(task: Task, rank: int = 16) -> Workload:
    return Workload(
        routing=Routing.BALANCED,
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


def test_adapters_stand_beside_the_targets_alone() -> None:
    """NeMo's performance recipes adapt queries, keys and values: 16 (in + out) elements each."""
    h, kv = 4096, 1024
    tuned = replace(workload(Task.LORA).fine_tuning, lora_targets=(AdapterTarget.QKV,))
    adapters = sum(param.numel for param in adapter_parameters(MODEL, tuned))
    assert adapters == 32 * 16 * ((h + h) + 2 * (h + kv))
    alone = replace(workload(Task.LORA), fine_tuning=tuned)
    whole = plan(Task.LORA)
    narrow = estimate(MODEL, alone, catalogue.hardware("8xH100"), LAYOUT)
    assert narrow.step_s < whole.step_s
    assert narrow.peak_bytes < whole.peak_bytes  # inputs of frozen products are not kept


def test_no_target_leaves_nothing_to_train() -> None:
    empty = replace(workload(Task.LORA).fine_tuning, lora_targets=())
    job = Job(model=MODEL, workload=replace(workload(Task.LORA), fine_tuning=empty), layout=LAYOUT)
    with pytest.raises(BadInput, match=r"lora_targets.*nothing to train"):
        engine_limits.require_runnable(job)


def test_frozen_products_take_four_sixths_and_attention_all() -> None:
    whole = flops.model_flops_per_token(MODEL, 4096)
    tuning = workload(Task.LORA).fine_tuning
    frozen = flops.model_flops_per_token(MODEL, 4096, fine_tuning=tuning)
    core = 6 * MODEL.layers * MODEL.attention.q_width * 4096
    adapters = 6 * sum(param.numel for param in adapter_parameters(MODEL, tuning))
    assert frozen == pytest.approx((whole - core) * 4 / 6 + core + adapters, rel=1e-6)


def test_lora_has_no_gradients_and_states_of_frozen_weights() -> None:
    full, lora = plan(Task.PRETRAIN), plan(Task.LORA)
    share = trained_share(MODEL, workload(Task.LORA))
    assert full.peak_bytes - lora.peak_bytes > 4 * count_parameters(MODEL).total / LAYOUT.tp
    # Adapters give back part of what frozen weights save: Qwen3-4B on 8 H100 trains 6,005 tokens/s
    # a device with them and 6,990 without (prime-rl, 2026-02).
    assert 0.8 * full.step_s < lora.step_s < full.step_s
    assert lora.model_flops_per_step < 0.75 * full.model_flops_per_step
    assert 0 < share < 0.01


def test_sft_is_a_step_of_pre_training() -> None:
    assert plan(Task.SFT).step_s == plan(Task.PRETRAIN).step_s
    assert plan(Task.SFT).peak_bytes == plan(Task.PRETRAIN).peak_bytes


def test_the_engine_runs_every_task() -> None:
    for task in Task:
        assert not engine_limits.unsupported_model(MODEL, workload(task))


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


def test_adapters_move_their_inputs_and_outputs() -> None:
    """Of q, k, v, o, gate, up, down: 6 h + ffn inputs, and 3 h + 2 kv + 2 ffn outputs."""
    h, kv, ffn = 4096, 1024, 14336
    inputs, outputs = 6 * h + ffn, 3 * h + 2 * kv + 2 * ffn
    layout = Layout(world_size=1)
    job = Job(model=MODEL, workload=workload(Task.LORA), layout=layout)
    sym = build_symbols(job, device_kind=DeviceKind.CUDA, load=RankLoad(), router_efficiency=1)
    forward, backward = next(adapter_rows(sym, layer=0))
    assert forward.amount == 2 * 4096 * (inputs + 6 * outputs)
    assert backward.amount == 2 * 4096 * (5 * inputs + 4 * outputs)
    frozen = replace(workload(Task.LORA), fine_tuning=FineTuningSpec(task=Task.SFT))
    whole = replace(sym, job=replace(job, workload=frozen))
    assert not list(adapter_rows(whole, layer=0))


def test_adapters_of_experts_are_searched_and_cost_time() -> None:
    model = catalogue.model("Qwen3-30B-A3B")
    hardware = catalogue.hardware("8xH100")
    steps = {}
    for has_experts in (False, True):
        spec = FineTuningSpec(task=Task.LORA, lora_experts=has_experts)
        job = Workload(routing=Routing.BALANCED, seq_len=4096, global_batch=64, fine_tuning=spec)
        result = search(model, job, hardware, fixed="ep8,tp1,pp1", top=1)
        steps[has_experts] = result.plans[0].estimate.step_s
        again = estimate(model, job, hardware, result.plans[0].layout)
        assert again.step_s == pytest.approx(steps[has_experts])
    assert steps[True] > 1.03 * steps[False]


def test_frozen_parts_take_their_weights_alone() -> None:
    """Neither gradients nor states, and less work."""
    model = catalogue.model("Qwen3-30B-A3B")
    hardware = catalogue.hardware("256xH100")
    whole = Workload(
        routing=Routing.BALANCED,
        seq_len=4096,
        global_batch=512,
        fine_tuning=FineTuningSpec(task=Task.SFT),
    )
    parts = (FrozenPart.EXPERTS, FrozenPart.EMBEDDINGS, FrozenPart.ROUTER)
    frozen = replace(whole, fine_tuning=replace(whole.fine_tuning, freeze=parts))
    layout = parse_layout("ep32,tp1,pp4,recompute=full", world_size=256)
    before = estimate(model, whole, hardware, layout)
    after = estimate(model, frozen, hardware, layout)
    held = max(
        sum(
            prod(local_shape(param, layout))
            for param in stage_parameters(model, layout, pp_rank)
            if not is_trained(frozen.fine_tuning, param.name)
        )
        for pp_rank in range(layout.pp)
    )
    assert before.peak_bytes - after.peak_bytes > 0.8 * 4 * held  # gradients in fp32
    assert after.step_s < before.step_s
    assert model.moe is not None
    experts = model.layers * model.moe.router.top_k * 3 * model.moe.ffn_size
    macs = model.hidden_size * (experts + model.vocab_size) * frozen.tokens_per_step
    assert before.model_flops_per_step - after.model_flops_per_step == 2 * macs


@pytest.mark.parametrize(
    ("text", "outputs"), [("cp2,cp_comm=a2a", 1), ("cp1", 1), ("cp1,recompute=core_attn", 0)]
)
def test_a_frozen_output_projection_keeps_no_output_of_attention(text: str, outputs: int) -> None:
    """Attention itself keeps one of 2 bytes, 4,096 columns and a rank's tokens."""
    fine_tuning = FineTuningSpec(task=Task.SFT, freeze=(FrozenPart.ATTENTION,))
    layout = parse_layout(text, world_size=2)
    job = Job(
        model=MODEL, workload=replace(workload(Task.SFT), fine_tuning=fine_tuning), layout=layout
    )
    rows = saved_tensors(job, 0, load=1.0)
    sizes = [
        row.bytes for row in rows if row.name == "attention_out" and is_kept(row, layout.recompute)
    ]
    assert sizes == outputs * [2 * 4096 * 4096 // layout.cp]


def test_frozen_weights_in_fp32_take_twice_the_bytes() -> None:
    hardware = catalogue.hardware("8xH100")
    source = Sourced(
        value=4.0, kind=SourceKind.ASSUMED, source="a trainer that shards them in fp32"
    )
    wide = replace(hardware, constants=(Constant(name="frozen_weight_bytes", value=source),))
    layout = Layout(world_size=8, zero=3)
    narrow_bytes, wide_bytes = (
        estimate(MODEL, workload(Task.LORA), part, layout).peak_bytes for part in (hardware, wide)
    )
    total = count_parameters(MODEL).total
    assert wide_bytes - narrow_bytes == pytest.approx(2 * total / 8, rel=0.06)


def test_a_packed_base_takes_half_a_byte_and_its_scales() -> None:
    """QLoRA's 0.5 + 8/64/8 + 32/(64 * 256)/8 bytes a number, in linears alone."""
    plain = workload(Task.LORA)
    tuning = replace(plain.fine_tuning, quantize_base=BaseQuantization.NF4)
    packed = replace(plain, fine_tuning=tuning)
    layout = replace(LAYOUT, recompute=(), zero=1)
    hardware = catalogue.hardware("8xH100")
    rows = [estimate(MODEL, work, hardware, layout) for work in (plain, packed)]
    numel = sum(
        prod(local_shape(param, layout))
        for param in stage_parameters(MODEL, layout, 0)
        if is_packed(param.name, param.module, param.shape, tuning)
    )
    table = 2 * MODEL.vocab_size * MODEL.hidden_size // layout.tp
    norms = (2 * MODEL.layers + 1) * MODEL.hidden_size
    assert numel == count_parameters(MODEL).total // layout.tp - table - norms // 2
    weights = [
        sum(row.bytes for row in own.ledgers[0].memory if row.component is Component.WEIGHTS)
        for own in rows
    ]
    saved = (2 - 0.5 - 1 / 64 - 4 / 64 / 256) * numel
    assert weights[0] - weights[1] == pytest.approx(saved, rel=1e-6)
    assert rows[0].step_s < rows[1].step_s < 1.3 * rows[0].step_s
