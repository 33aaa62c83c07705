import csv
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from moewright.codec import parse_layout
from moewright.export.megatron import megatron, megatron_flags
from moewright.spec.errors import BadInput
from moewright.spec.hardware import DeviceKind
from moewright.spec.layout import Dispatcher, Layout, Overlap
from moewright.spec.model import AttentionKind, AttentionSpec, QkNorm, RopeSpec, ScoreFunction
from moewright.spec.workload import DataSpec, Documents, Dtype, OptimizerSpec
from sample_run import plan, recomputing

with (Path(__file__).parent / "data" / "megatron_flags.csv").open(newline="") as stream:
    OPTIONS = {row["flag"]: row for row in csv.DictReader(stream)}

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
    rope=RopeSpec(scaling="yarn", factor=40, original_max_position=4096, mscale=1.0, mscale_all_dim=1.0),
)


def on_gpus(text: str, world: int, *, layers: int = 6, base=None):
    """The sample plan on `world` GPUs in nodes of eight, in the layout `text`."""
    base = base or plan()
    model = replace(base.model, layers=layers, moe_layers=(True,) * layers)
    device = replace(base.hardware.device, kind=DeviceKind.CUDA, name="GPU")
    fabric = replace(base.hardware.fabric, domain_size=8, devices_per_node=8)
    hardware = replace(base.hardware, count=world, device=device, fabric=fabric)
    return replace(base, model=model, hardware=hardware, layout=parse_layout(text, world_size=world))


