"""Configurations of frameworks on Megatron-core, read as the launch commands they stand for."""

from pathlib import Path

import pytest

from megatron_cases import build_plan
from moewright.api.launch_scripts import plan_launch, read_flags
from moewright.codec import format_layout
from moewright.codec.yaml_text import parse_yaml
from moewright.exporters.megatron.script import all_flags, environment_variables
from moewright.intake.megatron.read import interpret_launch, read_launch
from moewright.intake.megatron.settings import read_settings, resolve_references
from moewright.spec.errors import BadInput
from moewright.spec.layout import Layout
from moewright.spec.plan import Plan
from moewright.spec.workload import Dtype, Workload

OPTIONS = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  # The comment is none of the options.
  --num-layers: 4
  --hidden-size: 64
  --num-attention-heads: 4
  --vocab-size: 1000
  --seq-length: ${SEQ_LEN:-128}
  --micro-batch-size: 1
  --global-batch-size: ${GBS}
  --num-experts: 8
  --moe-router-topk: 2
  --moe-layer-freq: ([0]*1+[1]*3)
  --moe-router-pre-softmax: false
  --moe-grouped-gemm: ${GROUPED}
  --expert-model-parallel-size: 2
  --recompute-granularity: selective
  --recompute-modules: "[moe_act layernorm]"
  --lr: 1e-4
  --bf16: true
TEST_TYPE: regular
"""
VERL = """
TP=2
python3 -m verl.trainer.main_ppo model_engine=megatron \\
    data.max_prompt_length=1024 data.max_response_length=3072 \\
    actor_rollout_ref.model.path=/models/Qwen3-30B-A3B-Base \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.rollout.n=8 \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${TP} \\
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=4 \\
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \\
    actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=null \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \\
    ++actor_rollout_ref.actor.megatron.override_transformer_config.shiny_new_thing=True \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=8 \\
    trainer.n_gpus_per_node=8 trainer.nnodes=2
"""
BASE = """
policy:
  train_micro_batch_size: 1
  max_total_sequence_length: 4096
  precision: bfloat16
  megatron_cfg:
    activation_checkpointing: false
    recompute_granularity: full
    sequence_parallel: false
    tensor_model_parallel_size: 1
    moe_token_dispatcher_type: alltoall
    bias_activation_fusion: True
cluster: {gpus_per_node: 1, num_nodes: 1}
"""
SLIME = """
NVLINK=$(nvidia-smi topo -m | grep -o NV | wc -l)
if [ "$NVLINK" -gt 0 ]; then HAS=1; else HAS=0; fi
FREQ=(0 1 1 1)
printf -v MOE_LAYER_FREQ "[%s]" "$(IFS=', '; echo "${FREQ[*]}")"
ENV="{\\"env_vars\\": {\\"CUDA_DEVICE_MAX_CONNECTIONS\\": \\"1\\", \\"NVLS\\": \\"${HAS}\\"}}"
ray job submit --address=http://127.0.0.1:8265 --runtime-env-json="${ENV}" -- python3 train.py \\
  --actor-num-nodes 2 --actor-num-gpus-per-node 8 --colocate --num-layers 4 --hidden-size 64 \\
  --num-attention-heads 4 --vocab-size 1000 --num-experts 8 --moe-router-topk 2 \\
  --moe-layer-freq "$MOE_LAYER_FREQ" --expert-model-parallel-size 8 --global-batch-size 256 \\
  --context-parallel-size 2 --rollout-batch-size 32 --use-dynamic-batch-size \\
  --max-tokens-per-gpu 2048
