"""What is said beside a script, and what its own checkout says of its options."""

import pytest

from moewright.api.launch_scripts import read_flags
from moewright.intake.megatron.directives import read_directives
from moewright.spec.errors import BadInput

SIZES = "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --max-position-embeddings 2048 "
REST = "--seq-length 2048 --micro-batch-size 1 --global-batch-size 64 --bf16 --vocab-size 32000 "
PARSER = """
def _add_logging_args(parser):
    group = parser.add_argument_group(title='logging')
    group.add_argument('--show-expert-load', action='store_true')
    return parser

def _add_mixture_args(parser):
    group = parser.add_argument_group(title='mixture')
    group.add_argument('--expert-warmth', type=int, default=7, help='of experts')
    group.add_argument('--expert-swap', action='store_true')
    return parser
"""


def write(folder, more="", before="", program="pretrain_gpt.py"):
    script = folder / "examples" / "run.sh"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f"{before}\ntorchrun --nproc_per_node 8 {program} {SIZES}{REST}{more}\n")
    return script


def refusal(script, **options):
    with pytest.raises(BadInput) as caught:
        read_flags(script, on="H100", **options)
    return caught.value.reasons[0]


# What a script leaves open, and the field of the plan that is then given.
OPEN = {
    "a variable": ("--tensor-model-parallel-size $TP", "", "2"),
    "an output": ("--tensor-model-parallel-size $(nvidia-smi -L | wc -l)", "", "2"),
    "an output in a variable": ("--tensor-model-parallel-size $TP", "TP=$(python size.py)", "2"),
    "a test": ("--tensor-model-parallel-size $A", "if [ $A -gt 0 ]; then export B=$A; fi", "2"),
    "an option of a fork": ("--lora-rank 8 --tensor-model-parallel-size 2", "", "null"),
    "a need": (
        "--tensor-model-parallel-size 2",
        '[ -z "$W" ] && echo "W_ is required" && exit',
        "2",
    ),
}


@pytest.mark.parametrize("case", OPEN)
def test_a_refusal_names_what_to_give_and_the_second_call_succeeds(case, tmp_path):
    more, before, value = OPEN[case]
    script = write(tmp_path, more, before.replace("W_", "WORK").replace("$W", "$WORK"))
    nearest = refusal(script).nearest
    assert nearest.startswith("--set ")
    text = nearest.removeprefix("--set ").replace("...", value)
    plan = read_flags(script, on="H100", overrides=[text]).plan
    assert plan.layout.tp == 2
    assert plan.model.layers == 8


def test_what_is_given_wins_over_the_script(tmp_path):
    script = write(tmp_path, "--tensor-model-parallel-size $TP --swiglu", "export TP=4")
    assert read_flags(script, on="H100").plan.layout.tp == 4
    texts = ["TP=2", "--num-layers=12", "--swiglu=null"]
    plan = read_flags(script, on="H100", overrides=texts).plan
    assert (plan.layout.tp, plan.model.layers, plan.model.gated) == (2, 12, False)
    for text in ("TP", "3=4", "--rope=null"):
        with pytest.raises(BadInput, match="--set"):
            read_flags(script, on="H100", overrides=[text])


def test_options_of_a_fork_are_looked_up_in_the_checkout_that_a_script_lies_in(tmp_path):
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    script = write(tmp_path, "--show-expert-load --expert-warmth 7")
    assert "sounds of experts" in refusal(script).rule
    (tmp_path / "megatron" / "training" / "arguments.py").write_text(PARSER)
    notes = " ".join(read_flags(script, on="H100").notes)
    assert "--show-expert-load" in notes
    assert "at their defaults: --expert-warmth" in notes
    for more in ("--expert-warmth 8", "--expert-swap"):
        reason = refusal(write(tmp_path, more))
        assert "the script's own checkout" in reason.rule
        assert reason.nearest == f"--set {more.split()[0]}=null"
    assert "known here" in refusal(write(tmp_path, "--expert-swop")).rule


@pytest.mark.parametrize(
    "program",
    [
        *("tools/convert_weights/model.py", "tasks/eval_for_gsm8k.py", "tools/split_tp.py"),
        *("tools/hf_roundtrip_test.py", "tools/run_text_generation_server.py"),
    ],
)
def test_a_program_that_trains_nothing_is_named(program, tmp_path):
    assert f"{program} trains no decoder" in refusal(write(tmp_path, program=program)).rule


