"""Plans as torchtitan's Python configuration, run against stand-ins of its modules.

Degrees multiply to the world, fields are its own, and what it cannot say is refused by name.
"""

import sys
import types
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_cases import build_plan
from moewright.api.running import list_trainers
from moewright.codec import parse_layout
from moewright.exporters.torchtitan import render_torchtitan_config
from moewright.intake import catalogue
from moewright.rules.job import plan_job
from moewright.rules.limits.legality import check_legality
from moewright.rules.limits.torchtitan_limits import torchtitan_refusals
from moewright.spec.errors import BadInput
from moewright.spec.layout import (
    CpComm,
    DispatcherKind,
    ExpertPlacement,
    Layout,
    Recompute,
    Schedule,
)
from moewright.spec.workload import (
    BatchRampSpec,
    CheckpointSpec,
    DataSpec,
    Dtype,
    LossSpec,
    LrDecay,
    OptimizerSpec,
    Workload,
)
from sample_run import plan as cpu_plan

LLAMA, QWEN = "meta-llama/Meta-Llama-3-8B", "Qwen/Qwen3-30B-A3B"
# Fields of main at b5bcd76c6 (2026-08-21) that the exporter may write.
KNOWN = {
    "training": {
        *("num_tokens_per_microbatch_per_dp_rank", "num_tokens_per_train_step"),
        *("max_context_length", "max_norm", "steps", "dtype", "mixed_precision_param"),
        *("mixed_precision_reduce", "disable_cuda_graphs"),
    },
    "parallelism": {
        *("data_parallel_replicate_degree", "data_parallel_shard_degree"),
        *("fsdp_reshard_after_forward", "tensor_parallel_degree", "context_parallel_degree"),
        *("pipeline_parallel_degree", "pipeline_parallel_schedule", "num_pp_microbatches"),
        *("module_fqns_per_model_part", "expert_parallel_degree"),
    },
    "lr_scheduler": {"warmup_steps", "decay_type", "decay_ratio", "min_lr_factor"},
    "checkpoint": {
        "enable",
        "folder",
        "initial_load_path",
        "interval",
        "keep_latest_k",
        "async_mode",
    },
    "debug": {"seed", "moe_force_load_balance"},
    "optimizer": {"lr", "betas", "eps", "weight_decay"},
}
MODULES = (
    *("components.checkpointer", "components.data", "components.loss", "components.optimizer"),
    *("config", "distributed.activation_checkpoint", "hf_datasets.text_datasets"),
    *("models.common.config_utils", "models.qwen3", "models.llama3", "models.deepseek_v3"),
    "trainer",
)


class Recorder:
    """A stand-in for a class, a function or a table, which keeps the fields it is given."""

    def __init__(self, *words, **fields):
        self.words = words
        self.fields = fields

    def __call__(self, *words, **fields):
        return Recorder(*words, **fields)

    def __getattr__(self, name):
        return Recorder()

    def __getitem__(self, name):
        return name


def planned(text, world=16, name=LLAMA, **work):
    workload = Workload(seq_len=4096, global_batch=64, **work)
    return build_plan(name, parse_layout(text, world_size=world), workload)


def built(plan, monkeypatch):
    """Run the module that is written; return the fields of its configuration."""
    for name in MODULES:
        module = types.ModuleType(f"torchtitan.{name}")
        module.__getattr__ = lambda name: Recorder()
        monkeypatch.setitem(sys.modules, f"torchtitan.{name}", module)
    space = {"__name__": "moewright_plan"}
    exec(compile(render_torchtitan_config(plan), "moewright_plan.py", "exec"), space)
    return space["config"]().fields


@pytest.fixture
def written(monkeypatch):
    def write(*options, **more):
        return check_written(planned(*options, **more), monkeypatch)

    return write


def check_written(plan, monkeypatch):
    """Return the sections of a configuration, after checking their fields and degrees."""
    fields = built(plan, monkeypatch)
    result = {name: value.fields for name, value in fields.items() if name in KNOWN}
    assert {section: set(names) - KNOWN[section] for section, names in result.items()} == {
        section: set() for section in KNOWN
    }
    result["model"] = fields["model_spec"]
    result["activation_checkpoint"] = fields["activation_checkpoint"]
    parallel = result["parallelism"]
    sizes = (
        "data_parallel_shard",
        "data_parallel_replicate",
        "tensor_parallel",
        "context_parallel",
        "pipeline_parallel",
    )
    product = 1
    for size in sizes:
        product *= parallel[f"{size}_degree"]
    assert product == plan.layout.world_size
    return result


