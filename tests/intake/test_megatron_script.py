"""Scripts written by this exporter, and scripts as people write them, read back into jobs."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_cases import (
    REFUSED_MODELS,
    as_read,
    as_written,
    build_plan,
    catalogue_model,
    layouts,
    refusals,
    workloads,
)
from moewright.codec import fingerprint, parse_layout
from moewright.exporters.kubernetes import render_train_job
from moewright.exporters.megatron.script import render_megatron_script
from moewright.exporters.slurm import render_slurm_script
from moewright.intake import catalogue
from moewright.intake.megatron.overrides import parse_script_overrides
from moewright.intake.megatron.read import interpret_launch, read_launch
from moewright.rules.job import Job
from moewright.rules.limits.legality import check_legality
from moewright.spec.errors import BadInput
from moewright.spec.layout import (
    CudaGraphScope,
    DispatcherKind,
    Layout,
    Offload,
    Overlap,
    RankOrder,
    Recompute,
)
from moewright.spec.workload import (
    AmaxComputeAlgo,
    CheckpointSpec,
    DataSpec,
    DelayedScalingSpec,
    DocumentMasking,
    Dtype,
    LossSpec,
    LrDecay,
    MatrixUpdate,
    MuonScale,
    MuonSpec,
    OptimizerSpec,
    RouterTraining,
    SaveMode,
    TensorScaling,
    Workload,
)

PLAIN = Workload(seq_len=2048, global_batch=64, steps=50)
EXPORTED = sorted(set(catalogue.model_names()) - set(REFUSED_MODELS))


def back(text, folder, *, world=None, named=None, name="run.sh", **environment):
    script = Path(folder) / name
    script.write_text(text)
    command = read_launch(script, environment)
    return interpret_launch(
        command, world_size=world or command.world_size, folder=Path(folder), named_model=named
    )


@pytest.mark.parametrize("name", EXPORTED)
def test_every_model_of_the_catalogue_is_the_same_after_export_and_import(name, tmp_path):
    """A plan that is read back is the plan.

    Fingerprints cover model, workload, hardware and layout.
    """
    layout = parse_layout(
        "tp2,ep4,mbs2" if catalogue_model(name).moe else "tp2,mbs2", world_size=16
    )
    plan = build_plan(name, layout, PLAIN)
    result = back(render_megatron_script(plan), tmp_path)
    again = fingerprint(result.model, result.workload, plan.hardware, result.layout)
    assert again == fingerprint(plan.model, plan.workload, plan.hardware, plan.layout)


@pytest.mark.core
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_layout_and_workload_is_the_same_after_export_and_import(tmp_path_factory, data):
    name = data.draw(st.sampled_from(EXPORTED))
    layout = data.draw(layouts(catalogue_model(name).moe is not None))
    workload = data.draw(workloads())
    assume(not check_legality(Job(model=catalogue_model(name), workload=workload, layout=layout)))
    if catalogue_model(name).moe is None:  # what trains a router says nothing then
        workload = replace(workload, loss=LossSpec(), router=RouterTraining())
    plan = build_plan(name, layout, workload)
    assume(not refusals(plan))
    folder = tmp_path_factory.mktemp("script")
    forms = {
        "run.sh": render_megatron_script(plan),
        "run.slurm": render_slurm_script(plan, job="", run_dir="."),
        "job.yaml": render_train_job(plan, job="", run_dir=".", image="trainer"),
    }
    expected = (plan.model, as_read(layout), as_written(plan).workload)
    for name, text in forms.items():
        result = back(str(text), folder, name=name)
        assert (result.model, result.layout, result.workload) == expected, name


def test_a_config_of_deepspeed_that_the_script_writes_tells_its_stage(tmp_path):
    head = 'STAGE=3\ncat <<EOT > ds.json\n{"zero_optimization": {"stage": $STAGE}}\nEOT\n'
    more = "--deepspeed --deepspeed_config ./ds.json"
    assert back(head + QWEN, tmp_path, EP="8", MORE=more, QUEUES="32").layout.zero == 3
    with pytest.raises(BadInput, match=r"--deepspeed_config .*: is not JSON"):
        back(head.replace('{"zero', "{zero") + QWEN, tmp_path, EP="8", MORE=more, QUEUES="32")


def test_what_only_running_tells_is_no_variable_to_set(tmp_path):
    text = QWEN.replace("--num-layers 48", "--num-layers $(( $(nvidia-smi -L) * 4 ))")
    with pytest.raises(BadInput, match="--num-layers: depends on what nvidia-smi prints"):
        back(text, tmp_path, EP="8")


def test_messages_of_virtual_stages_that_do_not_overlap_get_a_note(tmp_path):
    """A layout as the search writes it comes back as it is; Megatron-LM overlaps them by itself."""
    plan = build_plan("Qwen/Qwen3-32B", parse_layout("pp4,vpp2", world_size=8), PLAIN)
    script = render_megatron_script(plan)
    usual = back(script, tmp_path)
    assert usual.layout == plan.layout
    option = "--no-overlap-p2p-communication"
    alone = back(f"{script.rstrip()} {option}\n", tmp_path)
    assert alone.layout == plan.layout
    assert [note for note in alone.notes if note not in usual.notes] == [
        f"{option} is planned as what Megatron-LM does without: messages overlap"
    ]


def test_what_a_job_says_beyond_a_plan_comes_back_too(tmp_path):
    workload = Workload(
        seq_len=2048,
        global_batch=64,
        steps=500,
        seed=7,
        precision=Dtype.FP16,
        eval_every_steps=50,
        eval_batches=3,
        optimizer=OptimizerSpec(
            lr=1e-4, min_lr_fraction=0.05, warmup_steps=20, decay_steps=400, beta2=0.98, clip_norm=0
        ),
        data=DataSpec(
            train="data/train", heldout="data/held out", documents=DocumentMasking.RESTARTED
        ),
        checkpoint=CheckpointSpec(every_steps=100, mode=SaveMode.ASYNC),
    )
    plan = build_plan("Qwen/Qwen3-0.6B", Layout(world_size=8), workload)
    assert back(render_megatron_script(plan), tmp_path).workload == workload


QWEN = """#!/bin/bash
# Qwen3-30B-A3B "as people write it"
export CUDA_DEVICE_MAX_CONNECTIONS=${QUEUES:-1}
GPUS_PER_NODE=8
NNODES=${NNODES:-"4"}
TP=${TP:-2}
DATE=$(date +%F)
if [ $TP -gt 1 ]; then SP="--sequence-parallel"; else SP=""; fi
[ -z "$EP" ] && EP=8
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE   # of one node
    --nnodes $NNODES
    --master_addr ${MASTER_ADDR:-localhost}
)
MODEL_ARGS="
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 \\
    --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 \\
    --qk-layernorm --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear \\
    --untie-embeddings-and-output-weights --position-embedding-type rope --rotary-base 1000000 \\
    --max-position-embeddings 40960 --seq-length $((4 * 1024)) $SP
