"""What trainers do by themselves: layers, defaults, choices and paths that no word says."""

from __future__ import annotations

from pathlib import Path

import pytest

from moewright.api.launch_scripts import read_flags
from moewright.intake.megatron.parser_source import parse_options
from moewright.intake.megatron.settings import read_settings
from moewright.spec.errors import BadInput
from moewright.spec.workload import AttentionBackend

SIZES = "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --max-position-embeddings 2048 "
REST = "--seq-length 2048 --micro-batch-size 1 --global-batch-size 64 --bf16 --vocab-size 32000 "
START = f"torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES}{REST}"


def write(folder: Path, text: str, name: str = "run.sh") -> Path:
    script = folder / name
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(text)
    return script


def refusal(script: Path):
    with pytest.raises(BadInput) as caught:
        read_flags(script, on="8xH100")
    return caught.value.reasons[0]


@pytest.mark.parametrize(
    ("words", "backend"),
    [
        ("", AttentionBackend.FLASH),  # Transformer Engine's
        ("--transformer-impl local", AttentionBackend.LOCAL),
        ("--transformer-impl local --use-flash-attn", AttentionBackend.FLASH),
        ("--deepspeed --zero-stage 1", AttentionBackend.LOCAL),
        ("--deepspeed --zero-stage 1 --use-flash-attn-v2", AttentionBackend.FLASH),
        (
            "--deepspeed --zero-stage 1 --transformer-impl transformer_engine",
            AttentionBackend.FLASH,
        ),
    ],
)
def test_attention_is_that_of_the_layers_which_the_trainer_has(words, backend, tmp_path):
    reading = read_flags(write(tmp_path, f"{START}{words}\n"), on="8xH100")
    assert reading.plan.workload.trainer.attention_backend is backend


def test_a_checkout_whose_parser_offers_no_layers_has_its_own(tmp_path):
    parser = "def add(p):\n    p.add_argument('--num-layers', type=int, default=None)\n"
    write(tmp_path, parser, "megatron/arguments.py")
    reading = read_flags(write(tmp_path, f"{START}\n"), on="8xH100")
    assert reading.plan.workload.trainer.attention_backend is AttentionBackend.LOCAL
    assert any("checkout: --transformer-impl local" in note for note in reading.notes)


FLAGSCALE = """
system: {{tensor_model_parallel_size: 1, precision: {{bf16: true}}}}
model:
  num_layers: 8
  max_position_embeddings: 4096
  hidden_size: 4096
  num_attention_heads: 32
  {more}
  swiglu: true
  seq_length: 512
  max_position_embeddings: 512
  micro_batch_size: 1
  global_batch_size: 64
data: {{tokenizer: {{vocab_size: 32000}}}}
"""


@pytest.mark.parametrize(
    ("more", "kv_heads", "ffn"),
    [
        ("num_query_groups: 8", 8, 10880),
        ("{group_query_attention: true, num_query_groups: 8}", 8, 10880),
        ("{group_query_attention: false, num_query_groups: 8}", 32, 10880),
        ("multiple_of: 256", 32, 11008),
        ("{multiple_of: 4096, hidden_dim_multiplier: 1.3}", 32, 16384),
        ("{multiple_of: 256, ffn_hidden_size: 5504}", 32, 5504),
    ],
)
def test_a_configuration_says_sizes_as_its_trainer_takes_them(more, kv_heads, ffn, tmp_path):
    lines = more.strip("{}").replace(", ", "\n  ")
    script = write(tmp_path, FLAGSCALE.format(more=lines), "train.yaml")
    model = read_flags(script, on="8xH100").plan.model
    assert model.attention.kv_heads == kv_heads
    assert model.dense_ffn_size == ffn