def test_full_sharding_and_experts_of_data_ranks(written):
    result = written("zero3,ep8,mbs2,recompute=full", 16, QWEN)
    assert result["model"].words == ("30B-A3B",)
    assert result["model"].fields == {"moe_comm_backend": "standard"}
    parallel = result["parallelism"]
    assert (parallel["data_parallel_shard_degree"], parallel["expert_parallel_degree"]) == (16, 8)
    assert result["training"]["num_tokens_per_microbatch_per_dp_rank"] == 2 * 4096
    assert result["training"]["num_tokens_per_train_step"] == 64 * 4096
    assert result["training"]["steps"] == 100
    assert result["activation_checkpoint"] is not None
    deepep = written("zero3,ep8,dispatcher=deepep", 16, QWEN)
    assert deepep["model"].fields == {"moe_comm_backend": "deepep"}
    assert deepep["activation_checkpoint"] is None


def test_copies_and_hybrid_shards(written):
    assert written("zero0,tp2", 16)["parallelism"]["data_parallel_replicate_degree"] == 8
    parallel = written("zero3,shard4", 16)["parallelism"]
    assert (parallel["data_parallel_shard_degree"], parallel["data_parallel_replicate_degree"]) == (
        4,
        4,
    )
    # Torchtitan counts the context-parallel ranks of a shard apart.
    parallel = written("zero3,cp2,cp_comm=allgather,shard4", 16)["parallelism"]
    assert (parallel["data_parallel_shard_degree"], parallel["data_parallel_replicate_degree"]) == (
        2,
        4,
    )


