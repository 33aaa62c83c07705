"""What a script starts wherever it stands, and what only looks like a training."""

import random

import pytest

from moewright.intake.megatron.bash_session import apply_filter
from moewright.intake.megatron.launch_command import LaunchCommand
from moewright.intake.megatron.read import interpret_launch, read_launch
from moewright.spec.errors import BadInput
from moewright.spec.layout import Overlap

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


def test_a_launcher_that_nobody_knows_is_told_by_its_ranks(tmp_path):
    text = f"exec podrun --nnodes=2 --nproc-per-node=4 --tee=3 pretrain_gpt.py {MODEL}"
    assert read(text, tmp_path).world_size == 8


def test_a_trainer_that_nobody_knows_is_named_and_not_offered_megatrons_options(tmp_path):
    text = (
        "torchrun --nproc_per_node 8 train/train.py --model_name_or_path llama --bf16 --do_train "
        "--per_device_train_batch_size 1 --data_cache_dir $CACHE --reward_url score.py"
    )
    with pytest.raises(BadInput, match=r"train/train.py with options that .*; name the model"):
        read(text, tmp_path)


def test_a_file_behind_an_option_is_no_program(tmp_path):
    text = (
        "ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --reward_url score.py "
        "--actor_num_nodes 1 --ref_num_nodes 1 --bf16 --micro_train_batch_size 8"
    )
    with pytest.raises(BadInput, match=r"starts openrlhf.cli.train_ppo_ray with"):
        read(text, tmp_path)


def test_a_module_of_deepspeeds_launcher_is_a_program(tmp_path):
    text = (
        "read -r -d '' commands <<EOF\nopenrlhf.cli.train_rm --save_path a --pretrain b "
        "--train_batch_size 8 --max_epochs 1\nEOF\ndeepspeed --module $commands\n"
    )
    with pytest.raises(BadInput, match=r"starts openrlhf.cli.train_rm with"):
        read(text, tmp_path)


def test_options_that_yq_takes_from_a_file_are_in_that_file(tmp_path):
    text = (
        'ARGS=$(yq ".MODEL_ARGS | to_entries" model.yaml | tr "\\n" " ")\n'
        "srun -n8 python pretrain_gpt.py --moe-pad-expert-input-to-capacity $ARGS"
    )
    with pytest.raises(BadInput, match="give that YAML file"):
        read(text, tmp_path)


def test_ranks_of_a_launcher_in_front_of_settings_are_read(tmp_path):
    text = (
        "torchrun --nproc_per_node 8 --nnodes 4 recipe.py train.train_iters=10 "
        "dist.tensor_model_parallel_size=2 dist.pipeline_model_parallel_size=2"
    )
    assert read(text, tmp_path).world_size == 32


@pytest.mark.parametrize("test", ["[[ $OUT =~ (P=[0-9]+).*(R=[0-9]+) ]]", '[ "$OUT" = done ]'])
def test_a_test_alone_decides_nothing(test, tmp_path):
    text = f"OUT=$(scontrol show jobid 7)\n{test}\necho ${{BASH_REMATCH[1]}}\n{TRAINING}"
    assert read(text, tmp_path).world_size == 8


def test_a_test_in_front_of_the_training_still_decides(tmp_path):
    text = f"OUT=$(scontrol show jobid 7)\n[[ $OUT =~ P=1 ]] && {TRAINING} || {TRAINING} --bf16"
    with pytest.raises(BadInput, match="scontrol"):
        read(text, tmp_path)


def test_lines_of_a_run_are_no_script_though_they_print_its_command(tmp_path):
    text = f"[2024-04-18 20:44:00,618] [INFO] cmd = {TRAINING}\n"
    with pytest.raises(BadInput, match="is what a run printed, and no script"):
        read(text, tmp_path, "run.log")


def test_options_of_training_values_refuse_no_script(tmp_path):
    command = read(f"{TRAINING} --bias-zero-mean-update --router-z-loss-decay 0.1", tmp_path)
    left_out = [note for note in command.notes if "is left out" in note]
    assert len(left_out) == 2
    for size in ("--router-hidden-size 8", "--experts-fused-bias", "--lr-shards 2"):
        with pytest.raises(BadInput, match="sounds of"):
            read(f"{TRAINING} {size}", tmp_path)


def read_experts(words: str, tmp_path):
    text = f"deepspeed --num_gpus 8 pretrain_gpt.py {MODEL} --num-experts 8 --zero-stage 1 {words}"
    job = interpret_launch(read(text, tmp_path), world_size=8, folder=tmp_path)
    return job.model, job.layout