@pytest.mark.parametrize(
    "behind",
    [
        "while kill -0 $PID; do bash upload.sh --all; sleep 60; done",
        'if [ "$(squeue -h | wc -l)" -gt 2 ]; then x() { x; }; x; fi\nfor ((;;)); do A=1; done',
        "(while ps -p $!; do python watch.py; done) &",
    ],
)
def test_what_a_script_does_behind_its_training_changes_nothing_of_it(behind, tmp_path):
    plain = read_flags(write(tmp_path, f"{START}\n"), on="8xH100")
    script = write(tmp_path, f"{START} &\nPID=$!\n{behind}\n", "watched.sh")
    assert read_flags(script, on="8xH100").plan == plain.plan


def test_a_loop_over_files_that_may_be_there_ends(tmp_path):
    loop = 'while [ -d "$OUT" ]; do OUT="${OUT}_$N"; ((N++)); done'
    text = f"OUT=/data/run\n{loop}\n{START} --save $OUT\n"
    assert read_flags(write(tmp_path, text), on="8xH100").plan.model.layers == 8


def test_an_argument_of_a_script_is_asked_for_as_such(tmp_path):
    reason = refusal(write(tmp_path, f"TP=$3\n{START} --tensor-model-parallel-size $TP\n"))
    assert "argument 3 of the script" in reason.rule
    assert reason.nearest == '--script-args "..."'


def test_a_script_of_a_deep_folder_is_started_from_the_root(tmp_path):
    write(tmp_path, f"{START}\n", "tests/a/b/c/train.sh")
    script = write(tmp_path, "cd /workspace\n./tests/a/b/c/train.sh\n", "tests/a/b/c/job.sh")
    assert read_flags(script, on="8xH100").plan.model.layers == 8


def test_experts_by_layer_are_refused_in_one_line(tmp_path):
    with pytest.raises(BadInput) as caught:
        read_flags(write(tmp_path, f"{START} --num-experts 32 32 64\n"), on="8xH100")
    (reason,) = caught.value.reasons
    assert (reason.field, reason.value) == ("--num-experts", "32 32 64")


def test_one_expert_is_a_dense_model_to_deepspeed_alone(tmp_path):
    words = "--num-experts 1 --moe-expert-parallel-size 1 --deepspeed --zero-stage 1"
    assert read_flags(write(tmp_path, f"{START} {words}\n"), on="8xH100").plan.model.moe is None


def test_a_pair_of_switches_has_both_names():
    text = "p.add_argument('--offload', action=argparse.BooleanOptionalAction, default=True)\n"
    options = {option.name: option for option in parse_options(text)}
    assert {option.dest for option in options.values()} == {"offload"}
    assert options.keys() == {"--offload", "--no-offload"}


def test_the_last_choice_of_a_group_of_hydra_names_its_files(tmp_path):
    write(tmp_path, "degree: 4\n", "actor/core_actor.yaml")
    write(tmp_path, "degree: 1\n", "actor/dp_actor.yaml")
    base = "defaults:\n  - engine: dp\n  - actor@actor: ${engine}_actor\n  - _self_\nrounds: 3\n"
    write(tmp_path, base, "base.yaml")
    own = "defaults:\n  - base\n  - override engine: core\n  - _self_\n"
    assert read_settings(write(tmp_path, own, "own.yaml"))["actor.degree"] == "4"
    assert read_settings(tmp_path / "base.yaml")["actor.degree"] == "1"


@pytest.mark.parametrize(
    ("program", "is_own"),
    [
        ("import other\n", False),
        ("from fork.training import pretrain\n", True),
        ("import argparse, fork\nimport fork\n", True),
    ],
)
def test_a_package_beside_a_script_is_its_trainer_where_its_program_imports_it(
    program, is_own, tmp_path
):
    parser = (
        "def add(p):\n"
        "    p.add_argument('--num-layers', type=int)\n"
        "    p.add_argument('--attention-dropout', type=float, default=0.5)\n"
    )
    write(tmp_path, parser, "fork/arguments.py")
    write(tmp_path, program, "pretrain_gpt.py")
    reading = read_flags(write(tmp_path, f"{START}\n", "examples/run.sh"), on="8xH100")
    assert (reading.plan.workload.trainer.attention_dropout == 0.5) is is_own