def test_a_pipeline_names_the_modules_of_every_stage(written):
    result = written("zero3,pp4,vpp2,mbs2,overlap=p2p", 16)
    parallel = result["parallelism"]
    assert parallel["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert parallel["num_pp_microbatches"] == 64 // (4 * 2)
    parts = parallel["module_fqns_per_model_part"]
    assert len(parts) == 8
    layers = [f"layers.{layer}" for layer in range(32)]
    assert [name for part in parts for name in part] == [
        "tok_embeddings",
        *layers,
        "norm",
        "lm_head",
    ]
    assert written("zero3,pp2,ep8", 16, QWEN)["parallelism"]["pipeline_parallel_degree"] == 2


def test_ranks_start_again_from_what_was_saved():
    saving = planned("zero3", checkpoint=CheckpointSpec(every_steps=10))
    assert "--max-restarts 3 -m torchtitan.train" in str(render_torchtitan_config(saving))
    assert "--max-restarts" not in str(render_torchtitan_config(planned("zero3")))


def test_further_tokens_are_predicted_where_torchtitan_has_them(monkeypatch):
    plan = planned("zero3,ep8", 256, "deepseek-ai/DeepSeek-V3")
    plan = replace(plan, workload=replace(plan.workload, global_batch=256))
    assert check_written(plan, monkeypatch)["model"].fields["num_mtp_layers"] == 1
    assert "loss=MTPLoss.Config(" in render_torchtitan_config(plan)


def test_a_rate_that_stays_and_falls_in_the_end(written):
    spec = OptimizerSpec(lr_decay=LrDecay.WSD, wsd_decay_steps=25)
    schedule = written("zero3", 16, steps=200, optimizer=spec)["lr_scheduler"]
    assert (schedule["decay_type"], schedule["decay_ratio"]) == ("linear", 0.125)
    line = OptimizerSpec(lr_decay=LrDecay.LINEAR)
    schedule = written("zero3", 16, steps=200, optimizer=line)["lr_scheduler"]
    assert schedule["decay_type"] == "linear"
    assert "decay_ratio" not in schedule
    plain = written("zero3", 16, steps=200)["lr_scheduler"]
    assert plain["decay_type"] == "cosine"
    assert "decay_ratio" not in plain


def test_what_else_a_job_says(written):
    result = written(
        "zero3,cp2,cp_comm=allgather",
        16,
        steps=900,
        seed=3,
        precision=Dtype.FP32,
        optimizer=OptimizerSpec(lr=1e-4, warmup_steps=10, min_lr_fraction=0.2),
        checkpoint=CheckpointSpec(every_steps=100),
    )
    assert result["lr_scheduler"] == {
        "warmup_steps": 10,
        "decay_type": "cosine",
        "min_lr_factor": 0.2,
    }
    assert result["training"]["mixed_precision_param"] == "float32"
    assert result["optimizer"]["betas"] == (0.9, 0.95)
    assert result["checkpoint"] == {
        "enable": True,
        "folder": "checkpoints",
        "interval": 100,
        "keep_latest_k": 2,
        "async_mode": "disabled",
    }
    assert (result["training"]["steps"], result["debug"]["seed"]) == (900, 3)


@st.composite
def sharded_layouts(draw):
    """Draw a layout of 64 ranks from what torchtitan's configuration has a field for."""
    tp, cp, pp = (draw(st.sampled_from((1, 1, 2, 4))) for _ in range(3))
    vpp = draw(st.sampled_from((1, 1, 2))) if pp > 1 else 1
    schedules = ("interleaved", "zbv", "dualpipev") if vpp == 2 else ("1f1b",)
    terms = [f"tp{tp},cp{cp},pp{pp},vpp{vpp},ep{draw(st.sampled_from((1, 2, 4, 8, 16)))}"]
    terms.append(f"mbs{draw(st.sampled_from((1, 2)))},zero{draw(st.sampled_from((0, 3, 3)))}")
    terms.append(f"shard{draw(st.sampled_from((0, 0, 4, 8)))}")
    terms.append(f"etp{draw(st.sampled_from((1, tp)))}")
    terms.append(f"recompute={draw(st.sampled_from(('none', 'full')))}")
    terms.append(f"dispatcher={draw(st.sampled_from(('alltoall', 'deepep')))}")
    if pp > 1:
        terms.append(f"schedule={draw(st.sampled_from(schedules))}")
    if cp > 1:
        terms.append("cp_comm=allgather")
    return parse_layout(",".join(terms), world_size=64)


def read_layout(written, *, has_experts):
    """Return the layout that a configuration asks for."""
    parallel, training = written["parallelism"], written["training"]
    shards, copies = (parallel[f"data_parallel_{name}_degree"] for name in ("shard", "replicate"))
    tp, cp, pp, ep = (
        parallel[f"{name}_parallel_degree"] for name in ("tensor", "context", "pipeline", "expert")
    )
    parts = parallel.get("module_fqns_per_model_part", [()])
    named = (s for s in Schedule if s.facts.torchtitan)
    schedules = {schedule.facts.torchtitan: schedule for schedule in named}
    backends = {kind.facts.torchtitan: kind for kind in DispatcherKind if kind.facts.torchtitan}
    model = written["model"].fields
    return Layout(
        world_size=shards * copies * tp * cp * pp,
        tp=tp,
        sp=tp > 1,
        cp=cp,
        cp_comm=CpComm.ALL_GATHER if cp > 1 else CpComm.P2P,
        pp=pp,
        vpp=len(parts) // pp,
        ep=ep,
        etp=1 if ep > 1 or not has_experts else tp,
        mbs=training["num_tokens_per_microbatch_per_dp_rank"] // training["max_context_length"],
        zero=3 if shards * cp > 1 else 0,
        shard=shards * cp if shards * cp > 1 and copies > 1 else 0,
        schedule=schedules[parallel.get("pipeline_parallel_schedule", "1F1B")],
        recompute=(Recompute.FULL,) if written["activation_checkpoint"] else (),
        dispatcher=backends[model.get("moe_comm_backend", "standard")],
    )


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(sharded_layouts(), st.sampled_from((LLAMA, QWEN)))
def test_any_layout_is_the_same_after_a_configuration(layout, name):
    plan = build_plan(name, layout, Workload(seq_len=4096, global_batch=256, steps=50))
    job = plan_job(plan)
    assume(not check_legality(job) and not list(torchtitan_refusals(job, plan.hardware)))
    with pytest.MonkeyPatch.context() as monkeypatch:
        written = check_written(plan, monkeypatch)
    if layout.shard == layout.dp * layout.cp:
        layout = replace(layout, shard=0)  # all of them, as 0 says too
    assert read_layout(written, has_experts=name == QWEN) == layout


def placed(plan):
    return replace(plan, layout=replace(plan.layout, expert_placement=ExpertPlacement.BALANCED))


REFUSED = [
    (planned("ep8", name="mistralai/Mixtral-8x7B-v0.1"), "model.name", "Qwen/Qwen3-30B-A3B"),
    (planned("tp2"), "layout.zero", "3"),
    (planned("zero3,pp2", name="Qwen/Qwen3-0.6B"), "layout.pp", "1"),
    (planned("zero3,tp8,ep8", 64, "Qwen/Qwen3-235B-A22B"), "layout.tp", "4"),
    (planned("zero0,cp2,cp_comm=allgather"), "layout.zero", "3"),
    (planned("zero3,tp2,sp0"), "layout.sp", "true"),
    (planned("zero3,cp2,cp_comm=a2a"), "layout.cp_comm", "allgather"),
    (planned("zero3,pp2,ep8", 256, "deepseek-ai/DeepSeek-V3"), "model.mtp_layers", "0"),
    (planned("zero3,ep8,overlap=ep", name=QWEN), "layout.overlap", "none"),
    (planned("zero3,pp2,schedule=zb-h1"), "layout.schedule", "1f1b"),
    (planned("zero3,recompute=mlp"), "layout.recompute", "full"),
    (planned("zero3,recompute=full+loss"), "layout.recompute", "full"),
    (planned("zero3,offload=optimizer"), "layout.offload", "none"),
    (planned("zero3,tp2,overlap=tp"), "layout.overlap", "none"),
    (planned("zero3,graphs=attn"), "layout.graphs", "none"),
    (planned("zero3,ep8,dispatcher=dedup", name=QWEN), "layout.dispatcher", "alltoall"),
    (placed(planned("zero3,ep8", name=QWEN)), "layout.expert_placement", "contiguous"),
    (planned("zero3,ep8,capacity=1", name=QWEN), "layout.capacity", "0"),
    (planned("zero3,tp4,ep2", name=QWEN), "layout.ep", "4"),
    (planned("zero3,tp4,ep2,etp2", name=QWEN), "layout.etp", "1"),
    (planned("zero3", precision=Dtype.FP8), "workload.precision", "bf16"),
    (planned("zero3", loss=LossSpec(aux_coeff=0.1)), "workload.aux_coeff", "0"),
    (planned("zero3", data=DataSpec(train="x")), "data.train", "no data"),
    (
        planned("zero3", ramp=BatchRampSpec(ramp_start=16, ramp_increment=16, ramp_samples=99)),
        "workload.ramp_start",
        "0",
    ),
    (planned("zero3", optimizer=OptimizerSpec(clip_norm=0)), "workload.clip_norm", "1"),
    (
        replace(planned("zero3,ep8", name=QWEN), hardware=catalogue.hardware("8xAscend-910C")),
        "hardware.device.kind",
        "cuda",
    ),
    (
        replace(cpu_plan(), layout=parse_layout("zero0", world_size=2)),
        "hardware.device.kind",
        "cuda",
    ),
]


@pytest.mark.parametrize(
    ("options", "field", "nearest"), REFUSED, ids=[field for _, field, _ in REFUSED]
)
def test_what_torchtitan_cannot_say_is_refused_by_name(options, field, nearest):
    with pytest.raises(BadInput) as caught:
        render_torchtitan_config(options)
    reason = caught.value.reasons[0]
    assert (reason.field, reason.nearest) == (field, nearest)
    assert reason.rule.startswith("torchtitan ")
    points = "--runs-on torchtitan" in caught.value.reasons[-1].rule
    fields = [reason.field for reason in caught.value.reasons]
    assert points == all(field.startswith("layout.") for field in fields)


def test_which_trainers_start_a_plan():
    everywhere = planned("zero3,ep8", name=QWEN)
    assert list_trainers(everywhere) == ("megatron", "bridge", "torchtitan", "moewright")
    assert list_trainers(planned("ep8,dispatcher=dedup", name=QWEN)) == ("moewright",)
    mixtral = planned("ep8,graphs=attn", name="mistralai/Mixtral-8x7B-v0.1")
    assert list_trainers(mixtral) == ("megatron", "moewright")
    replayed = "ep8,recompute=layernorm,graphs=moe_router"
    assert list_trainers(planned(replayed, name="mistralai/Mixtral-8x7B-v0.1")) == ("megatron",)