"
MOE_ARGS=(--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768)
MOE_ARGS+=(--moe-grouped-gemm --moe-token-dispatcher-type alltoall)
run_cmd="torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py $MODEL_ARGS ${MOE_ARGS[*]}
    --tensor-model-parallel-size $TP --expert-model-parallel-size ${EP} --use-distributed-optimizer
    --micro-batch-size 1 --global-batch-size 256 --bf16 --save $CKPT/$DATE --save-interval 500
   $MORE"
echo $run_cmd
eval ${run_cmd} 2>&1 | tee log.txt
"""


def test_a_script_with_arrays_variables_defaults_tests_and_eval(tmp_path):
    result = back(QWEN, tmp_path, EP="", CKPT="/ckpt")
    assert result.model == catalogue_model("Qwen/Qwen3-30B-A3B")
    assert result.layout == parse_layout(
        "tp2,ep8,etp2", world_size=32
    )  # expert tensor parallelism is tp when not said
    assert any(
        "so it is the tensor-parallel size: experts are cut in 2" in note for note in result.notes
    )
    assert result.workload.global_batch == 256
    assert result.workload.seq_len == 4096
    assert result.workload.optimizer.beta2 == 0.999  # the parser's own default
    assert result.workload.checkpoint.every_steps == 500
    item = back(
        QWEN,
        tmp_path,
        TP="1",
        NNODES="1",
        EP="4",
        MORE="--recompute-granularity full --recompute-method uniform",
    )
    assert item.layout == parse_layout("ep4,recompute=full", world_size=8)


def test_the_parsers_own_dispatcher_is_allgather(tmp_path):
    result = back(QWEN.replace("--moe-token-dispatcher-type alltoall", ""), tmp_path)
    assert result.layout.dispatcher is DispatcherKind.ALL_GATHER
    assert any("so it is allgather" in note for note in result.notes)


@pytest.mark.parametrize(
    ("more", "field", "value"),
    [
        ("--external-cuda-graph --cuda-graph-scope attn", "graphs", (CudaGraphScope.ATTN,)),
        ("--recompute-activations", "recompute", (Recompute.CORE_ATTN,)),
        ("--moe-enable-deepep", "dispatcher", DispatcherKind.DEEPEP),
        (
            "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ncclep",
            "dispatcher",
            DispatcherKind.NCCLEP,
        ),
        ("--use-megatron-fsdp", "zero", 3),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "zero", 2),
        ("--overlap-grad-reduce --overlap-param-gather", "overlap", (Overlap.GRAD, Overlap.PARAM)),
        (
            "--optimizer-cpu-offload --optimizer-offload-fraction 0.5",
            "offload",
            (Offload.OPTIMIZER,),
        ),
        (
            "--fine-grained-activation-offloading --offload-modules moe_act "
            "--activation-offload-fraction 0.25",
            "offload_layers",
            0.25,
        ),
        ("--activation-offload-fraction 0.25", "offload_layers", 1.0),
        ("--moe-expert-capacity-factor 1.5", "capacity", 1.5),
    ],
)
def test_options_and_the_layout_that_they_say(more, field, value, tmp_path):
    assert getattr(back(QWEN, tmp_path, MORE=more, QUEUES="32").layout, field) == value


PIPELINED = [
    ("--pipeline-model-parallel-size 4", "", 1),
    ("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 6", "", 2),
    ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 3", "", 3),
    (
        "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 9 "
        "--decoder-last-pipeline-num-layers 9",
        "Et*9|t*15|t*15|t*9L",
        1,
    ),
    (
        "--pipeline-model-parallel-size 7 --account-for-embedding-in-pipeline-split",
        "Et*6|t*7|t*7|t*7|t*7|t*7|t*7L",
        1,
    ),
]


@pytest.mark.parametrize(("more", "stages", "vpp"), PIPELINED)
def test_ways_to_split_layers_over_pipeline_ranks(more, stages, vpp, tmp_path):
    result = back(QWEN, tmp_path, MORE=f"{more} --global-batch-size 448", NNODES="28")
    assert (result.layout.stages, result.layout.vpp) == (stages, vpp)


REFUSED = [
    (
        "--gradient-accumulation-steps 4",
        "4 x micro-batch 1 x data-parallel 16 = 64, not --global-batch-size 256",
        "16",
    ),
    ("--data-parallel-size 8", "32 ranks / (tensor 2 x context 1 x pipeline 1) = 16", "16"),
    ("--global-batch-size 250", "micro-batch 1 x data-parallel 16 = 16 must divide it", "256"),
    (
        "--recompute-granularity selective --recompute-method uniform",
        "stands with full recompute alone",
        "leave it out",
    ),
    (
        "--recompute-granularity selective --recompute-modules loss",
        "is one of layernorm, moe_act,",
        "moe_act",
    ),
    ("--recompute-granularity full", "needs --recompute-method", "--recompute-method uniform"),
    (
        "--deepspeed --deepspeed_config ds_config.json",
        "is not beside the script",
        "--set --zero-stage=1",
    ),
    ("--dataloader-type dynamic", "pads no batches", "single"),
    (
        "--tensor-model-paralel-size 4",
        "is no option of Megatron-LM",
        "--tensor-model-parallel-size",
    ),
    ("--expert-parallel-size 8", "is --expert-model-parallel-size", ""),
    ("--attention-head-type grouped", "is one of multihead, multiquery", ""),
    ("--ds-sequence-parallel-fpdt", "is of deepspeedai/Megatron-DeepSpeed", ""),
    ("--moe-expert-parallel-size 8", "it is --expert-model-parallel-size", ""),
    ("--patch-size 14", "is of an encoder of pictures", ""),
    ("--normalization batchnorm", "is one of LayerNorm, RMSNorm", "LayerNorm"),
    ("--batch-size 4", "is gone", "--micro-batch-size"),
    ("--seed many", "must be a whole number", ""),
    ("--moe-router-topk $K", "takes the value of K", "--set K=..."),
    ("--optimizer lion", "its states cannot be planned here", "adam"),
    ("--yaml-cfg sizes.yaml", "options in a YAML file cannot be planned here", ""),
    (
        "--rampup-batch-size 64 64 1000 --train-iters 100",
        "--train-iters excludes it",
        "--train-samples",
    ),
    ("--fp16", "excludes --bf16", "--bf16 alone"),
    ("--num-expert 3", "is no option of Megatron-LM", "--num-experts"),
]


@pytest.mark.parametrize(("more", "rule", "nearest"), REFUSED, ids=[more for more, _, _ in REFUSED])
def test_what_a_script_says_wrong_is_named_with_what_is_right(more, rule, nearest, tmp_path):
    with pytest.raises(BadInput) as caught:
        back(QWEN, tmp_path, MORE=more)
    reason = caught.value.reasons[0]
    assert more.split()[0].startswith(reason.field.split()[0]) or reason.field.split()[0] in more
    assert rule in reason.rule
    if nearest:
        assert reason.nearest == nearest
    assert "\n" not in str(caught.value)


RENAMED = [
    ("--fake-init-process-group", "--fake-process-group"),
    ("--use-torch-compile", "--cuda-graph-impl"),
    ("--use-fused-kernels", "fusions are on"),
    ("--sequcen_parallel", "--sequence-parallel"),
    ("--profile-step-range 50,100 --profile-output-path ./p", "--profile-step-start"),
    ("--no-async-tensor-model-parallel-allreduce", "is gone"),
    ("--gradient-accumulation-steps 16 --data-parallel-size 16", "derived"),
    ("--zero-stage 3", "Megatron-DeepSpeed"),
    ("--train-tokens 300000000000", "on which no step depends"),
    ("--use-flash-attn-v2", "--use-flash-attn"),
    ("--cpu-optimizer", "--optimizer-cpu-offload"),
    ("--lr-decay-style inverse-square-root", "taken for cosine"),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 10", "exponential is taken for linear"),
    ("--optimizer muon --muon-tp-mode blockwise", "taken for duplicated"),
    ("...", "leaves options out"),
    ("--log-interval 10", "not part of a plan: "),
    ("--no-query-key-layer-scaling", "is gone"),
    ("--tokenizer-prompt-format qwen2p5", "multimodal example"),
    ("--moe-loss-coeff 0.01", "--moe-aux-loss-coeff"),
    ("--use-llama2-rotary-position-embeddings", "--use-rotary-position-embeddings"),
    ("--normalization rmsnorm", "is read as RMSNorm"),
    ("--fp8-format hybrid --fp8-recipe mxfp8", "hybrid is taken for e4m3 with --fp8-recipe mxfp8"),
]


def test_the_other_order_of_ranks_is_read_where_it_differs(tmp_path):
    flag = "--use-tp-pp-dp-mapping"
    assert back(QWEN, tmp_path, MORE=flag).layout.order is RankOrder.PP_LAST
    piped = f"{flag} --pipeline-model-parallel-size 2"
    assert back(QWEN, tmp_path, MORE=piped).layout.order is RankOrder.DP_LAST


def test_the_rows_of_the_embedding_are_those_of_the_command(tmp_path):
    """A known model and a given one have them too, not only a model of the script's own sizes."""
    model = back(QWEN, tmp_path).model
    named = catalogue.model(model.name)
    for rows in (model.vocab_size, 160_000):
        more = f"--padded-vocab-size {rows}"
        assert back(QWEN, tmp_path, MORE=more).model == replace(model, vocab_size=rows)
        result = back(QWEN, tmp_path, MORE=more, named=named).model
        assert result == replace(named, vocab_size=rows)