def size(folder: Path, text: str) -> int:
    return read_flags(write(folder, text), on="8xH100").plan.model.layers


@pytest.mark.parametrize(
    "lines",
    [
        "false\nif [ $? -eq 0 ]; then L=4; else L=8; fi",
        "[[ a == a ]]\nif [[ $? -ne 0 ]]; then L=4; else L=8; fi",
        "(( 0 ))\nret=$?\nL=$((7 + ret))",
        "L=8\npip install x\nif [ $? -ne 0 ]; then echo failed; exit 1; fi",
        "L=8\nwhile true; do\n  ping -c1 $HOST\n  [ $? -eq 0 ] && break\n  sleep 1\ndone",
    ],
)
def test_what_the_last_command_ended_with_is_known_or_decided(lines, tmp_path):
    assert size(tmp_path, f"{lines}\n{START.replace('--num-layers 8', '--num-layers $L')}\n") == 8


def test_a_training_that_is_tried_again_is_read_once(tmp_path):
    loop = "ret=1\nuntil [ $ret -eq 0 ]; do\n{}\nret=$?\ndone\n"
    assert size(tmp_path, loop.format(START)) == 8


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ('if [ -z "$A" ] || [ -z "$B" ]; then echo "A and B are required"; exit 1; fi', "--set A="),
        ('S=${H_S:-3}\nif [ $S = 2 ]; then L=2; else echo "invalid $S"; exit 1; fi', "--set H_S="),
        ('if [ "$#" -lt 1 ]; then echo "needs an argument"; exit 1; fi', "--script-args"),
        ("case $SIZE in big) L=9;; *) exit 1;; esac", "--set SIZE="),
    ],
)
def test_a_script_that_leaves_is_asked_for_what_its_condition_asked(text, nearest, tmp_path):
    assert refusal(write(tmp_path, f"{text}\n{START}\n")).nearest.startswith(nearest)


@pytest.mark.parametrize(
    "words", ["--skip-train", "--train-iters 0", "--debug-rollout-only", "--num-rollout 0"]
)
def test_a_command_that_leaves_the_training_out_is_not_planned(words, tmp_path):
    script = write(tmp_path, f"{START} {words}\n")
    assert "leaves the training out" in refusal(script).rule
    left_out = f"{words.split()[0]}=null"
    assert read_flags(script, on="8xH100", overrides=[left_out]).plan.model.layers == 8


def test_a_switch_is_set_and_cleared_by_hand(tmp_path):
    script = write(tmp_path, f"{START} --tensor-model-parallel-size 2 --sequence-parallel\n")
    cleared = read_flags(script, on="8xH100", overrides=["--sequence-parallel=false"])
    again = read_flags(
        write(tmp_path, f"{START} --tensor-model-parallel-size 2\n"),
        on="8xH100",
        overrides=["--sequence-parallel=true"],
    )
    assert not cleared.plan.layout.sp
    assert again.plan.layout.sp


def test_deepspeed_starts_a_rank_on_each_device_that_it_sees(tmp_path):
    words = START.removeprefix("torchrun --nproc_per_node 8 ")
    text = f"CUDA_VISIBLE_DEVICES=0,1 deepspeed {words} --deepspeed --zero-stage 1\n"
    assert read_flags(write(tmp_path, text), on="H100").plan.layout.world_size == 2


def test_options_of_a_trainer_that_stand_in_variables_are_asked_for(tmp_path):
    reason = refusal(write(tmp_path, "torchrun $RUN_ARGS pretrain_gpt.py $MODEL_ARGS $DATA_ARGS\n"))
    assert "MODEL_ARGS" in reason.rule
    assert reason.nearest.startswith("--set DATA_ARGS=")


OLD_VERL = """python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer \\
    data.max_prompt_length=512 data.max_response_length=512 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    {} trainer.n_gpus_per_node=8 trainer.nnodes=1
"""


