"""Adapters that commands and configurations ask for: which linears have one, and of which rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from moewright.api.launch_scripts import read_flags
from moewright.spec.errors import BadInput
from moewright.spec.workload import AdapterTarget, FineTuningSpec, Task

SIZES = "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --max-position-embeddings 2048 "
REST = "--seq-length 2048 --micro-batch-size 1 --global-batch-size 64 --bf16 --vocab-size 32000 "
EXPERTS = "--num-experts 8 --moe-router-topk 2 --swiglu --moe-ffn-hidden-size 512 "
START = f"torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES}{REST}"
ALL = tuple(AdapterTarget)


def read(folder: Path, text: str, name: str = "run.sh"):
    script = folder / name
    script.write_text(text)
    return read_flags(script, on="8xH100")


@pytest.mark.parametrize(
    ("words", "targets", "with_experts"),
    [
        ("linear_qkv linear_proj linear_fc1 linear_fc2", ALL, True),
        ("all-linear", ALL, True),
        ("linear_qkv", (AdapterTarget.QKV,), False),
        ("linear_proj linear_qkv", (AdapterTarget.QKV, AdapterTarget.PROJ), False),
        ("q_proj,k_proj,v_proj,o_proj", (AdapterTarget.QKV, AdapterTarget.PROJ), False),
        ("*.layers.*.self_attention.linear_proj", (AdapterTarget.PROJ,), False),
    ],
)
def test_the_names_of_linears_say_which_have_adapters(words, targets, with_experts, tmp_path):
    text = f"{START}{EXPERTS}--lora-r 8 --lora-alpha 24 --lora-target-modules '{words}'\n"
    fine_tuning = read(tmp_path, text).plan.workload.fine_tuning
    assert fine_tuning == FineTuningSpec(
        task=Task.LORA,
        lora_rank=8,
        lora_alpha=24.0,
        lora_targets=targets,
        lora_experts=with_experts,
    )


def test_adapters_leave_little_to_keep(tmp_path):
    whole = read(tmp_path, START).plan
    words = "--lora-r 8 --lora-target-modules linear_qkv linear_proj"
    adapted = read(tmp_path, START + words).plan
    assert adapted.estimate.step_s < whole.estimate.step_s
    assert adapted.estimate.peak_bytes < whole.estimate.peak_bytes


def test_one_linear_of_those_that_have_adapters_together_is_told(tmp_path):
    notes = read(tmp_path, f"{START}--lora-r 8 --lora-target-modules linear_fc1\n").notes
    assert any("beside all of linear_fc1, linear_fc2" in note for note in notes)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("--lora-r eight --lora-target-modules linear_qkv", "--lora-r"),
        ("--lora-r 8", "--lora-target-modules"),
        ("--lora-r 8 --lora-target-modules linear_qvk", "--lora-target-modules"),
        ("--lora-r 8 --lora-alpha x --lora-target-modules linear_qkv", "--lora-alpha"),
    ],
)
def test_adapters_that_cannot_be_read_are_asked_for(words, field, tmp_path):
    with pytest.raises(BadInput) as caught:
        read(tmp_path, START + words)
    (reason,) = caught.value.reasons
    assert reason.field == field
    assert reason.nearest


SWIFT = "megatron sft --model Qwen/Qwen3-8B --max_length 4096 --tensor_model_parallel_size 2 "
NEMO_RL = """
policy:
  model_name: Qwen/Qwen3-8B
  train_global_batch_size: 64
  train_micro_batch_size: 1
  max_total_sequence_length: 4096
  precision: bfloat16
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: 2
    peft: {enabled: true, dim: 4, alpha: 8, target_modules: []}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
BRIDGE = """
train: {global_batch_size: 64, micro_batch_size: 1, train_iters: 10}
model: {hf_model_id: Qwen/Qwen3-8B, tensor_model_parallel_size: 2, seq_length: 4096}
peft: {dim: 16, alpha: 32, target_modules: [linear_qkv]}
"""


@pytest.mark.parametrize(
    ("text", "name", "rank", "targets"),
    [
        (
            f"{SWIFT} --tuner_type lora --lora_rank 16 --target_modules all-linear",
            "run.sh",
            16,
            ALL,
        ),
        (f"{SWIFT} --train_type lora", "run.sh", 8, ALL),
        (f"{SWIFT} --tuner_type full --lora_rank 16", "run.sh", 0, ()),
        (NEMO_RL, "grpo.yaml", 4, ALL),
        (NEMO_RL.replace("enabled: true, dim", "enabled: false, dim"), "grpo.yaml", 0, ()),
        (BRIDGE, "run_config.yaml", 16, (AdapterTarget.QKV,)),
    ],
)
def test_configurations_ask_for_adapters_in_their_words(text, name, rank, targets, tmp_path):
    fine_tuning = read(tmp_path, text, name).plan.workload.fine_tuning
    if not rank:
        assert fine_tuning == FineTuningSpec()
        return
    assert (fine_tuning.task, fine_tuning.lora_rank) == (Task.LORA, rank)
    assert fine_tuning.lora_targets == targets