def test_fp8_without_a_recipe_has_delayed_scales(tmp_path):
    for more, scaling in (
        ("--fp8-format hybrid", TensorScaling.DELAYED),
        ("--fp8-format hybrid --fp8-recipe tensorwise", TensorScaling.CURRENT),
        ("--fp8-format e4m3 --fp8-recipe blockwise", TensorScaling.BLOCKWISE),
    ):
        workload = back(QWEN, tmp_path, MORE=more).workload
        assert (workload.precision, workload.tensor_scaling) == (Dtype.FP8, scaling)
    for more, chosen in (("--fp8-format hybrid", "hybrid"), ("--fp8-format e4m3", "e4m3")):
        for recipe in ("", " --fp8-recipe tensorwise"):
            assert back(QWEN, tmp_path, MORE=more + recipe).workload.fp8_format == chosen
    usual = back(QWEN, tmp_path, MORE="--fp8-format hybrid").workload.delayed
    assert (usual.amax_history_len, usual.amax_compute_algo) == (1, AmaxComputeAlgo.MOST_RECENT)
    options = "--fp8-amax-history-len 16 --fp8-amax-compute-algo max --fp8-margin 1"
    chosen = back(QWEN, tmp_path, MORE=f"--fp8-format hybrid {options}").workload.delayed
    assert chosen == DelayedScalingSpec(amax_history_len=16, fp8_margin=1)