"""


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_options_in_yaml_are_those_of_a_script(tmp_path):
    """Switches that are false are left out, and variables come from the environment."""
    environment = {"GBS": "16", "GROUPED": "true"}
    command = read_launch(write(tmp_path, OPTIONS), environment)
    job = interpret_launch(command, world_size=4, folder=tmp_path)
    assert command.exported == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert job.model.moe_layers == (False, True, True, True)
    assert not job.model.moe.router.pre_softmax
    assert format_layout(job.layout).startswith("tp1,pp1,ep2,mbs1,")
    assert set(job.layout.recompute) == {"moe_act", "layernorm"}
    assert (job.workload.seq_len, job.workload.global_batch) == (128, 16)
    assert job.workload.precision is Dtype.BF16


def test_the_words_of_older_configurations_of_megatron_are_read(tmp_path):
    text = (Path(__file__).parent / "configurations/megatron.yaml").read_text()
    path = tmp_path / "gpt_config.yaml"
    more = "scatter_gather_tensors_in_pipeline: true\nretriever_seq_length: 256\n"
    path.write_text(more + text)
    plain = tmp_path / "plain.yaml"
    plain.write_text(text)
    assert read_flags(path, on="8xH100").plan == read_flags(plain, on="8xH100").plan


def test_a_variable_that_is_not_set_is_named(tmp_path):
    path = write(tmp_path, OPTIONS)
    with pytest.raises(BadInput, match="--moe-grouped-gemm: takes the value of GROUPED"):
        read_launch(path, {"GBS": "16"})
    command = read_launch(path, {"GROUPED": "false"})
    with pytest.raises(BadInput, match="--global-batch-size: takes the value of GBS"):
        interpret_launch(command, world_size=4, folder=tmp_path)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3"])
def test_the_options_of_a_plan_come_back_out_of_yaml(name, tmp_path):
    layout = Layout(world_size=16, ep=8, mbs=1)
    plan = build_plan(name, layout, Workload(seq_len=2048, global_batch=64, steps=50))
    lines = [f"  {key}: {' '.join(values) or 'true'}\n" for key, *values in all_flags(plan)]
    variables = [f"  {key}: {value}\n" for key, value in environment_variables(layout)]
    text = "".join(("ENV_VARS:\n", *variables, "MODEL_ARGS:\n", *lines))
    command = read_launch(write(tmp_path, text), {})
    again = plan_launch(command, tmp_path / "run.yaml", model="", on="16xH100").plan
    assert (again.model, again.layout) == (plan.model, plan.layout)
    assert again.workload == plan.workload


def test_overrides_behind_a_file_win(tmp_path):
    text = (
        "recipe: qwen3_30b_a3b_pretrain_config\n"
        "model: {tensor_model_parallel_size: 2, sequence_parallel: true, seq_length: 4096}\n"
        "train: {micro_batch_size: 1, global_batch_size: 64, train_iters: 10}\n"
        "mixed_precision: bf16_with_mxfp8_mixed\n"
        "comm_overlap: {overlap_grad_reduce: null}\n"
        "logger: {log_interval: 1}\n"
    )
    path = write(tmp_path, text)
    reading = read_flags(path, on="16xB200", arguments="model.expert_model_parallel_size=8 a.b=c")
    plan = reading.plan
    assert plan.model.name == "Qwen/Qwen3-30B-A3B"
    assert (plan.layout.tp, plan.layout.ep, plan.layout.sp) == (2, 8, True)
    assert plan.workload.precision is Dtype.MXFP8
    assert any(
        "recipe qwen3_30b_a3b_pretrain_config itself is not read" in n for n in reading.notes
    )


def test_a_whole_configuration_of_bridge_says_the_model_by_its_sizes(tmp_path):
    """The values of a dump: dtypes as what makes them, stages as lists, nulls for what is off."""
    text = """