@pytest.mark.parametrize(
    ("words", "tp", "micro", "is_told"),
    [
        ("actor_rollout_ref.actor.ppo_micro_batch_size=64", 4, 32, True),
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size=64 "
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
            2,
            16,
            False,
        ),
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 "
            "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
            1,
            4,
            True,
        ),
    ],
)
def test_verl_says_the_micro_batch_of_all_before_that_of_a_device(
    words, tp, micro, is_told, tmp_path
):
    if "megatron." not in words:
        words += " actor_rollout_ref.actor.megatron.sequence_parallel=true"
    reading = read_flags(write(tmp_path, OLD_VERL.format(words)), on="H100")
    assert (reading.plan.layout.tp, reading.plan.layout.mbs) == (tp, micro)
    assert any("4 before verl 0.4" in note for note in reading.notes) is is_told


def test_a_model_that_a_script_names_and_nobody_knows_is_asked_for(tmp_path):
    words = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
    text = OLD_VERL.format(words).replace("Qwen/Qwen2.5-7B", "me/my-model-7b")
    with pytest.raises(BadInput) as caught:
        read_flags(write(tmp_path, text), on="H100")
    (reason,) = caught.value.reasons
    assert (reason.field, reason.value) == ("model", "my-model-7b")
    assert reason.nearest == "estimate CONFIG.json --from-flags ..."


@pytest.mark.parametrize(
    ("words", "field", "nearest"),
    [
        ("", "--num-experts", "--set --num-experts=..."),
        (
            "--num-experts 8 --hybrid-override-pattern M-M-*-M-",
            "--expert-model-parallel-size",
            "1",
        ),
    ],
)
def test_experts_are_split_where_there_are_some(words, field, nearest, tmp_path):
    reason = refusal(write(tmp_path, f"{START} --expert-model-parallel-size 2 {words}\n"))
    assert (reason.field, reason.nearest) == (field, nearest)


def test_all_arguments_of_a_script_are_asked_for_at_once(tmp_path):
    text = (
        "ENV=$1\nSIZE=$2\nSEQ=$3\nTP=${4}\n"
        'if [ $SIZE = 1B ]; then\nLAYERS=16\nelif [ "$SIZE" = 8B ]; then\nLAYERS=32\nfi\n'
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers $LAYERS --seq-length $SEQ "
        "--hidden-size 1024 --num-attention-heads 8 --max-position-embeddings 4096 "
        "--micro-batch-size 1 --global-batch-size 64 --bf16 --vocab-size 32000 "
        "--tensor-model-parallel-size $TP\n"
    )
    script = write(tmp_path, text)
    asked = refusal(script)
    assert "4 arguments: ENV SIZE=1B|8B SEQ TP" in asked.rule
    assert asked.nearest == '--script-args "..."'
    with pytest.raises(BadInput) as caught:
        read_flags(script, on="8xH100", arguments="dsw 7B 4096 2")
    assert caught.value.reasons[0].field == "SIZE"
    assert caught.value.reasons[0].nearest == "1B"
    plan = read_flags(script, on="8xH100", arguments="dsw 8B 4096 2").plan
    assert (plan.model.layers, plan.layout.tp) == (32, 2)


def test_a_script_of_a_conversion_is_no_training_whatever_it_asks_for(tmp_path):
    text = 'if [ -z "$WORLD_SIZE" ]; then echo "Please Provide WORLD_SIZE"; exit; fi\n'
    reason = refusal(write(tmp_path, f"{text}torchrun tools/convert.py --num-layers $9\n"))
    assert "trains no decoder" in reason.rule
    assert not reason.nearest


def test_what_a_program_prints_may_be_sourced(tmp_path):
    text = f"source <(curl -s https://example.org/setup.sh) && prepare\n{START}\n"
    assert read_flags(write(tmp_path, text), on="8xH100").plan.model.layers == 8