@pytest.mark.parametrize(("more", "note"), RENAMED, ids=[more for more, _ in RENAMED])
def test_what_is_taken_otherwise_than_written_is_said(more, note, tmp_path):
    result = back(QWEN, tmp_path, MORE=more, QUEUES="32")
    assert any(note in line for line in result.notes), result.notes
    assert result.layout.zero == (3 if "zero" in more else 1)


def test_a_learning_rate_that_stays_and_falls_is_read(tmp_path):
    more = "--lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 10"
    result = back(QWEN, tmp_path, MORE=more)
    optimizer = result.workload.optimizer
    assert (optimizer.lr_decay, optimizer.wsd_decay_steps) == (LrDecay.WSD, 10)
    assert not any("decay" in note for note in result.notes)


def test_a_rate_that_falls_in_a_line_is_read_and_is_the_default_of_megatron(tmp_path):
    for more in ("", "--lr-decay-style linear"):
        result = back(QWEN, tmp_path, MORE=more)
        assert result.workload.optimizer.lr_decay is LrDecay.LINEAR
        assert not any("decay" in note for note in result.notes)


def test_options_of_muon_are_read_as_they_are_written(tmp_path):
    more = "--optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-scale-mode unit_rms_norm"
    result = back(QWEN, tmp_path, MORE=f"{more} --muon-extra-scale-factor 0.2")
    assert result.workload.optimizer.matrix_update is MatrixUpdate.MUON
    assert result.workload.muon == MuonSpec(
        muon_momentum=0.95,
        muon_nesterov=True,
        muon_scale_mode=MuonScale.UNIT_RMS_NORM,
        muon_extra_scale_factor=0.2,
    )
    assert not any("muon" in note for note in result.notes)


