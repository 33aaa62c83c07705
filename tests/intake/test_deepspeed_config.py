"""Every leaf of a DeepSpeed configuration is read, harmless, named, or refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

import moewright as mw
from moewright.intake.megatron.deepspeed_config import read_deepspeed_config
from moewright.spec.errors import BadInput
from moewright.spec.layout import Offload

OPTIONS = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 "
    "--max-position-embeddings 512 --micro-batch-size 2 --vocab-size 32000 --lr 1e-4 --fp16"
)


def read(tmp_path: Path, config: dict[str, object], options: str = "--global-batch-size 16"):
    tmp_path.joinpath("ds.json").write_text(json.dumps(config))
    script = tmp_path / "run.sh"
    script.write_text(
        f"deepspeed --num_nodes 1 --num_gpus 4 pretrain_gpt.py {OPTIONS} {options} "
        "--deepspeed --deepspeed_config ds.json\n"
    )
    return mw.read_flags(script, on="H100").plan


SOUND = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 10,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "contiguous_gradients": True},
    "fp16": {"enabled": True, "loss_scale": 0},
}


def test_a_sound_configuration_gives_the_stage(tmp_path):
    plan = read(tmp_path, SOUND)
    assert plan.layout.zero == 2
    assert not plan.layout.offload


def test_an_optimizer_on_the_host_is_read_with_its_share(tmp_path):
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.5}}
    layout = read(tmp_path, {**SOUND, "zero_optimization": zero}).layout
    assert layout.offload == (Offload.OPTIMIZER,)
    assert layout.offload_fraction == 0.5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train_batch_size": 32}, "--global-batch-size is 16"),
        ({"train_batch_size": 4}, "at most 2 of these"),
        ({"train_micro_batch_size_per_gpu": 4}, "--micro-batch-size is 2"),
        ({"train_batch_size": None, "gradient_accumulation_steps": 4}, "--global-batch-size is 16"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": True}}, "the options say --fp16"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "offload_param"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "hpz"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 8}}, "mics_shard_size"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning.enabled"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "cpu_checkpointing"),
    ],
)
def test_what_a_plan_would_contradict_is_refused_by_name(tmp_path, changed, message):
    with pytest.raises(BadInput, match=message):
        read(tmp_path, {**SOUND, **changed})


def test_a_misspelt_leaf_never_passes_in_silence():
    draw = random.Random(32)
    leaves = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization.stage": 3,
        "zero_optimization.offload_optimizer": {"device": "cpu"},
        "fp16.enabled": True,
    }
    for name, value in leaves.items():
        for _ in range(8):
            place = draw.randrange(1, len(name))
            spelled = f"{name[:place]}{draw.choice('xyzq')}{name[place:]}"
            section, _, last = spelled.rpartition(".")
            data = {section: {last: value}} if section else {last: value}
            assert last[:3] in describe(json.dumps(data)), spelled


def describe(text: str) -> str:
    try:
        return " ".join(read_deepspeed_config(text, "ds.json").notes)
    except BadInput as refusal:
        return str(refusal)