def test_experts_of_deepspeeds_own_layer_are_read(tmp_path):
    model, layout = read_experts("--moe-expert-parallel-size 4 --topk 2", tmp_path)
    assert model.moe is not None
    assert (model.moe.experts, model.moe.router.top_k) == (8, 2)
    assert model.moe_layers == (False, True, False, True)
    assert (layout.ep, layout.etp, layout.capacity) == (4, 1, 1.0)
    whole, kept = read_experts(
        "--expert-interval 1 --disable-moe-token-dropping --create-moe-param-group", tmp_path
    )
    assert all(whole.moe_layers)
    assert (kept.ep, kept.capacity) == (1, 0.0)


def test_a_dense_layer_beside_deepspeeds_experts_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"--mlp-type=residual: .*standard"):
        read_experts("--mlp-type residual", tmp_path)


def test_rows_that_are_fewer_than_the_vocabulary_are_refused(tmp_path):
    command = read(f"{TRAINING} --pad-vocab-size-to 1000", tmp_path)
    with pytest.raises(BadInput, match=r"--padded-vocab-size=1000: .*1024"):
        interpret_launch(command, world_size=8, folder=tmp_path)


def test_optimizers_of_forks_are_planned_or_refused_by_what_they_keep(tmp_path):
    command = read(f"{TRAINING} --optimizer adamw", tmp_path)
    assert command.options["--optimizer"] == ("adam",)
    with pytest.raises(BadInput, match="--optimizer=ademamix: keeps two first moments"):
        read(f"{TRAINING} --optimizer ademamix", tmp_path)


@pytest.mark.parametrize(
    "start", ["read -r -d '' ARGS", "read -d '' -r ARGS", "IFS= read -rd '' ARGS"]
)
def test_a_text_that_read_takes_whole_loses_no_word(start, tmp_path):
    words = MODEL.replace(" --", "\n--")
    text = (
        f"{start} <<EOF\n{words}\n--bf16\nEOF\ntorchrun --nproc_per_node 8 pretrain_gpt.py $ARGS\n"
    )
    command = read(text, tmp_path)
    assert command.options["--num-layers"] == ("4",)
    assert "--bf16" in command.options
    assert not command.unknown_words


def test_a_config_of_deepspeed_that_the_script_makes_of_a_template_is_read(tmp_path):
    """Each draw of degrees and stages comes back from what sed writes."""
    rng = random.Random(7)
    tmp_path.joinpath("ds_TEMPLATE.json").write_text(
        '{"train_batch_size": CONFIG_BATCH,\n "zero_optimization": {"stage": ZERO_STAGE}}\n'
    )
    for stage, batch in ((rng.randrange(4), rng.randrange(1, 9) * 8) for _ in range(6)):
        text = (
            f"ZERO={stage}\nconfig=ds_$ZERO.json\n"
            f'sed "s/CONFIG_BATCH/{batch}/" ds_TEMPLATE.json \\\n'
            '    | sed -e "s/ZERO_STAGE/${ZERO}/" \\\n    > ${config}\n'
            f"deepspeed --num_gpus 8 pretrain_gpt.py {MODEL} --deepspeed "
            f"--deepspeed_config $config --global-batch-size {batch} --bf16\n"
        )
        command = read(text, tmp_path)
        job = interpret_launch(command, world_size=8, folder=tmp_path)
        assert (job.layout.zero, job.workload.global_batch) == (stage, batch)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("sed s/A/B/", "B A\nB\n"),
        ("sed s/A/B/g;s#B#C#", "C B\nC\n"),
        ("sed -e s/A/B/ -e s/B/C/", "C A\nC\n"),
        ("sed s/A.*/B/", None),  # a pattern, which only sed knows
        ("sed s/A/&&/", None),
        ("sed -n s/A/B/p", None),
        ("sed 1d", None),
        ("awk s/A/B/", None),
    ],
)
def test_sed_is_followed_where_it_puts_words_for_words(words, text):
    assert apply_filter(words.split(), "A A\nA\n", lambda name: None) == text


def test_experts_whole_on_ranks_that_are_cut_are_refused_by_what_they_are(tmp_path):
    text = (
        f"deepspeed --num_gpus 8 pretrain_gpt.py {MODEL} --deepspeed --zero-stage 1 --num-experts 8"
        " --global-batch-size 8 --tensor-model-parallel-size 2 --fp16"
    )
    refusal = refuse(text, tmp_path)
    assert "has DeepSpeed's experts whole on each of its ranks" in refusal
    assert "nearest" not in refusal


def refuse(text: str, tmp_path, name: str = "run.sh") -> str:
    """Return the refusal of a script that makes no job."""
    try:
        command = read(text, tmp_path, name)
        interpret_launch(command, world_size=command.world_size or 8, folder=tmp_path)
    except BadInput as refusal:
        return str(refusal)
    raise AssertionError(text)