def test_hardware_queues_are_held_against_what_overlaps(tmp_path):
    with pytest.raises(BadInput, match="CUDA_DEVICE_MAX_CONNECTIONS=1: Megatron-FSDP needs more"):
        back(QWEN, tmp_path, MORE="--use-megatron-fsdp")
    notes = [back(QWEN, tmp_path, QUEUES=queues).notes for queues in ("1", "8")]
    assert [
        any("CUDA_DEVICE_MAX_CONNECTIONS is not 1" in note for note in message) for message in notes
    ] == [False, True]


def test_arguments_nobody_gives_cases_and_functions(tmp_path):
    head = """
while [[ $# -gt 0 ]]; do
  case $1 in
    --tp) TP=$2; shift 2 ;;
    *) echo "what is $1"; exit 1 ;;
  esac
done
for x in "$@"; do TP=$x; done
usage() { echo "torchrun --num-layers"; }
case ${SIZE:-30B} in
  235B|"671B") NNODES=32 ;;
  30*) NNODES=2
       if [ -n "$MORE" ] && [ $MORE != x ]; then MORE="$MORE --bf16"; fi ;;
  *) NNODES=1 ;;
esac
"""
    assert back(head + QWEN, tmp_path, EP="4").layout.world_size == 16
    assert back(head + QWEN, tmp_path, SIZE="671B").layout.world_size == 256
    assert back(head + QWEN, tmp_path, SIZE="1B", EP="4").layout.world_size == 8