_target_: megatron.bridge.training.config.ConfigContainer
model:
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
  activation_func: {_call_: false, _target_: torch.nn.functional.silu}
  add_bias_linear: false
  gated_linear_unit: true
  fp8: null
  fp8_recipe: delayed
  hidden_size: 2048
  kv_channels: 128
  layernorm_epsilon: 1.0e-06
  ffn_hidden_size: 6144
  moe_ffn_hidden_size: 768
  moe_router_topk: 8
  moe_grouped_gemm: true
  moe_layer_freq: 1
  normalization: RMSNorm
  num_attention_heads: 32
  num_layers: 48
  num_moe_experts: 128
  num_query_groups: 4
  position_embedding_type: rope
  qk_layernorm: true
  rotary_base: 1000000.0
  share_embeddings_and_output_weights: false
  seq_length: 4096
  vocab_size: 151936
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: 2
  pipeline_model_parallel_layout:
  - [embedding, decoder, decoder, decoder, decoder, decoder, decoder, decoder, decoder, decoder,
     decoder, decoder, decoder]
  - [decoder, decoder, decoder, decoder, decoder, decoder, decoder, decoder, decoder, decoder,
     decoder, decoder]
  - [decoder, decoder, decoder, decoder, decoder, decoder, decoder, decoder, decoder, decoder,
     decoder, decoder]
  - [decoder, decoder, decoder, decoder, decoder, decoder, decoder, decoder, decoder, decoder,
     decoder, decoder, loss]
  expert_model_parallel_size: 8
  brand_new_thing: 7
train: {micro_batch_size: 1, global_batch_size: 64, train_iters: 10}
optimizer:
  optimizer: adam
  use_precision_aware_optimizer: true
  exp_avg_dtype: {_call_: false, _target_: torch.bfloat16}
  exp_avg_sq_dtype: {_call_: false, _target_: torch.bfloat16}
  min_lr: 0.0
  lr: 0.0003