@pytest.mark.parametrize(
    ("path", "offered"),
    [
        ("Qwen3-Next-80B-A3B-Instruct-mcore", "Qwen3-Next-80B-A3B"),
        ("/data/Mixtral-8x7B-v0.1_torch_dist", "Mixtral-8x7B-v0.1"),
        ("/data/checkpoints", "Qwen3-30B-A3B"),
    ],
)
def test_the_model_that_a_path_names_is_the_one_offered(path, offered, tmp_path):
    text = f"torchrun --nproc_per_node 8 pretrain_gpt.py --load {path} --global-batch-size 8"
    assert refuse(text, tmp_path).endswith(f"estimate {offered} --from-flags ...")


def test_a_model_of_other_sizes_is_not_offered(tmp_path):
    text = f"{TRAINING} --spec own.layers --load /data/Qwen3-Next-80B-A3B --global-batch-size 8"
    assert refuse(text, tmp_path).endswith("estimate CONFIG.json --from-flags ...")


@pytest.mark.parametrize(
    ("text", "rule", "is_captured"),
    [
        ("model = dict(\n    num_layers=24,\n)\n", "InternEvo", False),
        ("from megatron.bridge import x\ndef pretrain_config():\n    pass\n", "recipes", False),
        ("def helper():\n    pass\n", "the script that starts the training", False),
        ("def main():\n    pass\nif __name__ == '__main__':\n    main()\n", "started", True),
    ],
)
def test_a_program_that_starts_nothing_is_not_offered_to_be_captured(
    text, rule, is_captured, tmp_path
):
    refusal = refuse(text, tmp_path, "config.py")
    assert rule in refusal
    assert ("capture" in refusal) == is_captured


def test_a_degree_of_a_trainer_that_nobody_knows_is_said_to_be_lost_without_its_option(tmp_path):
    assert "left out, its 4 is lost" in refuse(f"{TRAINING} --mesh-degree 4", tmp_path)
    assert "--expert-model-parallel-size" in refuse(f"{TRAINING} --expert-ep-size 4", tmp_path)


def test_an_option_of_several_values_is_asked_for_with_all_of_them(tmp_path):
    refusal = refuse(f"{TRAINING} --rampup-batch-size 64 64", tmp_path)
    assert '--set --rampup-batch-size="... ... ..."' in refusal


def test_a_program_of_another_package_is_said_to_be_planned_as_megatrons(tmp_path):
    tmp_path.joinpath("domino").mkdir()
    program = tmp_path / "pretrain_gpt.py"
    note = "pretrain_gpt.py beside the script runs domino, and is planned as Megatron-LM's own"
    for text, is_noted in (
        ("# of Megatron-LM\nimport torch\nfrom domino.training import pretrain\n", True),
        ("from domino.training import pretrain\nfrom megatron.core import x\n", False),
    ):
        program.write_text(text)
        assert (note in read(f"{TRAINING} --global-batch-size 8", tmp_path).notes) == is_noted


def test_a_schedule_of_a_branch_of_megatron_is_the_overlap_that_it_became(tmp_path):
    experts = "--num-experts 8 --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall"
    text = f"{TRAINING} {experts} --combined-1f1b --mtp-1f1b-overlap --bf16 --global-batch-size 8"
    job = interpret_launch(read(text, tmp_path), world_size=8, folder=tmp_path)
    assert Overlap.EP in job.layout.overlap


def test_an_overlap_of_shared_experts_that_the_model_has_not_is_none(tmp_path):
    experts = "--num-experts 8 --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall"
    text = f"{TRAINING} {experts} --moe-shared-expert-overlap --global-batch-size 8"
    for size, overlaps in (("", ()), (" --moe-shared-expert-intermediate-size 64", ("shared",))):
        job = interpret_launch(read(text + size, tmp_path), world_size=8, folder=tmp_path)
        assert job.layout.overlap == overlaps


def test_fsdp2_shards_whatever_the_checkouts_own_default_of_sharding_is(tmp_path):
    text = f"{TRAINING} --use-torch-fsdp2 --data-parallel-sharding-strategy no_shard --bf16"
    command = read(f"{text} --global-batch-size 8", tmp_path)
    assert interpret_launch(command, world_size=8, folder=tmp_path).layout.zero == 3


def test_a_program_that_takes_a_config_of_torchtitan_is_said_to_be_its(tmp_path):
    text = "torchrun --nproc_per_node 8 ./train.py --job.config_file ./train_configs/a.toml"
    assert "is torchtitan's" in refuse(text, tmp_path)