ARGUED = """
SIZE=$1; MBS=$2; TP=${3}; SAVE=${12}
OVERLAP=$(( ($TP > 1) ? 1 : 0 ))
if [ $SIZE = A3B ]; then
  moe_options=" \\
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-router-pre-softmax \\
    --moe-layer-freq '([1]*48)'"
elif [ -z ${SIZE} ]; then
  echo "a size is missing"
  exit -1
fi
if [ $OVERLAP -eq 1 ]; then more=" --sequence-parallel --tp-comm-overlap"; fi
run="torchrun --nproc_per_node 8 pretrain_qwen.py ${moe_options} $more --num-layers 48 \\
   --hidden-size 2048 \\
 --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 \\
   --qk-layernorm --swiglu \\
 --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear \\
   --untie-embeddings-and-output-weights --bf16 \\
 --use-rotary-position-embeddings --rotary-base 1000000 --max-position-embeddings 40960 \\
   --seq-length 4096 \\
 --init-method-std 0.008 --micro-batch-size $MBS --tensor-model-parallel-size $TP --save \\
   $SAVE --save-interval 9 \\
 --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall --use-distributed-optimizer"
eval $run
"""


def test_arguments_behind_the_script_and_what_it_sets_of_a_known_model(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(ARGUED)
    result = interpret_launch(
        read_launch(script, {}, ("A3B", "2", "4")), world_size=8, folder=tmp_path
    )
    assert result.layout == parse_layout("tp4,mbs2,overlap=tp", world_size=8)
    legal = catalogue_model("Qwen/Qwen3-30B-A3B")
    assert (result.model.name, result.model.vocab_size) == (legal.name, legal.vocab_size)
    assert result.model.initializer_range == 0.008
    assert (result.model.moe.router.pre_softmax, result.model.moe.router.renormalize) == (
        True,
        False,
    )
    with pytest.raises(BadInput, match="no command here starts"):  # it exits before
        read_launch(script, {})


def test_options_of_forks_are_left_out_or_refuse_where_a_plan_consists_of_them(tmp_path):
    more = "--no-such-thing 3 4 --wandb-tag=x --patch-tokenizer-type T --use-fused-rmsnorm"
    notes = back(QWEN, tmp_path, MORE=more).notes
    assert "--no-such-thing is no option of Megatron-LM and is left out" in notes
    assert any(note.startswith("--wandb-tag is no option") for note in notes)
    assert any(note == "of Ascend/MindSpeed, left out: --use-fused-rmsnorm" for note in notes)
    for option, words in (
        ("--my-offload-buffers 2", "sounds of memory"),
        ("--index-n-heads 4", "is of Ascend/MindSpeed-LLM, is about attention, and cannot be"),
        ("--use-la-module", "linear attention"),
        ("--sequence-paralel", "nearest legal value: --sequence-parallel"),
    ):
        with pytest.raises(BadInput, match=words):
            back(QWEN, tmp_path, MORE=option)


def test_values_of_forks_are_read_as_what_comes_nearest_and_notes_say_so(tmp_path):
    """Ling 2.0's scripts name an optimizer and a tokenizer of its patch."""
    more = "--optimizer adamw-bnb-8bit --tokenizer-type BailingTokenizer"
    result = back(QWEN, tmp_path, MORE=more)
    optimizer = result.workload.optimizer
    assert (optimizer.matrix_update, optimizer.moment_dtype) == (MatrixUpdate.ADAMW, Dtype.FP8)
    assert optimizer.second_moment_dtype is None  # as the first
    told = [note for note in result.notes if "is no value of Megatron-LM's" in note]
    assert [note.split()[1] for note in told] == ["adamw-bnb-8bit", "BailingTokenizer"]
    with pytest.raises(BadInput, match="is one of adam, sgd"):
        back(QWEN, tmp_path, MORE="--optimizer adamw-8bit")


@pytest.mark.parametrize(
    "option", ["moe-num-experts=64", "moe-top-k=1", "moe-expert-model-parallelism"]
)
def test_experts_of_forks_are_never_left_out(option, tmp_path):
    """The model would be a dense one, or another."""
    with pytest.raises(BadInput, match="is megablocks'; in Megatron-LM it is --"):
        back(QWEN, tmp_path, MORE=f"--{option}")


def test_of_several_training_commands_the_first_is_read_and_a_note_says_so(tmp_path):
    several = QWEN.replace(
        "eval ${run_cmd}", "for SEED in 1 2; do eval ${run_cmd} --seed $SEED; done"
    )
    result = back(several, tmp_path)
    assert result.workload.seed == 1
    assert any(note.startswith("the first of 2 training commands is read") for note in result.notes)


SCRIPTS = [
    ("echo hello\n", "; it starts no program"),
    ("echo hello\nexit 1\n", "the script leaves at line 2"),
    (
        "python -m torch.distributed.launch ./tasks/msdp/main.py --num-layers 4 --hidden-size 8\n",
        "./tasks/msdp/main.py trains no decoder",
    ),
    (
        "torchrun tools/run_text_generation_server.py --num-layers 4 --hidden-size 8\n",
        "tools/run_text_generation_server.py trains no decoder",
    ),
    ("for x in $(ls); do torchrun p.py --num-layers 4; done\n", "depends on what ls prints"),
    ('torchrun pretrain_gpt.py --num-layers "4\n', "is not closed"),
    (
        "case $(hostname) in a) torchrun p.py --num-layers 4;; "
        "*) torchrun p.py --num-layers 8;; esac\n",
        "what follows depends on what hostname prints, which only running tells",
    ),
    ("if true; then\n", "`fi` is missing"),
    (
        "torchrun --nnodes 1:4 --nproc-per-node 8 pretrain_gpt.py --num-layers 4\n",
        "must be a whole number",
    ),
    (
        "torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py "
        "--micro-batch-size 1 --seq-length 8\n",
        "model is not in",
    ),
]


@pytest.mark.parametrize(("script", "rule"), SCRIPTS, ids=[rule for _, rule in SCRIPTS])
def test_scripts_that_cannot_be_read_say_where(script, rule, tmp_path):
    with pytest.raises(BadInput) as caught:
        back(script, tmp_path)
    assert rule in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "option", ["--pipeline-model-parallel-size", "--micro-batch-size", "--num-attention-heads"]
)
def test_a_size_of_zero_is_refused(option, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 64 "
        "--num-attention-heads 8 --vocab-size 100 --micro-batch-size 1 --seq-length 8 "
        f"{option} 0\n"
    )
    with pytest.raises(BadInput, match="must be at least 1"):
        interpret_launch(read_launch(script, {}), world_size=8, folder=tmp_path)


