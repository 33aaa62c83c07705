import shlex
import subprocess
from dataclasses import replace

import pytest

from megatron_cases import build_plan, parse_flags
from megatron_plans import PLANS, deepseek, on_gpus
from moewright.codec import parse_layout
from moewright.exporters.megatron.script import megatron_flags, render_megatron_script
from moewright.intake import catalogue
from moewright.spec.errors import BadInput
from moewright.spec.layout import (
    DispatcherKind,
    Layout,
    Offload,
    Overlap,
    Recompute,
)
from moewright.spec.model import QkNorm, RopeSpec, ScoreFunction
from moewright.spec.workload import (
    CheckpointSpec,
    DataSpec,
    Dtype,
    FineTuningSpec,
    LossSpec,
    LrDecay,
    MatrixUpdate,
    OptimizerSpec,
    Task,
    TensorScaling,
    Workload,
)
from sample_run import plan, with_recompute


def message(options) -> dict[str, tuple[str, ...]]:
    return parse_flags(megatron_flags(options))


def test_a_script_says_where_delayed_scales_move_on_more_often():
    plan = on_gpus("tp2,ep8,mbs1", 16)  # 16 sequences over 8 data-parallel ranks
    scaling = replace(
        plan.workload, precision=Dtype.FP8, tensor_scaling=TensorScaling.DELAYED, global_batch=32
    )
    delayed = replace(plan, workload=scaling, hardware=catalogue.hardware("16xH100"))
    lines = render_megatron_script(delayed).splitlines()
    notes = [line for line in lines if "amaxes" in line]
    assert all(line.startswith("# ") for line in notes)
    assert "of 1024 amaxes there are 4 a step" in notes[1]
    current = replace(delayed, workload=replace(scaling, tensor_scaling=TensorScaling.CURRENT))
    assert "amaxes" not in render_megatron_script(current)
    # A comment alone: the command is the same but for the scaling that it names.
    assert message(delayed)["--fp8-amax-history-len"] == ("1024",)


@pytest.mark.parametrize("text", ["tp2,ep8", "tp4", "tp2,ep4,etp2"])
def test_expert_tensor_parallelism_is_always_said_for_its_default_is_tp(text):
    layout = on_gpus(text, 16).layout
    assert message(on_gpus(text, 16))["--expert-tensor-parallel-size"] == (str(layout.etp),)


def test_degrees_batch_and_sequence_parallelism():
    flags = message(PLANS["folded"])
    assert flags["--tensor-model-parallel-size"] == ("2",)
    assert flags["--expert-model-parallel-size"] == ("8",)
    assert flags["--sequence-parallel"] == ()
    assert flags["--micro-batch-size"] == ("2",)
    assert flags["--global-batch-size"] == ("16",)
    assert flags["--recompute-granularity"] == ("selective",)
    assert set(flags["--recompute-modules"]) == {"moe_act", "layernorm"}
    assert flags["--moe-token-dispatcher-type"] == ("alltoall",)  # its own default gathers
    assert {"--overlap-grad-reduce", "--overlap-param-gather", "--tp-comm-overlap"} <= set(flags)
    assert "--sequence-parallel" not in message(PLANS["one rank"])


def test_an_even_split_of_94_layers_counts_embedding_and_loss():
    flags = message(PLANS["virtual stages"])  # 94 + 2 layers on 12 virtual stages
    assert flags["--num-virtual-stages-per-pipeline-rank"] == ("3",)
    assert flags["--microbatch-group-size-per-virtual-pipeline-stage"] == ("4",)
    assert "--account-for-embedding-in-pipeline-split" in flags
    assert "--account-for-loss-in-pipeline-split" in flags
    even = message(PLANS["virtual stages that overlap"])  # 6 layers on 6 virtual stages
    assert "--account-for-loss-in-pipeline-split" not in even


def test_transfers_of_virtual_stages_overlap_and_the_script_says_so():
    """Megatron-LM switches it on by itself, and needs it at pp2."""
    plan = PLANS["virtual stages"]
    assert Overlap.P2P not in plan.layout.overlap
    assert not [name for name in message(plan) if "p2p" in name]
    note = "# Point-to-point transfers overlap"
    assert note in render_megatron_script(plan)
    assert note not in render_megatron_script(PLANS["virtual stages that overlap"])
    assert note not in render_megatron_script(PLANS["folded"])


