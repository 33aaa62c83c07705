"""Every model of the catalogue in any legal layout: nothing is written that Megatron-LM refuses."""

from functools import cache

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_parser import check_options, parse_flags
from moewright.codec import parse_layout
from moewright.exporters.megatron.refusals import find_refusals
from moewright.exporters.megatron.script import environment_variables, megatron_flags
from moewright.intake import catalogue
from moewright.rules.legality import check_legality
from moewright.spec.layout import Layout
from moewright.spec.plan import Estimate, Plan, Verdict
from moewright.spec.workload import (
    BatchRampSpec,
    Dtype,
    LossSpec,
    RouterForce,
    RouterTraining,
    Workload,
)

NO_ESTIMATE = Estimate(
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
# What Megatron-LM's export refuses of these models, whatever the layout.
CANNOT = {
    "allenai/OLMoE-1B-7B-0924": "model.attention.qk_norm",
    "deepseek-ai/DeepSeek-V2": "model.moe.router.group_scores",
    "mistralai/Mistral-7B-v0.1": "model.attention.sliding_window",
    "moonshotai/Kimi-K2": "model.attention.rope.scaling",
    "openai/gpt-oss-120b": "model.mlp_bias",
    "openai/gpt-oss-20b": "model.mlp_bias",
}


@cache
def model(name):
    return catalogue.model(name)


@cache
def devices(count):
    return catalogue.hardware(f"{count}xH800")


def plan_of(name, layout, workload):
    return Plan(
        model=model(name),
        workload=workload,
        hardware=devices(layout.world_size),
        layout=layout,
        estimate=NO_ESTIMATE,
        fingerprint="",
    )


def test_these_models_are_refused_for_these_reasons_and_no_others():
    workload = Workload(seq_len=4096, global_batch=64)
    reasons = {
        name: find_refusals(plan_of(name, Layout(world_size=8), workload))
        for name in catalogue.model_names()
    }
    assert {
        name: first.field for name, (first, *_) in ((n, r) for n, r in reasons.items() if r)
    } == CANNOT


def some(draw, *choices):
    """Draw a layout key and one of its values, or nothing."""
    return draw(st.sampled_from(choices))


@st.composite
def layouts(draw, experts: bool):
    tp = some(draw, 1, 1, 2, 4, 8)
    pp = some(draw, 1, 1, 2, 4, 8)
    vpp = some(draw, 1, 1, 2, 3, 4) if pp > 1 else 1
    cp = some(draw, 1, 1, 1, 2, 4)
    ep = some(draw, 1, 2, 4, 8) if experts else 1
    etp = some(draw, 1, 1, 1, 2) if experts else 1
    words = [
        f"tp{tp}",
        f"pp{pp}",
        f"vpp{vpp}",
        f"cp{cp}",
        f"ep{ep}",
        f"etp{etp}",
        f"mbs{some(draw, 1, 1, 2, 4)}",
    ]
    words.append(f"zero{some(draw, 1, 1, 1, 0, 3)}")
    if cp > 1:
        words.append(f"cp_comm={some(draw, 'p2p', 'allgather', 'a2a', 'a2a+p2p')}")
    modules = ("moe_act", "moe", "shared_experts") if experts else ("mlp",)
    recompute = some(
        draw, "none", "none", "full", "block1", "uniform2", "layernorm", "core_attn", "mla_up_proj"
    )
    more = "+".join(draw(st.sets(st.sampled_from(modules), max_size=2)))
    if more and recompute not in ("full", "block1", "uniform2"):
        recompute = more
    words.append(f"recompute={recompute}")
    offload = some(
        draw,
        "none",
        "none",
        "none",
        "optimizer",
        "optimizer0.5",
        "attn_norm+qkv_linear",
        "core_attn+attn_proj",
    )
    words.append(f"offload={offload}")
    overlap = draw(
        st.sampled_from(
            ("none", "none", "grad", "grad+param", "grad+param+tp", "tp", "p2p", "p2p+grad")
        )
    )
    if experts:
        words.append(
            f"dispatcher={some(draw, 'alltoall', 'alltoall', 'allgather', 'deepep', 'hybridep')}"
        )
        words.append(f"capacity={some(draw, 0, 0, 0, 1.25)}")
        overlap = some(draw, overlap, overlap, "ep+p2p", "ep+grad")
    words.append(f"overlap={overlap}")
    routed_graph = "attn+moe_router" if experts else "attn"
    words.append(f"graphs={some(draw, 'none', 'none', 'attn', routed_graph, 'full')}")
    return parse_layout(",".join(words), world_size=some(draw, 1, 2, 8, 16, 64, 256))


@st.composite
def workloads(draw):
    precision = some(draw, Dtype.BF16, Dtype.BF16, Dtype.FP32, Dtype.FP16, Dtype.FP8, Dtype.MXFP8)
    return Workload(
        seq_len=some(draw, 2048, 4096, 131072),
        global_batch=2048,
        steps=some(draw, 0, 1000),
        precision=precision,
        grad_dtype=some(draw, Dtype.FP32, Dtype.FP32, Dtype.BF16),
        loss=some(
            draw,
            LossSpec(),
            LossSpec(aux_coeff=1e-3),
            LossSpec(seq_aux_coeff=1e-4, global_aux_coeff=1e-3),
        ),
        router=RouterTraining(force=some(draw, *RouterForce)),
        ramp=some(
            draw,
            BatchRampSpec(),
            BatchRampSpec(),
            BatchRampSpec(ramp_start=512, ramp_increment=512, ramp_samples=10**5),
        ),
    )


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_what_is_written_is_what_megatron_accepts(data):
    name = data.draw(st.sampled_from(sorted(set(catalogue.model_names()) - set(CANNOT))))
    layout, workload = data.draw(layouts(model(name).moe is not None)), data.draw(workloads())
    assume(not check_legality(model(name), workload, layout))
    plan = plan_of(name, layout, workload)
    assume(not find_refusals(plan))
    check_options(
        parse_flags(megatron_flags(plan)), layout.world_size, dict(environment_variables(layout))
    )