CLUSTER = """source /cluster/env.sh
torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py {words} --seq-length 1024 --bf16 \\
  --max-position-embeddings 1024 --vocab-size 1024 --num-attention-heads 8 --hidden-size 512
"""
SIZES = "--num-layers 8 --tensor-model-parallel-size 2 --micro-batch-size 1"


def read_cluster(words, tmp_path, *answers):
    script = tmp_path / "job.sh"
    script.write_text(CLUSTER.replace("{words}", words))
    return interpret_launch(
        read_launch(script, {}, overrides=parse_script_overrides(answers)),
        world_size=16,
        folder=tmp_path,
    )


def test_what_a_cluster_sets_is_left_out_where_no_plan_needs_it(tmp_path):
    job = read_cluster(f"{SIZES} $LOGGING_ARGS --tensorboard-dir $LOGS", tmp_path)
    assert job.layout.tp == 2
    assert any("what $LOGGING_ARGS holds depends on what env.sh sets" in n for n in job.notes)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--num-layers 8 --micro-batch-size 1 $ARGS", '--set ARGS="--tensor-model-parallel-size'),
        ("--tensor-model-parallel-size 2 --micro-batch-size 1 $ARGS", '--set ARGS="--num-layers'),
        ("--num-layers $LAYERS --micro-batch-size 1", "--set LAYERS=..."),
    ],
)
def test_what_a_plan_needs_of_a_cluster_is_asked_for_by_name(words, answer, tmp_path):
    with pytest.raises(BadInput) as caught:
        read_cluster(words, tmp_path)
    assert answer in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_answers_are_read(tmp_path):
    words = "--num-layers $LAYERS --micro-batch-size 1 $ARGS"
    answers = ("LAYERS=8", "ARGS=--tensor-model-parallel-size 4")
    job = read_cluster(words, tmp_path, *answers)
    assert (job.model.layers, job.layout.tp) == (8, 4)


