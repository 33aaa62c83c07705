"""Models, plans, layouts and workloads for the tests of Megatron-LM's export and import."""

import csv
from dataclasses import replace
from functools import cache
from importlib import resources

from hypothesis import strategies as st

from moewright.codec import parse_layout
from moewright.exporters.megatron.layout import training_steps
from moewright.intake import catalogue
from moewright.rules.job import plan_job
from moewright.rules.limits.megatron_limits import megatron_refusals
from moewright.spec.layout import Overlap
from moewright.spec.plan import Estimate, Plan, Verdict
from moewright.spec.workload import (
    BatchRampSpec,
    Dtype,
    LossSpec,
    RouterForce,
    RouterTraining,
    Workload,
)

OPTIONS = {
    row["flag"]: row
    for row in csv.DictReader(
        resources.files("moewright.intake.megatron")
        .joinpath("data/megatron_flags.csv")
        .read_text()
        .splitlines()
    )
}
_NO_ESTIMATE = Estimate(
    ledgers=(),
    peak_rank=0,
    peak_bytes=0,
    capacity_bytes=0,
    verdict=Verdict.FITS,
    margin_bytes=0,
    peak_sd_bytes=0,
    largest="",
    step_s=0,
    step_sd=0,
    shares=(),
    micro_batches=0,
    bubble_fraction=0,
    tokens_per_s_per_device=0,
    model_flops_per_step=0,
    tflops_per_device=0,
    mfu=0,
    hfu=0,
    assumptions=(),
)
# The field that the export to Megatron-LM refuses of a model, whatever the layout.
REFUSED_MODELS = {
    "HuggingFaceTB/SmolLM3-3B": "model.rope_layers",
    "MiniMaxAI/MiniMax-M2": "model.attention.qk_norm",
    "Nemotron-15B": "model.activation",
    "Nemotron-340B": "model.activation",
    "Qwen/Qwen3-Next-80B-A3B": "model.mixers",
    "Qwen/Qwen3.5-35B-A3B": "model.mixers",
    "Qwen/Qwen3.5-397B-A17B": "model.mixers",
    "ai21labs/AI21-Jamba-1.5-Large": "model.mixers",
    "ai21labs/Jamba-v0.1": "model.mixers",
    "allenai/OLMo-3-7B": "model.mixers",
    "allenai/OLMoE-1B-7B-0924": "model.attention.qk_norm",
    "baidu/ERNIE-4.5-21B-A3B": "model.moe.router.selection_bias",
    "baidu/ERNIE-4.5-300B-A47B": "model.moe.router.selection_bias",
    "deepseek-ai/DeepSeek-V2": "model.moe.router.group_scores",
    "deepseek-ai/DeepSeek-V3.2": "model.attention.indexer.top_k",
    "deepseek-ai/DeepSeek-V4-Flash": "model.mixers",
    "deepseek-ai/DeepSeek-V4-Pro": "model.attention.kind",
    "ibm-granite/granite-3.0-1b-a400m": "model.multipliers",
    "ibm-granite/granite-3.0-3b-a800m": "model.multipliers",
    "internlm/internlm-7b": "model.mlp_bias",
    "meta-llama/Llama-4-Maverick-17B-128E": "model.attention.chunked",
    "meta-llama/Llama-4-Scout": "model.attention.qk_norm",
    "microsoft/Phi-3.5-MoE": "model.moe.expert_bias",
    "moonshotai/Kimi-K2": "model.attention.rope.scaling",
    "moonshotai/Kimi-Linear-48B-A3B": "model.mixers",
    "nvidia/Nemotron-3-Nano-30B-A3B": "model.activation",
    "nvidia/Nemotron-3-Nano-4B": "model.activation",
    "nvidia/Nemotron-3-Super-120B-A12B": "model.activation",
    "nvidia/Nemotron-3-Ultra-550B": "model.activation",
    "nvidia/Nemotron-3.5-Lightning-30B-A3B": "model.activation",
    "nvidia/Nemotron-H-56B": "model.activation",
    "tencent/Hunyuan-A13B": "model.attention.qk_norm",
    "xai-org/grok-1": "model.multipliers",
    "zai-org/GLM-5": "model.attention.indexer.top_k",
    "zai-org/GLM-5.2": "model.attention.indexer.top_k",
}


def parse_flags(flags):
    """Return flags as {name: values}, after asserting what Megatron-LM's parser would.

    They are known, stand once, and have the right number of values, types and choices.
    """
    names = [name for name, *_ in flags]
    assert len(names) == len(set(names)), names
    options = {name: tuple(values) for name, *values in flags}
    for name, values in options.items():
        assert name in OPTIONS, name
        option = OPTIONS[name]
        has_right_count = {"": len(values) == 1, "+": len(values) >= 1, "*": True}
        if option["nargs"] in has_right_count:
            assert has_right_count[option["nargs"]], name
        else:
            assert len(values) == int(option["nargs"]), name
        for value in values:
            assert value, name
            if option["choices"]:
                assert value in option["choices"].split(), (name, value)
            if option["type"] in ("int", "float"):
                {"int": int, "float": float}[option["type"]](value)
    return options