def test_training_always_has_a_length():
    plan = PLANS["no length"]
    flags = message(plan)
    assert flags["--train-iters"] == flags["--lr-decay-iters"] == ("100",)
    assert "# - length: the plan has none, 100 steps are written" in render_megatron_script(plan)
    optimizer = replace(plan.workload.optimizer, warmup_steps=400)
    longer = replace(plan, workload=replace(plan.workload, optimizer=optimizer))
    assert message(longer)["--train-iters"] == ("800",)  # warm-up must end before decay


def test_what_a_plan_does_not_say_stands_on_top_of_its_script():
    """A router without a loss that balances is never written without a word."""
    plan = PLANS["no length"]
    bare = replace(plan.workload, loss=LossSpec(), data=DataSpec(), checkpoint=CheckpointSpec())
    plan = replace(plan, workload=bare)
    assert message(plan)["--moe-router-load-balancing-type"] == ("none",)
    lines = render_megatron_script(plan).splitlines()
    start = lines.index("# TODO before it trains a model:")
    todos = [line.split(":")[0] for line in lines[start + 1 : start + 6]]
    assert todos == ["# - length", "# - data", "# - checkpoints", "# - recipe", "# - balance"]
    whole = replace(
        plan.workload,
        steps=100,
        loss=LossSpec(aux_coeff=0.01),
        data=DataSpec(train="corpus/train"),
        checkpoint=CheckpointSpec(every_steps=50),
        optimizer=OptimizerSpec(lr=1e-4),
    )
    assert "TODO" not in render_megatron_script(replace(plan, workload=whole))


@pytest.mark.parametrize("kind", [kind for kind in DispatcherKind if kind.facts.megatron])
def test_packages_that_only_a_dispatcher_needs_are_named(kind):
    """Megatron-LM brings none of them, and stops once all of its ranks are up."""
    plan = next(plan for plan in PLANS.values() if plan.layout.ep > 1)
    plan = replace(plan, layout=replace(plan.layout, dispatcher=kind))
    todos = [line for line in render_megatron_script(plan).splitlines() if line.startswith("# - ")]
    named = [todo for todo in todos if todo.startswith("# - packages: ")]
    assert len(named) == bool(kind.facts.packages)
    assert all(package in todo for todo in named for package in kind.facts.packages)


def test_a_rate_that_stays_and_falls_in_the_end():
    plan = PLANS["folded"]
    optimizer = OptimizerSpec(lr_decay=LrDecay.WSD, wsd_decay_steps=25)
    workload = replace(plan.workload, steps=200, optimizer=optimizer)
    flags = parse_flags(megatron_flags(replace(plan, workload=workload)))
    assert flags["--lr-decay-style"] == ("WSD",)
    assert flags["--lr-wsd-decay-style"] == ("linear",)
    assert flags["--lr-wsd-decay-iters"] == ("25",)


def test_a_layout_string_excludes_the_other_ways_to_say_stages():
    flags = message(PLANS["layout string"])
    assert flags["--pipeline-model-parallel-layout"] == ("Ett|t|tt|tL",)
    assert not {name for name in flags if "virtual" in name or "account" in name}


def test_latent_attention_and_dense_first_layers():
    flags = message(deepseek())
    assert flags["--moe-layer-freq"] == ("([0]*1+[1]*5)",)
    assert eval(flags["--moe-layer-freq"][0]) == [0, 1, 1, 1, 1, 1]
    assert flags["--qk-head-dim"] == ("128",)
    assert flags["--rope-type"] == ("yarn",)
    assert flags["--rotary-scaling-factor"] == ("40",)
    assert flags["--moe-router-enable-expert-bias"] == ()
    assert flags["--moe-router-topk-scaling-factor"] == ("2.5",)
    assert flags["--mtp-num-layers"] == ("1",)
    assert "--kv-channels" not in flags


def test_softmax_over_all_experts_without_renormalisation_is_the_pre_softmax_order():
    base = on_gpus("", 1)
    moe = base.model.moe
    raw = replace(moe, router=replace(moe.router, pre_softmax=True, renormalize=False))
    even = replace(moe, router=replace(moe.router, pre_softmax=True, renormalize=True))
    assert "--moe-router-pre-softmax" in message(replace(base, model=replace(base.model, moe=raw)))
    assert "--moe-router-pre-softmax" not in message(
        replace(base, model=replace(base.model, moe=even))
    )


