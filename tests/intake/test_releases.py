"""What a command leaves out is as the release of Megatron-LM has it that its options are of."""

from __future__ import annotations

import pytest

from moewright.api.launch_scripts import read_flags, read_logged_flags
from moewright.intake.megatron.options import option_table
from moewright.intake.megatron.releases import find_release, list_changed, list_releases
from moewright.spec.workload import AttentionBackend

SIZES = "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --max-position-embeddings 2048 "
REST = (
    "--seq-length 2048 --micro-batch-size 1 --global-batch-size 64 --bf16 "
    "--tokenizer-type GPT2BPETokenizer "
)
START = f"torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES}{REST}"


def test_the_last_release_is_the_parser_that_is_read():
    today = list_releases()[-1]
    assert today.defaults == {name: option.default for name, option in option_table().items()}


def test_options_of_today_are_of_today():
    assert find_release(["--num-layers", "--bf16"]) is list_releases()[-1]


@pytest.mark.parametrize(
    ("words", "backend", "is_told"),
    [
        ("", AttentionBackend.FLASH, False),
        ("--activations-checkpoint-method uniform",
         AttentionBackend.LOCAL, True),
        ("--activations-checkpoint-method uniform --transformer-impl transformer_engine",
         AttentionBackend.FLASH, False),
    ],
)  # fmt: skip
def test_layers_are_those_of_the_release(words, backend, is_told, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(f"{START}{words}\n")
    reading = read_flags(script, on="8xH100")
    assert reading.plan.workload.trainer.attention_backend is backend
    assert any("the last with these options" in note for note in reading.notes) is is_told


def test_a_log_says_what_releases_differ_in(tmp_path):
    assert "--transformer-impl" in list_changed()
    arguments = {
        "world_size": "8", "num_layers": "8", "hidden_size": "1024", "num_attention_heads": "8",
        "max_position_embeddings": "2048", "seq_length": "2048", "micro_batch_size": "1",
        "global_batch_size": "64", "bf16": "True", "padded_vocab_size": "32000",
        "transformer_impl": "transformer_engine", "data_impl": "mmap",
        "activations_checkpoint_method": "uniform",
    }  # fmt: skip
    reading = read_logged_flags(tuple(arguments.items()), tmp_path / "log", model="", on="8xH100")
    assert reading is not None
    assert reading.plan.workload.trainer.attention_backend is AttentionBackend.FLASH