def test_an_option_that_bears_on_a_plan_and_is_undecided_is_asked_for(tmp_path):
    text = CLUSTER.replace("{words}", f"{SIZES} $A")
    script = tmp_path / "job.sh"
    script.write_text(
        f"if grep -q x /proc/y; then A='--moe-grouped-gemm --wandb-project x'; fi\n{text}"
    )
    with pytest.raises(BadInput, match="--moe-grouped-gemm: depends on whether `grep` succeeds"):
        read_launch(script, {})
    launch = read_launch(script, {}, overrides=parse_script_overrides(("--moe-grouped-gemm=null",)))
    assert "--moe-grouped-gemm" not in launch.options
    assert any("--wandb-project" in note for note in launch.notes)


def test_one_training_behind_a_condition_is_read_and_two_are_asked_for(tmp_path):
    script = tmp_path / "job.sh"
    body = CLUSTER.replace("{words}", SIZES).partition("\n")[2]
    script.write_text(f"if grep -q x /proc/y; then\n{body}fi\n")
    notes = read_launch(script, {}).notes
    assert any("depends on whether `grep` succeeds" in note for note in notes)
    other = body.replace("--num-layers 8", "--num-layers 4")
    script.write_text(f"if grep -q x /proc/y; then\n{body}else\n{other}fi\n")
    with pytest.raises(BadInput, match="line 2: what follows depends on whether `grep` succeeds"):
        read_launch(script, {})


@pytest.mark.parametrize(
    ("command", "rule"),
    [
        ("torchrun hf2mcore_qwen3_dense.py --num-layers 4", "trains no decoder"),
        ("torchrun pretrain_gpt.py --num-layers 4 --skip-train", "leaves the training out"),
        ("torchrun pretrain_vlm.py --num-layers 4 --mm-model m.json", "is MindSpeed-MM's"),
        ("torchrun ./aicb.py --num_layers 4 --micro_batch 1 --seq_length 8", "is AICB's"),
    ],
)
def test_what_trains_no_whole_decoder_is_refused_by_what_it_is(command, rule, tmp_path):
    (tmp_path / "job.sh").write_text(command)
    with pytest.raises(BadInput, match=rule):
        read_launch(tmp_path / "job.sh", {})


def test_the_vocabulary_of_a_model_that_is_found_by_its_sizes_is_named(tmp_path):
    text = QWEN.replace("--vocab-size 151936", "")
    (note,) = [n for n in back(text, tmp_path).notes if n.startswith("model Qwen/Qwen3-30B-A3B")]
    assert "its vocabulary of 151,936 counts" in note


def test_what_torchrun_binds_is_no_option_of_the_trainer(tmp_path):
    text = CLUSTER.replace("{words}", SIZES).replace("source /cluster/env.sh\n", "")
    script = tmp_path / "job.sh"
    script.write_text(text.replace("torchrun ", "torchrun --numa-binding node "))
    assert read_launch(script, {}).unknown_options == ()