def test_what_a_script_asks_of_slurm_is_what_its_job_is_told(tmp_path):
    lines = "#SBATCH --nodes=2 --gres=gpu:a100:4\n#SBATCH --ntasks-per-node 4\n#SBATCH -N 1-4\n"
    told = read_directives(lines)
    assert told["SLURM_NNODES"] == "2"
    assert told["SLURM_GPUS_ON_NODE"] == "4"
    assert told["SLURM_NTASKS"] == "8"
    script = tmp_path / "job.sbatch"
    ranks = "torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE pretrain_gpt.py "
    batch = "--global-batch-size $((SLURM_NNODES * 8))"
    script.write_text(f"{lines}{ranks}{SIZES}{REST}{batch}\n")
    plan = read_flags(script, on="H100").plan
    assert (plan.layout.world_size, plan.workload.global_batch) == (8, 16)
    script.write_text(f"{ranks}{SIZES}{REST}{batch}\n")
    reading = read_flags(script, on="16xH100")
    assert reading.plan.workload.global_batch == 16
    assert "SLURM_NNODES=2" in reading.notes[0]


# Ways to say how many processes start, in front of a program that is no launcher itself.
TASKS = {
    "srun -u -n16 -c2 python": 16,
    "srun -n 16 --ntasks-per-node=8 python": 16,
    "srun -N 2 --ntasks-per-node=8 python3 -u": 16,
    "mpirun -np 8 python": 8,
    "mpiexec -n 16 -ppn 8 python": 16,
}