ddp: {use_distributed_optimizer: true, grad_reduce_in_fp32: false, overlap_grad_reduce: true}
mixed_precision: {bf16: true, fp8: hybrid, fp8_recipe: tensorwise}
"""
    reading = read_flags(write(tmp_path, text), on="16xH100")
    plan = reading.plan
    assert plan.model.name == "Qwen/Qwen3-30B-A3B"
    assert (plan.layout.pp, plan.layout.vpp, plan.layout.ep) == (2, 2, 8)
    assert plan.workload.precision is Dtype.FP8
    assert plan.workload.grad_dtype is Dtype.BF16
    assert plan.workload.optimizer.moment_dtype is Dtype.BF16
    assert any(note == "not read: model.brand_new_thing" for note in reading.notes)
    with pytest.raises(BadInput, match=r"model\.brand_new_thing"):
        read_flags(tmp_path / "run.yaml", on="16xH100", strict=True)
    with pytest.raises(BadInput, match=r"model\.moe_cache=7: is no setting .* sounds of experts"):
        read_flags(tmp_path / "run.yaml", on="16xH100", arguments="model.moe_cache=7")


def plan_script(path: Path) -> tuple[Plan, tuple[str, ...]]:
    reading = read_flags(path, on="H100")
    return reading.plan, reading.notes


def test_an_actor_of_verl_is_planned_on_packs_of_full_texts(tmp_path):
    """128 texts of 4,096 tokens: two in a pack of 8,192, so that 64 packs are an update."""
    plan, notes = plan_script(write(tmp_path, VERL, "run.sh"))
    assert plan.model.name == "Qwen/Qwen3-30B-A3B"
    assert (plan.layout.world_size, plan.layout.tp, plan.layout.ep, plan.layout.etp) == (
        16,
        2,
        4,
        1,
    )
    assert (plan.workload.seq_len, plan.workload.global_batch) == (8192, 64)
    assert format_layout(plan.layout).endswith("recompute=full")
    assert any(note.startswith("an update of 128 texts is planned as 64 packs") for note in notes)
    assert any("shiny_new_thing" in note for note in notes)


def test_nemo_rl_reads_the_files_it_builds_on(tmp_path):
    """Recomputation counts where checkpointing is on; the child wins over its parent."""
    write(tmp_path, BASE, "base.yaml")
    text = (
        "defaults: base.yaml\n"
        "policy:\n  model_name: moonshotai/Moonlight-16B-A3B-Instruct\n"
        "  train_global_batch_size: 64\n"
        "  megatron_cfg: {expert_model_parallel_size: 4, pipeline_model_parallel_size: 3}\n"
        "cluster: {gpus_per_node: 8, num_nodes: 3}\n"
    )
    path = write(tmp_path, text)
    reading = read_flags(path, on="H100")
    assert reading.plan.model.name == "moonshotai/Moonlight-16B-A3B"
    assert (reading.plan.layout.world_size, reading.plan.layout.pp) == (24, 3)
    assert "recompute" not in format_layout(reading.plan.layout)
    words = "policy.megatron_cfg.activation_checkpointing=true"
    assert "recompute=full" in format_layout(
        read_flags(path, on="H100", arguments=words).plan.layout
    )


def test_primus_overrides_stand_on_a_model_by_name(tmp_path):
    text = (
        "modules:\n  pre_trainer:\n    framework: megatron\n"
        "    model: ${PRIMUS_MODEL:qwen3_30B_A3B}.yaml\n"
        "    overrides: {micro_batch_size: 2, global_batch_size: 256, fp8: hybrid,\n"
        "      seq_length: '${PRIMUS_SEQ_LENGTH:4096}', expert_model_parallel_size: 8,\n"
        "      moe_router_force_load_balancing: true, lr_decay_iters: null, use_turbo: true,\n"
        "      activation_func: swiglu}\n"
    )
    plan = read_flags(write(tmp_path, text), on="8xMI300X").plan
    assert plan.model.name == "Qwen/Qwen3-30B-A3B"
    assert (plan.layout.ep, plan.layout.mbs, plan.workload.seq_len) == (8, 2, 4096)
    assert plan.workload.precision is Dtype.FP8


def test_an_actor_of_slime_is_planned_on_packs(tmp_path):
    """What Ray is told to export counts; the pack is shared by the ranks of a context."""
    reading = read_flags(write(tmp_path, SLIME, "run.sh"), on="H100")
    plan = reading.plan
    assert (plan.layout.world_size, plan.layout.cp, plan.layout.ep) == (16, 2, 8)
    assert (plan.workload.seq_len, plan.workload.global_batch) == (4096, 256)
    assert plan.model.moe_layers == (False, True, True, True)
    assert not any("CUDA_DEVICE_MAX_CONNECTIONS" in note for note in reading.notes)


def test_layers_that_a_plugin_builds_need_the_name_of_the_model(tmp_path):
    text = SLIME.rstrip() + " --spec slime_plugins.models.qwen3_next get_spec\n"
    with pytest.raises(BadInput, match="name the model in front"):
        read_flags(write(tmp_path, text, "run.sh"), on="H100")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\n", "is not YAML"),
        ("- 1\n", "is no configuration: a mapping"),
        ("a: !!python/object:os.system {}\n", "could not determine a constructor"),
        ("a: " + "[" * 5000 + "]" * 5000 + "\n", "nested too deeply"),
        ("MODE: inference\nMODEL_ARGS:\n  --num-layers: 2\n", "generates text and trains nothing"),
        (
            "actor_rollout_ref: {actor: {strategy: veomni}, model: {path: Qwen/Qwen3-8B}}\n",
            "its actor trains by FSDP or VeOmni",
        ),
        ("weather: fine\n", "bears the marks of none that is read here"),
        ("MODEL_ARGS:\n  --bf16: perhaps\n", "--bf16=perhaps: must be true or false"),
        ("defaults: run.yaml\nmodel: {num_layers: 2}\n", "parents above each other"),
        ("model: {num_layers: 2}\n", "bears the marks of none that is read here"),
        (
            "model: {num_layers: 2, sequence_parallel: '${SP}'}\ntrain: {train_iters: 2}\n",
            "must be true or false",
        ),
    ],
)
def test_what_is_no_configuration_is_refused_in_one_line(text, message, tmp_path):
    with pytest.raises(BadInput) as caught:
        read_launch(write(tmp_path, text), {})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_scalars_stay_the_text_that_somebody_wrote():
    data = parse_yaml("a: 1e-5\nb: on\nc: &x {d: 010}\ne:\n  <<: *x\n  f: ~\n", where="text")
    assert data == {"a": "1e-5", "b": "on", "c": {"d": "010"}, "e": {"d": "010", "f": "~"}}


def _alias_tens(merge: str) -> str:
    """Return a line for each level of ten aliases of the level below: 10^12 values."""
    levels = "".join(
        f"a{level}: &a{level} {merge.format(','.join([f'*a{level - 1}'] * 10))}\n"
        for level in range(1, 12)
    )
    return f"a0: &a0 {{k: 1}}\n{levels}"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (_alias_tens("[{}]"), "repeat more than 100,000 values"),
        (_alias_tens("{{<<: [{}]}}"), "repeat more than 100,000 values"),
        ("a: &a [1, *a]\n", "has an alias of itself at line 1"),
        ("a: &a\n  <<: *a\n", "has an alias of itself at line 1"),
    ],
)
def test_aliases_that_grow_without_end_are_refused(text: str, rule: str) -> None:
    with pytest.raises(BadInput, match=rule):
        parse_yaml(text, where="text")


def test_an_alias_may_stand_in_many_places() -> None:
    data = parse_yaml("a: &a [1]\nb: [*a, *a]\nc: {d: *a, e: [*a]}\n", where="text")
    assert data == {"a": ["1"], "b": [["1"], ["1"]], "c": {"d": ["1"], "e": [["1"]]}}


def test_references_that_double_each_other_are_refused() -> None:
    settings = {"a0": "x"} | {f"a{level}": f"${{a{level - 1}}}" * 20 for level in range(1, 60)}
    with pytest.raises(BadInput, match="stand for more than 16,777,216 characters"):
        resolve_references(settings, {})


def test_parents_that_each_name_ten_parents_are_refused(tmp_path: Path) -> None:
    for level in range(7):
        parents = [f"f{level + 1}.yaml"] * 10
        (tmp_path / f"f{level}.yaml").write_text(f"defaults: {parents}\na: {level}\n")
    (tmp_path / "f7.yaml").write_text("b: 7\n")
    with pytest.raises(BadInput, match=r"f0\.yaml: builds on more than 200 files"):
        read_settings(tmp_path / "f0.yaml")


def test_packs_of_nemo_rl_hold_as_many_full_texts_as_go_into_them(tmp_path):
    text = (
        "policy:\n  model_name: Qwen/Qwen3-30B-A3B\n  train_global_batch_size: 64\n"
        "  train_micro_batch_size: 1\n  max_total_sequence_length: 2048\n"
        "  sequence_packing: {enabled: true, train_mb_tokens: 4096}\n"
        "  megatron_cfg: {enabled: true, expert_model_parallel_size: 8,\n"
        "    fp8_cfg: {enabled: false, fp8: hybrid}}\n"
        "cluster: {gpus_per_node: 8, num_nodes: 1}\n"
    )
    path = write(tmp_path, text)
    plan = read_flags(path, on="H100").plan
    assert (plan.workload.seq_len, plan.workload.global_batch) == (4096, 32)
    assert plan.workload.precision is Dtype.BF16
    words = "policy.megatron_cfg.fp8_cfg.enabled=true"
    assert read_flags(path, on="H100", arguments=words).plan.workload.precision is Dtype.FP8


def test_a_batch_of_slime_is_its_rollout_over_its_steps(tmp_path):
    text = SLIME.replace("--global-batch-size 256", "--n-samples-per-prompt 8").rstrip()
    text += " --num-steps-per-rollout 2\n"
    plan = read_flags(write(tmp_path, text, "run.sh"), on="H100").plan
    assert plan.workload.global_batch == 32 * 8 // 2


def test_offload_inside_a_recomputed_moe_moves_nothing_and_says_so(tmp_path):
    text = OPTIONS.replace('"[moe_act layernorm]"', '"[moe]"').replace(
        "TEST_TYPE",
        "  --fine-grained-activation-offloading: true\n  --offload-modules: expert_fc1\nT",
    )
    command = read_launch(write(tmp_path, text), {"GBS": "16", "GROUPED": "true"})
    job = interpret_launch(command, world_size=4, folder=tmp_path)
    assert not job.layout.offload
    assert any("expert_fc1 moves nothing" in note for note in job.notes)


CONFIGURATIONS = Path(__file__).parent / "configurations"


def test_a_model_of_mindspeed_rl_is_the_one_that_its_actor_names(tmp_path):
    plan, _ = plan_script(CONFIGURATIONS / "mindspeed_rl.yaml")
    assert (plan.model.layers, plan.model.vocab_size) == (8, 4096)
    assert format_layout(plan.layout).startswith("tp2,pp2,ep4,etp2,mbs2")
    assert (plan.workload.seq_len, plan.workload.global_batch) == (2048, 128)


def test_a_policy_of_skyrl_is_planned_on_full_texts(tmp_path):
    """What SkyRL does where a configuration is silent is its own: everything is recomputed."""
    plan, _ = plan_script(CONFIGURATIONS / "skyrl.yaml")
    layout = format_layout(plan.layout)
    assert layout.startswith("tp2,pp2,ep4,mbs2")
    assert "recompute=full" in layout
    assert (plan.workload.seq_len, plan.workload.global_batch) == (4096, 256)


VERL_NAMED = """
"${BIN}python3" -m verl.trainer.main_ppo --config-path=config \\
    --config-name='{name}' data.max_prompt_length=1024 data.max_response_length=3072 \\
    actor_rollout_ref.model.path=/models/Qwen3-30B-A3B-Base \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.rollout.n=8 {words} \\
    trainer.n_gpus_per_node=8 trainer.nnodes=2
