"""What a script starts wherever it stands, and what only looks like a training."""

import pytest

from moewright.intake.megatron.launch_command import LaunchCommand
from moewright.intake.megatron.read import interpret_launch, read_launch
from moewright.spec.errors import BadInput

MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 512 "
    "--max-position-embeddings 512 --vocab-size 1024 --micro-batch-size 1"
)
TRAINING = f"torchrun --nproc_per_node 8 pretrain_gpt.py {MODEL}"


def read(text: str, tmp_path, name: str = "run.sh") -> LaunchCommand:
    script = tmp_path / name
    script.write_text(text)
    return read_launch(script, {})


@pytest.mark.parametrize(
    "text",
    [
        "if ! {}; then exit 1; fi",
        "if {}; then echo done; else exit 1; fi",
        "until {}; do sleep 60; done",
        "while ! {}; do sleep 60; done",
        "f() {{ if {}; then return 0; fi; return 1; }}\nif ! f; then exit 1; fi",
        "for i in 1 2; do if ! {}; then exit 1; fi; done",
    ],
)
def test_a_training_in_a_condition_is_read(text, tmp_path):
    assert read(text.format(TRAINING), tmp_path).options["--num-layers"] == ("4",)


def test_a_launcher_that_a_branch_chooses_is_one(tmp_path):
    chosen = (
        'W=$(python3 -c "import x" && echo npu || echo gpu)\n'
        "L=(python3)\n"
        'if [ "$W" = gpu ]; then L=(uv run --frozen python3); fi\n'
        f'"${{L[@]}}" -m torch.distributed.run --nproc_per_node 8 pretrain_gpt.py {MODEL}'
    )
    assert read(chosen, tmp_path).world_size == 8


def test_a_launchers_own_file_started_by_python_is_the_launcher(tmp_path):
    text = f"python /opt/bin/deepspeed --num_nodes 2 --num_gpus 4 pretrain_gpt.py {MODEL}"
    assert read(text, tmp_path).world_size == 8


@pytest.mark.parametrize(
    "option", ["--tensor-model-parallel-size", "--global-batch-size", "--use-distributed-optimizer"]
)
def test_an_option_that_a_loop_may_append_is_asked_for(option, tmp_path):
    text = (
        f"ARGS=({MODEL})\n"
        "while IFS='=' read -r name _; do\n"
        f'    ARGS+=("{option}" "$name")\n'
        'done < <(env | grep "^X_")\n'
        'torchrun --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}"'
    )
    with pytest.raises(BadInput, match=option):
        read(text, tmp_path)


def test_all_variables_that_a_plan_needs_are_asked_for_at_once(tmp_path):
    configuration = tmp_path / "model.yaml"
    configuration.write_text(
        "MODEL_ARGS:\n  --num-layers: 4\n  --hidden-size: 256\n  --num-attention-heads: 4\n"
        "  --max-position-embeddings: 512\n  --vocab-size: 1024\n"
        "  --tensor-model-parallel-size: ${TP}\n  --pipeline-model-parallel-size: ${PP}\n"
        "  --micro-batch-size: ${MBS}\n  --seq-length: ${SEQ}\n  --tensorboard-dir: ${BOARD}\n"
    )
    command = read_launch(configuration, {})
    with pytest.raises(BadInput) as refusal:
        interpret_launch(command, world_size=8, folder=tmp_path)
    asked = refusal.value.reasons[0].nearest
    assert all(f"--set {name}=..." in asked for name in ("TP", "PP", "MBS", "SEQ"))
    assert "BOARD" not in asked


def test_a_program_that_shares_options_with_a_training_is_none(tmp_path):
    text = "torchrun --nproc_per_node 2 -m tuner.profile.main --tensor-model-parallel-size 2"
    with pytest.raises(BadInput, match=r"it starts tuner\.profile\.main"):
        read(text, tmp_path)


def test_a_run_of_skyrl_without_megatron_is_said_to_be_one(tmp_path):
    text = (
        "uv run -m skyrl_train.entrypoints.main_base trainer.strategy=fsdp2 "
        "trainer.policy.model.path=Qwen/Qwen3-0.6B trainer.train_batch_size=8"
    )
    with pytest.raises(BadInput, match="is SkyRL's and sets nothing of Megatron"):
        read(text, tmp_path)


def test_a_run_of_skyrl_on_megatron_needs_no_degree(tmp_path):
    text = (
        "uv run -m examples.fully_async.main trainer.strategy=megatron "
        "trainer.policy.model.path=Qwen/Qwen3-0.6B trainer.policy_mini_batch_size=64 "
        "trainer.micro_train_batch_size_per_gpu=8 trainer.placement.policy_num_gpus_per_node=2"
    )
    command = read(text, tmp_path)
    assert command.options["--micro-batch-size"] == ("8",)
    assert command.world_size == 2


def test_the_output_of_a_run_is_no_script(tmp_path):
    with pytest.raises(BadInput, match="is what a run printed") as refusal:
        read("[INFO] step 1 loss (3.2\n", tmp_path, name="run.out")
    assert refusal.value.reasons[0].nearest == "moewright capture --log run.out"


def test_the_version_of_bash_is_known(tmp_path):
    text = f'if [ "${{BASH_VERSION%%.*}}" -lt 4 ]; then exit 1; fi\n{TRAINING}'
    assert read(text, tmp_path).world_size == 8