@cache
def catalogue_model(name):
    return catalogue.model(name)


@cache
def h800_hardware(count):
    return catalogue.hardware(f"{count}xH800")


def build_plan(name, layout, workload):
    return Plan(
        model=catalogue_model(name),
        workload=workload,
        hardware=h800_hardware(layout.world_size),
        layout=layout,
        estimate=_NO_ESTIMATE,
        fingerprint="",
    )


def as_read(layout):
    """Return a layout without what Megatron overlaps by itself: messages of virtual stages."""
    return replace(layout, overlap=tuple(o for o in layout.overlap if o is not Overlap.P2P))


def as_written(plan):
    """Return a plan with the length that stands in for none."""
    return replace(plan, workload=replace(plan.workload, steps=training_steps(plan.workload)))


def refusals(plan):
    return megatron_refusals(plan_job(plan), plan.hardware)


def draw_choice(draw, *choices):
    """Draw one of the choices."""
    return draw(st.sampled_from(choices))


@st.composite
def layouts(draw, experts: bool):
    tp = draw_choice(draw, 1, 1, 2, 4, 8)
    pp = draw_choice(draw, 1, 1, 2, 4, 8)
    vpp = draw_choice(draw, 1, 1, 2, 3, 4) if pp > 1 else 1
    cp = draw_choice(draw, 1, 1, 1, 2, 4)
    ep = draw_choice(draw, 1, 2, 4, 8) if experts else 1
    etp = draw_choice(draw, 1, 1, 1, 2) if experts else 1
    terms = [
        f"tp{tp}",
        f"pp{pp}",
        f"vpp{vpp}",
        f"cp{cp}",
        f"ep{ep}",
        f"etp{etp}",
        f"mbs{draw_choice(draw, 1, 1, 2, 4)}",
    ]
    terms.append(f"zero{draw_choice(draw, 1, 1, 1, 0, 2, 3)}")
    order = draw_choice(draw, "tp-cp-ep-dp-pp", "tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")
    if pp > 1:
        terms.append(f"order={order}")
    if cp > 1:
        terms.append(f"cp_comm={draw_choice(draw, 'p2p', 'allgather', 'a2a', 'a2a+p2p')}")
    modules = ("moe_act", "moe", "shared_experts") if experts else ("mlp",)
    recompute = draw_choice(
        draw, "none", "none", "full", "block1", "uniform2", "layernorm", "core_attn", "mla_up_proj"
    )
    more = "+".join(draw(st.sets(st.sampled_from(modules), max_size=2)))
    if more and recompute not in ("full", "block1", "uniform2"):
        recompute = more
    terms.append(f"recompute={recompute}")
    offload = draw_choice(
        draw,
        "none",
        "none",
        "none",
        "optimizer",
        "optimizer0.5",
        "attn_norm+qkv_linear",
        "core_attn+attn_proj",
    )
    terms.append(f"offload={offload}")
    overlap = draw(
        st.sampled_from(
            ("none", "none", "grad", "grad+param", "grad+param+tp", "tp", "p2p", "p2p+grad")
        )
    )
    if experts:
        dispatcher = draw_choice(draw, "alltoall", "alltoall", "allgather", "deepep", "hybridep")
        terms.append(f"dispatcher={dispatcher}")
        capacity = draw_choice(draw, 0, 0, 0, 1.25)
        terms.append(f"capacity={capacity}")
        if dispatcher == "hybridep" and not capacity:
            terms.append(f"rank_capacity={draw_choice(draw, 0, 1.5)}")
        overlap = draw_choice(draw, overlap, overlap, "ep+p2p", "ep+grad")
    terms.append(f"overlap={overlap}")
    routed_graph = "attn+moe_router" if experts else "attn"
    terms.append(f"graphs={draw_choice(draw, 'none', 'none', 'attn', routed_graph, 'full')}")
    return parse_layout(",".join(terms), world_size=draw_choice(draw, 1, 2, 8, 16, 64, 256))


@st.composite
def workloads(draw):
    precision = draw_choice(
        draw, Dtype.BF16, Dtype.BF16, Dtype.FP32, Dtype.FP16, Dtype.FP8, Dtype.MXFP8
    )
    return Workload(
        seq_len=draw_choice(draw, 2048, 4096, 131072),
        global_batch=2048,
        steps=draw_choice(draw, 0, 1000),
        precision=precision,
        grad_dtype=draw_choice(draw, Dtype.FP32, Dtype.FP32, Dtype.BF16),
        loss=draw_choice(
            draw,
            LossSpec(),
            LossSpec(aux_coeff=1e-3),
            LossSpec(seq_aux_coeff=1e-4, global_aux_coeff=1e-3),
        ),
        router=RouterTraining(force=draw_choice(draw, *RouterForce)),
        ramp=draw_choice(
            draw,
            BatchRampSpec(),
            BatchRampSpec(),
            BatchRampSpec(ramp_start=512, ramp_increment=512, ramp_samples=10**5),
        ),
    )