def deepseek(text="tp2,ep8", world=16):
    base = on_gpus(text, world)
    moe = base.model.moe
    router = replace(
        moe.router, score=ScoreFunction.SIGMOID, selection_bias=True, groups=4, top_groups=2, scaling_factor=2.5
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


def said(given) -> dict[str, tuple[str, ...]]:
    flags = megatron_flags(given)
    names = [name for name, *_ in flags]
    assert len(names) == len(set(names))
    return {name: tuple(values) for name, *values in flags}


PLANS = {
    "one rank": on_gpus("", 1),
    "folded": on_gpus("tp2,ep8,mbs2,recompute=select,overlap=grad+param+tp", 16),
    "virtual stages": on_gpus("tp2,pp4,vpp3,ep4,vpp_group=4", 64, layers=94),
    "virtual stages that overlap": on_gpus("pp2,vpp3,overlap=p2p+ep", 8),
    "layout string": on_gpus("pp2,vpp2,overlap=p2p,layout='Ett|t|tt|tL'", 4),
    "context in two levels": on_gpus("cp8,cp_comm=a2a+p2p", 8, layers=4),
    "packed documents": replace(
        on_gpus("", 1),
        workload=replace(plan().workload, data=DataSpec(train="a", documents=Documents.RESTARTED)),
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
        workload=replace(plan().workload, grad_dtype=Dtype.BF16, optimizer=OptimizerSpec(moment_dtype=Dtype.BF16)),
    ),
    "no data": replace(on_gpus("", 1), workload=replace(plan().workload, data=DataSpec())),
    "training data only": replace(on_gpus("", 1), workload=replace(plan().workload, data=DataSpec(train="a"))),
    "fp16": replace(on_gpus("", 1), workload=replace(plan().workload, precision=Dtype.FP16)),
}


@pytest.mark.parametrize("given", PLANS.values(), ids=PLANS.keys())
def test_every_flag_is_one_that_megatron_parses_with_those_values(given):
    for name, values in said(given).items():
        option = OPTIONS[name]
        wanted = {"": len(values) == 1, "+": len(values) >= 1, "*": True}.get(option["nargs"])
        assert wanted if wanted is not None else len(values) == int(option["nargs"]), name
        for value in values:
            assert value, name
            if option["choices"]:
                assert value in option["choices"].split(), name
            if option["type"] in ("int", "float"):
                {"int": int, "float": float}[option["type"]](value)


@pytest.mark.parametrize("text", ["tp2,ep8", "tp4", "tp2,ep4,etp2"])
def test_expert_tensor_parallelism_is_always_said_for_its_default_is_tp(text):
    layout = on_gpus(text, 16).layout
    assert said(on_gpus(text, 16))["--expert-tensor-parallel-size"] == (str(layout.etp),)


def test_degrees_batch_and_sequence_parallelism():
    flags = said(PLANS["folded"])
    assert flags["--tensor-model-parallel-size"] == ("2",)
    assert flags["--expert-model-parallel-size"] == ("8",)
    assert flags["--sequence-parallel"] == ()
    assert flags["--micro-batch-size"] == ("2",)
    assert flags["--global-batch-size"] == ("16",)
    assert flags["--recompute-granularity"] == ("selective",)
    assert set(flags["--recompute-modules"]) == {"moe_act", "layernorm"}
    assert flags["--moe-token-dispatcher-type"] == ("alltoall",)  # its own default gathers
    assert {"--overlap-grad-reduce", "--overlap-param-gather", "--tp-comm-overlap"} <= set(flags)
    assert "--sequence-parallel" not in said(PLANS["one rank"])


def test_an_even_split_of_94_layers_counts_embedding_and_loss():
    flags = said(PLANS["virtual stages"])  # 94 + 2 layers on 12 virtual stages
    assert flags["--num-virtual-stages-per-pipeline-rank"] == ("3",)
    assert flags["--microbatch-group-size-per-virtual-pipeline-stage"] == ("4",)
    assert "--account-for-embedding-in-pipeline-split" in flags
    assert "--account-for-loss-in-pipeline-split" in flags
    assert "--no-overlap-p2p-communication" in flags
    even = said(PLANS["virtual stages that overlap"])  # 6 layers on 6 virtual stages
    assert "--account-for-loss-in-pipeline-split" not in even
    assert "--no-overlap-p2p-communication" not in even


def test_a_layout_string_excludes_the_other_ways_to_say_stages():
    flags = said(PLANS["layout string"])
    assert flags["--pipeline-model-parallel-layout"] == ("Ett|t|tt|tL",)
    assert not {name for name in flags if "virtual" in name or "account" in name}


def test_latent_attention_and_dense_first_layers():
    flags = said(deepseek())
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
    assert "--moe-router-pre-softmax" in said(replace(base, model=replace(base.model, moe=raw)))
    assert "--moe-router-pre-softmax" not in said(replace(base, model=replace(base.model, moe=even)))


def changed(**fields):
    base = on_gpus("tp2,ep2", 4)
    return replace(base, layout=replace(base.layout, **fields))


def trained(**fields):
    base = on_gpus("ep2", 2)
    return replace(base, workload=replace(base.workload, **fields))


def attended(**fields):
    base = on_gpus("", 1)
    return replace(base, model=replace(base.model, attention=replace(base.model.attention, **fields)))


def routed(**fields):
    base = on_gpus("", 1)
    moe = base.model.moe
    return replace(base, model=replace(base.model, moe=replace(moe, router=replace(moe.router, **fields))))


REFUSED = [
    (plan(), "hardware.device.kind=cpu", "cuda"),
    (changed(dispatcher=Dispatcher.DEDUP), "layout.dispatcher=dedup", "deepep"),
    (on_gpus("pp2,vpp3,schedule=zbv,overlap=p2p", 4), "layout.schedule=zbv", "interleaved"),
    (changed(overlap=(Overlap.PARAM,)), "layout.overlap=param", "grad+param"),
    (changed(overlap=(Overlap.P2P,)), "layout.overlap=p2p", "vpp above 1"),
    (changed(sp=False, overlap=(Overlap.TP,)), "layout.overlap=tp", "sp"),
    (on_gpus("pp2,vpp3", 4), "layout.overlap", "p2p"),
    (trained(precision=Dtype.FP8), "workload.precision=fp8", "bf16"),
    (trained(precision=Dtype.FP16), "workload.precision=fp16", "bf16"),
    (trained(precision=Dtype.FP32, grad_dtype=Dtype.BF16), "workload.grad_dtype=bf16", "fp32"),
    (attended(qk_norm=QkNorm.FULL), "model.attention.qk_norm=full", "per_head"),
    (attended(sinks=True), "model.attention.sinks=True", "False"),
    (attended(sliding_window=128), "model.attention.sliding_window=128", "0"),
    (attended(out_bias=True), "model.mlp_bias=False", "True"),
    (attended(rope=RopeSpec(scaling="yarn")), "model.attention.rope.scaling=yarn", "default"),
    (attended(rope=RopeSpec(theta=1e4 + 0.5)), "model.attention.rope.theta=10000.5", "10000"),
    (routed(selection_bias=True), "model.moe.router.selection_bias=True", "False"),
    (routed(score=ScoreFunction.SIGMOID, renormalize=False), "model.moe.router.renormalize=False", "True"),
    (routed(logit_bias=True), "model.moe.router.logit_bias=True", "False"),
]


@pytest.mark.parametrize(("given", "field", "nearest"), REFUSED, ids=[field for _, field, _ in REFUSED])
def test_what_megatron_cannot_say_is_refused_with_the_nearest_that_it_can(given, field, nearest):
    with pytest.raises(BadInput) as caught:
        megatron_flags(given)
    (reason,) = caught.value.reasons
    assert str(reason).startswith(f"{field}: Megatron-LM ")
    assert reason.nearest == nearest


def test_the_script_is_one_command_that_a_shell_reads(tmp_path):
    script = megatron(PLANS["layout string"])
    assert "torchrun --standalone --nproc-per-node 4 pretrain_gpt.py" in script
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" in script
    path = tmp_path / "run.sh"
    path.write_text(script.replace("torchrun", "printf '%s\\n'"))
    words = subprocess.run(["sh", path], capture_output=True, text=True, check=True).stdout.splitlines()
    assert "Ett|t|tt|tL" in words
    assert words[words.index("--vocab-size") + 1] == "4096"
    command = script[script.index("torchrun") :]
    assert len(shlex.split(command.replace("\\\n", " "))) == len(words) + 1


def test_several_nodes_meet_at_the_master_and_overlap_of_experts_needs_queues():
    script = megatron(PLANS["virtual stages"])
    assert "torchrun --nnodes 8 --nproc-per-node 8 --node-rank $NODE_RANK" in script
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32" in megatron(PLANS["virtual stages that overlap"])
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32" in megatron(PLANS["ZeRO-3"])


def test_a_name_cannot_leave_its_comment():
    base = on_gpus("", 1)
    script = megatron(replace(base, model=replace(base.model, name="x\nrm -rf y"), layout=Layout(world_size=1)))
    assert not [line for line in script.splitlines() if line.startswith("rm")]


def test_recompute_of_modules_keeps_their_names():
    assert said(on_gpus("ep2", 2, base=recomputing(plan())))["--num-experts"] == ("16",)
    flags = said(on_gpus("recompute=moe+mla_up_proj+shared_experts", 2))
    assert set(flags["--recompute-modules"]) == {"moe", "mla_up_proj", "shared_experts"}


def test_context_parallelism_in_two_levels_says_both():
    flags = said(on_gpus("cp8,cp_comm=a2a+p2p", 8))
    assert (flags["--cp-comm-type"], flags["--hierarchical-context-parallel-sizes"]) == (("a2a+p2p",), ("2", "4"))
