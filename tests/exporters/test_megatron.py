import shlex
import subprocess
from dataclasses import replace

import pytest

from megatron_parser import check_options, parse_flags
from moewright.codec import parse_layout
from moewright.exporters.megatron.script import (
    environment_variables,
    megatron_flags,
    render_megatron_script,
)
from moewright.intake import catalogue
from moewright.spec.errors import BadInput
from moewright.spec.hardware import DeviceKind
from moewright.spec.layout import DispatcherKind, Layout, Offload, Overlap, Recompute
from moewright.spec.model import AttentionKind, AttentionSpec, QkNorm, RopeSpec, ScoreFunction
from moewright.spec.workload import (
    BatchRampSpec,
    DataSpec,
    DocumentMasking,
    DropPolicy,
    Dtype,
    LossSpec,
    OptimizerSpec,
    RouterForce,
    RouterTraining,
)
from sample_run import plan, with_recompute

DEEPSEEK_ATTENTION = AttentionSpec(
    kind=AttentionKind.MLA,
    heads=8,
    kv_heads=8,
    head_dim=192,
    v_head_dim=128,
    q_lora_rank=384,
    kv_lora_rank=128,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    rope=RopeSpec(
        scaling="yarn",
        factor=40,
        original_max_position=4096,
        mscale=1.0,
        mscale_all_dim=1.0,
        interleaved=True,
    ),
)


def on_gpus(text: str, world: int, *, layers: int = 6, base=None):
    """Return the sample plan on `world` GPUs in nodes of eight, in the layout `text`."""
    base = base or plan()
    model = replace(base.model, layers=layers, moe_layers=(True,) * layers)
    device = replace(base.hardware.device, kind=DeviceKind.CUDA, name="GPU")
    fabric = replace(base.hardware.fabric, domain_size=8, devices_per_node=8)
    hardware = replace(base.hardware, count=world, device=device, fabric=fabric)
    return replace(
        base, model=model, hardware=hardware, layout=parse_layout(text, world_size=world)
    )


def deepseek(text="tp2,ep8", world=16):
    base = on_gpus(text, world)
    moe = base.model.moe
    router = replace(
        moe.router,
        score=ScoreFunction.SIGMOID,
        selection_bias=True,
        groups=4,
        top_groups=2,
        scaling_factor=2.5,
    )
    moe = replace(moe, router=router, shared_ffn_size=192, shared_gate=True)
    model = replace(
        base.model,
        attention=DEEPSEEK_ATTENTION,
        moe=moe,
        dense_ffn_size=1024,
        moe_layers=(False, True, True, True, True, True),
        mtp_layers=1,
    )
    return replace(base, model=model)


def message(options) -> dict[str, tuple[str, ...]]:
    return parse_flags(megatron_flags(options))


PLANS = {
    "one rank": on_gpus("", 1),
    "folded": on_gpus("tp2,ep8,mbs2,recompute=select,overlap=grad+param+tp", 16),
    "virtual stages": on_gpus("tp2,pp4,vpp3,ep4,vpp_group=4", 64, layers=94),
    "virtual stages that overlap": on_gpus("pp2,vpp3,ep4,overlap=p2p+ep", 8),
    "layout string": on_gpus("pp2,vpp2,overlap=p2p,layout='Ett|t|tt|tL'", 4),
    "context in two levels": on_gpus("cp8,cp_comm=a2a+p2p", 8, layers=4),
    "packed documents": replace(
        on_gpus("", 1),
        workload=replace(
            plan().workload, data=DataSpec(train="a", documents=DocumentMasking.RESTARTED)
        ),
    ),
    "context and full recompute": on_gpus("tp2,cp2,recompute=full,cp_comm=a2a", 8),
    "ZeRO-3": on_gpus("zero3,ep4", 8),
    "ZeRO-0": on_gpus("zero0", 2),
    "offload": on_gpus("offload=optimizer", 2),
    "activation offload": on_gpus("offload=expert_fc1+moe_act", 2),
    "graphs": on_gpus("graphs=attn+moe_router", 2),
    "whole graph": on_gpus("graphs=full", 2),
    "DeepEP": on_gpus("ep8,dispatcher=deepep", 8),
    "capacity": on_gpus("ep2,dispatcher=allgather,capacity=1.25", 2),
    "latent attention": deepseek(),
    "low-precision optimizer": replace(
        on_gpus("", 1),
        workload=replace(
            plan().workload, grad_dtype=Dtype.BF16, optimizer=OptimizerSpec(moment_dtype=Dtype.BF16)
        ),
    ),
    "no data": replace(on_gpus("", 1), workload=replace(plan().workload, data=DataSpec())),
    "training data only": replace(
        on_gpus("", 1), workload=replace(plan().workload, data=DataSpec(train="a"))
    ),
    "fp16": replace(on_gpus("", 1), workload=replace(plan().workload, precision=Dtype.FP16)),
    "growing batches": replace(
        on_gpus("", 1),
        workload=replace(
            plan().workload, ramp=BatchRampSpec(ramp_start=4, ramp_increment=4, ramp_samples=96)
        ),
    ),
    "three balance losses": replace(
        on_gpus("capacity=2", 1),
        workload=replace(
            plan().workload,
            loss=LossSpec(aux_coeff=0.01, seq_aux_coeff=1e-4, global_aux_coeff=1e-3, z_coeff=1e-3),
            router=RouterTraining(
                force=RouterForce.SKEWED, force_std=2, drop_policy=DropPolicy.POSITION
            ),
        ),
    ),
}