@pytest.mark.parametrize("start", TASKS)
def test_a_scheduler_says_the_ranks_of_a_program_without_a_launcher(start, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(f"{start} pretrain_gpt.py {SIZES}{REST}\n")
    assert read_flags(script, on="H100").plan.layout.world_size == TASKS[start]
    with pytest.raises(BadInput, match="ranks"):
        read_flags(script, on="64xH100")


def test_a_command_in_a_word_of_any_launcher_is_read(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(f"bcprun -p 8 -c 'python main.py {SIZES}\\\n{REST}'\n")
    assert read_flags(script, on="64xH100").plan.workload.global_batch == 64


def test_keys_of_an_array_are_words(tmp_path):
    script = write(
        tmp_path, before='SIZES=(2 4)\nfor i in "${!SIZES[@]}"; do TP=${SIZES[$i]}; done'
    )
    text = script.read_text().replace(SIZES, f"{SIZES}--tensor-model-parallel-size $TP ")
    script.write_text(text)
    assert read_flags(script, on="H100").plan.layout.tp == 4


def test_a_model_with_an_encoder_is_refused_before_its_other_options(tmp_path):
    script = write(tmp_path, "--encoder-depth-parallel-size 2 --decoder-seq-length 128")
    assert refusal(script).field == "--decoder-seq-length"
    assert read_flags(write(tmp_path, "--decoder-seq-length 0"), on="H100").plan


def test_the_fork_that_knows_most_of_a_command_is_named(tmp_path):
    shared = "--moe-train-capacity-factor 2.0"
    assert "Pai" in refusal(write(tmp_path, shared)).rule
    own = "--create-moe-param-group --moe-min-capacity 4 --deepspeed-activation-checkpointing"
    assert "Megatron-DeepSpeed" in refusal(write(tmp_path, f"{shared} {own}")).rule


def test_deepspeed_asks_for_no_hardware_queues(tmp_path):
    queues = "export CUDA_DEVICE_MAX_CONNECTIONS=1"
    script = write(tmp_path, "--deepspeed --zero-stage 2", queues)
    assert read_flags(script, on="H100").plan.layout.zero == 2


KINDS = {
    "titan.toml": "[parallelism]\ntensor_parallel_degree = 2\n[model]\nflavor = '8B'\n",
    "titan.json": '{"parallelism": {"tensor_parallel_degree": 2}}',
    "broken.toml": "[parallelism\n",
    "recipe.py": "import torch\n",
}


@pytest.mark.parametrize("name", KINDS)
def test_a_file_that_is_no_script_is_named_for_what_it_is(name, tmp_path):
    path = tmp_path / name
    path.write_text(KINDS[name])
    told = str(refusal(path).rule)
    assert "starts pretrain_gpt.py" not in told
    assert any(word in told for word in ("torchtitan", "not TOML", "a program"))


def test_what_accelerate_hands_to_megatron_is_read_with_the_model_beside_it(tmp_path):
    path = tmp_path / "accelerate.yaml"
    path.write_text(
        "distributed_type: MEGATRON_LM\nmixed_precision: bf16\nnum_processes: 8\n"
        "megatron_lm_config:\n  megatron_lm_tp_degree: 2\n  megatron_lm_pp_degree: 2\n"
        "  megatron_lm_num_micro_batches: 4\n  megatron_lm_sequence_parallelism: true\n"
        "  megatron_lm_recompute_activations: true\n"
        "  megatron_lm_use_distributed_optimizer: true\n"
    )
    assert refusal(path).field == "--num-layers"
    given = ["--micro-batch-size=2", "--seq-length=4096"]
    plan = read_flags(path, on="H100", model="Llama-2-7b", overrides=given).plan
    layout = plan.layout
    assert (layout.tp, layout.pp, layout.sp, layout.zero) == (2, 2, True, 1)
    assert plan.workload.global_batch == 2 * layout.dp * 4
    assert {tensor.value for tensor in layout.recompute} == {"core_attn"}


def test_a_layout_of_stages_is_read_behind_the_escapes_of_a_shell(tmp_path):
    path = tmp_path / "model_config.yaml"
    options = dict(
        pair.split(" ", 1) for pair in (SIZES + REST).strip().split(" --") if " " in pair
    )
    lines = [f"  --{name.lstrip('-')}: {value}" for name, value in options.items()]
    stages = r"Et*2\\|\\(tt\\|\\)*2t\\*2L"
    lines += ["  --bf16: true", "  --pipeline-model-parallel-size: 4"]
    lines += [f"  --pipeline-model-parallel-layout: {stages}"]
    path.write_text("MODEL_ARGS:\n" + "\n".join(lines) + "\n")
    layout = read_flags(path, on="64xH100").plan.layout
    assert (layout.pp, layout.stages) == (4, "Et*2|(tt|)*2t*2L")


def test_srun_starts_as_many_tasks_as_the_job_has(tmp_path):
    script = tmp_path / "run.slurm"
    head = "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=4\n"
    script.write_text(f"{head}srun python pretrain_gpt.py {SIZES}{REST}\n")
    assert read_flags(script, on="H100").plan.layout.world_size == 16
    with pytest.raises(BadInput, match="4 x 4 = 16 ranks"):
        read_flags(script, on="64xH100")
    script.write_text(f"{head}srun torchrun --nproc_per_node=$N pretrain_gpt.py {SIZES}{REST}\n")
    with pytest.raises(BadInput, match="needs a count"):
        read_flags(script, on="H100")


def test_a_sourced_file_knows_where_it_lies_and_what_stands_before_source(tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    (models / "base.sh").write_text("SIZE=${SIZE_OF:-2}\n")
    own = '"$(dirname -- "${BASH_SOURCE[0]}")/base.sh"'
    (models / "wide.sh").write_text(f"SIZE_OF=4 source {own}\n")
    script = write(tmp_path, "--tensor-model-parallel-size $SIZE", 'source "../models/wide.sh"')
    script.write_text(script.read_text() + 'echo "${SIZE_OF:?}"\n')
    assert read_flags(script, on="H100").plan.layout.tp == 4


def test_a_schedule_of_batches_ends_with_the_batch_that_is_given(tmp_path):
    schedule = '--train-samples 4096 --step-batch-size-schedule "0:32 1M:64"'
    assert read_flags(write(tmp_path, schedule), on="H100").plan.workload.global_batch == 64
    script = write(tmp_path, schedule.replace("1M:64", "1M:128"))
    assert refusal(script).nearest == "128"


def test_options_of_megatron_before_2021_are_named_together(tmp_path):
    script = write(tmp_path, "--model-parallel-size 2 --warmup .01")
    with pytest.raises(BadInput) as caught:
        read_flags(script, on="H100")
    assert [reason.nearest for reason in caught.value.reasons] == [
        "--tensor-model-parallel-size",
        "--lr-warmup-fraction",
    ]