def changed(**fields):
    base = on_gpus("tp2,ep2", 4)
    return replace(base, layout=replace(base.layout, **fields))


def trained(**fields):
    base = on_gpus("ep2", 2)
    return replace(base, workload=replace(base.workload, **fields))


def attended(**fields):
    base = on_gpus("", 1)
    return replace(
        base, model=replace(base.model, attention=replace(base.model.attention, **fields))
    )


def around_a_ring(**fields):
    return replace(attended(**fields), layout=parse_layout("cp2", world_size=2))


def routed(**fields):
    base = on_gpus("", 1)
    moe = base.model.moe
    return replace(
        base, model=replace(base.model, moe=replace(moe, router=replace(moe.router, **fields)))
    )


def with_biases(**fields):
    """Return a plan whose linear layers all have biases."""
    base = routed(logit_bias=True)
    model = replace(
        base.model,
        attention=replace(base.model.attention, out_bias=True, qkv_bias=True),
        moe=replace(base.model.moe, expert_bias=True),
    )
    return replace(base, model=model, layout=replace(changed(**fields).layout))


def test_biases_of_all_linear_layers_are_one_switch():
    flags = message(with_biases())
    assert "--disable-bias-linear" not in flags
    assert "--no-bias-dropout-fusion" in flags  # Megatron-LM's grouped experts have it not
    with pytest.raises(BadInput, match="switch for the biases"):
        megatron_flags(attended(out_bias=True, qkv_bias=True))


def test_gpt_oss_has_windows_sinks_yarn_and_its_own_activation():
    layout = parse_layout("ep4", world_size=8)
    flags = parse_flags(
        megatron_flags(
            build_plan("openai/gpt-oss-20b", layout, Workload(seq_len=4096, global_batch=64))
        )
    )
    assert flags["--window-size"] == ("127,0",)  # and the token itself
    assert flags["--window-attn-skip-freq"] == ("2",)
    assert flags["--softmax-type"] == ("learnable",)
    assert flags["--position-embedding-type"] == ("yarn",)
    assert flags["--rotary-scaling-factor"] == ("32",)
    assert flags["--yarn-original-max-position-embeddings"] == ("4096",)
    assert "--no-yarn-correction-range-round-to-int" in flags
    assert "--quick-geglu" in flags
    assert flags["--activation-func-clamp-value"] == ("7",)
    assert "--swiglu" not in flags


def test_muon_is_an_optimizer_of_its_own_without_offload_or_narrow_moments():
    muon = OptimizerSpec(matrix_update=MatrixUpdate.MUON)
    assert message(trained(optimizer=muon))["--optimizer"] == ("muon",)
    assert "--optimizer" not in message(trained())
    with pytest.raises(BadInput, match=r"workload\.matrix_update=muon"):
        megatron_flags(
            replace(
                trained(optimizer=muon),
                layout=parse_layout("ep2,offload=optimizer", world_size=2),
            )
        )


def test_states_in_several_groups_say_how_many():
    flags = message(PLANS["states in two groups"])
    assert flags["--num-distributed-optimizer-instances"] == ("2",)


def test_fine_tuning_is_refused():
    with pytest.raises(
        BadInput, match=r"workload\.task=lora: Megatron-LM export supports only pre-tr"
    ):
        megatron_flags(trained(fine_tuning=FineTuningSpec(task=Task.LORA)))


def test_latent_attention_without_yarn_has_no_fused_rotation():
    moonlight = build_plan(
        "moonshotai/Moonlight-16B-A3B",
        parse_layout("ep4", world_size=8),
        Workload(seq_len=4096, global_batch=64),
    )
    assert "--no-rope-fusion" in message(moonlight)
    assert "--no-rope-fusion" not in message(deepseek())


def six_of_three(model):
    """Return the model with DeepSeek-V2's router: six experts of three groups."""
    router = replace(model.moe.router, top_k=6, top_groups=3, group_scores=1)
    return replace(model, moe=replace(model.moe, router=router))