"""


def test_a_configuration_of_verl_that_a_command_names_is_read_with_the_files_below_it(tmp_path):
    config = tmp_path / "verl/trainer/config"
    (config / "actor").mkdir(parents=True)
    (config / "engine").mkdir()
    write(
        config,
        "defaults:\n  - actor@actor_rollout_ref.actor: core\n  - _self_\n",
        "my_megatron.yaml",
    )
    write(
        config / "actor",
        "defaults:\n  - ../engine@megatron: core\nstrategy: megatron\n",
        "core.yaml",
    )
    write(config / "engine", "tensor_model_parallel_size: 4\n", "core.yaml")
    (tmp_path / "examples").mkdir()
    text = VERL_NAMED.replace("{name}", "my_megatron").replace("{words}", "")
    plan, _ = plan_script(write(tmp_path / "examples", text, "run.sh"))
    assert plan.layout.tp == 4


def test_verls_own_configuration_is_known_and_another_is_asked_for(tmp_path):
    text = VERL_NAMED.replace("{name}", "ppo_megatron_trainer.yaml").replace("{words}", "")
    plan, _ = plan_script(write(tmp_path, text, "run.sh"))
    assert (plan.layout.tp, plan.layout.pp) == (1, 1)
    with pytest.raises(BadInput, match=r"may be in what my_megatron\.yaml sets"):
        plan_script(write(tmp_path, text.replace("ppo_megatron_trainer", "my_megatron"), "run.sh"))


def test_settings_that_others_refer_to_are_read_with_them(tmp_path):
    text = BASE.replace(
        "policy:\n", "policy:\n  model_name: Qwen/Qwen3-30B-A3B\n  tp_parallel_size: 2\n"
    )
    text = text.replace(
        "tensor_model_parallel_size: 1", "tensor_model_parallel_size: ${policy.tp_parallel_size}"
    )
    text = text.replace("num_nodes: 1", "num_nodes: 8")
    text = text.replace("sequence_parallel: false", "sequence_parallel: true")
    plan, notes = plan_script(write(tmp_path, text))
    assert plan.layout.tp == 2
    assert not any("tp_parallel_size" in note for note in notes)


SWIFT = (
    "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen2.5-7B --tensor_model_parallel_size 2 "
    "--micro_batch_size 2 --global_batch_size 64 --max_length 4096 --sequence_parallel true"
)


@pytest.mark.parametrize(
    ("word", "recompute"),
    [("", "recompute=core_attn"), ("none", ""), ("selective", "recompute=core_attn")],
)
def test_the_word_none_of_a_framework_is_no_silence(word, recompute, tmp_path):
    """ms-swift recomputes selectively where nothing is said, and nothing at `none`."""
    words = f"{SWIFT} --recompute_granularity {word}" if word else SWIFT
    plan, _ = plan_script(write(tmp_path, words, "run.sh"))
    layout = format_layout(plan.layout)
    assert ("recompute" in layout) == bool(recompute)
    assert recompute in layout


def test_cores_own_fields_are_known_where_a_framework_takes_them(tmp_path):
    added = "++actor_rollout_ref.actor.megatron.override_transformer_config.persist_layer_norm=True"
    plain = VERL.replace("    trainer.n_gpus", f"    {added} \\\n    trainer.n_gpus")
    plan, notes = plan_script(write(tmp_path, plain, "run.sh"))
    assert plan.layout.tp == 2
    assert not any("persist_layer_norm" in note for note in notes)


ROLL_SEQUENCE = "      sequence_parallel: true\n"


def test_the_devices_of_roll_are_counted(tmp_path):
    text = (CONFIGURATIONS / "roll.yaml").read_text() + ROLL_SEQUENCE
    path = write(tmp_path, f"{text}  device_mapping: list(range(0, 32))\n")
    assert plan_script(path)[0].layout.world_size == 32


def test_a_file_of_the_same_package_stands_beside_the_other_settings(tmp_path):
    text = (CONFIGURATIONS / "roll.yaml").read_text() + ROLL_SEQUENCE
    length = "prompt_length: 512\nresponse_length: 1536\n"
    write(tmp_path, length, "lengths.yaml")
    own = text.replace(length, "")
    path = write(tmp_path, f"defaults:\n  - lengths@_here_\n{own}")
    assert read_flags(path, on="16xH100").plan.workload.seq_len == 2048


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${oc.decode:${oc.env:SIZE,4}}", "4"),
        ("${oc.decode:${oc.env:SIZE}}", "\0SIZE\0"),
        ("${multiply:2,${oc.decode:${oc.env:SIZE,4}}}", "8"),
        ("${multiply:2,${oc.env:SIZE}}", "\0SIZE\0"),
        ("${ceil_div:9,4}", "3"),
        ("${if:${eq:1,${oc.env:SIZE}},3,4}", "\0SIZE\0"),
        ("${if:true,3,4}", "\0if\0"),
        ("${SIZE:-4}", "4"),
        ("${SIZE:4}", "4"),
    ],
)
def test_what_a_reference_computes_is_its_value_or_unknown(text, value):
    assert resolve_references({"a": text}, {})["a"] == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("MODEL_ARGS:\n  --num-layers: 24\n  --bert-no-binary-head: true\n", "BERT"),
        ("model:\n  patch_dim: 16\n  num_classes: 1000\n  num_layers: 12\n", "no decoder"),
        ("mcore_gpt: true\nencoder_seq_length: 8192\nnum_layers: 80\n", "section `model`"),
    ],
)
def test_a_file_of_another_model_or_of_a_part_is_named_as_that(text, said, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=said):
        read_flags(path, on="64xH100")