@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS.keys())
def test_every_flag_is_one_that_megatron_parses_and_no_two_exclude_each_other(options):
    check_options(
        parse_flags(megatron_flags(options)),
        options.layout.world_size,
        dict(environment_variables(options.layout)),
    )


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
    assert "--no-overlap-p2p-communication" in flags
    even = message(PLANS["virtual stages that overlap"])  # 6 layers on 6 virtual stages
    assert "--account-for-loss-in-pipeline-split" not in even
    assert "--no-overlap-p2p-communication" not in even


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


def routed(**fields):
    base = on_gpus("", 1)
    moe = base.model.moe
    return replace(
        base, model=replace(base.model, moe=replace(moe, router=replace(moe.router, **fields)))
    )


def six_of_three(model):
    """Return the model with DeepSeek-V2's router: six experts of three groups."""
    router = replace(model.moe.router, top_k=6, top_groups=3, group_scores=1)
    return replace(model, moe=replace(model.moe, router=router))


REFUSED = [
    (plan(), "hardware.device.kind=cpu", "cuda"),
    (changed(zero=0, offload=(Offload.OPTIMIZER,)), "layout.zero=0", "1"),
    (changed(dispatcher=DispatcherKind.DEDUP), "layout.dispatcher=dedup", "deepep"),
    (
        changed(recompute=(Recompute.LAYERNORM, Recompute.LOSS)),
        "layout.recompute=loss",
        "layernorm",
    ),
    (on_gpus("pp2,vpp3,schedule=zbv,overlap=p2p", 4), "layout.schedule=zbv", "interleaved"),
    (changed(overlap=(Overlap.PARAM,)), "layout.overlap=param", "grad+param"),
    (changed(overlap=(Overlap.P2P,)), "layout.overlap=p2p", "vpp above 1"),
    (changed(sp=False, overlap=(Overlap.TP,)), "layout.overlap=tp", "sp"),
    (on_gpus("pp2,vpp3", 4), "layout.overlap", "p2p"),
    (trained(precision=Dtype.FP8), "workload.precision=fp8", "bf16"),
    (
        replace(
            changed(recompute=(Recompute.MOE_ACT,)),
            workload=replace(plan().workload, precision=Dtype.FP32),
        ),
        "layout.recompute=moe_act",
        "moe",
    ),
    (
        replace(deepseek(), model=six_of_three(deepseek().model)),
        "model.moe.router.group_scores=1",
        "2",
    ),
    (trained(precision=Dtype.FP16), "workload.precision=fp16", "bf16"),
    (trained(precision=Dtype.FP32, grad_dtype=Dtype.BF16), "workload.grad_dtype=bf16", "fp32"),
    (attended(qk_norm=QkNorm.FULL), "model.attention.qk_norm=full", "per_head"),
    (attended(sinks=True), "model.attention.sinks=True", "False"),
    (attended(sliding_window=128), "model.attention.sliding_window=128", "0"),
    (attended(out_bias=True), "model.mlp_bias=False", "True"),
    (attended(rope=RopeSpec(scaling="yarn")), "model.attention.rope.scaling=yarn", "default"),
    (attended(rope=RopeSpec(theta=1e4 + 0.5)), "model.attention.rope.theta=10000.5", "10000"),
    (routed(selection_bias=True), "model.moe.router.selection_bias=True", "False"),
    (
        routed(score=ScoreFunction.SIGMOID, renormalize=False),
        "model.moe.router.renormalize=False",
        "True",
    ),
    (routed(logit_bias=True), "model.moe.router.logit_bias=True", "False"),
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
    assert "torchrun --nnodes 8 --nproc-per-node 8 --node-rank $NODE_RANK" in script
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
    assert flags["--rampup-batch-size"] == ("4", "4", "96")
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
        ("H800", Dtype.MXFP8, ("e4m3", "blockwise")),
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


def test_captured_graphs_do_without_growing_segments():
    assert "expandable_segments" not in render_megatron_script(PLANS["graphs"])
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in render_megatron_script(
        PLANS["folded"]
    )