REFUSED = [
    (plan(), "hardware.device.kind=cpu", "cuda"),
    (
        replace(on_gpus("ep2", 2), hardware=catalogue.hardware("2xTPU-v5p")),
        "hardware.device.kind=tpu",
        "cuda",
    ),
    (changed(zero=0, offload=(Offload.OPTIMIZER,)), "layout.zero=0", "1"),
    (on_gpus("pp2,vpp3,schedule=gis", 4), "layout.schedule=gis", "interleaved"),
    (on_gpus("pp2,vpp3,offload=core_attn+chunks1", 4), "layout.offload_chunks=1", "0"),
    (changed(dispatcher=DispatcherKind.DEDUP), "layout.dispatcher=dedup", "deepep"),
    (
        changed(recompute=(Recompute.LAYERNORM, Recompute.LOSS)),
        "layout.recompute=loss",
        "layernorm",
    ),
    (on_gpus("pp2,vpp3,schedule=zbv,overlap=p2p", 4), "layout.schedule=zbv", "interleaved"),
    (trained(precision=Dtype.FP8), "workload.precision=fp8", "bf16"),
    (
        replace(deepseek(), model=six_of_three(deepseek().model)),
        "model.moe.router.group_scores=1",
        "2",
    ),
    (trained(precision=Dtype.FP32, grad_dtype=Dtype.BF16), "workload.grad_dtype=bf16", "fp32"),
    (attended(qk_norm=QkNorm.FULL), "model.attention.qk_norm=full", "per_head"),
    (around_a_ring(sinks=True), "layout.cp_comm=p2p", "a2a"),
    (around_a_ring(sliding_window=128, window_every=1), "layout.cp_comm=p2p", "a2a"),
    (attended(rope=RopeSpec(scaling="linear")), "model.attention.rope.scaling=linear", "default"),
    (attended(rope=RopeSpec(theta=1e4 + 0.5)), "model.attention.rope.theta=10000.5", "10000"),
    (routed(selection_bias=True), "model.moe.router.selection_bias=True", "False"),
    (
        routed(score=ScoreFunction.SIGMOID, renormalize=False),
        "model.moe.router.renormalize=False",
        "True",
    ),
    (routed(logit_bias=True), "model.moe.router.logit_bias=True", "False"),
    (with_biases(etp=2), "layout.etp=2", "1"),
]


@pytest.mark.parametrize(
    ("options", "field", "nearest"), REFUSED, ids=[field for _, field, _ in REFUSED]
)
def test_what_megatron_cannot_say_is_refused_with_the_nearest_that_it_can(options, field, nearest):
    with pytest.raises(BadInput) as caught:
        megatron_flags(options)
    (reason,) = caught.value.reasons
    assert str(reason).startswith(f"{field}: Megatron-LM ")
    assert reason.nearest == nearest


def test_the_script_is_one_command_that_a_shell_reads(tmp_path):
    script = render_megatron_script(PLANS["layout string"])
    assert "torchrun --standalone --nproc-per-node 4 pretrain_gpt.py" in script
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" in script
    path = tmp_path / "run.sh"
    path.write_text(script.replace("torchrun", "printf '%s\\n'"))
    words = subprocess.run(
        ["sh", path], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "Ett|t|tt|tL" in words
    assert words[words.index("--vocab-size") + 1] == "4096"
    command = script[script.index("torchrun") :]
    assert len(shlex.split(command.replace("\\\n", " "))) == len(words) + 1


def test_several_nodes_meet_at_the_master_and_overlap_of_experts_needs_queues():
    script = render_megatron_script(PLANS["virtual stages"])
    assert 'torchrun --nnodes 4 --nproc-per-node 8 --node-rank "$NODE_RANK"' in script
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32" in render_megatron_script(
        PLANS["virtual stages that overlap"]
    )
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32" in render_megatron_script(PLANS["ZeRO-3"])


def test_a_name_cannot_leave_its_comment():
    base = on_gpus("", 1)
    script = render_megatron_script(
        replace(base, model=replace(base.model, name="x\nrm -rf y"), layout=Layout(world_size=1))
    )
    assert not [line for line in script.splitlines() if line.startswith("rm")]


def test_recompute_of_modules_keeps_their_names():
    assert message(on_gpus("ep2", 2, base=with_recompute(plan())))["--num-experts"] == ("16",)
    flags = message(on_gpus("recompute=moe+mla_up_proj+shared_experts", 2))
    assert set(flags["--recompute-modules"]) == {"moe", "mla_up_proj", "shared_experts"}