def test_quotes_of_a_command_inside_a_here_document_are_the_commands_own(tmp_path):
    text = (
        'cat <<EOT > ds.json\n{"zero_optimization": {"stage": 1$(if [ "a" = "a" ]; then echo \',\n'
        '"offload_optimizer": {"device": "cpu"}\'; fi)}}\nEOT\n'
        f"{START}--deepspeed --deepspeed_config ds.json\n"
    )
    layout = read_flags(write(tmp_path, text), on="8xH100").plan.layout
    assert (layout.zero, len(layout.offload)) == (1, 1)


def test_a_script_that_is_written_sees_what_the_scheduler_says(tmp_path):
    text = (
        "#SBATCH --nodes=2\n#SBATCH --gres=gpu:4\n"
        "cat <<EOT > inner.sh\ntorchrun --nnodes \\$SLURM_JOB_NUM_NODES --nproc_per_node 4 "
        f"{START.partition('8 ')[2]}\nEOT\nsrun bash inner.sh\n"
    )
    assert read_flags(write(tmp_path, text), on="H100").plan.layout.world_size == 8


def test_an_unknown_value_of_a_forks_option_is_asked_for_in_words(tmp_path):
    text = "N=$(($(ds_ssh nvidia-smi | wc -l)-2))\nif [[ 64 -gt $N ]]; then EP=$N; else EP=64; fi\n"
    script = write(tmp_path, f"{text}{START}--moe-expert-parallel-size $EP --num-experts 64\n")
    reason = refusal(script)
    assert reason.nearest == "--set N=..."
    assert str(BadInput(reason)).isprintable()


ALIGNER = """
trainer: {num_nodes: 1, devices: 8, precision: bf16}
precision: ${trainer.precision}
exp_manager: {name: sft}
model:
  encoder_seq_length: 4096
  num_layers: 8
  max_position_embeddings: 4096
  hidden_size: 1024
  num_attention_heads: 8
  tokenizer: {library: huggingface, type: gpt2}
  vocab_size: 32000
  data:
    train_ds: {global_batch_size: 128, micro_batch_size: 2}
    validation_ds: {global_batch_size: 512}
  optim: {name: distributed_fused_adam}
"""


def test_the_batch_of_fine_tuning_stands_beside_its_data(tmp_path):
    script = write(tmp_path, ALIGNER, "sft.yaml")
    plan = read_flags(script, on="H100", overrides=("--vocab-size=32000",)).plan
    assert (plan.workload.global_batch, plan.layout.mbs) == (128, 2)


def test_a_size_that_stands_where_nothing_looks_is_refused_though_a_trainer_has_it(tmp_path):
    # 128 is the default of a table of NeMo's: that made it pass in silence.
    text = ALIGNER.replace("train_ds:", "train_set:").replace(", micro_batch_size: 2", "")
    text = text.replace("  optim:", "  micro_batch_size: 1\n  optim:")
    with pytest.raises(BadInput, match="train_set"):
        read_flags(write(tmp_path, text, "sft.yaml"), on="H100", overrides=("--vocab-size=32000",))


def test_a_setting_that_repeats_another_is_named_and_refuses_nothing(tmp_path):
    text = ALIGNER + "rollout: {pad_to_length: '${model.encoder_seq_length}'}\n"
    script = write(tmp_path, text, "sft.yaml")
    reading = read_flags(script, on="H100", overrides=("--vocab-size=32000",))
    assert any("rollout.pad_to_length" in note for note in reading.notes)


SKYRL = (
    "python -m skyrl.train.main_sft strategy=megatron model.path=Qwen/Qwen3-0.6B max_length=512 "
    "batch_size=8 micro_train_batch_size_per_gpu=1 placement.num_nodes=1 "
    "placement.num_gpus_per_node=4 megatron_config.tensor_model_parallel_size=1"
)


def test_skyrls_supervised_trainer_is_read_with_its_own_defaults(tmp_path):
    plan = read_flags(write(tmp_path, f"{SKYRL}\n"), on="H100").plan
    layout = plan.layout
    assert (layout.tp, layout.pp, layout.mbs, layout.world_size) == (1, 2, 1, 4)
    assert (plan.workload.global_batch, plan.workload.seq_len) == (8, 512)