def test_context_parallelism_in_two_levels_says_both():
    flags = message(on_gpus("cp8,cp_comm=a2a+p2p", 8))
    assert (flags["--cp-comm-type"], flags["--hierarchical-context-parallel-sizes"]) == (
        ("a2a+p2p",),
        ("2", "4"),
    )


def test_batches_that_grow_count_in_sequences_and_exclude_steps():
    """The sample workload runs 60 steps at 16.

    With 4, 8, 12 over its first 96 sequences they see fewer.
    """
    options = PLANS["growing batches"]
    flags = message(options)
    seq_len = options.workload.seq_len
    sizes = (f"{first * seq_len}:{size}" for first, size in ((0, 4), (32, 8), (64, 12), (96, 16)))
    assert flags["--step-batch-size-schedule"] == (" ".join(sizes),)
    assert "--global-batch-size" not in flags
    assert not {"--train-iters", "--lr-decay-iters", "--lr-warmup-iters"} & set(flags)
    steps, size, seen = options.workload.steps, options.workload.global_batch, 0
    for _ in range(steps):
        seen += min(size, 4 + 4 * (seen * 3 // 96)) if seen < 96 else size
    assert flags["--train-samples"] == flags["--lr-decay-samples"] == (str(seen),)
    assert seen < steps * size
    assert "by sequences, the plan by steps" in render_megatron_script(options)


def test_fp16_scales_its_loss_as_the_plan_says():
    flags = message(PLANS["fp16"])
    assert flags["--initial-loss-scale"] == ("65536",)
    assert flags["--loss-scale-window"] == ("1000",)
    assert flags["--hysteresis"] == ("1",)
    assert flags["--accumulate-allreduce-grads-in-fp32"] == ()


def test_balance_losses_are_lists_of_names_and_coefficients():
    flags = message(PLANS["three balance losses"])
    assert flags["--moe-router-load-balancing-type"] == (
        "aux_loss",
        "seq_aux_loss",
        "global_aux_loss",
    )
    assert flags["--moe-aux-loss-coeff"] == ("0.01", "0.0001", "0.001")
    assert flags["--moe-router-force-biased"] == ("2",)
    assert flags["--moe-token-drop-policy"] == ("position",)


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [
        ("H800", Dtype.FP8, ("hybrid", "tensorwise")),
        ("GB200", Dtype.MXFP8, ("e4m3", "mxfp8")),
    ],
)
def test_narrows_come_with_the_recipe_of_the_device(device, precision, expected):
    base = on_gpus("ep2", 2)
    options = replace(
        base,
        hardware=catalogue.hardware(f"2x{device}"),
        workload=replace(base.workload, precision=precision),
    )
    flags = message(options)
    assert (flags["--fp8-format"], flags["--fp8-recipe"]) == tuple((value,) for value in expected)
    assert flags["--bf16"] == ()


def test_offloaded_activations_leave_weights_where_they_are():
    """Transformer Engine would move them too, and Megatron-LM stops without the variable."""
    assert "export NVTE_CPU_OFFLOAD_V1=1" in render_megatron_script(PLANS["activation offload"])
    assert "NVTE_CPU_OFFLOAD_V1" not in render_megatron_script(PLANS["offload"])
    flags = message(PLANS["whole graph and activation offload"])
    assert flags["--fine-grained-offloading-max-inflight-offloads"] == ("1",)
    assert "--activation-offload-fraction" not in flags
    some_layers = message(on_gpus("ep2,offload=moe_act+layers0.25", 2))
    assert some_layers["--activation-offload-fraction"] == ("0.25",)


def test_ncclep_is_a_backend_of_the_flexible_dispatcher():
    flags = message(on_gpus("ep2,dispatcher=ncclep", 2))
    assert flags["--moe-token-dispatcher-type"] == ("flex",)
    assert flags["--moe-flex-dispatcher-backend"] == ("ncclep",)
    with pytest.raises(BadInput, match="expert_fc1 would offload"):
        megatron_flags(on_gpus("ep2,dispatcher=ncclep,overlap=ep,offload=expert_fc1", 2))


def test_a_gather_of_keys_is_spelt_as_transformer_engine_does():
    assert message(on_gpus("cp2,cp_comm=allgather", 2))["--cp-comm-type"] == ("all_gather",)


def test_captured_graphs_do_without_growing_segments():
    assert "expandable_segments" not in render_megatron_script(PLANS["graphs"])
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in render_megatron_script(
        PLANS["folded"]
    )
